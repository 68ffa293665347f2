"""Triton kernel that looks keys up in a hashed map: one pass, without the [N, cells of a bucket] tensors that torch's
operations need. With `TRITON_INTERPRET=1` it runs on a CPU, for tests."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_KEYS = 128


@triton.jit(do_not_specialize=["num_keys", "num_buckets"])
def _look_up(  # type: ignore[no-untyped-def]
    cells,
    entries,
    keys,
    held_keys,
    held_entries,
    num_keys,
    num_buckets,
    FACTORS: tl.constexpr,
    BUCKET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < num_keys
    key = tl.load(keys + place, mask=inside, other=0)
    cell = tl.full((BLOCK,), -1, tl.int64)
    for which in tl.static_range(len(FACTORS)):
        hashed = ((key * FACTORS[which]) >> 32) & 0xFFFFFFFF
        bucket = (hashed * num_buckets) >> 32
        lanes = bucket[:, None] * BUCKET + tl.arange(0, BUCKET)[None, :]
        held = tl.load(held_keys + lanes, mask=inside[:, None], other=-1)
        cell = tl.maximum(cell, tl.max(tl.where(held == key.to(tl.int32)[:, None], lanes, -1), axis=1))
    tl.store(cells + place, cell, mask=inside)
    entry = tl.load(held_entries + cell, mask=inside & (cell >= 0), other=0)
    tl.store(entries + place, entry, mask=inside)


def look_up(
    keys: Tensor, held_keys: Tensor, held_entries: Tensor, num_buckets: int, bucket: int, factors: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Look up `keys` (int64 [N]) in the cells of `held_keys` and `held_entries` (both int32).

    Bits 32 to 63 of the key's product with each of `factors` choose its buckets, of `bucket` cells each.

    Returns:
        Cells int64 [N], -1 for absent keys, and their entries int32 [N], 0 for absent keys.
    """
    cells, entries = torch.empty_like(keys), keys.new_empty(keys.shape, dtype=torch.int32)
    if keys.numel():
        grid = (triton.cdiv(keys.numel(), _BLOCK_KEYS),)
        _look_up[grid](
            cells,
            entries,
            keys,
            held_keys,
            held_entries,
            keys.numel(),
            num_buckets,
            FACTORS=factors,
            BUCKET=bucket,
            BLOCK=_BLOCK_KEYS,
        )
    return cells, entries
