"""What names say of whole numbers: counts in the plural, words that are either, ids of rows and of things."""

from __future__ import annotations

import numpy as np
import pytest

from embershard.extras.judging.kinds import Facts, Judgement, judge, word_of

pytestmark = pytest.mark.extra

DRAW = np.random.default_rng(0)
ROWS = 2000
COUNTS = DRAW.negative_binomial(0.8, 0.2, ROWS)
CODES = (DRAW.permutation(90_000)[:300] + 1)[np.minimum(DRAW.zipf(1.3, ROWS), 300) - 1]
FEW = DRAW.choice(8, ROWS, p=DRAW.dirichlet(np.ones(8))) + 1
UNIQUE = DRAW.permutation(9 * ROWS)[:ROWS] + 300


def facts(name: str, values: np.ndarray, **others: object) -> Facts:
    numbers = values.astype(np.float64)
    distinct = len(np.unique(numbers))
    limits = float(numbers.min()), float(numbers.max())
    return Facts(name, "integers", ROWS, ROWS, distinct, "", *limits, sample=numbers, **others)  # type: ignore[arg-type]


def judged(name: str, values: np.ndarray) -> Judgement:
    return judge([facts(name, values)])[0]


@pytest.mark.parametrize("name", ["members", "users", "hits", "runs", "walks", "stores", "contacts", "week_nights"])
def test_what_is_named_in_the_plural_is_a_count(name):
    assert judged(name, COUNTS).kind == "number"


@pytest.mark.parametrize("name", ["member", "user_ids", "store", "status", "bus", "class", "browsers_id"])
def test_what_only_ends_like_a_plural_is_none(name):
    assert judged(name, CODES).kind == "category"


@pytest.mark.parametrize(("values", "kind"), [(COUNTS, "number"), (CODES, "category"), (FEW, "category")])
@pytest.mark.parametrize("name", ["campaign", "interest", "contact"])
def test_words_that_are_either_are_decided_by_values(name, values, kind):
    found = judged(name, values)
    assert found.kind == kind
    assert found.sure != "sure" or name == "campaign" or values is CODES


@pytest.mark.parametrize("name", ["OperatingSystems", "operating_system", "os", "Browser", "TrafficType"])
def test_few_codes_of_systems_are_categories(name):
    assert judged(name, FEW).kind == "category"


def test_ids_that_nearly_every_row_has_another_one_of():
    """Beside another id they may come again; alone they name the rows, as ids of rows do anyway. None is a number."""
    for name in ("user_id", "customer", "article_id"):
        alone, _ = judge([facts(name, UNIQUE), facts("age", COUNTS)])
        beside, _ = judge([facts(name, UNIQUE), facts("item_id", CODES)])
        assert (alone.kind, beside.kind, beside.sure) == ("drop", "category", "guess")
    repeated = np.concatenate([UNIQUE[:20], UNIQUE[20:-20], UNIQUE[:20]])
    assert judged("user_id", repeated).kind == "category"
    for name in ("id", "transaction_id", "order_id", "orderid", "row_id", "sessionId", "loan_id"):
        found = judge([facts(name, UNIQUE), facts("user_id", CODES), facts("item_id", CODES)])
        assert [each.kind for each in found] == ["drop", "category", "category"]


@pytest.mark.parametrize("name", ["price", "weight", "x", "distance_m", "salary"])
def test_numbers_that_nearly_every_row_has_another_one_of_stay_numbers(name):
    _, found = judge([facts("user_id", CODES), facts(name, np.sort(UNIQUE)[::-1])])
    assert found.kind == "number"


def test_frequencies_of_a_sample_of_equally_frequent_values_tell_nothing():
    """The customers of a day, of which many numbers are there twice by chance."""
    assert judged("customers", np.round(np.exp(DRAW.normal(6.4, 0.4, ROWS)))).kind == "number"


@pytest.mark.parametrize(
    ("name", "group"), [("address", ""), ("item_details", "plural"), ("categories", "category"), ("ratings", "plural")]
)
def test_groups_of_names(name, group):
    assert word_of(name)[0] == group
