"""Ids of a trained table in a new one: each keeps its row, or, with other rows or rules, gets one in its new bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embershard.cache import loops
from embershard.cache.ids.config import Buckets, IdTable
from embershard.distributed.checkpoint.boxes import Box, Saved, fill, fill_rows, parts_of
from embershard.extras.warm_start.fill import row_states, state_name
from embershard.extras.warm_start.shapes import MODEL, TableShape

_Ints = NDArray[np.int64]
_ONCE = 1 << 32  # the uses of an id of which nobody knows more: one, long ago


@dataclass(frozen=True, eq=False)
class LiveIds:
    """Ids with a row; where a bucket has room for some, it is for those that come first.

    Attributes:
        words: mixed, [n].
        uses: of each, as `IdMap` counts them.
        rows: of each in the trained table.
    """

    words: _Ints
    uses: _Ints
    rows: _Ints

    @staticmethod
    def of_ids(ids: _Ints, rows: _Ints) -> LiveIds:
        """Return ids as data have them, of whose uses nothing is known, in the order in which a batch admits them."""
        from embershard.cache.ids.id_map import mixed  # of a capability that may be taken out

        words = mixed(ids)
        order = words.argsort()
        return LiveIds(words[order], np.full(len(ids), _ONCE), rows[order])


def fill_ids(
    tensors: Mapping[str, Any],
    saved: Saved,
    was: TableShape,
    table: TableShape,
    rules: IdTable,
    old_rules: IdTable | None,
    *,
    states: bool,
) -> tuple[int, int]:
    """Fill a table of ids on this rank: who has which row, the rows, and their states.

    With the rows and rules of before, all is as it was. Otherwise an id gets a row of its bucket, those that the new
    rules would evict last first, as long as more than its reserve is left; and no id without a row is a candidate.

    Returns:
        Ids with a row on this rank, and those of its buckets that found none.
    """
    model, key = tensors["model"], table.tensor.removeprefix(MODEL)
    ids, values = f"{key.removesuffix('weight')}ids", {was.tensor: model[key]}
    if states:
        values |= {state_name(was, table, name): value for name, value in row_states(tensors, table).items()}
    values = {name: value for name, value in values.items() if name in saved.sizes()}
    if saved.ids(was.name) is not None or was.num_rows != table.num_rows or rules != old_rules:
        layout = rules.buckets_of(table.name, table.num_rows)
        return place_ids(model[ids], _live_ids(saved, was, rules), layout, values, saved)
    for name in (ids, f"{ids.removesuffix('ids')}id_candidates"):
        if name in model:
            source = was.tensor.removesuffix("weight") + name.rpartition(".")[2]
            fill(model[name], saved, source)
    for name, value in values.items():
        fill(value, saved, name)
    num_live = sum(int((part[:, 1] >= 0).sum()) for _, part in parts_of(model[ids]))
    return num_live, 0


def place_ids(target: Any, live: LiveIds, layout: Buckets, values: Mapping[str, Any], saved: Saved) -> tuple[int, int]:
    """Give ids rows of their new buckets: fill records [R, 2], and tensors by their saved names, on this rank.

    Returns:
        Ids with a row on this rank, and those of its buckets that found none.
    """
    num_placed, num_left = 0, 0
    buckets = np.empty(len(live.words), np.int64)
    loops.buckets_of_ids(live.words, layout.num_buckets, buckets)
    order = buckets.argsort(kind="stable")
    places = np.arange(len(order)) - np.searchsorted(buckets[order], buckets[order])
    has_row = places < layout.rows - 1 - layout.reserve
    rows = buckets[order] * layout.rows + 1 + places
    for box, records in parts_of(target):
        first, last = box.offsets[0], box.offsets[0] + box.sizes[0]
        is_here = (buckets[order] >= first // layout.rows) & (buckets[order] < last // layout.rows)
        here, own = order[is_here & has_row], rows[is_here & has_row] - first
        clock = int(records[0, 0])  # in the first row of each bucket, in place of an id
        records.zero_()
        records[:, 1] = -1
        records[:: layout.rows, 0] = clock
        records[own, 0], records[own, 1] = torch.from_numpy(live.words[here]), torch.from_numpy(live.uses[here])
        num_placed += len(own)
        num_left += int((is_here & ~has_row).sum())
    for name, value in values.items():
        fill_rows(value, saved, name, live.rows[order[has_row]], rows[has_row])
    return num_placed, num_left


def clock_of(saved: Saved, was: TableShape) -> int:
    """Return the newest batch that a trained table of ids has counted; 0 of an export, which does not say it."""
    if saved.ids(was.name) is not None:
        return 0
    first_record = saved.read(f"{was.tensor.removesuffix('weight')}ids", Box((0, 0), (1, 2)))
    return int(first_record[0, 0])


def _live_ids(saved: Saved, was: TableShape, rules: IdTable) -> LiveIds:
    """Return the ids of a trained table, those first that `evict_ids` would evict last by the rules."""
    if (found := saved.ids(was.name)) is not None:
        return LiveIds.of_ids(*(each.numpy() for each in found))
    parts = list[tuple[_Ints, _Ints, _Ints]]()
    for first, block in saved.blocks(f"{was.tensor.removesuffix('weight')}ids"):
        records = block.numpy()
        live = np.flatnonzero(records[:, 1] >= 0)
        parts.append((records[live, 0], records[live, 1], live + first))
    words, uses, rows = (np.concatenate([np.empty(0, np.int64), *each]) for each in zip(*parts, strict=True))
    clock, ranks = clock_of(saved, was), np.empty(len(uses), np.int64)
    oldest = 0 if rules.ttl_steps is None else clock - rules.ttl_steps
    loops.rank_ids(uses, clock, oldest, rules.decay, ranks)
    order = np.lexsort((words, ranks))[::-1]
    return LiveIds(words[order], uses[order], rows[order])
