"""The pipeline's tracer: which modules it lets run ahead, and what it leaves behind when it is cut off."""

from __future__ import annotations

import itertools

import pytest

from tests.covering import matrix
from tests.ranks import calls
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

SEVERAL = [
    several
    for count in (2, 3, 4)
    for several in itertools.combinations_with_replacement(("first", "second", "computed"), count)
]
KEPT = {("first", "first"), ("first", "second"), ("first", "computed"), ("first", "second", "computed")}


@pytest.mark.parametrize("several", [each if each in KEPT else matrix(each) for each in SEVERAL], ids=",".join)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_module_that_is_called_several_times_runs_unpipelined(
    one_rank: RankPool, several: tuple[str, ...], sequence: bool
) -> None:
    """Whatever the calls read, alike or not, and whatever their order: one rule."""
    (found,) = one_rank.run(calls.run_in_orders, several, sequence)
    for each in found:
        assert each["error"] == ""
        assert each["said"] == ["tables runs unpipelined: it is called more than once in a forward"]
        assert each["different"] == []


def test_a_module_that_is_called_once_runs_ahead_if_its_input_is_the_batch_s(two_ranks: RankPool) -> None:
    for found in two_ranks.run(calls.run, ("first",), False):
        assert found == {"error": "", "said": [], "different": []}
    for found in two_ranks.run(calls.run, ("computed",), False):
        said = "tables runs unpipelined: its input does not come straight from the batch"
        assert found == {"error": "", "said": [said], "different": []}


@pytest.mark.slow
@pytest.mark.parametrize("at_first", [False, matrix(True)], ids=["last", "first"])
def test_a_trace_that_is_cut_off_anywhere_leaves_nothing_replaced(one_rank: RankPool, at_first: bool) -> None:
    """Also inside of torch.fx's own undoing."""
    (found,) = one_rank.run(calls.cut_off_traces, at_first)
    assert found["wrong"] == []
    assert found["raised"] == found["places"] > 300
    assert (found["error"], found["different"]) == ("", [])
