"""The modes on a GPU train what stock TorchRec trains, bit for bit; gradients are dyadic rationals."""

from __future__ import annotations

import pytest

from tests.gpu import cases
from tests.ranks.workers import RankPool


@pytest.mark.parametrize("name", [*cases.MODES, *cases.REPLICATED])
@pytest.mark.parametrize(("ranks", "num_ranks"), [("gpu_rank", 1), ("two_gpu_ranks", 2)])
def test_weights_and_states_are_those_of_stock(name, ranks, num_ranks, request) -> None:
    pool: RankPool = request.getfixturevalue(ranks)
    cases.check_mode(pool, name, "cuda", num_ranks)


def test_more_uses_of_a_row_than_fbgemm_sums_at_once(gpu_rank: RankPool) -> None:
    cases.check_many_uses(gpu_rank, "cuda")
