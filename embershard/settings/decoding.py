"""Text files as dataclasses, and back: every key and type is checked, and a message names the entry."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from embershard.errors import ConfigError, EmbershardError, near_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

#: The first and the last line of a record of settings.
_RECORD, _RECORD_END = "# Settings of a run", "# End of settings"
# pydantic's names of problems
_UNKNOWN, _MISSING, _NO_JSON = "unexpected_keyword_argument", "missing", "json_invalid"


#: Returns what a key may mean that is unknown where it stands.
Elsewhere = Callable[[str], Sequence[str]]


def decode(
    cls: type[T], values: object, error: type[EmbershardError] = ConfigError, elsewhere: Elsewhere = lambda _: ()
) -> T:
    """Return an instance of the dataclass `cls` from dicts and lists, as a TOML or JSON file holds them.

    >>> from embershard.cache.config import CacheConfig
    >>> decode(CacheConfig, {"ratio": 0.5}).ratio
    0.5
    >>> decode(CacheConfig, {"ration": 0.5})
    Traceback (most recent call last):
    embershard.errors.ConfigError: ration: unknown key. Did you mean ratio?

    Args:
        elsewhere: asked about an unknown key with no other one near it.

    Raises:
        error: a key is unknown or missing, or a value is of another type. An exception of a dataclass's own checks
            passes unchanged.
    """
    try:
        if (place := _no_number(values)) is not None:
            raise error(f"{place[0]}: got {place[1]!r:.80}, needed {place[2]}.")
        text = json.dumps(values, default=lambda date: {"date": str(date)})  # TOML's only type that JSON lacks
        found: T = _reader(cast("type", cls)).validate_json(text, strict=True, extra="forbid")
        return found
    except RecursionError as found:
        raise error(f"cannot be read: {found}") from found
    except ValidationError as found:
        problems = found.errors(include_url=False)
    # A misspelled key leaves the right one missing; only the unknown key shows what happened.
    problem = next((each for each in problems if each["type"] == _UNKNOWN), problems[0])
    refusal = problem.get("ctx", {}).get("error")
    if isinstance(refusal, Exception):  # of a dataclass's own checks
        raise refusal
    if problem["type"] == _NO_JSON:  # 200 levels, or text that is not Unicode
        raise error(f"cannot be read: {problem['msg']}")
    raise error(_message(cls, values, problem, elsewhere))


@lru_cache(maxsize=64)
def _reader(cls: type) -> TypeAdapter[Any]:
    """Return what reads a dataclass: for all settings of a run it takes a tenth of a second to make."""
    return TypeAdapter(cls)


@lru_cache(maxsize=256)
def field_types(cls: type) -> Mapping[str, Any]:
    """Return the type of every field of a dataclass, by name: as arguments are, those that have names alone last."""
    hints = get_type_hints(cls)
    fields = sorted(dataclasses.fields(cls), key=lambda field: field.kw_only is True)
    return {field.name: hints[field.name] for field in fields}


def is_section(hint: Any) -> bool:
    """Return True if a type is a dataclass: a section of a file."""
    return dataclasses.is_dataclass(hint)


def unknown_key(cls: type, key: str, at: str = "", elsewhere: Elsewhere = lambda _: ()) -> str:
    """Return the message about a `key` at `at` that is no field of the dataclass `cls`; what is near in it goes before
    what is meant `elsewhere`."""
    names = field_types(cls)
    close = difflib.get_close_matches(key, names, n=1)
    meant = [name if at.endswith(")") else _joined(at, name) for name in close]  # an entry of a list is long
    meant = meant or list(elsewhere(key))[:3]
    hint = f"Did you mean {' or '.join(meant)}?" if meant else f"Known here: {', '.join(names)}."
    return f"{_joined(at, key)}: unknown key. {hint}"


def alternatives(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the one type."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def type_name(hint: Any) -> str:
    """Return the name of a type in messages and in the settings' reference.

    >>> type_name(int | tuple[float, ...] | None)
    'integer | [number, ...] | none'
    """
    options = alternatives(hint)
    if len(options) > 1:
        return " | ".join(map(type_name, options))
    if get_origin(hint) is Literal:
        return " | ".join(map(json.dumps, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"[{', '.join('...' if item is Ellipsis else type_name(item) for item in get_args(hint))}]"
    if get_origin(hint) in (dict, Mapping) or is_section(hint):
        return "section"
    names = {str: "text", int: "integer", float: "number", bool: "true | false", type(None): "none"}
    return names.get(hint, "any value")


def read_toml(file: Any) -> dict[str, Any]:
    """Read a TOML file, given as a path or a package's resource.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or is a record of which the end is missing.
    """
    text = ""
    try:
        text = file.read_text(encoding="utf-8")
        if text and text.startswith(_RECORD[: len(text)]) and _RECORD_END not in text:
            raise ConfigError(f"{file}: is cut off: no line {_RECORD_END!r} is in it. Copy it again.")
        return tomllib.loads(text)
    except OSError as error:
        near = near_file(Path(str(file))) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{file}: cannot be read ({error.strerror}). Give an existing file{near or '.'}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        yaml = ". It looks like YAML; in TOML, a line [train] stands above epochs = 3"
        raise ConfigError(f"{file}: is not TOML: {error}{yaml if _looks_like_yaml(text) else ''}") from error
    except RecursionError:
        raise ConfigError(f"{file}: lists or tables are nested too deeply.") from None


def _looks_like_yaml(text: str) -> bool:
    """Return whether the first line with words is a key of YAML.

    >>> _looks_like_yaml("# mine\\ntrain:\\n  epochs: 3"), _looks_like_yaml("[train]\\nepochs: 3")
    (True, False)
    """
    lines = (line for line in text.splitlines() if line.strip("- ") and not line.startswith("#"))
    return re.match(r"(- )?[\w.-]+:(\s|$)", next(lines, "")) is not None


def toml_value(text: str) -> Any:
    """Parse one TOML value.

    Raises:
        ValueError: `text` is no TOML value.
    """
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except RecursionError:
        raise ValueError("nested too deeply") from None


def to_toml(values: Any, at: str = "") -> str:
    """Return a dataclass or mapping as TOML, with nested ones as sections. None is left out.

    >>> print(to_toml({"rate": 0.5, "name": None, "inner": {"sizes": (1, 2)}}), end="")
    rate = 0.5
    <BLANKLINE>
    [inner]
    sizes = [1, 2]
    """
    values = values if isinstance(values, Mapping) else dataclasses.asdict(values)
    names = {key: toml_key(key) for key in values}
    plain = {key: value for key, value in values.items() if value is not None and not isinstance(value, Mapping)}
    lines = [*([f"[{at}]"] if at else []), *(f"{names[key]} = {toml(value)}" for key, value in plain.items()), ""]
    parts = ["\n".join(lines)] if plain else []
    for key, value in values.items():
        if isinstance(value, Mapping):
            parts.append(to_toml(value, f"{at}.{names[key]}" if at else names[key]))
    return "\n".join(part for part in parts if part)


def to_record(values: Any) -> str:
    """Return a dataclass as TOML between two lines, without which `read_toml` refuses it: what a file that is cut off
    lacks would else be taken from the defaults.

    >>> print(text := to_record({"rate": 0.5}), end="")
    # Settings of a run
    rate = 0.5
    <BLANKLINE>
    # End of settings
    >>> _ = Path("cut.toml").write_text(text[:40])
    >>> read_toml(Path("cut.toml"))
    Traceback (most recent call last):
    embershard.errors.ConfigError: cut.toml: is cut off: no line '# End of settings' is in it. Copy it again.
    """
    return f"{_RECORD}\n{to_toml(values)}\n{_RECORD_END}\n"


def flat(values: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Return nested settings by `section.key`.

    >>> flat({"cache": {"ratio": 0.1}, "seed": 1})
    {'cache.ratio': 0.1, 'seed': 1}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        found.update(flat(value, f"{at}{key}.") if isinstance(value, Mapping) else {f"{at}{key}": value})
    return found


def toml_key(key: object) -> str:
    """Return a key as TOML, in quotes where it must be."""
    return str(key) if re.fullmatch(r"[\w-]+", str(key), re.ASCII) else toml(key)


def toml(value: Any) -> str:
    """Return one value as TOML; a mapping as an inline table."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{toml_key(key)} = {toml(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", r"\u007f")  # the one that TOML escapes, too
    return repr(value)


