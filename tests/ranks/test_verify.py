"""`verify` in a TorchRec program: equal models, faults by their table, row, rank and step, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from embershard import accumulating, cache_stats, host_rows_changed, verify
from embershard.cache.ids.id_map import IdMap
from embershard.errors import ConfigError
from embershard.extras.verify import program
from embershard.extras.verify.comparison import Equivalence, differences_of, tensors_of
from embershard.machine import HostMemory
from tests.covering import keep
from tests.ranks import id_tables
from tests.ranks.faults import FAULTS
from tests.ranks.parity import Case, batches, build, train
from tests.ranks.workers import RankPool
from tests.unit.cache.faults import FAULTS as CACHE_FAULTS

pytestmark = [pytest.mark.extra, pytest.mark.ranks]

STEPS = 8
T2 = "embeddings.embedding_bags.t2.weight"
CASES = {
    "table-wise": Case(optimizer="sgd"),
    "row-wise": Case(sharding="row_wise"),
    "column-wise": Case(sharding="column_wise", optimizer="adagrad"),
    "all beside a table on the device": Case(
        sharding=("table_wise", "row_wise", "column_wise", "row_wise"), cached=(0, 1, 2), ratio=0.3
    ),
    "sequences": Case(sequence=True, sharding="row_wise"),
    "weighted means of a shared table": Case(weighted=True, shared=True),
    "fp16": Case(fp16=(1,), optimizer="sgd", ratio=0.3),
    "with a seed": Case(init_seed=3, policy="lru"),
    "int8 rows": Case(init_seed=3, host_dtype="int8", full_rows=0.05, profile=True, sharding="row_wise"),
    "fp16 rows": Case(init_seed=3, host_dtype="fp16", sharding="column_wise", optimizer="adagrad"),
}


def train_parts(model: nn.Module, parts: Any) -> Tensor:
    losses = [model(features, labels) / len(parts) for features, labels in parts]
    for loss in losses:
        loss.backward()
    return torch.stack(losses).sum().detach()


def accumulated(model: nn.Module, parts: Any) -> Tensor:
    with accumulating(model):
        return train_parts(model, parts)


def of_trained(case: Case, parts: int = 1) -> tuple[Equivalence, list[str]]:
    """The verdict on a model that has trained; and how it differs, after further steps, from one that was not
    verified."""
    model, other = build(case, cached=True), build(case, cached=True)
    for each in (model, other):
        train(each, case, 5)
    evictions = [table.evictions for table in cache_stats(model)]
    verdict = verify(model, groups_of(case, parts), step=accumulated if parts > 1 else train_parts)
    assert [table.evictions for table in cache_stats(model)] == evictions
    losses = [train(each, case, 5, seed=9) for each in (model, other)]
    assert losses[0] == losses[1]
    found = differences_of(tensors_of(model, {}), tensors_of(other, {}), dist.get_rank())
    return verdict, [difference.tensor for difference in found]


def of_fault(case: Case, fault: str) -> Equivalence:
    model = build(case, cached=True)
    with CACHE_FAULTS[fault]():
        return verify(model, groups_of(case), step=train_parts)


def groups_of(case: Case, parts: int = 1) -> list[list[Any]]:
    given = list(batches(case, dist.get_rank(), STEPS, seed=7))
    return [given[n : n + parts] for n in range(0, STEPS, parts)]


@pytest.mark.smoke
@pytest.mark.parametrize("name", keep(["row-wise"], CASES))
def test_a_cached_model_equals_stock_and_is_left_as_it_was(two_ranks: RankPool, name: str) -> None:
    for verdict, changed in two_ranks.run(of_trained, CASES[name]):
        assert verdict.is_equal, str(verdict)
        assert str(verdict).startswith(f"EQUAL: {STEPS} steps on 2 ranks")
        assert verdict.caches[0].evictions > 20
        assert changed == []


def test_an_accumulated_step_equals_one_of_stock_tables(two_ranks: RankPool) -> None:
    for verdict, changed in two_ranks.run(of_trained, Case(sharding="row_wise", ratio=0.6), 2):
        assert (verdict.is_equal, verdict.steps, changed) == (True, STEPS // 2, []), str(verdict)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_by_table_row_rank_and_step(two_ranks: RankPool, fault: str) -> None:
    for verdict in two_ranks.run(of_fault, Case(sharding="row_wise", ratio=0.12), fault):
        assert not verdict.is_equal
        assert str(verdict).startswith(f"DIFFERENT within {STEPS} steps on 2 ranks")
        first = verdict.differences[0]
        assert first.tensor.split(".")[2] in {"t0", "t1", "t2", "t3"}
        assert f"{first.tensor}, row {first.row:,} on rank {first.rank}: " in str(verdict)


def of_a_wrong_row() -> Equivalence:
    """The verdict where row 11 of t2 is written wrong after the third step of the copy with caches."""
    steps = Counter[nn.Module]()

    def step(model: nn.Module, parts: Any) -> Tensor:
        loss = train_parts(model, parts)
        steps[model] += 1
        if cache_stats(model) and steps[model] == 3:
            for shard in model.state_dict()[T2].local_shards():
                shard.tensor[11, 3] += 1.0
            host_rows_changed(model)
        return loss

    return verify(build(Case(), cached=True), groups_of(Case()), step=step)


def test_a_row_that_is_wrong_after_a_step_is_named(two_ranks: RankPool) -> None:
    for verdict in two_ranks.run(of_a_wrong_row):
        (first,) = verdict.differences
        assert (verdict.step, first.tensor, first.row, first.num_rows) == (3, T2, 11, 1)
        assert f"differ first after step 3, in 1 tensors:\n  {T2}, row 11 on rank {first.rank}: " in str(verdict)


#: Ids with rules of their own, beside a table of row numbers.
IDS = {
    "shared": id_tables.Case(sharding=("row_wise", "table_wise", "row_wise"), optimizer="adagrad"),
    "zeros": id_tables.with_rules(id_tables.Case(sharding="row_wise", optimizer="adagrad"), unadmitted="zero"),
    "two features": id_tables.Case(sharding="row_wise", shared=True, weighted=True),
    "sequences": id_tables.Case(sequence=True, dims=(8, 8, 8), sharding="row_wise"),
}


def of_ids(case: id_tables.Case, fault: str = "") -> tuple[Equivalence, bool]:
    """The verdict on a model whose ids came and went in 30 steps; and whether its further losses are those of a model
    that was not verified."""
    case = dataclasses.replace(case, steps=30)
    model, other = (id_tables.train_cached(case)[0] for _ in range(2))
    given = id_tables.batches(case, dist.get_rank(), first=30, steps=24)
    with id_tables.fault(fault):
        verdict = verify(model, given)
    case = dataclasses.replace(case, steps=40)
    return verdict, id_tables.go_on(case, model, 30) == id_tables.go_on(case, other, 30)


@pytest.mark.parametrize("name", keep(["shared"], IDS))
def test_tables_of_ids_equal_stock_with_their_rows(two_ranks: RankPool, name: str) -> None:
    for verdict, is_left in two_ranks.run(of_ids, IDS[name]):
        assert verdict.is_equal, str(verdict)
        assert verdict.caches[0].evictions > 20
        assert is_left


@pytest.mark.parametrize(
    ("fault", "name"), [("states kept", "shared"), ("slots of the dead found", "shared"), ("zero trained", "zeros")]
)
def test_a_fault_of_ids_is_named_by_table_and_row(two_ranks: RankPool, fault: str, name: str) -> None:
    for verdict, _ in two_ranks.run(of_ids, IDS[name], fault):
        assert not verdict.is_equal
        if fault != "zero trained":  # what no id has is compared by what is read
            first = verdict.differences[0]
            assert first.tensor.partition(".weight")[0].rpartition(".")[2] in {"t0", "t1"}
            assert f"{first.tensor}, row {first.row:,} on rank {first.rank}: " in str(verdict)


def of_a_wrong_owner() -> Equivalence:
    """The verdict where the map of the copy with caches forgets the uses of an id."""
    calls = Counter[str]()
    resolve = IdMap.resolve

    def forgetful(self: IdMap, ids: Any) -> Any:
        found = resolve(self, ids)
        calls[self.table] += 1
        if self.table == "t1" and self.num_rows < 480:  # a shard, not a whole table
            self._records[2 * found.rows[0] + 1] = 1 << 32
        return found

    model = id_tables.train_cached(dataclasses.replace(IDS["zeros"], steps=30))[0]
    given = id_tables.batches(IDS["zeros"], dist.get_rank(), first=30, steps=4)
    with mock.patch.object(IdMap, "resolve", forgetful):
        return verify(model, given)


def test_a_map_that_differs_is_named(two_ranks: RankPool) -> None:
    for verdict in two_ranks.run(of_a_wrong_owner):
        assert verdict.step == 1
        assert verdict.differences[0].tensor.endswith(".t1.ids")


def refusals() -> list[str]:
    found = []
    for case in (Case(exchange="rows"), Case(hot=10)):
        with pytest.raises(ConfigError) as error:
            verify(build(case, cached=True), [])
        found.append(str(error.value))
    with pytest.raises(ConfigError) as error:
        verify(build(Case(), cached=False), [])
    found.append(str(error.value))
    tiny = HostMemory(total_bytes=1000, available_bytes=1000)
    with mock.patch.object(program, "host_memory", return_value=tiny), pytest.raises(ConfigError) as error:
        verify(build(Case(), cached=True), [])
    found.append(str(error.value))
    return found


def test_what_cannot_be_compared_is_refused_on_all_ranks(two_ranks: RankPool) -> None:
    for rows, hot, stock, memory in two_ranks.run(refusals):
        assert 'exchange="rows"' in rows
        assert "hot" in hot
        assert "nothing to compare" in stock
        assert "of host memory, and 1000 B are free" in memory
