"""`Groups`: which ranks shard the tables together, and which are each other's replicas."""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _remote_device
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed.types import ShardingPlan

from embershard.distributed.ranks import keep_gloo_to_one_core
from embershard.errors import ConfigError
from embershard.sharding.torchrec.compat import GroupedEnv
from embershard.sharding.torchrec.planner.placement import placed_on


@dataclass(frozen=True)
class Groups:
    """Groups of equally many ranks whose numbers follow each other, so that a node's ranks are in one group.

    >>> groups = Groups(number=2, world_size=6)
    >>> groups.size, groups.table
    (3, [[0, 1, 2], [3, 4, 5]])

    Attributes:
        number: of groups.
        world_size: ranks of all groups.

    Raises:
        ConfigError: the ranks cannot be divided so.
    """

    number: int
    world_size: int

    def __post_init__(self) -> None:
        if self.number < 1 or self.world_size % self.number:
            fitting = [count for count in range(1, self.world_size + 1) if self.world_size % count == 0]
            raise ConfigError(
                f"got {self.number} groups of {self.world_size} ranks, needed a number that divides the ranks: "
                f"{', '.join(map(str, fitting))} (sharding.groups)"
            )

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return self.world_size // self.number

    @property
    def table(self) -> list[list[int]]:
        """The ranks of each group. Ranks at one place of their groups, a column, are replicas of each other."""
        return [list(range(first, first + self.size)) for first in range(0, self.world_size, self.size)]

    def make_env(self, device: torch.device) -> GroupedEnv:
        """Return what `DistributedModelParallel` shards with, of this rank. Collective: it makes process groups, which
        last as long as the default one.

        Raises:
            ConfigError: the process has another number of ranks.
        """
        if dist.get_world_size() != self.world_size:
            raise ConfigError(f"got groups of {self.world_size} ranks in all, and there are {dist.get_world_size()}")
        mesh = DeviceMesh(device.type, torch.tensor(self.table), mesh_dim_names=("replicate", "shard"))
        sharding, replicas = mesh.get_group("shard"), mesh.get_group("replicate")
        if device.type == "cpu":
            keep_gloo_to_one_core(sharding)
            keep_gloo_to_one_core(replicas)
        every: Any = dist.group.WORLD
        in_node = min(self.size, ranks_per_node(self.world_size))
        env = GroupedEnv(sharding, replicas, every, mesh, in_node, use_inter_host_allreduce=True)
        env.output_dtensor = False  # state dicts as those of a model that is sharded over a group alone
        return env

    def remapped(self, plan: ShardingPlan, rank: int, device: torch.device) -> ShardingPlan:
        """Return a plan for the ranks of a group with the ranks of the group that `rank` is in."""
        first, per_node = rank - rank % self.size, ranks_per_node(self.world_size)
        plan = copy.deepcopy(plan)
        for module in plan.plan.values():
            for param in module.values():  # type: ignore[attr-defined]
                if param.sharding_spec is None:  # every rank has a copy
                    continue
                param.ranks = [each + first for each in param.ranks]
                for shard in param.sharding_spec.shards:
                    place = placed_on(device.type, shard.placement.rank() + first, per_node)
                    shard.placement = _remote_device(place)
        return plan


def ranks_per_node(world_size: int) -> int:
    """Return the ranks of this node, as launchers say it; else all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
