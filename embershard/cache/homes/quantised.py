"""`QuantisedRows`: weights of a small type (fp16 or int8) in memory, under slots that are float32. Transfers narrow and
widen them on the way, and copy states as all transfers do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from embershard.cache.config import TransferKind
from embershard.cache.homes.home import Home, no_memory
from embershard.cache.homes.mapped import MappedPages
from embershard.cache.homes.memory import RowPages
from embershard.cache.homes.shape import PoolShape
from embershard.cache.homes.small_rows import SmallRows
from embershard.cache.homes.small_sizes import MARK_BYTES, SmallType, small_row_bytes
from embershard.cache.rows.memory import copy_block
from embershard.cache.rows.transfer import BUFFER_BYTES, MakeTransfer, PlainTransfer, StagedTransfer, row_copier


class QuantisedRows(Home):
    """Rows whose weights `SmallRows` holds; their states are as in slots. One rank's alone.

    Args:
        shape: of the pool, with initial weights.
        small_type: of the weights.
        full_keys: of int8, rows that stay float32 (int64 [K] ascending); None: none.
        folder: for files that are mapped into memory; None: plain memory.
        whole_pages: for memory that is locked.

    Raises:
        ConfigError: the tables have too few columns.
    """

    rounds = True
    mark_bytes = MARK_BYTES

    def __init__(
        self,
        shape: PoolShape,
        small_type: SmallType,
        full_keys: Tensor | None = None,
        *,
        folder: str | None = None,
        whole_pages: bool = False,
    ) -> None:
        assert shape.initial is not None, "small rows are made from a counter"
        self._weight_bytes = small_row_bytes(small_type, shape.dim)
        row_bytes = shape.row_bytes - shape.weight_bytes + self._weight_bytes
        self._pages = RowPages(whole_pages, are_small=not whole_pages)
        if folder is not None:
            self._pages = MappedPages(folder, shape.num_rows * row_bytes)
        full_keys = torch.empty(0, dtype=torch.int64) if full_keys is None else full_keys
        allocate = self._pages.allocate
        self.small = SmallRows(small_type, shape.rows_per_table, shape.initial, shape.dim, full_keys, allocate)
        self._states = self._pages.states_of(shape)
        super().__init__(shape, [None, *self._states])

    @property
    def parts(self) -> list[Tensor]:  # type: ignore[override]
        """Of the weights, `SmallRows.tensors`; then the states."""
        return [*self.small.tensors, *self._states]

    @property
    def row_bytes(self) -> int:
        return self.shape.row_bytes - self.shape.weight_bytes + self._weight_bytes

    @property
    def host_bytes(self) -> int:
        return super().host_bytes + self.small.full_bytes

    def read(self, keys: Tensor, pinned: bool = False) -> Tensor:
        return self.small.read(keys.cpu(), torch.empty(keys.numel(), self.dim, pin_memory=pinned))

    def read_block(self, first: int, stop: int, out: Sequence[Tensor]) -> None:
        self.small.read(torch.arange(first, stop), out[0], torch.arange(stop - first))
        for state, block in zip(self._states, out[1:], strict=True):
            self._pages.fetch(state[first:stop])
            copy_block(state, first, stop, block)

    def copier(self, out: Sequence[Tensor]) -> Callable[[Tensor, Tensor], None]:
        copy_states = row_copier(self._states, out[1:])

        def copy(keys: Tensor, places: Tensor) -> None:
            self.small.read(keys, out[0], places)
            copy_states(keys, places)

        return copy

    def transfer(self, kind: TransferKind) -> MakeTransfer:
        if kind == "plain":
            return partial(SmallTransfer, small=self.small)
        if kind == "staged":
            return partial(SmallStagedTransfer, small=self.small)
        from embershard.cache.gpu.small_transfer import SmallUvaTransfer  # triton is not installed everywhere

        return partial(SmallUvaTransfer, small=self.small)

    def check_views(self) -> None:
        raise no_memory(
            f"as {self.small.small_type} (cache.host_dtype)",
            "A checkpoint of embershard train has them as fp32, and embershard export writes them; with "
            'cache.host_dtype = "fp32" state_dict has them',
        )

    def make_memory(self, address: int, num_bytes: int) -> None:
        self.small.make_memory(address, num_bytes)

    def before_write(self, keys: Tensor) -> None:
        self._pages.count_writes(keys.numel(), self.views.tensors)
        super().before_write(keys)

    def put(self, keys: Tensor, rows: Tensor) -> None:
        self.small.put(keys, rows)

    def replace(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        self.small.put(keys, rows[0])
        for state, values in zip(self._states, rows[1:], strict=True):
            state.data.index_copy_(0, keys, values)

    def round(self, rows: Tensor, places: Tensor, keys: Tensor) -> None:
        self.small.round(rows, places, keys)

    @property
    def marked_keys(self) -> Tensor | None:
        """Of int8, the rows that are not rounded."""
        return self.small.full_keys if self.small.small_type == "int8" else None

    def mark(self, keys: Tensor) -> None:
        if self.small.small_type == "int8":
            self.small.keep_full(keys)


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
