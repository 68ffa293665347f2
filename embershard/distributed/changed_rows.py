"""Which rows of a table changed, and which changed hands between ids; the ids of a table's rows, as exports and
publications have them. Needs torch, nothing else.

A base has `ids`, ascending, and `rows`, that of each, in tables/NAME.ids.safetensors. A delta has the rows that changed
hands since the publication before: `changed`, and of each the id that left it, `old`, and the one that has it, `new`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

#: In place of an id: that of no row.
NO_ID = -(2**63)


@dataclass(frozen=True, eq=False)
class ChangedRows:
    """Rows of a shard that changed hands.

    >>> changed = ChangedRows(torch.tensor([3, 5]), torch.tensor([70, NO_ID]), torch.tensor([90, 70]), live=3)
    >>> ids, rows = changed_ids(torch.tensor([20, 70]), torch.tensor([1, 3]), [changed])
    >>> ids.tolist(), rows.tolist()
    ([20, 70, 90], [1, 5, 3])

    Attributes:
        rows: int64 [K], numbered in the whole table, ascending.
        old: int64 [K], ids that had them in the publication before; `NO_ID` where none had.
        new: int64 [K], ids that have them.
        live: ids of the shard that have a row now.
    """

    rows: Tensor
    old: Tensor
    new: Tensor
    live: int

    def problem(self, num_rows: int, keys: Tensor) -> str:
        """Return what is wrong with it by itself, "" for nothing.

        Args:
            num_rows: of the table.
            keys: of the rows that a delta has, ascending.
        """
        shapes = {self.rows.shape, self.old.shape, self.new.shape}
        if shapes != {(len(self.rows),)} or {self.rows.dtype, self.old.dtype, self.new.dtype} != {torch.int64}:
            return "rows that changed hands and their ids are not as many integers"
        if len(self.rows) and (self.rows[0] < 0 or self.rows[-1] >= num_rows or (self.rows.diff() <= 0).any()):
            return f"rows that changed hands are not ascending rows in 0..{num_rows - 1}"
        for ids in (self.old, self.new):
            some = ids[ids != NO_ID]
            if len(some.unique()) < len(some):
                return "an id has two rows"
        given = self.rows[self.new != NO_ID]
        if not torch.isin(given, keys).all():
            return f"row {int(given[~torch.isin(given, keys)][0])} is given to an id without its new weights"
        return ""


@dataclass(frozen=True, eq=False)
class TouchedRows:
    """Rows of a table, or of some of its columns, that were trained since the last publication.

    Attributes:
        keys: int64 [n], row numbers in the whole table, ascending.
        rows: [n, columns], their weights.
        changed: of a table of ids, the rows that changed hands.
    """

    table: str
    first_column: int
    keys: Tensor
    rows: Tensor
    changed: ChangedRows | None = None


@dataclass(frozen=True, eq=False)
class BehindRows:
    """Rows of a table in which replicas may differ from a run.

    Attributes:
        keys: int64 [n], those whose weights may differ.
        id_rows: int64 [k], those that changed hands; none of a table of row numbers.
        ids: int64 [k], the ids that have them in replicas.
    """

    keys: Tensor
    id_rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    @classmethod
    def of(cls, found: TouchedRows) -> BehindRows:
        """Return those of a delta that replicas do not get."""
        if found.changed is None:
            return cls(found.keys)
        return cls(found.keys, found.changed.rows, found.changed.old)


def changed_ids(ids: Tensor, rows: Tensor, changes: Sequence[ChangedRows]) -> tuple[Tensor, Tensor]:
    """Return a table's ids, ascending, and their rows, behind the changes of all of its shards.

    Raises:
        ValueError: the changes are not those of this state.
    """
    old, new, places = (torch.cat([getattr(part, name) for part in changes]) for name in ("old", "new", "rows"))
    leaves = old != NO_ID
    leaving, order = old[leaves].sort()
    there = torch.searchsorted(ids, leaving).clamp(max=max(0, len(ids) - 1))
    if len(leaving) and (not len(ids) or not torch.equal(ids[there], leaving)):
        raise ValueError("it takes rows from ids that have none")
    if not torch.equal(rows[there].long(), places[leaves][order]):
        raise ValueError("it takes rows from ids that have others")
    stays = torch.ones(len(ids), dtype=torch.bool)
    stays[there] = False
    ids, rows = ids[stays], rows[stays]
    comes = new != NO_ID
    coming, order = new[comes].sort()
    given = places[comes][order]
    is_taken = torch.zeros(int(max(rows.max() if len(rows) else 0, given.max() if len(given) else 0)) + 1).bool()
    is_taken[rows.long()] = True
    if is_taken[given].any():
        row = int(given[is_taken[given]][0])
        raise ValueError(f"it gives row {row} to an id and takes it from none, though one has it")
    ids, rows = _merged(ids, coming, (ids, coming)), _merged(ids, coming, (rows, given.to(rows.dtype)))
    if (ids.diff() == 0).any():
        raise ValueError("it gives a row to an id that has one")
    live = sum(part.live for part in changes)
    if len(ids) != live:
        raise ValueError(f"{len(ids):,} ids have rows with it, needed {live:,}: deleted or new ids were left out")
    return ids, rows


def _merged(ids: Tensor, others: Tensor, values: tuple[Tensor, Tensor]) -> Tensor:
    """Return the values of both in the order of the ids; each of these is ascending."""
    is_other = torch.zeros(len(ids) + len(others), dtype=torch.bool)
    is_other[torch.searchsorted(ids, others) + torch.arange(len(others))] = True
    found = torch.empty(len(is_other), dtype=values[0].dtype)
    found[~is_other], found[is_other] = values
    return found
