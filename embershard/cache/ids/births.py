"""Rows that begin anew: from one batch on they belong to other ids than before.

Who maps ids to rows evicts the old id when batch s is known, and gives its row away with batch n >= s + Q at the
earliest (the row is in quarantine). The row begins anew when batch n is prepared, while batch t >= n - P may train: at
most P batches are prepared ahead. The cache relies on Q >= P, and on uses of the old id before s only. Then

* no batch in flight uses the row: those are t and later, and t >= n - P >= s. So its slot may be emptied;
* nobody asks for what the row held. States of steps t >= s do not have the old id, so no evaluation, checkpoint or
  publication needs it; a save that began earlier keeps its own copy (`Home.before_write`);
* taking back all batches after t brings back ids that were evicted after t only. Their rows are given away from
  t + 1 + Q on, and no such batch was prepared. So nothing has to be undone in the cache: a row that began anew for a
  batch that is cancelled, forgotten or fails holds what no id has, until it is given away again.

So the change may be repeated, but not left out: a row whose batch is prepared again begins anew again, and so does one
whose batch is skipped (`RowCache.begin_anew`). Whoever replaces the host rows cancels the prepared batches first.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from embershard.cache.slot_state import SlotState
from embershard.cache.tickets import InFlight
from embershard.errors import CacheError


@dataclass(frozen=True, eq=False)
class Births:
    """Rows of a pool that begin anew with a batch, on a CPU.

    Attributes:
        keys: int64 [M], the rows, distinct.
        ids: int64 [M], to whom they belong from now on: any numbers. Weights are drawn by table and id.

    >>> import torch
    >>> from embershard.cache.config import CachePolicy
    >>> from embershard.cache.row_cache import RowCache
    >>> from embershard.cache.homes.memory import MemoryRows
    >>> from embershard.cache.homes.shape import PoolShape
    >>> from embershard.cache.rows.initial_weights import ShardWeights
    >>> host = MemoryRows(PoolShape([6], 4, initial=[ShardWeights("users", 7, 4, -0.5, 0.5)]))
    >>> def slots(count):
    ...     return [torch.zeros(count + 1, 4)]
    >>> cache = RowCache(["users"], host, slots, 3, [0], CachePolicy("lru"), torch.device("cpu"))
    >>> births = Births(keys=torch.tensor([2]), ids=torch.tensor([900]))
    >>> ticket = cache.prepare(torch.tensor([2, 5]), torch.tensor([2]), births=births)
    >>> ticket.cancel()
    >>> cache.begin_anew(Births(torch.tensor([4]), torch.tensor([900])))
    >>> torch.equal(*cache.read(torch.tensor([2, 4])))  # the row does not matter
    True
    """

    keys: Tensor
    ids: Tensor

    def slots_to_empty(self, state: SlotState, in_flight: InFlight, pool: str) -> Tensor:
        """Return the slots that hold what the rows had: int64 [<= M].

        Raises:
            CacheError: a batch in flight uses a row, or the pool is on a GPU.
        """
        if state.map.device.type != "cpu":
            raise CacheError(
                f"{pool}: rows cannot begin anew on {state.map.device}: tables of ids are cached on a CPU only"
            )
        slots = state.map.lookup(self.keys)
        slots = slots[slots > 0]
        if not slots.numel():
            return slots
        assert not bool((slots <= state.num_pinned).any()), "a pinned row has its slot for good"
        oldest = in_flight.oldest
        if oldest is None or not bool((state.map.last_batch(slots) >= oldest).any()):
            return slots
        used = in_flight.use_of(slots)  # none, if it was a batch that failed or was cancelled
        if used is not None:
            slot, batch = used
            raise CacheError(
                f"{pool}: row {int(state.map.key_of_slot[slot])} is to begin anew while batch {batch}, which uses it, "
                "is in flight. Give a row to another id only after all batches prepared with the old one have trained"
            )
        return slots
