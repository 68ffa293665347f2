"""Optimizers and arguments of FBGEMM's tables that work on slots.

A row enters and leaves a slot with what FBGEMM keeps per row: weights and momenta. Anything else that FBGEMM keeps
would belong to slots instead of rows, and losses would drift from those of uncached tables without a message. So
only arguments that were compared with uncached tables are accepted.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)

from embershard.cache.config import CacheConfig
from embershard.errors import ConfigError

#: Arguments of FBGEMM's own cache, which is not used here: dropped.
FBGEMM_CACHE_ARGUMENTS = frozenset(
    {
        "cache_algorithm",
        "cache_load_factor",
        "cache_precision",
        "cache_reserved_memory",
        "cache_sets",
        "enforce_hbm",
        "gather_uvm_cache_stats",
        "multipass_prefetch_config",
        "prefetch_pipeline",
        "record_cache_metrics",
        "uvm_host_mapped",
    }
)

# These update a row from its gradient and from states that move with it. The step number for the bias correction of the
# Adams and LAMBs is one per table, and kept when slots are added. tests/ranks/parity.py trains each. Of the others,
# EMAINPLACE_ROWWISE_ADAGRAD and ENSEMBLE_ROWWISE_ADAGRAD average all rows of a table every few steps, cached or not;
# LARS_SGD has a state that TorchRec cannot get from FBGEMM; NONE gives out gradients by slot number; FBGEMM has no
# kernels for the rest.
_OPTIMIZERS = (
    EmbOptimType.EXACT_SGD,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    EmbOptimType.EXACT_ADAGRAD,
    EmbOptimType.ADAM,
    EmbOptimType.PARTIAL_ROWWISE_ADAM,
    EmbOptimType.LAMB,
    EmbOptimType.PARTIAL_ROWWISE_LAMB,
)
# These decay a row in the steps that train it, by its own value. COUNTER and COWCLIP use the table's largest count,
# which a new table of slots starts again; DECOUPLE_GLOBAL makes up for the steps that did not train a row, from a bound
# that starts again, too.
_WEIGHT_DECAY_MODES = (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE)

#: Others have no kernels on a CPU, rows of other widths (scales beside quantized numbers), or were not compared.
_ROW_TYPES = (torch.float32, torch.float16)

_ARGUMENTS = frozenset(
    {
        "optimizer",  # one of the above
        "weight_decay_mode",  # one of the above
        # Numbers in a row's own update.
        "learning_rate",
        "eps",
        "beta1",
        "beta2",
        "weight_decay",
        "momentum",  # like eta, without effect on the optimizers above
        "eta",
        "gradient_clipping",  # each element of a row's gradient by itself
        "max_gradient",
        "max_norm",  # scales a row down after its own update, by its own norm
        "stochastic_rounding",  # random numbers by place in the batch: on a GPU they differ from an uncached table's
        "output_dtype",  # of the pooled embeddings
        "embedding_table_index_type",  # slots are numbers below 2^31
        "embedding_table_offset_type",
        "bounds_check_mode",  # dropped: ids are checked before they become slots
    }
)
# TorchRec removes these when it groups tables.
_TORCHREC_ARGUMENTS = frozenset({"_batch_key", "use_one_tbe_per_table", "__register_ssd_table_list"})

_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters.items()
}

_STATE_OF_SLOTS = "it keeps a state of the whole table or of its slots, which does not move with the rows"
_STREAMS_SLOTS = "it sends rows out by their numbers, which are slots here"
_NAMES_SLOTS = "it names rows by their numbers, which are slots here"
_WHY_NOT = {
    "ensemble_mode": _STATE_OF_SLOTS,
    "emainplace_mode": _STATE_OF_SLOTS,
    "counter_based_regularization": _STATE_OF_SLOTS,
    "cowclip_regularization": _STATE_OF_SLOTS,
    "global_weight_decay": _STATE_OF_SLOTS,
    "enable_raw_embedding_streaming": _STREAMS_SLOTS,
    "res_params": _STREAMS_SLOTS,
    "res_store_shards": _STREAMS_SLOTS,
    "res_enabled_tables": _STREAMS_SLOTS,
    "stats_reporter_config": _NAMES_SLOTS,
    "tbe_input_multiplexer_config": _NAMES_SLOTS,
    "embedding_shard_info": "it places the table's rows in a larger table, and slots have no such place",
    "is_qr_tbe": "such a table divides row numbers, and gets slot numbers here",
    "preallocated_host_buffers": "it has room for all rows, and slots are allocated again when their number grows",
    "uvm_non_rowwise_momentum": "it puts the slots' optimizer states in host memory",
}
_NOT_COMPARED = "it was not compared with uncached tables"


def check_table_arguments(arguments_of_table: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse arguments that are not known to work on slots.

    >>> check_table_arguments({"clicks": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "eps": 1e-8}})
    >>> check_table_arguments({"clicks": {"global_weight_decay": object()}})
    Traceback (most recent call last):
    embershard.errors.ConfigError: cached tables ['clicks']: got global_weight_decay=...

    Args:
        arguments_of_table: `fused_params` of the cached tables, by table.

    Raises:
        ConfigError: naming the tables and the optimizer, weight decay mode or argument.
    """
    refused: dict[str, list[str]] = {}
    for table, arguments in arguments_of_table.items():
        for message in _problems(arguments):
            refused.setdefault(message, []).append(table)
    for message, tables in refused.items():
        raise ConfigError(f"cached tables {sorted(tables)}: {message}, or place these tables without a cache")


