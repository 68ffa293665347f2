"""`train.accumulate`: a step in pieces is the step of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import RunConfig, Trainer, accumulating
from embershard.data import Batch
from embershard.distributed import Ranks, process_group
from embershard.errors import CacheError, CheckpointError, ConfigError
from embershard.known_bounds import bounds_of, note_bounds
from embershard.pipeline.config import LookAheadConfig
from embershard.settings.decoding import decode
from embershard.sharding.torchrec import cached_embeddings
from embershard.sharding.torchrec.ids.id_tables import PoolIdMaps, maps_of
from embershard.training.config import TrainConfig
from embershard.training.reports import Report, SkippedBatchReport, TrainReport
from tests.covering import matrix
from tests.unit.training.test_trainer import make_config


@pytest.fixture(scope="module")
def one_rank() -> Iterator[Ranks]:
    with process_group("cpu") as found:
        yield found


@given(
    samples=st.integers(1, 9), pieces=st.integers(1, 12), features=st.integers(1, 3), is_weighted=st.booleans(),
    labels=st.integers(1, 2), seed=st.integers(0, 99),
)  # fmt: skip
def test_pieces_have_the_samples_in_order(
    samples: int, pieces: int, features: int, is_weighted: bool, labels: int, seed: int
) -> None:
    batch = _batch(samples, features, is_weighted, labels, seed)
    found = batch.micro_batches(pieces)
    assert len(found) == max(1, min(pieces, samples))
    sizes = [piece.num_samples for piece in found]
    assert sum(sizes) == samples
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert all(piece.sparse_features.lengths().is_contiguous() for piece in found), "FBGEMM reads other lengths"
    joined = Batch.joined(found)
    for name in ("dense_features", "labels", "weights"):
        one, other = getattr(batch, name), getattr(joined, name)
        assert (one is None and other is None) or torch.equal(one, other)
    ours, theirs = batch.sparse_features, joined.sparse_features
    assert torch.equal(ours.values(), theirs.values())
    assert torch.equal(ours.lengths(), theirs.lengths())
    if is_weighted:
        assert torch.equal(ours.weights(), theirs.weights())
    assert all(bounds_of(piece.sparse_features) == bounds_of(ours) != {} for piece in found)
    assert all(piece.is_hot for piece in found)


def _batch(samples: int, features: int, is_weighted: bool, labels: int, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (features * samples,), generator=generator, dtype=torch.int32)
    count = int(lengths.sum())
    ids = torch.randint(0, 99, (count,), generator=generator)
    weights = torch.rand(count, generator=generator) if is_weighted else None
    sparse = KeyedJaggedTensor([f"f{n}" for n in range(features)], ids, weights, lengths)
    note_bounds(sparse, {"f0": 99})
    shape = (samples,) if labels == 1 else (samples, labels)
    of_samples = torch.rand(samples, generator=generator) if is_weighted else None
    return Batch(torch.rand(samples, 3, generator=generator), sparse, torch.rand(shape), True, of_samples)


def _config(accumulate: int, lookahead: int = 4, **train: Any) -> RunConfig:
    given = {"batch_size": 24, "max_steps": 6, "log_every": 1, "precision": "fp64", **train}
    depths = LookAheadConfig(lookahead=lookahead, prefetch=min(2, lookahead) or 1)
    return make_config(train=TrainConfig(accumulate=accumulate, **given), look_ahead=depths)


def _train(config: RunConfig, ranks: Ranks) -> tuple[list[Report], dict[str, Tensor]]:
    trainer = Trainer(config, ranks)
    reports = list(trainer.train())
    dense = {name: each.detach().clone() for name, each in trainer.optimizers.dense_parameters.items()}
    trainer.close()
    return reports, dense


_FURTHER_PIECES = ((2, 0), (2, 4), (5, 0), (24, 4))


def _losses(reports: list[Report]) -> list[float]:
    return [report.loss for report in reports if isinstance(report, TrainReport)]


@pytest.mark.extra
@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize(("pieces", "lookahead"), [(5, 4), matrix(24, 0), *(matrix(*each) for each in _FURTHER_PIECES)])
def test_a_step_in_pieces_is_that_of_the_whole_batch(one_rank: Ranks, pieces: int, lookahead: int) -> None:
    """Rows are float32: the sums of another order differ in their last bits."""
    whole, dense = _train(_config(1, lookahead=lookahead), one_rank)
    cut, in_pieces = _train(_config(pieces, lookahead=lookahead), one_rank)
    assert _losses(cut) == pytest.approx(_losses(whole), rel=1e-7)
    assert _losses(cut)[0] == pytest.approx(_losses(whole)[0], rel=1e-12)
    for name, values in dense.items():
        torch.testing.assert_close(in_pieces[name], values, rtol=1e-5, atol=1e-7)


@pytest.mark.extra
@pytest.mark.slow
def test_dense_gradients_of_a_step_agree_to_12_digits(one_rank: Ranks) -> None:
    gradients = []
    for pieces in (1, 5):
        trainer = Trainer(_config(pieces), one_rank)
        step, found = trainer.optimizers.step, dict[str, Tensor]()

        def noted(step: Any = step, found: Any = found, trainer: Trainer = trainer) -> None:
            found.update({n: p.grad.clone() for n, p in trainer.optimizers.dense_parameters.items()})  # type: ignore[union-attr]
            step()

        trainer.optimizers.step = noted  # type: ignore[method-assign]
        with trainer.upcoming.next() as batch:
            trainer.step(batch)
        trainer.close()
        gradients.append(found)
    for name, values in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], values, rtol=1e-12, atol=1e-15)


def _with_ids(folder: Path, accumulate: int, lookahead: int = 4) -> RunConfig:
    """Tables of ids in fewer rows than there are ids, so that some are evicted."""
    samples, generator = folder / "samples.parquet", np.random.default_rng(7)
    columns = {
        name: (generator.random(900) ** 2 * most).astype(np.int64) for name, most in (("user", 400), ("item", 300))
    }
    columns["price"] = generator.random(900).astype(np.float32)
    columns["click"] = (generator.random(900) < 0.3).astype(np.int64)
    pq.write_table(pa.table(columns), samples)
    rules = {"admit_after": 2, "ttl_steps": 8}
    config = decode(
        RunConfig,
        {
            "data": {
                "kind": "table",
                "path": str(samples),
                "num_workers": 0,
                "table": {
                    "label": "click",
                    "features": {
                        "price": {"kind": "dense"},
                        "user": {"kind": "sparse", "mapping": "ids", "num_rows": 192},
                        "item": {"kind": "sparse", "mapping": "ids", "num_rows": 192},
                    },
                },
            },
            "ids": {"*": rules},
            "model": {
                "arch": "dlrm",
                "embedding_dim": 4,
                "dense_arch_layer_sizes": [4],
                "over_arch_layer_sizes": [4, 1],
            },
            "cache": {"ratio": 0.6},
            "look_ahead": {"lookahead": lookahead, "prefetch": 1},
            "train": {"batch_size": 24, "max_steps": 30, "log_every": 10, "accumulate": accumulate},
        },
    )
    return config


def _maps(config: RunConfig, ranks: Ranks) -> tuple[dict[str, Tensor], int]:
    """The ids, their uses and candidates behind a run, and how many were evicted."""
    trainer = Trainer(config, ranks)
    list(trainer.train())
    maps = [each for pool in cached_embeddings(trainer.model) for each in maps_of(pool)]
    found = {f"{each.table}.{name}": torch.from_numpy(v.copy()) for each in maps for name, v in each.tensors().items()}
    trainer.close()
    return found, sum(each.counts.evicted for each in maps)


@pytest.mark.extra
@pytest.mark.slow
def test_ids_of_all_pieces_get_rows_together(one_rank: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, evicted = _maps(_with_ids(tmp_path, 1), one_rank)
    assert evicted > 20
    for pieces in (3, 5):
        found, _ = _maps(_with_ids(tmp_path, pieces), one_rank)
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], values) for name, values in whole.items())
    know = PoolIdMaps.know
    monkeypatch.setattr(PoolIdMaps, "know", lambda self, *batches: [know(self, each)[0] for each in batches])
    with pytest.raises(CacheError, match="3 batches in one update, and the ids of 1 got rows together"):
        _maps(_with_ids(tmp_path, 3), one_rank)


@pytest.mark.extra
def test_ids_need_batches_that_become_known_together(one_rank: Ranks, tmp_path: Path) -> None:
    trainer = Trainer(_with_ids(tmp_path, 1, lookahead=0), one_rank)
    with pytest.raises(ConfigError, match=r"micro_batches=K"), accumulating(trainer.model):
        pass
    trainer.close()


@pytest.mark.extra
@pytest.mark.slow
def test_batches_are_skipped_as_a_whole(one_rank: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of one piece of one step is not finite: nothing of it trains, and the next batch takes its place."""
    forward, calls = Trainer._forward, iter(range(10**6))

    def broken(self: Trainer, batch: Batch, piece: int = 0) -> Any:
        loss, predicted = forward(self, batch, piece)
        return (loss * float("nan") if next(calls) == 4 else loss), predicted

    monkeypatch.setattr(Trainer, "_forward", broken)
    reports, dense = _train(_config(3, on_non_finite="skip"), one_rank)
    skipped = [report for report in reports if isinstance(report, SkippedBatchReport)]
    assert len(skipped) == 1
    assert "is nan" in skipped[0].reason
    assert len(_losses(reports)) == 6
    assert all(bool(torch.isfinite(each).all()) for each in dense.values())


def test_a_batch_has_a_sample_for_each_piece() -> None:
    with pytest.raises(ConfigError, match=r"train.accumulate: got 9, needed at most the 8 samples"):
        TrainConfig(batch_size=8, accumulate=9).rank_batch_size(1)
    with pytest.raises(ConfigError, match=r"train.accumulate: got 0, needed at least 1"):
        TrainConfig(accumulate=0)


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_run_goes_on_with_other_pieces_but_not_with_dropout(one_rank: Ranks, tmp_path: Path, dropout: float) -> None:
    first = _config(2, max_steps=6)
    first = replace(first, model=replace(first.model, dropout=dropout))
    trainer = Trainer(first, one_rank, tmp_path)
    list(trainer.train())
    trainer.close()
    then = Trainer(replace(first, train=replace(first.train, accumulate=3)), one_rank, tmp_path)
    if dropout:
        with pytest.raises(CheckpointError, match=r"train\.accumulate"):
            then.resume(tmp_path / "step_6")
    else:
        then.resume(tmp_path / "step_6")
        assert then.steps == 6
    then.close()
