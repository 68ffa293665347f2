"""Counts of what a cache did, as values that can be added."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, TypeVar

R = TypeVar("R", bound="CacheReport")


@dataclass(frozen=True)
class CacheReport:
    """Counts of what a cache did: totals, or means per step. Reports of one kind can be added and scaled.

    >>> early = CacheReport(lookups=100, unique_ids=40, hits_unique=20, hits_lookups=70, fills=20, write_backs=0)
    >>> early.hit_rate_unique, (early + early).hit_rate_lookups, (early - early.scaled(0.5)).fills
    (0.5, 0.7, 10.0)

    Attributes:
        lookups: ids of the batches.
        unique_ids: distinct ids of each batch, added up.
        hits_unique: those of `unique_ids` found on the device.
        hits_lookups: those of `lookups` found on the device.
        fills: rows copied to the device.
        write_backs: rows copied to the host.
    """

    LABELS: ClassVar[frozenset[str]] = frozenset()  # fields that say whose counts these are

    lookups: float
    unique_ids: float
    hits_unique: float
    hits_lookups: float
    fills: float
    write_backs: float

    @property
    def hit_rate_unique(self) -> float | None:
        """Share of a batch's distinct ids found on the device; None before the first."""
        return self.hits_unique / self.unique_ids if self.unique_ids else None

    @property
    def hit_rate_lookups(self) -> float | None:
        """Share of lookups found on the device; None before the first."""
        return self.hits_lookups / self.lookups if self.lookups else None

    def __add__(self: R, other: R) -> R:
        return self._with(lambda name: getattr(self, name) + getattr(other, name))

    def __sub__(self: R, other: R) -> R:
        return self._with(lambda name: getattr(self, name) - getattr(other, name))

    def scaled(self: R, factor: float) -> R:
        """Multiply every count by `factor`."""
        return self._with(lambda name: getattr(self, name) * factor)

    @staticmethod
    def total(reports: Iterable[CacheReport]) -> CacheReport:
        """Add up the counts of any reports."""
        return sum((report.counts for report in reports), CacheReport(0, 0, 0, 0, 0, 0))

    @property
    def counts(self) -> CacheReport:
        """The counts alone, without what a subclass adds."""
        return CacheReport(*(getattr(self, field.name) for field in dataclasses.fields(CacheReport)))

    def _with(self: R, value: Callable[[str], float]) -> R:
        names = [field.name for field in dataclasses.fields(self) if field.name not in self.LABELS]
        return dataclasses.replace(self, **{name: value(name) for name in names})
