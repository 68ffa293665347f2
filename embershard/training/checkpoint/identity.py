"""What must be the same when a run goes on from a checkpoint, by the rules of its settings (`ResumeRule`)."""

from __future__ import annotations

import dataclasses
import difflib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from embershard.data import Schema
from embershard.data.config import DataKind
from embershard.data.sources.input_file import FileIdentity, identify_files
from embershard.errors import ConfigError
from embershard.models import model_tables, table_name
from embershard.models.own_model import source_digest
from embershard.settings.decoding import toml
from embershard.settings.resume_rules import rules_of
from embershard.training.config import RunConfig

#: The rule of every setting, by `section.key`.
RULES = rules_of(RunConfig)
BATCH, SEED = "train.global_batch_size", "data.seed"
#: Whether batches are packed of hot and cold samples, and of which; "plain": they are not.
ORDER, PLAIN = "data.order", "plain"
FEATURES, LABELS, IDS = "data.table.features", "data.table.label", "ids"
#: The file that defines a model of one's own. Not compared where a trained model scores: its weights must fit.
SOURCE = "model.source"
_FILES = ("data.files", "data.eval_files")
#: What no `--set` gives back, in words.
_SET_BACK = {
    FEATURES: "the features",
    IDS: "the rules of ids",
    ORDER: "sharding.mode, sharding.hot_bytes and the profile",
    SOURCE: "the file of model.build",
    **dict.fromkeys(_FILES, "the files that it trained on"),
}
_MOST_FILES_SHOWN = 5


@dataclass(frozen=True)
class Change:
    """A difference between a saved run and the one that goes on from it.

    Attributes:
        key: the setting.
        saved, now: its values, as text.
        step: of the checkpoint after which it applies, once it was allowed.
    """

    key: str
    saved: str
    now: str
    step: int | None = None


def tables_of(config: RunConfig, schema: Schema) -> dict[str, tuple[int, int]]:
    """Return the rows and the dim of every table, by its feature where it is named after one, else by its name."""
    tables = model_tables(config.model, schema)
    named = {table_name(feature): feature for table in tables for feature in table.features}
    return {named.get(table.name, table.name): (table.num_rows, table.dim) for table in tables}


