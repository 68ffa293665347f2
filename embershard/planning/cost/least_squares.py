"""Rates from measured steps: the seconds per unit of work, none of them negative, that explain the step times best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from embershard.errors import ConfigError
from embershard.planning.cost.rates import TERMS, Rates, StepWork, step_parts

Floats = NDArray[np.float64]

#: Kinds of work that cannot be told apart by running a few settings get one rate.
_TIED = (
    ("fills", "write_backs"),
    ("bytes_to_device", "bytes_to_host"),
    ("sent_id_bytes", "sent_embedding_bytes", "sent_gradient_bytes", "all_reduce_bytes"),
)


@dataclass(frozen=True)
class Fit:
    """Rates, and of each measured step time the error: predicted / measured - 1."""

    rates: Rates
    errors: tuple[float, ...]


def fit_rates(measured: Sequence[tuple[StepWork, float]]) -> Fit:
    """Fit rates to pairs of a step's work and its seconds on a CPU, where the parts add up: least squares of the
    relative errors. Work that no step did gets the rate 0.

    >>> round(fit_rates([(StepWork(fills=1), 0.5), (StepWork(fills=2), 0.75)]).rates.step_overhead_seconds, 6)
    0.25

    Raises:
        ConfigError: nothing was measured, or a time is not positive.
    """
    if not measured or min(seconds for _, seconds in measured) <= 0:
        raise ConfigError(f"got {len(measured)} measured steps, needed at least one, each with a time above 0")
    tied = {name for names in _TIED for name in names}
    groups = [*_TIED, *((name,) for name, _, _ in TERMS if name not in tied)]
    columns = [[sum(getattr(work, name) for name in names) for work, _ in measured] for names in groups]
    seconds = np.array([value for _, value in measured])
    matrix = np.column_stack([*columns, np.ones(len(measured))]) / seconds[:, None]
    found = nonnegative_least_squares(matrix, np.ones(len(measured)))
    rate_of = {amount: rate for amount, rate, _ in TERMS}
    values = {rate_of[name]: float(found[i]) for i, names in enumerate(groups) for name in names}
    rates = Rates(**values, step_overhead_seconds=float(found[-1]))
    return Fit(rates, tuple(sum(step_parts(work, rates).values()) / value - 1 for work, value in measured))


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Return the x >= 0 that minimizes `|matrix x - target|`, for `matrix` [M, N] and `target` [M]; 0 for columns of
    zeros. Columns are scaled first, because kinds of work differ by ten orders of magnitude and `nnls` has one
    tolerance for all of them."""
    norms = np.linalg.norm(matrix, axis=0)
    norms[norms == 0] = 1.0
    solution, _ = nnls(matrix / norms, target, maxiter=100 * matrix.shape[1])
    return solution / norms
