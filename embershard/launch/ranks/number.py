"""How many ranks a command starts on this machine."""

from __future__ import annotations

import os
import sys

from embershard.errors import ConfigError
from embershard.launch.ranks import launcher
from embershard.machine import cores_problem
from embershard.sharding.plan import Plan
from embershard.training.config import RunConfig

_MOST_LOCAL_RANKS = 64  # above it, the number of processes must be asked for


def default_ranks(config: RunConfig) -> int:
    """Return the number of ranks that nobody chose, and say it."""
    num_ranks = 2 if config.train.device == "cpu" else launcher.default_num_ranks()
    print(f"embershard: starting {num_ranks} ranks (--nproc N for another number).", flush=True)
    return num_ranks


def warn_of_cores(config: RunConfig, num_ranks: int) -> None:
    """Print a warning where far more ranks than this machine has cores train on its CPU."""
    cores = len(os.sched_getaffinity(0))
    problem = cores_problem(num_ranks, cores, "this machine")
    if problem is None or config.train.device == "cuda":
        return
    import torch

    if config.train.device == "cpu" or not torch.cuda.is_available():
        advice = f"Use --nproc {cores} (and a plan for as many), or more machines (torchrun)."
        print(f"embershard: {problem} {advice}", file=sys.stderr, flush=True)


def planned_ranks(config: RunConfig, nproc: int | None, *, is_started: bool = True) -> int | None:
    """Return `nproc`, or the number of ranks of the run's plan; None where neither says one.

    Args:
        is_started: they will be started on this machine.

    Raises:
        ConfigError: a command for one machine may not start so many; a setting needs a plan.
        ShardingError: the plan is for another number.
    """
    config.check_exchange()
    if config.sharding.plan is None:
        return nproc
    plan = Plan.load(config.sharding.plan)
    if nproc is None and plan.ranks_per_node != plan.world_size:
        raise ConfigError(
            f"the plan is for {plan.world_size} ranks on {plan.world_size // plan.ranks_per_node} nodes, and this "
            "command starts those of one; start them with torchrun (docs/training.md)."
        )
    if nproc is None and plan.world_size > _MOST_LOCAL_RANKS:
        raise ConfigError(
            f"the plan is for {plan.world_size} ranks on one node; say --nproc {plan.world_size} if you mean it."
        )
    num_ranks = nproc or plan.world_size
    if is_started:
        plan.check_ranks(num_ranks, num_ranks)  # all of them on this machine
    return num_ranks
