"""A run's settings: read from TOML, overridden by `--set`, and described for the reference.

The dataclasses stand beside what they configure (`embershard.training.config` gathers them). No setting is known here
by name: keys, types and documentation come from the dataclasses.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import TypeAdapter

from embershard.errors import ConfigError
from embershard.settings.decoding import (
    alternatives,
    decode,
    field_types,
    is_section,
    read_toml,
    toml,
    toml_value,
    type_name,
    unknown_key,
)
from embershard.settings.own_code import names_function

C = TypeVar("C")

#: Files in the folder of a run.
RUN_CONFIG, METRICS, CHECKPOINTS, CURVES = "config.toml", "metrics.jsonl", "checkpoints", "curves.json"


def load_config(
    cls: type[C], path: Path, overrides: Sequence[str] = (), *, trust_code: bool = False, run_dir: Path | None = None
) -> C:
    """Read the dataclass `cls` from a TOML file and `key=value` overrides, of which the last one wins.

    Args:
        trust_code: a module that settings name (`model.build`, `cache.policy`) may be inside of a run's folder, which
            somebody else may have written.
        run_dir: counts as a run's folder, though nothing may be in it yet.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown, a value is of another type or refused; or the
            module that a setting names is not to be trusted.
    """
    values = read_toml(path)
    if isinstance(common := values.get("config"), str):
        raise ConfigError(
            f"{path} is the file of a sweep, needed the settings of a run. To train all its runs: embershard sweep "
            f"{shlex.quote(str(path))}. What they have in common is in {common}."
        )
    is_record = path.name == RUN_CONFIG and holds_run(path.parent)
    if is_record and not values:
        raise ConfigError(f"{path}: has no settings, though {path.parent} holds a run. Copy it again.")
    named = {override.partition("=")[0].strip() for override in overrides}
    for setting, name, section in _with_code(values) if is_record and not trust_code else ():
        key, recorded = f"{setting.partition('.')[0]}.{name}", section.get(name)
        if isinstance(recorded, str) and not Path(recorded).is_absolute() and key not in named:
            raise ConfigError(f"{path}: {key} = {recorded!r}, needed an absolute path. Give --set {key}=DIR.")
    for override in overrides:
        apply_override(cls, values, override)
    for _, name, section in _with_code(values):
        if isinstance(folder := section.get(name, str(path.parent)), str):  # the module may be beside the file
            section[name] = os.path.abspath(folder)
    config = decode(cls, values, elsewhere=partial(_meant, cls))
    if not trust_code:
        check_config_code(config, run_dir)
    return config


#: Settings that name code, "module:function", with the setting beside each that names the module's folder.
_CODE = {"model.build": "folder", "cache.policy": "policy_folder", "metrics.names": "folder"}


def _with_code(values: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the settings of `_CODE` that name code, the names of their folders' settings, and their sections."""
    for setting, folder in _CODE.items():
        part, _, name = setting.partition(".")
        section = values.get(part)
        if isinstance(section, dict) and ":" in str(section.get(name)):
            yield setting, folder, section


def check_config_code(config: Any, run_dir: Path | None) -> None:
    """Raise `ConfigError` if code that settings name is inside of a run's folder: see `check_code`."""
    for setting, folder, section in _with_code(dataclasses.asdict(config)):
        named = section[setting.partition(".")[2]]
        for code in filter(names_function, [named] if isinstance(named, str) else named):
            check_code(code.partition(":")[0], Path(section[folder] or "."), run_dir, setting)


def holds_run(folder: Path) -> bool:
    """Return True for the folder of a run that has begun."""
    return (folder / METRICS).exists() or any((folder / CHECKPOINTS).glob("step_*"))


def run_folder_of(path: Path) -> Path | None:
    """Return the run's folder that `path` is, or is inside of; None if there is none."""
    return next((each for each in (path, *path.parents) if holds_run(each)), None)


def check_code(module: str, folder: Path, run_dir: Path | None = None, setting: str = "model.build") -> None:
    """Raise `ConfigError` if importing a module would run code that is inside of a run's folder. Imports nothing.

    Args:
        module: with its packages, as "package.module".
        folder: in which it is looked up, besides the Python path.
        run_dir: counts as a run's folder.
        setting: which names the module.
    """
    run = None if run_dir is None else run_dir.resolve()
    folder_setting = f"{setting.partition('.')[0]}.{_CODE[setting]}"
    for place in _places(module, [*sys.path, str(folder)]):
        for path in (place, place.resolve()):
            inside = run if run in (path, *path.parents) else run_folder_of(path)
            if inside is not None:
                raise ConfigError(
                    f"{setting}: {place} is in the run folder {inside}, whose code runs only with --trust-code. Look "
                    f"at it first; or name a folder of your own: --set {folder_setting}=DIR."
                )


def _places(module: str, search: Sequence[str]) -> Iterator[Path]:
    """Yield the files and folders that an import of a module would run, or search, from the outermost package on."""
    names = module.split(".")
    for number in range(len(names)):
        spec = PathFinder.find_spec(".".join(names[: number + 1]), list(search))
        if spec is None:
            return
        search = list(spec.submodule_search_locations or [])
        yield from (Path(place).absolute() for place in ([spec.origin] if spec.has_location else search) if place)


