"""Map between rows and slots, with the last use of each slot.

A *key* numbers the rows of all tables in one pool, 0 <= key < R. Slots are numbered 1..S; slot 0 is the **null slot**:
a key that is not cached maps to it. So the map of a new cache is all zeros (which the allocator gives without touching
memory), and a scatter over a batch's slots needs no mask for the misses. A negative entry is the **trace** of a key
that is not cached (`next_use.py`).

All maps are int32 and on the planning device; the map over the keys is an array or hashed (`key_map.py`). So a pool has
at most `MOST_POOL_ROWS` rows; larger ones need more ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from embershard.cache import loops
from embershard.cache.config import MOST_POOL_ROWS, MapKind
from embershard.cache.key_map import ArrayKeyMap, KeyMap
from embershard.cache.rows import memory
from embershard.errors import CacheError

NULL_SLOT = 0
_FREE = -1
_NOBODYS_STAMP = torch.iinfo(torch.int64).max  # of an emptied slot: newer than any batch, so it is never a victim
#: Slots that are looked at, or filled before the first batch, together on a GPU.
BLOCK = 1 << 20
_BATCH_SHIFT = 32  # a use stamp is (batch << 32) | position in the batch


class SlotMap:
    """Bijection between cached keys and used slots, with a use stamp per slot.

    Args:
        num_keys: R, rows of the pool.
        num_slots: S, usable slots.
        device: planning device.
        kind: of the map over the keys; on a CPU an array.

    Attributes:
        array: int32 [R], on a CPU the entries by key, for compiled loops (`loops/`).
        key_of_slot: int32 [S + 1]; -1 when free.
        use_stamp: int64 [S + 1]; high half: the last batch that used the slot (0: none yet).
        keys_array, stamps_array: on a CPU, the memory of these two, for compiled loops.
        num_used: slots 1..num_used hold rows, except those that a failed copy left empty.

    >>> slot_map = SlotMap(num_keys=9, num_slots=3)
    >>> keys, slots = torch.tensor([5, 7]), slot_map.next_free(2)
    >>> slot_map.claim(2)
    >>> slot_map.bind(keys, slots, batch=1)
    >>> slot_map.lookup(torch.tensor([7, 8])).tolist(), slot_map.num_free
    ([2, 0], 1)
    """

    def __init__(
        self, num_keys: int, num_slots: int, device: torch.device | str = "cpu", kind: MapKind = "array"
    ) -> None:
        if num_keys > MOST_POOL_ROWS:
            raise CacheError(
                f"a pool of {num_keys} rows passes the int32 slot map's {MOST_POOL_ROWS}; shard its tables over more "
                "ranks"
            )
        self.num_keys, self.num_slots = num_keys, num_slots
        self.device = torch.device(device)
        self._entries = self._make_entries(kind)
        free = torch.full((num_slots + 1,), _FREE, dtype=torch.int32, device=device)
        self._set_slots(free, torch.zeros(num_slots + 1, dtype=torch.int64, device=device))
        self.num_used = 0
        self._empty = torch.empty(0, dtype=torch.int64, device=device)  # among the used ones
        self.array: loops.Int32s = memory.array_of(self._entries.dense() if kind == "array" else self._empty)

    def _set_slots(self, key_of_slot: Tensor, use_stamp: Tensor) -> None:
        self.key_of_slot, self.use_stamp = key_of_slot, use_stamp
        self.keys_array: loops.Int32s = memory.array_of(key_of_slot)
        self.stamps_array: loops.Int64s = memory.array_of(use_stamp)

    def _make_entries(self, kind: MapKind) -> KeyMap:
        assert kind == "array", "only kernels look rows up in a hashed map"
        return ArrayKeyMap(self.num_keys, self.device)

    @staticmethod
    def first_stamp(batch: int) -> int:
        """Return the use stamp of position 0 of `batch`."""
        return batch << _BATCH_SHIFT

    @property
    def num_free(self) -> int:
        """Slots that hold no row."""
        return self.num_slots - self.num_used + self._empty.numel()

    @property
    def device_bytes(self) -> int:
        """Device memory of all maps, in bytes."""
        return self.entry_bytes + sum(t.nbytes for t in (self.key_of_slot, self.use_stamp))

    @property
    def entry_bytes(self) -> int:
        """Device memory of the map over the keys, in bytes."""
        return self._entries.num_bytes

    @property
    def slot_of_key(self) -> Tensor:
        """Slot of every key, int32 [R]; 0 or a negative trace if not cached. For inspection."""
        return self._entries.dense()

    def lookup(self, keys: Tensor) -> Tensor:
        """Return the slots of `keys` (int64 [N]): int64 [N], `NULL_SLOT` where a key is not cached."""
        return self._entries.get(keys).clamp_min_(NULL_SLOT).long()

    def entries(self, keys: Tensor) -> Tensor:
        """Return the slots of `keys` (int64 [N]), or their traces where they are not cached: int32 [N]."""
        return self._entries.get(keys)

    def set_traces(self, keys: Tensor, traces: Tensor | int) -> None:
        """Set the traces (int32 [M], none above 0) of `keys` (int64 [M]), none of them cached. Of a key that occurs
        several times, one of its traces is kept."""
        self._entries.put(keys, traces)

    def forget_traces(self) -> None:
        """Remove all traces."""
        self._entries.clear_negative()

    def find(self, keys: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Look up a batch's keys and stamp the slots found as used by `batch`.

        Every position writes its own stamp: of several positions that share a slot, one wins. This counts distinct
        slots without sorting the batch.

        Args:
            keys: int64 [N].

        Returns:
            Slots int64 [N], `NULL_SLOT` where a key is not cached; bool [N], True once per distinct slot found; and the
            positions of the keys that are not cached, int64 [?], ascending.

        Raises:
            IndexError: a key is not in [0, R). Nothing is stamped.
        """
        first = self.first_stamp(batch)
        wanted, count = keys.contiguous().numpy(), keys.numel()
        found, missing, hits = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.bool_)
        num_missed = loops.find(wanted, self.array, self.stamps_array, first, found, hits, missing)
        self._check(wanted, -1 - num_missed)
        return torch.from_numpy(found), torch.from_numpy(hits), torch.from_numpy(missing[count - num_missed :])

    def key_array(self, keys: Tensor) -> loops.Int64s:
        """Return a batch's `keys` (int64 [N]) for compiled loops, which check nothing.

        Raises:
            IndexError: a key is not in [0, R).
        """
        found = keys.contiguous().numpy()
        self._check(found, loops.out_of_range(found, self.num_keys))
        return found

    def _check(self, keys: loops.Int64s, wrong: int) -> None:
        """Raise if position `wrong` is one of `keys`, because that key is out of range."""
        if wrong >= 0:
            raise IndexError(f"key {keys[wrong]} at position {wrong}, needed 0 to {self.num_keys - 1}")

    def last_batch(self, slots: Tensor) -> Tensor:
        """Return the last batch that used each of `slots`: int64, same shape; 0 for none."""
        return self.use_stamp.index_select(0, slots) >> _BATCH_SHIFT

    def used_slots(self, among: Sequence[range] | None = None) -> Tensor:
        """Return all slots that hold a row, or one of the keys of these ranges: int64."""
        return self._used(0, self.num_used, among)

    def used_in_blocks(self) -> Iterator[Tensor]:
        """Yield `used_slots` in parts: on a GPU small ones, so that what is made of them takes little of its memory."""
        size = max(1, self.num_used if self.device.type == "cpu" else BLOCK)
        for first in range(0, max(1, self.num_used), size):
            yield self._used(first, min(first + size, self.num_used), None)

    def _used(self, first: int, stop: int, among: Sequence[range] | None) -> Tensor:
        slots, held = torch.arange(first + 1, stop + 1, device=self.device), self.key_of_slot[first + 1 : stop + 1]
        if among is not None:
            return slots[sum(((held >= keys.start) & (held < keys.stop) for keys in among), torch.zeros_like(held)) > 0]
        return slots[held != _FREE] if self._empty.numel() else slots

    def keys(self, slots: Tensor) -> Tensor:
        """Return the keys bound to `slots`: int64, same shape."""
        return self.key_of_slot.index_select(0, slots).long()

    def next_free(self, count: int) -> Tensor:
        """Return the next `count` free slots: int64 [count]. They stay free until `claim`."""
        assert count <= self.num_free, f"{count} slots asked for, {self.num_free} are free"
        emptied = self._empty[:count]
        first = self.num_used + 1
        fresh = torch.arange(first, first + count - emptied.numel(), device=self.device)
        return torch.cat([emptied, fresh]) if emptied.numel() else fresh

    def claim(self, count: int) -> None:
        """Mark the slots that `next_free(count)` returned as used. The caller binds them at once."""
        num_emptied = min(count, self._empty.numel())
        self._empty = self._empty[num_emptied:]
        self.num_used += count - num_emptied

    def free(self, slots: Tensor) -> None:
        """Empty `slots` (int64 [M]), whose keys are already unbound. `next_free` returns these slots first."""
        self.key_of_slot.scatter_(0, slots, _FREE)
        self.use_stamp.scatter_(0, slots, _NOBODYS_STAMP)
        self._empty = torch.cat([self._empty, slots])

    def bind(self, keys: Tensor, slots: Tensor, batch: int) -> None:
        """Bind `keys` to `slots` (both int64 [M], distinct), used by `batch`."""
        places = (self.array, self.keys_array, self.stamps_array)
        loops.bind(keys.numpy(), slots.numpy(), *places, self.first_stamp(batch))

    def unbind(self, keys: Tensor, traces: Tensor | None = None) -> None:
        """Unbind `keys` and keep their traces (int32 [M], none above 0). The caller binds or frees their slots at
        once."""
        self._entries.put(keys, NULL_SLOT if traces is None else traces)

    def grow(self, num_slots: int) -> None:
        """Add free slots, up to `num_slots` in all."""
        extra = num_slots - self.num_slots
        assert extra > 0, f"growing from {self.num_slots} to {num_slots} slots"
        memory.record_stream(self.key_of_slot, self.use_stamp)
        keys = torch.cat([self.key_of_slot, self.key_of_slot.new_full((extra,), _FREE)])
        self._set_slots(keys, torch.cat([self.use_stamp, self.use_stamp.new_zeros(extra)]))
        self.num_slots = num_slots
