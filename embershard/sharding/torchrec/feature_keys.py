"""From a batch's ids to the keys of a pool."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache import loops
from embershard.cache.rows import memory


class PoolIds(NamedTuple):
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
    def of(features: KeyedJaggedTensor) -> PoolIds:
        """Return the ids of a pool's features, which were split from a module's: the host knows how many each has. The
        bounds of the bags, which would stay with the features, are not asked for."""
        bounds = list(accumulate(features.length_per_key(), initial=0))
        return PoolIds(features.values(), memory.on_device(bounds, features.device()))


class FeatureKeys:
    """Adds the first key of each feature's table to the feature's ids.

    A batch's keys are made when it becomes known, and again when it is prepared. Kept in between they would take 8
    bytes per known id, as much as the ids themselves: 13 MiB for 64 batches of 26,624 ids, of the memory that decides
    how many batches are known. Making them again takes 0.07 ms of such a batch.

    Args:
        first_keys: first key of each feature's table; F numbers.
        device: of the ids.

    >>> keys, lengths = FeatureKeys([0, 100], torch.device("cpu")).of(
    ...     PoolIds(torch.tensor([7, 1, 2]), torch.tensor([0, 1, 3]))
    ... )
    >>> keys.tolist(), lengths.tolist()
    ([7, 101, 102], [1, 2])
    """

    def __init__(self, first_keys: Sequence[int], device: torch.device) -> None:
        self._first_keys = torch.tensor(first_keys, dtype=torch.int64, device=device)
        self._first_key_array = np.array(first_keys, np.int64)

    def of(self, ids: PoolIds) -> tuple[Tensor, Tensor]:
        """Return the keys int64 [N] and the number of ids per feature int64 [F]."""
        if ids.batch_sizes is None and ids.indices.is_cpu:
            return self._of_in_loop(ids.indices, ids.offsets)
        if ids.batch_sizes is None:
            from embershard.cache.gpu.feature_keys import keys_of_ids

            return keys_of_ids(ids.indices, ids.offsets, self._first_keys)
        lengths = self.lengths(ids)
        return add_per_feature(ids.indices, self._first_keys, lengths), lengths

    def lengths(self, ids: PoolIds) -> Tensor:
        """Return the number of ids per feature int64 [F]."""
        if ids.batch_sizes is None:
            return feature_lengths(ids.offsets, self._first_key_array.size)
        sizes = accumulate((sum(per_rank) for per_rank in ids.batch_sizes), initial=0)
        return ids.offsets[memory.on_device(list(sizes), ids.offsets.device)].diff().long()

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
