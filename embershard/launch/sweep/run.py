"""One run of a sweep: started, limited in time, and what became of it kept in a file."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from embershard.distributed.supervision import end_with_parent
from embershard.errors import ConfigError, naming_file
from embershard.launch.sweep.experiments import Experiment, shown
from embershard.whole_file import whole_file

Status = Literal["finished", "failed", "timed out", "interrupted"]
_STOPPED = {0, 130, 143}  # in order, or at once, by a signal
_GRACE_SECONDS = 30.0
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

    @property
    def shown(self) -> str:
        """What the sweep varies, for people."""
        return shown(self.varied)


def run_folder(sweep: Path, name: str) -> Path:
    """Return the folder of a run."""
    return sweep / _RUNS / name


def read_result(sweep: Path, name: str) -> dict[str, Any]:
    """Return the contents of a run's result.json; empty where it has none that can be read."""
    try:
        found = json.loads((run_folder(sweep, name) / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def find_outcome(experiment: Experiment, sweep: Path) -> Outcome | None:
    """Return what became of an experiment; None where it has not ended.

    A run whose sweep was killed before it could note the end has its result, and counts as finished.

    Raises:
        ConfigError: what was noted cannot be read.
    """
    outcome, folder = _read(sweep / _STATES / f"{experiment.name}.json"), run_folder(sweep, experiment.name)
    if outcome is None and (folder / "result.json").exists():
        started, ended = ((folder / name).stat().st_mtime for name in ("config.toml", "result.json"))
        attempt = 1 + max(_earlier(folder), default=0)
        outcome = _outcome(experiment, "finished", "", ended - started, _utc(started), attempt)
        _keep(outcome, sweep)
    if outcome is not None and outcome.varied != experiment.varied:  # the sweep's file varies other settings now
        outcome = dataclasses.replace(outcome, varied=dict(experiment.varied))
        _keep(outcome, sweep)
    return outcome


def read_outcomes(sweep: Path) -> list[Outcome]:
    """Return what became of all runs of a sweep's folder that ended, in the order of their starts."""
    found = [outcome for path in (sweep / _STATES).glob("*.json") if (outcome := _read(path)) is not None]
    return sorted(found, key=lambda outcome: outcome.started_at)


def run_experiment(experiment: Experiment, sweep: Path, time_limit_seconds: float | None) -> Outcome:
    """Train in a process of its own, which dies with this one, and keep the outcome. Called in the main thread.

    What an earlier attempt left is set aside, never overwritten.
    """
    folder, output = run_folder(sweep, experiment.name), sweep / _OUTPUTS / f"{experiment.name}.txt"
    with naming_file(sweep):
        for path in (folder, output):
            path.parent.mkdir(parents=True, exist_ok=True)
        attempt = 1 + max(_set_aside(folder), _set_aside(output))
    started, started_at = time.monotonic(), _utc(time.time())
    with output.open("wb") as file:
        process = subprocess.Popen(
            _command(experiment, folder),
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            code = process.wait(time_limit_seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    has_result = (folder / "result.json").exists()
    status: Status = "failed"
    if code is None:
        status = "timed out"
    elif code in _STOPPED:
        status = "finished" if code == 0 and has_result else "interrupted"
    reason = f"took longer than {time_limit_seconds:g} s" if code is None else _reason(output, code, status)
    outcome = _outcome(experiment, status, reason, time.monotonic() - started, started_at, attempt)
    if status != "interrupted":  # it has not ended: the next sweep starts it again
        _keep(outcome, sweep)
    return outcome


def _command(experiment: Experiment, folder: Path) -> Sequence[str]:
    return [sys.executable, "-m", "embershard.launch.cli", "train", *experiment.arguments, "--run-dir", str(folder)]


def _outcome(
    experiment: Experiment, status: Status, reason: str, seconds: float, started_at: str, attempt: int
) -> Outcome:
    named = {name: getattr(experiment, name) for name in ("name", "digest", "repeat", "ranks")}
    return Outcome(
        **named,
        varied=dict(experiment.varied),
        status=status,
        reason=reason,
        seconds=round(seconds, 3),
        started_at=started_at,
        attempt=attempt,
    )


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def run_here(
    experiments: Sequence[Experiment],
    sweep: Path,
    time_limit_seconds: float | None,
    begin: Callable[[Experiment], None],
) -> Iterator[Outcome]:
    """Run experiments one after another on this machine; yield each outcome. `begin` is called before each."""
    for experiment in experiments:
        begin(experiment)
        yield run_experiment(experiment, sweep, time_limit_seconds)


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
            f"{path}: cannot be read ({error}). Remove it: its run counts as finished if it has a result.json, and is "
            "trained again otherwise."
        ) from error


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a run that is not over: in order, and then at once."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # its ranks die with it
            process.wait()


def _reason(output: Path, code: int, status: Status) -> str:
    """Return the line of the output that says why the run did not finish; empty if it did."""
    if status == "finished":
        return ""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in output.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line]
    return errors[0] if errors else lines[-1] if lines else f"exit code {code}"


def _keep(outcome: Outcome, sweep: Path) -> None:
    path = sweep / _STATES / f"{outcome.name}.json"
    with naming_file(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        partial.write_text(json.dumps(dataclasses.asdict(outcome)), encoding="utf-8")
