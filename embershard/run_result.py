"""`RunResult`: what a run gave, as result.json has it, and how readers see it.

Only this module writes and reads the file. An entry of it is a field of `RunResult`, and `_shown` says which rows of
the closing table, and which tables, show it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embershard.cache.file.file_counts import FileCounts
from embershard.cache.totals import RankCaches, RunCaches
from embershard.distributed.checkpoint.best import BestEvaluation
from embershard.distributed.sent_bytes import SentBytes
from embershard.errors import ConfigError
from embershard.machine import RankThreads
from embershard.metrics.figures import Figures, Slices, figures, form_of, quality_rows, slice_tables, title_of
from embershard.settings.decoding import decode
from embershard.units import Row, ShownTable, number, size
from embershard.whole_file import whole_file

RESULT = "result.json"
#: Of the file. One without "format" is of format 1.
FORMAT = 1
#: Programs are quiet while they take no more than this share of a machine's processor time.
QUIET = 0.1


def _shown(
    rows: Callable[[Any, RunResult], Iterable[Row]] | None = None,
    tables: Callable[[Any, RunResult, int], Iterable[ShownTable]] | None = None,
) -> dict[str, Any]:
    """Return the metadata of a field of `RunResult`: what shows its value, as rows of the closing table and as tables,
    with at most so many lines each."""
    return {"rows": rows, "tables": tables}


@dataclass(frozen=True, kw_only=True)
class IdTotals:
    """What became of the ids of a table that takes any, on all ranks.

    Attributes:
        live: ids with a row, now.
        admitted: times that an id got a row; `evicted`: that one lost it; `refused`: that none was free.
        evicted_age: batches since the last use of the evicted ids, on average; None without one.
    """

    live: int
    admitted: int
    evicted: int
    refused: int
    evicted_age: float | None


@dataclass(frozen=True, kw_only=True)
class LookAheadTotals:
    """What look-ahead did: batches known and resident ahead, over all ranks; the seconds are of all ranks together, and
    so is what it read from files (None: no rows are in files)."""

    steps: int
    lookahead_min: int | None
    lookahead_mean: float | None
    prefetch_min: int | None
    prefetch_mean: float | None
    prefetch_depth: int | None = None
    max_known_bytes: int
    stall_seconds: float
    uses_worker: bool
    files: FileCounts | None = None


@dataclass(frozen=True, kw_only=True)
class SentTotals:
    """Bytes that all ranks sent in the run, by the kinds of `SentBytes`; `ranks` has the same of each."""

    ids: float
    embeddings: float
    gradients: float
    dense_all_reduce: float
    other: float
    sync: float = 0  # in files of earlier versions; they counted it as other
    ranks: tuple[dict[str, int | float], ...]

    def over(self, count: float) -> SentBytes:
        """Return the bytes of one of `count` equal parts: steps, ranks."""
        return SentBytes(*(getattr(self, each.name) for each in dataclasses.fields(SentBytes))).over(count)


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory:
    """The most memory that a rank has had since it started.

    Attributes:
        host_bytes: of its process. All is in it: libraries, data, and on a CPU also what plans call device memory.
        host_bytes_before: what the process had just before the model was built.
        device_bytes: of tensors on its GPU; None on a CPU.
    """

    rank: int
    host_bytes: int
    host_bytes_before: int
    device_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class HotColdTotals:
    """Of `sharding.mode = "hot_cold"`: the hot rows, the share of hot samples, the trained batches by kind."""

    threshold: int | None = None
    hot_rows: int
    hot_bytes: int | None = None
    hot_samples: float
    batches: dict[str, int]
    rate: int | float | None = None


@dataclass(frozen=True)
class StepTimes:
    """Median and 95th percentile of the steps' milliseconds; None without a step."""

    p50: float | None
    p95: float | None = None


@dataclass(frozen=True)
class ObeyedPlan:
    """The plan that the run obeyed."""

    path: str | None
    digest: str


