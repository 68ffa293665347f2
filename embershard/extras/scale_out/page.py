"""The page of a study of scaling: `scaling.md`, and `scaling.json`, of which `embershard report -o` makes HTML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from embershard.extras.scale_out.points import HELD, Point
from embershard.extras.scale_out.tables import more_tables, speed_tables
from embershard.units import ShownTable
from embershard.whole_file import whole_file

PICTURE, MARKDOWN, VALUES = "scaling.png", "scaling.md", "scaling.json"
_MEANING = {
    "weak": "Weak scaling: the same samples per rank, so more ranks train more samples in a step.",
    "strong": "Strong scaling: the same global batch, so more ranks have fewer samples each.",
}


def write_study_page(points: Sequence[Point], absent: Sequence[str], folder: Path) -> None:
    """Write both files.

    Args:
        absent: sentences on what has no point.
    """
    text = [_MEANING[scaling] for scaling in HELD if any(each.scaling == scaling for each in points)]
    text.append(_made_of(points))
    tables = [_with_sentence(table) for table in (*speed_tables(points), *more_tables(points))]
    missing = [*absent, *_notes([each for each in points if each.source == "measured"])]
    values = {"text": text, "tables": [table._asdict() for table in tables], "missing": missing}
    for name, content in (
        (VALUES, json.dumps(values, indent=1)),
        (MARKDOWN, _markdown(folder.resolve().name, text, tables, missing)),
    ):
        with whole_file(folder / name) as partial:
            partial.write_text(f"{content}\n", encoding="utf-8")


def _with_sentence(table: ShownTable) -> ShownTable:
    """Return the table with its caption as a page has it; on a screen it is no sentence."""
    return table._replace(caption=f"{table.caption[:1].upper()}{table.caption[1:]}." if table.caption else "")


def _notes(points: Sequence[Point]) -> Iterator[str]:
    """Yield each note with the points that have it."""
    for note in dict.fromkeys(note for each in points for note in each.notes):
        own = [each for each in points if note in each.notes]
        named = "; ".join(f"{each.line}, {each.ranks} {'rank' if each.ranks == 1 else 'ranks'}" for each in own)
        yield f"{named if len(own) < max(2, len(points)) else 'all points'}: {note}"


def _made_of(points: Sequence[Point]) -> str:
    measured = [each for each in points if each.source == "measured"]
    devices = " and ".join(sorted({each.device for each in measured}))
    machines = sorted({each.configuration.rpartition("simulated on ")[2] for each in points if each not in measured})
    simulated = f" Simulated points are estimates for {', '.join(machines)}." if machines else ""
    runs = sum(each.runs for each in measured)
    return f"{runs} runs on {devices} are measured, by their means.{simulated} All columns: scaling.csv."


def _markdown(name: str, text: Sequence[str], tables: Sequence[ShownTable], missing: Sequence[str]) -> str:
    parts = [f"# Scaling: {name}", *text, f"![Measured, predicted and simulated, over ranks]({PICTURE})"]
    for table in tables:
        head = [*table.left, *table.right]
        rules = ["---"] * len(table.left) + ["---:"] * len(table.right)
        lines = "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in (head, rules, *table.rows))
        parts += [f"## {table.title}", lines, *([table.caption] * bool(table.caption))]
    if missing:
        parts += ["## What is missing or mixed, and why", "\n".join(f"* {line}" for line in missing)]
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
