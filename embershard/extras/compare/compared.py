"""What `embershard compare` sets beside each other: the scores of a file, of a run, or of a sweep's runs."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from embershard.errors import ConfigError, naming_file, near_file
from embershard.reports.run_folder import is_sweep
from embershard.settings.decoding import flat, read_toml, toml_value
from embershard.settings.files import RUN_CONFIG
from embershard.sweeps.experiments import SEEDS, shown

if TYPE_CHECKING:
    import pyarrow as pa

_Seeds = tuple[object, ...]


class Scores(NamedTuple):
    """Scores of samples, as `embershard predict` writes them, and where they are from."""

    name: str
    table: pa.Table


@dataclass(frozen=True)
class ComparedModel:
    """One of the two models that are compared: a file of scores, or runs that differ in their seeds alone.

    Attributes:
        given: as the user named it.
        sources: by seeds a run, or the file.
    """

    given: str
    sources: dict[_Seeds, Path]

    @staticmethod
    def of(given: str) -> ComparedModel:
        """Return what `PATH`, or `SWEEP:SETTING=VALUE:...` for one of its configurations, names.

        Raises:
            ConfigError: no run of the sweep finished, or more than one configuration is meant.
        """
        path, settings = Path(given), []
        if not path.exists():
            first, *settings = re.split(r":(?=[A-Za-z_][\w.]*=)", given)
            path = Path(first)
        if not path.exists():
            needed = f"needed a run, a sweep or a Parquet file of scores{near_file(path) or '.'}"
            raise ConfigError(f"{path}: no such file or folder; {needed}")
        if is_sweep(path):
            return ComparedModel(given, _runs_of(path, settings))
        if settings:
            raise ConfigError(f"{given}: {path} is not the folder of a sweep; needed one before the settings.")
        if path.is_dir() and not (path / RUN_CONFIG).is_file():
            raise ConfigError(f"{path} is the folder of neither a run nor a sweep.")
        return ComparedModel(given, {_seeds_of(path) if path.is_dir() else (): path})

    def scores(self, seeds: _Seeds, folder: Path, keep: Sequence[str], *, trust_code: bool) -> Scores:
        """Return the scores of one seed; a run scores what it holds out.

        Args:
            folder: for files of scores, of which each run has one.
            keep: columns of the data that are needed, too.

        Raises:
            ConfigError: the run cannot be scored, or the file is none of scores, or has not the columns.
        """
        source = self.sources[seeds]
        table = _read(source, folder, keep, trust_code=trust_code)
        return Scores(self.given if len(self.sources) == 1 else str(source), table)


def _runs_of(sweep: Path, settings: Sequence[str]) -> dict[_Seeds, Path]:
    from embershard.sweeps.spread import read_configurations

    found = read_configurations(sweep)
    own = [{key: each.varied[key] for key in each.differing if key in each.varied} for each in found]
    chosen = [place for place, each in enumerate(found) if all(_has(each.varied, setting) for setting in settings)]
    # Where one configuration has no other setting than these, it is meant.
    whole = [place for place in chosen if sum(_has(own[place], setting) for setting in settings) == len(own[place])]
    chosen = whole if len(whole) == 1 else chosen
    given = ":".join([str(sweep), *settings])
    if len(chosen) != 1:
        places = chosen or range(len(found))
        names = [
            ":".join([str(sweep), *(shown({key: value}) for key, value in own[place].items())]) for place in places
        ]
        raise ConfigError(
            f"{given}: got {len(chosen)} configurations, needed one. Name it, by as few of its settings as do:"
            + "".join(f"\n  {shlex.quote(name)}" for name in names)
        )
    folders = found[chosen[0]].folders
    if not folders:
        raise ConfigError(f"{given}: none of its runs has finished.")
    return {_seeds_of(folder): folder for folder in reversed(folders)}


def _has(varied: Mapping[str, Any], setting: str) -> bool:
    """Return whether a configuration has a setting, given as KEY=VALUE."""
    key, _, text = setting.partition("=")
    try:
        value = toml_value(text)
    except ValueError:  # a text without quotes
        value = text
    return key in varied and (str(varied[key]) == text or bool(varied[key] == value))


def _seeds_of(run: Path) -> _Seeds:
    """Return what repeats of a run differ in."""
    settings = flat(read_toml(run / RUN_CONFIG))
    return tuple(settings[key] for key in SEEDS if key in settings)


def _read(source: Path, folder: Path, keep: Sequence[str], *, trust_code: bool) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = source
    if source.is_dir():
        from embershard.commands.score import score_held_out

        path = folder / f"{hashlib.sha256(str(source.absolute()).encode()).hexdigest()}.parquet"
        if not path.exists():  # the first of several models is compared with each other one
            score_held_out(source, path, keep, trust_code=trust_code)
    try:
        with naming_file(path):
            table: pa.Table = pq.read_table(path)
    except pa.ArrowException as error:
        raise ConfigError(f"{source}: not a Parquet file of scores: {error}") from None
    for name in keep:
        if name not in table.column_names:
            raise ConfigError(
                f"{source} has no column {name!r}. Keep it when you score: embershard predict ... --keep {name}."
            )
    return table


def read_pairs(
    models: tuple[ComparedModel, ComparedModel], folder: Path, keep: Sequence[str], *, trust_code: bool
) -> list[tuple[Scores, Scores]]:
    """Return the scores of both models, with each seed that they have in common; of one each, whatever their seeds.

    Raises:
        ConfigError: as `ComparedModel.scores`, or they have no seed in common.
    """
    a, b = models
    chosen = [(seeds, seeds) for seeds in a.sources if seeds in b.sources]
    if len(a.sources) == len(b.sources) == 1:
        chosen = [(next(iter(a.sources)), next(iter(b.sources)))]
    if not chosen:
        raise ConfigError(
            f"{a.given} and {b.given} have no seed in common ({', '.join(SEEDS)}), so there are no pairs. Train them "
            "with the same seeds, or name one run of each."
        )
    of_a, of_b = (
        [model.scores(seeds, folder, keep, trust_code=trust_code) for seeds in own]
        for model, own in zip(models, zip(*chosen, strict=True), strict=True)
    )
    return [*zip(_named(of_a, a, of_b), _named(of_b, b, of_a), strict=True)]


def seeds_text(models: tuple[ComparedModel, ComparedModel], num_pairs: int) -> list[str]:
    """Return sentences that say which seeds were compared; none where neither model has several."""
    a, b = (each.sources.keys() for each in models)
    if max(len(a), len(b)) == 1:
        return []
    left_out = "; ".join(shown(dict(zip(SEEDS, seeds, strict=False))) for seeds in [*(a - b), *(b - a)])
    what = f"Means of {num_pairs} seeds." if num_pairs > 1 else "One seed: what another one would change is not known."
    return [what, *([f"Not in both, and left out: {left_out}."] if left_out else [])]


def _named(own: list[Scores], model: ComparedModel, others: list[Scores]) -> list[Scores]:
    """Return scores of runs with one label by its name, as `score/click`, where the other has several labels."""
    from embershard.sweeps.spread import only_label

    run = next(iter(model.sources.values()))
    label = only_label(run) if run.is_dir() else ""
    if not label or f"score/{label}" not in others[0].table.column_names:
        return own
    new = {name: f"{name}/{label}" for name in ("logit", "score", "label")}
    return [
        each._replace(table=each.table.rename_columns([new.get(name, name) for name in each.table.column_names]))
        for each in own
    ]
