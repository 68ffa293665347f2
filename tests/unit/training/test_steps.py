"""The batches of a run, from a stream that has none for a while."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from embershard.data import StreamState
from embershard.training.steps import InputFailure, Steps


class Waiting:
    """Gives numbers as batches; None: there is none yet."""

    def __init__(self, *batches: int | None) -> None:
        self._left, self.waits, self.state = list(batches), True, StreamState()

    def __next__(self) -> Any:
        batch = self._left.pop(0) if self._left else None
        if batch is None:
            raise StopIteration
        self.state = StreamState(0, batch)
        return torch.tensor(batch)

    def to_save(self, state: StreamState) -> StreamState:
        return state


def number_of(steps: Steps) -> int | None:
    try:
        upcoming = steps.next()
    except StopIteration:
        return None
    with upcoming as batch:
        return int(batch)


def steps_of(*batches: int | None, limit: int | None = None) -> Steps:
    stream: Any = Waiting(*batches)
    return Steps(stream, limit, torch.device("cpu"), None, InputFailure())


def test_batches_that_come_later() -> None:
    steps = steps_of(1, None, None, 2, 3)
    assert [number_of(steps) for _ in range(7)] == [1, None, None, 2, 3, None, None]
    assert steps.state == StreamState(0, 3)


@pytest.mark.parametrize("limit", [2, 3])
def test_a_skipped_batch_is_replaced_after_the_limit_alone(limit: int) -> None:
    steps = steps_of(1, None, 2, None, 3, 4, 5, limit=limit)
    assert number_of(steps) == 1
    steps.replace_one()  # it was skipped
    found = [number_of(steps) for _ in range(7)]
    assert [each for each in found if each is not None] == [2, 3, 4][:limit]
    assert found[:2] == [None, 2]


def test_a_stream_that_ends() -> None:
    steps = steps_of(1, 2)
    steps._stream.waits = False
    assert [number_of(steps) for _ in range(4)] == [1, 2, None, None]
