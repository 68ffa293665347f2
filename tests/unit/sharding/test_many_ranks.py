"""The trainer as a rank of 8 and of 64: what it builds and exchanges has the bytes that the plan says."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from embershard.cache import CacheConfig
from embershard.commands.plan.inputs import make_workload
from embershard.data import DataConfig
from embershard.data.config import SyntheticConfig
from embershard.distributed import Ranks
from embershard.errors import ShardingError
from embershard.frequency.config import ProfileConfig
from embershard.pipeline.pipelined_forward import sharded_modules
from embershard.planning.cost.rates import StepWork
from embershard.planning.cost.topology import load_topology
from embershard.planning.predict import predict
from embershard.planning.verify.compare import SENT_KINDS
from embershard.planning.workload import Layout
from embershard.settings.decoding import decode
from embershard.sharding.config import ShardingConfig
from embershard.sharding.memory_model import planned_slots
from embershard.sharding.plan import Plan, RankPrediction, TablePlacement, pools_of
from embershard.sharding.sharding_types import ROWS_TYPES
from embershard.sharding.torchrec import copied_rows
from embershard.sharding.torchrec.compat import lookups_of
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.modes.replicated_tables import ReplicatedTables
from embershard.sharding.torchrec.spec import CacheSpec
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.reports import TrainReport
from embershard.training.trainer import Trainer
from tests.covering import covering, matrix
from tests.ranks import planned
from tests.ranks.predicted_traffic import profile_of
from tests.unit.gpu_model.collectives import Mirror, mirrored_ranks
from tests.unit.sharding.plans import SHARDED, make_plan, ranks_for

pytestmark = pytest.mark.slow

_BATCH, _RANKS_PER_NODE, _STEPS = 4, 8, 2
_DATA = DataConfig(synthetic=SyntheticConfig(num_samples=3000, scale=0.0005), num_workers=0)
_SMALL_ROWS = CacheConfig(host_dtype="int8", full_rows=0.1)
_PROFILED = {"profile": ProfileConfig(samples=2500)}
#: Sharding types that tables have in turn, and settings.
KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "table_wise": (("table_wise",), {}),
    "row_wise": (("row_wise",), {}),
    "every type": (SHARDED, {}),
    "every kernel": (SHARDED, {}),
    "rows": (tuple(ROWS_TYPES), {"sharding": ShardingConfig(exchange="rows")}),
    "small rows": (
        ("table_wise", "column_wise"),
        {"cache": CacheConfig(host_dtype="int8", full_rows=0.1), **_PROFILED},
    ),
    "hot_cold": (SHARDED, {"sharding": ShardingConfig(mode="hot_cold", hot_bytes=3200), **_PROFILED}),
}
#: Those whose bytes between ranks do not depend on the ids.
FIXED_TRAFFIC = ("table_wise", "row_wise", "every type")
#: Those that have each type, kernel and setting once.
FEW = tuple(kind for kind in KINDS if kind not in ("table_wise", "row_wise"))
#: Numbers of ranks, and of one of them: one with a table on the device, and ones with few tables or none.
PLACES = ((8, 2), (8, 7), (64, 18), (64, 63))


def settings(kind: str, plan: Path | None = None) -> RunConfig:
    config = planned.make_config(
        None, data=_DATA, train=TrainConfig(batch_size=_BATCH, max_steps=_STEPS, device="cpu"), **KINDS[kind][1]
    )
    return (
        config
        if plan is None
        else replace(config, sharding=replace(config.sharding, exchange="pooled", plan=str(plan)))
    )


def plan_of(kind: str, world_size: int) -> Plan:
    """A plan with a prediction."""
    types, config = KINDS[kind][0], settings(kind)
    statistics = profile_of(_DATA).statistics
    assert statistics is not None
    workload = make_workload(config, statistics, world_size, ranks_per_node=_RANKS_PER_NODE, device="cpu")
    tables = []
    for number, size in enumerate(workload.model.tables):
        sharding, kernel = types[number % len(types)], "cached"
        if kind == "every kernel":
            kernel = {6: "device", 8: "device", 7: "replicated", 9: "replicated"}.get(number, "cached")
            sharding = "data_parallel" if kernel == "replicated" else sharding
        ranks = ranks_for(sharding, 3 * number, world_size, _RANKS_PER_NODE, column_shards=2)
        place: Any = size.table, size.rows, size.dim, size.dtype, sharding, kernel, ranks
        tables.append(TablePlacement(*place, exchange="rows" if kind == "rows" else "pooled"))
    rows, pools = {table.table: table.rows for table in tables}, []
    for pool in pools_of(tables, _RANKS_PER_NODE):  # a batch fits: predicted are the slots that a cache ends with
        of_batch = sum(min(rows[name], _BATCH * world_size) for name in pool.tables)
        pools.append(pool.with_slots(max(1, min(pool.rows, max(of_batch, pool.rows // 2)))))
    layout, rates = Layout(workload, tables), load_topology("cpu").rates_for(world_size)
    prediction = predict(layout, planned_slots(pools, layout.pools), rates)
    return make_plan(
        tables, world_size, _RANKS_PER_NODE, batch_size=_BATCH, pools=tuple(pools), prediction=prediction, settings={}
    )


@contextlib.contextmanager
def playing(rank: int, plan: Plan, kind: str, folder: Path) -> Iterator[Trainer]:
    """The trainer of a rank that obeys a plan."""
    plan.save(folder / "plan.json")
    local = rank % _RANKS_PER_NODE
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(), mirrored_ranks(plan.world_size, rank):
        warnings.simplefilter("ignore")
        patch.setenv("LOCAL_RANK", str(local))
        patch.setenv("LOCAL_WORLD_SIZE", str(_RANKS_PER_NODE))
        ranks = Ranks(rank, plan.world_size, local, _RANKS_PER_NODE, torch.device("cpu"))
        trainer = Trainer(settings(kind, folder / "plan.json"), ranks)
        yield trainer
        trainer.close()


def built_bytes(trainer: Trainer) -> dict[str, int]:
    """Memory of the tables on this rank. Copies have gradients in a step, which are as large as their weights."""
    found = Counter(host=0, slots_and_maps=0, device_tables=0, replicated=0, hot_rows=copied_rows(trainer.model)[0])
    for module in sharded_modules(trainer.model).values():
        for kernel in (kernel.emb_module for lookup in lookups_of(module) for kernel in lookup._emb_modules):
            if isinstance(kernel, CachedTableBatchedEmbeddings):
                found["slots_and_maps"] += kernel.cache.device_bytes
                found["host"] += sum(stats.host_bytes for stats in kernel.stats())
                continue
            weights = sum(part.nbytes for part in kernel.split_embedding_weights())
            is_copied = isinstance(kernel, ReplicatedTables)
            found["replicated" if is_copied else "device_tables"] += weights * (1 + is_copied)  # SGD has no states
    return dict(found)


def predicted_bytes(rank: RankPrediction) -> dict[str, int]:
    device = {name: int(rank.device_bytes.get(name, 0)) for name in ("device_tables", "replicated", "hot_rows")}
    slots_and_maps = rank.cache_device_bytes - device["hot_rows"]
    return {"host": rank.total_host_bytes, "slots_and_maps": slots_and_maps, **device}


@contextlib.contextmanager
def counted_bytes() -> Iterator[Counter[str]]:
    """Counts the bytes of numbers that leave this rank in the forward of each step, and that come to it in the
    backward."""
    found, is_counting = Counter[str](), False
    step, calls = Trainer.step, {name: getattr(Mirror, name) for name in _CALLS}

    def counted_step(self: Trainer, batch: Any) -> Any:
        nonlocal is_counting
        is_counting = True
        result = step(self, batch)
        is_counting = False
        return result

    def counting(name: str) -> Any:
        def call(self: Mirror, output: Any, given: Any = None, *rest: Any) -> Any:
            is_backward = torch._C._current_graph_task_id() != -1
            if is_counting and name == "allreduce":
                sums = sum(part.nbytes for part in output if part.is_floating_point())
                found["dense_all_reduce" if is_backward else "other"] += 2 * (self.size() - 1) * sums / self.size()
            elif is_counting and given.is_floating_point() and not (name == "all_gather_single" and not is_backward):
                whole, other = (output, given) if is_backward else (given, output)
                kept = other.nbytes if "to" not in name else _own_bytes(self, whole, rest[not is_backward])
                found["gradients" if is_backward else "embeddings"] += whole.nbytes - kept
            return calls[name](self, output, given, *rest)

        return call

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Trainer, "step", counted_step))
        for name in _CALLS:
            stack.enter_context(mock.patch.object(Mirror, name, counting(name)))
        yield found


_CALLS = ("all_to_all_single", "alltoall_base", "reduce_scatter_single", "all_gather_single", "allreduce")


def _own_bytes(group: Mirror, whole: Tensor, sizes: Sequence[int]) -> int:
    parts = whole.split(list(sizes) or [len(whole) // group.size()] * group.size())
    return parts[group.rank()].nbytes


def different(plan: Plan, rank: int, kind: str, folder: Path) -> list[str]:
    """Train as a rank of the plan; return where bytes are not those of its prediction."""
    assert plan.prediction is not None
    predicted = plan.prediction.ranks[rank]
    with playing(rank, plan, kind, folder) as trainer, counted_bytes() as moved:
        built, planned_bytes = built_bytes(trainer), predicted_bytes(predicted)
        if 0.9 * planned_bytes["hot_rows"] < built["hot_rows"] <= planned_bytes["hot_rows"]:  # a budget for whole rows
            del built["hot_rows"], planned_bytes["hot_rows"]
        if kind != "hot_cold":  # whose ranks each look at a part of the samples: these at one part
            assert sum(isinstance(report, TrainReport) for report in trainer.train()) == 1
    pairs = [(built, planned_bytes)]
    if kind in FIXED_TRAFFIC:
        work, step = decode(StepWork, predicted.work), {kind: num_bytes / _STEPS for kind, num_bytes in moved.items()}
        told = {sent: sum(getattr(work, name) for name in names) for sent, names in SENT_KINDS.items() if sent != "ids"}
        pairs.append(({name: step.get(name, 0) for name in told}, told))
    return [
        f"{name}: {found[name]}, planned: {wanted[name]}"
        for found, wanted in pairs
        for name in wanted
        if found[name] != wanted[name]
    ]


@pytest.mark.parametrize(
    ("kind", "place"),
    covering(FEW, PLACES) + [matrix(kind, place) for kind in KINDS if kind not in FEW for place in PLACES],
)
def test_a_rank_has_and_exchanges_what_the_plan_says(kind: str, place: tuple[int, int], tmp_path: Path) -> None:
    world_size, rank = place
    assert different(plan_of(kind, world_size), rank, kind, tmp_path) == []


def test_other_sizes_are_noticed(tmp_path: Path) -> None:
    """Of a pool in the plan or in its prediction, and of what travels."""
    plan = plan_of("row_wise", 8)
    assert plan.prediction is not None
    pool = next(pool for pool in plan.pools if pool.rank == 2)
    fewer = replace(plan, pools=tuple(replace(p, slots=p.slots - 1) if p is pool else p for p in plan.pools))
    assert [said.partition(":")[0] for said in different(fewer, 2, "row_wise", tmp_path)] == ["slots_and_maps"]
    ranks = list(plan.prediction.ranks)
    ranks[2] = replace(ranks[2], work={**ranks[2].work, "sent_embedding_bytes": 1.0})
    other = replace(plan, prediction=replace(plan.prediction, ranks=tuple(ranks)))
    assert [said.partition(":")[0] for said in different(other, 2, "row_wise", tmp_path)] == ["embeddings"]


def test_another_build_is_refused(tmp_path: Path) -> None:
    plan = plan_of("row_wise", 64)
    num_slots = CacheSpec.num_slots
    with (
        mock.patch.object(CacheSpec, "num_slots", lambda self, *args: num_slots(self, *args) - 1),
        pytest.raises(ShardingError, match="rank 18 is not built as planned"),
        playing(18, plan, "row_wise", tmp_path),
    ):
        pass
