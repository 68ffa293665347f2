"""Codecs of TorchRec's that send bytes: which of them are replaced, or fail, where a table needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fbgemm_gpu.quantize_comm import QuantizedCommCodec as FbgemmCodec
from fbgemm_gpu.split_embedding_configs import SparseType
from torchrec.distributed.types import CommOp, ParameterSharding

from embershard.errors import ConfigError
from embershard.sharding.torchrec.modes.mode import ShardingMode

_POOLED = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name
_SUMS = CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name
_SEQUENCES = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name
_OF_TYPE = {"row_wise": (_SUMS,), "table_row_wise": (_SUMS, _POOLED), "grid_shard": (_SUMS, _POOLED)}
_SIDES = {"forward": "embeddings", "backward": "gradients"}


def check(
    registry: Mapping[str, Any],
    module: Any,
    params: Mapping[str, ParameterSharding],
    device_type: str,
    modes: Sequence[ShardingMode] = (),
) -> None:
    """Check that TorchRec sends the tables of a module in the types that its registry was made for.

    `get_qcomm_codecs_registry` replaces bf16 by fp16 on a CPU for all tables: what it returns then is a registry of
    fp16, and nobody can tell.

    Args:
        params: by table.
        modes: of the sharder.

    Raises:
        ConfigError: TorchRec replaced a type for some tables, or its codec fails in the first batch.
    """
    found: dict[str, list[str]] = {}
    for table, param in params.items():
        is_by_rows = hasattr(module, "embedding_configs") or any(mode.are_by_columns(table) for mode in modes)
        kinds = (_SEQUENCES,) if is_by_rows else _OF_TYPE.get(param.sharding_type, (_POOLED,))
        for problem in () if param.sharding_type == "data_parallel" else _problems(registry, kinds, device_type):
            found.setdefault(problem, []).append(table)
    if found:
        told = "; ".join(f"for the tables {sorted(tables)[:5]} {problem}" for problem, tables in found.items())
        raise ConfigError(
            f"got a qcomm_codecs_registry of TorchRec's that does not send what it was made for: {told}. Use "
            'embershard.extras.wire_types.WireTypes("int8", "fp8"), which sends bytes for all tables, or '
            "QCommsConfig with CommType.FP16"
        )


def _problems(registry: Mapping[str, Any], kinds: Sequence[str], device_type: str) -> Iterator[str]:
    """Yield what TorchRec makes of the types of these exchanges."""
    for side, what in _SIDES.items():
        elsewhere = [_type(registry, kind, side) for kind in (_POOLED, _SEQUENCES)]
        asked = [kind for kind in (SparseType.FP8, SparseType.MX4) if kind in elsewhere]
        for kind in kinds:
            sent = _type(registry, kind, side)
            if kind == _SUMS and asked and sent in (SparseType.FP16, SparseType.BF16):
                names = " and ".join(each.value for each in asked)
                yield (
                    f"it has {names} for {what}, which TorchRec replaces by {sent.value} where sums are added up on "
                    "their way, with a line in the log alone"
                )
            elif kind == _SUMS and sent == SparseType.INT8:
                yield (
                    f"it has int8 for {what}, with which TorchRec fails in the first batch where sums are added up on "
                    'their way ("Unexpected `None`")'
                )
            elif device_type == "cpu" and sent == SparseType.FP8:
                yield f"it has fp8 for {what}, for which FBGEMM has no kernel on a CPU: the first batch fails"


def _type(registry: Mapping[str, Any], kind: str, side: str) -> SparseType | None:
    """Return what the codec of an exchange sends; None: it is no codec of FBGEMM's."""
    codec = getattr(registry.get(kind), side, None)
    return codec._comm_precision if isinstance(codec, FbgemmCodec) else None
