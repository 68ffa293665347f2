"""A page's runs, by name: a summary, and their settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from embershard.cache.totals import RunCaches
from embershard.errors import ConfigError, ShardingError
from embershard.extras.report_page.parts import PageTable, Section
from embershard.metrics.figures import form_of, main_names, title_of
from embershard.reports.run_folder import RunFolder
from embershard.reports.start import ModelSummary
from embershard.run_result import RunResult, held_out_warning, steady_mark
from embershard.units import number, size


@dataclass(frozen=True)
class Run:
    """A run under the name that the page has for it.

    Attributes:
        number: its place on the page, which gives its colour.
    """

    name: str
    number: int
    folder: RunFolder

    @property
    def exchange(self) -> str:
        """What its ranks exchange: "pooled" or "rows", which says what a lookup of a cache is; "both" by tables."""
        try:
            if self.folder.has_plan:
                found = {table.exchange for table in self.folder.plan(None).tables if table.kernel == "cached"}
                return found.pop() if len(found) == 1 else "both" if found else "pooled"
            return str(self.folder.settings().get("sharding.exchange", "pooled"))
        except (ConfigError, ShardingError):
            return "not known"

    def minutes(self, report: Mapping[str, Any]) -> float | None:
        """Return the minutes from the run's start (of earlier versions, its first report) to a report; None where it
        has no time."""
        times = [self.folder.first_time, report.get("time")]
        try:
            begin, now = (datetime.fromisoformat(str(each).replace("Z", "+00:00")) for each in times)
        except ValueError:
            return None
        return (now - begin).total_seconds() / 60

    @property
    def result(self) -> RunResult | None:
        """What the run gave; None where it has not ended."""
        return self.folder.result

    @property
    def cache(self) -> RunCaches | None:
        """What the caches did; None in a run without caches, or that has not ended."""
        return None if self.result is None else self.result.cache


#: Why hit rates of runs with different exchanges do not stand in one chart.
HITS_DIFFER = (
    'Hits of runs with different sharding.exchange do not compare. With "pooled" every id of every sample is a lookup. '
    'With "rows" a row is looked up once per rank and batch, however many samples have it.'
)


#: Rows of the results: titles, and what they mean.
_TERMS = {
    "step ms, median": "Half of a rank's steps take less.",
    "p95": "95 % of them take less.",
    "training loss": "The mean since the last report.",
    "best": "The best evaluation and its step, where the run follows one.",
    "hits": "The share of lookups whose row was on the device.",
    "caches": "Bytes of slots and maps on the devices of all ranks, at the end.",
    "host": "Bytes of their rows and scores on the hosts.",
    "sent": "Bytes that a rank sends to others in a step.",
    "slowest rank, dealt": "What its samples cost, over those of the mean rank, dealt by cost (data.deal).",
    "slowest rank, undealt": "The same, had each rank had its slice of the same samples, in their order.",
    "not steady yet": "The run was too short for the speed of a long one.",
}


def summary(runs: Sequence[Run]) -> Section:
    """Return the section of all runs' results: a row for each figure, a column for each run."""
    ended = [(run.name, run.result) for run in runs if run.result is not None]
    names = main_names((result.quality for _, result in ended), "page")
    columns = [_summary_of(run, names) for run in runs]
    titles = dict.fromkeys(title for column in columns for title in column)
    rows = [(title, *(column.get(title, "") for column in columns)) for title in titles]
    shown = {*titles, *(["not steady yet"] if any("not steady" in cell for row in rows for cell in row) else [])}
    terms = {term: meaning for term, meaning in _TERMS.items() if term in shown}
    note = f"Of the held-out samples, at the last step: {', '.join(map(title_of, names))}."
    exchanges = {run.exchange for run in runs if run.cache}
    if len(exchanges) > 1:
        note += f" {HITS_DIFFER} Here: " + ", ".join(f"{run.name} {run.exchange}" for run in runs if run.cache) + "."
    going = [run.name for run in runs if run.result is None]
    text = [f"Not ended, so without a result: {', '.join(going)}."] if going else []
    if warning := held_out_warning(result for _, result in ended):
        text.append(f"{warning}.")
    text += [
        f"{name}: speed, step ms, hits, sent{', slowest rank' if result.deal else ''} and the sections of caches are "
        f"since the resume at step {result.resumed_at:,}. Dotted lines mark it. The training's "
        f"{title_of(names[0])} starts anew there."
        for name, result in ended
        if result.resumed_at
    ]
    tables = [PageTable("Results", ("", *(run.name for run in runs)), rows, note, terms)]
    closing = {name: {title: value for title, value, _ in result.closing_rows()} for name, result in ended}
    more = dict.fromkeys(title for of_run in closing.values() for title in of_run)
    rows = [(title, *(of_run.get(title, "") for of_run in closing.values())) for title in more]
    if rows:
        tables.append(PageTable("As each run's closing table has it", ("", *closing), rows, is_folded=True))
    return Section("Runs", tables, text)


