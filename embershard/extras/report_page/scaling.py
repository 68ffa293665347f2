"""What a study of scaling left in a sweep's folder: its picture, and its points as a table."""

from __future__ import annotations

import csv
from pathlib import Path

from embershard.extras.report_page.parts import PagePicture, PageTable, Section

#: Columns of `scaling.csv`: title and format. What is simulated says so in the first.
_COLUMNS = {
    "source": ("", ""),
    "scaling": ("scaling", ""),
    "configuration": ("configuration", ""),
    "ranks": ("ranks", ",.0f"),
    "samples_per_second": ("samples/s", ",.0f"),
    "low": ("from", ",.0f"),
    "high": ("to", ",.0f"),
    "efficiency": ("efficiency", ".1%"),
    "step_ms": ("step ms, measured", ".2f"),
    "predicted_step_ms": ("step ms, predicted", ".2f"),
    "error": ("error", "+.1%"),
}


def scaling_section(sweep: Path) -> Section | None:
    """Return the section; None where the sweep is no study of scaling, or has not ended."""
    points, picture = sweep / "scaling.csv", sweep / "scaling.png"
    if not points.exists() or not picture.exists():
        return None
    with points.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    shown = [
        tuple(
            format(float(row[name]), form) if form and row.get(name) else row.get(name, "")
            for name, (_, form) in _COLUMNS.items()
        )
        for row in rows
    ]
    note = "Simulated points are estimates: nothing here measured them. All columns: scaling.csv."
    terms = {
        "from, to": "Measured: the mean's 95 % confidence interval. Simulated: by the machine's constants.",
        "error": "The step that the run's plan predicted, over the measured one, minus 1.",
    }
    table = PageTable("Points", [title for title, _ in _COLUMNS.values()], shown, note, terms)
    return Section(f"Scaling {sweep}", [PagePicture("Measured, predicted, simulated", picture.read_bytes()), table])
