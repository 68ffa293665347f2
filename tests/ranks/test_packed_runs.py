"""Hot and cold batches on several ranks: one order, nothing of hot batches between shards, and runs that go on."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from embershard.cache import CacheConfig
from embershard.distributed import CheckpointConfig
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.config import ShardingConfig
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.reports import TrainReport
from embershard.training.trainer import Trainer
from tests.ranks.planned import here
from tests.ranks.rounding import loss_rounding
from tests.ranks.workers import RankPool
from tests.small_runs import small_run

pytestmark = [pytest.mark.extra, pytest.mark.ranks]

GLOBAL_BATCH, SAVED_AT = 20, 13


@dataclass
class Trained:
    """What a rank trained on, step by step.

    Attributes:
        samples: the first dense features of its samples.
        is_hot: of its batches.
        losses: of all ranks.
        embedding_bytes: between ranks, per rank.
        batches: by kind, over all steps.
    """

    samples: list[list[float]] = field(default_factory=list)
    is_hot: list[bool] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    embedding_bytes: list[float] = field(default_factory=list)
    batches: dict[str, int] = field(default_factory=dict)


def make_config(lookahead: int) -> RunConfig:
    return small_run(
        cache=CacheConfig(ratio=0.5),
        look_ahead=LookAheadConfig(lookahead, 1),
        sharding=ShardingConfig(mode="hot_cold", hot_bytes=20_000),
        train=TrainConfig(global_batch_size=GLOBAL_BATCH, log_every=1, epochs=1, device="cpu"),
        checkpoint=CheckpointConfig(every_steps=SAVED_AT, at_end=False, keep_last=9),
    )


def run(folder: Path | None, lookahead: int, resume: Path | None = None) -> Trained:
    """Train, from a checkpoint on if there is one."""
    trainer = Trainer(make_config(lookahead), here(), folder)
    if resume is not None:
        trainer.resume(resume)
    found, step = Trained(), trainer.step

    def noting(batch):  # type: ignore[no-untyped-def]
        found.samples.append(batch.dense_features[:, 0].tolist())
        found.is_hot.append(batch.is_hot)
        return step(batch)

    trainer.step = noting  # type: ignore[method-assign]
    for report in trainer.train():
        if isinstance(report, TrainReport):
            found.losses.append(report.loss)
            found.embedding_bytes.append(report.sent_bytes.embeddings)
            found.batches = report.batches or {}
    trainer.close()
    return found


def samples(ranks: list[Trained]) -> list[list[float]]:
    """The samples of each step, of all ranks."""
    return [list(itertools.chain(*parts)) for parts in zip(*(rank.samples for rank in ranks), strict=True)]


def test_one_order_on_one_rank_and_two_and_runs_go_on(one_rank: RankPool, two_ranks: RankPool, tmp_path: Path) -> None:
    whole = two_ranks.run(run, tmp_path / "two" / "checkpoints", 0)
    alone = one_rank.run(run, tmp_path / "one" / "checkpoints", 0)
    first = whole[0]
    assert samples(whole) == samples(alone)
    assert first.is_hot == whole[1].is_hot == alone[0].is_hot
    assert first.batches == alone[0].batches
    assert min(first.batches["hot"], first.batches["cold"]) >= 10
    assert first.batches["hot"] == sum(first.is_hot)
    rounding = loss_rounding(len(first.losses), GLOBAL_BATCH)
    assert first.losses == pytest.approx(alone[0].losses, rel=0, abs=rounding)
    sent = list(zip(first.embedding_bytes, first.is_hot, strict=True))
    assert {num_bytes for num_bytes, is_hot in sent if is_hot} == {0}
    assert min(num_bytes for num_bytes, is_hot in sent if not is_hot) > 0
    saved = tmp_path / "two" / "checkpoints" / f"step_{SAVED_AT}"
    rest = two_ranks.run(run, None, 5, saved)
    assert rest[0].losses == first.losses[SAVED_AT:], "bit for bit, in the middle of a segment"
    assert samples(rest) == samples(whole)[SAVED_AT:]
    assert samples(one_rank.run(run, None, 0, saved)) == samples(whole)[SAVED_AT:]
