"""`RunResult`: what a run gave, as result.json has it. Only this module writes and reads the file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embershard.distributed.checkpoint.best import BestEvaluation
from embershard.distributed.sent_bytes import SentBytes
from embershard.errors import ConfigError
from embershard.settings.decoding import decode
from embershard.whole_file import whole_file

RESULT = "result.json"
#: Figures of slices, by column, value and name; "samples" is one of them.
Slices = dict[str, dict[str, dict[str, int | float | None]]]
#: Of the file. One without "format" is of format 1.
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class CacheTotals:
    """What the caches of a table, a rank or all ranks did, since the run was last resumed.

    Attributes:
        rows, slots, device_bytes, host_bytes: at the end. `device_bytes` are of the caches alone: slots, optimizer
            states, maps, and copies of hot rows, as a plan's `RankPrediction.cache_device_bytes`. Tables without a
            cache, dense layers, activations and buffers are not among them; `host_bytes` are rows and their scores.
        hit_rate_unique, hit_rate_lookups: shares in 0..1; None without lookups.
        overflow_growths: times that a cache grew for a batch that did not fit.
        critical_path_fills: rows that a step waited for.
        seconds: of the host, for planning and copies; `stall_seconds` in which training waited for rows.
    """

    rows: int
    slots: int
    hit_rate_unique: float | None
    hit_rate_lookups: float | None
    device_bytes: int
    host_bytes: int
    fills: int
    write_backs: int
    bytes_to_device: int
    bytes_to_host: int
    evictions: int
    overflow_growths: int
    critical_path_fills: int
    hits_unique: int
    unique_ids: int
    hits_lookups: int
    lookups: int
    seconds: float
    stall_seconds: float


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """One cache of a rank: the tables that share its slots, and its size at the end."""

    tables: tuple[str, ...]
    slots: int
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class RankCaches(CacheTotals):
    """All caches of a rank.

    Attributes:
        hot_rows_bytes, hot_lookups: of the rows that every rank has (`sharding.mode = "hot_cold"`); they count in the
            totals, and not in those of tables.
    """

    rank: int
    tables: dict[str, CacheTotals]
    pools: tuple[PoolSize, ...]
    hot_rows_bytes: int = 0
    hot_lookups: int = 0


@dataclass(frozen=True, kw_only=True)
class RunCaches(CacheTotals):
    """All caches of all ranks.

    Attributes:
        ratio: the setting; None where bytes or a plan gave the slots.
        hot_rows_bytes, hot_lookups: as in `RankCaches`.
    """

    ratio: float | None
    tables: dict[str, CacheTotals]
    ranks: tuple[RankCaches, ...]
    hot_rows_bytes: int = 0
    hot_lookups: int = 0


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
    """What look-ahead did: batches known and resident ahead, over all ranks; the seconds are of all ranks together."""

    steps: int
    lookahead_min: int | None
    lookahead_mean: float | None
    prefetch_min: int | None
    prefetch_mean: float | None
    prefetch_depth: int | None = None
    max_known_bytes: int
    stall_seconds: float
    uses_worker: bool


@dataclass(frozen=True, kw_only=True)
class SentTotals:
    """Bytes that all ranks sent in the run, by the kinds of `SentBytes`; `ranks` has the same of each."""

    ids: float
    embeddings: float
    gradients: float
    dense_all_reduce: float
    other: float
    ranks: tuple[dict[str, int | float], ...]

    def over(self, count: float) -> SentBytes:
        """Return the bytes of one of `count` equal parts: steps, ranks."""
        return SentBytes(self.ids, self.embeddings, self.gradients, self.dense_all_reduce, self.other).over(count)


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
    quality: dict[str, float | None]
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


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run gave.

    Attributes:
        steps: of the whole run; `measured_steps` since it was last resumed, as `cache`, `sent_bytes`, `bad_rows`,
            `skipped_batches` and `hot_cold`.
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
        bad_rows: None where none is tolerated.
        followed: of a run that follows a folder.
        device: "cpu" or "cuda".
        cache: None in a run without caches.
        ids: of the tables that take any id, since the run was last resumed.
        changes: settings that resumes changed on request.
        held_out: None in files of earlier versions.
        windows: of a run in time order.
        published: of a run that publishes.
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
    quality: dict[str, float | None]
    slices: Slices = field(default_factory=dict)
    eval_samples: int
    held_out: HeldOutPart | None = None
    windows: tuple[WindowResult, ...] = ()
    best: BestEvaluation | None = None
    keeps_best: bool = False
    stopped_early: bool = False
    bad_rows: int | None = None
    followed: FollowedFiles | None = None
    world_size: int
    device: str
    cache: RunCaches | None
    look_ahead: LookAheadTotals | None
    sent_bytes: SentTotals
    hot_cold: HotColdTotals | None
    ids: dict[str, IdTotals] = field(default_factory=dict)
    changes: tuple[dict[str, Any], ...] = ()
    plan: ObeyedPlan | None
    published: PublishedState | None = None
    versions: dict[str, str] = field(default_factory=dict)
    git_commit: str | None = None

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
            raise ConfigError(f"{file}: not found; {what}. Give the --run-dir of a run that ended.{page}") from error
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
