"""A plan's JSON: one entry to a line, so that `git diff` shows what changed; checked when it is read, since people edit
it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from embershard.errors import ShardingError
from embershard.sharding.shards import TablePlacement


def to_text(values: Mapping[str, Any]) -> str:
    """Return JSON in which every entry of a list has a line, and numbers share one. Dataclasses become objects."""
    return "\n".join(_object_lines(values, "")) + "\n"


def from_text(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    >>> from_text('{"slots": 1, "slots": 2}')
    Traceback (most recent call last):
    embershard.errors.ShardingError: is not JSON: key 'slots' is twice in one object ({"slots": 2}...). Remove one.

    Raises:
        ShardingError: the text is not JSON, a key is there twice, or a number is not finite.
    """
    try:
        values = json.loads(text, object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and endless nesting
        raise ShardingError(f"is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ShardingError("is not a plan: needed one JSON object.")
    return values


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
    return json.dumps(value, ensure_ascii=False, allow_nan=False, default=described)


def described(value: Any) -> Mapping[str, Any]:
    """Return a dataclass as a JSON object."""
    return value.described if isinstance(value, TablePlacement) else vars(value)


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ShardingError(f"key {twice!r} is twice in one object ({_one_line(values)[:80]}...). Remove one.")
    return values


def _no_constant(name: str) -> Any:
    raise ShardingError(f"holds {name}, which is no number. Replace it.")
