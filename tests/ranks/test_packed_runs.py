"""Hot and cold batches on several ranks: one order, nothing of hot batches between shards, and runs that go on."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.ranks import packed_runs
from tests.ranks.packed_runs import GLOBAL_BATCH, SAVED_AT, Trained
from tests.ranks.rounding import loss_rounding
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


def samples(ranks: list[Trained]) -> list[list[float]]:
    """The samples of each step, of all ranks."""
    return [list(itertools.chain(*parts)) for parts in zip(*(rank.samples for rank in ranks), strict=True)]


def test_one_order_on_one_rank_and_two_and_runs_go_on(one_rank: RankPool, two_ranks: RankPool, tmp_path: Path) -> None:
    whole = two_ranks.run(packed_runs.run, tmp_path / "two" / "checkpoints", 0)
    alone = one_rank.run(packed_runs.run, tmp_path / "one" / "checkpoints", 0)
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
    rest = two_ranks.run(packed_runs.run, None, 5, saved)
    assert rest[0].losses == first.losses[SAVED_AT:], "bit for bit, in the middle of a segment"
    assert samples(rest) == samples(whole)[SAVED_AT:]
    assert samples(one_rank.run(packed_runs.run, None, 0, saved)) == samples(whole)[SAVED_AT:]
