"""Groups of ranks with caches train what stock TorchRec's `DMPCollection` trains, bit for bit; and what each part is
for: without it, the same comparison fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embershard import IdTable, flush, load_program, save_program
from embershard.cache.rows.moves import RowMoves
from embershard.errors import ConfigError, ShardingError
from embershard.extras.groups import row_sync
from embershard.extras.groups.groups import Groups
from embershard.extras.groups.synced_rows import PoolRows
from embershard.sharding.torchrec import cached_embeddings
from tests.covering import matrix
from tests.ranks import groups
from tests.ranks.groups import Outcome, group_case
from tests.ranks.workers import RankPool
from tests.unit.distributed.test_blocks import stock_loaded

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.extra]

OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
SHARDINGS = ("table_wise", "row_wise", "column_wise")
FURTHER = ("table_column_wise", "table_row_wise", "grid_shard")


@pytest.fixture(scope="module")
def three_ranks() -> Iterator[RankPool]:
    """A gloo group of three processes."""
    pool = RankPool(3)
    yield pool
    pool.close()


def check(found: list[Outcome], least_evictions: int) -> None:
    assert [each.different for each in found] == [[]] * len(found)
    assert min(each.num_compared for each in found) > 1
    assert sum(each.evictions for each in found) >= least_evictions


def settings(sharding: str, optimizer: str, lookahead: int, **more: Any) -> groups.Case:
    dims = (16,) * 4 if sharding == "column_wise" else (8,) * 4  # cut into four columns at least
    policy = "lookahead" if lookahead else "lfu"
    return group_case(sharding=sharding, optimizer=optimizer, policy=policy, dims=dims, **more)


FEW = [
    pytest.param("table_wise", "rowwise_adagrad", 1, 0, None, marks=pytest.mark.smoke),
    pytest.param("row_wise", "adagrad", 3, 8, True, marks=pytest.mark.smoke),
]


@pytest.mark.parametrize(
    ("sharding", "optimizer", "every", "lookahead", "worker"),
    FEW
    + [
        matrix(sharding, optimizer, every, lookahead, worker)
        for sharding in SHARDINGS
        for optimizer in OPTIMIZERS
        for every, lookahead, worker in ((1, 0, None), (1, 8, True), (3, 0, None), (3, 8, False), (10, 8, True))
    ],
)
def test_two_groups_of_two_ranks_train_what_stock_trains(
    four_ranks: RankPool, sharding: str, optimizer: str, every: int, lookahead: int, worker: bool | None
):
    case = settings(sharding, optimizer, lookahead)
    check(four_ranks.run(groups.compare, case, 2, every, lookahead, worker), 1000)


@pytest.mark.matrix
@pytest.mark.parametrize("sharding", FURTHER)
def test_every_sharding_type_trains_what_stock_trains(four_ranks: RankPool, sharding: str):
    case = group_case(sharding=sharding, dims=(16,) * 4, policy="lookahead")
    check(four_ranks.run(groups.compare, case, 2, 3, 8), 1000)


@pytest.mark.matrix
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_thousands_of_evictions_change_nothing(four_ranks: RankPool, sharding: str, optimizer: str):
    case = settings(sharding, optimizer, 8, steps=40, ratio=0.1, rows=(3000, 500, 2000, 333))
    check(four_ranks.run(groups.compare, case, 2, 3, 8), 12_000)


@pytest.mark.parametrize(
    ("sharding", "optimizer", "every", "lookahead"),
    [
        pytest.param("table_wise", "sgd", 3, 8, marks=pytest.mark.smoke),
        *(
            matrix("row_wise", optimizer, every, ahead)
            for optimizer in OPTIMIZERS
            for every, ahead in ((1, 0), (10, 8))
        ),
    ],
)
def test_two_groups_of_one_rank_train_what_stock_trains(
    two_ranks: RankPool, sharding: str, optimizer: str, every: int, lookahead: int
):
    check(two_ranks.run(groups.compare, settings(sharding, optimizer, lookahead), 2, every, lookahead), 500)


def test_wire_types_within_groups_train_what_stock_trains(four_ranks: RankPool):
    """Both sides send rows in 8 bits inside of a group; averages are of whole rows."""
    case = settings("row_wise", "rowwise_adagrad", 8, comm=("int8", "fp8"))
    check(four_ranks.run(groups.compare, case, 2, 3, 8), 1000)


@pytest.mark.parametrize(
    ("optimizer", "every", "lookahead"),
    [("rowwise_adagrad", 1, 0), *(matrix(optimizer, 3, 8) for optimizer in OPTIMIZERS)],
)
def test_three_groups_add_in_rank_order_and_leave_equal_copies_alone(
    three_ranks: RankPool, optimizer: str, every: int, lookahead: int
):
    case = settings("table_wise", optimizer, lookahead)
    check(three_ranks.run(groups.compare, case, 3, every, lookahead, None, True), 500)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"cached": (0, 2)}, id="two tables without a cache"),
        matrix({"sharding": ("table_wise", "row_wise", "column_wise", "data_parallel"), "dims": (16,) * 4}),
        matrix({"sequence": True}),
        matrix({"shared": True, "mean": True}),
        matrix({"fp16": (0, 1)}),
    ],
)
@pytest.mark.parametrize("every", [3])
def test_other_tables_of_a_model_train_what_stock_trains(two_ranks: RankPool, changes: dict[str, Any], every: int):
    check(two_ranks.run(groups.compare, group_case(**changes), 2, every), 100)


def test_a_model_without_a_cache_trains_what_stock_trains(two_ranks: RankPool):
    found = two_ranks.run(groups.compare, group_case(), 2, 3, 0, None, False, False)
    check(found, 0)
    assert all(each.counts.rows for each in found)


@pytest.mark.parametrize("sharding", ["table_wise", *map(matrix, ("row_wise", "column_wise"))])
def test_rows_in_a_file_train_what_stock_trains(two_ranks: RankPool, sharding: str, tmp_path: Path):
    in_file = {"host_dir": str(tmp_path), "host_bytes": 120_000 if sharding == "column_wise" else 70_000, "ratio": 0.12}
    case = settings(sharding, "rowwise_adagrad", 8, **in_file)
    check(two_ranks.run(groups.compare, case, 2, 3, 8), 1000)


@pytest.mark.parametrize(
    ("host_dtype", "sharding"), [("int8", "row_wise"), matrix("fp16", "table_wise"), matrix("int8", "column_wise")]
)
def test_small_rows_are_rounded_behind_each_average(four_ranks: RankPool, host_dtype: str, sharding: str):
    full = 0.05 if host_dtype == "int8" else None
    case = settings(sharding, "rowwise_adagrad", 8, host_dtype=host_dtype, full_rows=full, profile=True)
    for different, evictions, num_rounded in four_ranks.run(groups.compare_small, case, 3):
        assert different == []
        assert evictions > 300
        assert num_rounded > 500


@pytest.mark.parametrize("exchange", ["rows"])
def test_rows_that_travel_once_train_what_stock_trains(four_ranks: RankPool, exchange: str):
    case = group_case(exchange=exchange, dyadic=True, optimizer="sgd", sharding="table_wise")
    check(four_ranks.run(groups.compare, case, 2, 3, 0), 1000)


def refused(given: dict[str, Any]) -> str:
    """What a model says of sharders with these arguments, before it has a table."""
    from embershard import CachedEmbeddingBagCollectionSharder

    model = groups.look_ahead.Model(group_case())
    sharders = [CachedEmbeddingBagCollectionSharder(init_seed=3, **given)]
    plan = groups.parity.plan_of(group_case(), True, model, sharders, 1)
    with groups.envs_are_kept():
        return groups.look_ahead.message_of(
            lambda: groups.GroupedModelParallel(model, 2, plan, sharders, torch.device("cpu"))
        )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"ids": {"t0": IdTable(buckets=8)}}, "or are of other ids in each group"),
        matrix({"hot_rows": {"t0": torch.tensor([1])}}, "rows have copies on all ranks already"),
    ],
)
def test_modes_whose_rows_have_no_replicas_are_refused(two_ranks: RankPool, given: dict[str, Any], why: str):
    assert all(why in message for message in two_ranks.run(refused, given))


# -- what each part is for


def _slots_as_they_were() -> AbstractContextManager[Any]:
    return mock.patch.object(RowMoves, "refill")


def _host_rows_as_they_were() -> AbstractContextManager[Any]:
    """Slots alone get the mean; rows without a slot, and those that leave before they train, have another one."""

    def replace(self: RowMoves, keys: Tensor, rows: Any) -> None:
        slots = self._map.lookup(keys)
        for part, values in zip(self._copies._payload, rows, strict=True):
            part.data[slots[slots > 0]] = values[slots > 0]

    return mock.patch.object(RowMoves, "replace", replace)


def _keys_of_the_first_replica() -> AbstractContextManager[Any]:
    def union(own: Any, group: Any, device: Any) -> list[Tensor]:
        told = [list(own)]
        dist.broadcast_object_list(told, group=group, group_src=0)
        return told[0]

    return mock.patch.object(row_sync, "union_of_keys", union)


def _marks_that_another_reader_takes() -> AbstractContextManager[Any]:
    take = PoolRows.take

    def taken(self: PoolRows) -> Tensor:
        self._marks.take()  # a publication's cut, of the same marks
        return take(self)

    return mock.patch.object(PoolRows, "take", taken)


CONTROLS = {
    "slots are not refreshed": _slots_as_they_were,
    "host rows are not written": _host_rows_as_they_were,
    "keys of one replica": _keys_of_the_first_replica,
    "marks are taken by another reader": _marks_that_another_reader_takes,
}


def compare_broken(control: str, case: groups.Case) -> Outcome:
    """With a part of the average left out."""
    with CONTROLS[control]():
        return groups.compare(case, 2, 3, 0)


@pytest.mark.parametrize("control", [next(iter(CONTROLS)), *map(matrix, list(CONTROLS)[1:])])
def test_without_a_part_of_the_average_the_comparison_fails(two_ranks: RankPool, control: str):
    found = two_ranks.run(compare_broken, control, group_case())
    assert all(len(each.different) > 3 for each in found)


def compare_with_all_rows_averaged(is_careful: bool) -> Outcome:
    """As if any row may be averaged; with a mean that leaves equal copies alone, or one that does not."""

    def plain(copies: Tensor) -> Tensor:
        total = copies[0].clone()
        for other in copies[1:]:
            total += other
        return total / len(copies)

    def every_row(self: PoolRows) -> Tensor:
        self._marks.take()
        return torch.arange(self.num_rows)

    broken = nullcontext() if is_careful else mock.patch.object(row_sync, "mean_of", plain)
    with mock.patch.object(PoolRows, "take", every_row), broken:
        return groups.compare(group_case(), 3, 3, 0, None, True)


@pytest.mark.matrix
def test_three_equal_copies_of_an_untouched_row_must_not_be_averaged(three_ranks: RankPool):
    assert all(each.different for each in three_ranks.run(compare_with_all_rows_averaged, False))
    check(three_ranks.run(compare_with_all_rows_averaged, True), 100)


# -- what the design found to be traps


def pools_of_budget() -> tuple[list[int], list[str]]:
    """Slots and messages' names of pools whose size is a number of bytes."""
    from embershard import CacheConfig

    with mock.patch.object(
        groups.parity, "CacheConfig", lambda **given: CacheConfig(**{**given, "ratio": None, "device_bytes": 60_000})
    ):
        model = groups.build_ours(dataclasses.replace(group_case(), policy="lru"), 2, 1)
    return [pool.cache.num_slots for pool in cached_embeddings(model)], [
        pool.cache.name for pool in cached_embeddings(model)
    ]


