"""Drift: whether popular rows stay popular, from parts of a trace that are compared with each other."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from embershard.frequency.statistics import Drift
from embershard.frequency.trace import SampledTrace

MAX_PARTS = 8
#: Fewer lookups than this make a part's most frequent rows a matter of chance.
MIN_LOOKUPS = 1000


def measure_drift(trace: SampledTrace, share_of_rows: float = 0.01) -> Drift | None:
    """Return the drift between up to eight parts of equal numbers of samples; None where there is too little for two.

    The most frequent rows are those of all tables together, as many as `share_of_rows` of the rows that occur.
    Constant rows are among them in every part, and are found in every part.
    """
    num_parts = min(MAX_PARTS, trace.num_lookups // MIN_LOOKUPS, trace.num_samples)
    if num_parts < 2:
        return None
    counts = _counts_by_part(trace, num_parts)
    num_constant = sum(len(rows) for rows in trace.constant_rows.values())
    constant_hits = sum(int(hits.sum()) for hits in trace.constant_lookups.values()) / num_parts
    occurring = counts.shape[1] / trace.rate + num_constant
    num_top = max(1, round((share_of_rows * occurring - num_constant) * trace.rate))
    top = [np.argsort(-part, kind="stable")[:num_top] for part in counts]
    lookups = counts.sum(1) / trace.rate + constant_hits
    found = np.array([counts[:, rows].sum(1) for rows in top]) / trace.rate + constant_hits
    kept = len(np.intersect1d(top[0], top[-1])) / trace.rate + num_constant
    unseen = counts[-1][counts[: num_parts // 2].sum(0) == 0].sum() / trace.rate
    return Drift(
        hit_rates=found / np.maximum(lookups, 1e-9),
        top_rows_kept=float(kept / (num_top / trace.rate + num_constant)),
        new_rows_share=float(unseen / max(lookups[-1], 1e-9)),
        share_of_rows=share_of_rows,
    )


def _counts_by_part(trace: SampledTrace, num_parts: int) -> NDArray[np.int32]:
    """Return the lookups in every part of each row that was followed, all tables one after another: [P, rows]."""
    edges = np.linspace(0, trace.num_samples, num_parts + 1).round().astype(np.int64)
    blocks = []
    for table in trace.tables.values():
        distinct, places = np.unique(table.rows, return_inverse=True)
        parts = itertools.pairwise(np.searchsorted(table.samples, edges))
        counts = [np.bincount(places[start:stop], minlength=len(distinct)) for start, stop in parts]
        blocks.append(np.stack(counts).astype(np.int32))
    return np.concatenate(blocks, axis=1)
