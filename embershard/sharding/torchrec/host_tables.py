"""What TorchRec sees of tables whose rows are in host memory: an FBGEMM table's members; and the way to these rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from torch import Tensor, nn

from embershard.cache.homes.home import FrozenRows, Home
from embershard.cache.parts.changed import ChangedKeys
from embershard.cache.row_cache import RowCache
from embershard.sharding.torchrec.slots import SlotTable


class HostTables(nn.Module):
    """FBGEMM's `SplitTableBatchedEmbeddingBagsCodegen` as TorchRec sees it, for tables whose rows are in host memory.

    Weights and optimizer states are the host tier's, for the whole shard (of rows that the ranks of a machine share,
    for those that this rank writes): call :meth:`flush` before reading them.
    TorchRec does so, and while it builds a sharded module, too, although it takes references only:
    :meth:`without_flushes`.

    Attributes:
        host: the rows.
        slots: the rows' places on the device.
        cache: moves rows between the two.
    """

    host: Home
    slots: SlotTable
    cache: RowCache

    prefetch_pipeline = True
    _is_flushed = True
    _takes_references = False

    @property
    def embedding_specs(self) -> list[tuple[int, int, EmbeddingLocation, ComputeDevice]]:
        """Rows, dim and location of each table."""
        return [(rows, self.host.dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for _, rows in self.host.own_rows]

    @property
    def weights_host(self) -> Tensor:
        """Weights of all tables, flat."""
        return self.host.views.flat_weights

    @property
    def weights_physical_offsets(self) -> list[int]:
        """Start of each table in :attr:`weights_host`."""
        own = zip(self.host.row_offsets, self.host.own_rows, strict=True)
        return [(offset + first) * self.host.dim for offset, (first, _) in own]

    @property
    def weights_precision(self) -> SparseType:
        """Type of the weights."""
        return self.slots.tbe.weights_precision

    @property
    def optimizer(self) -> EmbOptimType:
        """Type of the fused optimizer."""
        return self.slots.tbe.optimizer

    def split_embedding_weights(self) -> list[Tensor]:
        """Return the weights per table: views [rows, D]."""
        return self.host.views.table_weights()

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """Return the optimizer states per table; empty, as FBGEMM's, for an optimizer without states."""
        return self.host.views.table_states() if self.host.shape.states else []

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """Return the named states per table: per-row states from the host tier, `iter` from the slots' TBE."""
        named = self.slots.tbe.get_optimizer_state()
        if not named:
            return []
        names = self.host.views.names[1:]
        per_row = [dict(zip(names, states, strict=True)) for states in self.host.views.table_states()]
        return [{name: rows.get(name, scalar) for name, scalar in named[0].items()} for rows in per_row]

    def get_learning_rate(self) -> float:
        """Return the fused optimizer's learning rate."""
        return self.slots.tbe.get_learning_rate()

    def set_learning_rate(self, lr: float) -> None:
        """Set the fused optimizer's learning rate."""
        self.slots.tbe.set_learning_rate(lr)

    def set_optimizer_step(self, step: int) -> None:
        """Set the fused optimizer's step number."""
        self.slots.tbe.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: dict[str, Any]) -> None:
        """Set the fused optimizer's parameters."""
        self.slots.tbe.update_hyper_parameters(params_dict)

    def flush(self) -> None:
        """Write trained rows back to the host tier, and make the initial weights of rows that have none yet.

        Raises:
            CacheError: the rows are not in the memory that TorchRec, which calls it first, is about to read.
        """
        if self._is_flushed:
            self.write_back()
            if not self._takes_references:
                self.host.check_views()
            self.cache.flush()

    def write_back(self) -> None:
        """Write trained rows back to the host tier; errors as of `PoolParts.check`."""
        self.cache.parts.check()
        self.cache.write_back()
        self.cache.write_back_parts()

    def track_changes(self) -> ChangedKeys:
        """Return what has marks, from now on, of the rows that change. Call it before a batch is prepared."""
        marks = ChangedKeys(self.host, self.cache.state.map.device)
        self.cache.parts.add(marks)
        return marks

    def take_changed(self, marks: ChangedKeys) -> Tensor:
        """Return those of the marked rows that this rank writes back, in host memory: int64 [M] ascending; remove all
        marks. Call it between steps. Errors as of `PoolParts.check`."""
        self.cache.parts.check()
        self.cache.write_back_parts()
        keys = marks.take()
        is_own = self.host.is_own(keys)
        return keys if is_own is None else keys[is_own]

    def freeze(self) -> FrozenRows:
        """Write trained rows back; return the host tier as it is then, to be read while training goes on.

        Call it between steps: then no write-back runs until the next step, also if another thread fills rows.
        """
        self.write_back()
        return self.host.freeze()

    @contextmanager
    def without_flushes(self) -> Iterator[None]:
        """Return a context in which nobody reads weights: :meth:`flush` does nothing."""
        self._is_flushed = False
        try:
            yield
        finally:
            self._is_flushed = True

    @contextmanager
    def taking_references(self) -> Iterator[None]:
        """Return a context in which rows that are elsewhere are not read as memory: :meth:`flush` does not raise."""
        self._takes_references = True
        try:
            yield
        finally:
            self._takes_references = False

    def reset_cache_states(self) -> None:
        """Write trained rows back, and fetch the cached ones again. Collective where ranks share the rows: they wait
        until all of them have written."""
        self.cache.flush()
        self.host.wait_for_ranks(self.cache.name)
        self.cache.host_rows_changed()
