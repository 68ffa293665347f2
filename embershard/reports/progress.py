"""Display of a run: a line per report, on a terminal with a progress bar below them, and a table at the end.

Before a run: what a model of one's own has to train.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from embershard.launch.screen import say
from embershard.metrics.figures import figures, form_of, main_values, quality_rows, title_of
from embershard.run_result import HotColdTotals, IdTotals, LookAheadTotals, RunCaches, RunResult, steady_mark
from embershard.training.config import RunConfig
from embershard.training.reports import EvalReport, Report, TrainReport
from embershard.units import number, size


class ProgressDisplay:
    """Shows reports as they come, until `close`; the run goes from `done_steps` to `total_steps`, or without an end."""

    def __init__(self, console: Console, total_steps: int | None, done_steps: int) -> None:
        self._console, self._total = console, total_steps
        self._first_step, self._started = done_steps, time.monotonic()
        self._bar: Progress | None = None
        self._said_weightless = False
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
            self._bar.update(self._task, completed=report.step, description=_bar_line(report))
            say(self._console, line)  # above the bar, and stays there
        elif self._total is None:
            say(self._console, line)
        else:
            per_step = (time.monotonic() - self._started) / max(report.step - self._first_step, 1)
            say(self._console, f"{line}  ETA {per_step * (self._total - report.step):.0f} s")

    def close(self) -> None:
        """End the bar, so that other output can follow. May be called twice."""
        if self._bar is not None:
            self._bar.stop()


def _bar_line(report: TrainReport) -> str:
    hits = "" if report.hit_rate_lookups is None else f" hit {report.hit_rate_lookups:.1%}"
    main, *_ = figures(main_values(report.quality))  # of the first label
    return f"{report.samples_per_second:,.0f}/s loss {report.loss:.4f} {main.title} {main.value}{hits}"


def closing_table(result: RunResult, what: str) -> Table:
    """Return what a run gave, with explanations for a newcomer. `what` names model and data."""
    columns = (Column(style="bold"), Column(), Column(style="dim"))
    table = Table(*columns, title="embershard: training finished", title_justify="left", show_header=False)
    alone = result.world_size == 1
    device = ("GPU" if alone else "GPUs") if result.device.startswith("cuda") else f"CPU process{'' if alone else 'es'}"
    share = "it holds all batches and tables" if alone else "each holds a part of every batch and of the tables"
    table.add_row("trained", what, f"{result.samples:,} samples in {result.steps:,} steps")
    table.add_row("ranks", f"{result.world_size} {device}", share)
    for row in quality_rows(result.quality):
        table.add_row(*row)
    if (held_out := result.held_out) is not None and held_out.samples:
        left = 0 if result.bad_rows is None else held_out.samples - result.eval_samples
        bad = f"; {result.eval_samples:,} of them judged: bad rows are left out" if left else ""
        how = f"of {held_out.all_samples:,}: {held_out.how}{bad}"
        table.add_row("held out", f"{held_out.samples:,} samples", how)
    if windows := result.windows:
        late = sum(window.late for window in windows)
        means = "; figures are means, by samples" if result.eval_samples else ""
        what = f"{windows[0].start} to {windows[-1].start}, evaluated before they trained{means}; {late:,} samples late"
        table.add_row("windows", f"{len(windows):,}", what)
    for row in _best_rows(result):
        table.add_row(*row)
    p50, p95 = (number(milliseconds, ".1f") for milliseconds in (result.step_ms.p50, result.step_ms.p95))
    speed = f"{number(result.samples_per_second, ',.0f')} samples/s{steady_mark(result)}"
    if result.resumed_at:
        since = f"speed and counts below: of the {result.measured_steps:,} steps since the resume"
        table.add_row("resumed", f"at step {result.resumed_at:,}", since)
    table.add_row("speed", speed, f"a step takes {p50} ms (median), {p95} ms (95 %)")
    for row in [
        *_cache_rows(result.cache, result.hot_cold),
        *_id_rows(result.ids),
        *_look_ahead_rows(result.look_ahead, result.cache, "" if alone else ", all ranks together"),
        *_sent_rows(result),
        *_hot_cold_rows(result.hot_cold, result.cache),
    ]:
        table.add_row(*row)
    return table


def _best_rows(result: RunResult) -> list[tuple[str, str, str]]:
    if (best := result.best) is None:
        return []
    kept = "kept for predict, eval and export" if result.keeps_best else "not kept (checkpoint.keep_best)"
    end = f"training stopped early, at {result.steps:,}" if result.stopped_early else f"the last is {result.steps:,}"
    value = number(best.value, form_of(best.metric))
    return [(f"best {title_of(best.metric)}", value, f"step {best.step:,}, {kept}; {end}")]


def _cache_rows(cache: RunCaches | None, packed: HotColdTotals | None) -> list[tuple[str, str, str]]:
    if cache is None:
        return [("cache", "off", "all embedding rows are on the device")]
    on_device = cache.slots + (0 if packed is None else packed.hot_rows)  # hot rows are in no cache
    share = on_device / cache.rows
    moved = cache.fills + cache.write_backs
    moved_bytes = cache.bytes_to_device + cache.bytes_to_host
    fullest = max((rank.device_bytes for rank in cache.ranks), default=0)
    of_ranks = f"slots and maps of all ranks, {size(fullest)} on the fullest"
    return [
        ("rows on device", f"{on_device:,} of {cache.rows:,}", f"{share:.1%} of the embedding rows"),
        ("hit rate", number(cache.hit_rate_lookups, ".1%"), "lookups whose row was on the device already"),
        ("rows moved", f"{moved:,}", f"{size(moved_bytes)} to and from the device"),
        ("evictions", f"{cache.evictions:,}", "rows that left the device for other rows"),
        ("caches' memory", f"{size(cache.device_bytes)} device", f"{of_ranks}; {size(cache.host_bytes)} host"),
    ]


def _id_rows(ids: Mapping[str, IdTotals]) -> list[tuple[str, str, str]]:
    if not ids:
        return []
    live, admitted, evicted, refused = (
        sum(getattr(table, name) for table in ids.values()) for name in ("live", "admitted", "evicted", "refused")
    )
    ages = sum(table.evicted * (table.evicted_age or 0) for table in ids.values())
    age = f", {ages / evicted:,.1f} batches after its last use" if evicted else ""
    without = f"; {refused:,} times none was free" if refused else ""
    what = f"{admitted:,} times an id got a row, {evicted:,} times one lost it{age}{without}"
    return [("ids", f"{live:,} have rows", f"of {len(ids)} tables; {what}")]


def _look_ahead_rows(ahead: LookAheadTotals | None, cache: RunCaches | None, of: str) -> list[tuple[str, str, str]]:
    if ahead is None or cache is None:
        return []
    mean = ahead.lookahead_mean
    known = "all batches known" if mean is None else f"{mean:.1f} batches known"
    resident = f"{number(ahead.prefetch_mean, '.1f')} of them on the device before their step (means)"
    milliseconds = ahead.stall_seconds * 1e3 / max(ahead.steps, 1)
    waits = f"of the first batch, and of those that did not fit; {milliseconds:.2f} ms a step{of}"
    return [("looked ahead", known, resident), ("late rows", f"{cache.critical_path_fills:,}", waits)]


def _sent_rows(result: RunResult) -> list[tuple[str, str, str]]:
    """Return the bytes between ranks per rank and step; nothing for one rank."""
    sent = result.sent_bytes.over(result.parts)
    kinds = [sent.ids, sent.embeddings, sent.gradients, sent.dense_all_reduce]
    names = ("ids", "embeddings", "their gradients", "dense gradients")
    shares = ", ".join(f"{size(each)} {name}" for each, name in zip(kinds, names, strict=True))
    return [("between ranks", f"{size(sum(kinds))}", f"sent by a rank in a step: {shares}")] if sum(kinds) else []


def _hot_cold_rows(packed: HotColdTotals | None, cache: RunCaches | None) -> list[tuple[str, str, str]]:
    if packed is None or cache is None:
        return []
    batches = ", ".join(f"{count:,} {kind}" for kind, count in packed.batches.items())
    hot = f"{packed.hot_samples:.1%} of the samples look up {packed.hot_rows:,} hot rows only"
    cold = cache.lookups - cache.hot_lookups
    rate = (cache.hits_lookups - cache.hot_lookups) / cold if cold else None
    found = f"{cache.hot_lookups:,} lookups, all hits; the hit rate of other rows is {number(rate, '.1%')}"
    copies = f"{size(cache.hot_rows_bytes)} device"
    return [("batches", batches, hot), ("hot rows", copies, f"of all ranks; {found}")]


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
