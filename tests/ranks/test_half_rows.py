"""Distinct rows, and their gradients, that travel as fp16: bit for bit what rounding by hand gives."""

from __future__ import annotations

import dataclasses

import pytest

from tests.covering import matrix
from tests.ranks import half_rows, predicted_traffic
from tests.ranks.rows_exchange import Case
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

CASE = Case(rows=(2000, 900, 3000, 700), init_seed=3, ratio=0.3, steps=12)


@pytest.mark.parametrize(
    ("sharding", "changes"),
    [
        ("row_wise", {"mean": True}),
        ("table_wise", {"optimizer": "adagrad", "shared": True}),
        matrix("column_wise", {"dims": (16,) * 4}),
        matrix("row_wise", {"optimizer": "sgd", "weighted": True}),
    ],
)
@pytest.mark.parametrize(
    ("name", "half"), [(name, sides) for name, sides in half_rows.SIDES.items() if name != "neither"]
)
def test_bits_are_those_of_rows_rounded_by_hand(two_ranks: RankPool, sharding, changes, name, half) -> None:
    """And not those of another side's rounding, or of none."""
    case = dataclasses.replace(CASE, sharding=sharding, **changes)
    found = two_ranks.run(half_rows.compare, case, half)
    for outcome in found:
        assert outcome.different.pop(name) == []
        assert all(len(each) > 3 for each in outcome.different.values())
    assert sum(outcome.evictions for outcome in found) > 100


def test_rows_known_ahead_are_rounded_alike(two_ranks: RankPool) -> None:
    case = Case(comm=("fp16", "fp16"), init_seed=3, sharding="row_wise", policy="lookahead", lookahead=6, ratio=0.3)
    for outcome in two_ranks.run(half_rows.known_ahead, case):
        assert outcome.different == {"": []}
        assert outcome.evictions > 50


def test_counted_bytes_are_half_and_as_predicted(two_ranks: RankPool) -> None:
    """A plan for fp32 predicts twice as many."""
    case = predicted_traffic.Case("row_wise", "rows", comm=("fp16", "fp16"))
    _, pairs = predicted_traffic.compared(two_ranks, case, 2)
    assert predicted_traffic.is_close(pairs), pairs
    whole = predicted_traffic.sent_as_predicted(
        predicted_traffic.plan_of(dataclasses.replace(case, comm=("fp32", "fp32")), 2)
    )
    for kind in ("embeddings", "gradients"):
        assert whole[kind] == pytest.approx(2 * (pairs[kind].measured or 0.0), rel=0.02)
