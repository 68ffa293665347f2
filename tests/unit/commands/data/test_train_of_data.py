"""`embershard train FILE`: what options of `data inspect` say of columns holds here, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embershard.commands import cli
from embershard.settings.decoding import tomllib

ROWS = 60


@pytest.fixture(autouse=True)
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Visits to a shop, whose result is one of two texts."""
    monkeypatch.chdir(tmp_path)
    lines = [f"v{n % 9};{20 + n % 40};{'returned' if n % 3 else 'kept'}" for n in range(ROWS)]
    Path("shop.csv").write_text("\n".join(["visitor;amount;outcome", *lines, ""]))


def settings(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the settings of the data's columns, by which a training of the shop's visits would begin."""
    assert cli.main(["train", "shop.csv", "--dry-run", "--log-format", "json", *words]) == 0
    found: dict[str, Any] = tomllib.loads(capsys.readouterr().out)["data"]["table"]
    return found


@pytest.mark.parametrize(
    ("words", "label"),
    [
        (["--label", "outcome=returned"], ("outcome", "returned", None)),
        (["--label", "outcome=returned", "--separator", ";", "--header"], ("outcome", "returned", None)),
        (
            ["--set", "data.table.label=outcome", "--set", "data.table.label_is=returned"],
            ("outcome", "returned", None),
        ),
        (["--label", "amount>=30"], ("amount", None, 30.0)),
        (["--set", "data.table.label=amount"], ("amount", None, None)),
        (["--label", "outcome"], ("outcome", "kept", None)),  # the rarer
        (["--set", "data.table.label=outcome"], ("outcome", "kept", None)),
    ],
)
def test_the_label_can_be_named(words, label, capsys):
    table = settings(capsys, *words)
    assert (table["label"], table.get("label_is"), table.get("label_at_least")) == label


def test_columns_are_what_options_say(capsys):
    features = settings(capsys, "--label", "outcome", "--category", "amount", "--drop", "visitor")["features"]
    assert {name: each["kind"] for name, each in features.items()} == {"amount": "sparse"}


@pytest.mark.slow
def test_a_run_begins_with_these_options_and_keeps_them(one_rank_here, capsys):
    """It says which of two texts is 1. The same command goes on; other options have no effect, and are refused."""
    run = ["train", "shop.csv", "--run-dir", "run", "--set", "train.max_steps=1", "--set", "train.device=cpu"]
    assert cli.main([*run, "--label", "outcome"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 where it is 'kept', as are 33.3%; --label COL=TEXT takes 'returned'" in said
    first = Path("run/inspected.toml").read_text()
    assert first.startswith("# embershard data inspect shop.csv --label outcome\n")
    assert tomllib.loads(Path("run/config.toml").read_text())["data"]["table"]["label_is"] == "kept"
    for words in (["--label", "outcome"], []):
        assert cli.main([*run, *words, "--resume", "--dry-run"]) == 0
        assert Path("run/inspected.toml").read_text() == first
    capsys.readouterr()
    assert cli.main([*run, "--resume", "--dry-run", "--label", "amount>=30"]) == 2
    assert "--label: the run began with other options of columns" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["shop.xlsx", "shop.avro", "shop.orc"])
def test_of_files_of_other_programs_it_says_what_inspect_says(name, capsys):
    """They are no settings."""
    Path(name).write_bytes(b"PAR1\x00\xff" * 30)
    assert cli.main(["data", "inspect", name]) == 2
    said = capsys.readouterr().err
    assert cli.main(["train", name, "--dry-run"]) == 2
    assert capsys.readouterr().err == said


def test_options_of_columns_need_data(capsys):
    Path("run.toml").write_text("[train]\nepochs = 1\n")
    assert cli.main(["train", "run.toml", "--label", "outcome"]) == 2
    assert "--label is of data, and run.toml has settings" in capsys.readouterr().err


def test_the_same_settings_train_on_as_many_ranks_from_data_and_from_a_file(monkeypatch, capsys):
    """Batches are so small that more ranks gain nothing; who wants more says so."""
    started: list[int] = []
    monkeypatch.setattr("embershard.launch.launcher.start_ranks", lambda count, *_, **__: started.append(count) or 0)
    Path("run").mkdir()
    assert cli.main(["train", "shop.csv", "--label", "outcome", "--run-dir", "run"]) == 0
    assert "starting 1 rank, since batches of 16 samples gain nothing from more (--nproc N" in capsys.readouterr().err
    assert cli.main(["train", "run/inspected.toml"]) == 0
    assert cli.main(["train", "run/inspected.toml", "--nproc", "2"]) == 0
    assert cli.main(["train", "run/inspected.toml", "--set", "train.global_batch_size=1024"]) == 0
    assert started[:3] == [1, 1, 2]
    assert started[3] >= 1
    assert "gain nothing" not in capsys.readouterr().err.splitlines()[-1]
