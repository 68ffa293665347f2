"""Keys of a pool: in one loop where all features have as many samples, by torch's operations where not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.cache import loops
from embershard.sharding.torchrec.feature_keys import FeatureIds, FeatureKeys

lengths_of_bags = st.integers(1, 4).flatmap(
    lambda features: st.integers(0, 3).flatmap(
        lambda samples: st.lists(
            st.lists(st.integers(0, 3), min_size=samples, max_size=samples), min_size=features, max_size=features
        )
    )
)


@given(lengths_of_bags, st.sampled_from([torch.int32, torch.int64]), st.integers(1, 2))
def test_the_loop_gives_what_torch_gives(lengths, dtype, step):
    num_features, num_samples = len(lengths), len(lengths[0])
    bags = torch.tensor(lengths, dtype=torch.int64).flatten()
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), bags.cumsum(0)]).to(dtype)
    ids = torch.arange(int(offsets[-1])).to(dtype).repeat_interleave(step)[::step]
    feature_keys = FeatureKeys([1000 * feature for feature in range(num_features)], torch.device("cpu"))
    found = feature_keys.of(FeatureIds(ids, offsets))
    expected = feature_keys.of(FeatureIds(ids, offsets, [[num_samples]] * num_features))
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    assert [each.dtype for each in found] == [torch.int64, torch.int64]


@pytest.mark.parametrize("wrong", [-1, 7, 2**62, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("position", [0, 4])
def test_ids_outside_of_their_features_rows_are_seen(wrong, position):
    ids, lengths, limits = torch.arange(5), torch.tensor([5, 0]), torch.tensor([7, 2])
    assert loops.are_rows(ids.numpy(), lengths.numpy(), limits.numpy())
    ids[position] = wrong
    assert not loops.are_rows(ids.numpy(), lengths.numpy(), limits.numpy())