@dataclass(frozen=True)
class PublishedState:
    """The newest publication of a run.

    Attributes:
        name: of its folder.
        step: trained by then.
        problem: why the last state of the run is not published; empty where it is.
    """

    name: str
    step: int
    problem: str = ""


@dataclass(frozen=True)
class HeldOutPart:
    """The samples that were held out.

    Attributes:
        split: `data.split`; "eval_path" where they have a path of their own.
        how: what they are, in words.
        samples, all_samples: how many they are, and of how many.
    """

    split: str
    how: str
    samples: int
    all_samples: int

    def __str__(self) -> str:
        return f"{self.how}: {self.samples:,} of {self.all_samples:,} samples"


@dataclass(frozen=True)
class WindowResult:
    """A window of time, evaluated before it trained.

    Attributes:
        step: steps that were trained before.
        window: its number, from 0.
        start: the time in UTC at which it begins.
        samples: of it; `late` of them are of earlier windows.
        quality, slices: figures, as those of a run.
    """

    step: int
    window: int
    start: str
    samples: int
    late: int
    quality: Figures
    slices: Slices = field(default_factory=dict)

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> WindowResult:
        """Return the window of a line of metrics.jsonl.

        >>> WindowResult.of({"step": 5, "window": 1, "start": "", "samples": 9, "late": 0, "auc": 0.7}).quality
        {'auc': 0.7}
        """
        values = {name: value for name, value in report.items() if name not in ("kind", "time", "seconds")}
        own = {each.name: values.pop(each.name) for each in dataclasses.fields(cls) if each.name in values}
        return decode(cls, {**own, "quality": values})


def mean_quality(windows: Sequence[WindowResult]) -> dict[str, float]:
    """Return the samples of all windows, and the means of their figures by name: a window counts by its samples, where
    the figure is defined.

    >>> windows = [WindowResult(9, n, "", n, 0, {"auc": n / 4, "ne": None}) for n in (1, 3)]
    >>> mean_quality(windows)
    {'samples': 4, 'auc': 0.625}
    """
    found: dict[str, float] = {"samples": sum(each.samples for each in windows)}
    for name in dict.fromkeys(name for each in windows for name in each.quality):
        pairs = [(each.samples, value) for each in windows if (value := each.quality[name]) is not None]
        if count := sum(samples for samples, _ in pairs):
            found[name] = sum(samples * value for samples, value in pairs) / count
    return found


@dataclass(frozen=True, kw_only=True)
class FollowedFiles:
    """Files of a folder that was followed.

    Attributes:
        taken: of the whole run.
        bad_rows: rows of these that are no samples.
        left_out: names of bad ones (`data.bad_files`).
        passed_over: names of links to nothing, folders, and others that are no files.
        taken_again: names of those that had the bytes of an earlier one.
        changed: names of those that changed after they had trained.
    """

    taken: int
    bad_rows: int
    left_out: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    taken_again: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


def _held_out_rows(held_out: HeldOutPart | None, run: RunResult) -> Iterator[Row]:
    if held_out is not None and held_out.samples:
        left = 0 if run.bad_rows is None else held_out.samples - run.eval_samples
        bad = f"; {run.eval_samples:,} of them judged: bad rows are left out" if left else ""
        yield "held out", f"{held_out.samples:,} samples", f"of {held_out.all_samples:,}: {held_out.how}{bad}"


def _window_rows(windows: Sequence[WindowResult], run: RunResult) -> Iterator[Row]:
    if windows:
        late = sum(window.late for window in windows)
        means = "; figures are means, by samples" if run.eval_samples else ""
        first, last = windows[0].start, windows[-1].start
        what = f"{first} to {last}, evaluated before they trained{means}; {late:,} samples late"
        yield "windows", f"{len(windows):,}", what


