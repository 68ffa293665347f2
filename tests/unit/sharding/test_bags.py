"""The distinct ids of each table of a batch, and the pooling of their rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.sharding.torchrec.modes import bags as distinct
from embershard.sharding.torchrec.modes.bags import Bags, DistinctIds


@given(
    lengths=st.lists(st.integers(0, 5), min_size=6, max_size=6), num_rows=st.integers(1, 9), seed=st.integers(0, 9),
    num_features=st.sampled_from([1, 2, 3, 6]), scaled=st.booleans(),
)  # fmt: skip
def test_the_loops_pool_as_torch_does(lengths, num_rows, seed, num_features, scaled):
    """On dyadic numbers to the bit, forward and backward."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(0, num_rows, (sum(lengths),), generator=generator)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    scales = torch.randint(-4, 5, places.shape, generator=generator) / 4 if scaled else None
    bags = Bags(places, offsets, scales, num_features)
    found = []
    for pool in (bags.pool, bags._pool_by_torch):
        rows = torch.arange(num_rows * 4.0).view(num_rows, 4).requires_grad_()
        pooled = pool(rows)
        pooled.backward(torch.arange(24.0).view(pooled.shape))
        found += [pooled.detach(), rows.grad]
    assert found[0].shape == (6 // num_features, num_features * 4)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@pytest.mark.parametrize("num_samples", [0, 2])
def test_a_batch_without_ids_has_zeros_and_a_backward(num_samples):
    bags = Bags(torch.empty(0, dtype=torch.int64), torch.zeros(3 * num_samples + 1, dtype=torch.int64), None, 3)
    rows = torch.empty(0, 4, requires_grad=True)
    pooled = bags.pool(rows)
    assert torch.equal(pooled, torch.zeros(num_samples, 12))
    pooled.sum().backward()
    assert rows.grad.shape == (0, 4)


GROUPS = st.lists(st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**31)), max_size=40), min_size=1, max_size=5)


@pytest.mark.parametrize("find", [distinct._by_loop, distinct._by_sorting])
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
