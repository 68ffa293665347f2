"""`compare_with_stock` and what `embershard verify` says: equal runs, and runs in which something was broken."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from embershard.cache import CacheConfig
from embershard.cache.planner import CachePlan
from embershard.cache.rows.copies import RowCopies
from embershard.distributed import Ranks
from embershard.errors import ConfigError
from embershard.extras.verify.comparison import CachedRun, Difference, Equivalence, TensorPart, differences_of
from embershard.extras.verify.equivalence import compare_with_stock
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.config import ShardingConfig
from embershard.sharding.plan import TablePlacement
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.fit.model_size import tables_of_run
from embershard.training.optimizers import DenseOptimizerConfig
from embershard.training.trainer import Trainer
from tests.covering import covering, matrix
from tests.small_runs import small_data, small_run
from tests.unit.cache.faults import FAULTS
from tests.unit.gpu_model.device import CUDA, Gpu
from tests.unit.sharding.plans import make_plan

pytestmark = [pytest.mark.slow, pytest.mark.extra]  # whole training runs

STEPS = 12


def make_config(lookahead: int, **train: Any) -> RunConfig:
    return small_run(
        data=small_data(4000),
        cache=CacheConfig(ratio=0.1),
        look_ahead=LookAheadConfig(lookahead=lookahead, prefetch=min(2, max(1, lookahead))),
        train=TrainConfig(batch_size=50, **train),
    )


@pytest.mark.smoke
@pytest.mark.parametrize(("lookahead", "init"), covering((0, 8), ("counter", "torchrec")))
def test_the_cache_equals_stock_torchrec(ranks: Ranks, lookahead: int, init: str) -> None:
    verdict = compare_with_stock(make_config(lookahead, init=init), ranks, STEPS)
    assert verdict.is_equal
    assert verdict.caches[0].evictions > 100
    assert verdict.num_tensors > 60  # weights and states of 26 tables, and the dense layers
    assert "EQUAL: 12 steps on 1 rank" in " ".join(verdict.lines(""))


@pytest.mark.matrix
@pytest.mark.smoke
def test_a_written_back_row_that_is_wrong_is_found(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of one row changes by as little as it can when it is written back in step 7."""
    right, damaged, plans = RowCopies.write_back_evicted, [], {}

    def wrong(copies: RowCopies, plan: CachePlan, *training: Any) -> None:
        right(copies, plan, *training)
        plans[id(copies)] = plans.get(id(copies), 0) + 1
        if plans[id(copies)] == 7:
            host = copies._host
            key = int(plan.write_back_keys[0])
            row = host.parts[0].data[key]
            row[2] = torch.nextafter(row[2], torch.tensor(9.0))
            table = next(t for t, first in reversed(list(enumerate(host.row_offsets))) if first <= key)
            damaged.append((table, key - host.row_offsets[table]))

    monkeypatch.setattr(RowCopies, "write_back_evicted", wrong)
    kept: list[Trainer] = []  # so that no id is used twice
    close = Trainer.close
    monkeypatch.setattr(Trainer, "close", lambda trainer: (kept.append(trainer), close(trainer)))
    verdict = compare_with_stock(make_config(lookahead=0), ranks, STEPS)
    assert verdict.step == 7
    first = verdict.differences[0]
    assert len(set(damaged)) == 1
    table, row = damaged[0]
    assert first.tensor.endswith(f".t_C{table + 1}.weight")
    assert (first.row, first.rank, first.num_rows) == (row, 0, 1)
    assert first.cached > first.stock
    text = " ".join(verdict.lines(""))
    assert "after step 7" in text
    assert f"row {row:,} on rank 0" in text


