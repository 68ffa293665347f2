"""Any nested values become a dataclass, or the caller's exception with a message that names the entry."""

from __future__ import annotations

import contextlib
import datetime
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.errors import ConfigError, EmbershardError, ShardingError
from embershard.planning.cost.topology import Topology
from embershard.settings.decoding import decode, to_toml, tomllib
from embershard.sharding.plan import Plan
from embershard.training.checkpoint.saved_run import SavedRun
from embershard.training.config import RunConfig


@dataclass(frozen=True)
class Part:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Whole:
    part: Part | None = None
    parts: tuple[Part, ...] = ()
    by_number: dict[int, Part] = field(default_factory=dict)
    rate: float = 0.0


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(st.characters(codec="utf-8"))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner), max_leaves=8
)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Whole, RunConfig, Plan, Topology, SavedRun])
@given(data=st.data())
def test_whatever_a_file_holds_is_read_or_refused(cls, data) -> None:
    names = st.sampled_from([*cls.__dataclass_fields__, "other"])
    values = data.draw(st.dictionaries(names, VALUES, max_size=4) | VALUES)
    with contextlib.suppress(EmbershardError):
        assert isinstance(decode(cls, values, ShardingError), cls)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"part": {"nam": "x"}}, "part.nam: unknown key. Did you mean part.name?"),
        ({"part": {}}, "part.name: is missing, needed text"),
        (
            {"parts": [{"name": "a"}, {"name": "b", "size": 1}]},
            "parts[1] ('b'): size: unknown key. Did you mean sizes?",
        ),
        ({"parts": [{"name": "a", "sizes": [1, True]}]}, "parts[0] ('a'): sizes[1]: got True, needed integer"),
        ({"parts": {"name": "a"}}, "parts: got {'name': 'a'}, needed [section, ...]"),
        ({"by_number": {"one": {"name": "x"}}}, "by_number.one: got 'one', needed integer"),
        ({"by_number": {"1": 5}}, "by_number.1: got 5, needed section"),
        ({"rate": "1.5"}, "rate: got '1.5', needed number"),
        ({"rate": datetime.date(2024, 1, 1)}, "rate: got {'date': '2024-01-01'}, needed number"),
        ({"rate": "x" * 1000}, f"rate: got '{'x' * 79}, needed number"),
        ({"part": {"name": "\ud800"}}, "cannot be read: Invalid JSON"),
        ([], ": got [], needed section"),
    ],
)
def test_the_message_names_the_entry(values, message) -> None:
    with pytest.raises(ShardingError) as caught:
        decode(Whole, values, ShardingError)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("depth", [300, 5000])
def test_endless_nesting_is_refused(depth) -> None:
    values: list[object] = []
    for _ in range(depth):
        values = [values]
    with pytest.raises(ConfigError, match="cannot be read"):
        decode(Plan, {"settings": {"x": values}})


@pytest.mark.slow
@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), st.booleans() | st.integers(-(2**60), 2**60)))
def test_a_written_section_reads_back(values) -> None:
    assert tomllib.loads(to_toml({"a b": {"c": {}}, "d": values})).get("d", {}) == values


@pytest.mark.slow
@given(st.text(st.characters(codec="utf-8")) | st.floats(allow_nan=False) | st.lists(st.booleans()))
def test_a_written_value_reads_back(value) -> None:
    line = to_toml({"x": value})
    assert tomllib.loads(line) == {"x": value}