def check_row_types(type_of_table: Mapping[str, torch.dtype]) -> None:
    """Refuse tables whose rows slots cannot train.

    >>> check_row_types({"clicks": torch.float16})
    >>> check_row_types({"clicks": torch.bfloat16})
    Traceback (most recent call last):
    embershard.errors.ConfigError: cached tables ['clicks']: got rows of bfloat16, needed float32 or float16...

    Raises:
        ConfigError: naming the tables and their type.
    """
    for dtype in dict.fromkeys(type_of_table.values()):
        if dtype not in _ROW_TYPES:
            tables = sorted(table for table, its_type in type_of_table.items() if its_type == dtype)
            raise ConfigError(
                f"cached tables {tables}: got rows of {str(dtype).removeprefix('torch.')}, needed float32 or float16. "
                "Give these tables data_type=DataType.FP32 or DataType.FP16, or place them without a cache"
            )


def check_host_types(type_of_table: Mapping[str, torch.dtype], cache: CacheConfig) -> None:
    """Refuse tables with small rows in host memory whose slots are not float32.

    >>> check_host_types({"clicks": torch.float16}, CacheConfig(host_dtype="fp16"))
    Traceback (most recent call last):
    embershard.errors.ConfigError: tables ['clicks']: got rows of float16 and cache.host_dtype...

    Raises:
        ConfigError: naming the tables.
    """
    small = {table: its_type for table, its_type in type_of_table.items() if cache.small_type_of(table)}
    if other := sorted(table for table, its_type in small.items() if its_type != torch.float32):
        raise ConfigError(
            f"tables {other}: got rows of float16 and cache.host_dtype, which rounds float32 slots: one of the two. "
            'For half the host memory take cache.host_dtype = "fp16" and tables of float32, which also trains the same '
            "bits on any cache"
        )


def check_home(cache: CacheConfig, has_seed: bool, modes: Sequence[str]) -> None:
    """Refuse small rows in host memory, and rows that are elsewhere, where something would use them as memory.

    >>> check_home(CacheConfig(host_dtype="fp16"), has_seed=False, modes=[])
    Traceback (most recent call last):
    embershard.errors.ConfigError: cache.host_dtype: got fp16 without init_seed...

    Args:
        has_seed: of the initial weights.
        modes: that keep rows of their own, as a user asks for them.

    Raises:
        ConfigError: with the setting to change.
    """
    is_elsewhere = not cache.rows_are_memory
    if not cache.small_types and not is_elsewhere:
        return
    small = f"cache.host_dtype: got {' and '.join(cache.small_types)}"
    got, default = (f'cache.host: got "{cache.host}"', '"memory"') if is_elsewhere else (small, '"fp32"')
    if not has_seed:
        draws = "rows that were never written are drawn by that seed" if is_elsewhere else "the seed also rounds"
        raise ConfigError(
            f"{got} without init_seed. TorchRec would write its own initial weights to memory that is not there, and "
            f'{draws}. Give init_seed (train.init = "counter"), or set {default}'
        )
    if modes:
        raise ConfigError(
            f"{got} together with {', '.join(modes)}, which keeps copies of host rows, or begins them anew, in memory "
            "and as fp32. Leave one of them out"
        )


def _problems(arguments: Mapping[str, Any]) -> list[str]:
    optimizer = arguments.get("optimizer", EmbOptimType.EXACT_SGD)
    decay = arguments.get("weight_decay_mode", WeightDecayMode.NONE)
    found = []
    if optimizer not in _OPTIMIZERS:
        found.append(
            f"got the optimizer {_name(optimizer)}, but rows in slots are trained as without a cache only by "
            f"{', '.join(map(_name, _OPTIMIZERS))}: others work on the whole table, of which the slots are a part, or "
            "were not compared. Take one of those"
        )
    if decay not in _WEIGHT_DECAY_MODES:
        found.append(
            f"got weight_decay_mode {_name(decay)}, but only {', '.join(map(_name, _WEIGHT_DECAY_MODES))} work on "
            f"slots: {_STATE_OF_SLOTS}. Take one of those"
        )
    known = _ARGUMENTS | _TORCHREC_ARGUMENTS | FBGEMM_CACHE_ARGUMENTS
    for name in sorted(arguments.keys() - known):
        default = _DEFAULTS.get(name, inspect.Parameter.empty)
        if arguments[name] is not default:
            found.append(
                f"got {name}={arguments[name]!r} in fused_params, which is not known to work on slots: "
                f"{_WHY_NOT.get(name, _NOT_COMPARED)}. Known to work are {', '.join(sorted(_ARGUMENTS))}. Leave it out"
            )
    return found


def _name(value: Any) -> str:
    return getattr(value, "name", None) or repr(value)
