"""Messages about the file of a plan: what somebody wrote into it is mended as the message says."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.covering import matrix
from tests.unit.commands.remedies.table import said_by

_USER = {"table": "user", "rows": 90, "dim": 16, "dtype": "fp32", "sharding": "row_wise", "kernel": "cached",
    "ranks": [0, 1]}  # fmt: skip
_ITEM = {**_USER, "table": "item", "sharding": "table_wise", "ranks": [0]}
_CITY = {**_USER, "table": "city", "rows": 9, "sharding": "data_parallel", "kernel": "replicated", "ranks": []}
_TABLES = [_USER, _ITEM, _CITY]
_OF_USER_0 = {"rank": 0, "tables": ["user"], "sharding": "row_wise", "dim": 16, "slots": 9}
_OF_USER_1 = {**_OF_USER_0, "rank": 1}
_OF_ITEM = {**_OF_USER_0, "tables": ["item"], "sharding": "table_wise"}
_POOLS = [_OF_USER_0, _OF_USER_1, _OF_ITEM]
_PLAN: dict[str, Any] = {"format": 1, "world_size": 2, "ranks_per_node": 2, "batch_size": 64, "device": "cpu",
    "device_memory_bytes": None, "host_memory_bytes": None, "settings": {}, "tables": _TABLES, "pools": _POOLS,
    "memory_bytes_by_rank": []}  # fmt: skip
_CUT = {**_ITEM, "sharding": "column_wise", "dim": 4}
_WHOLE_CITY = {**_ITEM, "table": "city"}
_LARGE = {**_ITEM, "rows": 3 * 2**30}


class Edit(NamedTuple):
    """What is wrong, as places of the plan's JSON with their values; the message; and what the remedy puts there: the
    message's group, which is JSON, or `right`."""

    wrong: Mapping[str, object]
    said: str
    right: Mapping[str, object] | None = None


