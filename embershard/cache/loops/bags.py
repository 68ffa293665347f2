"""Compiled loops that add up rows by bag, and gradients of bags by row."""

from __future__ import annotations

from embershard.cache.loops.compiled import Float32s, Int64s, compiled


@compiled
def pool_rows(
    rows: Float32s, pooled: Float32s, dim: int, places: Int64s, offsets: Int64s, scales: Float32s, num_features: int
) -> None:
    """Add up rows by bag, in the order of the bag's ids.

    Args:
        rows: [M * D].
        pooled: [B * F * D], written: sample after sample.
        dim: D.
        places: [N] of the ids' rows.
        offsets: [F * B + 1] bounds of the bags, feature after feature.
        scales: [N] factors of the rows; [0]: all are 1.
        num_features: F.
    """
    num_samples = (offsets.size - 1) // max(1, num_features)
    for bag in range(offsets.size - 1):
        out = (bag % num_samples * num_features + bag // num_samples) * dim
        for column in range(dim):
            pooled[out + column] = 0.0
        for position in range(offsets[bag], offsets[bag + 1]):
            row = places[position] * dim
            if scales.size:
                scale = scales[position]
                for column in range(dim):
                    pooled[out + column] += scale * rows[row + column]
            else:
                for column in range(dim):
                    pooled[out + column] += rows[row + column]


@compiled
def pool_gradients(
    gradients: Float32s, sums: Float32s, dim: int, places: Int64s, offsets: Int64s, scales: Float32s, num_features: int
) -> None:
    """Add up the gradients of bags by row, in the order of the ids: the backward of `pool_rows`.

    Args:
        gradients: [B * F * D] of the pooled rows.
        sums: [M * D], zeros; written.
    """
    num_samples = (offsets.size - 1) // max(1, num_features)
    for bag in range(offsets.size - 1):
        out = (bag % num_samples * num_features + bag // num_samples) * dim
        for position in range(offsets[bag], offsets[bag + 1]):
            row = places[position] * dim
            if scales.size:
                scale = scales[position]
                for column in range(dim):
                    sums[row + column] += scale * gradients[out + column]
            else:
                for column in range(dim):
                    sums[row + column] += gradients[out + column]
