"""Runs with small rows in the host tier: one result whatever the cache, the look-ahead, the saves and the stops; and
checkpoints of any type of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from embershard.cache import CacheConfig
from embershard.cache.homes import small_sizes as sizes
from embershard.cache.homes.quantised import QuantisedRows
from embershard.cache.homes.small_rows import SmallRows
from embershard.cache.rows.copies import RowCopies
from embershard.distributed import CheckpointConfig, Manifest, Ranks, complete_checkpoints
from embershard.distributed.checkpoint.compact import compact
from embershard.distributed.checkpoint.load import load_group
from embershard.errors import CacheError, ConfigError
from embershard.extras.verify.equivalence import _tensors_of, compare_with_stock
from embershard.frequency.config import ProfileConfig
from embershard.models import ModelConfig
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.config import ShardingConfig
from embershard.sharding.torchrec import cache_stats, cached_embeddings, flush
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.fit.memory_needs import RanksHere, memory_needs
from embershard.training.fit.model_size import table_rows
from embershard.training.optimizers import EmbeddingOptimizerConfig
from embershard.training.trainer import Trainer
from tests.covering import matrix
from tests.ranks.own_models import history_config
from tests.small_runs import small_data, small_run
from tests.unit.data.windows import make_windows

STEPS = 24
_ROWS = ("weights", "optimizer_states", "scores")


@pytest.fixture(autouse=True, scope="module")
def few_whole_tables() -> Iterator[None]:
    """Nearly all tables of these runs have fewer rows than those that stay full."""
    with mock.patch.object(sizes, "SMALL_TABLE_ROWS", 20):
        yield


def make_config(
    host_dtype: Any = "int8", lookahead: int = 4, every_steps: int | None = None, **cache: Any
) -> RunConfig:
    if host_dtype == "int8":
        cache = {"full_rows": 0.05, **cache}
    return small_run(
        data=small_data(3000),
        cache=CacheConfig(**{"ratio": 0.2, "host_dtype": host_dtype, **cache}),
        profile=ProfileConfig(samples=1000),
        look_ahead=LookAheadConfig(lookahead, 2 if lookahead else 1),
        train=TrainConfig(batch_size=50, max_steps=STEPS),
        checkpoint=CheckpointConfig(every_steps=every_steps, at_end=False, keep_last=9),
    )


def trained(
    config: RunConfig, ranks: Ranks, folder: Path | None = None, start: Path | None = None, **resume: Any
) -> dict[str, Tensor]:
    """All weights and states after the run, from a checkpoint on if there is one."""
    trainer = Trainer(config, ranks, folder)
    if start is not None:
        trainer.resume(start, **resume)
    for _ in trainer.train():
        pass
    trainer.close()
    found = {name: part.tensor.clone() for name, part in _tensors_of(trainer).items()}
    found["evictions"] = torch.tensor(sum(table.evictions for table in cache_stats(trainer.model)))
    return found


@pytest.fixture(scope="module")
def whole_run(ranks: Ranks, few_whole_tables: None) -> dict[str, Tensor]:
    """What the run of `make_config()` trains."""
    return trained(make_config(), ranks)


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    different = [name for name in one if name != "evictions" and not torch.equal(one[name], other[name])]
    assert one.keys() == other.keys()
    assert not different


@pytest.mark.slow
@pytest.mark.parametrize("host_dtype", ["int8", matrix("fp16")])
def test_the_cache_equals_rounded_stock_torchrec(ranks: Ranks, host_dtype: str) -> None:
    verdict = compare_with_stock(make_config(host_dtype), ranks, 12)
    assert verdict.is_equal
    assert verdict.caches[0].evictions > 100


@pytest.mark.slow
def test_a_table_may_have_a_type_of_its_own(ranks: Ranks) -> None:
    config = make_config(host_dtypes={"t_C1": "fp32", "t_C3": "fp16"})
    assert compare_with_stock(config, ranks, 6).is_equal
    trainer = Trainer(config, ranks)
    kept = {
        table: pool.host.small.small_type if isinstance(pool.host, QuantisedRows) else None
        for pool in cached_embeddings(trainer.model)
        for table in pool.cache.tables
    }
    trainer.close()
    assert (kept["t_C1"], kept["t_C3"], kept["t_C2"]) == (None, "fp16", "int8")
    with pytest.raises(ConfigError, match=r"cache.host_dtypes: got no table 'clicks', needed some of t_C1"):
        Trainer(make_config(host_dtypes={"clicks": "fp32"}), ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"ratio": 0.12}, {"lookahead": 0}, matrix({"ratio": 0.5}), matrix({"lookahead": 64})], ids=str
)
def test_the_result_depends_on_no_cache_or_look_ahead(
    ranks: Ranks, whole_run: dict[str, Tensor], changes: dict[str, Any]
) -> None:
    assert whole_run["evictions"] > 1000
    assert_same(whole_run, trained(make_config(**changes), ranks))


@pytest.mark.matrix
def test_the_result_depends_on_no_save(ranks: Ranks, tmp_path: Path, whole_run: dict[str, Tensor]) -> None:
    saving = make_config(every_steps=7)
    assert_same(whole_run, trained(saving, ranks, tmp_path))
    assert len(complete_checkpoints(tmp_path)) == STEPS // 7
    for checkpoint in complete_checkpoints(tmp_path)[:2]:
        assert_same(whole_run, trained(saving, ranks, None, checkpoint))


@pytest.mark.slow
@pytest.mark.matrix
def test_rows_that_are_rounded_when_written_back_depend_on_the_cache(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As everybody does it."""
    right = SmallRows.write

    def rounding_write(rows: SmallRows, keys: Tensor, slots: Tensor, places: Tensor | None = None) -> None:
        values = slots.clone()
        rows.round(values, torch.arange(len(keys)) if places is None else places, keys, are_distinct=True)
        right(rows, keys, values, places)

    monkeypatch.setattr(RowCopies, "round", lambda *_: None)
    monkeypatch.setattr(SmallRows, "write", rounding_write)
    with pytest.raises(AssertionError):
        assert_same(trained(make_config(), ranks), trained(make_config(ratio=0.12), ranks))


