"""Hot rows are the most frequent ones of all tables, within their bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.errors import ConfigError
from embershard.frequency import FrequencyProfile
from embershard.frequency.profile import HotRows

counts_of_tables = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=12), min_size=1, max_size=4)


def profile_of(tables: list[list[int]]) -> FrequencyProfile:
    return FrequencyProfile({f"t{number}": torch.tensor(counts) for number, counts in enumerate(tables)}, 1)


@pytest.mark.slow
@given(counts_of_tables, st.lists(st.integers(1, 9), min_size=4, max_size=4), st.integers(1, 120))
def test_all_rows_above_the_lowest_threshold_that_fits(tables, sizes, most_bytes):
    profile = profile_of(tables)
    row_bytes = {f"t{number}": sizes[number] for number in range(len(tables))}

    def needed(threshold: int) -> int:
        return sum(sizes[n] * sum(count >= threshold for count in counts) for n, counts in enumerate(tables))

    fitting = [threshold for threshold in range(1, 7) if 0 < needed(threshold) <= most_bytes]
    if not fitting:
        with pytest.raises(ConfigError, match=rf"got {most_bytes} bytes for them .*, needed at least \d+"):
            HotRows.choose(profile, row_bytes, most_bytes)
        return
    found = HotRows.choose(profile, row_bytes, most_bytes)
    assert needed(found.threshold) == needed(min(fitting)) == found.num_bytes <= most_bytes
    for number, counts in enumerate(tables):
        expected = [row for row, count in enumerate(counts) if count >= found.threshold]
        assert found.rows[f"t{number}"].tolist() == expected
        assert found.is_whole(f"t{number}") == (len(expected) == len(counts))
    assert found.total == sum(map(len, found.rows.values()))


def test_the_digest_tells_choices_apart():
    profile = profile_of([[5, 1, 3], [4, 4]])
    row_bytes = {"t0": 1, "t1": 1}
    digests = [HotRows.choose(profile, row_bytes, size).digest for size in (1, 3, 4, 5)]
    assert len(set(digests)) == 4
    assert HotRows.choose(profile, row_bytes, 2).digest == digests[0], "t1's two rows are hot together or not at all"
    moved = HotRows({"t0": np.array([0]), "t1": np.array([1])}, {"t0": 3, "t1": 2}, 1, 2)
    other = HotRows({"t0": np.array([1]), "t1": np.array([0])}, {"t0": 3, "t1": 2}, 1, 2)
    assert moved.digest != other.digest
