"""The dense part of a step on a GPU: each kernel takes what limits it, arithmetic, memory, or its own launch."""

from __future__ import annotations

import math
from collections.abc import Iterator

from embershard.planning.cost.rates import Rates, StepWork
from embershard.sharding.sizes import ModelSize

#: Of a matrix product's output that one block of threads computes, at each of its sides, and of its inner dimension
#: that it goes through at least: NVIDIA, "Matrix Multiplication Background User's Guide" (tile quantization), and
#: "Efficient GEMM in CUDA" of CUTLASS's documentation (parallelized reductions).
_TILE, _LEAST_INNER = 128, 512
#: Blocks that a GPU computes at a time, one per multiprocessor: 108 of an A100, 132 of an H100, 148 of a B200.
_BLOCKS = 128
#: Kernels of a step that are neither of the layers nor of their activations: exchange, lookups, loss, optimizer. A step
#: of TorchRec's with 26 tables has 171 operations of torch (benchmarks/host_thread.py), about 60 of them of layers.
SMALL_KERNELS = 110


def dense_work(model: ModelSize, batch_size: float, number_bytes: float, rates: Rates) -> StepWork:
    """Return the work of the dense layers for B samples: forward, backward, and their small companions.

    The roofline of Williams, Waterman and Patterson (2009), kernel by kernel: a kernel's operations count where they
    take longest, else its bytes, else its launch. Without layers that are known one by one, operations and bytes are
    charged one after the other.

    Args:
        number_bytes: of a number that layers pass on.
        rates: which of the three is longest.
    """
    if not model.products:
        return StepWork(
            dense_flops=model.dense_flops_per_sample * batch_size,
            activation_bytes=2 * model.activation_bytes_per_sample * batch_size,
            launches=SMALL_KERNELS,
        )
    flops = moved = launches = 0.0
    for operations, moved_bytes in _kernels(model, batch_size, number_bytes):
        seconds = operations * rates.seconds_per_flop, moved_bytes * rates.seconds_per_activation_byte
        if max(seconds) < rates.seconds_per_launch:
            launches += 1
        elif seconds[0] >= seconds[1]:
            flops += operations
        else:
            moved += moved_bytes
    return StepWork(dense_flops=flops, activation_bytes=moved, launches=launches + SMALL_KERNELS)


def _kernels(model: ModelSize, batch_size: float, number_bytes: float) -> Iterator[tuple[float, float]]:
    """Yield the operations, as if no multiprocessor waited, and the bytes that are read and written: of three products
    for each layer (the output, the gradients of its input and of its weights), and of kernels over activations."""
    for inputs, outputs in model.products:
        moved = number_bytes * (batch_size * (inputs + outputs) + inputs * outputs)
        for shape in ((batch_size, outputs, inputs), (batch_size, inputs, outputs), (inputs, outputs, batch_size)):
            yield 2 * batch_size * inputs * outputs / _share_at_work(*shape), moved
    for numbers in model.passes:
        yield 0.0, number_bytes * numbers * batch_size


def _share_at_work(rows: float, columns: float, inner: float) -> float:
    """Return the share of the multiprocessors' time that is work, in a product of [rows, inner] and [inner, columns]:
    tiles are whole, and so are rounds of tiles over the multiprocessors (tile and wave quantization).

    >>> round(_share_at_work(8192, 1024, 1024), 2), round(_share_at_work(256, 128, 512), 3)
    (1.0, 0.016)
    """
    blocks: float = math.ceil(rows / _TILE) * math.ceil(columns / _TILE)
    whole = rows * columns / (blocks * _TILE**2)
    blocks *= max(1, inner // _LEAST_INNER)
    return whole * blocks / (math.ceil(blocks / _BLOCKS) * _BLOCKS)
