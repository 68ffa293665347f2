"""Rates that are fitted to measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embershard.errors import ConfigError
from embershard.planning.cost.rates import TERMS, Rates, StepWork, step_parts

Floats = NDArray[np.float64]
#: Weight of the difference of two steps, beside one step.
_PAIR_WEIGHT = 3.0
#: Weight of an expected rate beside one step: twice the rate counts as much as an error of so much of its seconds.
_EXPECTED_WEIGHT = 0.1
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


def fit_rates(
    measured: Sequence[tuple[StepWork, float]],
    pairs: Sequence[tuple[int, int]] = (),
    expected: Mapping[str, float] | None = None,
) -> Fit:
    """Fit rates to pairs of a step's work and its seconds on a CPU, where the parts add up: least squares of the
    relative errors. Work that no step did gets the expected rate, or 0.

    Args:
        pairs: numbers of two steps that are alike but for a little work. What is wrong in both, since work is not all
            that decides, cancels in their difference: it counts as much as several steps.
        expected: rates by name, which those found should be near: kinds of work that come together in all steps are
            told apart by them.

    >>> round(fit_rates([(StepWork(fills=1), 0.5), (StepWork(fills=2), 0.75)]).rates.step_overhead_seconds, 6)
    0.25

    Raises:
        ConfigError: nothing was measured, or a time is not positive.
    """
    if not measured or min(seconds for _, seconds in measured) <= 0:
        raise ConfigError(f"got {len(measured)} measured steps, needed at least one, each with a time above 0")
    tied = {name for names in _TIED for name in names} | {"more_pieces"}  # a step's overhead is that of each piece
    groups = [*_TIED, *((name,) for name, _, _ in TERMS if name not in tied)]
    columns = [[sum(getattr(work, name) for name in names) for work, _ in measured] for names in groups]
    seconds = np.array([value for _, value in measured])
    amounts = np.column_stack([*columns, [1 + work.more_pieces for work, _ in measured]])
    a, b = np.array(pairs, np.int64).reshape(-1, 2).T
    weight = _PAIR_WEIGHT / (seconds[a] + seconds[b]) * 2
    matrix = np.concatenate([amounts / seconds[:, None], (amounts[b] - amounts[a]) * weight[:, None]])
    target = np.concatenate([np.ones(len(measured)), (seconds[b] - seconds[a]) * weight])
    rate_of = {amount: rate for amount, rate, _ in TERMS}
    near = [(n, rate) for n, names in enumerate(groups) if (rate := (expected or {}).get(rate_of[names[0]], 0.0)) > 0]
    prior = np.zeros((len(near), len(groups) + 1))
    for row, (column, rate) in enumerate(near):
        prior[row, column] = _EXPECTED_WEIGHT / rate
    matrix, target = np.concatenate([matrix, prior]), np.concatenate([target, np.full(len(near), _EXPECTED_WEIGHT)])
    found = nonnegative_least_squares(matrix, target)
    values = {rate_of[name]: float(found[i]) for i, names in enumerate(groups) for name in names}
    rates = Rates(**values, step_overhead_seconds=float(found[-1]))
    return Fit(rates, tuple(sum(step_parts(work, rates).values()) / value - 1 for work, value in measured))


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """Return the x >= 0 that minimizes `|matrix x - target|`, for `matrix` [M, N] and `target` [M]; 0 for columns of
    zeros. Columns are scaled first, because kinds of work differ by ten orders of magnitude and `nnls` has one
    tolerance for all of them."""
    from scipy.optimize import nnls  # it loads slowly, and few commands correct rates

    norms = np.linalg.norm(matrix, axis=0)
    norms[norms == 0] = 1.0
    solution, _ = nnls(matrix / norms, target, maxiter=100 * matrix.shape[1])
    return solution / norms
