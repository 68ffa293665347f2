"""Rates from measured steps: the seconds per unit of work, none of them negative, that explain the step times best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embershard.errors import ConfigError
from embershard.planning.cost.rates import TERMS, Rates, StepWork, step_time

Floats = NDArray[np.float64]

_OVERHEAD = "step_overhead_seconds"
#: Kinds of work that cannot be told apart by running a few settings get one rate.
_TIED: tuple[tuple[str, ...], ...] = (
    ("fills", "write_backs"),
    ("bytes_to_device", "bytes_to_host"),
    ("all_to_all_bytes", "all_reduce_bytes"),
)
_SMALL = 1e-10


@dataclass(frozen=True)
class Fit:
    """Rates, and how well they explain what they were made from.

    Attributes:
        errors: of each measured step time, predicted / measured - 1.
    """

    rates: Rates
    errors: tuple[float, ...]


def fit_rates(measured: Sequence[tuple[StepWork, float]]) -> Fit:
    """Least squares of the relative errors over (work of a step, its seconds), on a CPU: the parts add up.

    Work that no step did gets the rate 0.

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
    rates = Rates(**values, **{_OVERHEAD: float(found[-1])})
    errors = tuple(step_time(work, rates, "cpu").seconds / value - 1 for work, value in measured)
    return Fit(rates, errors)


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """x >= 0 that minimizes ``|matrix x - target|``; columns of zeros get 0.

    The active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23).

    Args:
        matrix: [M, N].
        target: [M].
    """
    norms = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(norms > 0, norms, 1.0)
    solution = np.zeros(matrix.shape[1])
    free = np.zeros(matrix.shape[1], dtype=bool)
    for _ in range(10 * matrix.shape[1]):
        gain = scaled.T @ (target - scaled @ solution)
        gain[free] = 0.0
        if gain.max(initial=0.0) <= _SMALL:
            break
        free[gain.argmax()] = True
        solution = _restricted(scaled, target, solution, free)
    return solution / np.where(norms > 0, norms, 1.0)


def _restricted(matrix: Floats, target: Floats, solution: Floats, free: NDArray[np.bool_]) -> Floats:
    """Least squares over the ``free`` columns; those that would become negative leave them, one after the other."""
    while free.any():
        best = np.zeros_like(solution)
        best[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        falling = free & (best <= 0)
        if not falling.any():
            return best
        steps = solution[falling] / np.maximum(solution[falling] - best[falling], _SMALL)
        solution = solution + steps.min() * (best - solution)
        free &= solution > _SMALL
        solution[~free] = 0.0
    return np.zeros_like(solution)
