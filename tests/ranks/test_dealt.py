"""Dealt samples train what slices train, to the last digits of float64; with the cache as with stock TorchRec, bit for
bit, and in groups of ranks as without dealing; over stops and resumes, too; and nothing more is filled or sent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits

import embershard
from embershard.data.hashing import make_key
from embershard.data.sources.source import FileSource
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
from tests.ranks.parity import differences
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


def written_as_dealt(samples: Path, folder: Path, size: int, ranks: int, group: int) -> tuple[Path, Path]:
    """Write samples in chunks of a group's share of a global batch; and the same ones in the order in which a run that
    deals them in groups of ranks trains them, so that each rank's slice of a batch has what it was dealt."""
    table = pq.read_table(samples)
    costs = np.array([len(seen) * (1 + 2 * len(seen)) for seen in table["seen"].to_pylist()])
    places = np.arange(len(costs))
    for first in range(0, len(costs) // (ranks * size) * ranks * size, group * size):
        own = slice(first, first + group * size)
        places[own] = first + embershard.deal(costs[own], group, seed=make_key(0, 0, first)).ravel()
    folder.mkdir()
    files = folder / "plain.parquet", folder / "dealt.parquet"
    for file, rows in zip(files, (table, table.take(places)), strict=True):
        pq.write_table(rows, file, row_group_size=group * size)
    return files


def trained_and_read(config: RunConfig) -> tuple[set[int], list[float], dict[str, torch.Tensor]]:
    """Train the whole run; return the numbers of the chunks that this rank parsed, losses, weights and states."""
    chunks, parsed = set[int](), FileSource.parsed

    def noted(source: FileSource, split: Any, chunk: int) -> Any:
        chunks.add(chunk)
        return parsed(source, split, chunk)

    with mock.patch.object(FileSource, "parsed", noted):
        return chunks, *own_models.trained(config)


def test_groups_of_ranks_train_what_was_dealt_to_each_and_read_no_other_s_samples(
    samples: Path, tmp_path: Path, four_ranks: RankPool
):
    """On 4 ranks in 2 groups: bit for bit what slices train that have each sample in the same place."""
    plain, as_dealt = written_as_dealt(samples, tmp_path / "files", size=16, ranks=4, group=2)
    config = target_config(plain, "tasks")
    config = replace(config, data=replace(config.data, eval_fraction=0.0, shuffle=False))
    in_groups = dealing(config, "seen", 1, 2, deal_ranks=2)
    reference = replace(config, data=replace(config.data, path=str(as_dealt)))
    of_groups, of_slices, together = (
        four_ranks.run(trained_and_read, each) for each in (in_groups, reference, dealing(config, "seen", 1, 2))
    )
    for rank, (mine, slices, others) in enumerate(zip(of_groups, of_slices, together, strict=True)):
        assert {chunk % 2 for chunk in mine[0]} == {rank // 2}, "each batch has a chunk for either group"
        assert mine[0] == slices[0]
        assert mine[1] == slices[1]
        assert differences(mine[2], slices[2]) == []
        assert {chunk % 2 for chunk in others[0]} == {0, 1}, "a control: all four deal together"
        assert differences(mine[2], others[2])
