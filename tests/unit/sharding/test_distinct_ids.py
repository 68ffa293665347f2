"""The distinct ids of each table of a batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.sharding.torchrec.modes import distinct_ids
from embershard.sharding.torchrec.modes.distinct_ids import DistinctIds

GROUPS = st.lists(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**31)), max_size=40), min_size=1, max_size=5)


@pytest.mark.parametrize("find", [distinct_ids._by_loop, distinct_ids._by_sorting])
@given(groups=GROUPS, dtype=st.sampled_from([torch.int64, torch.int32]))
def test_every_id_is_found_at_its_place_in_its_group(find, groups, dtype):
    """By the loop of a CPU, and by the operations that a GPU would run."""
    groups = [[min(row, 2**31 - 1) for row in group] for group in groups]
    ids = torch.tensor([row for group in groups for row in group], dtype=dtype)
    found: DistinctIds = find(ids, [len(group) for group in groups])
    assert found.counts == [len(set(group)) for group in groups]
    assert found.ids.dtype == found.inverse.dtype == torch.int64
    assert torch.equal(found.ids[found.inverse], ids.long())
    first, start = 0, 0
    for group, count in zip(groups, found.counts, strict=True):
        assert set(found.ids[first : first + count].tolist()) == set(group)
        places = found.inverse[start : start + len(group)]
        assert ((places >= first) & (places < first + count)).all()  # not in another table's rows
        first, start = first + count, start + len(group)


def test_many_ids_of_few_cells():
    """Ids that differ in high bits only, more than a small hash table holds, and the largest ones."""
    ids = torch.cat([torch.arange(5000) << 20, torch.arange(5000) << 20, torch.tensor([2**39])])
    found = DistinctIds.of(ids, [5000, 5001])
    assert found.counts == [5000, 5001]
    assert torch.equal(found.ids[found.inverse], ids)
