"""The stages of look-ahead over a cache of rows of one byte, in the pipeline's order, without their contents."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embershard.cache.homes.memory import MemoryRows
from embershard.cache.homes.shape import PoolShape
from embershard.cache.next_use import KnownBatch
from embershard.cache.parts.part import PoolParts
from embershard.cache.planner import CacheGrowthWarning
from embershard.cache.row_cache import RowCache
from embershard.cache.tickets import Ticket
from embershard.frequency.counts import RowCounts
from embershard.planning.simulate.file_tier import FileTier
from embershard.sharding.run_shape import ReplaySettings


def bare_cache(
    tables: Sequence[str],
    rows: Sequence[int],
    num_slots: int,
    settings: ReplaySettings,
    *,
    row_counts: RowCounts | None = None,
    are_pinned: Sequence[bool] = (),
    tier: FileTier | None = None,
) -> RowCache:
    """Return a cache over rows of one byte.

    Args:
        tables, rows: name and rows of each table.
        num_slots: at most as many as there are rows are taken.
        are_pinned: for each table, whether its rows are resident for ever; none by default.
        tier: the places of rows in host memory, in front of a file; None: all rows are in host memory.
    """
    host = MemoryRows(PoolShape(rows, 1, torch.uint8))
    pinned = [number for number in np.argsort(rows, kind="stable") if number < len(are_pinned) and are_pinned[number]]
    pinned_keys = [torch.arange(rows[number]) + host.row_offsets[number] for number in pinned]
    cache = RowCache(
        tables=tables,
        host=host,
        device_payload=lambda slots: [torch.empty(slots + 1, 1, dtype=torch.uint8)],
        num_slots=min(num_slots, host.num_rows),
        table_of_feature=range(len(tables)),
        policy=dataclasses.replace(settings.policy, by_next_use=settings.lookahead > 0 and settings.policy.by_next_use),
        device=torch.device("cpu"),
        row_counts=row_counts,
        pinned_keys=torch.cat(pinned_keys) if pinned_keys else None,
        owner="replay",
    )
    if tier is not None:
        from embershard.cache.file.file_part import FilePart  # of a capability that may be taken out

        cache.parts = PoolParts([FilePart(tier, cache.state.scores.of_rows, is_on_gpu=False)])
    return cache


@dataclass(eq=False)
class _Batch:
    """A batch that is known, and how far it is."""

    keys: Tensor
    lengths: Tensor
    known: KnownBatch | None = None
    ticket: Ticket | None = None


def run_stages(
    cache: RowCache,
    get: Callable[[int], tuple[Tensor, Tensor]],
    steps: int,
    settings: ReplaySettings,
    *,
    tier: FileTier | None = None,
    at_step: Callable[[int], None] = lambda _: None,
    at_batch: Callable[[int, Tensor], None] = lambda *_: None,
    pieces: int = 1,
) -> None:
    """Run the stages of `LookAheadPipeline`, in its order, without their contents.

    Args:
        get: returns keys and lengths of a step's batch; called for each step in turn.
        settings: how far ahead is looked.
        tier: the cache's.
        at_step: called before each step.
        at_batch: called with a step and its keys, once they are on the device.
        pieces: steps whose rows train together, and keep their slots until the last of them.
    """
    stages, next_step = _Stages(cache, settings, tier), 0
    known, held = stages.known, list[Ticket]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheGrowthWarning)
        for step in range(steps):
            at_step(step)
            while next_step < min(steps, step + settings.lookahead + 1):
                stages.add(*get(next_step))
                next_step += 1
            stages.prepare(known[0], critical_path=True)
            at_batch(step, known[0].keys)
            cache.freeze_pins()
            stages.claim_ahead()
            for batch in itertools.islice(known, 1, stages.prefetch + 1):
                if not stages.prepare(batch, critical_path=False):
                    break
            cache.unfreeze_pins()
            ticket = known.popleft().ticket
            assert ticket is not None, "prepared above"
            held.append(ticket)
            if (step + 1) % pieces:
                cache.hold(ticket)
            else:
                for ticket in held:
                    cache.release(ticket)
                held.clear()


class _Stages:
    """The batches from the one in training on, and what happens to them."""

    def __init__(self, cache: RowCache, settings: ReplaySettings, tier: FileTier | None) -> None:
        self._cache, self._tier = cache, tier
        self.prefetch = min(settings.prefetch, settings.lookahead)
        self.known = deque[_Batch]()

    def add(self, keys: Tensor, lengths: Tensor) -> None:
        """Take a batch into the window, and announce it."""
        self.known.append(_Batch(keys, lengths, self._cache.know(keys, lengths)))

    def prepare(self, batch: _Batch, critical_path: bool) -> bool:
        """Bring a batch's rows to the device; False if they do not fit beside those of earlier ones."""
        if batch.ticket is None:
            known, if_it_fits = batch.known, not critical_path
            batch.ticket = self._cache.prepare(batch.keys, batch.lengths, critical_path, known, if_it_fits)
        return batch.ticket is not None

    def claim_ahead(self) -> None:
        """Give the batches of the read-ahead their places, in their order, as far as there is room."""
        if self._tier is not None:
            ahead = itertools.islice(self.known, 1, self._tier.levels.read_ahead + 1)
            coming = (self._cache.parts.coming(each.keys, each.known) for each in ahead if each.ticket is None)
            self._tier.count_step(is_crowded=not all(coming))
