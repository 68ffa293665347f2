"""Proposals for TorchRec's planner: options that differ, in one order, and a bounded number of them.

TorchRec's greedy proposers make one proposal per option, and each costs time per table. So the search of a plan takes
time with the square of the number of tables: minutes for 500 tables on 2 ranks.
"""

from __future__ import annotations

import copy
from typing import Any

from torchrec.distributed.embedding_types import ShardingType
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.constants import MIN_CW_DIM
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.proposers import GreedyProposer, GridSearchProposer, UniformProposer
from torchrec.distributed.planner.types import Enumerator, Proposer, ShardingOption

from embershard.sharding.shards import is_cut_too_small

_TABLE, _ROW, _COLUMN = ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value, ShardingType.COLUMN_WISE.value
_ROW_OF_NODE, _COLUMN_OF_NODE = ShardingType.TABLE_ROW_WISE.value, ShardingType.TABLE_COLUMN_WISE.value
_PREFERENCE = [t.value for t in ShardingType]
_MOST_GRID_PROPOSALS = 500


def distinct_types(
    constraint: ParameterConstraints, rows: int, columns: int, topology: Topology
) -> ParameterConstraints:
    """Return the constraint without sharding types that place a table of such a size as another allowed one does, and
    without those that leave a rank without a row, where others are allowed.

    On one rank, every type holds the table whole. Within a node, `table_row_wise` is `row_wise`, and
    `table_column_wise` is `column_wise`; a table that is too narrow to cut is `table_wise` with either of the latter.

    >>> wanted = ParameterConstraints(sharding_types=["table_wise", "row_wise", "table_row_wise", "column_wise"])
    >>> topology = Topology(world_size=2, compute_device="cpu")
    >>> distinct_types(wanted, 100, 16, topology).sharding_types, distinct_types(wanted, 1, 16, topology).sharding_types
    (['table_wise', 'row_wise'], ['table_wise'])
    """
    same_as: list[tuple[str, str]] = []
    if topology.world_size == 1:
        same_as = [(name, _TABLE) for name in (_ROW, _COLUMN, _ROW_OF_NODE, _COLUMN_OF_NODE)]
    elif topology.local_world_size == topology.world_size:
        same_as = [(_ROW_OF_NODE, _ROW), (_COLUMN_OF_NODE, _COLUMN)]
    if columns <= (constraint.min_partition or MIN_CW_DIM):
        same_as += [(_COLUMN, _TABLE), (_COLUMN_OF_NODE, _TABLE)]
    allowed = constraint.sharding_types or []
    left_out = {name for name, other in same_as if other in allowed}
    fewer = copy.copy(constraint)
    distinct = [name for name in allowed if name not in left_out]
    ranks = topology.world_size, topology.local_world_size
    fewer.sharding_types = [name for name in distinct if not is_cut_too_small(rows, name, *ranks)] or distinct
    return fewer


def proposers(num_tables: int, world_size: int, most_placed_shards: int) -> list[Proposer]:
    """Return TorchRec's proposers, each of which places at most so many shards, over all its proposals.

    This bounds the search without a clock.
    """
    limit = max(8, most_placed_shards // (num_tables * world_size))
    greedy = [_AtMost(GreedyProposer(use_depth=depth), limit) for depth in (True, False)]
    return [UniformProposer(), *greedy, GridSearchProposer(max_proposals=_MOST_GRID_PROPOSALS)]


class _AtMost(Proposer):
    """Ends another proposer after `limit` proposals: the plan must not depend on the machine's speed."""

    def __init__(self, proposer: Proposer, limit: int) -> None:
        self._proposer, self._left = proposer, limit

    def load(self, search_space: list[ShardingOption], enumerator: Enumerator | None = None) -> None:
        self._proposer.load(search_space, enumerator)

    def feedback(self, *args: Any, **kwargs: Any) -> None:
        self._proposer.feedback(*args, **kwargs)

    def propose(self) -> list[ShardingOption] | None:
        self._left -= 1
        return self._proposer.propose() if self._left >= 0 else None


class OrderedEnumerator(EmbeddingEnumerator):
    """TorchRec's enumerator with the options in one order, the same on all versions. It goes when TorchRec 1.8 does.

    Before 1.9, TorchRec intersects options as sets, so the process's hash seed breaks ties, and ranks that plan for
    themselves would build different models.
    """

    def _filter_sharding_types(self, *args: Any, **kwargs: Any) -> list[str]:
        return sorted(super()._filter_sharding_types(*args, **kwargs), key=_PREFERENCE.index)

    def _filter_compute_kernels(self, *args: Any, **kwargs: Any) -> list[str]:
        return sorted(super()._filter_compute_kernels(*args, **kwargs))
