"""What a study of scaling left in a sweep's folder: its picture, and its points as tables."""

from __future__ import annotations

import json
from pathlib import Path

from embershard.extras.report_page.parts import PagePicture, PageTable, Section


def scaling_section(sweep: Path) -> Section | None:
    """Return the section; None where the sweep is no study of scaling, or has not ended."""
    values, picture = sweep / "scaling.json", sweep / "scaling.png"
    if not values.exists() or not picture.exists():
        return None
    found = json.loads(values.read_text(encoding="utf-8"))
    tables = [
        PageTable(each["title"], [*each["left"], *each["right"]], each["rows"], each["caption"])
        for each in found["tables"]
    ]
    if found["missing"]:
        rows = [(line,) for line in found["missing"]]
        tables.append(PageTable("What is missing or mixed, and why", ["what"], rows))
    drawn = PagePicture("Measured, predicted, simulated", picture.read_bytes())
    return Section(f"Scaling {sweep}", [drawn, *tables], found["text"])
