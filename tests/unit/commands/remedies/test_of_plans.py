"""Messages about the tables, places and sizes that a plan is asked for, about runs beside their plans, and about the
file of a plan: what somebody wrote into it is mended as the message says."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from embershard.commands import cli
from embershard.extras.calibrate import calibrate
from embershard.frequency import FrequencyProfile
from embershard.launch import launcher
from embershard.launch.rank import Job
from tests.covering import matrix
from tests.unit.commands.conftest import start_here
from tests.unit.commands.remedies.table import FILES, LEFT_OUT, Remedy, cases, check, said_by

_MACHINE = """
[{0}]
source = "of the vendor"
device = "cpu"
ranks_per_node = 2
host_memory_bytes = 16_000_000_000
bandwidths.flops = 2e11
bandwidths.device_memory_bytes = 4e10
bandwidths.host_memory_bytes = 4e10
bandwidths.to_device_bytes = 4e10
bandwidths.to_host_bytes = 4e10
bandwidths.node_bytes = 1e9
bandwidths.network_bytes = 0
"""
FILES |= {
    "user.toml": "[tables.t_user_id]\n",
    "item.toml": "[tables.item]\n",
    "more_rows.toml": "[tables.t_user_id]\nrows = 100\n",
    "two.toml": "[tables.item]\nrows = 4000\n[tables.user]\nrows = 4000\n",
    "twice.toml": "[tables.item]\nrows = 4000\ncount = 2\n[tables.item_0]\nrows = 400\n",
    "count.toml": "[tables.item]\nrows = 4000\ncount = 0\n",
    "dim.toml": "[tables.item]\nrows = 4000\ndim = 6\n",
    "zipf.toml": "[tables.item]\nrows = 4000\nzipf = 6.0\n",
    "huge.toml": "[tables.item]\nrows = 3_000_000_000\n",
    "machines.toml": _MACHINE.format("a") + _MACHINE.format("b"),
    "machine.toml": _MACHINE.format("a"),
    "named.toml": _MACHINE.format("a").replace("source", 'name = "b"\nsource'),
    "no_speeds.toml": _MACHINE.format("a").partition("bandwidths")[0],
    "slow.toml": _MACHINE.format("a").replace("1e9", "0.5"),
}
_NUMBERS = "plan --tables tables.toml --ranks {}"
_OF_1, _OF_2 = _NUMBERS.format(1), _NUMBERS.format(2)
_CITY = "plan city.toml --tables user.toml --ranks 1"
_PROFILED = "plan city.toml --profile city.npz --ranks 1"
_PIN, _HOST = "--set sharding.pin.item.", "--set cache.host=file --set cache.host_dir=rows --set cache.host_bytes="
_IDS = "--set data.table.features.user_id.num_rows=192 --set data.table.features.user_id.mapping="

OF_TABLES = [
    Remedy(("plan",), "", "tables.toml", r"Give it as (--tables tables\.toml)", "--ranks 1 --tables tables.toml", True),
    Remedy(("plan city.toml --ranks 1",), "", "--tables item.toml", r"needed those of its settings: (t_user_id)",
        "--tables user.toml", True),
    Remedy(("plan --tables huge.toml --ranks 2 --host-memory 1TiB",), "", "--types table_wise",
        "allow (row_wise) sharding", "--types row_wise", True),
    Remedy((_CITY,), "", "--set sharding.mode=data_parallel", r"plan with (--set sharding\.mode=sharded)"),
    Remedy((_OF_1,), "", "--quick", "without (--calibrate)", LEFT_OUT, True),
    Remedy((_CITY,), "", f"--topology h200x8 {_IDS}ids", "Plan for (--topology cpu)", f"--topology cpu {_IDS}ids",
        True),
]  # fmt: skip
MORE_OF_TABLES = [
    Remedy(("plan city.toml --ranks 1",), "", "--tables more_rows.toml", "(leave them out)", "--tables user.toml",
        True),
    Remedy(("plan --ranks 1 --tables",), "", "twice.toml", "needed (other names)", "two.toml", True),
    Remedy(("plan --ranks 1 --tables",), "", "count.toml", "(at least 1) table", "tables.toml", True),
    Remedy(("plan --ranks 1 --tables",), "", "dim.toml", "(a multiple of 4)", "tables.toml", True),
    Remedy(("plan --ranks 1 --tables",), "", "zipf.toml", r"(an exponent in \[0, 5\])", "tables.toml", True),
    Remedy(("plan --ranks 2 --host-memory 1TiB --types table_wise --tables",), "", "huge.toml", "(fewer rows)",
        "tables.toml", True),
    Remedy((_OF_1,), "", "--topology cpu,cpu", "each (once)", "--topology cpu", True),
    Remedy((_OF_1,), "", "--device-memory 0", "needed (1) to", "--device-memory 1GiB", True),
    Remedy((_OF_1,), "", "--ratios 0", "needed numbers (above 0)", "--ratios 0.5", True),
    Remedy(("plan --tables tables.toml",), "", "--ranks 1;2", "(with commas between them)", "--ranks 1,2", True),
    Remedy(("plan --tables tables.toml --simulate",), "", "--ranks 9999", "needed (at most 4096)", "--ranks 96", True),
    *(
        Remedy((_OF_1,), "", f"--topology {file}.toml", said, "--topology machine.toml", True)
        for file, said in (
            ("machines", "(needed is one)"), ("named", "needed (none)"), ("no_speeds", "needed (one of them)"),
            ("slow", "needed a number (from 1000)"), ("machin", r"[dD]id you mean (machine\.toml)"),
        )
    ),
    Remedy(("plan --tables tables.toml --topology machine.toml --ranks 2",), "", "--ranks-per-node 1",
        "(there are several nodes)", LEFT_OUT, True),
    Remedy(("plan city.toml --tables user.toml --ranks 8 --topology h200x8",), "", f"{_IDS}ids", "or (let ids share)",
        f"{_IDS}hash", True),
    Remedy(("plan --tables tables.toml --simulate --ranks 64",), "", "--host-memory 1kB", "memory .*(--host-memory)",
        "--host-memory 1GB", True),
    Remedy(("plan --tables tables.toml --simulate --host-memory 6kB",), "", "--ranks 64", "simulate (other numbers)",
        "--ranks 128", True),
]  # fmt: skip
OF_PLACES = [
    Remedy((_OF_1,), "", f"{_PIN}type=data_parallel", r'("grid_shard") \| none', f"{_PIN}type=grid_shard", True),
    Remedy((_OF_1,), "", f"{_PIN}kernel=device", r"\((--device-memory)\)", "--device-memory 1GiB"),
    Remedy(("plan --tables two.toml --ranks 1 --set sharding.pin.user.slots=9",), "", f"{_PIN}slots=8",
        "Give them (one number)", f"{_PIN}slots=9", True),
    Remedy((_OF_1,), "", f"{_HOST}100", r"Give it about (\d+) bytes", f"{_HOST}40000", True),
    Remedy((_OF_2,), "", "--set cache.device_bytes=100", r"that fits: (--set cache.device_bytes=\d+)", instead=True),
    Remedy((_OF_2,), "", "", r"give them more \((--device-memory)", "--device-memory 1GiB", wrong_code=0,
        leads_to="^(?!.*will grow).*All rows fit"),
]  # fmt: skip
MORE_OF_PLACES = [
    Remedy((_OF_1,), "", f"{_PIN}type=rowwise", '"(row_wise)"', f"{_PIN}type=row_wise", True),
    Remedy((_OF_1,), "", f"{_PIN}kernel=fast", '"(cached)"', f"{_PIN}kernel=cached", True),
    Remedy((_OF_1,), "", "--set sharding.pin.itme.type=row_wise", "Did you mean '(item)'", f"{_PIN}type=row_wise",
        True),
    Remedy((_OF_2,), "", f"{_PIN}ranks=[1,1]", r"needed ranks .* (each once)", f"{_PIN}ranks=[1]", True),
    Remedy((_OF_2,), "", f"{_PIN}ranks=[3]", "needed ranks from 0 to (1)", f"{_PIN}ranks=[1]", True),
    Remedy((f"{_OF_2} {_PIN}type=table_wise",), "", f"{_PIN}ranks=[0,1]", "needs (one rank)", f"{_PIN}ranks=[0]", True),
    Remedy((_OF_1,), "", f"{_PIN}slots=0", r"needed (1) or more", f"{_PIN}slots=9", True),
    Remedy((f"{_OF_1} {_PIN}slots=9",), "", f"{_PIN}kernel=device", "or more, of (a cache)", f"{_PIN}kernel=cached",
        True),
    Remedy(("plan --tables two.toml --ranks 2 --set sharding.pin.user.slots=9",), "",
        f"{_PIN}slots=8 {_PIN}ranks=[0] --set sharding.pin.user.ranks=[0]",
        "or (other ranks) or types", f"{_PIN}slots=8 {_PIN}ranks=[0] --set sharding.pin.user.ranks=[1]", True),
    Remedy(("plan --tables two.toml --ranks 1 --set sharding.pin.user.slots=9",), "", f"{_PIN}slots=8",
        "or other ranks or (types)", f"{_PIN}slots=8 {_PIN}type=row_wise", True),
    Remedy((_OF_2,), "", "--set sharding.device_bytes=[1000000000]", "needed (one), or",
        "--set sharding.device_bytes=1000000000", True),
    Remedy((_OF_2,), "", "--set sharding.device_bytes=[1000000000]", "or (one for each of 2 ranks)",
        "--set sharding.device_bytes=[1000000000,2000000000]", True),
    Remedy((_OF_1,), "", f"{_HOST}4000", "or (the cache less)", f"{_HOST}4000 --ratios 0.001", True),
    Remedy((_OF_1,), "", "--device-memory 1MB", r"or (--set train\.batch_size=\d+)"),
    Remedy((_OF_2,), "", "", r"give them more .* a larger (cache\.ratio)", "--set cache.ratio=1", wrong_code=0,
        leads_to="^(?!.*will grow).*nothing is ever evicted"),
    Remedy((_OF_2,), "", "", "or use (a smaller batch)", "--set train.batch_size=4", wrong_code=0,
        leads_to="^(?!.*will grow).*samples/s"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "command"),
    [*cases([*OF_TABLES, *OF_PLACES]), *cases([*MORE_OF_TABLES, *MORE_OF_PLACES], pytest.mark.matrix)],
)
def test_what_is_advised_of_tables_and_places_helps(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]):
    check(row, command, capsys)


_TRAIN = "train city.toml --run-dir new --set train.max_steps=1 --set train.batch_size=8"
_PLAN_1, _PLANNED = f"{_CITY} -o mine.json", f"{_TRAIN} --plan mine.json"
_STOCK = f"{_TRAIN} --plan copies.json --set cache.enabled=false"
_SGD = "--set {0}_optimizer.kind=sgd --set {0}_optimizer.lr=0.1"

#: Plans in the folder: one.json and two.json of so many ranks, nodes.json of two ranks on two nodes, many.json of 65,
#: copies.json with a copy of the table on each rank.
OF_RUNS = [
    Remedy((f"{_TRAIN} --plan two.json",), "", "--nproc 1", "(Start as many as it says)", LEFT_OUT, True,
        leads_to="2 ranks were started"),
    Remedy((f"{_TRAIN} --nproc 1",), "", "--plan two.json", r"plan for 1 \(embershard plan (--ranks 1 .*)\)",
        "--plan mine.json", True, first="plan city.toml --tables user.toml -o mine.json {}"),
    Remedy((f"{_TRAIN} --nproc 2",), "", "--plan nodes.json", r"plan for 2 \(embershard plan (--ranks 2 .*)\)",
        "--plan mine.json", True, leads_to="2 ranks were started",
        first="plan city.toml --tables user.toml -o mine.json --ranks-per-node 1 {}"),
    Remedy((_TRAIN,), "", "--plan many.json", "say (--nproc 65)", leads_to="65 ranks were started"),
    Remedy((_TRAIN,), "", "--plan user.toml", "(Give a file that embershard plan wrote)", "--plan one.json", True),
    *(
        Remedy((f"{_TRAIN} {settings}",), "", f"--plan {plan}", "(Plan again) with this run's config",
            "--plan mine.json", True, first=f"{_PLAN_1} {settings}")
        for plan, settings in (
            ("one.json", "--set data.table.features.user_id.num_rows=55"),
            ("other.json", "--set sharding.exchange=pooled"),
        )
    ),
    Remedy((f"{_TRAIN} --set sharding.pin.t_user_id.type=row_wise",), "", "--plan one.json", "(Plan again)",
        "--plan mine.json", True, first=f"{_PLAN_1} --set sharding.pin.t_user_id.type=row_wise"),
    Remedy((f"{_TRAIN} --set sharding.pin.t_user_id.type=row_wise",), "", "", r"train with it \((--plan) FILE",
        "--plan mine.json", first=f"{_PLAN_1} --set sharding.pin.t_user_id.type=row_wise"),
    Remedy((_STOCK,), "", "", r"needed '(sgd)' for both, with one lr",
        f"{_SGD.format('embedding')} {_SGD.format('dense')}"),
    Remedy((_TRAIN,), "", "--plan copies.json --set cache.enabled=false", r'these tables with kernel "(device)"',
        "--plan mine.json --set cache.enabled=false", True,
        first=f"{_PLAN_1} --device-memory 1GiB --set sharding.pin.t_user_id.kernel={{}}"),
    Remedy((_CITY.replace("tables user.toml", "profile two.csv"),), "", "", "Make one with `embershard (profile)`",
        "--profile city.npz", first="{} --config city.toml -o city.npz"),
    Remedy((f"{_PROFILED} --set data.table.features.user_id.num_rows=55",), "", "",
        "make the profile with embershard (profile --config) and this config", LEFT_OUT,
        first="{} city.toml --set data.table.features.user_id.num_rows=55 -o city.npz"),
]  # fmt: skip
MORE_OF_RUNS = [
    Remedy((_TRAIN,), "", "--plan nowhere.json", "(Give a file that embershard plan wrote)", "--plan one.json", True),
    Remedy((f"{_TRAIN} --set sharding.exchange=auto",), "", "",
        r"make a plan \(embershard plan (--set \S+)\) and train", "--plan mine.json", first=f"{_PLAN_1} {{}}"),
    *(
        Remedy((_TRAIN,), "", "--set sharding.exchange=auto", f'needed.*"({name})"', f"--set sharding.exchange={name}",
            True)
        for name in ("pooled", "rows")
    ),
    Remedy((_TRAIN,), "", "--plan one.json --set sharding.mode=data_parallel", "(Remove one)", "--plan one.json", True),
    Remedy((_STOCK,), "", "", "Or (train with a cache)", "--set cache.enabled=true"),
    Remedy((f"{_TRAIN} --nproc 1",), "", "--set sharding.device_bytes=[1,2]", "needed (one), or",
        "--set sharding.device_bytes=100000000", True),
    Remedy((_CITY.replace("tables user.toml", "profile old.npz"),), "", "", "make it with embershard (profile)",
        "--profile city.npz", first="{} --config city.toml -o city.npz"),
]  # fmt: skip


def _start(num_ranks: int, module: str, *, job: Job, **options: object) -> int:
    """In place of `start_ranks`: one rank trains here, several are only counted."""
    if num_ranks == 1:
        return start_here(num_ranks, module, job=job, **options)
    print(f"{num_ranks} ranks were started")
    return 0


@cache
def _planned(folder: Path) -> Path:
    """Make the plans, and a profile."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in ("city.toml", "city.csv", "user.toml", "tables.toml"):
            Path(name).write_text(str(FILES[name]))
        for name, words in (
            ("one", "--ranks 1"), ("two", "--ranks 2"), ("nodes", "--ranks 2 --ranks-per-node 1"),
            ("many", "--ranks 65"), ("copies", "--ranks 1 --replicate-rows 999"),
        ):  # fmt: skip
            assert cli.main(f"plan city.toml --tables user.toml -o {name}.json {words}".split()) == 0
        assert cli.main(["plan", "--tables", "tables.toml", "--ranks", "1", "-o", "other.json"]) == 0
        assert cli.main(["profile", "--config", "city.toml", "-o", "city.npz"]) == 0
        FrequencyProfile.count([{"t_user_id": torch.tensor([1, 2])}], {"t_user_id": 99}).save("old.npz")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("row", "command"), [*cases(OF_RUNS), *cases(MORE_OF_RUNS, pytest.mark.matrix)])
