"""What all ranks did, their caches and links among it: between two reports, and the totals of a run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, replace
from statistics import fmean
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import nn

from embershard.cache.file.file_counts import FileCounts
from embershard.cache.statistics import CacheReport, TableStats
from embershard.cache.totals import CacheTotals, PoolSize, RankCaches, RunCaches
from embershard.distributed import Ranks
from embershard.distributed.sent_bytes import SentBytes
from embershard.distributed.traffic import count_sent_bytes, sent_bytes
from embershard.frequency import FrequencyProfile
from embershard.machine import ProcessMemory
from embershard.metrics.predictions import Predicted, PredictionWindow
from embershard.pipeline import LookAheadStats
from embershard.run_result import LookAheadTotals, MeasuredMemory, SentTotals
from embershard.sharding.torchrec import cache_stats, copied_rows, file_counts, pools_by_module
from embershard.training.checkpoint.identity import global_batch
from embershard.training.checkpoint.saved_run import SavedRun, SettingsComparison
from embershard.training.parts.part import Part
from embershard.training.reports import EndReport, Report, TrainReport


class CacheReader:
    """Reads the counters of all ranks' caches. Its methods are collective.

    In the mode "hot_cold" the rows that every rank has count, too: each lookup of one is a hit.
    """

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        self._model, self._ranks = model, ranks
        self._last = CacheReport.total(())

    def since_last(self) -> CacheReport:
        """Report what all ranks' caches did since the last call."""
        found = CacheReport.total(cache_stats(self._model))
        hot = copied_rows(self._model)[1]
        mine = astuple(replace(found, lookups=found.lookups + hot, hits_lookups=found.hits_lookups + hot))
        counts = self._ranks.all_gather(torch.tensor(mine, device=self._ranks.device)).sum(dim=0)
        last, self._last = self._last, CacheReport(*counts.tolist())
        return self._last - last

    def totals(self, ratio: float | None) -> RunCaches | None:
        """Return what all caches did: totals, also per table and per rank, and there per table and pool. Bytes and
        lookups of hot rows are in the totals and in those of ranks, not in those of tables and pools.

        None without a cached table. Where modules have tables of one name, they are called `module.table`.

        Args:
            ratio: the configured ratio; None when a byte budget or a plan gives the size.
        """
        pools = [
            (module, set(pool.cache.tables), (pool.cache.num_slots, pool.cache.device_bytes, pool.cache.host_bytes))
            for module, pool in pools_by_module(self._model)
        ]
        gathered = self._ranks.all_gather_objects((cache_stats(self._model), pools, copied_rows(self._model)))
        tables: list[TableStats] = [table for on_rank, _, _ in gathered for table in on_rank]
        if not tables:
            return None
        num_modules = Counter(table for table, _ in {(table.table, table.module) for table in tables})

        def name_of(module: str, table: str) -> str:
            return f"{module}.{table}" if num_modules[table] > 1 else table

        by_name: dict[str, list[TableStats]] = {}
        for table in tables:
            by_name.setdefault(name_of(table.module, table.table), []).append(table)
        ranks = [
            RankCaches.of(
                shards,
                *hot,
                rank=rank,
                tables={name_of(shard.module, shard.table): CacheTotals.of([shard]) for shard in shards},
                pools=tuple(
                    PoolSize(
                        tables=tuple(sorted(name_of(module, name) for name in names)),
                        slots=slots,
                        device_bytes=device_bytes,
                        host_bytes=host_bytes,
                    )
                    for module, names, (slots, device_bytes, host_bytes) in pools
                ),
            )
            for rank, (shards, pools, hot) in enumerate(gathered)
        ]
        return RunCaches.of(
            tables,
            *(sum(of_ranks) for of_ranks in zip(*(hot for _, _, hot in gathered), strict=True)),
            ratio=ratio,
            tables={name: CacheTotals.of(shards) for name, shards in sorted(by_name.items())},
            ranks=tuple(ranks),
        )


def look_ahead_totals(
    stats: LookAheadStats | None, ranks: Ranks, files: FileCounts | None = None
) -> LookAheadTotals | None:
    """Return what look-ahead did: depths over all ranks, the most memory of a rank, the seconds of all ranks.

    None without look-ahead. `files`: what this rank read from files. Collective.
    """
    found: list[tuple[LookAheadStats | None, FileCounts | None]] = ranks.all_gather_objects((stats, files))
    per_rank = [each for each, _ in found if each is not None]
    if not per_rank:
        return None

    def over_ranks(name: str, merge: Callable[[list[Any]], Any]) -> Any:
        values = [value for each in per_rank if (value := getattr(each, name)) is not None]
        return merge(values) if values else None

    return LookAheadTotals(
        steps=per_rank[0].steps,
        lookahead_min=over_ranks("lookahead_min", min),
        lookahead_mean=over_ranks("lookahead_mean", fmean),
        prefetch_min=over_ranks("prefetch_min", min),
        prefetch_mean=over_ranks("prefetch_mean", fmean),
        prefetch_depth=per_rank[0].prefetch_depth,
        max_known_bytes=over_ranks("max_known_bytes", max),
        stall_seconds=over_ranks("stall_seconds", sum),
        uses_worker=per_rank[0].uses_worker,
        files=FileCounts.total(of_rank) if (of_rank := [each for _, each in found if each is not None]) else None,
    )


