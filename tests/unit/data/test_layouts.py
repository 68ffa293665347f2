"""Files in the layouts of public data sets are read as they are meant, or as the refusal says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.covering import keep
from tests.unit.data.layouts import LAYOUTS, tried

_NAMES = ("ml_1m_movies.dat", "amazon_2014_meta.json", "netflix_combined_data_1.txt", "recsys_2020_tweets")
_ALWAYS = [each for each in LAYOUTS if each.name in _NAMES]


@pytest.mark.parametrize("layout", keep(_ALWAYS, LAYOUTS))
def test_a_public_layout_is_read_as_it_is_meant(tmp_path, layout):
    assert tried(layout, tmp_path, 300) == ""


@pytest.mark.matrix
def test_another_separator_is_noticed(tmp_path):
    """The negative control: rows that are cut at another place are other rows."""
    (layout,) = (each for each in LAYOUTS if each.name == "ml_1m_ratings.dat")
    wrong = replace(layout, options=("--columns", "a,user,b,item,c,rating,d", "--separator", ":"))
    assert tried(wrong, tmp_path, 300)
