"""The arguments of `embershard train` that a warm start has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embershard.commands.train import command
from embershard.commands.train.warm_start import frozen_overrides, warm_start_of, words_of
from embershard.errors import ConfigError
from embershard.settings.files import load_config
from embershard.training.config import RunConfig
from embershard.training.warm_start import WarmStart

CONFIG = "examples/quickstart.toml"


def parsed(*words: str) -> Any:
    return command._parser(starts_ranks=True).parse_intermixed_args([CONFIG, *words])


def test_all_of_them() -> None:
    words = (
        "--from",
        "/runs/a",
        "--step",
        "best",
        "--map",
        "item=product",
        "--map",
        "t_b=t_c",
        "--without",
        "optimizer",
    )
    start = warm_start_of(parsed(*words, "--keep-steps"))
    assert start == WarmStart(
        Path("/runs/a"), "best", (("item", "product"), ("t_b", "t_c")), ("optimizer",), keep_steps=True
    )
    assert warm_start_of(parsed(*words_of(start))) == start
    assert warm_start_of(parsed("--from", "runs/a", "--step", "20")) == WarmStart(Path("runs/a").absolute(), 20)
    assert warm_start_of(parsed()) is None


@pytest.mark.parametrize(
    "words", [("--step", "3"), ("--map", "a=b"), ("--without", "a"), ("--keep-steps",)], ids=lambda words: words[0]
)
def test_what_has_no_effect_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=f"{words[0]} has no effect without --from"):
        warm_start_of(parsed(*words))


def test_a_resume_begins_with_its_checkpoint() -> None:
    with pytest.raises(ConfigError, match="--from and --resume"):
        warm_start_of(parsed("--from", "runs/a", "--resume", "--run-dir", "runs/b"))


@pytest.mark.parametrize("words", [("--map", "item"), ("--map", "=b"), ("--step", "newest")], ids=" ".join)
def test_what_cannot_be_read_is_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--from", "runs/a", *words)
    assert "needed" in capsys.readouterr().err


def test_tables_are_frozen_beside_those_of_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[model]\nfrozen = ["C1"]\n')
    overrides = frozen_overrides(parsed("--freeze", "C2", "--freeze", "C1"), load_config(RunConfig, file))
    assert load_config(RunConfig, file, overrides).model.frozen == ("C1", "C2")
    assert frozen_overrides(parsed(), load_config(RunConfig, file)) == []