@pytest.mark.matrix
@pytest.mark.parametrize("host_dtype", ["int8", matrix("fp16")])
def test_saves_of_what_changed_have_them(ranks: Ranks, tmp_path: Path, host_dtype: str) -> None:
    """Whole at the start, then the rows that changed, while training goes on; on from the third delta."""
    config = make_config(host_dtype, every_steps=5)
    config = replace(config, checkpoint=replace(config.checkpoint, full_every=9))
    whole = trained(config, ranks, tmp_path)
    assert whole["evictions"] > 1000
    last = tmp_path / "step_20"
    manifest = Manifest.read(last)
    assert manifest.parent is not None
    assert sum(len(shard.tensors) for shard in manifest.shards) > 10
    assert_same(whole, trained(config, ranks, tmp_path / "elsewhere", start=last))
    for number, (name, rows) in enumerate(load_group(last, "model").items()):
        compact(last) if number == 0 else None
        assert torch.equal(rows, load_group(last, "model")[name])


@pytest.mark.slow
def test_batches_in_pieces_round_once(ranks: Ranks, whole_run: dict[str, Tensor]) -> None:
    """The rows of a step are rounded after its one update. Real gradients: sums of two pieces are rounded otherwise, so
    steps agree, and bits need not."""
    config = make_config()
    trainer = Trainer(replace(config, train=replace(config.train, accumulate=2)), ranks)
    for _ in trainer.train():
        pass
    for pool in cached_embeddings(trainer.model):
        pool.write_back()  # raises where a slot is not rounded
    trainer.close()
    for name, (_, rows, _) in _tensors_of(trainer).items():
        assert (rows - whole_run[name]).abs().max() < 0.05, name


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_any_type_of_rows(ranks: Ranks, tmp_path: Path) -> None:
    """fp32, int8, fp16, fp32: each goes on from the checkpoint before, which has float32."""
    allowed = ["cache.host_dtype", "cache.full_rows"]
    start, rows = None, {}
    for number, host_dtype in enumerate(("fp32", "int8", "fp16", "fp32")):
        config = make_config(host_dtype, every_steps=6 * (number + 1))
        config = replace(config, train=replace(config.train, max_steps=6 * (number + 1)))
        folder = tmp_path / str(number)
        rows[number] = trained(config, ranks, folder, start, allow_changes=allowed)
        (start,) = complete_checkpoints(folder)
    # The last one only read halfs: rows that no step touched are what they were.
    weights = [name for name in rows[3] if name.endswith(".weight") and "embedding_bags" in name]
    assert len(weights) == 26
    for name in weights:
        same = (rows[2][name] == rows[3][name]).all(1)
        assert torch.equal(rows[2][name][same], rows[2][name][same].half().float())
    loaded = Trainer(make_config("fp32"), ranks)
    loaded.resume(start)
    again = {name: part.tensor.clone() for name, part in _tensors_of(loaded).items()}
    loaded.close()
    assert all(torch.equal(again[name], rows[3][name]) for name in weights)


