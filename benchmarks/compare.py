"""A benchmark's result beside stored ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Machines that agree in these are of one kind.
_KIND = ("cpu", "cores", "gpu")
#: Figures that differ by less are as stored: machines are shared, and their speed varies.
_TOLERANCE = 1.2
#: Words in the names of figures of time, of which less is better, and of speed.
_TIMES, _SPEEDS = ("_ms", "seconds", "_ns"), ("per_second",)
_NOT_FIGURES = ("benchmark", "settings", "machine")


def stored_results(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the stored results of a benchmark that say on which machine they were measured."""
    found = []
    for path in sorted(folder.glob(f"{name}*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(result, dict) and "machine" in result and result.get("benchmark", name) == name:
            found.append(result)
    return found


def comparison_lines(new: Mapping[str, Any], stored: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each figure: now, stored, their ratio and a verdict."""
    machine = _kind(new)
    same = [each for each in stored if _kind(each) == machine]
    settings = [each for each in same if each.get("settings") == new.get("settings")]
    if not same:
        kinds = sorted({f"{each['machine'].get('cpu')}, {each['machine'].get('cores')} cores" for each in stored})
        yield f"Nothing is stored for this kind of machine ({machine[0]}, {machine[1]} cores)" + (
            f"; only for {'; '.join(kinds)}." if kinds else "."
        )
    elif not settings:
        yield "What is stored for this kind of machine was measured with other settings, so figures are not compared."
    before = dict(_figures(settings[0])) if settings else {}
    for name, value in _figures(new):
        if name not in before:
            yield f"{name}  {value:g}"
        elif isinstance(before[name], (int, float)):
            ratio = value / before[name] if before[name] else float(value == before[name])
            yield f"{name}  {value:g}, stored {before[name]:g}: {ratio:.2f}x, {verdict(name, ratio)}"


def verdict(name: str, ratio: float) -> str:
    """Return what a ratio of a figure to the stored one means."""
    if 1 / _TOLERANCE <= ratio <= _TOLERANCE:
        return "as stored"
    if any(word in name for word in _SPEEDS):
        return "faster" if ratio > 1 else "slower"
    if any(word in name for word in _TIMES):
        return "slower" if ratio > 1 else "faster"
    return "other"


def _kind(result: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(result.get("machine", {}).get(name) for name in _KIND)


def _figures(values: Any, at: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested values by `name.name`, settings and machine left out."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            if at or name not in _NOT_FIGURES:
                yield from _figures(value, f"{at}.{name}" if at else str(name))
    elif isinstance(values, list):
        for number, value in enumerate(values):
            yield from _figures(value, f"{at}.{number}")
    elif isinstance(values, (int, float)) and not isinstance(values, bool):
        yield at, values
