"""Every batch of an iterator enters the pipeline once, whatever is raised on its way in. One rank alone."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from embershard.distributed.agreement import Agreement, Supply
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
