"""Ids in exports: every id has the row, or the bucket's, that the map of the training finds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from embershard.cache import loops
from embershard.cache.ids.config import IdTable
from embershard.cache.ids.id_map import IdMap, mixed
from embershard.extras.serving.serving_model import IdPlaces
from embershard.extras.serving.write import SavedIds

pytestmark = pytest.mark.extra


def test_buckets_are_those_of_the_training():
    ids = np.random.default_rng(0).integers(-(2**63), 2**63, 3000)
    ids[:4] = 0, -1, 2**63 - 1, -(2**63) + 1
    for number in (1, 2, 7, 24, 240, 2**20):
        buckets = np.empty(len(ids), np.int64)
        loops.buckets_of_ids(mixed(ids), number, buckets)
        places = IdPlaces(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32), 10 * number, number)
        assert (places(torch.from_numpy(ids)).numpy() == 10 * buckets).all()


@pytest.mark.parametrize("unadmitted", ["shared", "zero"])
def test_every_id_has_the_row_that_training_finds(unadmitted):
    rules, random = IdTable(buckets=3, reserve=0.4, unadmitted=unadmitted), np.random.default_rng(0)
    ids_map = IdMap("t", rules, rules.buckets_of("t", 60), 1)
    for step in range(200):
        ids_map.resolve(mixed((random.zipf(1.3, 20) % 60 + step) * -(2**40)))
        if step > 3:  # so many are known ahead
            ids_map.commit()
    assert ids_map.counts.evicted > 100
    saved = SavedIds.of_records("t", rules, torch.from_numpy(ids_map.tensors()["records"]))
    places, asked = IdPlaces(saved.ids, saved.rows, 60, 3), (np.arange(400)) * -(2**40)
    found, expected = places(torch.from_numpy(asked)).numpy(), ids_map.find(mixed(asked))
    assert len(set(found.tolist())) > 30
    is_zero = expected < 0
    assert (found[~is_zero] == expected[~is_zero]).all()
    assert is_zero.any() == (unadmitted == "zero")
    weights = torch.rand(60, 4, generator=torch.Generator().manual_seed(0)) + 1
    cleared = torch.cat(list(saved.cleared(weights.split(25))))
    assert (cleared[found[is_zero]] == 0).all()
    assert torch.equal(cleared[found[~is_zero]], weights[found[~is_zero]])
    assert (cleared[~saved.is_used] == 0).all()
    assert int(saved.is_used.sum()) == len(saved.ids) + (3 if unadmitted == "shared" else 0)


def test_an_export_without_ids_has_the_buckets_rows():
    rules = dataclasses.replace(IdTable(), buckets=2)
    empty = IdMap("t", rules, rules.buckets_of("t", 16), 1).tensors()["records"]
    saved = SavedIds.of_records("t", rules, torch.from_numpy(empty))
    assert set(IdPlaces(saved.ids, saved.rows, 16, 2)(torch.arange(50)).tolist()) == {0, 8}
