"""What groups change in a plan: it is for the ranks of one group, of which there are several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from embershard.errors import ConfigError
from embershard.extras.groups.groups import Groups
from embershard.planning.cost.rates import Rates, StepWork
from embershard.planning.cost.topology import Topology
from embershard.planning.workload import Workload
from embershard.sharding.sizes import PlacedShard

_KEY_BYTES = 4
#: Collectives of a group of tables in a step, and of a step: those of the ids and rows of a group alone.
_IN_GROUP = 5 / 7
#: Of an average: numbers of keys, keys, rows, means.
_COLLECTIVES_PER_SYNC = 4


@dataclass(frozen=True)
class GroupTopology(Topology):
    """A machine as the ranks of one of its groups see it: their shards' ids and rows stay within the group, and the
    gradients of dense layers go to all ranks.

    Attributes:
        all_ranks: of all groups.
    """

    all_ranks: int = 1

    def rates_for(self, num_ranks: int | None = None) -> Rates:
        """Return the rates of a group of `num_ranks`, while all ranks are at work."""
        found = super().rates_for(self.all_ranks)
        num_ranks = num_ranks or self.all_ranks
        if num_ranks > self.ranks_per_node:
            return found
        within = super().rates_for(num_ranks).seconds_per_collective
        latency = _IN_GROUP * within + (1 - _IN_GROUP) * found.seconds_per_collective
        return replace(found, seconds_per_collective=latency)

    def note(self, num_ranks: int | None = None) -> str:
        """Return where the rates come from, and that the plan is a group's."""
        return f"{super().note(num_ranks)} The plan is one for the ranks of a group: all groups obey it."


def seen_from_a_group(topology: Topology, groups: int, num_ranks: int) -> Topology:
    """Return a machine, shaped to `num_ranks`, as one of their groups sees it.

    Raises:
        ConfigError: it has nodes of several kinds, or the ranks cannot be divided so.
    """
    Groups(groups, num_ranks)
    if type(topology) is not Topology:
        raise ConfigError(
            f"sharding.groups with topology {topology.name}: got nodes of several kinds, needed one kind. Plan for "
            "one, or leave groups out."
        )
    return GroupTopology(**{**vars(topology), "all_ranks": num_ranks})


def sync_work(workload: Workload, shards: Sequence[PlacedShard]) -> StepWork:
    """Return what a rank with these shards sends for the averages of its groups, in the mean of all steps.

    With n groups, and U rows that any of them looks up between two averages, it sends 2 (n - 1) / n times the bytes of
    U rows, with their states; and the numbers of those that its own group looked up to each other group. Weights may be
    sent as fp16.
    """
    shape, others = workload.shape, workload.shape.groups - 1
    of_group = replace(workload, shape=replace(shape, batch_size=shape.batch_size * shape.sync_every))
    of_all = replace(workload, shape=replace(shape, batch_size=shape.batch_size * shape.sync_every * shape.groups))
    sent = 0.0
    for shard in shards:
        if shard.kernel == "replicated":  # its gradients are those of all ranks
            continue
        own, every = (each.counted_reports([shard], 2 * shard.table.rows)[0].unique_ids for each in (of_group, of_all))
        weights = min(shard.table.weight_bytes(shard.columns), shape.sync_number_bytes * shard.columns)
        row_bytes = weights + shard.table.optimizer_bytes(shard.columns)
        sent += 2 * others / shape.groups * every * row_bytes + others * own * _KEY_BYTES
    sent /= shape.sync_every
    here = min(shape.groups, shape.groups_per_node) - 1
    return StepWork(
        sent_sync_bytes=sent * here / others,
        network_sync_bytes=sent * (others - here) / others,
        num_collectives=_COLLECTIVES_PER_SYNC / shape.sync_every,
    )
