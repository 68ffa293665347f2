"""The runs of a sweep, from its TOML file."""

from __future__ import annotations

import hashlib
import itertools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from embershard.errors import ConfigError
from embershard.launch.arguments import config_file, set_words, trust_words
from embershard.launch.launcher import planned_ranks
from embershard.settings.decoding import decode, field_types, flat, read_toml, to_toml, toml
from embershard.settings.files import apply_override, load_config
from embershard.sweeps.clusters import KubernetesJobs, SlurmJobs
from embershard.training.config import RunConfig

#: Runs that differ in these alone are repeats of each other.
SEEDS = ("train.seed", "data.seed")
_RANKS = "ranks"  # not a setting of a run: how many are started
#: Nor are these, with the section `[scale_out]`: options of the plan that a run is trained by, and where its ranks are.
_PLACED: dict[str, type] = {"plan": str, "nodes": int, "link": str}
_DEFAULT_RANKS = 2
_PROGRAM = "embershard.commands.cli"


@dataclass(frozen=True)
class _SweepFile:
    """A sweep's file.

    Attributes:
        config: the settings that the runs have in common, a TOML file; relative to this one.
        set: settings of all runs.
        grid: by setting, the values to combine with each other.
        runs: settings of single runs, each combined with the grid.
        repeats: of every run.
        time_limit_seconds: of a run.
        slurm, kubernetes: what the runs ask a cluster for.
        scale_out: of a study of scaling; `embershard/extras/scale_out/` says what is in it.
    """

    config: str
    set: dict[str, Any] = field(default_factory=dict)
    grid: dict[str, Any] = field(default_factory=dict)
    runs: tuple[dict[str, Any], ...] = ({},)
    repeats: int = 1
    time_limit_seconds: float | None = None
    slurm: SlurmJobs = field(default_factory=SlurmJobs)
    kubernetes: KubernetesJobs | None = None
    scale_out: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"repeats: got {self.repeats}, needed at least 1.")
        if self.time_limit_seconds is not None and self.time_limit_seconds <= 0:
            raise ConfigError(f"time_limit_seconds: got {self.time_limit_seconds}, needed more than 0.")


