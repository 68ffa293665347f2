"""Transfers of small rows: weights are narrowed and widened on the way, states as all transfers copy them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from embershard.cache.homes.small_rows import SmallRows
from embershard.cache.rows.transfer import BUFFER_BYTES, PlainTransfer, StagedTransfer


class SmallTransfer(PlainTransfer):
    """Between host memory and slots in host memory, in the pass of the copy. The methods are those of `Transfer`.

    Args:
        device: payload tensors by slot, [S + 1, ...] each.
        host: the tensors of `small`, and states by key, [R, ...] each.
        small: the weights.
    """

    def __init__(self, device: Sequence[Tensor], host: Sequence[Tensor], small: SmallRows) -> None:
        super().__init__(device[1:], host[len(small.tensors) :])
        self._slots, self._small, self.key_device = device[0].data, small, host[0].device

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        self._small.read(keys, self._slots, slots)
        super().fill(keys, slots)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        self._small.write(keys, self._slots, slots)
        super().write_back(slots, keys)


class SmallStagedTransfer(StagedTransfer):
    """Through page-locked buffers: kernels narrow rows into them, and widen rows out of them. Arguments and methods are
    those of `SmallTransfer`."""

    def __init__(
        self, device: Sequence[Tensor], host: Sequence[Tensor], small: SmallRows, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        coded = small.tensors
        super().__init__(device, host[len(coded) :], buffer_bytes, coded)
        self._small, self._weights, self._num_coded = small, device[0], len(coded)
        self._on_gpu = small.slots_on(self._device)
        self._on_gpu.attach(self._weights)

    def finish(self) -> None:
        super().finish()
        # Whoever drops this transfer finishes it first: torch gives page-locked memory away behind copies of its own,
        # and knows nothing of kernels that read it.
        for buffer in self._buffers:
            buffer.wait()
        self._on_gpu.check()

    def _send(self, parts: Sequence[Tensor], keys: Tensor, slots: Tensor) -> None:
        self._small.gather(keys, coded := parts[: self._num_coded])
        self._on_gpu.widen(self._weights, slots, coded)
        super()._send(parts[self._num_coded :], keys, slots)

    def _receive(self, parts: Sequence[Tensor], slots: Tensor, keys: Tensor) -> None:
        self._small.expect(keys, coded := parts[: self._num_coded])
        self._on_gpu.narrow(coded, self._weights, slots)
        super()._receive(parts[self._num_coded :], slots, keys)

    def _put(self, parts: Sequence[Tensor], keys: Tensor) -> None:
        self._small.scatter(keys, parts[: self._num_coded])
        super()._put(parts[self._num_coded :], keys)
