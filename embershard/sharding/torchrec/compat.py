"""Differences between the TorchRec versions that embershard runs on (1.6 to 1.9), and small readings of its types."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorBase
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def supported(function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Return those of `arguments` that `function` of this TorchRec version takes."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}


def name_work_for_profilers_only() -> None:
    """Let TorchRec's modules name their work while a profiler runs, and not else: 16 names of a step take 6 to 17 us of
    the thread that trains, each, whether or not anybody reads them. Traces have the names that they had."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torchrec.") and getattr(module, "record_function", None) is profiler.record_function:
            module.record_function = _named_work  # type: ignore[attr-defined]


def _named_work(name: str, args: str | None = None) -> AbstractContextManager[Any]:
    return profiler.record_function(name, args) if profiler._is_profiler_enabled else nullcontext()


class GroupedEnv(ShardingEnv2D):
    """Sharding over a group of ranks, of which other groups are replicas whose rows somebody averages by key. `rank`
    and `world_size` are those of the group, and `process_group` is of all ranks."""


def sharding_group(env: ShardingEnv) -> Any:
    """Return the process group over which tables are sharded."""
    return env.sharding_pg if isinstance(env, ShardingEnv2D) else env.process_group


def global_rank(env: ShardingEnv) -> int:
    """Return this rank's number as a plan's placements and messages have it: among all ranks."""
    return env.global_rank if isinstance(env, ShardingEnv2D) else env.rank


def as_keyed_jagged(features: Any) -> KeyedJaggedTensor:
    """Convert a module's input: TorchRec's modules also take a TensorDict of jagged tensors."""
    if isinstance(features, KeyedJaggedTensor):
        return features
    from torchrec.sparse.tensor_dict import maybe_td_to_kjt

    return maybe_td_to_kjt(features, None)


def batch_sizes(features: KeyedJaggedTensor) -> list[list[int]] | None:
    """Return the samples per feature and rank where features differ in them, else None."""
    return features.stride_per_key_per_rank() if features.variable_stride_per_key() else None


def with_int32_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the features with their ids as int32. What the host knows of their lengths it still knows: to ask for them
    is a wait for the device.

    >>> import torch
    >>> with_int32_ids(KeyedJaggedTensor(["user"], torch.tensor([7, 5]), lengths=torch.tensor([2, 0]))).values()
    tensor([7, 5], dtype=torch.int32)
    """
    strides = batch_sizes(features)
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values().int(),
        weights=features.weights_or_none(),
        lengths=features.lengths(),
        stride=features.stride() if strides is None else None,
        stride_per_key_per_rank=strides,
        length_per_key=features.length_per_key_or_none(),
        inverse_indices=features.inverse_indices_or_none(),
    )


def with_own_columns(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let TorchRec load tables whose blocks of columns differ, before its own hook does: that gives each rank's rows
    the columns of the first shard of all. In its place comes the rank's own."""
    for name, value in state_dict.items():
        if not name.startswith(prefix) or not isinstance(value, ShardedTensor) or not value.local_shards():
            continue
        shards, own = value.metadata().shards_metadata, value.local_shards()[0].metadata
        if own.shard_sizes[1:] != shards[0].shard_sizes[1:]:
            first = EnumerableShardingSpec([own, *(each for each in shards if each != own)])
            made: Any = ShardedTensorBase._init_from_local_shards_and_global_metadata
            state_dict[name] = made(value.local_shards(), value.metadata(), first)


def lookups_of(module: Any) -> Iterator[Any]:
    """Yield the lookups of a sharded module, one for each of its shardings, without the wrappers of data-parallel ones;
    none for any other module."""
    for lookup in getattr(module, "_lookups", None) or ():
        yield unwrapped(lookup)


def unwrapped(module: Any) -> Any:
    """Return the module inside of the wrappers of data-parallel ones."""
    while isinstance(module, DistributedDataParallel):
        module = module.module
    return module
