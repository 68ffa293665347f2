"""Global batches of hot samples, of cold ones, and of what is left over: an epoch's samples, each in one of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from embershard.data.order.segments import Kind, PackedState, SegmentSchedule

Ranges = tuple[tuple[int, int], ...]


class PackedBatch(NamedTuple):
    """A batch of all ranks.

    Attributes:
        kind: of its samples.
        ranges: its samples, as ranges of positions in a `PackedOrder`.
        stop: samples of the epoch up to its end.
        state: position behind it.
    """

    kind: Kind
    ranges: Ranges
    stop: int
    state: PackedState


def batches_of_epoch(
    schedule: SegmentSchedule, num_samples: int, num_hot: int, start: int, state: PackedState
) -> Iterator[PackedBatch]:
    """Yield the batches of an epoch's rest.

    What is left of both kinds in the end, less than a batch of each, gives a mixed batch if it suffices.

    Args:
        schedule: chooses the kinds.
        num_samples, num_hot: of an epoch: all samples, and the hot ones.
        start: samples of the epoch before the position.
        state: the position; `state.hot_samples` of them are hot.
    """
    size, hot, cold = state.global_batch, state.hot_samples, start - state.hot_samples
    num_cold = num_samples - num_hot
    total = {"cold": num_cold // size, "hot": num_hot // size}
    while hot + cold + size <= num_samples:
        left = {"cold": (num_cold - cold) // size, "hot": (num_hot - hot) // size}
        kind = schedule.next_kind(left, total) or schedule.mixed()
        hot_taken = size if kind == "hot" else 0 if kind == "cold" else num_hot - hot
        first_cold = num_hot + cold
        ranges = ((hot, hot + hot_taken), (first_cold, first_cold + size - hot_taken))
        hot, cold = hot + hot_taken, cold + size - hot_taken
        yield PackedBatch(kind, ranges, hot + cold, schedule.place(state, hot))


def part_of(ranges: Ranges, first: int, last: int) -> Ranges:
    """Return the samples [first, last) of adjoined ranges, as ranges.

    >>> part_of(((10, 14), (30, 34)), 2, 6)
    ((12, 14), (30, 32))
    """
    found = []
    for start, stop in ranges:
        size = stop - start
        low, high = max(first, 0), min(last, size)
        if low < high:
            found.append((start + low, start + high))
        first, last = first - size, last - size
    return tuple(found)
