"""Transfer of rows straight between page-locked host memory and slots, by a kernel that addresses both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embershard.cache.rows.row_kernels import RowKernel


class UvaTransfer:
    """Transfer by one kernel launch per direction, for weights and optimizer states. Neither row numbers nor rows pass
    through the CPU. The methods are those of `Transfer`.

    Args:
        device: payload tensors by slot, [S + 1, ...] each.
        host: payload tensors by key, [R, ...] each, in the same order; on a GPU in page-locked memory.

    Copies run on the current stream in the order of the calls: a slot is read before it is filled again, and a row is
    written before it is read again.
    """

    def __init__(self, device: Sequence[Tensor], host: Sequence[Tensor]) -> None:
        self._kernel = RowKernel(device, host)
        self._device = self.key_device = device[0].device
        self._written: torch.cuda.Event | None = None

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        self._kernel.to_tables(slots, keys)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        self._kernel.to_others(keys, slots)
        if self._device.type == "cuda" and keys.numel():
            self._written = torch.cuda.current_stream(self._device).record_event()

    def discard(self) -> int:
        self.finish()  # the kernels write to the host tier itself, so nothing can be dropped
        return 0

    def finish(self) -> None:
        if self._written is not None:
            self._written.synchronize()
            self._written = None
