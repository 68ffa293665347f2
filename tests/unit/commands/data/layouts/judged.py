"""`python -m tests.unit.commands.data.layouts.judged [SEEDS]`: what `inspect` makes of columns of public layouts."""

from __future__ import annotations

import csv
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from embershard.commands.data.command import parser
from embershard.extras.judging.inspect_files import Inspected
from tests.unit.commands.data.layouts.first import FIRST
from tests.unit.commands.data.layouts.second import SECOND
from tests.unit.commands.data.layouts.values import Values

LAYOUTS = {**FIRST, **SECOND}


@dataclass(frozen=True)
class JudgedColumn:
    """What one column is, and was taken for."""

    layout: str
    name: str
    wanted: str
    kind: str
    sure: str
    why: str

    @property
    def is_right(self) -> bool:
        return self.kind in self.wanted.split("|")


def judged_layout(layout: str, seed: int, folder: Path) -> list[JudgedColumn]:
    """Write the file of a layout, and judge its columns by `inspect`; the label is named where people have to."""
    label, make = LAYOUTS[layout]
    columns = make(Values(seed))
    path = folder / "layout.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*(cells for _, cells in columns.values()), strict=True))
    words = ["inspect", str(path), *(["--label", label] if label else [])]
    found = Inspected.of(parser().parse_args(words), needs_label=True)
    assert found.label is not None
    kinds = {each.column: (each.judgement.kind, each.judgement.sure, each.why) for each in found.suggested}
    kinds[found.label.column] = "label", "sure", found.label.why
    wanted = {name or "Unnamed: 0": kind for name, (kind, _) in columns.items()}
    return [JudgedColumn(layout, name, kind, *kinds[name]) for name, kind in wanted.items()]


def main(seeds: int) -> None:
    counts: Counter[tuple[str, bool]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for layout in LAYOUTS:
            for seed in range(seeds):
                found = judged_layout(layout, seed, Path(folder))
                counts.update((each.sure, each.is_right) for each in found)
                wrong = [each for each in found if not each.is_right]
                print(f"{layout}, seed {seed}: {len(found) - len(wrong)} of {len(found)}", flush=True)
                for each in wrong:
                    print(f"    {each.name}: wanted {each.wanted}, got {each.kind}, {each.sure}: {each.why[:150]}")
    right = sum(count for (_, is_right), count in counts.items() if is_right)
    print(f"{right} of {counts.total()} columns right, {right / counts.total():.1%}")
    for sure in ("sure", "likely", "guess"):
        print(f"  {sure}: {counts[sure, False]} of {counts[sure, False] + counts[sure, True]} wrong")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