def apply_override(cls: type, values: dict[str, Any], override: str) -> None:
    """Put `section.key=value` into nested `values`; the setting's type decides how the text is read.

    >>> from embershard.training.config import RunConfig
    >>> values = {"data": {"seed": 1}}
    >>> apply_override(RunConfig, values, "data.path=2024")
    >>> values
    {'data': {'seed': 1, 'path': '2024'}}
    """
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override}: needed KEY=VALUE, for instance --set train.batch_size=512.")
    key = key.strip()
    hint: Any = cls
    *sections, name = key.split(".")
    for number, part in enumerate((*sections, name)):
        at = ".".join(sections[:number])
        if get_origin(hint) is dict:  # of sections, by names that the user chose
            hint = get_args(hint)[1]
            continue
        if not is_section(hint):
            raise ConfigError(f"{at} is a setting, not a section.")
        if part not in field_types(hint):
            raise ConfigError(unknown_key(hint, part, at, partial(_meant, cls)))
        hint = field_types(hint)[part]
    if is_section(hint) or get_origin(hint) is dict:
        raise ConfigError(f"--set {override}: {key} is a section; set one of its settings, as {key}.NAME=VALUE.")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{key}: {section} is a value in the file, needed a section.")
    value = _from_text(hint, text.strip())
    if value is None:
        values.pop(name, None)  # absent is how TOML says none
    else:
        values[name] = value


@dataclasses.dataclass(frozen=True)
class Setting:
    """One line of the settings' reference."""

    key: str
    type: str
    default: str
    doc: str


def describe(config: Any, path: str = "") -> list[Setting]:
    """Return all settings of a config, nested ones as `section.key`, in the order of their declaration."""
    found: list[Setting] = []
    cls: type = type(config)
    for name, hint in field_types(cls).items():
        default = getattr(config, name)
        if dataclasses.is_dataclass(default):
            found += describe(default, f"{path}{name}.")
            continue
        shown = "none" if default is None else toml(default)
        found.append(Setting(f"{path}{name}", type_name(hint), shown, _docs(cls).get(name, "")))
    return found


def find_settings(settings: Sequence[Setting], name: str) -> list[Setting]:
    """Return what a user may mean: the setting that is called so, or those of that section; else those with `name` as a
    part of theirs; else those whose name, values and meaning have all of its words, or most of them.

    >>> from embershard.training.config import RunConfig
    >>> [setting.key for setting in find_settings(describe(RunConfig()), "learning_rate")]
    ['embedding_optimizer.lr', 'dense_optimizer.lr']
    """
    name = name.lower().replace("-", "_")
    if found := [each for each in settings if f"{each.key}.".startswith(f"{name}.")]:
        return found
    if found := [each for each in settings if name in each.key]:
        return found
    wanted = [word[:-1] if len(word) > 3 and word.endswith("s") else word for word in _words(name)]

    def num_found(text: str) -> int:
        words = _words(text.lower())
        return sum(any(_same_stem(word, each) for each in words) for word in wanted)

    counts = {each: num_found(f"{each.key} {each.type} {each.doc}") for each in settings}
    most = max(counts.values(), default=0)
    found = [each for each in settings if counts[each] == most > 0]
    return sorted(found, key=lambda each: (-num_found(each.key), -num_found(each.doc.partition(". ")[0])))


def _meant(cls: type, key: str) -> list[str]:
    with suppress(ConfigError):  # of a file that must have some settings
        return [setting.key for setting in find_settings(describe(cls()), key)]
    return []


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text)


def _same_stem(word: str, other: str) -> bool:
    """Return whether one begins with the other, which is no short one: batch and batches, schedule and scheduler."""
    return other.startswith(word) or (len(other) > 4 and word.startswith(other))


def json_schema(cls: type) -> dict[str, Any]:
    """Return the JSON Schema of a dataclass of settings: editors complete and check TOML files by it."""
    schema = TypeAdapter(cls).json_schema()
    for section in _sections(cls):
        found = schema if section is cls else schema["$defs"][section.__name__]
        found["additionalProperties"] = False
        found["description"] = found["description"].partition("\n")[0]  # no examples in Python
        for name, doc in _docs(section).items():
            found["properties"][name]["description"] = doc
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _sections(hint: Any) -> set[type]:
    """Return the dataclasses that a type has in it, itself among them."""
    inner = field_types(hint).values() if is_section(hint) else get_args(hint)
    return set().union({hint} if is_section(hint) else (), *map(_sections, inner))


def _from_text(hint: Any, text: str) -> Any:
    """Return what the text of `--set key=text` means for a setting of type `hint`; the check comes later."""
    options = alternatives(hint)
    if text.lower() in ("none", "null"):
        if type(None) in options:
            return None
        if all(get_args(option)[1:] == (Ellipsis,) for option in options):
            return []
    words = any(option is str or get_origin(option) is Literal for option in options) and float not in options
    lists = any(get_origin(option) is tuple for option in options)
    if lists and "," in text and not text.startswith("["):
        text = f"[{text}]"
    try:
        value = toml_value(text)
    except ValueError:
        is_list = lists and (text.startswith("[") or not words)
        return [item.strip() for item in text.strip("[]").split(",")] if is_list else text
    if words and not lists and not isinstance(value, str):
        return text  # a word that happens to look like a number
    return value


@lru_cache
def _docs(cls: type) -> dict[str, str]:
    """Return the string below each field of a dataclass, base classes included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, doc in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                found[field.target.id] = " ".join(str(doc.value.value).split())  # type: ignore[union-attr]
    return found
