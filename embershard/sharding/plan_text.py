"""JSON for plans: written with one entry to a line so that ``git diff`` shows what changed; read with every key and
type checked, because people edit it."""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from embershard.errors import ShardingError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Read(Generic[T]):
    """A value and the digest that stood beside one of its parts; None where there was none."""

    value: T
    digest: str | None


def to_text(values: Mapping[str, Any]) -> str:
    """JSON in which every entry of a list has a line of its own (numbers share one), in the order of ``values``.
    Dataclasses are written as objects."""
    return "\n".join(_object_lines(values, "")) + "\n"


def from_text(cls: type[T], text: str, digest_of: str) -> Read[T]:
    """An instance of the dataclass ``cls``; ``digest`` inside its part ``digest_of`` is taken out.

    Raises:
        ShardingError: the text is not JSON, a key is unknown, missing or there twice, or a value of another type.
    """
    try:
        values = json.loads(text, object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and endless nesting
        raise ShardingError(f"is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ShardingError("is not a plan: needed one JSON object.")
    part = values.get(digest_of)
    digest = part.pop("digest", None) if isinstance(part, dict) else None
    return Read(_instance(cls, values, ""), digest if isinstance(digest, str) else None)


# ---------------------------------------------------------------------------------------- writing


def _object_lines(values: Mapping[str, Any], indent: str) -> list[str]:
    lines = [f"{indent}{{"]
    for number, (key, value) in enumerate(values.items()):
        *above, last = _value_lines(value, f"{indent}  ")
        comma = "," if number + 1 < len(values) else ""
        first = above[0] if above else last
        head = f"{indent}  {json.dumps(key)}: {first.lstrip()}"
        lines += [head, *above[1:], f"{last}{comma}"] if above else [f"{head}{comma}"]
    return [*lines, f"{indent}}}"]


def _value_lines(value: Any, indent: str) -> list[str]:
    if isinstance(value, Mapping) and value:
        return _object_lines(value, indent)
    if isinstance(value, (list, tuple)) and any(not isinstance(entry, (int, float)) for entry in value):
        entries = [f"{indent}  {_one_line(entry)}" for entry in value]
        return [f"{indent}[", *(f"{entry}," for entry in entries[:-1]), entries[-1], f"{indent}]"]
    return [indent + _one_line(value)]


def _one_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=vars)


# ---------------------------------------------------------------------------------------- reading


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ShardingError(f"key {twice!r} is twice in one object ({_one_line(values)[:80]}...). Remove one.")
    return values


def _no_constant(name: str) -> Any:
    raise ShardingError(f"holds {name}, which is no number. Replace it.")


def _instance(cls: type[T], values: dict[str, Any], where: str) -> T:
    """An instance of a dataclass from a JSON object; ``where`` it stands."""
    hints = get_type_hints(cls)
    at = f"{where}: " if where else ""
    for key in values:
        if key not in hints:
            close = difflib.get_close_matches(key, hints, n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Known here: {', '.join(hints)}."
            raise ShardingError(f"{at}unknown key {key!r}. {hint}")
    missing = [key for key in _needed(cls) if key not in values]
    if missing:
        raise ShardingError(f"{at}key {missing[0]!r} is missing. It is {_type_name(hints[missing[0]])}.")
    return cls(**{key: _value(hints[key], value, f"{at}{key}") for key, value in values.items()})


def _needed(cls: Any) -> Iterator[str]:
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            yield field.name


def _value(hint: Any, value: Any, where: str) -> Any:
    """``value`` as the type ``hint``."""
    if hint is Any:
        return value
    if get_origin(hint) in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        (hint,) = (option for option in get_args(hint) if option is not type(None))
        return _value(hint, value, where)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _instance(hint, value, where)  # type: ignore[arg-type]
    if get_origin(hint) is tuple and isinstance(value, list):
        inner = get_args(hint)[0]
        return tuple(_value(inner, entry, _entry(where, number, entry)) for number, entry in enumerate(value))
    if get_origin(hint) is dict and isinstance(value, dict):
        return {key: _value(get_args(hint)[1], inside, f"{where}.{key}") for key, inside in value.items()}
    if get_origin(hint) is Literal and isinstance(value, str) and value in get_args(hint):
        return value
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if type(value) is hint:
        return value
    raise ShardingError(f"{where}: got {_one_line(value)[:80]}, needed {_type_name(hint)}.")


def _entry(where: str, number: int, entry: Any) -> str:
    """Where in a list an entry stands, by number and by name."""
    name = entry.get("table", entry.get("rank")) if isinstance(entry, dict) else None
    return f"{where}[{number}]" + ("" if name is None else f" ({name!r})")


def _type_name(hint: Any) -> str:
    if hint is Any:
        return "any value"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join("null" if option is type(None) else _type_name(option) for option in get_args(hint))
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(json.dumps(choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return f"a list: each {_type_name(get_args(hint)[0])}"
    if get_origin(hint) is dict or dataclasses.is_dataclass(hint):
        return "an object"
    return {str: "text", int: "a whole number", float: "a number", bool: "true or false"}[hint]
