"""What the first rank prints: a progress bar on a terminal, plain lines elsewhere, and a table at the end."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from embershard.training.reports import EvalReport, Report, SaveReport, TrainReport


class ProgressDisplay:
    """Shows reports as they come, until `close`. `total_steps` is the whole run's."""

    def __init__(self, console: Console, total_steps: int, done_steps: int) -> None:
        self._console, self._total = console, total_steps
        self._first_step, self._started = done_steps, time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                MofNCompleteColumn(),
                BarColumn(bar_width=8),  # with the rest it fits 80 columns
                TextColumn("{task.description}"),
                TextColumn("ETA"),
                TimeRemainingColumn(compact=True),
                console=console,
            )
            self._task = self._bar.add_task("starting", total=total_steps, completed=done_steps)
            self._bar.start()

    def show(self, report: Report) -> None:
        """Moves the bar, or prints a line."""
        if isinstance(report, TrainReport):
            if self._bar is not None:
                self._bar.update(self._task, completed=report.step, description=bar_line(report))
            else:
                eta = f"ETA {self._eta_seconds(report.step):.0f} s"
                self._print(f"step {report.step}/{self._total}  {train_line(report)}  {eta}")
        elif isinstance(report, EvalReport):
            self._print(f"step {report.step}: {eval_line(report)}")
        else:
            assert isinstance(report, SaveReport)
            self._print(f"step {report.step}: saved {report.path} ({report.seconds:.1f} s)")

    def _eta_seconds(self, step: int) -> float:
        per_step = (time.monotonic() - self._started) / max(step - self._first_step, 1)
        return per_step * (self._total - step)

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, highlight=False, markup=False)

    def close(self) -> None:
        """Ends the bar, so that other output can follow. May be called twice."""
        if self._bar is not None:
            self._bar.stop()


def train_line(report: TrainReport) -> str:
    """Speed, loss, AUC so far and hit rate in one line."""
    parts = [
        f"{report.samples_per_second:,.0f} samples/s",
        f"loss {report.loss:.4f}",
        f"AUC {number(report.auc, '.4f')}",
    ]
    if report.hit_rate_lookups is not None:
        parts.append(f"hit rate {report.hit_rate_lookups:.1%}")
    return "  ".join(parts)


def bar_line(report: TrainReport) -> str:
    """The same, shorter, to stand beside a bar."""
    parts = [f"{report.samples_per_second:,.0f}/s loss {report.loss:.4f} AUC {number(report.auc, '.3f')}"]
    if report.hit_rate_lookups is not None:
        parts.append(f"hit {report.hit_rate_lookups:.1%}")
    return " ".join(parts)


def eval_line(report: EvalReport) -> str:
    """Quality on the held-out part in one line."""
    q = report.quality
    return (
        f"held-out AUC {number(q.auc, '.4f')}  NE {number(q.ne, '.4f')}  logloss {number(q.logloss, '.4f')}  "
        f"accuracy {number(q.accuracy, '.1%')}  calibration {number(q.calibration, '.3f')}  "
        f"({q.samples:,} samples, {report.seconds:.1f} s)"
    )


def closing_table(result: dict[str, Any], what: str) -> Table:
    """The end of a run for somebody who sees one for the first time. `what` names model and data."""
    table = Table(title="embershard: training finished", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_column(style="dim")
    device = "GPUs" if result["device"].startswith("cuda") else "CPU processes"
    table.add_row("trained", what, f"{result['samples']:,} samples in {result['steps']:,} steps")
    table.add_row("ranks", f"{result['world_size']} {device}", "each holds a part of every batch and of the tables")
    table.add_row("AUC", number(result["auc"], ".4f"), "held-out samples; 0.5 is guessing, 1 is perfect")
    table.add_row("NE", number(result["ne"], ".4f"), "normalized entropy; below 1 beats the average click rate")
    table.add_row("log loss", number(result["logloss"], ".4f"), "held-out samples")
    table.add_row("speed", f"{number(result['samples_per_second'], ',.0f')} samples/s", _step_time(result["step_ms"]))
    for row in [*_cache_rows(result["cache"]), *_look_ahead_rows(result["look_ahead"], result["cache"])]:
        table.add_row(*row)
    return table


def number(value: float | None, form: str) -> str:
    """A number in a format, or n/a."""
    return "n/a" if value is None else format(value, form)


def _step_time(step_ms: dict[str, float | None]) -> str:
    return f"a step takes {number(step_ms['p50'], '.1f')} ms (median), {number(step_ms['p95'], '.1f')} ms (95 %)"


def _cache_rows(cache: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    if cache is None:
        return [("cache", "off", "all embedding rows are on the device")]
    share = cache["slots"] / cache["rows"]
    moved = cache["fills"] + cache["write_backs"]
    moved_bytes = cache["bytes_to_device"] + cache["bytes_to_host"]
    return [
        ("rows on device", f"{cache['slots']:,} of {cache['rows']:,}", f"{share:.1%} of the embedding rows"),
        ("hit rate", number(cache["hit_rate_lookups"], ".1%"), "lookups whose row was on the device already"),
        ("rows moved", f"{moved:,}", f"{megabytes(moved_bytes)} to and from the device"),
        ("evictions", f"{cache['evictions']:,}", "rows that made room for others"),
        ("memory", f"{megabytes(cache['device_bytes'])} device", f"{megabytes(cache['host_bytes'])} host"),
    ]


def _look_ahead_rows(ahead: dict[str, Any] | None, cache: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    if ahead is None or cache is None:
        return []
    mean, resident = ahead["lookahead_mean"], number(ahead["prefetch_mean"], ".1f")
    milliseconds = ahead["stall_seconds"] * 1e3 / max(ahead["steps"], 1)
    return [
        (
            "looked ahead",
            "all batches known" if mean is None else f"{mean:.1f} batches known",
            f"{resident} of them on the device before their step (means)",
        ),
        (
            "late rows",
            f"{cache['critical_path_fills']:,}",
            f"of the first batch, and of those that did not fit; {milliseconds:.2f} ms a step, all ranks together",
        ),
    ]


def megabytes(num_bytes: int) -> str:
    """Bytes for people."""
    return f"{num_bytes / 2**20:,.1f} MiB"