def test_a_budget_of_bytes_gives_replicas_equal_caches(four_ranks: RankPool):
    found = four_ranks.run(pools_of_budget)
    assert found[0][0] == found[2][0]
    assert found[1][0] == found[3][0]
    assert min(found[0][0]) > 20
    assert [names[0].split(",")[0] for _, names in found] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def start_without_a_seed() -> tuple[bool, bool]:
    """Are rows equal on both replicas: before groups average, and when the model is there?"""
    found = []

    def equal(rows: list[Any]) -> bool:
        own = [each.start for each in rows]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        return all(other == own for other in every)

    begin = row_sync.RowSync._begin

    def watched(self: Any) -> None:
        found.append(equal(self._rows))
        begin(self)
        found.append(equal(self._rows))

    with mock.patch.object(row_sync.RowSync, "_begin", watched):
        torch.manual_seed(dist.get_rank())
        case = group_case(init_seed=None, ratio=0.3, cached=(0, 1))
        with mock.patch.object(torch, "manual_seed"):
            groups.build_ours(case, 2, 1)
    return found[0], found[1]


def test_rows_that_begin_otherwise_are_averaged_once(two_ranks: RankPool):
    assert two_ranks.run(start_without_a_seed) == [(False, True)] * 2


def message_of_other_plans() -> str:
    """What a model says whose groups shard tables otherwise."""
    case = group_case(sharding="table_wise" if dist.get_rank() < 2 else "row_wise")
    try:
        groups.build_ours(case, 2, 1)
    except ShardingError as error:
        return str(error)
    return ""


