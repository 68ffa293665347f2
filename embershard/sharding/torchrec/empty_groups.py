"""Plans by which a rank would have no row of a group of tables, which FBGEMM cannot train on a CPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torchrec.distributed.types import ParameterSharding

from embershard.errors import ShardingError
from embershard.sharding.shards import Shard, empty_group_problem
from embershard.sharding.torchrec.spec import CACHED_KERNEL


def check_groups(
    module: Any,
    params: Mapping[str, ParameterSharding],
    device_type: str,
    rows_tables: Collection[str] = (),
) -> None:
    """Check a plan of a module's tables, made by anybody. A cache may have no row.

    Args:
        module: with embedding configs.
        params: by table.
        device_type: of the training. On a GPU there is no such limit.
        rows_tables: those that exchange distinct rows, which TorchRec groups by their columns.

    Raises:
        ShardingError: on a CPU, a rank has no row of a group that has no cache. It would end with a corrupt heap, or
            with "weights[0] must be a GPU or MTIA tensor". On every rank.
    """
    configs = module.embedding_bag_configs() if hasattr(module, "embedding_bag_configs") else module.embedding_configs()
    tables = []
    for config in configs if device_type == "cpu" else ():
        param = params.get(config.name)
        spec: Any = None if param is None or param.compute_kernel == CACHED_KERNEL else param.sharding_spec
        if param is None or spec is None:
            continue
        shards = [
            Shard(config.name, shard.placement.rank(), *shard.shard_sizes, *shard.shard_offsets)
            for shard in spec.shards
        ]
        columns = str(shards[0].columns) if config.name in rows_tables else ""
        pooling = str(getattr(config, "pooling", ""))
        tables.append(((param.sharding_type, param.compute_kernel, str(config.data_type), pooling, columns), shards))
    if problem := empty_group_problem(tables):
        raise ShardingError(
            f"{problem}, and FBGEMM cannot train that on a CPU. Place them table_wise "
            '(ParameterConstraints(sharding_types=["table_wise"])), use fewer ranks, or cache them: a cached sharder '
            "trains them on any number of ranks"
        )
