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

from embershard.cache.next_use import KnownBatch
from embershard.cache.planner import CacheGrowthWarning
from embershard.cache.row_cache import RowCache
from embershard.cache.rows.host_store import HostStore
from embershard.cache.rows.transfer import MakeTransfer
from embershard.cache.tickets import Ticket
from embershard.frequency.counts import RowCounts
from embershard.planning.simulate.file_tier import FileTier, RecordedMoves
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
    host = HostStore(rows, 1, torch.uint8, [])
    pinned = [number for number in np.argsort(rows, kind="stable") if number < len(are_pinned) and are_pinned[number]]
    pinned_keys = [torch.arange(rows[number]) + host.row_offsets[number] for number in pinned]
    recorded: MakeTransfer | None = None if tier is None else lambda *_: RecordedMoves(tier)
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
        transfer=recorded or "plain",
    )
    if tier is not None:
        tier.rank_by(cache.state.scores.of_rows)
    return cache


@dataclass(eq=False)
class _Batch:
    """A batch that is known, and how far it is."""

    keys: Tensor
    lengths: Tensor
    of_places: KnownBatch | None = None
    of_device: KnownBatch | None = None
    is_known: bool = False  # to the device, whose policy may need to know nothing
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
) -> None:
    """Run the stages of `LookAheadPipeline`, in its order, without their contents.

    Args:
        get: returns keys and lengths of a step's batch; called for each step in turn.
        settings: how far ahead is looked.
        tier: the cache's.
        at_step: called before each step.
        at_batch: called with a step and its keys, once they are on the device.
    """
    lookahead = settings.lookahead if tier is None else min(settings.lookahead, tier.levels.lookahead)
    window = lookahead if tier is None else tier.levels.lookahead
    prefetch = min(settings.prefetch, lookahead)
    known, next_step = deque[_Batch](), 0  # from the one in training on

    def prepare(batch: _Batch, critical_path: bool) -> bool:
        if batch.ticket is None:
            if tier is not None and batch.of_places is not None:
                tier.claim(batch.keys, batch.of_places)
            known_as, if_it_fits = batch.of_device, not critical_path
            batch.ticket = cache.prepare(batch.keys, batch.lengths, critical_path, known_as, if_it_fits)
            if tier is not None and batch.of_places is not None and batch.ticket is not None:
                tier.release(batch.of_places)
        return batch.ticket is not None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheGrowthWarning)
        for step in range(steps):
            at_step(step)
            while next_step < min(steps, step + window + 1):
                known.append(_Batch(*get(next_step)))
                if tier is not None:
                    keys = known[-1].keys
                    known[-1].of_places = tier.know(keys if settings.policy.by_next_use else keys[:0])
                next_step += 1
            for batch in itertools.islice(known, lookahead + 1):
                if not batch.is_known:
                    batch.of_device, batch.is_known = cache.know(batch.keys, batch.lengths), True
            prepare(known[0], critical_path=True)
            at_batch(step, known[0].keys)
            cache.freeze_pins()
            if tier is not None:
                _claim_ahead(tier, known)
            for batch in itertools.islice(known, 1, prefetch + 1):
                if not prepare(batch, critical_path=False):
                    break
            cache.unfreeze_pins()
            ticket = known.popleft().ticket
            assert ticket is not None, "prepared above"
            cache.release(ticket)


def _claim_ahead(tier: FileTier, known: deque[_Batch]) -> None:
    """Give the batches of the read-ahead their places, in their order, as far as there is room."""
    waiting = itertools.islice(known, 1, tier.levels.read_ahead + 1)
    ahead = [(each.keys, each.of_places) for each in waiting if each.ticket is None and each.of_places is not None]
    tier.count_step(is_crowded=not all(tier.claim(*each) for each in ahead))
