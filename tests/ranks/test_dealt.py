"""Dealt samples train what slices train, to the last digits of float64; with the cache as with stock TorchRec, bit for
bit; over stops and resumes, too; and nothing more is filled or sent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

import embershard
from embershard.distributed import CheckpointConfig
from embershard.extras.deal.part import Dealt
from embershard.extras.hstu import HSTU
from embershard.models.hstu_config import HstuConfig
from embershard.training.config import RunConfig
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig
from embershard.training.parts.counts import StepMetrics
from embershard.training.reports import TrainReport
from embershard.training.trainer import Trainer
from tests.covering import matrix
from tests.ranks import own_models, test_trained_ids
from tests.ranks.planned import here
from tests.ranks.workers import RankPool
from tests.unit.data.targets import target_config, write_targets
from tests.unit.data.windows import make_windows

pytestmark = [pytest.mark.ranks, pytest.mark.extra, pytest.mark.slow]

STEPS, LR = 6, 0.05
#: Tables are float32: a sum near the middle of two numbers may be rounded to the other one, in one row. Others learn
#: from that by the learning rate.
ROWS_ROUNDED = LR * torch.finfo(torch.float32).eps
SGD: dict[str, Any] = {
    "embedding_optimizer": EmbeddingOptimizerConfig(kind="sgd", lr=LR),
    "dense_optimizer": DenseOptimizerConfig(kind="sgd", lr=LR),
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_targets(tmp_path_factory.mktemp("targets") / "samples.parquet")


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_windows(tmp_path_factory.mktemp("events"), users=2000, items=3000, history=12)


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return test_trained_ids.write_clicks(tmp_path_factory.mktemp("clicks"))


def dealing(config: RunConfig, *cost: Any, **data: Any) -> RunConfig:
    return replace(config, data=replace(config.data, deal="cost", deal_cost=cost or None, **data))


def in_fp64(config: RunConfig, **train: Any) -> RunConfig:
    """The same with SGD, in float64, on global batches of 64 in the files' order."""
    of_train = replace(
        config.train, batch_size=None, global_batch_size=64, max_steps=STEPS, log_every=1, precision="fp64", **train
    )
    return replace(config, train=of_train, **SGD)


@dataclass(frozen=True)
class Trained:
    """What a rank has of a run.

    Attributes:
        losses: of its steps.
        dense: the weights of the dense layers.
        fills: of all caches.
        sent: bytes that all ranks sent of embeddings and of gradients.
        balance: how evenly it was dealt.
    """

    losses: list[float]
    dense: list[float]
    fills: int
    sent: tuple[float, ...]
    balance: dict[str, float]


def trained(config: RunConfig) -> Trained:
    trainer = Trainer(config, here())
    losses = [report.loss for report in trainer.train() if isinstance(report, TrainReport)]
    dense = [weight.detach().double().flatten() for weight in trainer.optimizers.dense_parameters.values()]
    found = trainer.of_parts(lambda part: part.result() if isinstance(part, StepMetrics | Dealt) else {})
    trainer.close()
    sent = found["sent_bytes"]
    moved = (sent.embeddings, sent.gradients, sent.dense_all_reduce)
    return Trained(losses, torch.cat(dense).tolist(), found["cache"].fills, moved, found.get("deal", {}))


def config_of(case: str, samples: Path, clicks: Path) -> tuple[RunConfig, RunConfig]:
    """The settings of a run, and of the same one dealt."""
    if case == "ids":
        config = test_trained_ids.make_config(clicks, pooling="sum")
        config = in_fp64(config)
        return config, dealing(config, "item", 1, 2)
    pieces = 3 if case == "accumulated" else 1
    config = target_config(samples, {"accumulated": "several"}.get(case, case))
    table = config.data.table
    sums = {name: replace(f, pooling="sum") for name, f in table.features.items()}
    config = replace(config, data=replace(config.data, table=replace(table, features=sums)))
    config = in_fp64(config, accumulate=pieces)
    return config, dealing(config, "seen", 1, 2)


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("several", "two_ranks"), ("tasks", "two_ranks"), ("accumulated", "two_ranks"), ("ids", "two_ranks"),
        matrix("accumulated", "one_rank"), matrix("tasks", "four_ranks"), matrix("accumulated", "four_ranks"),
        matrix("ids", "four_ranks"),
    ],
)  # fmt: skip
def test_dealt_samples_train_what_slices_train(case, ranks, samples, clicks, request):
    """Weights of samples and several labels; labels that are missing; micro-batches; tables that take any id."""
    pool: RankPool = request.getfixturevalue(ranks)
    plain, dealt = config_of(case, samples, clicks)
    slices, parts = (pool.run(trained, config)[0] for config in (plain, dealt))
    assert parts.losses == pytest.approx(slices.losses, rel=ROWS_ROUNDED)
    assert parts.dense == pytest.approx(slices.dense, abs=ROWS_ROUNDED)
    assert parts.sent == slices.sent
    if case != "accumulated":  # whose micro-batches are of other samples
        assert parts.fills == slices.fills
    if ranks != "one_rank":
        assert parts.balance["dealt"] < 0.98 * parts.balance["undealt"], "or nothing was dealt"


