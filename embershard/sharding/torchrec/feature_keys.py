"""From a batch's ids to the keys of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache import loops
from embershard.cache.gpu.readback import Reads
from embershard.cache.row_cache import RowCache
from embershard.cache.rows import memory
from embershard.cache.tickets import Ticket

if TYPE_CHECKING:
    from embershard.distributed.changed_rows import ChangedRows

#: What a pool knows of a batch before it is resident: a `KnownBatch`, or what its `PoolKeys` make of it; or None.
Known = Any


class FeatureIds(NamedTuple):
    """Ids that the features of a pool look up in one batch.

    Attributes:
        indices: int32 or int64 [N] row numbers in each feature's table shard.
        offsets: [F * B + 1] bounds of the bags, feature after feature; or [F + 1], of the features.
        batch_sizes: samples per feature and rank where features differ in them; else None.
    """

    indices: Tensor
    offsets: Tensor
    batch_sizes: list[list[int]] | None = None

    @staticmethod
    def of(features: KeyedJaggedTensor) -> FeatureIds:
        """Return the ids of a pool's features, which were split from a module's: the host knows how many each has. The
        bounds of the bags, which would stay with the features, are not asked for."""
        return FeatureIds.of_counts(features.length_per_key(), features.values())

    @staticmethod
    def of_counts(counts: Sequence[int] | NDArray[np.int64], ids: Tensor) -> FeatureIds:
        """Return ids [N] of features that have so many each."""
        bounds = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=bounds[1:])
        if ids.is_cpu:
            return FeatureIds(ids, torch.from_numpy(bounds))
        return FeatureIds(ids, memory.on_device(bounds.tolist(), ids.device))

    def lengths(self, num_features: int) -> Tensor:
        """Return the number of ids per feature int64 [F]."""
        if self.batch_sizes is None:
            return feature_lengths(self.offsets, num_features)
        sizes = accumulate((sum(per_rank) for per_rank in self.batch_sizes), initial=0)
        return self.offsets[memory.on_device(list(sizes), self.offsets.device)].diff().long()


class FeatureKeys:
    """Adds the first key of each feature's table to the feature's ids.

    A batch's keys are made when it becomes known, and again when it is prepared. Kept in between they would take 8
    bytes per known id, as much as the ids themselves: 13 MiB for 64 batches of 26,624 ids, of the memory that decides
    how many batches are known. Making them again takes 0.07 ms of such a batch.

    Args:
        first_keys: first key of each feature's table; F numbers.
        device: of the ids.

    >>> keys, lengths = FeatureKeys([0, 100], torch.device("cpu")).of(
    ...     FeatureIds(torch.tensor([7, 1, 2]), torch.tensor([0, 1, 3]))
    ... )
    >>> keys.tolist(), lengths.tolist()
    ([7, 101, 102], [1, 2])
    """

    def __init__(self, first_keys: Sequence[int], device: torch.device) -> None:
        self._first_keys = torch.tensor(first_keys, dtype=torch.int64, device=device)
        self._first_key_array = np.array(first_keys, np.int64)

    def of(self, ids: FeatureIds) -> tuple[Tensor, Tensor]:
        """Return the keys int64 [N] and the number of ids per feature int64 [F]."""
        if ids.batch_sizes is None and ids.indices.is_cpu:
            return self._of_in_loop(ids.indices, ids.offsets)
        if ids.batch_sizes is None:
            from embershard.cache.gpu.feature_keys import keys_of_ids

            return keys_of_ids(ids.indices, ids.offsets, self._first_keys)
        lengths = ids.lengths(self._first_key_array.size)
        return add_per_feature(ids.indices, self._first_keys, lengths), lengths

    def _of_in_loop(self, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        keys, lengths = np.empty(ids.numel(), np.int64), np.empty_like(self._first_key_array)
        array = ids.numpy() if ids.dtype == torch.int32 and ids.is_contiguous() else _int64s(ids)
        loops.keys_of_ids(array, _int64s(offsets), self._first_key_array, keys, lengths)
        return torch.from_numpy(keys), torch.from_numpy(lengths)


def _int64s(numbers: Tensor) -> loops.Int64s:
    found = numbers.numpy()
    return found if found.dtype == np.int64 and found.flags.c_contiguous else np.ascontiguousarray(found, np.int64)


def feature_lengths(offsets: Tensor, num_features: int) -> Tensor:
    """Return the number of ids of each of F features, int64 [F], by the bounds of their bags [F * B + 1].

    >>> feature_lengths(torch.tensor([0, 1, 3, 3, 7]), 2).tolist()
    [3, 4]
    """
    bounds = offsets[:: max(1, (offsets.numel() - 1) // num_features)]
    return (bounds.diff() if bounds.numel() > 1 else offsets.new_zeros(num_features)).long()


class FeaturePlaces:
    """Places of features among the keys of a batch. They are copied to the device once for each order of keys.

    >>> FeaturePlaces(["item", "user"], torch.device("cpu")).of(["user", "time", "item"])
    ([2, 0], tensor([2, 0], dtype=torch.int32))
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names, self._device = names, device
        self._found: dict[tuple[str, ...], tuple[list[int], Tensor]] = {}

    def of(self, keys: Sequence[str]) -> tuple[list[int], Tensor]:
        """Return the places, and the same on the device."""
        found = self._found.get(tuple(keys))
        if found is None:
            places = [list(keys).index(name) for name in self._names]
            found = places, torch.tensor(places, dtype=torch.int32, device=self._device)
            self._found[tuple(keys)] = found
        return found