def _window_tables(windows: Sequence[WindowResult], run: RunResult, top: int) -> Iterator[ShownTable]:
    if not windows:
        return
    shown = windows[-top:]
    title = "Windows" if len(shown) == len(windows) else f"The newest {len(shown)} of {len(windows)} windows"
    names = [f"{each.title} {each.label}".strip() for each in figures(shown[0].quality)]
    rows = [
        (
            window.start,
            *(f"{count:,}" for count in (window.step, window.samples, window.late)),
            *(each.value for each in figures(window.quality)),
        )
        for window in shown
    ]
    caption = (
        "quality on all samples of a window before any of them trained; step: those trained by then; late: samples of "
        "earlier windows that came with this one"
    )
    yield ShownTable(title, ("from (UTC)",), ("step", "samples", "late", *names), rows, caption)


def _best_rows(best: BestEvaluation | None, run: RunResult) -> Iterator[Row]:
    if best is not None:
        kept = "kept for predict, eval and export" if run.keeps_best else "not kept (checkpoint.keep_best)"
        end = f"training stopped early, at {run.steps:,}" if run.stopped_early else f"the last is {run.steps:,}"
        title = title_of(best.metric)
        yield f"best {title}", number(best.value, form_of(best.metric)), f"step {best.step:,}, {kept}; {end}"
        if run.was_improving:
            yield "still improving", f"{title}, at the end", "longer training may be better: train.epochs"


def _speed_rows(device: str, run: RunResult) -> Iterator[Row]:
    if run.resumed_at:
        since = f"speed and counts below: of the {run.measured_steps:,} steps since the resume"
        yield "resumed", f"at step {run.resumed_at:,}", since
    p50, p95 = (number(milliseconds, ".1f") for milliseconds in (run.step_ms.p50, run.step_ms.p95))
    speed = f"{number(run.samples_per_second, ',.0f')} samples/s{steady_mark(run)}"
    yield "speed", speed, f"a step takes {p50} ms (median), {p95} ms (95 %)"


def _thread_rows(threads: RankThreads | None, run: RunResult) -> Iterator[Row]:
    if threads is not None:
        yield "threads", f"{threads.count} {'per' if run.world_size > 1 else 'of the'} rank", threads.why


def _other_program_rows(share: float | None, run: RunResult) -> Iterator[Row]:
    if run.is_disturbed:
        yield "other programs", f"{share:.0%}", "of the processor time: alone on the machine, steps are faster"


def _memory_rows(ranks: Sequence[MeasuredMemory], run: RunResult) -> Iterator[Row]:
    if ranks:
        host = max(ranks, key=lambda each: each.host_bytes)
        of = "the most that the process of a rank had" if run.world_size > 1 else "the most that the process had"
        yield "memory", f"{size(host.host_bytes)} host", f"{of}; {size(host.host_bytes_before)} before the model"
        if device := max((each.device_bytes or 0 for each in ranks), default=0):
            yield "", f"{size(device)} device", "the most that tensors of a rank took"


def _cache_rows(cache: RunCaches | None, run: RunResult) -> Iterable[Row]:
    if cache is None:
        return [("cache", "off", "all embedding rows are on the device")]
    return cache.closing_rows(0 if run.hot_cold is None else run.hot_cold.hot_rows)


def _cache_tables(cache: RunCaches | None, run: RunResult, top: int) -> Iterable[ShownTable]:
    return () if cache is None else cache.by_rank_and_table(max(1, run.measured_steps), top)


def _look_ahead_rows(ahead: LookAheadTotals | None, run: RunResult) -> Iterator[Row]:
    if ahead is None or run.cache is None:
        return
    mean = ahead.lookahead_mean
    known = "all batches known" if mean is None else f"{mean:.1f} batches known"
    resident = f"{number(ahead.prefetch_mean, '.1f')} of them on the device before their step (means)"
    milliseconds = ahead.stall_seconds * 1e3 / max(ahead.steps, 1)
    of = "" if run.world_size == 1 else ", all ranks together"
    waits = f"of the first batch, and of those that did not fit; {milliseconds:.2f} ms a step{of}"
    yield "looked ahead", known, resident
    yield "late rows", f"{run.cache.critical_path_fills:,}", waits
    if (files := ahead.files) is not None:
        read = f"{files.rows_read:,} rows read ({files.pages_read:,} pages), {files.rows_written:,} written"
        waited = f"{files.wait_seconds * 1e3 / max(ahead.steps, 1):.2f} ms a step{of}"
        yield "from files", read, f"{files.late_batches:,} batches waited for them; {waited}"


