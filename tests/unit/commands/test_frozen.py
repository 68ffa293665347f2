"""What was built is not looked at by collections of garbage while a run trains."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from embershard.commands.train.run import _train_and_report


def trainer(train: Iterator[None]) -> SimpleNamespace:
    return SimpleNamespace(
        ranks=SimpleNamespace(barrier=lambda: None), supervision=SimpleNamespace(), train=lambda: train
    )


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    """The tests' own process has frozen what it imported."""
    had = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if had:
        gc.freeze()


def test_what_was_built_is_frozen_while_a_run_trains() -> None:
    counts, built = [], [[number] for number in range(5000)]

    def steps() -> Iterator[None]:
        counts.append(gc.get_freeze_count())
        yield None

    assert _train_and_report(trainer(steps()), None) is None  # type: ignore[arg-type]
    assert counts[0] >= len(built)
    assert gc.get_freeze_count() == 0


def test_a_run_that_fails_is_not_frozen_any_more() -> None:
    def steps() -> Iterator[None]:
        raise ValueError("input")
        yield None

    with pytest.raises(ValueError, match="input"):
        _train_and_report(trainer(steps()), None)  # type: ignore[arg-type]
    assert gc.get_freeze_count() == 0


def test_what_the_process_had_frozen_stays() -> None:
    gc.freeze()
    had = gc.get_freeze_count()
    _train_and_report(trainer(iter(())), None)  # type: ignore[arg-type]
    assert gc.get_freeze_count() >= had
    gc.unfreeze()
