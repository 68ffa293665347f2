"""The program of a calibration's ranks: times a few steps of several settings in turn, and counts their work."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from embershard.cache import CacheGrowthWarning
from embershard.data import Batch, BatchStream, open_source, schema_of
from embershard.distributed import Ranks, process_group
from embershard.launch.screen import silence_libraries
from embershard.models import table_name
from embershard.planning.cost import work as formulas
from embershard.planning.cost.rates import StepWork
from embershard.settings.decoding import decode
from embershard.sharding.config import ShardingConfig
from embershard.sharding.memory_model import slots_for
from embershard.sharding.plan import Plan, TablePlacement, pools_of
from embershard.sharding.shards import Kernel
from embershard.sharding.torchrec import cache_stats
from embershard.training.arithmetic import rank_threads
from embershard.training.config import RunConfig
from embershard.training.fit.model_size import model_size, table_rows
from embershard.training.trainer import Trainer

#: A segment counts as quiet while other programs take no more than this share of the machine's processor time.
QUIET = 0.1
_PARSE_SECONDS = 0.2
_COUNTED = ("unique_ids", "fills", "write_backs", "bytes_to_device", "bytes_to_host")


@dataclass(frozen=True)
class Segments:
    """The settings to time, and for how long.

    Attributes:
        settings: name -> a run's values, as in its TOML file.
        num_quiet: undisturbed segments that each setting needs.
        skip, steps: uncounted first steps of a segment (other settings ran between), and counted steps.
        seconds: time limit in all, after which no segment is repeated.
        sharding: name -> sharding types of the tables in turn, where not all are "table_wise".
        resident: names of those whose tables have no caches, by their plan.
        plans: name -> file of the plan to obey, in place of `sharding`.
    """

    settings: Mapping[str, Mapping[str, Any]]
    num_quiet: int
    skip: int
    steps: int
    seconds: float
    sharding: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    resident: Sequence[str] = ()
    plans: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """One measurement of a setting.

    Attributes:
        step_seconds: median of the steps.
        work: mean over the ranks, per step.
        foreign: share of the machine's processor time that other programs took; of several, the most.
    """

    setting: str
    step_seconds: float
    work: StepWork
    foreign: float


class _Timed:
    """The trainer of one setting on this rank."""

    def __init__(self, name: str, segments: Segments, ranks: Ranks) -> None:
        self.name, self._ranks = name, ranks
        config, plan = decode(RunConfig, segments.settings[name]), segments.plans.get(name)
        self._input_seconds = ranks.from_first(lambda: _input_seconds(config))
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "plan.json"
            if ranks.is_first and plan is None:
                types = segments.sharding.get(name, ("table_wise",))
                kernel: Kernel = "device" if name in segments.resident else "cached"
                simple_plan(config, types, ranks.world_size, kernel).save(made)
            train = dataclasses.replace(config.train, accumulate=1)
            self._config = dataclasses.replace(config, sharding=ShardingConfig(plan=plan or str(made)), train=train)
            self._trainer = Trainer(self._config, ranks)
            ranks.barrier()
        self._counts_distinct = config.sharding.exchange == "rows" and ranks.world_size > 1
        self._lookups: Counter[str] = Counter()
        self._distinct: Counter[str] = Counter()
        self._run(1)

    def measure(self, skip: int, steps: int) -> Segment:
        """Time one segment, in the threads of a run with these settings. Collective."""
        torch.set_num_threads(rank_threads(self._config, self._ranks).count)
        self._run(skip)
        self._lookups.clear()
        self._distinct.clear()
        counts, clock = self._counts(), _Clock()
        seconds = self._run(steps)
        foreign = clock.foreign(self._ranks)
        per_step = {name: (now - counts[name]) / steps for name, now in self._counts().items()}
        mean = StepWork.mean(self._ranks.all_gather_objects(self._work(steps, per_step)))
        return Segment(self.name, median(seconds), mean, foreign)

    def close(self) -> None:
        """End the trainer's threads."""
        self._trainer.close()

    def _run(self, steps: int) -> list[float]:
        seconds = []
        for _ in range(steps):
            began = time.perf_counter()
            with self._trainer.upcoming.next() as batch:
                assert isinstance(batch, Batch), "no accumulation"
                self._trainer.step(batch)
            seconds.append(time.perf_counter() - began)
            features = batch.sparse_features
            self._lookups.update(dict(zip(features.keys(), features.length_per_key(), strict=True)))
            if self._counts_distinct:
                self._distinct.update({key: features[key].values().unique().numel() for key in list(features.keys())})
        return seconds

    def _counts(self) -> dict[str, int]:
        tables = cache_stats(self._trainer.model)
        counters = {name: sum(getattr(table, name) for table in tables) for name in _COUNTED}
        return {"planned_ids": sum(table.lookups for table in tables), **counters}

    def _work(self, steps: int, counted: Mapping[str, float]) -> StepWork:
        world_size = self._ranks.world_size
        batch_size = self._config.train.rank_batch_size(world_size)
        model = model_size(self._config, table_rows(self._config))
        sizes = {table.table: table for table in model.tables}
        params = {name: param for plan in self._trainer.model.plan.plan.values() for name, param in plan.items()}
        num_groups = len({param.sharding_type for param in params.values()} - {"data_parallel"})
        ids = {table_name(key): count / steps / batch_size for key, count in self._lookups.items()}
        distinct = {table_name(key): count / steps for key, count in self._distinct.items()}
        embedding_bytes, sent = 0.0, Counter[str]()
        for name, param in params.items():
            shards = param.sharding_spec.shards if param.sharding_spec else []
            rank_share = 1 / len({shard.shard_offsets[0] for shard in shards} or [0])
            ids_per_sample = ids.get(name, 0.0)
            for shard in shards:
                if shard.placement.rank() != self._ranks.rank:
                    continue
                columns = shard.shard_sizes[1]
                num_ids = distinct.get(name, ids_per_sample * batch_size) * rank_share * world_size
                embedding_bytes += formulas.embedding_bytes(num_ids, sizes[name], columns)
                of_shard = formulas.exchanged_bytes(
                    param.sharding_type,
                    batch_size=batch_size,
                    world_size=world_size,
                    ids_per_sample=ids_per_sample,
                    columns=columns,
                    rank_share=rank_share,
                    distinct_ids=distinct.get(name),
                )
                sent.update(dataclasses.asdict(of_shard.in_all))
        return StepWork(
            dense_flops=model.dense_flops_per_sample * batch_size,
            activation_bytes=model.activation_bytes_per_sample * batch_size,
            update_bytes=model.dense_parameter_bytes,
            embedding_bytes=embedding_bytes,
            row_ids=sum(ids[name] for name in distinct) * batch_size,
            sent_id_bytes=sent["ids"] + formulas.sizes_bytes(num_groups, world_size),
            sent_embedding_bytes=sent["embeddings"],
            sent_gradient_bytes=sent["gradients"],
            all_reduce_bytes=formulas.all_reduce_bytes(model.dense_parameter_bytes, world_size),
            num_collectives=formulas.num_collectives(num_groups, world_size),
            input_seconds=self._input_seconds,
            **counted,
        )