def _sent_rows(totals: SentTotals, run: RunResult) -> Iterator[Row]:
    """Yield the bytes between ranks per rank and step; nothing for one rank."""
    sent = totals.over(run.parts)
    kinds = [sent.ids, sent.embeddings, sent.gradients, sent.dense_all_reduce, *([sent.sync] if sent.sync else [])]
    names = ("ids", "embeddings", "their gradients", "dense gradients", "averages of groups")
    shares = ", ".join(f"{size(each)} {name}" for each, name in zip(kinds, names, strict=False))
    if sent.in_training:
        yield "between ranks", f"{size(sent.in_training)}", f"sent by a rank in a step: {shares}"


def _hot_cold_rows(packed: HotColdTotals | None, run: RunResult) -> Iterator[Row]:
    if packed is None or (cache := run.cache) is None:
        return
    batches = ", ".join(f"{count:,} {kind}" for kind, count in packed.batches.items())
    yield "batches", batches, f"{packed.hot_samples:.1%} of the samples look up {packed.hot_rows:,} hot rows only"
    cold = cache.lookups - cache.hot_lookups
    rate = (cache.hits_lookups - cache.hot_lookups) / cold if cold else None
    found = f"{cache.hot_lookups:,} lookups, all hits; the hit rate of other rows is {number(rate, '.1%')}"
    yield "hot rows", f"{size(cache.hot_rows_bytes)} device", f"of all ranks; {found}"


def _deal_rows(ratios: Mapping[str, float], run: RunResult) -> Iterator[Row]:
    if ratios:
        yield "slowest rank", f"{ratios['dealt']:.3f} x mean", f"by cost; {ratios['undealt']:.3f} without data.deal"


def _id_rows(ids: Mapping[str, IdTotals], run: RunResult) -> Iterator[Row]:
    if not ids:
        return
    live, admitted, evicted, refused = (
        sum(getattr(table, name) for table in ids.values()) for name in ("live", "admitted", "evicted", "refused")
    )
    ages = sum(table.evicted * (table.evicted_age or 0) for table in ids.values())
    age = f", {ages / evicted:,.1f} batches after its last use" if evicted else ""
    without = f"; {refused:,} times none was free" if refused else ""
    what = f"{admitted:,} times an id got a row, {evicted:,} times one lost it{age}{without}"
    yield "ids", f"{live:,} have rows", f"of {len(ids)} tables; {what}"