def run_hstu(way: str, dropout: float = 0.0) -> tuple[list[float], list[float]]:
    """Train HSTU in float64, as a program of one's own deals: losses, and weights."""
    rank, ranks, size = dist.get_rank(), dist.get_world_size(), 8
    torch.manual_seed(3)
    rows = torch.nn.Embedding(90, 8).double()
    model = HSTU(1, 8, HstuConfig(max_events=40, linear_dropout=dropout), [8, 1]).double()
    weights = [*rows.parameters(), *model.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.5)
    torch.manual_seed(100 + rank)  # of the masks of dropout
    losses = []
    for step in range(STEPS):
        draw = np.random.default_rng((5, step))
        lengths = 1 + (draw.random(ranks * size) ** 4 * 39).astype(np.int64)
        ids = torch.from_numpy(draw.integers(90, size=(ranks * size, 41)))
        labels = torch.from_numpy((draw.random(ranks * size) < 0.4).astype(np.float64))
        parts = np.arange(ranks * size).reshape(ranks, size)
        if way != "slices":
            parts = embershard.deal(lengths * (28 + lengths), ranks, seed=step)
        if way == "a sample twice":
            parts[0, 0] = parts[0, 1]
        fewer = 3 if way.startswith("unequal counts") else 0  # of the first rank, and more of the last one
        own = torch.from_numpy(np.split(parts.ravel(), size * np.arange(1, ranks) - fewer)[rank])
        events, target = rows(ids[own, 1:]).unsqueeze(2), rows(ids[own, :1])
        is_event = torch.arange(40) < torch.from_numpy(lengths)[own, None]
        outputs = model(target, events, is_event, target.new_ones(len(own), 1, 8))[:, 0]
        loss = binary_cross_entropy_with_logits(outputs, labels[own])
        if way == "unequal counts, weighted":
            loss = loss * len(own) / size
        optimizer.zero_grad()
        loss.backward()
        for weight in weights:
            dist.all_reduce(weight.grad)
            weight.grad /= ranks  # type: ignore[operator]
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
    return losses, torch.cat([weight.detach().flatten() for weight in weights]).tolist()


@pytest.mark.parametrize("ranks", ["two_ranks", matrix("four_ranks")])
def test_a_program_that_deals_trains_what_slices_train(ranks, request):
    pool: RankPool = request.getfixturevalue(ranks)
    slices, dealt = (pool.run(run_hstu, way)[0] for way in ("slices", "dealt"))
    assert dealt[0] == pytest.approx(slices[0], rel=1e-12)
    assert dealt[1] == pytest.approx(slices[1], abs=1e-12)
    assert dealt[1] != slices[1], "sums are added in another order"


@pytest.mark.matrix
def test_a_sample_twice_is_noticed_and_dropout_has_other_masks(two_ranks: RankPool):
    """The controls of both tests above."""
    slices, wrong = (two_ranks.run(run_hstu, way)[0] for way in ("slices", "a sample twice"))
    assert wrong[0] != pytest.approx(slices[0], rel=1e-3)
    dropped, dealt = (two_ranks.run(run_hstu, way, 0.1)[0] for way in ("slices", "dealt"))
    assert dealt[0] != pytest.approx(dropped[0], rel=1e-4)


@pytest.mark.matrix
def test_unequal_counts_under_a_plain_mean_are_noticed(two_ranks: RankPool):
    """A control, too: why each rank gets equally many. Weighted by counts, the same parts train what slices do."""
    ways = ("slices", "unequal counts", "unequal counts, weighted")
    slices, plain, weighted = (two_ranks.run(run_hstu, way)[0] for way in ways)
    assert plain[0][0] != pytest.approx(slices[0][0], rel=1e-3), "before any weight differs"
    assert plain[1] != pytest.approx(slices[1], abs=1e-3)
    assert weighted[0] == pytest.approx(slices[0], rel=1e-12)
    assert weighted[1] == pytest.approx(slices[1], abs=1e-12)


def hstu_config(windows: Path, **changes: Any) -> RunConfig:
    return dealing(own_models.history_config("hstu", windows, **changes))


@pytest.mark.smoke
def test_cached_is_stock_under_one_deal_and_as_many_rows_come(windows: Path, two_ranks: RankPool):
    config = hstu_config(windows)
    verdicts = two_ranks.run(own_models.verdict, config)
    assert all(verdict.is_equal and verdict.caches[0].evictions > 50 for verdict in verdicts), verdicts
    undealt = replace(config, data=replace(config.data, deal="order"))
    parts, slices = (two_ranks.run(trained, each)[0] for each in (config, undealt))
    assert parts.balance["dealt"] < 1.02 < 1.05 < parts.balance["undealt"]
    assert parts.fills == slices.fills > 50


@pytest.mark.parametrize("deal_ranks", [None, matrix(2)])
def test_a_resumed_run_has_the_bits_of_a_whole_one(deal_ranks, windows: Path, two_ranks: RankPool, tmp_path: Path):
    half = own_models.STEPS // 2
    config = hstu_config(windows, checkpoint=CheckpointConfig(at_end=True, every_steps=half))
    config = replace(config, data=replace(config.data, deal_ranks=deal_ranks, num_workers=2))
    assert two_ranks.run(own_models.resumed_equals_whole, config, tmp_path / "checkpoints") == [[], []]
