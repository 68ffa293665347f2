"""Initial weights from a counter for the tables of a module, in place of TorchRec's own."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import init
from torchrec.distributed.embedding_types import ShardedEmbeddingTable

from embershard.cache.rows.initial_weights import ShardWeights
from embershard.errors import ConfigError

_NAMES = "uniform_, constant_, zeros_ and ones_ of torch.nn.init, with functools.partial for their numbers"


@dataclass(frozen=True, eq=False)
class CounterInit:
    """Initial weights of a module's tables: functions of seed, table, row and column, whatever the plan and the ranks.

    Attributes:
        seed: of all tables.
        ranges: lowest and highest weight, by table.
    """

    seed: int
    ranges: dict[str, tuple[float, float]]

    @classmethod
    def of_module(cls, module: Any, seed: int) -> CounterInit:
        """Read the ranges of an embedding module that is not sharded yet.

        TorchRec's default is uniform in +-1 / sqrt(rows), or what `weight_init_min` and `weight_init_max` say.

        Raises:
            ConfigError: a table's `init_fn` draws its weights in another way, or the module has weights on a GPU, which
                TorchRec would copy.
        """
        if torch.device(module.device).type not in ("meta", "cpu"):
            raise ConfigError(
                f"init_seed={seed} and an embedding module on {module.device}: TorchRec would copy the module's own "
                'weights. Make the module on torch.device("meta"), or leave init_seed out'
            )
        has_bags, ranges = hasattr(module, "embedding_bag_configs"), dict[str, tuple[float, float]]()
        for config in module.embedding_bag_configs() if has_bags else module.embedding_configs():
            init_fn: Any = config.init_fn
            function, given = init_fn, dict[str, float]()
            if isinstance(init_fn, functools.partial) and not init_fn.args:
                function, given = init_fn.func, dict(init_fn.keywords)
            if function is init.uniform_ and given.keys() <= {"a", "b"}:
                ranges[config.name] = given.get("a", 0.0), given.get("b", 1.0)
            elif function is init.constant_ and given.keys() == {"val"}:
                ranges[config.name] = given["val"], given["val"]
            elif function in (init.zeros_, init.ones_) and not given:
                ranges[config.name] = (0.0, 0.0) if function is init.zeros_ else (1.0, 1.0)
            else:
                raise ConfigError(
                    f"table {config.name!r}: got init_fn={init_fn!r}, which draws the weights of a whole tensor "
                    f"in turn. With init_seed, any block of rows is made by itself. Needed: no init_fn, or one of "
                    f"{_NAMES}; or leave init_seed out, and load the weights that you want"
                )
        return cls(seed, ranges)

    def of_shard(self, table: ShardedEmbeddingTable) -> ShardWeights:
        """Return the initial weights of a shard on this rank."""
        low, high = self.ranges[table.name]
        row, column = table.local_metadata.shard_offsets if table.local_metadata else (0, 0)
        return ShardWeights(table.name, self.seed, table.embedding_dim, low, high, row, column)
