"""The command `embershard plan replan`: what it says, what it writes, and how it refuses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from embershard.commands import cli
from embershard.frequency import FrequencyProfile
from embershard.frequency.collect import Collector, count_part
from embershard.models import table_name
from embershard.planning.cost.topology import load_topology, save_topology
from embershard.sharding.plan import Plan
from tests.unit.planning.traces import skewed

pytestmark = [pytest.mark.extra, pytest.mark.slow]

ROWS = {"a": 9000, "b": 6000, "c": 3000, "d": 2000}
#: Lookups of a sample, before and after.
THEN, NOW = {"a": 12, "b": 12, "c": 1, "d": 1}, {"a": 12, "b": 1, "c": 12, "d": 12}
SAMPLES = 600
CONFIG = f"""
[data]
kind = "parquet"
path = "nowhere"
[data.parquet]
sparse = {list(ROWS)}
num_rows = {list(ROWS.values())}
dense = ["x"]
[model]
embedding_dim = 64
dense_arch_layer_sizes = [16, 64]
over_arch_layer_sizes = [8, 1]
[cache]
ratio = 0.2
[look_ahead]
lookahead = 8
[train]
batch_size = 50
"""
TABLES = """
samples = 1_000_000_000
[tables]
a = { rows = 4_000_000, lookups = 40 }
b = { rows = 3_000_000, lookups = 40 }
c = { rows = 2_000_000, lookups = 1 }
d = { rows = 1_000_000, lookups = 1 }
[model]
embedding_dim = 128
dense_arch_layer_sizes = [64, 128]
over_arch_layer_sizes = [64, 1]
[train]
batch_size = 65536
"""


def write_profile(path: Path, lookups: dict[str, int]) -> None:
    rows = {table_name(name): count for name, count in ROWS.items()}
    collector = Collector(rows, max_lookups=10**9, memory_bytes=1 << 30)
    ids = [skewed(ROWS[name], SAMPLES * count, seed=ROWS[name]) for name, count in lookups.items()]
    collector.add(count_part(list(rows.values()), ids, list(lookups.values()), SAMPLES, read_seconds=1e-3))
    found = collector.finish(share_of_samples=1.0)
    FrequencyProfile.of_sparse(rows, found.counts, 1, found.statistics).save(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with settings, two profiles, a machine without overhead and a plan by the first profile."""
    folder = tmp_path_factory.mktemp("replan")
    (folder / "run.toml").write_text(CONFIG)
    write_profile(folder / "old.npz", THEN)
    write_profile(folder / "new.npz", NOW)
    machine = load_topology("cpu")
    fast = replace(machine.assumptions, step_overhead_seconds=0.0)
    save_topology(replace(machine, name="fast", assumptions=fast), folder / "fast.toml")
    words = ["--config", folder / "run.toml", "--profile", folder / "old.npz", "--topology", folder / "fast.toml"]
    assert cli.main(["plan", *map(str, words), "--ranks", "2", "--effort", "0.03", "-o", str(folder / "old.json")]) == 0
    return folder


def given(files: Path, *more: str, profile: str = "new.npz") -> list[str]:
    words = ["--config", str(files / "run.toml"), "--profile", str(files / profile)]
    return ["plan", "replan", str(files / "old.json"), *words, "--topology", str(files / "fast.toml"),
            "--effort", "0.03", *more]  # fmt: skip