def test_what_is_advised_of_runs_with_plans_helps(
    row: Remedy,
    command: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr("embershard.commands.train.run.lock_run_dir", lambda _: None)  # it holds until a process ends
    monkeypatch.setattr(launcher, "start_ranks", _start)
    shutil.copytree(_planned(tmp_path_factory.getbasetemp() / "plans"), ".", dirs_exist_ok=True)
    check(row, command, capsys)


_USER = {"table": "user", "rows": 90, "dim": 16, "dtype": "fp32", "sharding": "row_wise", "kernel": "cached",
    "ranks": [0, 1]}  # fmt: skip
_ITEM = {**_USER, "table": "item", "sharding": "table_wise", "ranks": [0]}
_COPIED = {**_USER, "table": "city", "rows": 9, "sharding": "data_parallel", "kernel": "replicated", "ranks": []}
_TABLES = [_USER, _ITEM, _COPIED]
_OF_USER_0 = {"rank": 0, "tables": ["user"], "sharding": "row_wise", "dim": 16, "slots": 9}
_OF_USER_1 = {**_OF_USER_0, "rank": 1}
_OF_ITEM = {**_OF_USER_0, "tables": ["item"], "sharding": "table_wise"}
_POOLS = [_OF_USER_0, _OF_USER_1, _OF_ITEM]
_PLAN_FILE: dict[str, Any] = {"format": 1, "world_size": 2, "ranks_per_node": 2, "batch_size": 64, "device": "cpu",
    "device_memory_bytes": None, "host_memory_bytes": None, "settings": {}, "tables": _TABLES, "pools": _POOLS,
    "memory_bytes_by_rank": []}  # fmt: skip
_CUT = {**_ITEM, "sharding": "column_wise", "dim": 4}
_WHOLE_CITY = {**_ITEM, "table": "city"}
_LARGE = {**_ITEM, "rows": 3 * 2**30}


@pytest.mark.parametrize("row", [
    Remedy(("plan --calibrate --ranks 1 --quick",), "", "", r"needs (-o) FILE\.toml", "{} machine.toml"),
    Remedy(("plan --calibrate --quick -o machine.toml",), "", "--ranks 0", "needed numbers (above 0)", "--ranks 1",
        True),
])  # fmt: skip
def test_what_is_advised_of_calibrations_helps(
    row: Remedy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Up to the measurement, which tests of calibrations make."""
    asked = list[tuple[object, ...]]()
    monkeypatch.setattr(calibrate, "run_calibration", lambda *words, quick: asked.append((*words, quick)))
    check(row, row.commands[0], capsys)
    assert asked == [([1], Path("machine.toml"), True)]


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
    Edit({"tables.1": {**_CUT, "ranks": [0, 1]}}, "ranks, (another sharding type)", {}),
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
    plan = copy.deepcopy(_PLAN_FILE)
    for place, value in places.items():
        *above, last = (int(key) if key.isdigit() else key for key in place.split("."))
        inside: Any = plan
        for key in above:
            inside = inside[key]
        inside[last] = value
    return json.dumps(plan)


def _check_file(command: str, wrong: str, said: str, right: str | None, place: str, capsys: pytest.CaptureFixture[str]):
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


_DIFF, _DRY_RUN = "plan diff plan.json mine.json", "train city.toml --dry-run --plan mine.json"


@pytest.mark.parametrize(
    ("command", "edit"), [*((_DIFF, edit) for edit in EDITS), *(matrix(_DRY_RUN, edit) for edit in EDITS)]
)
def test_a_plan_is_mended_as_its_message_says(command: str, edit: Edit, capsys: pytest.CaptureFixture[str]):
    right = None if edit.right is None else _plan_with(edit.right)
    _check_file(command, _plan_with(edit.wrong), edit.said, right, next(iter(edit.wrong)), capsys)


@pytest.mark.parametrize(("text", "said"), TEXTS)
def test_a_text_is_mended_as_its_message_says(text: str, said: str, capsys: pytest.CaptureFixture[str]):
    wrong = _plan_with({}).replace(_RIGHT_TEXT, text)
    _check_file(_DIFF, wrong, said, _plan_with({}), "", capsys)
