"""`GroupedModelParallel`: a model whose tables are sharded over groups of ranks that are replicas of each other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from embershard.extras.groups.groups import Groups
from embershard.extras.groups.row_sync import RowSync, SyncCounts
from embershard.sharding.config import SyncDtype


class GroupedModelParallel(DistributedModelParallel):
    """`DistributedModelParallel` with groups: the all-to-all of ids and embeddings stays inside of a group, and groups
    average the rows that they train. Gradients of dense layers are averaged over all ranks, and gradients of sharded
    tables are means over a group's batch, as with TorchRec's `DMPCollection`::

        plan = plan_sharding(model, sharders, world_size=world_size // 2, local_world_size=8, device=device)
        model = GroupedModelParallel(model, groups=2, plan=plan, sharders=sharders, device=device, sync_every=4)
        for batch in batches:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()
            model.end_step()

    Save and evaluate where `rows_are_equal`: replicas differ in between.

    >>> from embershard.distributed import process_group
    >>> with process_group("cpu"):  # one rank, one group, and no table
    ...     model = GroupedModelParallel(nn.Linear(2, 1), 1, ShardingPlan({}), [])
    ...     model.end_step(), model.rows_are_equal
    (True, True)

    Args:
        module: to be sharded.
        groups: how many; each has the ranks that follow each other.
        plan: for the ranks of a group, the same on all ranks.
        sharders: cached ones of embershard, TorchRec's own, or both.
        device: of this rank.
        sync_every: steps between averages.
        sync_delay: steps that an average is computed beside, up to `sync_every`: see `RowSync`.
        sync_dtype: of weights in averages; "fp16" takes half of the bytes, and rounds.
        rest: as `DistributedModelParallel` takes them.

    Raises:
        ConfigError: the ranks cannot be divided so, or a table cannot be averaged.
        ShardingError: the ranks have different plans.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: int,
        plan: ShardingPlan,
        sharders: list[ModuleSharder[nn.Module]],
        device: torch.device | None = None,
        sync_every: int = 1,
        sync_delay: int = 0,
        sync_dtype: SyncDtype = "fp32",
        **rest: Any,
    ) -> None:
        device = torch.device(device or "cpu")
        shape = Groups(groups, dist.get_world_size())
        env = shape.make_env(device)
        placed = shape.remapped(plan, env.global_rank, device)
        super().__init__(module, env=env, device=device, plan=placed, sharders=sharders, **rest)
        self._row_sync = RowSync(self, env, sync_every, sync_delay, sync_dtype)

    def end_step(self, must_be_equal: bool = False) -> bool:
        """Note a trained step; after every `sync_every`-th, average the rows. Return True if replicas are equal then:
        with a `sync_delay` only if they `must_be_equal`. Collective."""
        return self._row_sync.step(must_be_equal)

    def sync(self) -> None:
        """Average the rows that were trained since the last time, at once. Collective."""
        self._row_sync.sync()

    def close(self) -> None:
        """Wait for an average that is computed beside the steps, and drop it: nothing is trained any more."""
        self._row_sync.close()

    @property
    def rows_are_equal(self) -> bool:
        """True where the replicas of every row are equal: before the first step, and behind an average."""
        return self._row_sync.are_equal

    @property
    def sync_counts(self) -> SyncCounts:
        """What averages moved so far, on this rank."""
        return self._row_sync.counts

    def begin_behind(self, steps: int) -> None:
        """Note that rows were loaded that are equal on all groups, after so many trained steps."""
        self._row_sync.begin_behind(steps)
