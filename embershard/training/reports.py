"""Reports of a trainer, as values: `embershard.launch` shows and records them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from embershard.distributed.traffic import SentBytes
from embershard.training.metrics import Quality


@dataclass(frozen=True)
class TrainReport:
    """Progress since the last such report, over all ranks; `sent_bytes` of one rank in one step, on average."""

    step: int
    epoch: int
    samples: int
    loss: float
    auc: float | None
    samples_per_second: float
    hit_rate_unique: float | None
    hit_rate_lookups: float | None
    learning_rate_factor: float
    sent_bytes: SentBytes


@dataclass(frozen=True)
class EvalReport:
    """Quality on the held-out part."""

    step: int
    quality: Quality
    seconds: float


@dataclass(frozen=True)
class SaveReport:
    """A completed checkpoint."""

    step: int
    path: Path
    seconds: float


@dataclass(frozen=True)
class FailedSaveReport:
    """A checkpoint that could not be written; the training goes on."""

    step: int
    reason: str


Report = TrainReport | EvalReport | SaveReport | FailedSaveReport
