"""Parts of a pool: what hears of the stages of its batches, beside the cache that plans them and moves their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from embershard.cache.guards import ChangeGuard
from embershard.cache.next_use import KnownBatch
from embershard.cache.planner import CachePlan
from embershard.cache.rows.copies import RowCopies
from embershard.cache.slot_map import SlotMap


class PoolPart:
    """Hears of a pool's batches. A method that a part has no use for does nothing.

    What a batch goes through, in this order::

        known       its uses of rows are known; it is prepared after all batches known so far, or skipped
        coming      it is prepared some steps later: bring its rows nearer
        entering    rows are about to be copied to slots, for it or before the first batch
        left        rows have left their slots for it
        skipped     in place of the last two

    and beside them `changed`: an update of rows begins, or somebody else writes to them; `written_back`: somebody is
    about to read the host tier.

    Attributes:
        num_coming: so many batches behind the one in training are coming.
        hears_moves: of rows that enter slots and leave them.
        hears_changes: of rows that change.
        guard: of the slots or of what the part trains beside them: it refuses forwards, and reads of the host tier.

    >>> PoolPart().coming(torch.tensor([5]), None)
    True
    """

    num_coming = 0
    hears_moves = False
    hears_changes = False
    guard: ChangeGuard | None = None

    def known(self, keys: Tensor, feature_lengths: Tensor, known: KnownBatch) -> None:
        """Note a batch; arguments as for `RowCache.know`, and its result."""

    def coming(self, keys: Tensor, known: KnownBatch | None) -> bool:
        """Bring rows `keys` (int64 [N]) of a batch nearer; return False if they do not fit yet. A second call does
        nothing. From any thread."""
        return True

    def entering(self, keys: Tensor, known: KnownBatch | None) -> None:
        """Make rows (int64 [M] in host memory, distinct) ready to be copied; of a batch, if it was known."""

    def left(self, keys: Tensor) -> None:
        """Note rows (int64 [M] in host memory, distinct) that left their slots; on a GPU, copies back may be queued."""

    def skipped(self, keys: Tensor, known: KnownBatch) -> None:
        """Forget the oldest known batch, with these keys (int64 [N])."""

    def forgotten(self) -> None:
        """Forget all known batches that were not prepared."""

    def changed(self, keys: Tensor | Sequence[range] | None) -> None:
        """Note that rows (int64 [N], not distinct, or ranges; None: all) train from now on, or are written to."""

    def written_back(self) -> Tensor | None:
        """Write what the part trains beside the slots to the host tier; return the keys of rows that changed by it."""
        return None

    @property
    def known_bytes(self) -> int:
        """Memory of what is known of batches, where the cache plans, in bytes."""
        return 0

    @property
    def knows_most(self) -> bool:
        """True if no further batch should become known."""
        return False


class PoolParts(PoolPart):
    """All parts of a pool: each hears what this one is told."""

    def __init__(self, parts: Sequence[PoolPart] = ()) -> None:
        self._parts: tuple[PoolPart, ...] = ()
        self.guards: tuple[ChangeGuard, ...] = ()
        for part in parts:
            self.add(part)

    def add(self, part: PoolPart) -> None:
        """Let a part hear, too, from now on: of changes before the first batch, where rows train."""
        self._parts = (*self._parts, part)
        self.num_coming = max(self.num_coming, part.num_coming)
        self.hears_moves |= part.hears_moves
        self.hears_changes |= part.hears_changes
        if part.guard is not None:
            self.guards = (*self.guards, part.guard)

    def check(self) -> None:
        """Refuse rows that a guard refuses.

        Raises:
            CacheError: rows of which other ranks have copies, and a backward that did not end on this rank.
        """
        for guard in self.guards:
            guard.check()

    def known(self, keys: Tensor, feature_lengths: Tensor, known: KnownBatch) -> None:
        for part in self._parts:
            part.known(keys, feature_lengths, known)

    def coming(self, keys: Tensor, known: KnownBatch | None) -> bool:
        return all(part.coming(keys, known) for part in self._parts)

    def entering(self, keys: Tensor, known: KnownBatch | None) -> None:
        if self.hears_moves:
            for part in self._parts:
                part.entering(keys.cpu(), known)

    def left(self, keys: Tensor) -> None:
        for part in self._parts:
            part.left(keys)

    def skipped(self, keys: Tensor, known: KnownBatch) -> None:
        for part in self._parts:
            part.skipped(keys, known)

    def forgotten(self) -> None:
        for part in self._parts:
            part.forgotten()

    def changed(self, keys: Tensor | Sequence[range] | None) -> None:
        for part in self._parts:
            part.changed(keys)

    def written_back(self) -> Tensor | None:
        found = [keys for part in self._parts if (keys := part.written_back()) is not None]
        for keys in found:
            self.changed(keys)
        return torch.cat(found) if found else None

    @property
    def known_bytes(self) -> int:
        return sum(part.known_bytes for part in self._parts)

    @property
    def knows_most(self) -> bool:
        return any(part.knows_most for part in self._parts)

    @contextmanager
    def moving(self, plan: CachePlan, known: KnownBatch | None, copies: RowCopies, rows: SlotMap) -> Iterator[None]:
        """Tell of the rows that a plan brings to slots before the body moves them, and of those that left behind it:
        after an exception, those that are in none."""
        if not self.hears_moves:  # nobody needs the plan's keys on the host
            yield
            return
        entering, left = plan.on_host.fill, plan.on_host.evicted
        self.entering(entering, known)
        try:
            yield
        except BaseException:
            copies.finish()
            either = torch.cat([plan.fill_keys, plan.evicted_keys])
            left = either[rows.lookup(either) == 0].cpu()
            raise
        finally:
            self.left(left)
