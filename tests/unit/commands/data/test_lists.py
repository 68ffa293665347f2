"""Several values in a cell: separators that are found, and signs in texts that separate nothing."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from embershard.data.sources.table.survey import ColumnSurvey, survey
from embershard.extras.judging.kinds import Judgement, judge
from embershard.extras.judging.suggest import facts_of, near_miss

pytestmark = pytest.mark.extra

ROWS = 1500
SEPARATORS = ["\x01", "\x02", "\x1d", "^", "|", ";", "\t", "::", "~", "#", ",", ">", "&", "/", ":", " "]
WORDS = ["rock", "jazz", "folk", "soul", "blues", "metal", "disco", "opera", "swing", "punk", "techno", "house"]
MANY = [f"{first}{second} {third}" for first in WORDS for second in WORDS for third in WORDS][::2]
#: Cells that are one value each, by the name of their column.
ONE_VALUE = {
    "period": [f"{2010 + n % 9}/{n % 4 + 1}" for n in range(ROWS)],
    "opened": [f"{n % 12 + 8:02}:{n % 4 * 15:02}" for n in range(ROWS)],
    "lap": [f"{n % 3}:{n % 60:02}:{n * 7 % 60:02}.{n % 10}" for n in range(ROWS)],
    "ratio": [f"{n % 16 + 1}:{n % 9 + 1}" for n in range(ROWS)],
    "age_range": [f"{n % 7}0~{n % 7}9" for n in range(ROWS)],
    "zone": [("Europe/Berlin", "Europe/Paris", "Asia/Tokyo", "America/Lima")[n % 4] for n in range(ROWS)],
    "mime": [("text/html", "text/css", "image/png", "image/gif")[n * 7 % 4] for n in range(ROWS)],
    "path": [f"/home/{WORDS[n % 12]}/{WORDS[n % 7]}" + f"/f{n % 40}" * (n % 3) for n in range(ROWS)],
    "link": [f"shop.example/{WORDS[n % 12]}/{WORDS[n % 5]}" + f"/{n % 90}" * (n % 2) for n in range(ROWS)],
    "agent": [f"Mozilla/5.0 Firefox/{n % 30} (X11; Linux)" if n % 3 else "curl/8" for n in range(ROWS)],
    "version": [f"v{n % 5}.{n % 9}" for n in range(ROWS)],
    "section": [("Food & Drink", "Home & Garden", "Toys", "Arts & Crafts", "Books")[n % 5] for n in range(ROWS)],
    "language": [("C#", "F#", "Java", "Go")[n % 4] for n in range(ROWS)],
    "town": [f"{WORDS[n % 12]}ville, {WORDS[n % 5]} county" for n in range(ROWS)],
    "title": [f"The {WORDS[n % 12]}, the {WORDS[n % 5]} and the {n % 300}" for n in range(ROWS)],
    "name": [f"{WORDS[n % 12]}, Mr. {WORDS[n % 11]}" for n in range(ROWS)],
    "mac": [f"{n % 256:02x}:1a:{n * 7 % 256:02x}:00" for n in range(ROWS)],
    "artists": [f"{WORDS[n % 12]} {WORDS[n * 7 % 11]}" for n in range(ROWS)],
    "genre": [("science fiction", "true crime", "comedy")[n % 3] for n in range(ROWS)],
}


def surveyed(name: str, cells: list[str]) -> tuple[ColumnSurvey, Judgement]:
    table = pa.table({name: cells})
    column = survey(table.schema, iter(table.to_batches()))[name]
    return column, judge([facts_of(column)])[0]


def lists(separator: str, words: list[str] = WORDS) -> list[str]:
    draw = np.random.default_rng(0)
    sizes = draw.integers(1, 5, ROWS)
    return [separator.join(draw.choice(words, size, replace=False)) for size in sizes.tolist()]


@pytest.mark.parametrize("blank", ["", " "], ids=["bare", "blanks"])
@pytest.mark.parametrize("separator", SEPARATORS)
def test_values_between_a_separator_are_a_list(separator, blank):
    if separator == " " and blank:
        pytest.skip("a blank is the separator")
    column, found = surveyed("tags", lists(f"{blank}{separator}{blank}"))
    assert (found.kind, found.separator) == ("list", separator)
    assert column.parts[separator].distinct.estimate == len(WORDS)


@pytest.mark.parametrize("separator", ["\x02", "|", "::", "~", ">"])
def test_lists_need_no_name(separator):
    assert surveyed("x", lists(separator))[1].separator == separator


@pytest.mark.parametrize("name", ["genre", "Tag", "movie_class", "keyword"])
def test_words_with_commas_in_a_column_of_genres_are_a_list(name):
    assert surveyed(name, lists(", ", MANY))[1].separator == ","
    assert surveyed("remark", lists(", ", MANY))[1].separator is None


@pytest.mark.parametrize("name", ONE_VALUE)
def test_signs_in_one_value_separate_nothing(name):
    _, found = surveyed(name, ONE_VALUE[name])
    assert (found.kind == "list", found.separator) == (False, None), found


def test_what_may_be_a_list_is_told_with_the_option():
    column, found = surveyed("remark", lists(", ", MANY))
    assert near_miss(column, found).endswith(
        "in them: " + repr(column.examples[0]) + ". If these are lists: --list remark:,"
    )
    for name in ("title", "zone", "section"):
        column, found = surveyed(name, ONE_VALUE[name][:20])
        assert near_miss(column, found) == "" or name == "zone"


def test_few_values_that_come_again_and_again_need_no_name():
    assert surveyed("shelf", lists(", "))[1].separator == ","
