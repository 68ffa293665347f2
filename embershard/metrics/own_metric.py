"""Figures of one's own, `metrics.names = ["my_metrics:profit"]`: found, tried, and computed."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from embershard.errors import ConfigError
from embershard.settings.own_code import load_function, place_of

Floats = NDArray[np.float64]


def own_values(name: str, folder: str | None, scores: Floats, labels: Floats, weights: Floats) -> Floats:
    """Return what the function says of N samples: a number of all [], or one of each [N].

    Args:
        name: "module:function".
        folder: in which the module is looked up, besides the Python path.
        scores: [N], probabilities of a binary label, numbers of a regression.
        labels, weights: [N].

    Raises:
        ConfigError: it is not found, fails, or returns something else.
    """
    function = load_function("metrics.names", name, folder)
    try:
        found = np.asarray(function(scores.copy(), labels.copy(), weights.copy()), np.float64)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"metrics.names: {name} failed: {type(error).__name__}: {error} ({place_of(error)})."
        ) from error
    if found.shape not in ((), scores.shape):
        raise ConfigError(
            f"metrics.names: {name} returned numbers {list(found.shape)} for {len(scores)} samples; needed one number, "
            f"or [{len(scores)}]."
        )
    return found


def own_figure(name: str, folder: str | None, scores: Floats, labels: Floats, weights: Floats) -> float | None:
    """Return the figure of N samples: the number, or the mean of those of the samples, by weights. None where it is
    undefined: without a sample, or not finite. Arguments and errors are those of `own_values`."""
    if not len(scores):
        return None
    values = own_values(name, folder, scores, labels, weights)
    if values.ndim:
        values = np.asarray((weights * values).sum() / weights.sum() if weights.sum() > 0 else math.nan)
    return float(values) if math.isfinite(values) else None


def try_own(name: str, folder: str | None) -> None:
    """Call the function with a few made-up samples, so that it fails before a training, and not after its first epoch.
    Raises as `own_values`."""
    labels: Floats = np.tile([0.0, 1.0], 4)
    scores: Floats = np.where(labels == 1, 0.75, 0.25)
    own_values(name, folder, scores, labels, np.ones(8))
