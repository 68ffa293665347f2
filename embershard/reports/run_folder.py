"""`RunFolder`: the folder of a run, as reports read it."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from embershard.errors import ConfigError
from embershard.reports.start import Start
from embershard.run_result import RESULT, RunResult
from embershard.settings.decoding import flat, read_toml
from embershard.settings.files import CURVES, METRICS, RUN_CONFIG
from embershard.sharding.plan import Plan
from embershard.stages import STAGES_ENDING, TRACES

#: Entries of a label's curves, and of a file of stages.
_CURVES = {"roc", "precision_recall", "reliability", "histogram"}
_STAGES = {"rank", "steps", "training", "beside", "between_ranks"}


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    Attributes:
        path: of the folder.
        result: None where the run has not ended.
    """

    path: Path
    result: RunResult | None

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Read the folder of a run that ended.

        Raises:
            ConfigError: there is no result, or it cannot be read.
        """
        return cls(path, RunResult.read(path))

    @classmethod
    def read_begun(cls, path: Path) -> RunFolder:
        """Read the folder of a run that ended or has at least begun to report.

        Raises:
            ConfigError: as `read`, where the run has not even begun.
        """
        if (path / METRICS).exists() and not (path / RESULT).exists():
            return cls(path, None)
        return cls.read(path)

    def plan(self, given: Path | None, *, may_be_others: bool = True) -> Plan:
        """Return the plan to compare with: the run's own unless another one is given.

        Args:
            may_be_others: a plan that the run did not obey would do, too.

        Raises:
            ConfigError: the run has none.
        """
        if given is not None:
            return Plan.load(given)
        if not self.has_plan:
            other = ", or name a plan to compare with (--plan FILE)" if may_be_others else ""
            raise ConfigError(
                f"{self.path} was trained without a plan, so nothing was predicted. Train with one (embershard train "
                f"--plan FILE){other}."
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
        from embershard.settings.files import load_config
        from embershard.training.config import RunConfig  # loads torch

        assert self.result is not None, "the run has ended"
        config = load_config(RunConfig, self.path / RUN_CONFIG, trust_code=True)  # which nothing here imports
        return plan.other_settings(config.predicted_from(self.result.device, self.result.world_size))

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
    def starts(self) -> list[Start]:
        """Return the starts of the run, in their order."""
        return Start.read(self.path)

    @cached_property
    def first_time(self) -> str | None:
        """Return the time of the start, or that of the first report, as it stands there."""
        times = [start.time for start in self.starts] + [str(each["time"]) for each in self._reports if "time" in each]
        return times[0] if times else None

    @cached_property
    def curves(self) -> dict[str, dict[str, Any]]:
        """Return the curves of each label at the last evaluation; none where the file is missing or damaged."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            labels = json.loads((self.path / CURVES).read_bytes())["labels"]
            return {label: each for label, each in labels.items() if each.keys() >= _CURVES}
        return {}

    @cached_property
    def stages(self) -> list[dict[str, Any]]:
        """Return the stage times of each rank that `--profile-steps` traced, as `mean_stages` makes them."""
        found = []
        for file in sorted((self.path / TRACES).glob(f"rank_*{STAGES_ENDING}")):
            with contextlib.suppress(OSError, ValueError):
                stages = json.loads(file.read_bytes())
                if isinstance(stages, dict) and stages.keys() >= _STAGES:
                    found.append(stages)
        return found

    def num_checkpoints(self, run: RunResult) -> int:
        """Return the checkpoints written in the counted steps."""
        return sum(report["step"] > run.resumed_at for report in self.reports("checkpoint"))


def is_sweep(path: Path) -> bool:
    """Return whether a folder is that of a sweep; one that cannot be read is not."""
    return os.path.isdir(path / "states")