class ProcessorClock:
    """Measures what other programs take of the processor time of all ranks' machines, from now on."""

    def __init__(self) -> None:
        self._began = self._now()

    def taken_by_others(self, ranks: Ranks) -> float:
        """Return their share until now, of the machine where it is largest; the same on all ranks. Collective."""
        found: list[list[float]] = ranks.all_gather_objects((self._now() - self._began).tolist())
        shares = [0.0]
        for first in range(0, len(found), ranks.local_world_size):
            of_machine = found[first : first + ranks.local_world_size]
            in_all, busy, _ = of_machine[0]
            shares.append((busy - sum(own for *_, own in of_machine)) / max(in_all, 1e-9))
        return max(shares)

    @staticmethod
    def _now() -> NDArray[np.float64]:
        """Return seconds so far: of all cores, of those that were busy, and of this process."""
        times = psutil.cpu_times()
        busy = sum(getattr(times, name, 0.0) for name in ("user", "system", "nice", "irq", "softirq", "steal"))
        return np.array([time.perf_counter() * (psutil.cpu_count() or 1), busy, time.process_time()])


class TrafficReader:
    """Reads what all ranks have sent since it was made. Its methods are collective, and their own messages count as
    `other`."""

    def __init__(self, ranks: Ranks) -> None:
        if ranks.world_size > 1:  # one rank sends nothing, and need not pay for the counting
            count_sent_bytes()
        self._ranks = ranks
        self._first = self._last = sent_bytes()

    def since_last(self) -> SentBytes:
        """Return what all ranks sent since the last call, together."""
        now = sent_bytes()
        mine = torch.tensor(astuple(now - self._last), dtype=torch.float64, device=self._ranks.device)
        self._last = now
        return SentBytes(*self._ranks.all_gather(mine).sum(dim=0).tolist())

    def totals(self) -> SentTotals:
        """Return what all ranks sent, by kind, and each of them."""
        per_rank: list[SentBytes] = self._ranks.all_gather_objects(sent_bytes() - self._first)
        total = SentBytes(*map(sum, zip(*map(astuple, per_rank), strict=True)))
        ranks = tuple({"rank": rank, **asdict(sent)} for rank, sent in enumerate(per_rank))
        return SentTotals(**asdict(total), ranks=ranks)


class StepMetrics(Part):
    """Figures of the steps that this process trains: quality, speed, what caches and links move. They are reported
    every `train.log_every` steps, and behind the last one.

    Attributes:
        cache_reader, traffic_reader: of all ranks.
    """

    cache_reader: CacheReader
    traffic_reader: TrafficReader

    def before_build(self, profile: FrequencyProfile | None) -> None:
        self._bytes_before = ProcessMemory.read().now_bytes

    def after_build(self) -> None:
        self.cache_reader = CacheReader(self.run.model, self.run.ranks)
        self.traffic_reader = TrafficReader(self.run.ranks)
        self._processor = ProcessorClock()
        self._begin()

    def _begin(self) -> None:
        self._newest = PredictionWindow(self.run.target, self.run.ranks.world_size)
        self._num_reported = len(self.run.step_seconds)

    def read_state(self, saved: SavedRun, comparison: SettingsComparison) -> None:
        """Begin anew: forget predictions, and steps that were not reported."""
        self._begin()

    def add_predicted(self, predicted: Predicted) -> None:
        """Add what the model says of this rank's batch, or of some of its samples, without a copy to the host."""
        self._newest.add(predicted)

    def after_step(self) -> Iterator[Report]:
        if self.run.is_report_due:
            yield self.run.report()

    def at_end(self) -> Iterator[Report]:
        if len(self.run.step_seconds) > self._num_reported:
            yield self.run.report()

    def report(self) -> TrainReport:
        """Report on the steps since the last report. Collective."""
        run = self.run
        seconds = run.step_seconds[self._num_reported :]
        self._num_reported = len(run.step_seconds)
        rank_steps = len(seconds) * run.ranks.world_size
        cached = self.cache_reader.since_last()
        return TrainReport(
            step=run.steps,
            epoch=run.position.epoch,
            samples=run.samples,
            quality=self._newest.quality(run.ranks),
            samples_per_second=len(seconds) * global_batch(run.config, run.ranks.world_size) / sum(seconds),
            hit_rate_unique=cached.hit_rate_unique,
            hit_rate_lookups=cached.hit_rate_lookups,
            fills=cached.fills / rank_steps,
            write_backs=cached.write_backs / rank_steps,
            learning_rate_factor=run.optimizers.factor or 1.0,
            sent_bytes=self.traffic_reader.since_last().over(rank_steps),
            **run.of_parts(lambda part: part.report_entries()),
        )

    def result(self) -> dict[str, Any]:
        run = self.run
        has_files = run.config.cache.enabled and run.config.cache.host == "file"
        files = file_counts(run.model) if has_files else None
        return {
            "cache": self.cache_reader.totals(None if run.plan else run.config.cache.slot_ratio),
            "look_ahead": look_ahead_totals(run.upcoming.stats(), run.ranks, files),
            "sent_bytes": self.traffic_reader.totals(),
            "other_programs": self._processor.taken_by_others(run.ranks),
            "memory": tuple(run.ranks.all_gather_objects(self._memory())),
        }

    def _memory(self) -> MeasuredMemory:
        ranks = self.run.ranks
        on_gpu = torch.cuda.max_memory_allocated(ranks.device) if ranks.device.type == "cuda" else None
        host = {"host_bytes": ProcessMemory.read().most_bytes, "host_bytes_before": self._bytes_before}
        return MeasuredMemory(rank=ranks.rank, device_bytes=on_gpu, **host)

    def end(self, step: int) -> EndReport:
        """Report on what came behind the last report. Collective."""
        cached = self.cache_reader.since_last()
        return EndReport(step, int(cached.fills), int(cached.write_backs), self.traffic_reader.since_last())