def add_per_feature(ids: Tensor, addends: Tensor, lengths: Tensor) -> Tensor:
    """Add to each of `ids` [N] its feature's addend int64 [F]; feature f has `lengths[f]` ids. int64 [N]."""
    if not ids.is_cpu:
        return torch.repeat_interleave(addends, lengths, output_size=ids.numel()).add_(ids)
    sums = torch.empty(ids.shape, dtype=torch.int64)
    loops.add_per_feature(ids.long().contiguous().numpy(), addends.numpy(), lengths.numpy(), sums.numpy())
    return sums


class PoolKeys:
    """Which rows of its pool a batch's ids are, and how the batch becomes resident with them. In this class, ids are
    row numbers of their table's shard.

    Args:
        cache: of the pool.
        feature_keys: of its features.
        first_slots: what `SlotTable.set_pinned_slots` returned.

    Attributes:
        gives_rows: instead, ids have the rows that a batch gives them when it becomes known. They are lost when new
            rows come, and a row may be reinitialised for another id.
        has_zeros: an id may have no row; its embedding is zero.
    """

    gives_rows = False
    has_zeros = False

    def __init__(self, cache: RowCache, feature_keys: FeatureKeys, first_slots: Tensor | None) -> None:
        self._cache, self._feature_keys, self._first_slots = cache, feature_keys, first_slots

    def know(self, *batches: FeatureIds) -> Sequence[Known]:
        """Announce a batch, or several that train together, as `RowCache.know` does; return what is known of each."""
        if self._cache.next_use_index is None:
            return [None] * len(batches)
        return [self._cache.know(*self._feature_keys.of(ids)) for ids in batches]

    def bring_nearer(self, ids: FeatureIds, known: Known) -> bool:
        """Bring a known batch's rows nearer, some steps before it is prepared; return False if they do not fit yet."""
        return self._cache.parts.coming(self._feature_keys.of(ids)[0], known)

    def prepare(self, ids: FeatureIds, critical_path: bool, known: Known, if_it_fits: bool) -> Ticket | None:
        """Make a batch resident, as `RowCache.prepare` does."""
        keys, lengths = self._feature_keys.of(ids)
        return self._in_pinned_slots(self._cache.prepare(keys, lengths, critical_path, known, if_it_fits), lengths)

    def preparing(self, ids: FeatureIds, critical_path: bool, known: Known, if_it_fits: bool) -> Reads[Ticket | None]:
        """Do `prepare` in parts: yield where the host needs numbers of the device."""
        keys, lengths = self._feature_keys.of(ids)
        ticket = yield from self._cache.preparing(keys, lengths, critical_path, known, if_it_fits)
        return self._in_pinned_slots(ticket, lengths)

    def _in_pinned_slots(self, ticket: Ticket | None, lengths: Tensor) -> Ticket | None:
        if ticket is not None and self._first_slots is not None:
            ticket.slots = add_per_feature(ticket.slots, -self._first_slots, lengths)
        return ticket

    def skip(self, ids: FeatureIds, known: Known) -> None:
        """Take back the announcement of the next known batch, which will not be prepared."""
        self._cache.skip(self._feature_keys.of(ids)[0], known)

    def begin(self, ticket: Ticket) -> bool:
        """Note that a prepared batch begins to train; return True if ids of it have zeros."""
        return False

    def find(self, ids: FeatureIds) -> Tensor:
        """Return the keys [N] of a batch that is only read, as the newest batch that trained has them; -1 for zeros."""
        return self._feature_keys.of(ids)[0]

    def forget(self) -> None:
        """Take back all batches that were known and have not begun to train."""

    def check_updates(self, micro_batches: int, num_held: int | None = None) -> None:
        """Check that batches may train together.

        Args:
            micro_batches: as many become known together.
            num_held: as many are about to train together; None: not known yet.

        Raises:
            ConfigError, CacheError: other batches get rows together.
        """

    def note_changes(self) -> None:
        """Note from now on which rows change hands."""

    def take_changes(self, keys: Tensor) -> tuple[Tensor, list[ChangedRows] | None]:
        """Return, of rows `keys` that were trained (int64 [N], ascending) and those that changed hands since the last
        call, those that are in use; and which changed hands, by table. None: rows do not change hands."""
        return keys, None

    def touch(self, table: str, first_row: int, rows: Tensor, ids: Tensor) -> None:
        """Note that replicas have rows of a table (int64 [K], numbered in the whole of it; the shard here begins with
        `first_row`) with these ids."""
