"""A run's counts, as values: the part of result.json that predictions are compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from embershard.distributed.traffic import SentBytes
from embershard.errors import ShardingError

_COUNTS = ("lookups", "unique_ids", "fills", "write_backs", "bytes_to_device", "bytes_to_host")


@dataclass(frozen=True)
class MeasuredTable:
    """One table's cache on one rank.

    Attributes:
        per_step: "lookups", "unique_ids", "fills", "write_backs", "bytes_to_device", "bytes_to_host", per step; and
            "hit_rate_lookups", "hit_rate_unique", shares or None.
        device_bytes, host_bytes: at the end of the run.
        growths: times that the cache grew for a batch that did not fit.
    """

    per_step: Mapping[str, float | None]
    device_bytes: int
    host_bytes: int
    growths: int


@dataclass(frozen=True)
class MeasuredRank(MeasuredTable):
    """All caches of one rank."""

    tables: Mapping[str, MeasuredTable]


@dataclass(frozen=True)
class MeasuredRun:
    """A run.

    Attributes:
        steps: counted steps, since the last resume.
        all_steps: steps of the whole run.
        step_seconds: median; None where no step was timed.
        is_steady: False where the run was so short that steps with nothing left to read ahead count in the median.
        world_size: number of ranks.
        device: "cpu" or "cuda".
        sent_bytes: of one rank in one step, on average.
        plan_digest: digest of the plan that the run obeyed; None: it had none.
        ranks: by number; empty in a run without caches.
    """

    steps: int
    all_steps: int
    step_seconds: float | None
    is_steady: bool
    world_size: int
    device: str
    sent_bytes: SentBytes
    plan_digest: str | None
    ranks: Mapping[int, MeasuredRank]

    @classmethod
    def from_result(cls, result: Mapping[str, Any]) -> MeasuredRun:
        """Read the contents of result.json.

        Raises:
            ShardingError: something is missing or of another type.
        """
        try:
            steps = result["measured_steps"]
            milliseconds = result["step_ms"]["p50"]
            ranks = [] if result["cache"] is None else result["cache"]["ranks"]
            return cls(
                steps=int(steps),
                all_steps=int(result["steps"]),
                step_seconds=None if milliseconds is None else milliseconds / 1e3,
                is_steady=bool(result["is_steady"]),
                world_size=int(result["world_size"]),
                device=str(result["device"]),
                sent_bytes=_sent(result["sent_bytes"], int(steps) * int(result["world_size"])),
                plan_digest=None if result["plan"] is None else str(result["plan"]["digest"]),
                ranks={int(values["rank"]): _rank(values, steps) for values in ranks},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else f"is malformed ({error})"
            raise ShardingError(
                f"the run's result {what}; needed is one that this version wrote. Train again, into another folder."
            ) from error

    @property
    def growths(self) -> int:
        """Growths of all caches."""
        return sum(rank.growths for rank in self.ranks.values())

    def rank(self, rank: int) -> MeasuredRank | None:
        """Return the caches of a rank; None in a run without caches."""
        return self.ranks.get(rank)

    def table(self, rank: int, table: str) -> MeasuredTable | None:
        """Return a table's cache on a rank; None where it has none."""
        found = self.ranks.get(rank)
        return None if found is None else found.tables.get(table)


def _sent(values: Mapping[str, Any], num_parts: int) -> SentBytes:
    kinds = {field.name: float(values[field.name]) for field in dataclasses.fields(SentBytes)}
    return SentBytes(**kinds).over(max(1, num_parts))


def _rank(values: Mapping[str, Any], steps: int) -> MeasuredRank:
    tables = {name: _table(own, steps) for name, own in values["tables"].items()}
    return MeasuredRank(**vars(_table(values, steps)), tables=tables)


def _table(values: Mapping[str, Any], steps: int) -> MeasuredTable:
    rates = {name: values[name] for name in ("hit_rate_lookups", "hit_rate_unique")}
    return MeasuredTable(
        per_step={**rates, **{name: values[name] / max(1, steps) for name in _COUNTS}},
        device_bytes=int(values["device_bytes"]),
        host_bytes=int(values["host_bytes"]),
        growths=int(values["overflow_growths"]),
    )
