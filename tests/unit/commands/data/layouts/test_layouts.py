"""Columns of public data sets that no rule was made for are judged right, and `sure` is said where it holds."""

from __future__ import annotations

import pytest

from embershard.extras.judging import kinds
from tests.unit.commands.data.layouts.judged import LAYOUTS, judged_layout

pytestmark = pytest.mark.extra

SOME = ["H&M, transactions with articles", "santander products", "taxis of New York", "lending club", "netflix titles"]


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layouts", "seeds"), [(SOME, 1), pytest.param(list(LAYOUTS), 3, marks=pytest.mark.matrix)], ids=["some", "all"]
)
def test_columns_of_public_layouts(layouts, seeds, tmp_path):
    found = [each for layout in layouts for seed in range(seeds) for each in judged_layout(layout, seed, tmp_path)]
    wrong = [each for each in found if not each.is_right]
    assert len(wrong) <= 0.05 * len(found), "\n".join(map(str, wrong))
    sure = [each for each in found if each.sure == "sure"]
    assert len(sure) > len(found) / 2
    assert len([each for each in sure if not each.is_right]) <= 0.01 * len(sure), "\n".join(map(str, wrong))


@pytest.mark.slow
def test_without_names_they_are_not(tmp_path, monkeypatch):
    """A negative control: what the names say is needed."""
    monkeypatch.setattr(kinds, "word_of", lambda name: ("", ""))
    found = judged_layout("zillow", 0, tmp_path)
    assert len([each for each in found if not each.is_right]) > 0.05 * len(found)
