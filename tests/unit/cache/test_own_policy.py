"""Policies of one's own: which rows they keep, what is refused of them, and that they change no row."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from embershard.cache import CacheConfig, SlotScores
from embershard.cache.config import CachePolicy
from embershard.cache.own_policy import OwnScores
from embershard.errors import ConfigError
from tests.conftest import PROJECT

CPU = torch.device("cpu")
EXAMPLES = str(PROJECT / "examples")


class Given(SlotScores):
    """Scores as they are given."""

    def __init__(self, scores: Tensor | None) -> None:
        self.scores = scores

    def of_slots(self) -> Tensor | None:
        return self.scores


#: What `make` returns.
GIVEN: dict[str, object] = {}


def make(num_rows: int, num_slots: int, device: torch.device) -> object:
    """The policy of these tests."""
    return GIVEN["made"]


def fails(*_: object) -> object:
    raise ZeroDivisionError("no slot")


def scores_of(made: object, name: str = "make") -> OwnScores:
    GIVEN["made"] = made
    return OwnScores(f"{__name__}:{name}", None, 9, 3, CPU)


def test_settings_name_a_policy():
    config = CacheConfig(policy="my_policy:make", policy_folder="there")
    assert config.policy_for(False) == CachePolicy("lfu", False, own="my_policy:make", folder="there")
    assert config.policy_for(True).warmup
    for settings, message in (
        ({"policy": "my_policy:"}, r'cache.policy must be one of .*, or "module:function"'),
        ({"policy": "lru", "policy_folder": "there"}, "cache.policy_folder has no effect"),
        ({"policy": "a:b", "decay": 0.5}, "cache.decay has no effect"),
    ):
        with pytest.raises(ConfigError, match=message):
            CacheConfig(**settings)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (3, "returned int; needed embershard.cache.SlotScores"),
        (Given(torch.zeros(3)), r"returned torch.float32 \[3\] on cpu; needed contiguous float32 \[4\]"),
        (Given(torch.zeros(4, dtype=torch.float64)), "returned torch.float64"),
        (Given(torch.zeros(8)[::2]), "needed contiguous"),
        (Given(torch.tensor([0.0, 1.0, -2.0, 0.0])), "slot 2 has the score -2.0; needed 0 or more"),
        (Given(torch.tensor([0.0, float("nan"), 0.0, 0.0])), "slot 1 has the score nan"),
    ],
)
def test_what_would_index_slots_wrongly_is_refused(made, message):
    with pytest.raises(ConfigError, match=f"cache.policy = .*{message}"):
        scores_of(made)


def test_a_function_that_is_missing_or_fails_is_named():
    with pytest.raises(ConfigError, match=r"fails' failed: ZeroDivisionError: no slot .*test_own_policy.py, line"):
        scores_of(None, "fails")
    with pytest.raises(ConfigError, match="has no function 'nothing'"):
        scores_of(None, "nothing")
    with pytest.raises(ConfigError, match=r"cache.policy: no module 'no_such_module'"):
        OwnScores("no_such_module:make", None, 9, 3, CPU)


def test_scores_are_checked_while_they_are_used():
    given = Given(torch.zeros(4))
    scores = scores_of(given)
    given.scores = torch.tensor([0.0, -1.0, 0.0, 0.0])
    with pytest.raises(ConfigError, match=r"slot 1 has the score -1\.0"):
        scores.of_slots()
    given.scores = torch.zeros(4)
    scores.grow(5)  # which the policy ignores
    with pytest.raises(ConfigError, match=r"needed contiguous float32 \[6\]"):
        scores.of_slots()


def test_a_policy_without_scores_goes_by_the_last_use():
    assert scores_of(Given(None)).of_slots() is None
    assert scores_of(SlotScores()).counted(torch.tensor([1, 2])).tolist() == [0.0, 0.0]


def test_the_example_keeps_rows_that_came_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    scores = OwnScores("own_policy:make", EXAMPLES, 9, 3, CPU)
    keys, slots = torch.tensor([5, 7, 8]), torch.tensor([1, 2, 3])
    scores.admit(keys, slots)
    none = slots[:0]
    scores.used(torch.tensor([1, 2, 2, 3]), none.bool(), none)
    scores.used(torch.tensor([2]), none.bool(), none)
    found = scores.of_slots()
    assert found.tolist() == [0.0, 1.0, 2.0, 1.0]
    scores.evict(keys[1:2], slots[1:2])
    scores.grow(4)
    scores.admit(keys[1:2], torch.tensor([4]))
    assert scores.of_slots()[4] == 2.0  # type: ignore[index]  # a row's history survives its eviction
    assert (scores.device_bytes, scores.host_bytes) == (4 * 5, 4 * 9)


def test_the_page_has_the_code_of_the_example():
    """Without the docstrings of the file, and without what it counts for reports."""
    page = (PROJECT / "docs" / "cache.md").read_text(encoding="utf-8")
    (block,) = [part for part in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "class UsedAgain" in part]
    code = (PROJECT / "examples" / "own_policy.py").read_text(encoding="utf-8")
    assert [line for line in block.splitlines() if line not in code.splitlines()] == []
    namespace: dict[str, Any] = {}
    exec(block, namespace)  # as a reader pastes it
    assert isinstance(namespace["make"](9, 3, CPU), SlotScores)