def _id_tables(ids: Mapping[str, IdTotals], run: RunResult, top: int) -> Iterator[ShownTable]:
    """Yield what became of the ids of the tables with most evictions."""
    if not ids:
        return
    shown = sorted(ids.items(), key=lambda item: -item[1].evicted)[:top]
    title = "Ids, most evictions first"
    if len(ids) > top:
        title = f"Ids of the {top} of {len(ids)} tables with most evictions"
    rows = [
        (
            name,
            *(f"{count:,}" for count in (found.live, found.admitted, found.evicted, found.refused)),
            number(found.evicted_age, ",.1f"),
        )
        for name, found in shown
    ]
    caption = (
        "live: ids with a row at the end; refused: times that no row was free; age: batches between the last use of an "
        "id and its eviction, on average"
    )
    yield ShownTable(title, ("table",), ("live", "admitted", "evicted", "refused", "age"), rows, caption)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run gave.

    Attributes:
        steps: of the whole run; `measured_steps` since it was last resumed, as `cache`, `sent_bytes`, `bad_rows`,
            `skipped_batches`, `hot_cold` and `deal`.
        samples: trained, of all ranks.
        samples_per_second: of all ranks; it and `step_ms` are of the steps at the speed of a long run, and None
            without a step.
        is_steady: False where the run was too short for such steps alone.
        loss: of training, mean since the last report; `label_losses`: of each of several labels, over the samples that
            have it.
        quality: figures of the held-out samples by name, "auc" or "auc/label"; None where one is undefined. In the
            file they stand beside the other entries. In time order, without `data.eval_path`: means over the windows.
        slices: figures of parts of these samples.
        best: the best evaluation of a run that follows it: that whose checkpoint is kept, if `keeps_best`.
        stopped_early: by `train.early_stopping`.
        was_improving: the last of several evaluations was the best.
        bad_rows: None where none is tolerated.
        followed: of a run that follows a folder.
        device: "cpu" or "cuda".
        threads: of the first rank; None in files of earlier versions.
        other_programs: share of the processor time that they took since the run began, on the machine where it is
            largest; None in files of earlier versions.
        memory: of each rank, in order; none in files of earlier versions.
        cache: None in a run without caches.
        ids: of the tables that take any id, since the run was last resumed.
        changes: settings that resumes changed on request.
        held_out: None in files of earlier versions.
        windows: of a run in time order.
        published: of a run that publishes.
        deal: of a run that deals its samples: the slowest rank's cost over the mean's, "dealt" and "undealt".
    """

    steps: int
    measured_steps: int
    samples: int
    skipped_batches: int = 0
    samples_per_second: float | None
    step_ms: StepTimes
    is_steady: bool
    loss: float | None
    label_losses: dict[str, float | None] = field(default_factory=dict)
    quality: Figures = field(metadata=_shown(lambda quality, run: quality_rows(quality)))
    slices: Slices = field(default_factory=dict, metadata=_shown(tables=lambda slices, run, top: slice_tables(slices)))
    eval_samples: int
    held_out: HeldOutPart | None = field(default=None, metadata=_shown(_held_out_rows))
    windows: tuple[WindowResult, ...] = field(default=(), metadata=_shown(_window_rows, _window_tables))
    best: BestEvaluation | None = field(default=None, metadata=_shown(_best_rows))
    keeps_best: bool = False
    stopped_early: bool = False
    was_improving: bool = False
    bad_rows: int | None = None
    followed: FollowedFiles | None = None
    world_size: int
    device: str = field(
        metadata=_shown(_speed_rows)
    )  # in the closing table after quality, and before what the rest counts
    threads: RankThreads | None = field(default=None, metadata=_shown(_thread_rows))
    other_programs: float | None = field(default=None, metadata=_shown(_other_program_rows))
    memory: tuple[MeasuredMemory, ...] = field(default=(), metadata=_shown(_memory_rows))
    cache: RunCaches | None = field(metadata=_shown(_cache_rows, _cache_tables))
    look_ahead: LookAheadTotals | None = field(metadata=_shown(_look_ahead_rows))
    sent_bytes: SentTotals = field(metadata=_shown(_sent_rows))
    hot_cold: HotColdTotals | None = field(metadata=_shown(_hot_cold_rows))
    ids: dict[str, IdTotals] = field(default_factory=dict, metadata=_shown(_id_rows, _id_tables))
    deal: dict[str, float] = field(default_factory=dict, metadata=_shown(_deal_rows))
    changes: tuple[dict[str, Any], ...] = ()
    plan: ObeyedPlan | None
    published: PublishedState | None = None
    versions: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None

    @property
    def is_disturbed(self) -> bool:
        """True where other programs took so much that steps were slower than the machine's."""
        return self.other_programs is not None and self.other_programs > QUIET

    @property
    def parts(self) -> int:
        """Steps of ranks: what totals of all ranks are divided by for means per rank and step."""
        return max(1, self.measured_steps * self.world_size)

    @property
    def resumed_at(self) -> int:
        """The step at which the run was last resumed; 0 where it was not."""
        return self.steps - self.measured_steps

    @property
    def step_seconds(self) -> float | None:
        """The median of a step; None where no step was timed."""
        return None if self.step_ms.p50 is None else self.step_ms.p50 / 1e3

    @property
    def plan_digest(self) -> str | None:
        """The digest of the plan that the run obeyed; None: it had none."""
        return None if self.plan is None else self.plan.digest

    @property
    def caches(self) -> dict[int, RankCaches]:
        """The caches of each rank; empty in a run without caches."""
        return {} if self.cache is None else {each.rank: each for each in self.cache.ranks}

    def closing_rows(self) -> Iterator[Row]:
        """Yield rows of the closing table, in the order of the fields."""
        for each in dataclasses.fields(self):
            if rows := each.metadata.get("rows"):
                yield from rows(getattr(self, each.name), self)

    def tables(self, top: int) -> Iterator[ShownTable]:
        """Yield the tables of what it has by table, rank, window or value, with `top` lines each."""
        for each in dataclasses.fields(self):
            if tables := each.metadata.get("tables"):
                yield from tables(getattr(self, each.name), self, top)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RunResult:
        """Return the result of the entries of a file.

        Raises:
            ConfigError: one is missing or of another type, or the file is of a later version.
        """
        entries = dict(values)
        if (found := entries.pop("format", FORMAT)) != FORMAT:
            raise ConfigError(f"got format {found!r}, this version reads {FORMAT}.")
        names = {each.name for each in dataclasses.fields(cls)} - {"quality"}
        quality = {name: entries.pop(name) for name in list(entries) if name not in names}
        return decode(cls, {**entries, "quality": quality})

    def to_dict(self) -> dict[str, Any]:
        """Return the entries of the file, but for its format."""
        values = dataclasses.asdict(self)
        return {**values.pop("quality"), **values}

    @classmethod
    def read(cls, folder: Path) -> RunResult:
        """Read the result in the folder of a run.

        Raises:
            ConfigError: there is none, or it cannot be read.
        """
        file = folder / RESULT
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            what = "the run has not ended, or it failed" if folder.is_dir() else "there is no such folder"
            page = " Of one that goes on, there is the page (embershard report RUN -o FILE.html)." * folder.is_dir()
            raise ConfigError(f"{file}: not found; {what}. Give the folder of a run that ended.{page}") from error
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}: cannot be read ({error}). Needed is what embershard train wrote.") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: got a JSON {type(values).__name__}, needed what embershard train wrote.")
        try:
            return cls.of(values)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error} Needed is what embershard train wrote; train again.") from error

    @classmethod
    def find(cls, folder: Path) -> RunResult | None:
        """Return the result in a folder; None where there is none, one that a crash tore, or that is of something else.

        A run with a result is finished, whatever became of its last checkpoint, and however its process ended.
        """
        try:
            return cls.read(folder)
        except (ConfigError, OSError):
            return None

    def write(self, folder: Path) -> None:
        """Write the file; who finds it, finds all of it."""
        text = json.dumps({"format": FORMAT, **self.to_dict()}, indent=2, allow_nan=False)
        with whole_file(folder / RESULT) as partial:
            partial.write_text(text + "\n", encoding="utf-8")


def held_out_warning(results: Iterable[RunResult]) -> str:
    """Return a sentence, without its full stop, where runs were judged by different samples, as far as their results
    tell; else ""."""
    differ = len({result.held_out for result in results if result.eval_samples}) > 1
    return "The held-out sets differ, so figures of held-out samples do not compare" if differ else ""


def steady_mark(*results: RunResult) -> str:
    """Return what stands beside the speed of runs: a hint where one was too short to have that of a long run."""
    return "" if all(result.is_steady for result in results) else " (not steady yet)"
