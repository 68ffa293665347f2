"""Number of batches that the look-ahead pipeline holds on the device ahead of the one in training."""

from __future__ import annotations

_STEPS = 16  # of one measurement
_MUCH = 0.02  # share of a step's time: a rank that waits longer asks for more
_LITTLE = 0.002
_GAIN = 0.7  # waiting must fall to this share of what it was for a deeper prefetch to stay
_QUIET_ROUNDS = 8  # measurements without waiting before a rank tries a smaller depth


class PrefetchDepth:
    """The fewest batches for which no step waits, between 1 and `most`.

    Every batch held early pins slots and so costs fills (docs/decisions/0018). It pays only where the caches' thread is
    sometimes late. So the depth starts at 1 and follows the time that steps waited:

    * more than 2 % of the time: one deeper. If waiting does not fall, back, and twice as long until the next try;
    * hardly any for a long time: one less, and back if waiting returns.

    Each rank has a `wish`. The ranks agree on the largest, so all of them hold equally many.

    Args:
        most: the limit.
        is_adaptive: follow the waiting; otherwise the depth is `most`.

    Attributes:
        depth: in force.
        wish: the depth that this rank asks for.

    >>> depth = PrefetchDepth(most=2, is_adaptive=True)
    >>> for _ in range(16):
    ...     depth.add(step_seconds=1.0, stall_seconds=0.1)
    >>> depth.depth, depth.wish
    (1, 2)
    """

    def __init__(self, most: int, is_adaptive: bool) -> None:
        self.is_adaptive = is_adaptive and most > 1
        self.depth = self.wish = 1 if self.is_adaptive else most
        self._most = most
        self._before: float | None = None  # share of waiting before the change on trial
        self._rounds_left = self._quiet_rounds = 0
        self._patience = 2
        self._clear()

    def agree(self, depth: int) -> None:
        """Take the largest wish of all ranks as the depth."""
        if self.is_adaptive and depth != self.depth:
            self.depth = depth
            self._clear()

    def add(self, step_seconds: float, stall_seconds: float) -> None:
        """Count a step and the part of it that waited."""
        if not self.is_adaptive:
            return
        self._num_steps += 1
        self._step_seconds += step_seconds
        self._stall_seconds += stall_seconds
        if self._num_steps == _STEPS:
            if self.wish <= self.depth:  # else the ranks have not agreed yet
                self._judge(self._stall_seconds / max(self._step_seconds, 1e-9))
            self._clear()

    def _clear(self) -> None:
        self._num_steps = 0
        self._step_seconds = self._stall_seconds = 0.0

    def _judge(self, share: float) -> None:
        before, self._before = self._before, None
        self._quiet_rounds = self._quiet_rounds + 1 if share < _LITTLE else 0
        if before is not None and share > _GAIN * before:  # the deeper prefetch did not help
            self.wish = max(1, self.wish - 1)
            self._rounds_left, self._patience = self._patience, 2 * self._patience
        elif self._rounds_left:
            self._rounds_left -= 1
        elif share > _MUCH and self.depth < self._most:
            self._before, self.wish = share, self.depth + 1
        elif self._quiet_rounds >= _QUIET_ROUNDS and self.wish > 1:
            self.wish -= 1
            self._quiet_rounds, self._rounds_left = 0, 0
