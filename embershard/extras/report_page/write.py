"""Writes a page: all sections, Plotly's code and every number in one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from embershard import __version__
from embershard.extras.report_page.measured import (
    by_slice,
    caches,
    curves,
    moved,
    reported,
    step_time,
    training,
    windows,
)
from embershard.extras.report_page.plan import plan_section
from embershard.extras.report_page.predicted import predicted
from embershard.extras.report_page.runs import Run, begun, models, settings, summary
from embershard.extras.report_page.scaling import scaling_section
from embershard.extras.report_page.sweep import sweep_section
from embershard.reports.run_folder import RunFolder, is_sweep
from embershard.sharding.plan import Plan
from embershard.sweeps.spread import read_configurations
from embershard.whole_file import whole_file

#: Runs of sweeps that are drawn one by one; more lines could not be told apart.
_MOST_RUNS_OF_SWEEPS = 8


def write_page(folders: Sequence[Path], output: Path) -> None:
    """Write the page of runs and sweeps, given by their folders, and of plans, given by their files.

    Raises:
        ConfigError: a folder is neither, or one of its files cannot be read.
        ShardingError: a file is no plan.
    """
    sections, runs, text = [], [], []
    for folder in folders:
        if folder.is_file():
            sections.append(plan_section(folder, Plan.load(folder)))
            continue
        if not is_sweep(folder):
            is_alone = [other.name for other in folders].count(folder.name) == 1
            runs.append((folder.name if is_alone else str(folder), RunFolder.read_begun(folder)))
            continue
        configurations = read_configurations(folder)
        if (scaling := scaling_section(folder)) is not None:
            sections.append(scaling)
        sections.append(sweep_section(folder, configurations))
        finished = [each for each in configurations if each.folders]
        prefix = f"{folder.name}: " if len(folders) > 1 else ""
        runs += [(prefix + each.name, RunFolder.read(each.folders[0])) for each in finished[:_MOST_RUNS_OF_SWEEPS]]
        text.append(
            f"Of {folder}, the first finished repeat of {min(len(finished), _MOST_RUNS_OF_SWEEPS)} of {len(finished)} "
            "configurations is drawn below. Give the folders of runs to see others."
        )
    quality = (training, by_slice, curves, windows)
    makers = (summary, begun, models, settings, *quality, reported, moved, caches, step_time, predicted) if runs else ()
    named = [Run(name, number, folder) for number, (name, folder) in enumerate(runs)]
    sections += [make(named) for make in makers]
    names = ", ".join(map(str, folders))
    environment = Environment(
        loader=PackageLoader("embershard.extras", "report_page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html.jinja").render(
        title=f"embershard: {names}",
        made_at=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
        version=__version__,
        text=text,
        sections=[section for section in sections if section.parts or section.text],
        plotly=get_plotlyjs(),
    )
    with whole_file(output) as partial:
        partial.write_text(page, encoding="utf-8")
