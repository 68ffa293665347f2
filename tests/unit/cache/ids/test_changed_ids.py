"""`ChangedIds`, and the owners of rows: what replicas are told is what changed, however far ids are known ahead."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from embershard.cache.ids.config import IdTable
from embershard.cache.ids.id_map import RESERVED_ID, ChangedIds, IdMap, mixed, unmixed

RULES = IdTable(buckets=2, reserve=0.4)
NUM_ROWS = 64


def committed(ids: IdMap) -> dict[int, int]:
    """Id by row, as a checkpoint has it."""
    records = ids.tensors()["records"]
    rows = np.flatnonzero(records[:, 1] >= 0)
    return dict(zip(rows.tolist(), unmixed(records[rows, 0]).tolist(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("rules", [RULES, dataclasses.replace(RULES, ttl_steps=5, unadmitted="zero", admit_after=2)])
def test_changes_lead_from_one_state_to_the_next(rules):
    random = np.random.default_rng(0)
    ids, known, left = IdMap("t", rules, rules.buckets_of("t", NUM_ROWS), 1), dict[int, int](), 0
    ids.changed = ChangedIds(NUM_ROWS)
    for step in range(1000):
        ids.resolve(mixed(random.zipf(1.3, 20) % 100 + step // 20))
        if step % 50 == 0:
            ids.undo()
        elif ids.head - ids.committed > 5:
            ids.commit()
        if step % 7:
            continue
        now, rows = committed(ids), np.arange(NUM_ROWS)
        owners = ids.owners(rows)
        assert {row: int(x) for row, x in enumerate(owners) if x != RESERVED_ID} == now
        shared = {0, 32} if rules.unadmitted == "shared" else set()
        assert set(np.flatnonzero(ids.is_used(rows)).tolist()) == now.keys() | shared
        changed, before = ids.changed.take()
        assert before.tolist() == [known.get(row, RESERVED_ID) for row in changed.tolist()]
        left += int((before != RESERVED_ID).sum())
        known = {row: x for row, x in known.items() if row not in set(changed.tolist())}
        known |= {row: now[row] for row in changed.tolist() if row in now}
        assert known == now
    assert left > 500


def test_what_replicas_have_counts_before_what_came_since():
    changed = ChangedIds(8)
    changed.add(np.array([1, 2]), np.array([10, 20]))
    changed.add(np.array([2, 3]), np.array([22, 33]), at_first=True)
    assert [part.tolist() for part in changed.take()] == [[1, 2, 3], [10, 22, 33]]
    assert [part.tolist() for part in changed.take()] == [[], []]


def test_notes_take_no_more_memory_than_the_rows():
    changed = ChangedIds(8)
    for number in range(1000):
        changed.add(np.arange(8), np.full(8, number))
        assert sum(map(len, changed._rows)) <= 16
    assert changed.take()[1].tolist() == [0] * 8


def test_mixing_is_taken_back():
    ids = np.random.default_rng(1).integers(-(2**63), 2**63, 1000)
    ids[:4] = 0, -1, 2**63 - 1, RESERVED_ID
    assert (unmixed(mixed(ids)) == ids).all()
