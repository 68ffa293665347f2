"""Agreement of the ranks on which batches enter the pipeline: those of which every rank has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from embershard.distributed.agreement import Agreement, Supply
from embershard.sharding.torchrec.modes.routes import Told

_NO_BATCH = object()


class Intake:
    """Takes batches from this rank's iterator, and lets each in when every rank has one.

    All ranks call the same methods in the same order.

    Args:
        device: of this rank.
        check: raises for a batch that this rank cannot use, before the other ranks count on it; returns what it read of
            the batch.
        tell: returns, from what the check read, the `num_told` numbers of a batch that all ranks learn.
        num_carried: numbers that all ranks learn with an offer, whatever becomes of the batch.

    Attributes:
        is_over: a rank has no batch left.
        wish: the largest number that any rank gave to the last :meth:`offer`.
    """

    def __init__(
        self,
        device: torch.device,
        check: Callable[[Any], Any],
        tell: Callable[[Any], Sequence[float]] = lambda checked: (),
        num_told: int = 0,
        num_carried: int = 0,
    ) -> None:
        self._device, self._check, self._tell, self._num_told = device, check, tell, num_told
        self._num_carried = num_carried
        self.forget()

    def forget(self) -> None:
        """Start again: drop the question about the next batch."""
        self._agreement = Agreement(self._device, num_told=self._num_told + self._num_carried)
        self._decision: Supply | None = None  # which `enter` has not acted on
        self._to_carry: Sequence[float] | None = None
        self._has_carried = False  # the question that is open, or was the last
        self._carried: Told | None = None  # behind what was told of the batch
        self._offered: Any = _NO_BATCH
        self._checked: Any = None  # what the check read of it
        self._told: Sequence[float] | None = None  # of it, to the other ranks; None: it is not read yet
        self._is_due = self.is_over = False  # due: all ranks have one, and it is to be let in
        self._failure: Exception | None = None  # of this rank's iterator; the other ranks do not know it yet
        self.wish = 0

    def reopen(self) -> None:
        """Accept another iterator."""
        self.is_over = False

    def offer(self, batches: Iterator[Any], is_full: bool, wish: int) -> None:
        """Take the next batch and tell the other ranks. An error of the iterator is raised once all ranks know it.

        Args:
            batches: of this rank; `Supply.NOT_YET` in place of a batch: none is there now.
            is_full: this rank has no room for a batch now.
            wish: this rank's number; the ranks agree on the largest.
        """
        if self.is_over or self._is_asked or self._is_due:
            return
        if self._failure is None:
            try:
                self._take(batches)
            except Exception as error:
                self._failure = error
        state = Supply.FULL if is_full else Supply.READY
        if self._failure is not None:
            state = Supply.FAILED
        elif self._offered is _NO_BATCH:
            state = Supply.ENDED
        elif self._offered is Supply.NOT_YET:
            self._offered, state = _NO_BATCH, Supply.NOT_YET
        told = self._told if state in (Supply.READY, Supply.FULL) else None
        self._has_carried = self._to_carry is not None
        told, carried = told or [0.0] * self._num_told, self._to_carry or [0.0] * self._num_carried
        self._agreement.start(state, wish, [*told, *carried])
        self._to_carry = None

    def _take(self, batches: Iterator[Any]) -> None:
        """Take a batch where none is offered, and read it: also one that an interrupt left unread."""
        if self._offered is _NO_BATCH:
            self._told = None
            self._offered = next(batches, _NO_BATCH)
        if self._told is None and self._offered is not _NO_BATCH and self._offered is not Supply.NOT_YET:
            self._read()
            self._told = self._tell(self._checked)

    def _read(self) -> None:
        """Check the batch; one that this rank cannot use is dropped."""
        try:
            self._checked = self._check(self._offered)
        except Exception:
            self._offered = _NO_BATCH
            raise

    @property
    def _is_asked(self) -> bool:
        return self._agreement.is_open or self._decision is not None

    @property
    def carries(self) -> bool:
        """True while numbers can travel: there are more offers."""
        return self._num_carried > 0 and not self.is_over

    def carry(self, numbers: Sequence[float]) -> None:
        """Let `num_carried` numbers of this rank travel with the next offer, as those of all ranks do."""
        self._to_carry = numbers

    def carried(self) -> list[list[float]] | None:
        """Wait for what each rank gave to the last :meth:`carry`; None: no offer has taken it, and it is dropped."""
        if self._has_carried and self._is_asked:
            self._hear()
        self._to_carry, carried, self._carried = None, self._carried, None
        return None if carried is None else carried[:, self._num_told :].tolist()

    def _hear(self) -> Supply:
        """Wait for what the ranks agree on; :meth:`enter` acts on it."""
        if self._decision is None and self._has_carried:
            self._decision, self._carried = self._agreement.result(), self._agreement.told
        elif self._decision is None:
            self._decision = self._agreement.result()
        return self._decision

    def enter(self, let_in: Callable[[Any, Any, Told], None]) -> bool:
        """After :meth:`offer`: call `let_in(batch, checked, told)` if every rank has a batch, with what the check read
        of it and the numbers of each rank's; return False if not now, or never. After an exception of `let_in` it is
        called again, and the other ranks, which have let theirs in, are not asked again.

        Raises:
            DataError: another rank's iterator failed; that rank raises its own exception.
        """
        if self.is_over:
            return False
        if not self._is_due:
            decision, self.wish = self._hear(), self._agreement.wish
            if decision == Supply.FAILED:
                failure, self._failure, self._decision = self._failure, None, None
                raise self._agreement.failure() if failure is None else failure
            if decision == Supply.ENDED:
                self.is_over, self._offered, self._decision = True, _NO_BATCH, None
                return False
            self._is_due, self._decision = decision == Supply.READY, None
            if not self._is_due:
                return False
        let_in(self._offered, self._checked, self._agreement.told[:, : self._num_told])
        self.note_entered(self._offered)  # last: an exception loses no batch
        return True

    def note_entered(self, batch: Any) -> None:
        """Note that `batch` is in, although an exception may have ended :meth:`enter` early."""
        if batch is self._offered:
            self._offered, self._checked, self._is_due = _NO_BATCH, None, False
