"""`train.cuda_graph`: the dense part of a step is recorded once, and then repeated without Python."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, clear_autocast_cache
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.data import Batch
from embershard.training.dense_call import Computed, DenseCall

#: From a call to what it computed, and a function that repeats its operations on the same memory.
Record = Callable[[Callable[[], Computed]], tuple[Computed, Callable[[], None]]]


class DenseGraph:
    """Computes batches by a recording of one shape, the first that two batches in a row have; others by Python.

    Where parameters or buffers have moved in memory, it records anew.

    Args:
        record: None: captures a CUDA graph.
    """

    def __init__(self, call: DenseCall, record: Record | None = None) -> None:
        self._call, self._record = call, record or capture
        self._recording: Recording | None = None
        self._last_shapes: list[object] = []

    def __call__(self, rows: Tensor, batch: Batch) -> Computed:
        """Compute a batch of pooled embeddings [B, F, D]."""
        given = rows.detach(), batch.dense_features, batch.labels, batch.weights
        inputs = [each for each in given if each is not None]
        shapes: list[object] = [(each.shape, each.dtype) for each in inputs]
        addresses = [each.data_ptr() for each in self._call.read]
        if self._recording is None or self._recording.addresses != addresses:
            was, self._last_shapes = self._last_shapes, shapes
            if shapes != was:
                return self._call.compute(rows, batch)
            self._recording = None  # gives its memory back before another one takes some
            self._recording = Recording(self._call, inputs, addresses, self._record)
        is_fit = self._recording.shapes == shapes
        return self._recording.repeat(inputs) if is_fit else self._call.compute(rows, batch)


class Recording:
    """A call's operations for batches of one shape, on memory of their own.

    Args:
        inputs: of the first batch: rows, dense features, labels and, where there are any, weights.
        addresses: of the memory of parameters and buffers.
    """

    def __init__(self, call: DenseCall, inputs: list[Tensor], addresses: list[int], record: Record) -> None:
        self.shapes, self.addresses = [(each.shape, each.dtype) for each in inputs], addresses
        self._inputs = [each.clone() for each in inputs]
        rows, dense, labels, *weights = self._inputs
        batch = Batch(dense, KeyedJaggedTensor.empty(), labels, weights=weights[0] if weights else None)

        def computed() -> Computed:
            clear_autocast_cache()  # of parameters that were cast before, outside of what is recorded
            found = call.compute(rows, batch)
            clear_autocast_cache()
            return found

        self._computed, self._replay = record(computed)

    def repeat(self, inputs: list[Tensor]) -> Computed:
        """Compute a batch. The gradients are valid until the next one; the rest is the caller's."""
        for place, given in zip(self._inputs, inputs, strict=True):
            place.copy_(given)
        self._replay()
        loss, outputs, exact, sums, gradients = self._computed
        return Computed(loss.clone(), outputs.clone(), exact.clone(), sums.clone(), gradients)


def capture(compute: Callable[[], Computed]) -> tuple[Computed, Callable[[], None]]:
    """Capture a call as a CUDA graph, behind three calls that warm up. No GPU has run it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Other threads may ask CUDA for page-locked memory meanwhile.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        found = compute()
    return found, graph.replay