@pytest.mark.matrix
def test_tables_of_sequences_go_on_from_a_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """TorchRec loads those by another hook, and small rows are in no state dict; with SGD they have no states."""
    config = history_config(
        "din", make_windows(tmp_path, users=200, items=3000, history=6),
        cache=CacheConfig(ratio=0.12, host_dtype="fp16"),
        embedding_optimizer=EmbeddingOptimizerConfig("sgd", lr=0.1),
        checkpoint=CheckpointConfig(every_steps=12, at_end=False, keep_last=9),
    )  # fmt: skip
    whole = trained(config, ranks, tmp_path / "checkpoints")
    assert_same(whole, trained(config, ranks, None, complete_checkpoints(tmp_path / "checkpoints")[0]))


def _marked(trainer: Trainer) -> dict[str, list[int]]:
    pools = cached_embeddings(trainer.model)
    return {name: rows.tolist() for pool in pools for name, rows in pool.marked_rows.items()}


@pytest.mark.matrix
def test_full_rows_are_those_of_the_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    """A profile of other samples would choose others, and the run would not be the same."""
    whole = trained(make_config(every_steps=12), ranks, tmp_path)
    checkpoint = complete_checkpoints(tmp_path)[0]
    other = replace(make_config(), profile=ProfileConfig(samples=50))
    trainer = Trainer(other, ranks)
    before = _marked(trainer)
    trainer.resume(checkpoint)
    after = _marked(trainer)
    trainer.close()
    assert before != after
    assert_same(whole, trained(other, ranks, None, checkpoint))


@pytest.mark.slow
@pytest.mark.parametrize("host_dtype", ["int8", matrix("fp16")])
def test_host_memory_is_what_was_predicted(ranks: Ranks, host_dtype: str) -> None:
    config = make_config(host_dtype, **({"full_rows": 0.0} if host_dtype == "int8" else {}))
    here = RanksHere(world_size=1, ranks_per_node=1, device="cpu")
    needs = memory_needs(config, table_rows(config), here, None).host
    trainer = Trainer(config, ranks)
    measured = sum(table.host_bytes for table in cache_stats(trainer.model))
    trainer.close()
    assert measured == needs["weights"] + needs["optimizer_states"] + needs["scores"]
    shape = make_config("fp32")
    assert measured < sum(memory_needs(shape, table_rows(shape), here, None).host[use] for use in _ROWS)


@pytest.mark.slow
def test_rows_that_are_not_there_are_not_read_as_zeros(ranks: Ranks) -> None:
    trainer = Trainer(make_config(), ranks)
    for read in (trainer.model.state_dict, lambda: flush(trainer.model)):
        with pytest.raises(CacheError, match=r"rows are kept as int8 \(cache.host_dtype\): they would read as zeros"):
            read()
    bags = trainer.model.module.model.sparse_arch.embedding_bag_collection.embedding_bags
    with pytest.raises(CacheError, match="would read as zeros"):
        _ = bags.t_C1.weight
    trainer.close()


@pytest.mark.slow
def test_a_diverged_run_ends_by_name(ranks: Ranks) -> None:
    config = make_config(full_rows=0.0)
    trainer = Trainer(config, ranks)
    pool = next(iter(cached_embeddings(trainer.model)))
    with trainer.upcoming.next() as batch:
        pool.cache._payload[0].data[1:] = float("nan")
        with pytest.raises(CacheError, match=r"table 't_C\d+', row \d+: its largest weight is nan, and int8 rows hold"):
            trainer.model(batch)[0].backward()
    trainer.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"profile": ProfileConfig()}, r"no profile to choose them by. Count one \(profile.samples = 200000"),
        (
            {"model": ModelConfig(table_dtypes={"t_C1": "fp16"})},
            'model.table_dtypes.t_C1: got "fp16", needed "fp32" with cache.host_dtype: slots are rounded',
        ),
        (
            {"model": ModelConfig(table_dtype="fp16")},
            'model.table_dtype: got "fp16", needed "fp32" with cache.host_dty',
        ),
        ({"train": TrainConfig(init="torchrec")}, 'train.init: got "torchrec", needed "counter" with cache.host_dtype'),
        ({"sharding": ShardingConfig(mode="data_parallel")}, 'sharding.mode: got "data_parallel", needed "sharded"'),
    ],
)
def test_settings_that_know_only_rows_of_float32_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(make_config(), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_dtype": "int4"}, "cache.host_dtype must be one of 'fp32', 'fp16', 'int8', got 'int4'"),
        ({"full_rows": 0.1}, 'cache.full_rows has no effect without cache.host_dtype = "int8"'),
        ({"host_dtype": "int8", "full_rows": 1.0}, r"cache.full_rows must be in \[0, 1\), got 1.0"),
        ({"host_dtype": "int8", "enabled": False}, "cache.host_dtype has no effect with cache.enabled=false"),
    ],
)
def test_settings_of_small_rows_that_contradict_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**changes)
