"""Machines that differ are refused on all ranks, with the rank, the setting or file, and the remedy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from embershard.data import DataConfig
from embershard.distributed import Ranks
from embershard.errors import ConfigError
from embershard.frequency.config import ProfileConfig
from embershard.sharding.config import ShardingConfig
from embershard.training.config import RunConfig
from embershard.training.fit import machines
from embershard.training.fit.machines import SeenByRank, check_machines


@dataclasses.dataclass(frozen=True)
class FirstOfTwoMachines(Ranks):
    """Rank 0 of two machines with a rank each; `other` is what the other rank finds, given what this one does."""

    other: Any = None

    def from_first(self, make: Any) -> Any:
        return make()

    def all_gather_objects(self, value: SeenByRank) -> list[SeenByRank]:
        return [value, self.other(value)]


def ranks(other: Any) -> FirstOfTwoMachines:
    return FirstOfTwoMachines(0, 2, 0, 1, torch.device("cpu"), other=other)


def test_machines_that_agree_leave_nothing_behind(tmp_path: Path) -> None:
    check_machines(RunConfig(), ranks(lambda first: first), tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_folder_that_another_machine_does_not_see(tmp_path: Path) -> None:
    def other(first: SeenByRank) -> SeenByRank:
        assert len(list(tmp_path.iterdir())) == 1  # what the other ranks look for
        return dataclasses.replace(first, host="b", has_folder=False)

    with pytest.raises(ConfigError, match=r"rank 1 on b does not see .*--run-dir on a file system that all machines"):
        check_machines(RunConfig(), ranks(other), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_mark_that_does_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(machines, "_leave_mark", lambda folder: folder / "elsewhere")
    with pytest.raises(ConfigError, match="does not see the run's folder"):
        check_machines(RunConfig(), ranks(lambda first: first), tmp_path)


def test_settings_that_differ() -> None:
    config = RunConfig()
    moved = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=5))

    def other(first: SeenByRank) -> SeenByRank:
        return dataclasses.replace(machines._look(moved, None), host="b")

    with pytest.raises(ConfigError, match=r"rank 1 on b: train.seed: 0 / 5. Give all ranks the same --config"):
        check_machines(config, ranks(other), None)


def test_paths_may_differ_but_not_whether_there_is_one() -> None:
    plans = [dataclasses.replace(RunConfig(), sharding=ShardingConfig(plan=plan)) for plan in ("a", "b", None)]
    one, same, none = (machines._look(plan, None) for plan in plans)
    assert machines.machines_problem([one, same], None) == ""
    assert 'sharding.plan: "a path" / none' in machines.machines_problem([one, none], None)


def clicks(folder: Path, text: str) -> RunConfig:
    folder.mkdir()
    (folder / "day").write_text(text)
    (folder / "profile.npz").write_text(text)
    return RunConfig(
        data=DataConfig(kind="criteo", path=str(folder / "day")),
        profile=ProfileConfig(path=str(folder / "profile.npz")),
    )


def test_files_that_differ(tmp_path: Path) -> None:
    config, other_config = clicks(tmp_path / "a", "0\t1\n"), clicks(tmp_path / "b", "0\t2\n")

    def other(first: SeenByRank) -> SeenByRank:
        return dataclasses.replace(machines._look(other_config, None), inputs=first.inputs | files)

    found = machines._look(other_config, None).inputs
    for key, message in (("data.files", "data.files: day: 4 bytes"), ("profile.contents", "profile.contents")):
        files = {key: found[key]}
        with pytest.raises(ConfigError, match=message):
            check_machines(config, ranks(other), None)


def test_a_file_that_is_missing_on_a_machine(tmp_path: Path) -> None:
    config = clicks(tmp_path / "a", "0\t1\n")

    def other(first: SeenByRank) -> SeenByRank:
        (tmp_path / "a" / "profile.npz").unlink()
        return dataclasses.replace(machines._look(config, None), host="b")

    with pytest.raises(ConfigError, match=r"rank 1 on b: .*profile.npz: No such file"):
        check_machines(config, ranks(other), None)


def test_one_machine_needs_no_agreement() -> None:
    alone = Ranks(0, 2, 0, 2, torch.device("cpu"))  # its collectives would fail: there is no group
    check_machines(RunConfig(), alone, Path("/nowhere"))
