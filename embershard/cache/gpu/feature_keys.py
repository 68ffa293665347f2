"""Kernel that makes a pool's keys of a batch's ids, and counts these by feature, as `loops.keys_of_ids` on a CPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from embershard.cache.gpu.launch import COUNTED, kernel, launch


@kernel()
def _keys_of_ids(  # type: ignore[no-untyped-def]
    ids, offsets, first_keys, keys, lengths, samples, num_ids, num_features, count,
    FEATURES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Feature f has the ids from `offsets[f * samples]` on. `count` is 1 at least: without ids there are lengths."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < num_ids
    feature, samples = tl.arange(0, FEATURES), samples.to(tl.int64)
    is_one = feature < num_features
    end = tl.load(offsets + (feature + 1) * samples, mask=is_one, other=num_ids).to(tl.int64)
    if tl.program_id(0) == 0:
        start = tl.load(offsets + feature * samples, mask=is_one, other=0).to(tl.int64)
        tl.store(lengths + feature, end - start, mask=is_one)
    first = tl.sum((end <= tl.program_id(0) * BLOCK).to(tl.int32))
    last = tl.sum((end <= tl.minimum((tl.program_id(0) + 1) * BLOCK, num_ids) - 1).to(tl.int32))
    key = tl.load(ids + position, mask=inside, other=0).to(tl.int64)
    for each in range(first, tl.minimum(last, num_features - 1) + 1):
        start = tl.load(offsets + each * samples)
        stop = tl.load(offsets + (each + 1) * samples)
        key += tl.where((position >= start) & (position < stop), tl.load(first_keys + each), 0)
    tl.store(keys + position, key, mask=inside)


def keys_of_ids(ids: Tensor, offsets: Tensor, first_keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys int64 [N] of `ids` [N], and the number of ids per feature, int64 [F].

    Args:
        offsets: [F * B + 1], bounds of the bags, feature after feature.
        first_keys: int64 [F].
    """
    num_features = first_keys.numel()
    samples = (offsets.numel() - 1) // max(1, num_features)
    if samples < 1:
        return torch.empty_like(ids, dtype=torch.int64), torch.zeros_like(first_keys)
    keys, lengths = torch.empty_like(ids, dtype=torch.int64), torch.empty_like(first_keys)
    tensors, sizes = (ids, offsets, first_keys, keys, lengths), (samples, ids.numel(), num_features)
    room = triton.next_power_of_2(num_features)
    launch(_keys_of_ids, max(1, ids.numel()), *tensors, *sizes, block=COUNTED, FEATURES=room)
    return keys, lengths
