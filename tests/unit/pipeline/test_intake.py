"""Every batch of an iterator enters the pipeline once, whatever is raised on its way in. One rank alone."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

from embershard.distributed.agreement import Agreement, Supply
from embershard.errors import DataError
from embershard.pipeline.intake import Intake

Batches = list[str]


def fill(intake: Intake, batches: Any, entered: Batches, number: int) -> None:
    for _ in range(number):
        intake.offer(batches, is_full=False, wish=1)
        intake.enter(lambda batch, *_: entered.append(batch))


def test_a_batch_that_could_not_be_let_in_is_let_in_later() -> None:
    intake, batches, entered = Intake(torch.device("cpu"), lambda batch: None), iter("abc"), Batches()

    def out_of_memory(batch: str, *_: Any) -> None:
        raise MemoryError(batch)

    with mock.patch.object(Agreement, "start", autospec=True, side_effect=Agreement.start) as asked:
        intake.offer(batches, is_full=False, wish=1)
        with pytest.raises(MemoryError, match="a"):
            intake.enter(out_of_memory)
        fill(intake, batches, entered, 4)
    assert entered == ["a", "b", "c"]
    assert intake.is_over
    assert asked.call_count == 4, "once for each batch and for the end: the other ranks were asked no more"


def test_a_batch_that_is_in_does_not_enter_again() -> None:
    """An interrupt came when it was in, and before the intake knew."""
    intake, batches, entered = Intake(torch.device("cpu"), lambda batch: None), iter("abc"), Batches()

    def interrupted(batch: str, *_: Any) -> None:
        entered.append(batch)
        raise KeyboardInterrupt

    intake.offer(batches, is_full=False, wish=1)
    with pytest.raises(KeyboardInterrupt):
        intake.enter(interrupted)
    intake.note_entered(entered[-1])
    fill(intake, batches, entered, 3)
    assert entered == ["a", "b", "c"]


def test_what_the_check_read_enters_with_its_batch() -> None:
    """The check runs once for each batch, also where the batch waits before it enters."""
    checked: Batches = []
    tell = {"A": [1.0], "B": [2.0]}.__getitem__
    intake = Intake(torch.device("cpu"), lambda batch: checked.append(batch) or batch.upper(), tell, num_told=1)
    batches, entered = iter("ab"), []
    intake.offer(batches, is_full=True, wish=1)
    assert not intake.enter(lambda *given: entered.append(given))
    for _ in range(3):
        intake.offer(batches, is_full=False, wish=1)
        intake.enter(lambda *given: entered.append(given))
    assert checked == ["a", "b"]
    assert entered == [("a", "A", [[1.0]]), ("b", "B", [[2.0]])], "with what this rank, the only one, told of it"


@pytest.mark.parametrize("where", ["check", "tell", "start"])
def test_a_batch_whose_reading_was_interrupted_is_read_again(where: str) -> None:
    """Nothing of the batch before is told of it, and the carried numbers still travel."""
    interrupted: set[str] = set()

    def once(place: str, batch: str) -> str:
        if (place, batch) == (where, "b") and not interrupted:
            interrupted.add(batch)
            raise KeyboardInterrupt
        return batch

    def started(own: Agreement, state: int, wish: int, tell: list[float]) -> None:
        once("start", chr(int(tell[0])))
        start(own, state, wish, tell)

    start = Agreement.start
    intake = Intake(
        torch.device("cpu"),
        lambda batch: once("check", batch),
        lambda batch: [float(ord(once("tell", batch)))],
        num_told=1,
        num_carried=1,
    )
    batches, entered = iter("abc"), []
    with mock.patch.object(Agreement, "start", started):
        intake.offer(batches, is_full=False, wish=1)
        intake.enter(lambda *given: entered.append(given))
        intake.carry([0.5])
        with pytest.raises(KeyboardInterrupt):
            intake.offer(batches, is_full=False, wish=1)
        for _ in range(3):
            intake.offer(batches, is_full=False, wish=1)
            assert intake.carried() == ([[0.5]] if len(entered) == 1 else None)
            intake.enter(lambda *given: entered.append(given))
    assert entered == [("a", "a", [[97.0]]), ("b", "b", [[98.0]]), ("c", "c", [[99.0]])]


def test_a_batch_waits_while_there_is_no_room() -> None:
    intake, batches, entered = Intake(torch.device("cpu"), lambda batch: None), iter("ab"), Batches()
    intake.offer(batches, is_full=True, wish=1)
    assert not intake.enter(lambda batch, *_: entered.append(batch))
    fill(intake, batches, entered, 2)
    assert entered == ["a", "b"]


def test_a_batch_that_is_not_there_yet_is_asked_for_again() -> None:
    intake, checked, entered = Intake(torch.device("cpu"), lambda batch: checked.append(batch)), Batches(), Batches()
    batches = iter([Supply.NOT_YET, "a", Supply.NOT_YET, Supply.NOT_YET, "b"])
    fill(intake, batches, entered, 4)
    assert (entered, intake.is_over) == (["a"], False)
    fill(intake, batches, entered, 2)
    assert (entered, intake.is_over) == (["a", "b"], True)
    assert checked == ["a", "b"]


def carrying() -> Intake:
    return Intake(
        torch.device("cpu"), lambda batch: batch, lambda batch: [float(ord(batch))], num_told=1, num_carried=2
    )


def test_numbers_travel_with_the_next_offer() -> None:
    """With that alone, whatever becomes of its batch; they are read before or behind its entry, and once."""
    intake, batches, entered = carrying(), iter("abcd"), []
    for is_full, reads_first in ((False, True), (True, True), (False, False), (True, False)):
        intake.carry([1.5, -2.0])
        intake.offer(batches, is_full, wish=1)
        found = intake.carried() if reads_first else None
        assert intake.enter(lambda *given: entered.append(given)) is not is_full
        assert (found if reads_first else intake.carried()) == [[1.5, -2.0]]
        assert intake.carried() is None
    fill(intake, batches, [], 1)
    assert intake.carried() is None, "nothing travelled"
    assert entered == [("a", "a", [[97.0]]), ("b", "b", [[98.0]])]


def test_numbers_that_no_offer_took_are_dropped() -> None:
    intake, batches = carrying(), iter("a")
    intake.offer(batches, is_full=False, wish=1)
    intake.carry([1.0, 1.0])
    assert intake.carried() is None, "the ranks were asked before"
    fill(intake, batches, [], 2)
    assert intake.is_over
    intake.carry([2.0, 2.0])
    intake.offer(batches, is_full=False, wish=1)
    assert intake.carried() is None, "there are no more offers"
    intake.reopen()
    intake.offer(iter("b"), is_full=False, wish=1)
    assert intake.carried() is None, "they were dropped"
    intake.carry([3.0, 3.0])
    intake.forget()
    assert intake.carried() is None


def test_numbers_travel_with_bad_news() -> None:
    """A rank whose input failed, or ended, had trained a step before."""

    def failing() -> Any:
        yield "a"
        raise DataError("line 7 is bad")

    for batches in (failing(), iter("a")):
        intake = carrying()
        entered = Batches()
        fill(intake, batches, entered, 1)
        intake.carry([1.0, 2.0])
        intake.offer(batches, is_full=False, wish=1)
        assert intake.carried() == [[1.0, 2.0]]
        with contextlib.suppress(DataError):
            assert not intake.enter(lambda *given: pytest.fail("nothing enters"))
            assert intake.is_over
        assert entered == ["a"]