def _summary_of(run: Run, names: Sequence[str]) -> dict[str, str]:
    """Return a run's cells by the titles of their rows."""
    result, cache = run.result, run.cache
    if result is None:
        reports = run.folder.reports("train")
        return {"steps": f"{reports[-1]['step']:,}" if reports else "0"}
    sent, best = result.sent_bytes.over(result.parts).in_training, result.best
    found = {title_of(name): number(result.quality.get(name), form_of(name)) for name in names}
    if best is not None:
        found["best"] = f"{title_of(best.metric)} {number(best.value, form_of(best.metric))}, step {best.step:,}"
    found |= {
        "training loss": number(result.loss, ".5f"),
        "samples/s": number(result.samples_per_second, ",.0f") + steady_mark(result),
        "step ms, median": number(result.step_ms.p50, ".2f"),
        "p95": number(result.step_ms.p95, ".2f"),
        "ranks": str(result.world_size),
        "steps": f"{result.steps:,}",
        "samples": f"{result.samples:,}",
        "hits": number(cache.hit_rate_lookups, ".2%") if cache else "no cache",
    }
    if cache is not None:
        found |= {"caches": size(cache.device_bytes), "host": size(cache.host_bytes)}
    found |= {f"slowest rank, {how}": f"{ratio:.3f} x mean cost" for how, ratio in result.deal.items()}
    return found | {"sent": size(sent) if sent else "0"}


def begun(runs: Sequence[Run]) -> Section:
    """Return the section of how runs were started: command, host, versions."""
    facts = {run.name: _facts_of(run) for run in runs}
    titles = dict.fromkeys(title for own in facts.values() for title in own)
    rows = [(title, *(own.get(title, "") for own in facts.values())) for title in titles]
    tables = [PageTable("How they were run" if len(runs) > 1 else "How it was run", ("", *facts), rows)] if rows else []
    return Section("Start", tables)


def _facts_of(run: Run) -> dict[str, str]:
    """Return what is known of a run's newest start, of earlier versions what its result has."""
    if run.folder.starts:
        first, *_, last = [run.folder.starts[0], *run.folder.starts]
        resumes = [f"{start.step:,}" for start in run.folder.starts[1:]]
        own = {"command": last.command, "started": f"{first.time[:19].replace('T', ' ')} UTC"}
        own |= {"resumed at step": ", ".join(resumes)} if resumes else {}
        own |= {"host": last.host, "devices": last.device}
        commit, found = last.git_commit, last.versions
    elif run.result is not None:
        own, commit, found = {}, run.result.git_commit, run.result.versions
    else:
        return {}
    return own | ({"commit": commit[:12]} if commit else {}) | found


def models(runs: Sequence[Run]) -> Section:
    """Return the section of the models that runs train: their tables and layers, once for equal ones."""
    found: dict[ModelSummary, list[str]] = {}
    for run in runs:
        if run.folder.starts:
            found.setdefault(run.folder.starts[-1].model, []).append(run.name)
    parts, said = [], []
    for model, names in found.items():
        of = f" of {', '.join(names)}" if len(found) > 1 else ""
        said += [f"{', '.join(names)}: {line}" if of else line for line in model.lines]
        tables = [(each.name, f"{each.rows:,} x {each.dim}", size(each.bytes)) for each in model.tables]
        parts.append(PageTable(f"Embedding tables{of}", ("table", "rows x dim", "weights"), tables, is_folded=True))
        layers = [(each.name, each.kind, each.shape, f"{each.parameters:,}", size(each.bytes)) for each in model.layers]
        header = ("layer", "kind", "shapes", "parameters", "bytes")
        parts.append(PageTable(f"Layers{of}", header, layers, is_folded=True))
    return Section("Models" if len(found) > 1 else "Model", parts, said)


#: Those that a page has of every run, where any has a value.
_MAIN_SETTINGS = (
    *("data.kind", "data.path", "data.split", "held out", "data.seed", "train.seed"),
    *("model.arch", "model.build", "model.embedding_dim", "ranks", "train.batch_size", "train.global_batch_size"),
    *("train.epochs", "train.max_steps", "embedding_optimizer.kind", "embedding_optimizer.lr", "dense_optimizer.kind"),
    *("dense_optimizer.lr", "cache.enabled", "cache.ratio", "cache.device_bytes", "cache.policy", "sharding.mode"),
)


def settings(runs: Sequence[Run]) -> Section:
    """Return the section of the runs' main settings, and of those that are not the same in all."""
    found, text = [], []
    for run in runs:
        try:
            beside = dict.fromkeys(("ranks", "held out"), "not known")
            if (result := run.result) is not None:
                beside = {"ranks": str(result.world_size), "held out": str(result.held_out or "not known")}
            found.append((run, {**beside, **run.folder.settings()}))
        except ConfigError as error:
            text.append(f"Left out: {error}")
    keys = dict.fromkeys([*_MAIN_SETTINGS, *(key for _, settings in found for key in settings)])
    rows = [(key, *(str(settings.get(key, "none")) for _, settings in found)) for key in keys]
    main = [row for row in rows if row[0] in _MAIN_SETTINGS and set(row[1:]) - {"none"}]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if len(runs) > 1 and not differing:
        text.append("No setting differs.")
    header = ("setting", *(run.name for run, _ in found))
    tables = [
        PageTable("Settings that differ", header, differing),
        PageTable("Main settings", header, main, is_folded=len(runs) > 1),
    ]
    return Section("Settings", [table for table in tables if table.rows], text)
