"""What became of the runs of a sweep: kept in a file each, found again, and set aside."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from embershard.errors import ConfigError, naming_file
from embershard.run_result import RESULT, RunResult
from embershard.sweeps.experiments import Experiment
from embershard.whole_file import whole_file

Status = Literal["finished", "failed", "timed out", "interrupted"]
_RUNS, _STATES, _OUTPUTS = "runs", "states", "outputs"


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        varied: as in `Experiment`.
        status: how it ended.
        reason: why it did not finish; else empty.
        seconds: from its start to its end.
        started_at: UTC, in ISO format.
        attempt: 1, or more where earlier attempts were interrupted or failed.
        group: as in `Experiment`; empty in files of earlier versions.
    """

    name: str
    digest: str
    repeat: int
    ranks: int
    varied: Mapping[str, Any]
    status: Status
    reason: str
    seconds: float
    started_at: str
    attempt: int
    group: str = ""


#: What an engine of a sweep calls when it starts an experiment or hands it over, and with each outcome.
Begin = Callable[[Experiment], None]
End = Callable[[Outcome], None]


def run_folder(sweep: Path, name: str) -> Path:
    """Return the folder of a run."""
    return sweep / _RUNS / name


def output_of(sweep: Path, name: str) -> Path:
    """Return the file of what a run printed."""
    return sweep / _OUTPUTS / f"{name}.txt"


def _state_of(sweep: Path, name: str) -> Path:
    return sweep / _STATES / f"{name}.json"


def find_outcome(experiment: Experiment, sweep: Path) -> Outcome | None:
    """Return what became of an experiment; None where it has not ended.

    A run whose sweep was killed before it could note the end has its result (`RunResult.find`), and counts as finished.

    Raises:
        ConfigError: what was noted cannot be read.
    """
    outcome, folder = _read(_state_of(sweep, experiment.name)), run_folder(sweep, experiment.name)
    if outcome is None and RunResult.find(folder) is not None:
        started, ended = ((folder / name).stat().st_mtime for name in ("config.toml", RESULT))
        attempt = 1 + max(_earlier(folder), default=0)
        outcome = make_outcome(experiment, "finished", "", started_at=started, seconds=ended - started, attempt=attempt)
        keep_outcome(outcome, sweep)
    now = (experiment.varied, experiment.group)
    if outcome is not None and (outcome.varied, outcome.group) != now:  # the sweep's file varies other settings now
        outcome = dataclasses.replace(outcome, varied=dict(experiment.varied), group=experiment.group)
        keep_outcome(outcome, sweep)
    return outcome


def read_outcomes(sweep: Path) -> list[Outcome]:
    """Return what became of all runs of a sweep's folder that ended, in the order of their starts."""
    found = [outcome for path in (sweep / _STATES).glob("*.json") if (outcome := _read(path)) is not None]
    return sorted(found, key=lambda outcome: outcome.started_at)


def make_outcome(
    experiment: Experiment, status: Status, reason: str, *, started_at: float, seconds: float, attempt: int
) -> Outcome:
    """Return what became of an experiment; `started_at` in seconds since 1970."""
    named = {name: getattr(experiment, name) for name in ("name", "digest", "repeat", "ranks", "group")}
    return Outcome(
        **named,
        varied=dict(experiment.varied),
        status=status,
        reason=reason,
        seconds=round(seconds, 3),
        started_at=datetime.fromtimestamp(started_at, timezone.utc).isoformat(timespec="milliseconds"),
        attempt=attempt,
    )


def begin_attempt(sweep: Path, name: str) -> int:
    """Set aside what earlier attempts at a run left, its outcome too; return the number of this attempt."""
    folder, output = run_folder(sweep, name), output_of(sweep, name)
    with naming_file(sweep):
        for path in (folder, output):
            path.parent.mkdir(parents=True, exist_ok=True)
        _state_of(sweep, name).unlink(missing_ok=True)  # first: a sweep that is killed here starts the run again
        return 1 + max(_set_aside(folder), _set_aside(output))


def _set_aside(path: Path) -> int:
    """Rename what an earlier attempt left; return the number of attempts before this one."""
    earlier = max(_earlier(path), default=0)
    if path.exists():
        earlier += 1
        path.rename(path.with_name(f"{path.name}.aside-{earlier}"))
    return earlier


def _earlier(path: Path) -> list[int]:
    """Return the numbers of the attempts that were set aside."""
    numbers = [found.name.rpartition("-")[2] for found in path.parent.glob(f"{path.name}.aside-*")]
    return [int(number) for number in numbers if number.isdecimal()]


def _read(path: Path) -> Outcome | None:
    try:
        return Outcome(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{path}: cannot be read ({error}). Remove it: its run counts as finished if it has a whole result.json, "
            "and is trained again otherwise."
        ) from error


def keep_outcome(outcome: Outcome, sweep: Path) -> None:
    """Keep what became of a run. One that was interrupted has not ended: nothing is kept, and the next sweep starts it
    again."""
    if outcome.status == "interrupted":
        return
    path = _state_of(sweep, outcome.name)
    with naming_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        partial.write_text(json.dumps(dataclasses.asdict(outcome)), encoding="utf-8")
