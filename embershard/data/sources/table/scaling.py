"""Scaling of dense features, by numbers that stand in the settings."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from embershard.data.sources.table.config import TableFeature


def scaled(numbers: NDArray[np.float64], feature: TableFeature) -> NDArray[np.float32]:
    """Return the numbers [n], for "days" of days, as the model gets them; a missing one (NaN) is 0, with "quantile"
    0.5.

    embershard/launch/export/serving_model.py does the same for programs without embershard.

    >>> age = TableFeature("dense", scale="quantile", quantiles=(0.0, 10.0, 100.0))
    >>> scaled(np.array([5.0, 55.0, 1000.0, np.nan]), age).tolist()
    [0.25, 0.75, 1.0, 0.5]
    """
    missing = 0.0
    if feature.scale == "log1p":
        found = np.log1p(np.maximum(numbers.astype(np.float32), 0))
    elif feature.scale in ("standardize", "days"):
        assert feature.mean is not None
        assert feature.std is not None
        found = ((numbers - feature.mean) / feature.std).astype(np.float32)
    elif feature.scale == "quantile":
        missing = 0.5
        found = np.interp(numbers, feature.quantiles, np.linspace(0, 1, len(feature.quantiles))).astype(np.float32)
    else:
        found = numbers.astype(np.float32)
    found[np.isnan(numbers)] = missing
    return found
