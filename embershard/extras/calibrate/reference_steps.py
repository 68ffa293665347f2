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

import torch

from embershard.cache import CacheGrowthWarning
from embershard.data import Batch, BatchStream, open_source, schema_of
from embershard.distributed import Ranks, process_group
from embershard.launch.screen import silence_libraries
from embershard.models import table_name
from embershard.planning.cost import work as formulas
from embershard.planning.cost.rates import StepWork
from embershard.run_result import QUIET
from embershard.settings.decoding import decode
from embershard.sharding.config import ShardingConfig
from embershard.sharding.memory_model import slots_for
from embershard.sharding.plan import Plan, TablePlacement, pools_of
from embershard.sharding.shards import Kernel
from embershard.sharding.torchrec import cache_stats
from embershard.training.arithmetic import rank_threads
from embershard.training.config import RunConfig
from embershard.training.fit.model_size import model_size, table_rows
from embershard.training.parts.counts import ProcessorClock
from embershard.training.trainer import Trainer

_PARSE_SECONDS = 0.2
_SHOWN_SECONDS = 5.0  # at least, between two lines about progress
_COUNTED = ("unique_ids", "fills", "write_backs", "bytes_to_device", "bytes_to_host")


@dataclass(frozen=True)
class Segments:
    """The settings to time, and for how long.

    Attributes:
        settings: name -> a run's values, as in its TOML file.
        num_quiet: undisturbed segments that each setting needs.
        skip, steps: uncounted first steps of a segment (other settings ran between), and counted steps.
        seconds: time limit in all, after which no segment is repeated.
        most_seconds: after which none begins: settings that were not measured by then are left out.
        sharding: name -> sharding types of the tables in turn, where not all are "table_wise".
        resident: names of those whose tables have no caches, by their plan.
        plans: name -> file of the plan to obey, in place of `sharding`.
    """

    settings: Mapping[str, Mapping[str, Any]]
    num_quiet: int
    skip: int
    steps: int
    seconds: float
    most_seconds: float = 300.0
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
        counts, clock = self._counts(), ProcessorClock()
        seconds = self._run(steps)
        foreign = clock.taken_by_others(self._ranks)
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


def measure(plan: Segments, ranks: Ranks) -> list[Segment]:
    """Measure all segments, settings in turn: so passing load on the machine meets all of them. Collective."""
    began, found = time.perf_counter(), list[Segment]()

    def is_late(seconds: float) -> bool:
        return ranks.from_first(lambda: time.perf_counter() > began + seconds)

    # Each is measured as soon as it is built: of what does not fit the time, the first settings are whole.
    timed, quiet, shown = dict[str, _Timed](), dict.fromkeys(plan.settings, 0), began
    for turn in range(sys.maxsize):
        waiting = [name for name in plan.settings if quiet[name] < plan.num_quiet]
        if not waiting or (turn >= plan.num_quiet and is_late(plan.seconds)) or is_late(plan.most_seconds):
            break
        for number, name in enumerate(waiting):
            if is_late(plan.most_seconds):
                break
            if name not in timed:
                timed[name] = _Timed(name, plan, ranks)
            found.append(timed[name].measure(plan.skip, plan.steps))
            quiet[name] += found[-1].foreign <= QUIET
            if ranks.is_first and time.perf_counter() > shown + _SHOWN_SECONDS:
                shown = time.perf_counter()
                _show_progress(turn, number, len(waiting), found[-1])
    for each in timed.values():
        each.close()
    return found


def _show_progress(turn: int, number: int, waiting: int, segment: Segment) -> None:
    print(
        f"Round {turn + 1}, {number + 1} of {waiting} settings ({segment.setting}): {segment.step_seconds * 1e3:.1f} "
        f"ms a step, other programs took {segment.foreign:.0%} of the processor time",
        file=sys.stderr,
        flush=True,
    )


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
