"""Tables of ids that shrink: those ids stay that dictionaries (`tests/oracle/id_dictionary.py`) would evict last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from embershard.cache.ids.config import IdTable
from embershard.cache.ids.id_map import IdMap, mixed
from embershard.distributed.checkpoint.boxes import Box, Saved
from embershard.extras.warm_start.id_moves import fill_ids
from embershard.extras.warm_start.shapes import TableShape
from tests.oracle.id_dictionary import IdDictionary

ROWS, FEWER, SEED = 240, 64, 5
pytestmark = pytest.mark.extra

KEY = "sparse.t.weight"


class _SavedIds(Saved):
    def __init__(self, records: np.ndarray) -> None:
        self._tensors = {"model.sparse.t.ids": torch.from_numpy(records)}
        self._tensors[f"model.{KEY}"] = torch.arange(float(len(records)))[:, None].repeat(1, 4)

    def sizes(self) -> Mapping[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str, box: Box) -> torch.Tensor:
        return box.of(self._tensors[name]).clone()


def trained(rules: IdTable) -> tuple[_SavedIds, IdDictionary]:
    """Ids whose popularity moves, in both; each bucket has some that are used alike."""
    ids = IdMap("t", rules, rules.buckets_of("t", ROWS), SEED)
    expected, generator = IdDictionary("t", rules, ROWS, SEED), np.random.default_rng(3)
    for batch in range(60):
        words = mixed(5 * (batch // 20) + generator.geometric(0.015, size=12))
        ids.resolve(words)
        ids.commit()
        expected.resolve(words.tolist())
    records = ids.tensors()["records"]
    assert {x: row for x, (row, _, _) in expected.live().items()} == {
        int(records[row, 0]): row for row in np.flatnonzero(records[:, 1] >= 0).tolist()
    }
    return _SavedIds(records), expected


def shape(rows: int) -> TableShape:
    return TableShape("t", rows, 4, f"model.{KEY}", has_ids=True)


def moved(saved: Saved, old: IdTable, new: IdTable) -> tuple[dict[int, int], tuple[int, int]]:
    """Of each id that has a row of the smaller table, the row that it had; and how many have one, and have not."""
    tensors: dict[str, Any] = {
        "model": {KEY: torch.full((FEWER, 4), -1.0), "sparse.t.ids": torch.zeros(FEWER, 2, dtype=torch.int64)}
    }
    counts = fill_ids(tensors, saved, shape(ROWS), shape(FEWER), new, old, states=False)
    records = tensors["model"]["sparse.t.ids"]
    live = (records[:, 1] >= 0).nonzero().flatten()
    vectors = tensors["model"][KEY][live, 0].long().tolist()
    return dict(zip(records[live, 0].tolist(), vectors, strict=True)), counts


def stay(expected: IdDictionary, rules: IdTable) -> set[int]:
    """The ids that are left where dictionaries evict, by the rules, what has no room in the smaller table."""
    layout, left = rules.buckets_of("t", FEWER), dict[int, dict[int, tuple[int, int]]]()
    for x, (_, count, last) in expected.live().items():
        left.setdefault(x % 2**64 % layout.num_buckets, {})[x] = (count, last)
    found = set[int]()
    for members in left.values():

        def order(x: int, members: dict[int, tuple[int, int]] = members) -> tuple[bool, int, int, int]:
            count, last = members[x]
            age = expected.clock - last
            count = 0 if rules.eviction == "lru" else count >> (age // rules.half_life if rules.half_life else 0)
            return rules.ttl_steps is None or age <= rules.ttl_steps, count, last, x

        found |= set(sorted(members, key=order)[-(layout.rows - 1 - layout.reserve) :])
    return found


RULES = {
    "lfu": {},
    "a half-life": {"half_life": 9},
    "lru": {"eviction": "lru"},
    "a time to live": {"ttl_steps": 25},
    "a half-life and a time to live": {"half_life": 20, "ttl_steps": 8},
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("before", ["the same rules", "other rules"])
def test_a_table_that_shrinks_keeps_what_its_rules_evict_last(name: str, before: str) -> None:
    """Those of the new run, with the vectors of before; ids that are used alike by their mixed ids."""
    rules = IdTable(buckets=2, **RULES[name])
    old = rules if before == "the same rules" else IdTable(buckets=4)
    saved, expected = trained(old)
    found, (placed, left) = moved(saved, old, rules)
    assert set(found) == stay(expected, rules)
    assert found == {x: expected.live()[x][0] for x in found}
    assert (placed, left) == (len(found), len(expected.live()) - len(found))
    assert left > 3


def test_the_rules_differ() -> None:
    """The control: each of them keeps other ids."""
    _, expected = trained(IdTable(buckets=4))
    kept = [frozenset(stay(expected, IdTable(buckets=2, **rules))) for rules in RULES.values()]
    assert len(set(kept)) == len(RULES)