EDITS = [
    Edit({"format": 2}, r"needed (1)\. Plan again with this version"),
    Edit({"world_size": 0}, "needed at least (1)", {"world_size": 2}),
    Edit({"batch_size": 0}, "needed at least (1)"),
    Edit({"host_memory_bytes": 0}, "needed at least 1, or (null)"),
    Edit({"memory_bytes_by_rank": [5, 6]}, "needed (none), or 2 numbers", {}),
    Edit({"memory_bytes_by_rank": [5], "device_memory_bytes": 9}, r"or (2 numbers) from 1 to .*\(9\), the largest",
        {"memory_bytes_by_rank": [5, 9], "device_memory_bytes": 9}),
    Edit({"world_size": 9999999}, r"needed (at most) \d+", {}),
    Edit({"ranks_per_node": 3}, "needed a divisor of world_size (2)"),
    Edit({"tables": []}, r"needed (the model's)", {}),
    Edit({"tables": [*_TABLES, _ITEM]}, "(Remove one)", {}),
    Edit({"tables.0.rows": 0}, "needed at least (1)", {"tables.0.rows": 1, "pools.0.slots": 1, "pools.1.slots": 1}),
    Edit({"tables.1.dim": 6}, r"needed a multiple of (4)", {"tables.1.dim": 16}),
    Edit({"tables.2.kernel": "cached"}, r'("replicated") and "data_parallel" go together\. Set both'),
    Edit({"tables.1.kernel": "replicated"}, "Set both, or (neither)", {}),
    Edit({"tables.2.exchange": "rows"}, 'needed one of .*, or ("pooled")'),
    Edit({"tables.2.exchange": "rows"}, "needed one of (table_wise), row_wise",
        {"tables.2": {**_WHOLE_CITY, "exchange": "rows"}, "pools": [*_POOLS, {**_OF_ITEM, "tables": ["city"]}]}),
    Edit({"tables.1.ranks": [2]}, "needed ranks from (0) to 1", {}),
    Edit({"tables.1.ranks": [0, 1]}, "table_wise needs (one rank)", {}),
    Edit({"tables.0.ranks": [1, 0]}, r"row_wise needs (all ranks in order, 0 to 1)", {}),
    Edit({"tables.2.ranks": [0]}, "data_parallel needs (no ranks)", {}),
    Edit({"tables.1": {**_CUT, "ranks": []}}, "needs (a rank per column shard)", {}),
    Edit({"tables.0.sharding": "table_row_wise", "tables.0.ranks": [1]}, r"for instance (\(0, 1\))",
        {f"{place}.sharding": "table_row_wise" for place in ("tables.0", "pools.0", "pools.1")}),
    Edit({"tables.1": {**_CUT, "ranks": [0, 1]}}, "Give it (fewer ranks)",
        {"tables.1": _CUT, "pools.2": {**_OF_ITEM, "sharding": "column_wise", "dim": 4}}),
    Edit({"tables.1": {**_CUT, "ranks": [0, 1]}}, "or (another sharding type)", {}),
    Edit({"tables": [_LARGE]}, "(cut them by rows)", {
        "tables": [{**_USER, "rows": _LARGE["rows"], "exchange": "rows"}], "pools": _POOLS[:2],
    }),
    Edit({"tables": [{**_ITEM, "rows": 2**31 - 9}, {**_WHOLE_CITY}]}, "(Move tables to other ranks)", {
        "tables": [{**_ITEM, "rows": 2**31 - 9}, {**_WHOLE_CITY, "ranks": [1]}],
        "pools": [_OF_ITEM, {**_OF_ITEM, "tables": ["city"], "rank": 1}],
    }),
    Edit({"pools": [*_POOLS, _OF_USER_0]}, "(Remove one)", {}),
    Edit({"pools": _POOLS[:2]}, r"Add one for them, with (1) to 90 slots", {"pools.2.slots": 1}),
    Edit({"pools": [*_POOLS, {**_OF_ITEM, "tables": []}]}, "(Remove the pool)", {}),
    Edit({"pools.2.tables": ["item", "city"]}, "(Remove it from the pool)", {}),
    Edit({"pools.2.dim": 8}, r"table_wise with (16) columns\. Say so"),
    Edit({"pools": [{**_OF_USER_0, "tables": ["user", "item"]}, _OF_USER_1]}, "or (move the table) to that pool", {}),
    Edit({"tables.2": _WHOLE_CITY}, r"needed (\['city', 'item'\])",
        {"tables.2": _WHOLE_CITY, "pools.2.tables": ["city", "item"]}),
    Edit({"pools.1.slots": 46}, "needed 1 to (45)"),
    Edit({"pools.0.slot": 9}, r"[Dd]id you mean \S*(slots)", {}),
    Edit({"tables.0.kernel": "cache"}, "'?(cached)'?", {}),
]  # fmt: skip
#: A text that is no plan, its message, and what stands there with the remedy.
TEXTS = [
    ('"world_size": 2, "world_size": 3,', "(Remove one)"),
    ('"world_size": NaN,', r"(Replace it)"),
    ('"world_size": 2', r"is not JSON: Expecting '(,)'"),
]
_RIGHT_TEXT = '"world_size": 2,'


def _plan_with(places: Mapping[str, object]) -> str:
    plan = copy.deepcopy(_PLAN)
    for place, value in places.items():
        *above, last = (int(key) if key.isdigit() else key for key in place.split("."))
        inside: Any = plan
        for key in above:
            inside = inside[key]
        inside[last] = value
    return json.dumps(plan)


def _check(command: str, wrong: str, said: str, right: str | None, place: str, capsys: pytest.CaptureFixture[str]):
    """`right`: None is what the message says, at `place`."""
    Path("plan.json").write_text(_plan_with({}))
    Path("mine.json").write_text(wrong)
    code, text = said_by(command.split(), capsys)
    found = re.search(said, text)
    assert code == 2, text
    assert found is not None, text
    Path("mine.json").write_text(_plan_with({place: json.loads(found[1])}) if right is None else right)
    code, text = said_by(command.split(), capsys)
    assert code == 0, text


_DIFF, _TRAIN = "plan diff plan.json mine.json", "train city.toml --dry-run --plan mine.json"


@pytest.mark.parametrize(
    ("command", "edit"), [*((_DIFF, edit) for edit in EDITS), *(matrix(_TRAIN, edit) for edit in EDITS)]
)
def test_a_plan_is_mended_as_its_message_says(command: str, edit: Edit, capsys: pytest.CaptureFixture[str]):
    right = None if edit.right is None else _plan_with(edit.right)
    _check(command, _plan_with(edit.wrong), edit.said, right, next(iter(edit.wrong)), capsys)


@pytest.mark.parametrize(("text", "said"), TEXTS)
def test_a_text_is_mended_as_its_message_says(text: str, said: str, capsys: pytest.CaptureFixture[str]):
    wrong = _plan_with({}).replace(_RIGHT_TEXT, text)
    _check(_DIFF, wrong, said, _plan_with({}), "", capsys)
