"""`Quality`: how good predictions are, as a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quality:
    """Quality of predictions. A figure that is undefined for the samples is None."""

    samples: int
    """Samples of all ranks."""

    logloss: float | None
    """Mean cross entropy in nats; None without samples."""

    auc: float | None
    """Area under the ROC curve, exact; None when all labels are equal."""

    ne: float | None
    """Normalized entropy: logloss over that of always predicting the mean label; None when all labels are equal."""

    accuracy: float | None
    """Share of samples whose prediction is on the label's side of 0.5."""

    calibration: float | None
    """Sum of predictions over the number of clicks: 1 is perfect; None without clicks."""
