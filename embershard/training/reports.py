"""Reports of a trainer: each knows its kind, its values, and its line on the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal

from embershard.data.block import BadRow
from embershard.distributed.sent_bytes import SentBytes
from embershard.metrics.curves import Curves
from embershard.metrics.figures import Figures, Slices, main_values, quality_line
from embershard.run_result import IdTotals
from embershard.units import ShownTable, size


@dataclass(frozen=True)
class Report:
    """What a run tells: a line of metrics.jsonl with its kind, the time and its values, which trackers get, too.

    Attributes:
        kind: in metrics.jsonl.
        told_by: of a report that a resumed run may make again at the step of its checkpoint, as the run before it did:
            the values that, beside the step, tell one from another. None: none is made again.
        step: steps that were trained before.
    """

    kind: ClassVar[str]
    told_by: ClassVar[tuple[str, ...] | None] = None

    step: int

    def values(self) -> dict[str, Any]:
        """Return the values of its line of metrics.jsonl, the step among them."""
        return asdict(self)

    def line(self) -> str:
        """Return what the screen shows; "" for nothing."""
        return ""

    @classmethod
    def table_of_runs(cls, lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> ShownTable | None:
        """Return a table that sums up the lines of this kind, with a row for each run that has any; None: there is
        none, or curves and tables of the result show them."""
        return None

    def at_step(self, text: str) -> str:
        """Return a line that begins with the step."""
        return f"step {self.step}: {text}"


@dataclass(frozen=True)
class TrainReport(Report):
    """Progress since the last such report, over all ranks.

    `fills`, `write_backs` (rows of the caches) and `sent_bytes` are of one rank in one step, on average.

    `quality` is that of the newest samples. `label_losses`: of each of several labels, the mean of w x l over the
    samples that have it; None without any.

    `batches`: in the mode "hot_cold", batches by kind that this process has trained on so far.

    `ids`: of the tables that take any id, by name.

    `deal`: with `data.deal` "cost", the slowest rank's cost over the mean's, as samples were "dealt" and "undealt".
    """

    kind = "train"

    epoch: int
    samples: int
    loss: float
    quality: Figures
    samples_per_second: float
    hit_rate_unique: float | None
    hit_rate_lookups: float | None
    fills: float
    write_backs: float
    learning_rate_factor: float
    sent_bytes: SentBytes
    batches: dict[str, int] | None = None
    ids: Mapping[str, IdTotals] = field(default_factory=dict)
    deal: dict[str, float] = field(default_factory=dict)
    label_losses: dict[str, float | None] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        values = asdict(self) | main_values(self.quality)
        del values["quality"]
        values |= {f"loss/{label}": loss for label, loss in values.pop("label_losses").items()}
        sent, batches, ids = values.pop("sent_bytes"), values.pop("batches") or {}, values.pop("ids")
        values |= {f"max_over_mean_{name}": ratio for name, ratio in values.pop("deal").items()}
        values |= {f"{kind}_batches": count for kind, count in batches.items()}
        values |= {f"sent_bytes_{kind}": count for kind, count in sent.items()}
        return values | ({"ids": ids} if ids else {})

    def line(self) -> str:
        """Return speed, loss, AUC (or RMSE) so far, hit rate, bytes between ranks, and how evenly these were dealt."""
        hits = "" if self.hit_rate_lookups is None else f"  hit rate {self.hit_rate_lookups:.1%}"
        between = f"  sent {size(sent)}/step" if (sent := self.sent_bytes.in_training) else ""
        dealt = "  slowest rank {dealt:.2f} x mean cost, undealt {undealt:.2f}".format(**self.deal) if self.deal else ""
        speed = f"{self.samples_per_second:,.0f} samples/s"
        return f"{speed}  loss {self.loss:.4f}  {quality_line(main_values(self.quality))}{hits}{between}{dealt}"


@dataclass(frozen=True)
class EvalReport(Report):
    """Quality on the held-out part, of its slices, and the curves of each label; `is_best`: better than in all
    evaluations before, where that matters."""

    kind = "eval"
    told_by = ()

    quality: Figures
    seconds: float
    is_best: bool = False
    slices: Slices = field(default_factory=dict)
    curves: dict[str, Curves] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        slices = {"slices": self.slices} if self.slices else {}
        return {"step": self.step, **self.quality, **slices, "seconds": self.seconds}

    def line(self) -> str:
        best = "; the best so far" if self.is_best else ""
        counts = f"({self.quality['samples']:,} samples, {self.seconds:.1f} s{best})"
        return self.at_step(f"held-out {quality_line(self.quality)}  {counts}")


@dataclass(frozen=True)
class WindowReport(Report):
    """Quality on a window of time, before any sample of it trained.

    Attributes:
        window: its number, from 0.
        start: the time in UTC at which it begins.
        late: samples of it that are late: they are of earlier windows.
    """

    kind = "window"
    told_by = ("window",)

    window: int
    start: str
    late: int
    quality: Figures
    seconds: float
    slices: Slices = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        values = asdict(self) | self.quality
        del values["quality"]
        return {name: value for name, value in values.items() if name != "slices" or value}

    def line(self) -> str:
        late = f", {self.late:,} late" if self.late else ""
        counts = f"({self.quality['samples']:,} samples{late}, {self.seconds:.1f} s)"
        return self.at_step(f"window {self.start}  {quality_line(self.quality)}  {counts}")


@dataclass(frozen=True)
class SaveReport(Report):
    """A completed checkpoint; `stall_seconds` of its `seconds` no step was trained. `why_whole`: with
    `checkpoint.full_every`, of one that is no delta."""

    kind = "checkpoint"

    path: Path
    seconds: float
    stall_seconds: float
    why_whole: str = ""

    def values(self) -> dict[str, Any]:
        """Return what a record has; `why_whole` only where there is a reason.

        >>> SaveReport(3, Path("runs/a/checkpoints/step_3"), 0.5, 0.5, "the first one").values()["why_whole"]
        'the first one'
        """
        values = {**asdict(self), "path": self.path.name}
        return values if self.why_whole else {name: value for name, value in values.items() if name != "why_whole"}

    def line(self) -> str:
        waited = f"; training waited {self.stall_seconds:.1f} s" if self.stall_seconds < self.seconds else ""
        whole = f"; whole: {self.why_whole}" if self.why_whole else ""
        return self.at_step(f"saved {self.path} ({self.seconds:.1f} s{waited}{whole})")


@dataclass(frozen=True)
class FailedSaveReport(Report):
    """A checkpoint that could not be written. The training goes on, unless the run ends by another error."""

    kind = "failed_checkpoint"

    reason: str
    run_ends: bool = False

    def line(self) -> str:
        return self.reason + ("" if self.run_ends else " Training goes on (checkpoint.on_failed_save).")


@dataclass(frozen=True)
class BadRowsReport(Report):
    """Bad rows that were met since the last such report.

    Attributes:
        num_bad: so far, over all ranks.
        rows: the new ones; of very many, some.
    """

    kind = "bad_rows"

    num_bad: int
    rows: tuple[BadRow, ...]

    def values(self) -> dict[str, Any]:
        return {"step": self.step, "num_bad": self.num_bad}

    def line(self) -> str:
        first = f", for instance {self.rows[0]}" if self.rows else ""
        return self.at_step(f"{self.num_bad:,} bad rows so far{first}")


#: Left out, since it is bad; no file, so passed over; of the same bytes as an earlier one; other than when it trained;
#: taken, but not begun, and not as it was: dropped.
FileNotice = Literal["left_out", "passed_over", "taken_again", "changed", "dropped"]


@dataclass(frozen=True)
class FileReport(Report):
    """What was noticed of a file of a folder that is followed, and does not end the run; on the first rank.

    Attributes:
        file: its name.
        problem: a sentence that says it all.
    """

    kind = "file"

    notice: FileNotice
    file: str
    problem: str

    def line(self) -> str:
        return self.at_step(f"warning: {self.problem}")


@dataclass(frozen=True)
class SkippedBatchReport(Report):
    """A batch that trained nothing, since its loss is not finite.

    Attributes:
        epoch, sample: the position behind it in the order of the training data; None where `Trainer.step` was called
            with a batch of one's own.
    """

    kind = "skipped_batch"
    told_by = ("epoch", "sample")

    reason: str
    epoch: int | None = None
    sample: int | None = None

    def line(self) -> str:
        return f"{self.reason} It trains nothing (train.on_non_finite)."


@dataclass(frozen=True)
class PublicationReport(Report):
    """A publication of `step`; `stall_seconds` of its `seconds` no step was trained.

    Attributes:
        name: of its folder; empty where it failed.
        rows: of a delta, in all tables.
        problem: what the user should know.
        delay_seconds: of a delta, from its oldest update, or the publication before, until it was complete.
    """

    kind = "publication"

    name: str
    rows: int
    num_bytes: int
    seconds: float
    stall_seconds: float
    problem: str = ""
    delay_seconds: float = 0.0

    def line(self) -> str:
        """Return what was published, or why not."""
        rows = f"{self.rows:,} rows, " if self.name.startswith("delta") else ""
        waited = f"; training waited {self.stall_seconds:.3f} s" if self.stall_seconds else ""
        what = f"published {self.name} ({rows}{size(self.num_bytes)}, {self.seconds:.1f} s{waited})"
        return self.at_step(self.problem or what)

    @classmethod
    def table_of_runs(cls, lines: Mapping[str, Sequence[Mapping[str, Any]]]) -> ShownTable | None:
        """
        >>> delta = {"name": "delta_1", "rows": 10, "num_bytes": 1024, "stall_seconds": 0.02, "delay_seconds": 1.5}
        >>> lines = [{"name": "base_0"}, delta, {"name": "", "problem": "no space"}]
        >>> PublicationReport.table_of_runs({"mine": lines}).rows
        [('mine', '1', '1', '10', '1.00 KiB', '20 ms', '20 ms', '1.5 s', '1.5 s', '1')]
        """
        rows = []
        for run, own in lines.items():
            deltas = [line for line in own if str(line.get("name", "")).startswith("delta")]
            stalls, delays = (
                [each for line in deltas if isinstance(each := line.get(name), (int, float))] or [0.0]
                for name in ("stall_seconds", "delay_seconds")
            )
            cells = (
                str(sum(str(line.get("name", "")).startswith("base") for line in own)),
                str(len(deltas)),
                f"{sum(line.get('rows', 0) for line in deltas):,}",
                size(sum(line.get("num_bytes", 0) for line in deltas)),
                *(f"{1e3 * each:,.0f} ms" for each in (median(stalls), max(stalls))),
                *(f"{each:,.1f} s" for each in (median(delays), max(delays))),
                str(sum(not line.get("name") for line in own)),
            )
            rows += [(run, *cells)] if own else []
        titles = ("bases", "deltas", "rows", "bytes", "training waited", "at most", "delay", "at most", "failed")
        note = (
            "rows and bytes: of all deltas; training waited: for a delta, median; delay: from the oldest update in a "
            "delta until it was there, median; replicas look for it every second"
        )
        return ShownTable("Publications: bases and deltas", ("run",), titles, rows, note) if rows else None


@dataclass(frozen=True)
class StopReport(Report):
    """The training ended early, because a signal asked for it; `path` is the checkpoint of its last step, if any."""

    kind = "stop"
    told_by = ()

    path: Path | None

    def values(self) -> dict[str, Any]:
        return {"step": self.step, "path": self.path and self.path.name}

    def line(self) -> str:
        saved = f"its state is in {self.path}" if self.path else "no checkpoint of it, by checkpoint.at_end"
        return self.at_step(f"stopped by a signal; {saved}")


@dataclass(frozen=True)
class EndReport(Report):
    """What all ranks moved behind the last `TrainReport` of a run that is over: rows that are written back at the end,
    say. With it, reports add up to the totals of the run.

    Attributes:
        fills, write_backs: rows of the caches.
    """

    kind = "end"

    fills: int
    write_backs: int
    sent_bytes: SentBytes

    def values(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "total_fills": self.fills,
            "total_write_backs": self.write_backs,
            **{f"total_sent_bytes_{kind}": count for kind, count in asdict(self.sent_bytes).items()},
        }