def test_other_plans_on_the_groups_are_refused(four_ranks: RankPool):
    messages = four_ranks.run(message_of_other_plans)
    assert all("groups 0 and 1 are sharded otherwise" in message for message in messages), messages


def message_of_stock() -> str:
    """What `DMPCollection` says of our sharders."""
    model = groups.look_ahead.Model(group_case())
    sharders = groups.parity.sharders_of(group_case(), cached=True)
    plan = groups.parity.plan_of(group_case(), True, model, sharders, 1)
    try:
        groups.stock_collection()(
            model, torch.device("cpu"), plan, 2, 1, dist.group.WORLD, sharders=sharders, use_inter_host_allreduce=True
        )
    except ShardingError as error:
        return str(error)
    return ""


def test_stock_s_average_of_slots_is_refused(two_ranks: RankPool):
    for message in two_ranks.run(message_of_stock):
        assert "GroupedModelParallel" in message
        assert "the same slot of two caches has different rows" in message


def traffic(sync_every: int) -> tuple[float, Any]:
    """Bytes that this rank sent in the averages of a training, and what they count."""
    from embershard.distributed.traffic import count_sent_bytes, sent_bytes

    count_sent_bytes()
    model, sent = groups.build_ours(group_case(dims=(32,) * 4), 2, sync_every), 0.0
    average = row_sync.RowSync._average

    def counted(self: Any, *own: Any) -> None:
        nonlocal sent
        before = sent_bytes()
        average(self, *own)
        sent += (sent_bytes() - before).sync

    with mock.patch.object(row_sync.RowSync, "_average", counted):
        groups.train_ours(model, group_case(dims=(32,) * 4))
    return sent, model.sync_counts


