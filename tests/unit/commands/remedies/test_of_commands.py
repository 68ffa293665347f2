"""Messages of commands about their own words, and about the files of sweeps and plans."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.commands.remedies.table import FILES, LEFT_OUT, Remedy, cases, check, said_by

_SWEEP = 'config = "tiny.toml"\ngrid.cache.ratio = [0.3, 0.5]\n'
FILES |= {
    "sweep.toml": _SWEEP,
    "misplaced.toml": 'config = "tiny.toml"\ncache.ratio = 0.3\n',
    "placed.toml": 'config = "tiny.toml"\nset.cache.ratio = 0.3\n',
    "number.toml": 'config = "tiny.toml"\ngrid.cache.ratio = 0.3\n',
    "never.toml": f"repeats = 0\n{_SWEEP}",
    "once.toml": f"repeats = 1\n{_SWEEP}",
    "same.toml": 'config = "tiny.toml"\ngrid.cache.ratio = [0.3, 0.3]\n',
    "no_rows.toml": "[tables.C1]\nzipf = 1.0\n",
    "no_tables.toml": "samples = 100\n",
    "log.csv": "".join(f"{n % 5},{n % 7},{n % 2},pv,{1500000000 + n}\n" for n in range(60)),
}
_PLAN = "plan --tables tables.toml"

OF_COMMANDS = [
    Remedy(("sweep",), "", "misplaced.toml --dry-run", r"Did you mean (set\.cache) or grid\.cache",
        "placed.toml --dry-run", True),
    Remedy(("sweep",), "", "misplaced.toml --dry-run", r"or (grid\.cache)\?", "sweep.toml --dry-run", True),
    Remedy(("sweep",), "", "number.toml --dry-run", r"needed (a list)", "sweep.toml --dry-run", True),
    Remedy(("sweep",), "", "never.toml --dry-run", r"needed at least (1)", "once.toml --dry-run", True),
    Remedy(("sweep",), "", "same.toml --dry-run", r"(Remove one)", "sweep.toml --dry-run", True),
    Remedy(("sweep",), "", "seep.toml --dry-run", r"[dD]id you mean (\S+)\?", "sweep.toml --dry-run", True),
    Remedy(("sweep",), "", "two.csv --dry-run", r"(not TOML)", "sweep.toml --dry-run", True),
    Remedy(("sweep sweep.toml --dry-run",), "", "--by speed", r"needed .*(samples_per_second)",
        "--by samples_per_second", True),
    Remedy(("sweep sweep.toml --dry-run",), "", "--on kubernetes", r"a section (\[kubernetes\])", LEFT_OUT, True),
    Remedy(("",), "", "train sweep.toml --dry-run", r"embershard (sweep sweep\.toml)", "sweep sweep.toml --dry-run",
        True),
    Remedy(("train",), "", "sweep.toml --dry-run", r"in common is in (\S+)\.", "tiny.toml --dry-run", True),
    Remedy(("",), "", "trian tiny.toml", r"Did you mean (train)\?", "train tiny.toml --dry-run", True),
    Remedy(("",), "", "inspect city.csv", r"Did you mean embershard (data inspect)\?",
        "data inspect city.csv -o out.toml", True),
    Remedy(("train",), "", "--dry-run", r"or an example: (quickstart)", "quickstart --dry-run", True),
    Remedy(("train",), "", "quikstart --dry-run", r"[dD]id you mean '?(quickstart)", "quickstart --dry-run", True),
    Remedy(("train",), "", "tinny.toml --dry-run", r"[dD]id you mean '?(tiny.toml)", "tiny.toml --dry-run", True),
    Remedy(("train tiny.toml --dry-run",), "", "--drop city", r"(give the data) in place of the settings", LEFT_OUT,
        True),
    Remedy(("settings",), "", "--json-schema cache", r"(give no name)", "--json-schema", True),
    Remedy(("plan",), "", "city.csv", r"embershard (data inspect city.csv -o run.toml)", "run.toml", True,
        first="data inspect city.csv -o run.toml", leads_to="--profile is missing"),
    Remedy(("profile",), "", "-o out.npz", r"Give DATA .* or (--config)", "--config nowhere.toml -o out.npz", True,
        leads_to="Give an existing file"),
    Remedy(("data events",), "", "two.csv -o out.d", r"without a header: (user,item,category,behaviour,time)",
        "log.csv -o out.d", True),
    Remedy(("profile",), "", "synthetic -o out.npz --sample 2", r"for instance (0\.01)",
        "synthetic -o out.npz --sample 0.01 --hot x", True, leads_to="such as 4GiB"),
    Remedy(("train tiny.toml --dry-run",), "", "--profile-steps 5", r"for instance (20:25)", "--profile-steps 20:25",
        True),
    Remedy(("train tiny.toml --dry-run",), "", "--resume last", r"needed the (step)", "--run-dir new --resume", True),
    Remedy(("train tiny.toml --dry-run",), "", "--nproc 0", r"a whole number, (1) or more", "--nproc 1", True),
    Remedy(("train tiny.toml --dry-run",), "", "--unverified", r"without (--resume)",
        "--unverified --resume --run-dir new", True),
    Remedy(("data inspect city.csv -o out.toml",), "", "--bad-rows 2", r"for instance (0\.001)", "--bad-rows 0.001",
        True),
    Remedy(("data inspect city.csv -o out.toml",), "", "--encoding utf9", r'for instance "(latin-1)"',
        "--encoding latin-1", True),
    Remedy(("data inspect city.csv",), "", "-o nowhere/out.toml", r"(a folder that exists)", "-o out.toml", True),
    Remedy(("doctor",), "", "--set cache.ratio=1", r"(--config FILE)", "--config nowhere.toml --timeout x", True,
        leads_to="invalid float"),
]  # fmt: skip
OF_PLANS = [
    Remedy((_PLAN,), "", "--simulate --price 2", r"neither (--price)", "--ranks 2", True),
    Remedy((_PLAN,), "", "--target fast", r"for instance (5M/s)", "--ranks 1,2", True),
    Remedy((_PLAN,), "", "--ranks 4..2", r"for instance (1\.\.64)", "--ranks 1..2", True),
    Remedy((_PLAN,), "", "--ranks 1,2 -o out.json", r"give (one number of --ranks)", "--ranks 2 -o out.json", True),
    Remedy((_PLAN,), "", "--simulate --ratios 0.1,0.2", r"neither .* nor (several --ratios)", "--ratios 0.1,0.2", True),
    Remedy((_PLAN,), "", "--device-memory 1GB,2GB,3GB --ranks 2", r"needed (one), or",
        "--device-memory 1GB --ranks 2", True),
    Remedy((_PLAN,), "", "--device-memory lots", r"such as (4GiB)", "--device-memory 4GiB", True),
    Remedy((_PLAN,), "", "--set train.device=cpu --topology h200x8", r"or (--set train.device=auto)",
        "--set train.device=cpu", True),
    Remedy((_PLAN,), "", "--topology h200x9", r"use more nodes: (\S+)\.", "--topology h200x8", True),
    Remedy((_PLAN,), "", "--png out.svgg", r"ends in (\.png)", "--png out.png", True),
    Remedy((_PLAN,), "", "-o tables.toml", r"(give another one)", "-o out.json", True),
    Remedy((_PLAN,), "", "-o nowhere/out.json", r"(a folder that exists)", "-o out.json", True),
    Remedy((_PLAN,), "", "--topology h2000x8", r"Known are .*(h200)", "--topology h200x8 --ranks 2", True),
    Remedy((_PLAN,), "", "--ratios 2", r"in \(0, (1)\]", "--ratios 1"),
    Remedy((_PLAN,), "", "--ranks 3 --ranks-per-node 2", r"needed a multiple of (2)", "--ranks 2 --ranks-per-node 2"),
    Remedy((_PLAN,), "", "--effort 0", r"needed a number (above 0)", "--effort 0.1", True),
    Remedy((_PLAN,), "", "--types rowwise", r"needed some of .*(row_wise)", "--types row_wise", True),
    Remedy((_PLAN,), "", "--explain itme", r"Did you mean (item)", "--explain item", True),
    Remedy((_PLAN,), "", "--profile p.npz", r"takes no (--profile)", LEFT_OUT, True),
    Remedy((_PLAN,), "", "--price 2,3", r"needed one for each, or (one)", "--price 2 --ranks 1,2", True),
    Remedy(("plan",), "", "", r"give the numbers of its tables: (--tables tables.toml)"),
    Remedy(("plan --tables",), "", "no_rows.toml", r"rows is missing: (give it)", "tables.toml", True),
    Remedy(("plan --tables",), "", "no_tables.toml", r"(\[tables.item\]) with rows", "tables.toml", True),
    Remedy((_PLAN,), "", "--set model.arch=din --set model.target=[a] --set model.history=[b]", r"needed (dlrm)",
        "--set model.arch=dlrm", True),
]  # fmt: skip


@pytest.mark.parametrize(("row", "command"), cases(OF_COMMANDS))
def test_what_is_advised_of_commands_helps(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]):
    check(row, command, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "command"), cases(OF_PLANS))
def test_what_is_advised_of_plans_helps(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]):
    check(row, command, capsys)


def test_the_two_lines_that_are_advised_make_a_sweep_of_a_run(capsys: pytest.CaptureFixture[str]):
    code, said = said_by(["sweep", "tiny.toml"], capsys)
    assert code == 2, said
    found = re.search(r'give that: (config = "tiny.toml") (grid\.train\.seed = \[.*\])', said)
    assert found is not None, said
    Path("seeds.toml").write_text(f"{found[1]}\n{found[2]}\n")
    code, said = said_by(["sweep", "seeds.toml", "--dry-run"], capsys)
    assert (code, said.count("embershard train")) == (0, 3), said
