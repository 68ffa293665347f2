"""Ids in deltas: they lead from one state to the next, and everything else is refused."""

from __future__ import annotations

import random

import pytest
import torch

from embershard.distributed.changed_rows import NO_ID, ChangedRows, changed_ids

pytestmark = pytest.mark.extra

NUM_ROWS = 24


def between(before: dict[int, int], after: dict[int, int], rows: range) -> ChangedRows:
    """What changed in the rows of a shard; the states are ids by row."""
    changed = [row for row in rows if before.get(row) != after.get(row)]
    old, new = ([state.get(row, NO_ID) for row in changed] for state in (before, after))
    live = sum(row in rows for row in after)
    return ChangedRows(*(torch.tensor(part, dtype=torch.int64) for part in (changed, old, new)), live)


def arrays(state: dict[int, int]) -> tuple[list[int], list[int]]:
    pairs = sorted((x, row) for row, x in state.items())
    return [x for x, _ in pairs], [row for _, row in pairs]


def test_changes_of_all_shards_lead_to_the_state():
    chance, state = random.Random(3), dict[int, int]()
    ids, rows = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    for _ in range(300):
        after = {row: x for row, x in state.items() if chance.random() < 0.8}
        for row in chance.sample(range(NUM_ROWS), 6):
            x = chance.randrange(-20, 20) * 2**58
            if row not in after and x not in after.values():
                after[row] = x
        changes = [between(state, after, part) for part in (range(9), range(9, NUM_ROWS))]
        assert not any(part.problem(NUM_ROWS, torch.arange(NUM_ROWS)) for part in changes)
        ids, rows = changed_ids(ids, rows, changes)
        assert (ids.tolist(), rows.tolist(), rows.dtype) == (*arrays(after), torch.int32)
        state = after


BEFORE = {1: 70, 2: 80, 5: 90}
WRONG = {
    "a deleted id is left out": (BEFORE, (BEFORE, 2), "deleted or new ids were left out"),
    "a row is given away and taken from none": ({1: 70, 2: 81, 5: 90}, ({1: 70, 5: 90}, 3), "takes it from none"),
    "it follows a state with other ids": ({1: 70, 2: 80}, ({1: 70, 2: 80, 5: 91}, 2), "from ids that have none"),
    "it follows a state with other rows": ({1: 70, 2: 80}, ({1: 70, 2: 80, 6: 90}, 2), "from ids that have others"),
    "an id gets a second row": ({1: 70, 2: 80, 5: 90, 6: 70}, (BEFORE, 4), "gives a row to an id that has one"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_of_this_state_is_refused(name):
    after, (before, live), message = WRONG[name]
    changed = between(before, after, range(NUM_ROWS))
    own, rows = (torch.tensor(part) for part in arrays(BEFORE))
    with pytest.raises(ValueError, match=message):
        changed_ids(own, rows, [ChangedRows(changed.rows, changed.old, changed.new, live)])


def test_what_is_wrong_by_itself():
    rows, old, new = torch.tensor([3, 5]), torch.tensor([70, NO_ID]), torch.tensor([NO_ID, 90])
    keys = torch.tensor([4, 5])
    assert ChangedRows(rows, old, new, 1).problem(8, keys) == ""
    assert "without its new weights" in ChangedRows(rows, old, new, 1).problem(8, keys[:1])
    assert "not ascending rows in 0..4" in ChangedRows(rows, old, new, 1).problem(5, keys)
    assert "not ascending" in ChangedRows(rows.flip(0), old, new, 1).problem(8, keys)
    assert "two rows" in ChangedRows(rows, old, torch.tensor([90, 90]), 1).problem(8, torch.tensor([3, 5]))
    assert "as many integers" in ChangedRows(rows, old[:1], new, 1).problem(8, keys)
    assert "as many integers" in ChangedRows(rows, old.int(), new, 1).problem(8, keys)