def simple_plan(config: RunConfig, types: Sequence[str], world_size: int, kernel: Kernel = "cached") -> Plan:
    """Return a plan with tables sharded in these ways in turn (table-wise: in turn over the ranks, too; column-wise: in
    two halves) and the config's share of slots."""
    in_turn = sorted(schema_of(config.data).sparse, key=lambda feature: -feature.num_rows)
    tables = [
        TablePlacement(
            table=table_name(feature.name),
            rows=feature.num_rows,
            dim=config.model.embedding_dim,
            dtype=config.model.table_dtype,
            sharding=sharding,  # type: ignore[arg-type]
            kernel=kernel,
            ranks=tuple(range(world_size))
            if sharding == "row_wise"
            else tuple((turn // len(types) + shard) % world_size for shard in range(1 + (sharding == "column_wise"))),
            exchange="rows" if config.sharding.exchange == "rows" and world_size > 1 else "pooled",
        )
        for turn, feature in enumerate(in_turn)
        for sharding in [types[turn % len(types)]]
    ]
    ratio = config.cache.slot_ratio or 1.0
    return Plan(
        world_size=world_size,
        ranks_per_node=world_size,
        batch_size=config.train.rank_batch_size(world_size),
        device="cpu",
        device_memory_bytes=None,
        host_memory_bytes=None,
        settings={},
        tables=tuple(tables),
        pools=tuple(pool.with_slots(slots_for(pool.rows, ratio * pool.rows)) for pool in pools_of(tables, world_size)),
    )


def _input_seconds(config: RunConfig) -> float:
    """Return one core's seconds to read and parse a batch."""
    data = dataclasses.replace(config.data, num_workers=0)
    with BatchStream(
        open_source(data),
        batch_size=config.train.rank_batch_size(1),
        rank=0,
        world_size=1,
        split="train",
        epochs=None,
        config=data,
    ) as stream:
        next(stream)
        began, batches = time.thread_time(), 0
        while time.thread_time() - began < _PARSE_SECONDS:
            next(stream)
            batches += 1
        return (time.thread_time() - began) / batches


class _Clock:
    """Measures the processor time of this machine and of these ranks, from now on."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), _busy_seconds(), time.process_time()

    def foreign(self, ranks: Ranks) -> float:
        """Return the share that other programs took until now, the same on all ranks. Collective."""
        now = time.perf_counter(), _busy_seconds(), time.process_time()
        wall, busy, own = (after - before for after, before in zip(now, self._began, strict=True))
        of_all = sum(ranks.all_gather_objects(own))
        share: float = ranks.from_first(lambda: (busy - of_all) / (wall * (psutil.cpu_count() or 1)))
        return max(0.0, share)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "system", "nice", "irq", "softirq", "steal")))


def measure(plan: Segments, ranks: Ranks) -> list[Segment]:
    """Measure all segments, settings in turn: so passing load on the machine meets all of them. Collective."""
    ends = time.perf_counter() + plan.seconds
    timed = [_Timed(name, plan, ranks) for name in plan.settings]
    found: list[Segment] = []
    quiet = dict.fromkeys(plan.settings, 0)
    for turn in range(sys.maxsize):
        waiting = [each for each in timed if quiet[each.name] < plan.num_quiet]
        is_late = ranks.from_first(lambda: time.perf_counter() > ends)
        if not waiting or (turn >= plan.num_quiet and is_late):
            break
        for each in waiting:
            found.append(each.measure(plan.skip, plan.steps))
            quiet[each.name] += found[-1].foreign <= QUIET
    for each in timed:
        each.close()
    return found


def main(argv: Sequence[str]) -> None:
    """Run `python -m embershard.extras.calibrate.reference_steps PLAN RESULT`: paths of JSON files."""
    silence_libraries()
    warnings.filterwarnings("ignore", category=CacheGrowthWarning)  # slots are what is varied here
    plan = Segments(**json.loads(Path(argv[0]).read_text(encoding="utf-8")))
    with process_group("cpu") as ranks:
        found = measure(plan, ranks)
        if ranks.is_first:
            Path(argv[1]).write_text(json.dumps([dataclasses.asdict(each) for each in found]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