def identity_of(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Return the values of all settings that are compared, as JSON values by name. Reads some bytes of every file.

    The settings of other kinds of data than `data.kind` are left out: they have no effect.
    """
    values = _compared(config)
    values |= {f"data.{name}": files for name, files in identify_files(config.data).items()}
    values[BATCH] = global_batch(config, world_size)
    if config.model.build is not None:
        values[SOURCE] = source_digest(config.model)[:12]
    values[ORDER] = PLAIN
    if config.model.drops and config.train.accumulate > 1:  # masks are drawn for each micro-batch
        values["train.accumulate"] = config.train.accumulate
    return _as_saved(values)


def meaning_of(config: RunConfig) -> dict[str, Any]:
    """Return the values of the settings that say what a model's weights, inputs and outputs mean, as JSON values by
    name. One output means the label, whatever that is called; of several, each has its label's name."""
    values = _compared(config)
    return _as_saved({key: value for key, value in values.items() if RULES[key].is_of_model or key == LABELS})


def labels_change(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return True if the outputs of a model have other labels now than in `saved`; the label of one may be renamed."""
    before, after = ([names] if isinstance(names, str) else names for names in (saved.get(LABELS), now.get(LABELS)))
    return before is not None and after is not None and before != after and max(len(before), len(after)) > 1


def _compared(config: RunConfig) -> dict[str, Any]:
    other_kinds = tuple(f"data.{kind}." for kind in get_args(DataKind) if kind != config.data.kind)
    by_value = sorted(key for key, rule in RULES.items() if rule.is_compared and rule.compared_as is None)
    return {key: value_of(config, key) for key in by_value if not key.startswith(other_kinds)}


def _as_saved(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(values, default=_non_defaults))
    return found


def _non_defaults(section: Any) -> dict[str, Any]:
    """Return what a feature's settings say; a setting that a later version adds makes no difference."""
    fields = dataclasses.fields(section)
    return {each.name: value for each in fields if (value := getattr(section, each.name)) != each.default}


def global_batch(config: RunConfig, world_size: int) -> int:
    """Return the samples per step of all ranks."""
    return config.train.rank_batch_size(world_size) * world_size


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the differences between two identities; what only one of them has is not compared.

    >>> changes({"data.seed": 1}, {"data.seed": 2, "data.shuffle": True})
    [Change(key='data.seed', saved='1', now='2', step=None)]
    """
    found: list[Change] = []
    for key in sorted(saved.keys() & now.keys()):
        old, new = saved[key], now[key]
        if key in _FILES:
            was, have = ({file.name: file for file in (FileIdentity(*each) for each in files)} for files in (old, new))
            names = [name for name in sorted(was.keys() | have.keys()) if was.get(name) != have.get(name)]
            shown = names[:_MOST_FILES_SHOWN]
            found += [Change(key, _file_text(was.get(name)), _file_text(have.get(name))) for name in shown]
            if more := len(names) - len(shown):
                found.append(Change(key, f"{more} more files", ""))
        elif key in (FEATURES, IDS) and ([*old] == [*new] or old != new):  # else they come in another order
            names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
            found += [Change(key, _feature_text(name, old), _feature_text(name, new)) for name in names]
        elif key in (FEATURES, IDS):
            found.append(Change(key, _text([*old]), _text([*new])))
        elif old != new:
            found.append(Change(key, _text(old), _text(new)))
    return found


def check_keys(keys: Sequence[str]) -> None:
    """Raise unless all `keys` are settings whose change can be allowed.

    >>> check_keys(["data.shufle"])
    Traceback (most recent call last):
    embershard.errors.ConfigError: --allow-change data.shufle: no such setting is compared. Did you mean data.shuffle?
    """
    known = sorted({*(rule.compared_as or key for key, rule in RULES.items() if rule.is_compared), SOURCE})
    for key in keys:
        rule = RULES.get(key)
        if rule is not None and rule.compared_as is not None:
            raise ConfigError(f"--allow-change {key}: it is compared as {rule.compared_as}. Allow that.")
        if rule is not None and not rule.is_compared:
            raise ConfigError(f"--allow-change {key}: it may change without being allowed. Leave it out.")
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"These are: {', '.join(known)}."
            raise ConfigError(f"--allow-change {key}: no such setting is compared. {hint}")


def refusal(found: Sequence[Change]) -> str:
    """Return a table of changes, and what to do about them.

    >>> print(refusal([Change("data.shuffle", "true", "false")]))
      setting       saved  now
      data.shuffle  true   false
    Set back what should not change (--set data.shuffle=true), or allow it: --allow-change data.shuffle
    """
    rows = [("setting", "saved", "now"), *((change.key, change.saved, change.now) for change in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    table = [f"  {key:{widths[0]}}  {saved:{widths[1]}}  {now}" for key, saved, now in rows]
    keys = dict.fromkeys(change.key for change in found)
    ways = [_set_back(change) for change in found if change.key not in _SET_BACK]
    options = " ".join(way for way in ways if way.startswith("--set"))  # to copy as they are
    back = [*([options] if options else []), *(way for way in ways if not way.startswith("--set"))]
    back += dict.fromkeys(what for key, what in _SET_BACK.items() if key in keys)
    allowed = [f"--allow-change {key}" for key in keys]
    advice = f"Set back what should not change ({', '.join(back)}), or allow it: {' '.join(allowed)}"
    return "\n".join([*table, advice])


def _set_back(change: Change) -> str:
    if change.saved.startswith("{"):  # a table, of which --set takes one value at a time
        return f"{change.key} in the file"
    alone = "--set train.batch_size=none " if change.key == BATCH else ""  # one of the two decides
    return f"{alone}--set {shlex.quote(f'{change.key}={change.saved}')}"


def value_of(config: RunConfig, key: str) -> Any:
    """Return the value of a setting `section.key`."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _text(value: Any) -> str:
    return "none" if value is None else toml(value)


def _feature_text(name: str, features: Mapping[str, Any]) -> str:
    if name not in features:
        return f"no {name}"
    return f"{name} = {{{', '.join(f'{key} = {_text(value)}' for key, value in features[name].items())}}}"


def _file_text(file: FileIdentity | None) -> str:
    return "no file" if file is None else f"{file.name}: {file.num_bytes:,} bytes, sha256 {file.sha256[:8]}"