def _no_number(values: object, at: str = "") -> tuple[str, float, str] | None:
    """Return path and value of the first number that cannot be meant, and what is needed: it is infinite (1e999, too),
    not a number, or an integer that 64 bits do not hold."""
    if isinstance(values, float) and not math.isfinite(values):
        return at, values, "a finite number"
    if isinstance(values, int) and not -(2**63) <= values < 2**63:
        return at, values, "an integer of 64 bits, below 2^63"
    inner: Iterable[tuple[str | int, object]] = ()
    if isinstance(values, Mapping):
        inner = values.items()
    elif isinstance(values, (list, tuple)):
        inner = enumerate(values)
    return next((found for key, value in inner if (found := _no_number(value, _joined(at, key)))), None)


def _message(cls: type, values: Any, problem: ErrorDetails, elsewhere: Elsewhere) -> str:
    """Return the path of pydantic's problem in `values`, with the value there and the type that is needed."""
    kind, keys = problem["type"], list(problem["loc"])
    absent = keys.pop() if kind in (_UNKNOWN, _MISSING) else None
    at, hint = "", cls
    for key in keys:
        inner = _inner(hint, key, keys)
        if inner is None:
            break
        values, hint = values[key], inner
        at = _joined(at, key)
        if isinstance(key, int) and is_section(hint):  # its first field names it
            name = values.get(dataclasses.fields(hint)[0].name) if isinstance(values, dict) else None
            at += "" if name is None else f" ({name!r})"
    if kind == _UNKNOWN:
        return unknown_key(_section(hint), str(absent), at, elsewhere)
    if isinstance(absent, str):
        return f"{_joined(at, absent)}: is missing, needed {type_name(_inner(hint, absent, keys))}."
    return f"{at}: got {problem['input']!r:.80}, needed {type_name(hint)}."


def _inner(hint: Any, key: str | int, keys: list[str | int]) -> Any:
    """Return the type of the entry `key` in a value of type `hint`; None if `key` only names an alternative."""
    hint = _section(hint)
    arguments = get_args(hint)
    if is_section(hint):
        return field_types(hint).get(str(key))
    if get_origin(hint) in (dict, Mapping):
        return arguments[0 if keys[-1] == "[key]" else 1]  # the key itself is wrong, or the value under it
    if get_origin(hint) is tuple and isinstance(key, int):
        return arguments[0 if arguments[-1] is Ellipsis else key]
    return None


def _section(hint: Any) -> Any:
    """Return the type without its None."""
    options = [option for option in alternatives(hint) if option is not type(None)]
    return options[0] if len(options) == 1 else hint


def _joined(at: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{at}[{key}]"
    return f"{at}{': ' if at.endswith(')') else '.' if at else ''}{key}"
