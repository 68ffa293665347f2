"""Display of a run: a line per report, on a terminal with a progress bar below them, and a table at the end.

Before a run: what a model of one's own has to train.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from embershard.launch.screen import say
from embershard.metrics.figures import figures, main_values
from embershard.run_result import RunResult
from embershard.training.config import RunConfig
from embershard.training.reports import EvalReport, Report, TrainReport


class ProgressDisplay:
    """Shows reports as they come, until `close`; the run goes from `done_steps` to `total_steps`, or without an end.
    Where it `may_end_early`, the time that is left is at most so long."""

    def __init__(
        self, console: Console, total_steps: int | None, done_steps: int, *, may_end_early: bool = False
    ) -> None:
        self._console, self._total = console, total_steps
        self._eta = "ETA at most" if may_end_early else "ETA"
        self._first_step, self._started = done_steps, time.monotonic()
        self._bar: Progress | None = None
        self._said_weightless = False
        if console.is_terminal:
            self._bar = Progress(
                MofNCompleteColumn(),
                BarColumn(bar_width=8),  # with the rest it fits 80 columns
                TextColumn("{task.description}"),
                TextColumn("ETA ≤" if may_end_early else "ETA"),
                TimeRemainingColumn(compact=True),
                console=console,
            )
            self._task = self._bar.add_task("starting", total=total_steps, completed=done_steps)
            self._bar.start()

    def show(self, report: Report) -> None:
        """Print a line, and move the bar."""
        if isinstance(report, TrainReport | EvalReport) and not self._said_weightless:
            count = report.quality["samples"] or 0
            values = {value for name, value in report.quality.items() if name != "samples"}
            self._said_weightless = count > 0 and values == {None}
            if self._said_weightless:
                which = "held-out" if isinstance(report, EvalReport) else "newest training"
                line = f"step {report.step}: warning: all {count:,} {which} samples have weight 0 (data.table.weight)"
                say(self._console, line)
        if not isinstance(report, TrainReport):
            if line := report.line():
                say(self._console, line)
            return
        of = "" if self._total is None else f"/{self._total}"
        line = f"step {report.step}{of}  {report.line()}"
        if self._bar is not None:
            hits = "" if report.hit_rate_lookups is None else f" hit {report.hit_rate_lookups:.1%}"
            main, *_ = figures(main_values(report.quality))  # of the first label
            now = f"{report.samples_per_second:,.0f}/s loss {report.loss:.4f} {main.title} {main.value}{hits}"
            self._bar.update(self._task, completed=report.step, description=now)
            say(self._console, line)  # above the bar, and stays there
        elif self._total is None:
            say(self._console, line)
        else:
            per_step = (time.monotonic() - self._started) / max(report.step - self._first_step, 1)
            say(self._console, f"{line}  {self._eta} {per_step * (self._total - report.step):.0f} s")

    def close(self) -> None:
        """End the bar, so that other output can follow. May be called twice."""
        if self._bar is not None:
            self._bar.stop()


def closing_table(result: RunResult, what: str) -> Table:
    """Return what a run gave, with explanations for a newcomer. `what` names model and data."""
    columns = (Column(style="bold"), Column(), Column(style="dim"))
    table = Table(*columns, title="embershard: training finished", title_justify="left", show_header=False)
    alone = result.world_size == 1
    device = ("GPU" if alone else "GPUs") if result.device.startswith("cuda") else f"CPU process{'' if alone else 'es'}"
    share = "it holds all batches and tables" if alone else "each holds a part of every batch and of the tables"
    table.add_row("trained", what, f"{result.samples:,} samples in {result.steps:,} steps")
    table.add_row("ranks", f"{result.world_size} {device}", share)
    for row in result.closing_rows():
        table.add_row(*row)
    return table


def describe_own(config: RunConfig) -> str:
    """Build the model of `model.build`, without memory for its tables; return what would be trained, as comments of
    TOML.

    Raises:
        ConfigError: the function is not found, fails, or returns something else than a model.
    """
    import torch

    from embershard.data import schema_of
    from embershard.models import build_model
    from embershard.models.table_modules import collections_of, tables_in

    model: Any = build_model(config.model, schema_of(config.data), torch.device("cpu"))
    tables, lines = list(tables_in(model)), [f"{config.model.build} makes a model that fits the data:"]
    for path, module in collections_of(model):
        own = [table for table in tables if table.module == path]
        rows = sum(table.num_rows for table in own)
        name = path.partition(".")[2] or "the model itself"
        lines.append(f"  {name}: {type(module).__name__}, {len(own)} tables with {rows:,} rows")
        for table in own:
            what = table.pooling or "sequences"
            lines.append(f"    {table.name}: {table.num_rows:,} x {table.dim}, {what} of {', '.join(table.features)}")
    for name, module in model.model.named_children():
        weights = sum(each.numel() for each in module.parameters() if each.device.type != "meta")
        if weights:
            lines.append(f"  {name}: {type(module).__name__}, {weights:,} dense weights")
    own_weights = sum(each.numel() for each in model.model.parameters(recurse=False))
    if own_weights:
        lines.append(f"  parameters of its own: {own_weights:,} dense weights")
    return "\n".join(f"# {line}" for line in lines)
