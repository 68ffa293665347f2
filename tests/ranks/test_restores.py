"""docs/torchrec.md: a restore in new processes goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.covering import covering, matrix
from tests.ranks import restores
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module", params=[matrix(1), 2], ids="{} ranks".format)
def pools(request: pytest.FixtureRequest) -> Iterator[tuple[RankPool, RankPool]]:
    """Ranks, and as many that did nothing before."""
    shared = request.getfixturevalue("one_rank" if request.param == 1 else "two_ranks")
    new = RankPool(request.param)
    yield shared, new
    new.close()


@pytest.mark.parametrize(("dense", "with_dcp"), covering(tuple(restores.DENSE), (True, False)))
@pytest.mark.parametrize("cached", [True, matrix(False)])
def test_losses_after_a_restore_are_those_without(
    pools: tuple[RankPool, RankPool], dense: str, cached: bool, with_dcp: bool, tmp_path: Path
) -> None:
    ranks, others = pools
    case = (str(tmp_path), dense, cached, with_dcp)
    whole = ranks.run(restores.saved, *case)
    again = others.run(restores.restored, *case, True)
    for (losses, state), (expected, wanted) in zip(again, whole, strict=True):
        assert losses == expected
        assert [name for name in wanted if not torch.equal(state[name], wanted[name])] == []
    for (losses, _), (expected, _) in zip(others.run(restores.restored, *case, False), whole, strict=True):
        assert losses != expected  # without the states, which only a file of torch.save misses aloud
        assert with_dcp or "Different parameter count" in losses


def test_torchrec_s_warm_up_of_several_optimizers_saves_no_position(one_rank: RankPool) -> None:
    """So the page's learning rates are a function of the step."""
    ((has_position, saved),) = one_rank.run(restores.warm_up)
    assert has_position
    assert [name for name in saved if "warmup" in name] == []