def test_an_average_sends_the_trained_rows_and_their_keys(two_ranks: RankPool):
    for sent, counts in two_ranks.run(traffic, 3):
        assert counts.row_bytes <= sent <= 1.05 * counts.row_bytes + 2 * counts.key_bytes
        assert counts.key_bytes < 0.05 * counts.row_bytes


def ranks_of_routes() -> list[int]:
    """Ranks among which ids and embeddings travel, by `Route` of a pipeline, and by TorchRec."""
    from embershard.sharding.torchrec.modes import routes

    found = set()
    start = routes.Route.start

    def watched(self: Any, *given: Any) -> Any:
        found.update(dist.get_process_group_ranks(self.group))
        return start(self, *given)

    with mock.patch.object(routes.Route, "start", watched):
        groups.train_ours(groups.build_ours(group_case(policy="lookahead"), 2, 3), group_case(policy="lookahead"), 4)
    return sorted(found)


COLLECTIVES = ("all_to_all_single", "all_to_all", "reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base")


def ranks_of_torchrec(sharding: str) -> list[int]:
    """Ranks among which TorchRec sends ids, embeddings and gradients."""
    found: set[int] = set()
    case = group_case(sharding=sharding, steps=3, dims=(16,) * 4)

    def watched(operation: Any) -> Any:
        def call(*given: Any, group: Any = None, **more: Any) -> Any:
            found.update(dist.get_process_group_ranks(group))
            return operation(*given, group=group, **more)

        return call

    model = groups.build_ours(case, 2, 10)
    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(dist, name, watched(getattr(dist, name))))
        groups.train_ours(model, case)
    return sorted(found)


