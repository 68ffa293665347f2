"""TorchRec's sharders as they are, for the uncached side of every comparison: with our initial weights."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import ShardingType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

from embershard.sharding.torchrec.counter_init import CounterInit
from embershard.sharding.torchrec.empty_groups import check_groups
from embershard.sharding.torchrec.lookups import POOLED_SHARDINGS, SEQUENCE_SHARDINGS

POOLED_TYPES = [ShardingType.DATA_PARALLEL.value, *POOLED_SHARDINGS]
SEQUENCE_TYPES = [ShardingType.DATA_PARALLEL.value, *SEQUENCE_SHARDINGS]


class _FromSeed:
    """Makes the initial weights of a sharded module from a seed, if there is one. Stands before one of TorchRec's
    sharders."""

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Any = None,
        init_seed: int | None = None,
    ) -> None:
        super().__init__(fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry)  # type: ignore[call-arg]
        self._init_seed = init_seed

    def shard(self, module: Any, params: Any, env: Any, device: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Shard the module. `DistributedModelParallel` calls this.

        Raises:
            ShardingError: on a CPU, a rank has no row of some tables, which ends a process in FBGEMM.
        """
        check_groups(module, params, torch.device(device or "cpu").type)
        sharded = super().shard(module, params, env, device, *args, **kwargs)  # type: ignore[misc]
        if self._init_seed is not None:
            CounterInit.of_module(module, self._init_seed).write(sharded)
        return sharded


class StockEmbeddingBagCollectionSharder(_FromSeed, EmbeddingBagCollectionSharder):
    """TorchRec's sharder with all sharding types on a CPU, too: the uncached side of every comparison.

    TorchRec hides row-wise, table-row-wise and grid sharding on a CPU, though they work there.

    >>> "row_wise" in StockEmbeddingBagCollectionSharder().sharding_types("cpu")
    True

    Args:
        fused_params, qcomm_codecs_registry: as TorchRec takes them.
        init_seed: as for :class:`CachedEmbeddingBagCollectionSharder`, to start from the same weights.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return all types, on every device."""
        return POOLED_TYPES


class StockEmbeddingCollectionSharder(_FromSeed, EmbeddingCollectionSharder):
    """The same for sequence embeddings: TorchRec's sharder, with the initial weights of the cached one.

    >>> "row_wise" in StockEmbeddingCollectionSharder().sharding_types("cpu")
    True

    Args:
        fused_params, qcomm_codecs_registry: as TorchRec takes them.
        init_seed: as for :class:`CachedEmbeddingCollectionSharder`, to start from the same weights.
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return TorchRec's types for sequences, on every device."""
        return SEQUENCE_TYPES
