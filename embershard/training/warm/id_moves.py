"""Ids of a trained table in a new one: each keeps its row, or, with other rows or rules, gets one in its new bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embershard.cache import loops
from embershard.cache.ids.config import Buckets, IdTable
from embershard.distributed.checkpoint.boxes import Box, ExportSaved, Saved, fill, parts_of
from embershard.training.warm.fill import row_states, state_name
from embershard.training.warm.shapes import MODEL, TableShape

_Ints = NDArray[np.int64]
_ONCE = 1 << 32  # the uses of an id of which nobody knows more: one, long ago


@dataclass(frozen=True, eq=False)
class _Live:
    """Ids with a row.

    Attributes:
        words: mixed, [n].
        uses: of each, as `IdMap` counts them.
        rows: of each in the trained table.
    """

    words: _Ints
    uses: _Ints
    rows: _Ints


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

    With the rows and rules of before, all is as it was. Otherwise an id gets a row of its bucket, the most used ones
    first, as long as more than its reserve is left; and no id without a row is a candidate.

    Returns:
        Ids with a row on this rank, and those of its buckets that found none.
    """
    model, key = tensors["model"], table.tensor.removeprefix(MODEL)
    ids, values = f"{key.removesuffix('weight')}ids", {was.tensor: model[key]}
    if states:
        values |= {state_name(was, table, name): value for name, value in row_states(tensors, table).items()}
    values = {name: value for name, value in values.items() if name in saved.sizes()}
    if isinstance(saved, ExportSaved) or was.num_rows != table.num_rows or rules != old_rules:
        layout = rules.buckets_of(table.name, table.num_rows)
        return _place(model[ids], saved, was, layout, values)
    for name in (ids, f"{ids.removesuffix('ids')}id_candidates"):
        if name in model:
            source = was.tensor.removesuffix("weight") + name.rpartition(".")[2]
            fill(model[name], saved, source)
    for name, value in values.items():
        fill(value, saved, name)
    num_live = sum(int((part[:, 1] >= 0).sum()) for _, part in parts_of(model[ids]))
    return num_live, 0


def _place(
    target: Any, saved: Saved, was: TableShape, layout: Buckets, values: Mapping[str, Any]
) -> tuple[int, int]:
    """Give ids rows of their new buckets; fill records [R, 2] and `values`, by their saved names."""
    live, num_placed, num_left = _live_ids(saved, was), 0, 0
    buckets = np.empty(len(live.words), np.int64)
    loops.buckets_of_ids(live.words, layout.num_buckets, buckets)
    order = np.lexsort((live.words, -live.uses, buckets))
    places = np.arange(len(order)) - np.searchsorted(buckets[order], buckets[order])
    has_row = places < layout.rows - 1 - layout.reserve
    rows = buckets[order] * layout.rows + 1 + places
    for box, records in parts_of(target):
        first, last = box.offsets[0], box.offsets[0] + box.sizes[0]
        is_here = (rows // layout.rows >= first // layout.rows) & (rows // layout.rows < last // layout.rows)
        here, own = order[is_here & has_row], rows[is_here & has_row] - first
        records.zero_()
        records[:, 1] = -1
        records[own, 0], records[own, 1] = torch.from_numpy(live.words[here]), torch.from_numpy(live.uses[here])
        num_placed += len(own)
        num_left += int((is_here & ~has_row).sum())
    for name, value in values.items():
        _scatter(value, saved, name, live.rows[order[has_row]], rows[has_row])
    return num_placed, num_left


def _scatter(target: Any, saved: Saved, name: str, old_rows: _Ints, new_rows: _Ints) -> None:
    """Copy rows of a saved tensor to other rows of a new one, as far as this rank has them."""
    for box, values in parts_of(target):
        first, count = box.offsets[0], box.sizes[0]
        is_here = (new_rows >= first) & (new_rows < first + count)
        sources, places = old_rows[is_here], new_rows[is_here] - first
        order = np.argsort(sources)
        sources, places = sources[order], places[order]
        for start, block in saved.blocks(name):
            begin, end = np.searchsorted(sources, [start, start + len(block)])
            found = block[torch.from_numpy(sources[begin:end] - start)]
            columns = Box((0, *box.offsets[1:]), (len(found), *box.sizes[1:])).of(found)
            with torch.no_grad():
                values[torch.from_numpy(places[begin:end])] = columns.to(values)


def clock_of(saved: Saved, was: TableShape) -> int:
    """Return the newest batch that a trained table of ids has counted; 0 of an export, which does not say it."""
    if isinstance(saved, ExportSaved):
        return 0
    first_record = saved.read(f"{was.tensor.removesuffix('weight')}ids", Box((0, 0), (1, 2)))
    return int(first_record[0, 0])  # of a bucket's first row, in place of an id


def _live_ids(saved: Saved, was: TableShape) -> _Live:
    from embershard.cache.ids.id_map import mixed  # of a capability that may be taken out

    if isinstance(saved, ExportSaved):
        found = saved.ids(was.name)
        assert found is not None, "a table of ids"
        ids, rows = (each.numpy() for each in found)
        return _Live(mixed(ids), np.full(len(ids), _ONCE), rows.copy())
    parts = list[tuple[_Ints, _Ints, _Ints]]()
    for first, records in _records(saved, was):
        live = np.flatnonzero(records[:, 1] >= 0)
        parts.append((records[live, 0], records[live, 1], live + first))
    words, uses, rows = (np.concatenate([np.empty(0, np.int64), *each]) for each in zip(*parts, strict=True))
    return _Live(words, uses, rows)


def _records(saved: Saved, was: TableShape) -> Iterator[tuple[int, _Ints]]:
    for first, block in saved.blocks(f"{was.tensor.removesuffix('weight')}ids"):
        yield first, block.numpy()


