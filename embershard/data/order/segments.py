"""Segments of cold and of hot batches in turn: how long each is, by FAE's rule (Adnan et al., arXiv 2103.00686).

Segments take a share R of an epoch's cold batches, then of its hot ones, and so on; R begins at 1/2. If the mean loss
of a segment is above that of the last one of its kind, R is halved; after `FALLS` falls in a row it is doubled. Losses
are those of the training, before each batch is trained on.

Batches are read ahead of training, so a decision takes effect late: that after segment k in segment k + 2 or, if it
begins less than `READ_AHEAD` batches after the end of segment k, in a later one. So the order of batches is a function
of the losses, not of how far a run reads ahead.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from embershard.errors import ConfigError, DataError

if TYPE_CHECKING:
    from embershard.data.hashing import Ids
    from embershard.data.order.order import ChunkTable, EpochOrder

Kind = Literal["cold", "hot", "mixed"]

#: The most batches that may be read beyond the last one whose loss is known.
READ_AHEAD = 128
#: Losses that fall in a row before R is doubled, and the most times that R is halved from 1. Both numbers are ours.
FALLS, MOST_HALVINGS = 3, 6
Ranges = tuple[tuple[int, int], ...]


class KindOrder(Protocol):
    """The order of one epoch with the hot samples first."""

    def hot_among_first(self, count: int) -> int:
        """Return how many of the first `count` samples of the order without kinds are hot."""

    def locate(self, start: int, stop: int) -> list[tuple[int, Ids]]:
        """Return the places of the samples at positions [start, stop): pairs of a chunk and rows of it, in order."""


class KindChunks(Protocol):
    """The hot samples of each of C chunks; `num_hot` is int64 [C]."""

    num_hot: Ids

    def packed(self, order: EpochOrder) -> KindOrder:
        """Return the order of the same epoch with the hot samples first."""


class SampleKinds(Protocol):
    """Which training samples are hot; `digest` is of the data and the hot rows."""

    @property
    def digest(self) -> str: ...

    def in_chunks(self, chunks: ChunkTable) -> KindChunks:
        """Return the hot samples of each chunk of the training data."""


@dataclass(frozen=True)
class Decision:
    """R = 2**-halvings, decided after segment number `segment`, which ended with batch number `batch` (from 1)."""

    segment: int
    batch: int
    halvings: int


@dataclass(frozen=True)
class Learned:
    """What the losses of the trained batches have decided.

    Attributes:
        loss_sum, num_losses: of the segment in training.
        last_losses: mean loss of the last segment, by kind.
        falls: falls in a row.
        decisions: those that may still take effect, the last one included.
    """

    loss_sum: float = 0.0
    num_losses: int = 0
    last_losses: dict[str, float] = field(default_factory=dict)
    falls: int = 0
    decisions: tuple[Decision, ...] = ()

    def __post_init__(self) -> None:
        numbers = [self.num_losses, self.falls, *(number for made in self.decisions for number in vars(made).values())]
        losses = [self.loss_sum, *self.last_losses.values()]
        too_small = any(made.halvings > MOST_HALVINGS for made in self.decisions)
        if min(numbers) < 0 or too_small or not all(map(math.isfinite, losses)):
            raise DataError(
                f"packed.learned: got {self}; needed counts from 0, finite losses, at most {MOST_HALVINGS} halvings"
            )


@dataclass(frozen=True)
class PackedState:
    """A position in an order of hot and cold batches, beside the number of samples before it.

    >>> PackedState(digest="", global_batch=512, hot_samples=1024).left
    0

    Attributes:
        digest: of the data and the hot rows.
        global_batch: samples of all ranks per step.
        hot_samples: those before the position, in this epoch.
        batches: batches before it, in the run.
        segments: segments begun before it.
        kind: of the last of them.
        left: its batches that come next.
        learned: from the losses of the batches before it.
    """

    digest: str
    global_batch: int
    hot_samples: int = 0
    batches: int = 0
    segments: int = 0
    kind: Kind = "hot"
    left: int = 0
    learned: Learned = field(default_factory=Learned)

    def __post_init__(self) -> None:
        numbers = (self.hot_samples, self.batches, self.segments, self.left)
        if min(numbers) < 0 or self.segments > self.batches or (self.left and not self.segments):
            raise DataError(f"packed: got {self}; needed counts from 0, and no more segments than batches")


class _Segment(NamedTuple):
    number: int
    kind: Kind
    end: int  # number of its last batch, from 1


class SegmentSchedule:
    """Says of which kind each batch is, and learns from the losses.

    >>> schedule = SegmentSchedule(PackedState(digest="", global_batch=1))
    >>> schedule.next_kind(left={"cold": 1, "hot": 3}, total={"cold": 1, "hot": 3})
    'cold'

    Args:
        state: position in the order.
        read_ahead: see `READ_AHEAD`.

    Attributes:
        num_trained: batches by kind whose loss is known.
    """

    def __init__(self, state: PackedState, read_ahead: int = READ_AHEAD) -> None:
        self._read_ahead = read_ahead
        self._batches = self._trained = state.batches
        self._segments, self._kind, self._left = state.segments, state.kind, state.left
        self._planned: deque[_Segment] = deque()
        if state.left:
            self._planned.append(_Segment(state.segments - 1, state.kind, state.batches + state.left))
        self._learned = state.learned
        self.num_trained: Counter[str] = Counter(cold=0, hot=0, mixed=0)

    @property
    def rate(self) -> float:
        """R by the newest decision, which may not have taken effect."""
        return 2.0 ** -_halvings(self._learned)

    def begin_epoch(self) -> None:
        """Begin with cold batches again."""
        self._kind, self._left = "hot", 0

    def next_kind(self, left: Mapping[str, int], total: Mapping[str, int]) -> Kind | None:
        """Return the kind of the next batch; None where no whole batch of one kind is left.

        Args:
            left: batches of the epoch that are left, "cold" and "hot".
            total: batches of the whole epoch.

        Raises:
            ConfigError: batches are read too far ahead of training.
        """
        if not self._left:
            first, second = ("hot", "cold") if self._kind == "cold" else ("cold", "hot")
            kind: Kind = first if left[first] else second  # type: ignore[assignment]
            if not left[kind]:
                return None
            self._begin(kind, min(left[kind], -(-total[kind] >> self._halvings_now())))
        return self._take()

    def mixed(self) -> Kind:
        """Return the kind of a batch that ends an epoch with the samples of both kinds that are left over."""
        self._begin("mixed", 1)
        return self._take()

    def observe(self, loss: float) -> None:
        """Add the mean loss of the next trained batch, over all ranks; NaN where it was skipped."""
        self._trained += 1
        segment, known = self._planned[0], self._learned
        self.num_trained[segment.kind] += 1
        if math.isfinite(loss):
            known = replace(known, loss_sum=known.loss_sum + loss, num_losses=known.num_losses + 1)
        if self._trained == segment.end:
            self._planned.popleft()
            known = self._after(segment, known)
        self._learned = known

    def place(self, state: PackedState, hot_samples: int) -> PackedState:
        """Return the position behind the newest batch, `hot_samples` into the hot ones; see `with_learned`."""
        return replace(
            state,
            hot_samples=hot_samples,
            batches=self._batches,
            segments=self._segments,
            kind=self._kind,
            left=self._left,
            learned=Learned(),
        )

    def with_learned(self, state: PackedState) -> PackedState:
        """Return the position behind the last trained batch with what the losses have decided."""
        return replace(state, learned=self._learned)

    def _begin(self, kind: Kind, num_batches: int) -> None:
        self._kind, self._left = kind, num_batches
        self._planned.append(_Segment(self._segments, kind, self._batches + num_batches))
        self._segments += 1

    def _take(self) -> Kind:
        self._left -= 1
        self._batches += 1
        return self._kind

    def _halvings_now(self) -> int:
        """Return how often R is halved in the segment that begins now."""
        if self._batches - self._read_ahead > self._trained:
            raise ConfigError(
                f"batch {self._batches + 1} was asked for when the losses of {self._trained} batches are known; needed "
                f"those of {self._batches - self._read_ahead}: read less far ahead, and pass every loss to observe"
            )
        return _halvings(self._learned, self._segments, self._batches - self._read_ahead)

    def _after(self, segment: _Segment, known: Learned) -> Learned:
        """Decide after a segment, and start the sum of the next one."""
        if segment.kind == "mixed" or not known.num_losses:
            return replace(known, loss_sum=0.0, num_losses=0)
        loss, before = known.loss_sum / known.num_losses, known.last_losses.get(segment.kind)
        halvings, falls = decide(_halvings(known), known.falls, before, loss)
        made = Decision(segment.number, self._trained, halvings)
        acting = (each for each in known.decisions if each.batch + self._read_ahead <= self._trained)
        past = [each for each in acting if each.segment < segment.number]
        kept = known.decisions[max(0, len(past) - 1) :]  # of those that can act by now, the newest one does
        return Learned(0.0, 0, {**known.last_losses, segment.kind: loss}, falls, (*kept, made))


def decide(halvings: int, falls: int, before: float | None, loss: float) -> tuple[int, int]:
    """Return the halvings of R and the falls in a row after a segment.

    Args:
        before: loss of the last segment of its kind; None: it is the first.
        loss: of this one.

    >>> decide(1, 2, before=0.5, loss=0.6), decide(1, 2, before=0.5, loss=0.4)
    ((2, 0), (0, 0))
    """
    if before is None or loss == before:
        return halvings, falls
    if loss > before:
        return min(MOST_HALVINGS, halvings + 1), 0
    return (max(0, halvings - 1), 0) if falls + 1 == FALLS else (halvings, falls + 1)


def _halvings(known: Learned, segment: int | None = None, batch: int = 0) -> int:
    """Return the halvings of R by the newest decision, or by the newest that acts in a segment.

    Args:
        segment: number of the segment; None: any decision counts.
        batch: the last batch after which a decision acts in it.
    """
    for made in reversed(known.decisions):
        if segment is None or (made.segment + 2 <= segment and made.batch <= batch):
            return made.halvings
    return 1


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
