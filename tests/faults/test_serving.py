"""A sample of `python -m tests.faults.serving`: errors while publications are taken and requests are answered."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from embershard.extras.serving.serving_replica import Replica
from tests.faults import serving
from tests.faults.injection import no_collections
from tests.faults.serving import Follower

pytestmark = [pytest.mark.extra, pytest.mark.slow]


def test_after_an_error_nothing_is_stale_without_a_word_and_nobody_is_dead(capsys: pytest.CaptureFixture[str]) -> None:
    tried, wrong = serving.try_points(points=20, seed=0)
    assert not wrong
    assert tried.total() >= 40
    assert tried.keys() == {"delta", "base", "start", "request"}
    assert "injected" in capsys.readouterr().err


def problem_of_changes(root: Path) -> str:
    """What is wrong after an error at a line of what changes while answers wait: the first that is found."""
    states = serving.publish(root, 40, with_bases=False)
    follower = Follower(root / "published", root / "replica", states)
    lines = follower.lines("delta_1")
    points = [at for at, place in enumerate(lines) if "_end_change" in place or "set_weights" in place]
    assert 10 < len(points) < len(states) - 1
    with no_collections():
        tried = (follower.point(f"delta_{seq}", at, MemoryError)[1] for seq, at in enumerate(points, 2))
        problem = next(filter(None, tried), "")
    follower.close()
    return problem


def test_a_change_that_fails_half_way_is_made_whole_before_an_answer(tmp_path: Path) -> None:
    assert not problem_of_changes(tmp_path)


def test_torn_states_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody knows that a change has begun."""

    def forgets(self: Replica) -> None:
        try:
            end(self)
        except Exception:
            self._served = replace(self._served, change=None)
            raise

    end = Replica._end_change
    monkeypatch.setattr(Replica, "_end_change", forgets)
    assert "differs from the trainer" in problem_of_changes(tmp_path)


def test_memory_is_bounded_however_many_ask() -> None:
    """50 at once take what as many take as are read at once, and not six times as much; by the same process."""
    found = serving.memory(num_rows=10_000)
    few, many = (found[name] - found["idle"] for name in ("8", "50"))
    assert many < 2 * few, found