@pytest.mark.skipif(not torchrec.__version__.startswith("1.8."), reason="routes are for TorchRec 1.8")
def test_ids_and_embeddings_stay_inside_of_a_group(four_ranks: RankPool):
    assert four_ranks.run(ranks_of_routes) == [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize("sharding", ["row_wise", *map(matrix, ("table_wise", "column_wise", "grid_shard"))])
def test_torchrec_sends_inside_of_a_group(four_ranks: RankPool, sharding: str):
    assert four_ranks.run(ranks_of_torchrec, sharding) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def after_an_interrupt() -> list[str]:
    """Messages of a forward and of an average behind one that an error ended."""
    model, found = groups.build_ours(group_case(), 2, 3), []
    with mock.patch.object(row_sync, "mean_over", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        groups.train_ours(model, group_case(steps=3))
    for action in (lambda: groups.train_ours(model, group_case(steps=1)), model.sync):
        found.append(groups.look_ahead.message_of(action))
    return found


def test_an_average_that_does_not_end_is_not_forgotten(two_ranks: RankPool):
    for messages in two_ranks.run(after_an_interrupt):
        assert all("rows of the groups may differ" in message for message in messages), messages


def save_and_load(folder: Path, num_groups: int) -> tuple[str, list[str], list[str], int]:
    """A save between averages; parts of another model, in other groups or none, that are not what was saved; what
    differs after three steps more in groups that went on and in those that were loaded; rows that the latter
    averaged."""
    case = group_case(policy="lookahead", steps=6)
    model = groups.build_ours(case, 2, 3)
    groups.train_ours(model, dataclasses.replace(case, steps=2), 8)
    refused = groups.look_ahead.message_of(lambda: save_program(folder, 2, model, model.fused_optimizer))
    model = groups.build_ours(case, 2, 3)
    groups.train_ours(model, case, 8)
    save_program(folder, 6, model, model.fused_optimizer)
    whole = stock_loaded(folder / "step_6")
    other: Any = groups.build_ours(case, num_groups, 3)
    load_program(folder, other, other.fused_optimizer)
    wrong = []
    for name, parts in shards(other).items():
        for (row, column), part in parts:
            saved = whole[f"model.{name}"][row : row + len(part), column : column + part.shape[1]]
            wrong += [] if torch.equal(saved, part) else [name]
    other.begin_behind(6)
    for each in (model, other) if num_groups == 2 else ():
        groups.train_ours(each, dataclasses.replace(case, steps=3))
    later = groups.differences(groups.snapshot(model), groups.snapshot(other)) if num_groups == 2 else []
    return refused, wrong, later, other.sync_counts.rows


def shards(model: Any) -> dict[str, list[tuple[tuple[int, ...], Tensor]]]:
    """This rank's parts of the tables, with their first rows and columns."""
    flush(model)
    return {
        name: [(tuple(shard.metadata.shard_offsets), shard.tensor) for shard in value.local_shards()]
        for name, value in model.state_dict().items()
        if isinstance(value, ShardedTensor)
    }


@pytest.mark.parametrize("num_groups", [2, matrix(1), matrix(4)])
def test_a_program_saves_rows_once_and_any_groups_load_them(four_ranks: RankPool, tmp_path: Path, num_groups: int):
    for refused, wrong, later, averaged in four_ranks.run(save_and_load, tmp_path, num_groups):
        assert "rows of the groups differ since their last average" in refused
        assert wrong == []
        assert later == []
        assert (0 < averaged < 2000) == (num_groups == 2)


def test_ranks_that_cannot_be_divided_are_refused():
    with pytest.raises(ConfigError, match="got 3 groups of 4 ranks, needed a number that divides the ranks: 1, 2, 4"):
        Groups(3, 4)