@dataclass(frozen=True)
class Experiment:
    """One run of a sweep.

    Attributes:
        name: digest and repeat: what is trained, whatever else the sweep varies.
        varied: the settings that the sweep varies, `ranks` among them.
        ranks: number of ranks.
        settings: arguments of the program of each rank.
        digest: of all settings and the number of ranks, hexadecimal.
        repeat: 0 for the first run of these settings.
        group: digest of all but the seeds.
        placed: of `plan`, `nodes` and `link`, those that a study of scaling gives it.
        program: the module whose command `train` it is.
    """

    name: str
    varied: Mapping[str, Any]
    ranks: int
    settings: tuple[str, ...]
    digest: str
    repeat: int
    group: str
    placed: Mapping[str, Any] = field(default_factory=dict)
    program: str = _PROGRAM

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of `embershard train`."""
        return (*self.settings, "--nproc", str(self.ranks))

    @property
    def command(self) -> str:
        """What a reader would type, without the folder of the run."""
        called = "embershard" if self.program == _PROGRAM else f"python -m {self.program}"
        return f"{called} train {shlex.join(self.arguments)}"


@dataclass(frozen=True)
class Sweep:
    """The experiments in the order of their execution, the time that each may take, and what it asks a cluster for."""

    experiments: tuple[Experiment, ...]
    time_limit_seconds: float | None
    slurm: SlurmJobs = field(default_factory=SlurmJobs)
    kubernetes: KubernetesJobs | None = None
    scale_out: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, path: Path, *, trust_code: bool = False) -> Sweep:
        """Read a sweep's file. All settings of all runs are checked, with `trust_code` as of `load_config`.

        Repeats are interleaved: every run once, then again in reverse order, so that a machine that becomes slower
        favours none.

        Raises:
            ConfigError: a key is unknown, a value is refused, or two runs are the same.
        """
        values = read_toml(path)
        if "config" not in values and values.keys() & field_types(RunConfig):
            raise ConfigError(
                f"{path} has the settings of a run, needed the file of a sweep. Write one beside it, for instance with "
                f"these two lines, and give that:\nconfig = {toml(path.name)}\ngrid.train.seed = [0, 1, 2]"
            )
        file = decode(_SweepFile, values, elsewhere=_meant)
        config = path.parent / file.config
        config = config if config.exists() else config_file(file.config)
        try:
            runs = [_experiment(config, file, varied, trust_code=trust_code) for varied in _combinations(file)]
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        seen: dict[str, Experiment] = {}
        for run in runs:
            if run.digest in seen:
                raise ConfigError(
                    f"{path}: two runs have the same settings: {shown(seen[run.digest].varied)}, and "
                    f"{shown(run.varied)}. Remove one; `repeats` repeats all."
                )
            seen[run.digest] = run
        experiments = [
            replace(run, name=f"{run.digest}-{repeat}", repeat=repeat)
            for repeat in range(file.repeats)
            for run in (runs[::-1] if repeat % 2 else runs)
        ]
        return cls(tuple(experiments), file.time_limit_seconds, file.slurm, file.kubernetes, file.scale_out)


def _meant(key: str) -> list[str]:
    return [f"set.{key}", f"grid.{key}"] if key in field_types(RunConfig) else []


def _combinations(file: _SweepFile) -> list[dict[str, Any]]:
    """Return what each run varies: every run with one seed, then all of them with the next."""
    grid, found = flat(file.grid), []
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"grid.{name}: got {values!r}, needed a list of values.")
    for run in file.runs:
        given = flat(run)
        for values in itertools.product(*grid.values()):
            found.append({**given, **dict(zip(grid, values, strict=True))})
    seeds = [name for name in SEEDS if name in grid]
    return sorted(found, key=lambda each: [grid[name].index(each[name]) for name in seeds])


def _experiment(config: Path, file: _SweepFile, varied: Mapping[str, Any], *, trust_code: bool) -> Experiment:
    settings = {**flat(file.set), **varied}
    ranks = settings.pop(_RANKS, None)
    placed = {} if file.scale_out is None else {key: settings.pop(key) for key in _PLACED if key in settings}
    for key, value in placed.items():
        if not isinstance(value, _PLACED[key]):
            raise ConfigError(f"{key}: got {value!r}, needed a {_PLACED[key].__name__} (docs/scale_out.md).")
    if ranks is not None and (not isinstance(ranks, int) or ranks < 1):
        raise ConfigError(f"ranks: got {ranks!r}, needed a whole number, 1 or more.")
    overrides = [f"{key}={value if isinstance(value, str) else toml(value)}" for key, value in settings.items()]
    resolved = load_config(RunConfig, config, overrides, trust_code=trust_code)
    ranks = planned_ranks(resolved, ranks) or _DEFAULT_RANKS
    resolved.train.rank_batch_size(ranks)
    seedless = replace(resolved, train=replace(resolved.train, seed=0), data=replace(resolved.data, seed=0))
    digest, group = (
        hashlib.sha256(f"{ranks}\n{to_toml(each)}{placed or ''}".encode()).hexdigest()[:12]
        for each in (resolved, seedless)
    )
    words = ("--config", str(config), *set_words(overrides), *trust_words(trust_code))
    return Experiment("", {_RANKS: ranks, **varied}, ranks, words, digest, 0, group, placed)


def cell(key: str, value: Any) -> Any:
    """Return a value that a sweep varies as tables and JSON have it: None where its text is the setting's none, and a
    list as its text in TOML.

    >>> cell("train.max_steps", "none"), cell("data.criteo.dense_transform", "none"), cell("model.funnel", "none")
    (None, 'none', '[]')
    """
    if key not in _PLACED and isinstance(value, str) and value.lower() in ("none", "null"):
        found: dict[str, Any] = {}
        apply_override(RunConfig, found, f"{key}={value}")
        value = flat(found).get(key)
    return toml(value) if isinstance(value, list) else value


def shown(varied: Mapping[str, Any]) -> str:
    """Return what a sweep varies, for people.

    >>> shown({"ranks": 2, "cache.ratio": 0.1})
    'ranks=2, cache.ratio=0.1'
    """
    return ", ".join(f"{key}={value}" for key, value in varied.items())
