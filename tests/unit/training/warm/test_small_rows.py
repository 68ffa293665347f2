"""Runs and programs whose rows are small in host memory begin with trained models, whose rows are then rounded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embershard import load_from
from embershard.cache import CacheConfig
from embershard.cache.homes import small_sizes as sizes
from embershard.cache.homes.small_rows import SmallRows
from embershard.distributed import Ranks, complete_checkpoints
from embershard.errors import CacheError
from embershard.extras.serving.write import export_base
from embershard.extras.verify.equivalence import _tensors_of, _train
from embershard.extras.verify.rounding import TableRounding, small_tables_of
from embershard.frequency.config import ProfileConfig
from embershard.models.config import PretrainedTable
from embershard.sharding.torchrec import cache_stats, cached_embeddings
from embershard.training.build import find_profile
from embershard.training.config import RunConfig
from embershard.training.trainer import Trainer
from embershard.training.warm_start import WarmStart
from tests.covering import matrix
from tests.small_rounding import round_fp16, round_int8, seed_of
from tests.unit.training.warm.models import DIM, features, record, run_of, write_samples
from tests.unit.training.warm.test_program import program, save, step
from tests.unit.training.warm.test_warm_starts import rows_of, train

pytestmark = [pytest.mark.slow, pytest.mark.extra]

SEED, WHOLE = 5, 35
TYPES = pytest.mark.parametrize("host_dtype", ["int8", matrix("fp16")])


@pytest.fixture(autouse=True)
def few_whole_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """One table of the three stays full, that of the 30 shops."""
    monkeypatch.setattr(sizes, "SMALL_TABLE_ROWS", WHOLE)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples") / "samples.parquet")


def small_run(samples: Path, host_dtype: str, steps: int = 8, ratio: float = 0.65, **sections: Any) -> RunConfig:
    """A run whose profile has every sample, with a tenth of each table full."""
    full = {"full_rows": 0.1} if host_dtype == "int8" else {}
    cache = CacheConfig(ratio=ratio, host_dtype=host_dtype, **full)  # type: ignore[arg-type]
    return run_of(samples, steps=steps, seed=SEED, cache=cache, profile=ProfileConfig(samples=240), **sections)


def rounded(config: RunConfig, trainer: Trainer, table: str, rows: Tensor) -> Tensor:
    """The rows as NumPy rounds them, but for the most frequent ones."""
    host_dtype, numbers = config.cache.host_dtype, np.arange(len(rows))
    oracle = round_int8 if host_dtype == "int8" else round_fp16
    found = torch.from_numpy(oracle(rows.numpy(), numbers, seed_of(table, SEED)))
    if host_dtype == "int8":
        profile = find_profile(config, trainer.source)
        assert profile is not None
        counts = profile.counts[table]
        most = len(rows) if len(rows) <= WHOLE else round(0.1 * len(rows))
        full = sorted(numbers, key=lambda row: (-int(counts[row]), row))[:most]
        found[full] = rows[full]
    return found


def begun(config: RunConfig, ranks: Ranks, source: Path | None) -> Trainer:
    """A run before its first step."""
    trainer = Trainer(config, ranks, None, start=None if source is None else WarmStart(source))
    for part in trainer.parts[:1]:
        list(part.begin())
    return trainer


def tables_in(trainer: Trainer) -> dict[str, Tensor]:
    found = _tensors_of(trainer)
    return {name: found[rows_of(name).removeprefix("model.")].tensor.clone() for name in ("t_user", "t_item", "t_shop")}


def differences(one: Trainer, other: Trainer) -> list[str]:
    these, those = _tensors_of(one), _tensors_of(other)
    assert these.keys() == those.keys()
    return [name for name, part in these.items() if not torch.equal(part.tensor, those[name].tensor)]


@TYPES
def test_a_run_equals_stock_torchrec_that_is_rounded_after_loading(
    ranks: Ranks, samples: Path, tmp_path: Path, host_dtype: str
) -> None:
    old = train(run_of(samples), ranks, tmp_path)
    config = small_run(samples, host_dtype)
    cached = begun(config, ranks, tmp_path)
    for table, rows in tables_in(cached).items():
        saved = old[rows_of(table)]
        assert torch.equal(rows, rounded(config, cached, table, saved)), table
        is_whole = host_dtype == "int8" and table == "t_shop"
        assert torch.equal(rows, saved) == is_whole
        states = f"{table}.momentum1"
        (name,) = (name for name in old if name.endswith(states))
        (own,) = (each for key, (_, each, _) in _tensors_of(cached).items() if key.endswith(f": {states}"))
        assert own.any()
        assert torch.equal(own, old[name])
    steps = config.train.max_steps or 0
    losses = list(_train(cached, steps))
    assert sum(table.evictions for table in cache_stats(cached.model)) > 50

    def stock(rounds_what_it_loads: bool) -> tuple[Trainer, list[float]]:
        whole = replace(config, cache=CacheConfig(enabled=False))
        trainer = begun(whole, ranks, tmp_path)
        profile = find_profile(config, trainer.source)
        weights = trainer.model.state_dict()
        before = {name: rows.clone() for name, rows in local_rows(weights)}
        rounding = TableRounding(small_tables_of(config, profile), weights, ranks)
        if not rounds_what_it_loads:
            for name, rows in local_rows(weights):
                rows.copy_(before[name])
        return trainer, list(_train(trainer, steps, rounding))

    same, expected = stock(rounds_what_it_loads=True)
    assert losses == expected
    assert differences(cached, same) == []
    other, found = stock(rounds_what_it_loads=False)
    assert losses != found
    assert len(differences(cached, other)) > 3
    for trainer in (cached, same, other):
        trainer.close()


def local_rows(weights: Any) -> Iterator[tuple[str, Tensor]]:
    for name, value in weights.items():
        if hasattr(value, "local_shards"):
            yield name, value.local_shards()[0].tensor.detach()


@TYPES
def test_rows_that_are_new_are_as_of_the_seed(ranks: Ranks, samples: Path, tmp_path: Path, host_dtype: str) -> None:
    """Of a table that grew, of a new one, and of one that begins anew."""
    old = train(run_of(samples, features(shop=None)), ranks, tmp_path)
    config = replace(small_run(samples, host_dtype), data=run_of(samples, features(item=55)).data)
    fresh, grown = begun(config, ranks, None), begun(config, ranks, tmp_path)
    before, after = tables_in(fresh), tables_in(grown)
    assert torch.equal(after["t_item"][40:], before["t_item"][40:])
    assert torch.equal(after["t_shop"], before["t_shop"])
    for table, num_rows in (("t_item", 40), ("t_user", 60)):
        saved = torch.cat([old[rows_of(table)], before[table][num_rows:]])
        assert torch.equal(after[table], rounded(config, grown, table, saved))
        assert not torch.equal(after[table][:num_rows], before[table][:num_rows])
    fresh.close()
    grown.close()


@TYPES
def test_rows_of_a_file_are_rounded(ranks: Ranks, samples: Path, tmp_path: Path, host_dtype: str) -> None:
    vectors, rows = torch.randn(9, DIM), torch.arange(9) * 4 + 3
    np.savez(tmp_path / "items.npz", row=rows.numpy(), vector=vectors.numpy())
    given = {"item": PretrainedTable(str(tmp_path / "items.npz"), rows="row", vectors="vector")}
    fresh = begun(small_run(samples, host_dtype), ranks, None)
    trainer = begun(small_run(samples, host_dtype, model={"pretrained": given}), ranks, None)
    expected = tables_in(fresh)["t_item"].clone()
    expected[rows] = vectors
    found = tables_in(trainer)["t_item"]
    assert torch.equal(found, rounded(fresh.config, fresh, "t_item", expected))
    assert not torch.equal(found, expected)
    list(_train(trainer, 4))
    fresh.close()
    trainer.close()


@TYPES
def test_rows_that_are_rounded_already_stay_as_they_are(
    ranks: Ranks, samples: Path, tmp_path: Path, host_dtype: str
) -> None:
    """From a run with the same seed and full rows; from its export; and a run of fp32 has them, too."""
    old = Trainer(small_run(samples, host_dtype), ranks, tmp_path / "checkpoints")
    list(old.train())
    record(old.config, tmp_path)
    expected = tables_in(old)
    old.close()
    export_base(old.config, complete_checkpoints(tmp_path / "checkpoints")[-1], "fp32", tmp_path / "exported")
    for source in (tmp_path, tmp_path / "exported"):
        for config in (small_run(samples, host_dtype), run_of(samples)):
            trainer = begun(config, ranks, source)
            found = tables_in(trainer)
            trainer.close()
            assert all(torch.equal(found[table], rows) for table, rows in expected.items())


@TYPES
def test_a_program_begins_with_another_one(ranks: Ranks, tmp_path: Path, host_dtype: str) -> None:
    trained = program()
    step(*trained)
    old = save(*trained, tmp_path)
    full = {"full_rows": 0.0} if host_dtype == "int8" else {}
    cache = CacheConfig(ratio=0.5, host_dtype=host_dtype, **full)  # type: ignore[arg-type]
    model, dense = program(cache=cache, init_seed=SEED)
    said = load_from(model, tmp_path, dense_optimizer=dense, allow_unverified=True)
    assert str(said).startswith(f"From {tmp_path}: 3 tables taken; 2 layers taken.")
    oracle = round_int8 if host_dtype == "int8" else round_fp16
    for pool in cached_embeddings(model):
        for table, first, count in zip(pool.cache.tables, pool.host.row_offsets, pool.host.rows_per_table, strict=True):
            rows = old[f"bags.embedding_bags.{table}.weight"]
            expected = torch.from_numpy(oracle(rows.numpy(), np.arange(count), seed_of(table, SEED)))
            assert torch.equal(pool.cache.read(torch.arange(first, first + count)), expected)
            assert not torch.equal(rows, expected)
    step(model, dense)


def test_a_model_that_diverged_is_refused_by_name(ranks: Ranks, samples: Path, tmp_path: Path) -> None:
    vectors = np.full((2, DIM), 1e31, np.float32)
    np.savez(tmp_path / "items.npz", row=np.array([3, 8]), vector=vectors)
    given = {"item": PretrainedTable(str(tmp_path / "items.npz"), rows="row", vectors="vector")}
    with pytest.raises(CacheError, match=r"table 't_item', row 3: its largest weight is .*e\+30, and int8 rows hold"):
        begun(small_run(samples, "int8", model={"pretrained": given}), ranks, None)


@pytest.mark.matrix
def test_what_is_not_rounded_is_not_written(
    ranks: Ranks, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(run_of(samples), ranks, tmp_path)
    monkeypatch.setattr(SmallRows, "round", lambda *_, **__: None)
    with pytest.raises(CacheError, match="are not what an update leaves"):
        begun(small_run(samples, "int8"), ranks, tmp_path)
