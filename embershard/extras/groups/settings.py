"""Which settings go with groups of ranks, and what `sharding.moment_scale` makes of an optimizer's numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from embershard.errors import ConfigError

if TYPE_CHECKING:
    from embershard.sharding.config import ShardingConfig
    from embershard.training.config import RunConfig
    from embershard.training.optimizers import EmbeddingOptimizerConfig

#: FBGEMM's, where the settings have none.
_EPS = 1e-8


def check_sharding(config: ShardingConfig) -> None:
    """Check the settings of groups by themselves.

    Raises:
        ConfigError: one is out of range, has no effect, or does not go with the mode.

    >>> from embershard.sharding.config import ShardingConfig
    >>> ShardingConfig(groups=2, sync_every=4).sync_every
    4
    """
    scale = 1 if config.moment_scale is None else config.moment_scale
    if min(config.groups, config.sync_every) < 1 or not 0 < scale <= 1:
        raise ConfigError(
            f"sharding.groups={config.groups}, sync_every={config.sync_every}, moment_scale={config.moment_scale}: "
            "needed 1 group or more, 1 step or more, and a factor above 0 and up to 1."
        )
    if not 0 <= config.sync_delay <= config.sync_every:
        raise ConfigError(
            f"sharding.sync_delay: got {config.sync_delay}, needed 0 to sync_every={config.sync_every} steps, as an "
            "average ends before the next one begins."
        )
    alone = {"sync_every": 1, "sync_delay": 0, "sync_dtype": "fp32", "moment_scale": None}
    for name, default in alone.items() if config.groups == 1 else ():
        if getattr(config, name) != default:
            raise ConfigError(f"sharding.{name} has no effect with one group. Set sharding.groups, or remove it.")
    if config.groups > 1 and config.mode != "sharded":
        raise ConfigError(
            f'sharding.groups: got {config.groups} with sharding.mode="{config.mode}", needed "sharded": rows of the '
            "others have copies on all ranks already."
        )


def check_run(config: RunConfig) -> None:
    """Raise `ConfigError` for settings of a run that do not go with groups."""
    problems = {
        'tables that take any id (the mapping "ids" or "text_ids"): which row an id has follows from the batches of a '
        "group, so replicas' rows would be of other ids": config.data.has_ids,
        f"data in the order of their times and sharding.sync_every = {config.sharding.sync_every}, sync_delay = "
        f"{config.sharding.sync_delay}: a window is evaluated before any step of its samples, when replicas differ": (
            config.data.is_in_time_order and (config.sharding.sync_every, config.sharding.sync_delay) != (1, 0)
        ),
    }
    for problem, holds in problems.items():
        if holds:
            raise ConfigError(
                f"sharding.groups: got {config.sharding.groups} with {problem}. Leave one of the two out."
            )
    if config.sharding.moment_scale is not None:
        scaled(config.embedding_optimizer, config.sharding.moment_scale)


def scaled(optimizer: EmbeddingOptimizerConfig, scale: float) -> EmbeddingOptimizerConfig:
    """Return the optimizer whose steps are those with sums of squares times `scale`: with a sum v and a factor c,
    `lr g / (sqrt(c v) + eps)` is `(lr / sqrt(c)) g / (sqrt(v) + eps / sqrt(c))`, which FBGEMM's kernels compute.

    >>> from embershard.training.optimizers import EmbeddingOptimizerConfig
    >>> scaled(EmbeddingOptimizerConfig("adagrad", lr=0.1, eps=1e-6), 0.25).lr
    0.2

    Raises:
        ConfigError: the optimizer has no such sums.
    """
    if optimizer.kind not in ("adagrad", "rowwise_adagrad"):
        raise ConfigError(
            f'sharding.moment_scale: got embedding_optimizer.kind = "{optimizer.kind}", needed "adagrad" or '
            '"rowwise_adagrad", whose sums of squares it scales. Leave it out.'
        )
    eps = _EPS if optimizer.eps is None else optimizer.eps
    return replace(optimizer, lr=optimizer.lr / scale**0.5, eps=eps / scale**0.5)