def said(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    capsys.readouterr()
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> str:
    capsys.readouterr()
    assert cli.main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("embershard: ")
    return told


@pytest.mark.smoke
def test_the_best_choice_is_told_and_written(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new.json"
    text = said(capsys, given(files, "--storage", "1GB/s", "--steps", "100000", "-o", str(file)))
    old, new = Plan.load(files / "old.json"), Plan.load(file)
    assert old.tables != new.tables
    assert new.prediction is not None
    assert old.prediction is not None
    for expected in (
        "The old plan: what it told, and what it would do now",
        f"│told │ {old.prediction.step_seconds * 1e3:>7.2f} │",
        "Tables that drifted most: then, and now",
        "To stay, and to change",
        "│ stay ",
        "│ the best plan ",
        f"{new.prediction.step_seconds * 1e3:.2f} │",
        "Tables that move most in row ",
        "From rank to rank in row ",
        "Best for 100,000 steps: row ",
        "Not counted: the start of processes",
        "Note: The speed of fast is an estimate",
        f"Written to {file}. Go on with it:  ",
        f"--config {files / 'run.toml'} --plan {file} --nproc 2 --resume --run-dir RUN",
    ):
        assert expected in text, expected
    assert new.made_from["command"].startswith("embershard plan replan ")
    assert new.settings == old.settings


@pytest.mark.smoke
def test_equal_data_stay(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "same.json"
    text = said(capsys, given(files, "-o", str(file), profile="old.npz"))
    assert "Stay: no plan was found that is faster by 0.5 % or more. No row moves." in text
    assert Plan.load(file).digest == Plan.load(files / "old.json").digest


def test_a_row_that_was_asked_for_is_written(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "row.json"
    text = said(capsys, given(files, "--take", "0", "-o", str(file)))
    assert re.search(r"In 6 steps the best plan saves .*: it pays if the change takes less\.", text), "of the run"
    assert "What a stop and a resume take is not told: the topology has no rate of a disk." in text
    assert Plan.load(file).tables == Plan.load(files / "old.json").tables
    assert "--take has no effect without -o" in refused(capsys, given(files, "--take", "0"))
    assert "needed a row of the table, 0 to " in refused(capsys, given(files, "--take", "99", "-o", str(file)))


def test_without_data_other_numbers_of_tables_are_the_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each GPU has much to do: beside a host that takes longer, all places are as fast."""
    (tmp_path / "tables.toml").write_text(TABLES)
    words = ["--tables", str(tmp_path / "tables.toml"), "--topology", "h100x8", "--effort", "0.03"]
    old = str(tmp_path / "old.json")
    assert cli.main(["plan", *words, "--ranks", "4", "-o", old]) == 0
    drift = ["--set", "tables.a.lookups=1", "--set", "tables.c.lookups=40", "--set", "tables.d.lookups=40"]
    pays = ["--resume-seconds", "1", "--steps", "1000000000", "-o", str(tmp_path / "new.json")]
    text = said(capsys, ["plan", "replan", old, *words, *drift, *pays])
    assert "Best for 1,000,000,000 steps: row " in text
    assert f"Written to {tmp_path / 'new.json'}.\n" in text, "no command trains without data"
    assert Plan.load(tmp_path / "new.json").tables != Plan.load(old).tables
    small = [*drift, "--set", "train.batch_size=64", *pays[:4]]
    assert "Stay: no plan was found that is faster by 0.5 % or more." in said(
        capsys, ["plan", "replan", old, *words, *small]
    )


def test_what_the_old_plan_might_choose_from_the_new_one_may(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its types, copies among them."""
    small = "e = { rows = 300, lookups = 10 }\nf = { rows = 200, lookups = 10 }\n[model]"
    (tmp_path / "tables.toml").write_text(TABLES.replace("[model]", small))
    words = ["--tables", str(tmp_path / "tables.toml"), "--topology", "h100x2x2", "--effort", "0.03"]
    old, types = str(tmp_path / "old.json"), "table_wise,row_wise,column_wise,data_parallel"
    assert cli.main(["plan", *words, "--ranks", "4", f"--types={types}", "-o", old]) == 0
    assert copied(Plan.load(old)) == {"c", "d", "e", "f"}
    pays = ["--resume-seconds", "1", "--steps", "1000000000", "-o", str(tmp_path / "new.json")]
    said(capsys, ["plan", "replan", old, *words, "--set", "tables.c.lookups=40", *pays])
    assert copied(Plan.load(tmp_path / "new.json")) - {"d"} == {"e", "f"}
    command = Plan.load(tmp_path / "new.json").made_from["command"]
    assert command.endswith(f" --types {types}"), "the next replan may, too"
    other = [*words, "--types", "table_wise", "--set", "tables.c.lookups=40", *pays]
    said(capsys, ["plan", "replan", old, *other])
    assert Plan.load(tmp_path / "new.json").made_from["command"].count("--types") == 1


def copied(plan: Plan) -> set[str]:
    return {table.table for table in plan.tables if table.kernel == "replicated"}


def test_a_run_whose_settings_differ_is_told(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, given(files, "--set", "look_ahead.lookahead=4", "--resume-seconds", "1"))
    assert "Note: look_ahead.lookahead is 4; the plan's prediction assumed 8" in text


def test_what_is_missing_or_of_another_model_is_refused(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other.json"
    assert "which plan is best is not told" in refused(capsys, given(files, "-o", str(file)))
    assert not file.exists()
    alone = ["plan", "replan", str(files / "old.json")]
    assert "needs the run's settings and a new profile" in refused(capsys, alone)
    same = given(files, "-o", str(files / "new.npz"))
    assert "the plan is made from this file" in refused(capsys, same)
    other = CONFIG.replace(str(ROWS["a"]), "9001")
    (tmp_path / "run.toml").write_text(other)
    words = [str(tmp_path / "run.toml") if word == str(files / "run.toml") else word for word in given(files)]
    assert "table 't_a': the config's data have 9,001 rows, the profile has 9,000 rows" in refused(capsys, words)
    wide = given(files, "--set", "model.embedding_dim=32", "--set", "model.dense_arch_layer_sizes=[16,32]")
    told = refused(capsys, wide)
    assert told.startswith(f"embershard: {files / 'old.json'}: table 't_a' has 9,000 rows x 64 fp32 in the plan")
    gpu = [word if word != str(files / "fast.toml") else "h100x8" for word in given(files)]
    assert "the old plan is for 'cpu' and the topology is of kind 'cuda'" in refused(capsys, gpu)


@pytest.mark.parametrize("option", ["--storage=0", "--storage=fast", "--resume-seconds=-1", "--effort=x", "--steps=0"])
def test_what_no_option_can_be_is_refused(files: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit):
        cli.main(given(files, option))
    assert f"argument {option.partition('=')[0]}: got " in capsys.readouterr().err


def test_devices_that_are_smaller_now_are_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A placement cannot stay where its rows do not fit any more, whatever its plan's limits were."""
    (tmp_path / "t.toml").write_text(TABLES.replace("4_000_000", "60_000_000"))
    words = ["--tables", str(tmp_path / "t.toml"), "--effort", "0.03"]
    kept = ["--set", "cache.enabled=false"]
    old = tmp_path / "old.json"
    assert cli.main(["plan", *words, *kept, "--topology", "h100x2", "--ranks", "2", "--types", "table_wise",
                     "-o", str(old)]) == 0  # fmt: skip
    text = refused(capsys, ["plan", "replan", str(old), *words, *kept, "--topology", "l4x2"])
    assert re.search(r"rank \d .*may use .*are missing\. It cannot stay\. Plan anew", text), text
    assert cli.main(["plan", "replan", str(old), *words, *kept, "--topology", "h200x2"]) == 0
