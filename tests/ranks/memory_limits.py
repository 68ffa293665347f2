"""Runs of plans that use their memory up, as one rank of a pool of processes: the bytes that they take."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn

from embershard.sharding.config import ShardingConfig
from embershard.sharding.torchrec import cache_stats
from embershard.sharding.torchrec.compat import lookups_of
from embershard.sharding.torchrec.inspection import cached_embeddings
from embershard.training.config import RunConfig
from embershard.training.trainer import Trainer
from tests.ranks.planned import here

STEPS = 14


@dataclass(frozen=True)
class Taken:
    """Bytes of tensors that a rank holds behind its last step, with what its caches did.

    Attributes:
        tables: rows and optimizer states of slots and of tables without a cache.
        maps: of the caches, and what they keep per slot.
        dense: parameters, gradients and optimizer states of the dense layers.
        known: most ids of known batches.
    """

    tables: int
    maps: int
    dense: int
    known: int
    evictions: int
    growths: int


def taken(config: RunConfig, plan: Path) -> Taken:
    """Train some steps by a plan; return what this rank took."""
    trainer = Trainer(dataclasses.replace(config, sharding=ShardingConfig(plan=str(plan))), here())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # growth is what is counted
        for _ in range(STEPS):
            with trainer.upcoming.next() as batch:
                trainer.step(batch)
    look_ahead = trainer.upcoming.stats()
    state = trainer.optimizers.dense.state_dict()["state"]
    dense = trainer.optimizers.dense_parameters.values()
    stats = cache_stats(trainer.model)
    found = Taken(
        tables=_bytes(_rows(trainer.model)),
        maps=sum(pool.cache.state.device_bytes for pool in cached_embeddings(trainer.model)),
        dense=_bytes([*dense, *(each.grad for each in dense if each.grad is not None), *_tensors(state)]),
        known=0 if look_ahead is None else look_ahead.max_known_bytes,
        evictions=sum(table.evictions for table in stats),
        growths=sum(table.overflow_growths for table in stats),
    )
    trainer.close()
    return found


def _rows(model: nn.Module) -> Iterator[Tensor]:
    """Yield FBGEMM's tensors of rows and states: of caches their slots, of other tables all rows."""
    for module in model.modules():
        for lookup in lookups_of(module):
            for table in lookup.modules():
                if isinstance(table, SplitTableBatchedEmbeddingBagsCodegen):
                    named = [*table.named_parameters(recurse=False), *table.named_buffers(recurse=False)]
                    yield from (each for name, each in named if name.endswith(("_dev", "_host", "_uvm")))


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the memory behind these tensors, each once."""
    storages = [each.untyped_storage() for each in tensors]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())