def test_other_initial_weights_are_found(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Trainer.__init__

    def with_another_seed(trainer: Trainer, config: RunConfig, *rest: Any) -> None:
        seed = config.train.seed + (0 if config.cache.enabled else 1)
        make(trainer, dataclasses.replace(config, train=dataclasses.replace(config.train, seed=seed)), *rest)

    monkeypatch.setattr(Trainer, "__init__", with_another_seed)
    verdict = compare_with_stock(make_config(lookahead=0), ranks, 3)
    assert (verdict.loss_step, verdict.step) == (1, 0)
    assert "before the first step" in " ".join(verdict.lines(""))


def test_a_forward_that_is_wrong_for_its_loss_alone_is_found(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of one step is reported wrong; nothing else differs."""
    step = Trainer.step

    def wrong(trainer: Trainer, batch: Any) -> Any:
        skipped = step(trainer, batch)
        if trainer.steps == 4 and trainer.config.cache.enabled:
            trainer.losses.monitor.mean()
            trainer.losses.monitor._losses.append(0.5)
        return skipped

    monkeypatch.setattr(Trainer, "step", wrong)
    verdict = compare_with_stock(make_config(lookahead=0), ranks, 6)
    assert (verdict.loss_step, verdict.step) == (4, None)
    assert "step 4" in " ".join(verdict.lines(""))


def with_larger_cache(lookahead: int, ranks: Ranks, folder: Path | None) -> RunConfig:
    """Settings in which no pin matters; with a `folder`, by a plan in it."""
    config = make_config(lookahead)
    if folder is None:
        return dataclasses.replace(config, cache=CacheConfig(ratio=0.3, overflow="raise"))
    tables = [
        TablePlacement(table.name, table.num_rows, table.dim, "fp32", "table_wise", "cached", (0,))
        for table in tables_of_run(config)
    ]
    make_plan(tables, 1, 1, batch_size=50).save(folder / "plan.json")
    return dataclasses.replace(config, sharding=ShardingConfig(plan=str(folder / "plan.json")))


@pytest.mark.smoke
@pytest.mark.parametrize(("lookahead", "by_plan"), [matrix(0, False), matrix(8, False), (8, True)])
def test_caches_are_made_smaller_until_pins_matter(ranks: Ranks, lookahead: int, by_plan: bool, tmp_path: Path) -> None:
    config = with_larger_cache(lookahead, ranks, tmp_path if by_plan else None)
    verdict = compare_with_stock(config, ranks, STEPS)
    assert verdict.is_equal
    own, *_, last = verdict.caches
    assert own.evictions > 100
    assert own.passed_over < STEPS <= last.passed_over
    assert last.slots < own.slots
    text = " ".join(verdict.lines(""))
    assert f"{own.slots:,} slots: equal" in text
    assert f"{last.passed_over:,} times a slot was passed over" in text


@pytest.mark.parametrize("lookahead", [matrix(0), 8])
def test_a_victim_that_a_batch_uses_is_found_from_caches_in_which_no_pin_matters(ranks: Ranks, lookahead: int) -> None:
    config = with_larger_cache(lookahead, ranks, None)
    with FAULTS["pins_ignored"]():
        verdict = compare_with_stock(config, ranks, STEPS)
    assert not verdict.is_equal
    assert len(verdict.caches) > 1, "the larger cache is equal, so this proves nothing"
    text = " ".join(verdict.lines(""))
    assert text.startswith("DIFFERENT within 12 steps on 1 rank")
    assert f"{verdict.caches[-1].slots:,} slots: different" in text


def test_what_equal_runs_do_not_show_is_said() -> None:
    def said(evictions: int, passed_over: int) -> str:
        caches = (CachedRun(slots=80, rows=900, evictions=evictions, passed_over=passed_over),)
        return " ".join(
            Equivalence(3, caches, num_tensors=4, loss_step=None, step=None, differences=(), num_ranks=2).lines("")
        )

    assert "No row was evicted" in said(0, 0)
    assert "No pin mattered" in said(7, 0)
    assert "No" not in said(7, 1)


def test_what_cannot_be_compared_is_refused(ranks: Ranks) -> None:
    config = make_config(lookahead=0)
    with pytest.raises(ConfigError, match="there is no cache"):
        compare_with_stock(dataclasses.replace(config, cache=CacheConfig(enabled=False)), ranks, 2)
    frozen = dataclasses.replace(config, model=dataclasses.replace(config.model, frozen=("C1",)))
    with pytest.raises(ConfigError, match=r"model\.frozen.*trains every table"):
        compare_with_stock(frozen, ranks, 2)
    rows = dataclasses.replace(config, sharding=ShardingConfig(exchange="rows"))
    with pytest.raises(ConfigError, match="another order"):
        compare_with_stock(rows, dataclasses.replace(ranks, world_size=2), 2)
    with pytest.raises(ConfigError, match=r"sharding\.mode"):
        compare_with_stock(dataclasses.replace(config, sharding=ShardingConfig(mode="data_parallel")), ranks, 2)


def test_two_losses_that_are_no_numbers_are_equal(ranks: Ranks) -> None:
    """Both runs skip the same batches."""
    config = make_config(0, on_non_finite="skip")
    config = dataclasses.replace(config, dense_optimizer=DenseOptimizerConfig(lr=1e30))
    assert compare_with_stock(config, ranks, 4).is_equal


def test_tables_of_half_precision_are_compared(ranks: Ranks) -> None:
    config = make_config(4)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, table_dtype="fp16"))
    assert compare_with_stock(config, ranks, 4).is_equal


@pytest.mark.parametrize(("change", "message"), [("exchange", "exchange rows"), ("kernel", "replicates the tables")])
def test_a_plan_that_trains_in_another_way_is_refused(ranks: Ranks, tmp_path: Path, change: str, message: str) -> None:
    table = TablePlacement("t_C1", 100, 4, "fp32", "table_wise", "device", (0,))
    other = {
        "exchange": {"exchange": "rows"},
        "kernel": {"kernel": "replicated", "sharding": "data_parallel", "ranks": ()},
    }
    plan = make_plan([dataclasses.replace(table, **other[change])], 2, 2, batch_size=50)
    plan.save(tmp_path / "plan.json")
    config = dataclasses.replace(make_config(0), sharding=ShardingConfig(plan=str(tmp_path / "plan.json")))
    with pytest.raises(ConfigError, match=message):
        compare_with_stock(config, dataclasses.replace(ranks, world_size=2), 2)


@pytest.mark.smoke
def test_rows_in_host_memory_are_compared_with_those_of_a_gpu() -> None:
    """As a cached run has them and stock TorchRec: on the model of a GPU, which refuses operations on both."""
    rows = torch.arange(6.0).reshape(3, 2)
    other = rows.clone()
    other[1, 1] = 9.0
    with Gpu():
        bias = TensorPart(0, torch.ones(2).to(CUDA), of_table=False)
        cached = {"t.weight": TensorPart(4, rows, of_table=True), "over.bias": bias}
        same, different = (
            {"t.weight": TensorPart(4, each.to(CUDA), of_table=True), "over.bias": bias} for each in (rows, other)
        )
        assert list(differences_of(cached, same, rank=1)) == []
        found = list(differences_of(cached, different, rank=1))
    assert found == [Difference("t.weight", rank=1, row=5, num_rows=1, cached=3.0, stock=9.0, of_table=True)]
