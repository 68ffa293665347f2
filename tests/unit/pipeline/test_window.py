"""The batches ahead: each is there once, and counted with the memory that it is taken to need."""

from __future__ import annotations

from typing import Any, cast

import pytest

from embershard.pipeline.window import Window


class Sized:
    """A staged batch of so many ids, each of which takes 20 bytes."""

    def __init__(self, num_ids: int) -> None:
        self.num_ids, self.known_bytes = num_ids, 20 * num_ids

    def receive(self) -> None: ...

    def know(self) -> None: ...


@pytest.mark.parametrize("every", [1, 2, 7, 8, 9])
def test_batches_of_changing_sizes_are_weighed_as_they_are(every: int) -> None:
    window, sizes = Window(), [1 if number % every == 0 else 1000 for number in range(64)]
    for size in sizes:
        window.add(cast(Any, Sized(size)))
        window.arrive()
        window.know()
    assert window.known_bytes == pytest.approx(20 * sum(sizes), rel=0.07)
    while len(window):
        window.take_first()
    assert window.known_bytes == 0


@pytest.mark.parametrize("was_taken", [False, True])
def test_a_batch_that_did_not_begin_is_the_next_one_again_and_there_once(was_taken: bool) -> None:
    """Its step was interrupted before it left the window, or after."""
    window, staged = Window(), [cast(Any, Sized(size)) for size in (10, 20)]
    for each in staged:
        window.add(each)
        window.arrive()
    window.know()
    known_bytes = window.known_bytes
    if was_taken:
        window.take_first()
    window.put_back(staged[0])
    assert window.coming(0, 3) == staged
    assert window.known_bytes == known_bytes
