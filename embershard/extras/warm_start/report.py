"""What a warm start takes, as tables for a reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from embershard.extras.warm_start.matching import Entry, Matching

_FATES = ("taken", "renamed", "grown", "moved", "widened", "new", "dropped")


def refusal(matching: Matching, title: str) -> str:
    """Return why a warm start is refused: all problems, a line each.

    >>> entry = Entry("table", "t_a", "refused", "t_a", "10 x 8", "10 x 4", "rows do not fit. Keep the dim")
    >>> print(refusal(Matching((entry,)), "runs/a"))
    runs/a does not fit this model, and nothing was taken:
      what       saved   now     problem
      table t_a  10 x 8  10 x 4  rows do not fit. Keep the dim
    """
    rows = [("what", "saved", "now", "problem")]
    rows += [(_what(entry), entry.saved, entry.now, entry.why) for entry in matching.refused]
    return "\n".join([f"{title} does not fit this model, and nothing was taken:", *_lines(rows)])


def summary(matching: Matching, title: str) -> str:
    """Return what a new model takes: everything that is not as it was, a line each, and how many are.

    >>> print(summary(Matching((Entry("table", "t_a", "taken"), Entry("layer", "over.bias", "taken"))), "runs/a"))
    From runs/a: 1 table taken; 1 layer taken.
    """
    counts: Counter[tuple[str, str]] = Counter((entry.kind, entry.fate) for entry in matching.entries)
    parts = [
        ", ".join(_counted(kind, fate, counts[kind, fate]) for fate in _FATES if counts[kind, fate])
        for kind in ("table", "layer")
    ]
    text = f"From {title}: {'; '.join(filter(None, parts)) or 'nothing'}."
    others = [entry for entry in matching.entries if entry.fate != "taken" or entry.why]
    if not others:
        return "\n".join([text, *matching.notes])
    rows = [("what", "saved", "now", "", "")]
    rows += [(_what(entry), entry.saved, entry.now, _fate(entry), entry.why) for entry in others]
    return "\n".join([text, *_lines(rows), *matching.notes])


def _what(entry: Entry) -> str:
    return entry.name if entry.kind == "option" else f"{entry.kind} {entry.name}"


def _fate(entry: Entry) -> str:
    return f"{entry.fate}, was {entry.was}" if entry.was not in ("", entry.name) else entry.fate


def _counted(kind: str, fate: str, count: int) -> str:
    return f"{count} {kind}{'' if count == 1 else 's'} {fate}"


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    padded = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    return [f"  {line}".rstrip() for line in padded]
