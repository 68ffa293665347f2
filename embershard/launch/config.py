"""A run's settings: read from TOML, overridden by ``--set``, checked against the dataclasses, written back.

The dataclasses stand beside what they configure (`embershard.training.config` gathers them). Nothing here knows
a setting by name: keys, types and documentation come from the dataclasses.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import json
import sys
import textwrap
import types
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from embershard.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

C = TypeVar("C")


def load_config(cls: type[C], path: Path, overrides: Sequence[str] = ()) -> C:
    """An instance of the dataclass `cls` from a TOML file and ``key=value`` overrides; the last one wins.

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown, a value is of another type or refused.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Give --config an existing file.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    for override in overrides:
        apply_override(cls, values, override)
    return from_values(cls, values)


def apply_override(cls: type, values: dict[str, Any], override: str) -> None:
    """Puts ``section.key=value`` into nested `values`; the text is read by the type of the setting."""
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"--set {override}: needed KEY=VALUE, for instance --set train.batch_size=512.")
    *sections, name = key.strip().split(".")
    inside, path = cls, ""
    for section in sections:
        inside = _section_type(inside, section, path)
        path += f"{section}."
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{path[:-1]}: got a value in the file, needed a section.")
    hint = _field_type(inside, name, path)
    if dataclasses.is_dataclass(hint):
        raise ConfigError(f"--set {override}: {key} is a section; set one of its settings, as {key}.NAME=VALUE.")
    value = _from_text(hint, text.strip())
    if value is None:
        values.pop(name, None)  # absent is how TOML says none
    else:
        values[name] = value


def from_values(cls: type[C], values: dict[str, Any], path: str = "") -> C:
    """An instance of `cls` from nested dicts; every key and type is checked before anything is built."""
    arguments = {}
    for name, value in values.items():
        if name in _retired(cls) and value == _retired(cls)[name][0]:
            continue  # in files of earlier versions, with the value that means what there is now
        hint = _field_type(cls, name, path)
        arguments[name] = _checked(hint, value, f"{path}{name}")
    return cls(**arguments)


def to_toml(config: Any) -> str:
    """TOML of all settings but those that are None; `load_config` reads the same config back."""
    lines: list[str] = []
    for path, section in _sections(config):
        entries = [
            f"{field.name} = {_toml_value(getattr(section, field.name))}"
            for field in dataclasses.fields(section)
            if not dataclasses.is_dataclass(getattr(section, field.name)) and getattr(section, field.name) is not None
        ]
        lines += [*([f"[{path}]"] if path and entries else []), *entries, *([""] if entries else [])]
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One line of the settings' reference."""

    key: str
    type: str
    default: str
    doc: str


def describe(cls: type, path: str = "") -> list[Setting]:
    """All settings of a config class, nested ones as ``section.key``, in the order of their declaration."""
    found = []
    for field in dataclasses.fields(cls):
        hint = get_type_hints(cls)[field.name]
        if dataclasses.is_dataclass(hint):
            found += describe(hint, f"{path}{field.name}.")  # type: ignore[arg-type]
            continue
        default = _default(cls, field.name)
        shown = "none" if default is None else _toml_value(default)
        found.append(Setting(f"{path}{field.name}", _type_name(hint), shown, _docs(cls).get(field.name, "")))
    return found


# ---------------------------------------------------------------------------------------- names and types


class _NoMatch:
    """Says that a value is not of a type; None could not say it."""


_NO_MATCH = _NoMatch()


def _retired(cls: type) -> dict[str, tuple[Any, str]]:
    """Settings that a config class had: the value that means what there is now, and why the setting went."""
    return getattr(cls, "RETIRED", {})


def _field_type(cls: type, name: str, path: str) -> Any:
    hints = get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    if name in _retired(cls):
        raise ConfigError(f"{path}{name} is no setting any more: {_retired(cls)[name][1]}")
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"Did you mean {path}{close[0]}?" if close else f"Known here: {', '.join(names)}."
        raise ConfigError(f"Unknown setting {path}{name}. {hint}")
    return hints[name]


def _section_type(cls: type, name: str, path: str) -> type:
    hint = _field_type(cls, name, path)
    if not dataclasses.is_dataclass(hint):
        raise ConfigError(f"{path}{name} is a setting, not a section.")
    return hint  # type: ignore[return-value]


def _default(cls: type, name: str) -> Any:
    field = next(f for f in dataclasses.fields(cls) if f.name == name)
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _accepts_none(hint: Any) -> bool:
    return type(None) in _options(hint)


def _checked(hint: Any, value: Any, key: str) -> Any:
    """`value` as the type `hint`; raises `ConfigError` naming `key`."""
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{key}: got {value!r}, needed a section [{key}].")
        return from_values(hint, value, f"{key}.")  # type: ignore[arg-type]
    for option in _options(hint):
        matched = _matched(option, value)
        if matched is not _NO_MATCH:
            return matched
    raise ConfigError(f"{key}: got {value!r}, needed {_type_name(hint)}.")


def _matched(option: Any, value: Any) -> Any:
    """`value` converted to the plain type `option`, or `_NO_MATCH` when it is of another type."""
    if get_origin(option) is Literal:
        return value if value in get_args(option) and not isinstance(value, bool) else _NO_MATCH
    if option is float:
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else _NO_MATCH
    if get_origin(option) is tuple:
        return _matched_tuple(get_args(option), value)
    return value if type(value) is option else _NO_MATCH


def _matched_tuple(items: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return _NO_MATCH
    kinds = [items[0]] * len(value) if len(items) == 2 and items[1] is Ellipsis else list(items)
    if len(kinds) != len(value):
        return _NO_MATCH
    found = tuple(_matched(kind, item) for kind, item in zip(kinds, value, strict=True))
    return _NO_MATCH if any(item is _NO_MATCH for item in found) else found


def _from_text(hint: Any, text: str) -> Any:
    """What the text of ``--set key=text`` means for a setting of type `hint`; the check comes later."""
    if _accepts_none(hint) and text.lower() in ("none", "null"):
        return None
    options = _options(hint)
    words = any(option is str or get_origin(option) is Literal for option in options)
    lists = any(get_origin(option) is tuple for option in options)
    if lists and "," in text and not text.startswith("["):
        text = f"[{text}]"
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return [item.strip() for item in text.strip("[]").split(",")] if lists else text
    if words and not lists and not isinstance(value, str):
        return text  # a word that happens to look like a number
    return value


def _type_name(hint: Any) -> str:
    names = []
    for option in _options(hint):
        if option is type(None):
            names.append("none")
        elif get_origin(option) is Literal:
            names.append(" | ".join(json.dumps(choice) for choice in get_args(option)))
        elif get_origin(option) is tuple:
            items = get_args(option)
            repeated = len(items) == 2 and items[1] is Ellipsis
            names.append(f"[{_type_name(items[0])}, ...]" if repeated else f"[{', '.join(map(_type_name, items))}]")
        else:
            names.append({"str": "text", "int": "integer", "float": "number", "bool": "true | false"}[option.__name__])
    return " | ".join(names)


# ---------------------------------------------------------------------------------------- text


def _sections(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _sections(value, f"{path}.{field.name}" if path else field.name)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


@lru_cache
def _docs(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass, base classes included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, doc in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                found[field.target.id] = " ".join(str(doc.value.value).split())  # type: ignore[union-attr]
    return found
