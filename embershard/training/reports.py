"""Reports of a trainer, as values: `embershard.launch` shows and records them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from embershard.data.block import BadRow
from embershard.distributed.sent_bytes import SentBytes
from embershard.metrics.curves import Curves
from embershard.metrics.figures import Figures
from embershard.run_result import IdTotals, Slices


@dataclass(frozen=True)
class TrainReport:
    """Progress since the last such report, over all ranks.

    `fills`, `write_backs` (rows of the caches) and `sent_bytes` are of one rank in one step, on average.

    `quality` is that of the newest samples. `label_losses`: of each of several labels, the mean of w x l over the
    samples that have it; None without any.

    `batches`: in the mode "hot_cold", batches by kind that this process has trained on so far.

    `ids`: of the tables that take any id, by name.
    """

    step: int
    epoch: int
    samples: int
    loss: float
    batches: dict[str, int] | None
    quality: Figures
    samples_per_second: float
    hit_rate_unique: float | None
    hit_rate_lookups: float | None
    fills: float
    write_backs: float
    learning_rate_factor: float
    sent_bytes: SentBytes
    ids: Mapping[str, IdTotals] = field(default_factory=dict)
    label_losses: dict[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalReport:
    """Quality on the held-out part, of its slices, and the curves of each label; `is_best`: better than in all
    evaluations before, where that matters."""

    step: int
    quality: Figures
    seconds: float
    is_best: bool = False
    slices: Slices = field(default_factory=dict)
    curves: dict[str, Curves] = field(default_factory=dict)


@dataclass(frozen=True)
class WindowReport:
    """Quality on a window of time, before any sample of it trained.

    Attributes:
        step: steps that were trained before.
        window: its number, from 0.
        start: the time in UTC at which it begins.
        late: samples of it that are late: they are of earlier windows.
    """

    step: int
    window: int
    start: str
    late: int
    quality: Figures
    seconds: float
    slices: Slices = field(default_factory=dict)


@dataclass(frozen=True)
class SaveReport:
    """A completed checkpoint of `step`; `stall_seconds` of its `seconds` no step was trained."""

    step: int
    path: Path
    seconds: float
    stall_seconds: float


@dataclass(frozen=True)
class FailedSaveReport:
    """A checkpoint that could not be written. The training goes on, unless the run ends by another error."""

    step: int
    reason: str
    run_ends: bool = False


@dataclass(frozen=True)
class BadRowsReport:
    """Bad rows that were met since the last such report.

    Attributes:
        num_bad: so far, over all ranks.
        rows: the new ones; of very many, some.
    """

    step: int
    num_bad: int
    rows: tuple[BadRow, ...]


#: Left out, since it is bad; no file, so passed over; of the same bytes as an earlier one; other than when it trained;
#: taken, but not begun, and not as it was: dropped.
FileNotice = Literal["left_out", "passed_over", "taken_again", "changed", "dropped"]


@dataclass(frozen=True)
class FileReport:
    """What was noticed of a file of a folder that is followed, and does not end the run; on the first rank.

    Attributes:
        file: its name.
        problem: a sentence that says it all.
    """

    step: int
    notice: FileNotice
    file: str
    problem: str


@dataclass(frozen=True)
class SkippedBatchReport:
    """A batch that trained nothing, since its loss is not finite; `step` steps were trained before it.

    Attributes:
        epoch, sample: the position behind it in the order of the training data; None where `Trainer.step` was called
            with a batch of one's own.
    """

    step: int
    reason: str
    epoch: int | None = None
    sample: int | None = None


@dataclass(frozen=True)
class PublicationReport:
    """A publication of `step`; `stall_seconds` of its `seconds` no step was trained.

    Attributes:
        name: of its folder; empty where it failed.
        rows: of a delta, in all tables.
        problem: what the user should know.
        delay_seconds: of a delta, from its oldest update, or the publication before, until it was complete.
    """

    step: int
    name: str
    rows: int
    num_bytes: int
    seconds: float
    stall_seconds: float
    problem: str = ""
    delay_seconds: float = 0.0


@dataclass(frozen=True)
class StopReport:
    """The training ended early, because a signal asked for it; `path` is the checkpoint of its last step, if any."""

    step: int
    path: Path | None


@dataclass(frozen=True)
class EndReport:
    """What all ranks moved behind the last `TrainReport` of a run that is over: rows that are written back at the end,
    say. With it, reports add up to the totals of the run.

    Attributes:
        fills, write_backs: rows of the caches.
    """

    step: int
    fills: int
    write_backs: int
    sent_bytes: SentBytes


Report = (
    TrainReport
    | EndReport
    | EvalReport
    | WindowReport
    | SaveReport
    | FailedSaveReport
    | BadRowsReport
    | FileReport
    | SkippedBatchReport
    | PublicationReport
    | StopReport
)
