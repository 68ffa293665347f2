"""`SmallUvaTransfer`: small rows straight between page-locked host memory and slots."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from embershard.cache.homes.small_rows import SmallRows
from embershard.cache.rows.uva_transfer import UvaTransfer


class SmallUvaTransfer(UvaTransfer):
    """Transfer of small rows by kernels that address page-locked memory: weights are narrowed and widened by a launch
    of their own. The methods are those of `Transfer`.

    Args:
        device: payload tensors by slot, [S + 1, ...] each.
        host: the tensors of `small`, and states by key, [R, ...] each.
        small: the weights.
    """

    def __init__(self, device: Sequence[Tensor], host: Sequence[Tensor], small: SmallRows) -> None:
        super().__init__(device, host[len(small.tensors) :])
        self._weights, self._small = device[0], small.slots_on(self._device)
        self._small.attach(self._weights)

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        self._small.widen(self._weights, slots, keys)
        super().fill(keys, slots)

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        self._small.narrow(keys, self._weights, slots)
        super().write_back(slots, keys)

    def finish(self) -> None:
        super().finish()
        self._small.check()
