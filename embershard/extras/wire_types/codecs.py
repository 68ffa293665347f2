"""`WireTypes`: a sharder's `qcomm_codecs_registry` of 8-bit types."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingDist
from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingDist
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingDist
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingDist
from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingDist
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist
from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingDist
from torchrec.distributed.types import CommOp, QuantizedCommCodec, QuantizedCommCodecs

from embershard.errors import ConfigError
from embershard.extras.wire_types.encoding import WIRE_TYPES, WireType
from embershard.extras.wire_types.exchange import EncodedAllToAll, EncodedReduceScatter, Types
from embershard.sharding.torchrec.sharders import ModuleCodecs


class WireTypes(ModuleCodecs):
    """Types of pooled embeddings and of their gradients between ranks, one of them "int8" or "fp8": a byte for each
    number, and for each row of D columns, of one sample and feature, a scale of four bytes. Sequence embeddings and
    distinct rows (`exchange="rows"`) travel so, too.

    Args:
        forward, backward: "fp32", "fp16", "bf16", "int8" or "fp8".

    Raises:
        ConfigError: another type.

    >>> from embershard import CachedEmbeddingBagCollectionSharder
    >>> sharder = CachedEmbeddingBagCollectionSharder(qcomm_codecs_registry=WireTypes("int8", "fp8"))
    """

    def __init__(self, forward: str, backward: str) -> None:
        for name in (forward, backward):
            if name not in WIRE_TYPES:
                raise ConfigError(f"got the type {name!r} of rows between ranks, needed one of {', '.join(WIRE_TYPES)}")
        self._types = Types(WIRE_TYPES[forward], WIRE_TYPES[backward])
        nobodys: Any = _NobodysCodec()
        super().__init__({each.name: QuantizedCommCodecs(nobodys, nobodys) for each in CommOp})

    def put_into(self, sharded: Any) -> None:
        """Let the exchanges of a sharded module use these types.

        Raises:
            ConfigError: a group of tables is exchanged in a way that has none.
        """
        of_bags = hasattr(sharded, "_embedding_shardings")
        shardings = sharded._embedding_shardings if of_bags else sharded._sharding_type_to_sharding.values()
        for sharding, output in zip(shardings, sharded._output_dists, strict=True):
            if isinstance(output, DpPooledEmbeddingDist | DpSequenceEmbeddingDist):
                continue  # nothing travels
            if not sum([self._put(part, sharding) for part in list(output.modules())]):
                raise ConfigError(
                    f"got an 8-bit type of embeddings between ranks for the tables "
                    f"{sorted(table.name for table in sharding.embedding_tables())[:5]}, which are exchanged by "
                    f'{type(output).__name__}; needed one of TorchRec\'s exchanges. Use "fp16" or "fp32"'
                )

    def _put(self, output: Any, sharding: Any) -> bool:
        """Let a part of an exchange use these types; False: it does not send embeddings."""
        types = self._types
        if isinstance(output, TwPooledEmbeddingDist):
            dims = output._emb_dim_per_rank_per_feature
            output._dist = output._variable_dist = EncodedAllToAll(output._pg, types, dims, output._callbacks or ())
        elif isinstance(output, RwPooledEmbeddingDist):
            output._dist = EncodedReduceScatter(output._pg, types, output._embedding_dims)
        elif isinstance(output, TwRwPooledEmbeddingDist | GridPooledEmbeddingDist):
            node, dims = output._rank // output._intra_pg.size(), output._emb_dim_per_node_per_feature
            callbacks = getattr(output, "_callbacks", None) or ()  # grid's: of the blocks of columns
            output._intra_dist = EncodedReduceScatter(output._intra_pg, types, dims[node])
            output._cross_dist = EncodedAllToAll(output._cross_pg, types, dims, callbacks)
            output._variable_intra_dist, output._variable_cross_dist = output._intra_dist, output._cross_dist
        elif isinstance(output, TwSequenceEmbeddingDist | RwSequenceEmbeddingDist):
            columns = sharding.embedding_tables()[0].local_cols
            output._dist._codecs = QuantizedCommCodecs(*(RowCodec(each, columns) for each in types))
        else:
            return False
        return True


class RowCodec(QuantizedCommCodec[Any]):
    """TorchRec's protocol, for numbers that are rows of `columns` each, one after the other."""

    def __init__(self, wire_type: WireType, columns: int) -> None:
        self._type, self._columns = wire_type, columns

    def encode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:
        """Return rows as bytes, uint8 [N]."""
        return self._type.encode(input_tensor.reshape(-1, self._columns)).view(-1)

    def decode(self, input_grad: Tensor, ctx: Any = None) -> Tensor:
        """Return what was encoded, float32 [N]."""
        return self._type.decode(input_grad.view(-1, self._type.row_bytes(self._columns))).view(-1)

    @property
    def quantized_dtype(self) -> torch.dtype:
        """Type of what is sent."""
        return torch.uint8

    def calc_quantized_size(self, input_len: int, ctx: Any = None) -> int:
        """Return the bytes of so many numbers."""
        return input_len // self._columns * self._type.row_bytes(self._columns)

    def create_context(self) -> None:
        """Return nothing: a row's scale travels with it."""


class _NobodysCodec(QuantizedCommCodec[Any]):
    """Of an exchange into which nobody has put codecs."""

    def create_context(self) -> None:
        """Raise `ConfigError`."""
        raise ConfigError(
            "got `WireTypes` as the qcomm_codecs_registry of TorchRec's own sharder, which cannot send 8-bit rows; "
            "needed a sharder of embershard (CachedEmbeddingBagCollectionSharder, StockEmbeddingBagCollectionSharder, "
            "and those for sequences). Use one of these, or a registry of TorchRec's"
        )

    def encode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:
        """Raise `ConfigError`."""
        self.create_context()
        return input_tensor
