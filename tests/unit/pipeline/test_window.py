"""The memory that batches ahead are taken to need."""

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
