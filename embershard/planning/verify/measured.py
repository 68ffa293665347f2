"""A run's counts per step, as values: the part of its result that predictions are compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from embershard.distributed.sent_bytes import SentBytes
from embershard.run_result import CacheTotals, RankCaches, RunResult

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
    def from_result(cls, result: RunResult) -> MeasuredRun:
        """Return the counts of a run that ended."""
        milliseconds = result.step_ms.p50
        ranks = () if result.cache is None else result.cache.ranks
        return cls(
            steps=result.measured_steps,
            all_steps=result.steps,
            step_seconds=None if milliseconds is None else milliseconds / 1e3,
            is_steady=result.is_steady,
            world_size=result.world_size,
            device=result.device,
            sent_bytes=result.sent_bytes.over(result.parts),
            plan_digest=None if result.plan is None else result.plan.digest,
            ranks={rank.rank: _rank(rank, result.measured_steps) for rank in ranks},
        )

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


def _rank(caches: RankCaches, steps: int) -> MeasuredRank:
    tables = {name: _table(own, steps) for name, own in caches.tables.items()}
    return MeasuredRank(**vars(_table(caches, steps)), tables=tables)


def _table(caches: CacheTotals, steps: int) -> MeasuredTable:
    counts = {name: getattr(caches, name) / max(1, steps) for name in _COUNTS}
    rates = {"hit_rate_lookups": caches.hit_rate_lookups, "hit_rate_unique": caches.hit_rate_unique}
    return MeasuredTable({**rates, **counts}, caches.device_bytes, caches.host_bytes, caches.overflow_growths)
