"""Sums of row gradients over ranks."""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.distributed import row_gradients
from embershard.distributed.row_gradients import sum_rows


@given(seed=st.integers(0, 99), num_ranks=st.integers(1, 4), most=st.integers(0, 6))
def test_every_touched_row_once_and_added_up_in_rank_order(seed, num_ranks, most):
    generator = torch.Generator().manual_seed(seed)
    of_rank = []
    for _ in range(num_ranks):
        rows = torch.randperm(8, generator=generator)[: int(torch.randint(0, most + 1, (), generator=generator))]
        gradients = torch.randn(len(rows), 3, generator=generator)
        gradients[:1] = 0
        of_rank.append((rows, gradients))
    with mock.patch.object(row_gradients, "_gather", return_value=of_rank):
        found = sum_rows(*of_rank[0])
    expected: dict[int, torch.Tensor] = {}
    for rows, gradients in of_rank:
        for row, gradient in zip(rows.tolist(), gradients, strict=True):
            expected[row] = expected.get(row, torch.zeros(3)) + gradient
    assert found.rows.tolist() == sorted(expected)
    assert found.sums.shape == (len(expected), 3)
    assert all(torch.equal(total, expected[row]) for row, total in zip(found.rows.tolist(), found.sums, strict=True))
