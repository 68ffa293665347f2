"""`RunFolder`: the folder of a run, as reports read it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from embershard.decoding import flat, read_toml
from embershard.errors import ConfigError
from embershard.launch.config import METRICS, RUN_CONFIG
from embershard.planning.verify.measured import MeasuredRun
from embershard.sharding.plan import Plan
from embershard.stages import STAGES_ENDING, TRACES

_RESULT = "result.json"


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    Attributes:
        path: of the folder.
        result: contents of result.json; empty where the run has not ended.
    """

    path: Path
    result: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Read the folder of a run that ended.

        Raises:
            ConfigError: there is no result, or it cannot be read.
        """
        file = path / _RESULT
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            what = "the run has not ended, or it failed" if path.is_dir() else "there is no such folder"
            raise ConfigError(f"{file}: not found; {what}. Give the --run-dir of a run that ended.") from error
        except ValueError as error:
            raise ConfigError(f"{file}: cannot be read ({error}). Needed is what embershard train wrote.") from error
        if not isinstance(result, dict):
            raise ConfigError(f"{file}: got a JSON {type(result).__name__}, needed what embershard train wrote.")
        return cls(path, result)

    @classmethod
    def read_begun(cls, path: Path) -> RunFolder:
        """Read the folder of a run that ended or has at least begun to report.

        Raises:
            ConfigError: as `read`, where the run has not even begun.
        """
        if (path / METRICS).exists() and not (path / _RESULT).exists():
            return cls(path, {})
        return cls.read(path)

    def plan(self, given: Path | None) -> Plan:
        """Return the plan to compare with: the run's own unless another one is given."""
        if given is not None:
            return Plan.load(given)
        if not self.has_plan:
            raise ConfigError(
                f"{self.path} was trained without a plan, so nothing was predicted. Train with one (embershard train "
                "--plan FILE), or name a plan to compare with (--plan FILE)."
            )
        return Plan.load(self.path / "plan.json")

    @property
    def has_plan(self) -> bool:
        """True where the run obeyed a plan."""
        return (self.path / "plan.json").exists()

    def other_settings(self, plan: Plan) -> list[str]:
        """Return the settings that differ from those that the plan's prediction assumed, as sentences.

        Raises:
            ConfigError: its config.toml is missing, or of another version.
        """
        from embershard.launch.config import load_config
        from embershard.training.config import RunConfig  # loads torch

        config = load_config(RunConfig, self.path / RUN_CONFIG, trust_code=True)  # which nothing here imports
        return plan.other_settings(config.predicted_from(self.result.get("device"), self.result.get("world_size", 1)))

    def settings(self) -> dict[str, Any]:
        """Return the run's settings by `section.key`, as its config.toml has them.

        Raises:
            ConfigError: the file is missing, or is not TOML.
        """
        return flat(read_toml(self.path / RUN_CONFIG))

    def reports(self, kind: str) -> list[dict[str, Any]]:
        """Return the reports of a kind from metrics.jsonl, read once, in their order, without damaged lines."""
        return [report for report in self._reports if report["kind"] == kind]

    @cached_property
    def _reports(self) -> list[dict[str, Any]]:
        try:
            lines = (self.path / METRICS).read_bytes().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                report = json.loads(line)
                if isinstance(report["kind"], str) and isinstance(report["step"], int):
                    found.append(report)
        return found

    @cached_property
    def stages(self) -> list[dict[str, Any]]:
        """Return the stage times of each rank that `--profile-steps` traced, as `mean_stages` makes them."""
        found = []
        for file in sorted((self.path / TRACES).glob(f"rank_*{STAGES_ENDING}")):
            with contextlib.suppress(OSError, ValueError):
                found.append(json.loads(file.read_bytes()))
        return found

    def num_checkpoints(self, run: MeasuredRun) -> int:
        """Return the checkpoints written in the counted steps."""
        return sum(report["step"] > run.all_steps - run.steps for report in self.reports("checkpoint"))


def is_sweep(path: Path) -> bool:
    """Return whether a folder is that of a sweep; one that cannot be read is not."""
    return os.path.isdir(path / "states")
