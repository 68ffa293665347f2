"""The efficiency of more ranks, and its interval: by the formula, in 95 of 100 cases, and where there is none."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from embershard.reports.results import results_text
from embershard.sweeps.spread import Efficiency, Spread, efficiencies, read_configurations
from tests.unit.reports.reported_runs import write_sweep

ONE, FOUR = (1000.0, 1040.0, 980.0), (3100.0, 3000.0, 3300.0)


def by_hand(here: tuple[float, ...], fewest: tuple[float, ...], ratio: float) -> float:
    """Half of the interval: Welch's, of the means over themselves."""
    errors = [np.std(each, ddof=1) / np.sqrt(len(each)) / np.mean(each) for each in (here, fewest)]
    freedom = sum(error**2 for error in errors) ** 2
    freedom /= sum(error**4 / (len(each) - 1) for error, each in zip(errors, (here, fewest), strict=True))
    return float(ratio * stats.t.ppf(0.975, freedom) * np.hypot(*errors))


def test_it_is_of_a_rank_and_its_interval_is_welch_s():
    found = Efficiency.of(Spread(FOUR), 4, Spread(ONE), 1)
    assert found.value == pytest.approx(np.mean(FOUR) / 4 / np.mean(ONE))
    assert found.half == pytest.approx(by_hand(FOUR, ONE, found.value))
    assert 0.05 < found.half < 0.2
    assert Efficiency.of(Spread(FOUR), 8, Spread(ONE), 2).value == pytest.approx(found.value)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.2, 1.0])  # noise on more ranks, of that on the fewest
@pytest.mark.parametrize("runs", [3, 8])
def test_the_interval_holds_in_95_of_100_cases(runs: int, scale: float):
    random = np.random.default_rng(0)
    held, tries = 0, 2000
    for _ in range(tries):
        one, four = random.normal(100, 3, runs), random.normal(300, 9 * scale, runs)
        found = Efficiency.of(Spread(tuple(four)), 4, Spread(tuple(one)), 1)
        assert found.half is not None
        held += abs(found.value - 0.75) <= found.half
    assert 0.935 < held / tries < 0.975


@pytest.mark.parametrize(
    ("here", "fewest", "why"),
    [
        ((300.0,), ONE, "one run on 4 ranks"),
        (FOUR, (100.0,), "one run on 1 rank"),
        ((300.0,), (100.0,), "one run on 4 ranks and one on 1 rank"),
    ],
)
def test_one_run_has_no_interval_and_it_says_so(here: tuple[float, ...], fewest: tuple[float, ...], why: str):
    found = Efficiency.of(Spread(here), 4, Spread(fewest), 1)
    assert (found.half, found.why) == (None, f"{why}: no interval")
    assert "±" not in found.text


def test_the_fewest_ranks_have_one_by_definition():
    found = Efficiency.of(Spread(ONE), 1, Spread(ONE), 1)
    assert (found.value, found.half, found.why) == (1.0, None, "what others are compared with")
    assert Efficiency.of(Spread((6.0, 6.0)), 2, Spread((4.0, 4.0)), 1).half == 0.0


@pytest.mark.slow
def test_configurations_are_compared_with_those_that_differ_in_their_ranks_alone(tmp_path):
    found = efficiencies(read_configurations(write_sweep(tmp_path)))
    assert [each and (round(each.value, 3), each.base_ranks, each.half is None) for each in found] == [
        *((1.0, 1, True), (1.0, 1, True)),
        *((0.95, 1, False), (round(1850 / 2000, 3), 1, True)),  # of ratio 0.2 one run on 2 ranks failed
        *((0.75, 1, False), (0.75, 1, False)),
    ]
    lines = results_text([tmp_path], "markdown").splitlines()
    column = [cell.strip() for cell in lines[0].split("|")].index("efficiency")
    cells = [line.split("|")[column].strip() for line in lines[2:]]
    assert cells[0] == "100.0%"
    assert cells[2] == f"95.0% ± {100 * by_hand((1850.0, 1950.0), (950.0, 1050.0), 0.95):.1f}%"
    assert cells[3] == "92.5%"
