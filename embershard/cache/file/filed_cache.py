"""Device cache over rows of which some are in a file: a `RowCache` that also moves rows between file and memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embershard.cache.file.filed_rows import FiledRows
from embershard.cache.gpu.readback import Reads
from embershard.cache.next_use import KnownBatch
from embershard.cache.planner import CachePlan
from embershard.cache.row_cache import RowCache
from embershard.cache.rows.memory import pinned_bytes
from embershard.cache.rows.transfer import PlainTransfer, StagedTransfer, Transfer
from embershard.cache.tickets import Ticket


@dataclass(eq=False)
class Announcement:
    """A batch of which the places know, or will once its ids are in host memory.

    Attributes:
        keys, lengths: its ids, and their number per feature, in host memory once `sent` is over; empty where the caller
            has them, and while nobody needs them.
        sent: None: they are there.
        known: what the places know the batch as; None until then.
        is_far: the slots do not know of it.
        counted: its bytes among those of the cache.

    >>> Announcement(torch.tensor([7, 5]), torch.tensor([2]), None).is_far
    True
    """

    keys: Tensor
    lengths: Tensor
    sent: torch.cuda.Event | None
    known: KnownBatch | None = None
    is_far: bool = True
    counted: int = 0


class FiledRowCache(RowCache):
    """A `RowCache` over `FiledRows`. A batch that is known should be filed (`file`) some steps before it is prepared.

    The places may know of more batches than the slots (`announce`): those are used by, and stay in, host memory alone.

    On a GPU the ids of a batch are copied to host memory as it becomes known, and read from there steps later; a plan's
    rows are in host memory by the next plan, and their places are given back then.

    Args:
        filed: the rows.
        arguments: those of `RowCache`, but for the transfer.

    Attributes:
        announced_bytes: host memory of what the places know of batches, beside their links, in bytes.
    """

    def __init__(self, filed: FiledRows, **arguments: Any) -> None:
        self.filed = filed
        # By what the slots know them as; by themselves, of those that the slots do not know.
        self._announced: dict[KnownBatch | Announcement, Announcement] = {}
        self._untold = deque[Announcement]()  # of which the places do not know yet
        self.announced_bytes = 0
        self._landing = torch.empty(0, dtype=torch.int64)  # rows that were evicted, and may not be in host memory yet
        super().__init__(**arguments, transfer=lambda slots, _: FiledTransfer(slots, filed))
        filed.places.rank_by(self._scores.of_rows)

    def announce(self, keys: Tensor, feature_lengths: Tensor) -> Announcement:
        """Let the places know a batch that will become known (`know`) after all those announced so far. The slots know
        nothing of it, and it takes no memory on the device.

        Args:
            keys, feature_lengths: as for `know`.
        """
        with self._lock, torch.no_grad():
            announced = self._sent(keys, feature_lengths)
            self._untold.append(announced)
            self._announced[announced] = announced
            self._count(announced)
            self._tell(None)
            return announced

    def know(self, keys: Tensor, feature_lengths: Tensor, announced: Announcement | None = None) -> KnownBatch | None:
        """As every cache; `announced` is the result of `announce` for the batch, if it was called."""
        with self._lock, torch.no_grad():
            known = super().know(keys, feature_lengths)
            if known is not None:
                if announced is None or announced not in self._announced:  # or it was forgotten
                    announced = self.announce(keys, feature_lengths)
                if keys.is_cuda and announced.known is not None:  # its ids were dropped
                    again = self._sent(keys, feature_lengths)
                    announced.keys, announced.lengths, announced.sent = again.keys, again.lengths, again.sent
                announced.is_far = False
                self._count(announced)
                self._announced[known] = announced
                del self._announced[announced]
            return known

    def file(self, keys: Tensor, known: KnownBatch | None) -> bool:
        """Give the rows of a batch that is prepared some steps later places in memory, and begin to read those in the
        file. A second call does nothing.

        Args:
            keys, known: as for `prepare`.

        Returns:
            False if they do not fit yet.
        """
        with self._lock, torch.no_grad():
            announced = None if known is None else self._announced.get(known)
            if announced is None:
                return True
            of_places = self._told(announced)
            return self.filed.file(self._on_host(announced, keys), of_places)

    def _sent(self, keys: Tensor, lengths: Tensor) -> Announcement:
        if keys.is_cpu:
            return Announcement(keys, lengths, None)
        on_host = [
            torch.empty(each.shape, dtype=each.dtype, pin_memory=True).copy_(each, non_blocking=True)
            for each in (keys, lengths)
        ]
        return Announcement(on_host[0], on_host[1], torch.cuda.current_stream(keys.device).record_event())

    @staticmethod
    def _on_host(announced: Announcement, keys: Tensor) -> Tensor:
        """Return the ids of a batch in host memory; `keys` are those of the caller."""
        if keys.is_cpu:
            return keys
        if announced.keys.numel() != keys.numel():
            return keys.cpu()
        assert announced.sent is not None, "copied from the device"
        announced.sent.synchronize()
        return announced.keys

    def _tell(self, last: Announcement | None) -> None:
        """Make batches known to the places, in their order: up to `last`, or (None) those whose ids are there."""
        while self._untold and (last is None or last.known is None):
            announced = self._untold[0]
            if announced.sent is not None:
                if last is None and not announced.sent.query():
                    break
                announced.sent.synchronize()
            announced.known = self.filed.know(announced.keys, announced.lengths)
            self._untold.popleft()
            if announced.sent is None or announced.is_far:
                announced.keys = announced.lengths = announced.keys[:0].clone()
            self._count(announced)

    def _told(self, announced: Announcement) -> KnownBatch:
        """Make a batch known to the places, if it is not; return what they know it as."""
        self._tell(announced)
        assert announced.known is not None, "told just now"
        return announced.known

    def _count(self, announced: Announcement, is_over: bool = False) -> None:
        """Count the memory of a batch, as it is now."""
        num_bytes = 0 if announced.known is None else announced.known.num_bytes
        if announced.sent is not None:
            num_bytes += pinned_bytes(announced.keys.nbytes) + pinned_bytes(announced.lengths.nbytes)
        before, announced.counted = announced.counted, 0 if is_over else num_bytes
        self.announced_bytes += announced.counted - before

    def _forgotten(self, known: KnownBatch | Announcement | None) -> Announcement | None:
        """Remove a batch from those announced, and return it; the places know of it."""
        announced = None if known is None else self._announced.get(known)
        if known is None or announced is None:
            return None
        self._tell(announced)
        del self._announced[known]
        self._count(announced, is_over=True)
        return announced

    @property
    def chain_bytes(self) -> int:
        """As every cache; on a CPU with the links of the places, which are in its memory, too."""
        return super().chain_bytes + (self.filed.places.chain_bytes if self._map.device.type == "cpu" else 0)

    @property
    def known_host_bytes(self) -> int:
        """On a GPU, host memory of what the places know of batches, in bytes; else 0: `chain_bytes` has the links."""
        return 0 if self._map.device.type == "cpu" else self.announced_bytes + self.filed.places.chain_bytes

    @property
    def knows_most(self) -> bool:
        """True if the places know as many uses of rows as can be told apart for sure."""
        return self.filed.places.knows_most

    def preparing(self, keys: Tensor, lengths: Tensor, critical_path: bool, *rest: Any) -> Reads[Ticket | None]:
        """As every cache."""
        self.file(keys, rest[0] if rest else None)
        return super().preparing(keys, lengths, critical_path, *rest)

    def skip(self, keys: Tensor, known: KnownBatch | Announcement) -> None:
        """As every cache; also of a batch that was only announced."""
        with self._lock, torch.no_grad():
            if isinstance(known, KnownBatch):
                super().skip(keys, known)
            announced = self._forgotten(known)
            if announced is not None and announced.known is not None:
                self.filed.skip(announced.known, self._on_host(announced, keys))

    def forget(self) -> None:
        """As every cache."""
        with self._lock:
            super().forget()
            self._announced.clear()
            self._untold.clear()
            self.announced_bytes = 0
            self.filed.forget()

    def _preload(self, keys: Tensor) -> None:
        self.filed.bring_in(keys.cpu(), None)
        super()._preload(keys)

    def _execute(self, plan: CachePlan, known: KnownBatch | None, *rest: Any) -> torch.cuda.Event | None:
        announced = self._forgotten(known)
        filled, moved, landed = plan.on_host.fill, plan.on_host.evicted, self._landing
        self.filed.bring_in(filled, None if announced is None else announced.known)
        try:
            return super()._execute(plan, known, *rest)
        except BaseException:
            self._copies.finish()
            either = torch.cat([plan.fill_keys, plan.evicted_keys])
            moved = either[self._map.lookup(either) == 0].cpu()
            raise
        finally:
            # A row that comes again right behind the plan that evicted it is lent again, not given back.
            on_gpu = plan.fill_keys.is_cuda
            self.filed.give_back(landed[~torch.isin(landed, filled)] if on_gpu else moved)
            self._landing = moved if on_gpu else landed


class FiledTransfer:
    """Transfer between slots and the places of rows in host memory. The methods are those of `Transfer`.

    Args:
        slots: payload tensors by slot, [S + 1, ...] each.
        filed: the rows; those that move are lent.
    """

    def __init__(self, slots: Sequence[Tensor], filed: FiledRows) -> None:
        kind = StagedTransfer if slots[0].is_cuda else PlainTransfer
        self._inner: Transfer = kind(slots, filed.parts)
        self._filed, self.key_device = filed, self._inner.key_device

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        self._inner.fill(self._filed.places_of(keys), slots)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        self._inner.write_back(slots, self._filed.places_of(keys))

    def finish(self) -> None:
        self._inner.finish()

    def discard(self) -> int:
        return self._inner.discard()
