"""How far counts of a sample may be trusted: what one half of it says about the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from embershard.frequency.counts import RowCounts
from embershard.frequency.curves import static_hit_rate
from embershard.frequency.statistics import CountHistogram


@dataclass(frozen=True)
class HalfSplit:
    """Static hit rates (0..1) of rows that were chosen on one half of the data, means of both ways.

    Attributes:
        own: on the half that chose them: what counts promise.
        other: on the other half: what they keep.
        difference: between the halves' promises, absolute.
    """

    own: float
    other: float
    difference: float


def half_split(first: Mapping[str, RowCounts], second: Mapping[str, RowCounts], num_rows: float) -> HalfSplit:
    """The ``num_rows`` most frequent rows of all tables together, of each half in turn."""
    own_1, other_1 = _hit_rates(first, second, num_rows)
    own_2, other_2 = _hit_rates(second, first, num_rows)
    return HalfSplit((own_1 + own_2) / 2, (other_1 + other_2) / 2, abs(own_1 - own_2))


def _hit_rates(chosen: Mapping[str, RowCounts], used: Mapping[str, RowCounts], num_rows: float) -> tuple[float, float]:
    histograms = [CountHistogram.of_counts(counts.hits) for counts in chosen.values()]
    _, threshold = static_hit_rate(histograms, num_rows)
    above = sum(float(each.rows[each.counts > threshold].sum()) for each in histograms)
    tied = sum(float(each.rows[each.counts == threshold].sum()) for each in histograms)
    share = min(1.0, (num_rows - above) / tied) if tied else 0.0
    found = [0.0, 0.0]
    for table, counts in chosen.items():
        weights = (counts.hits > threshold) + share * (counts.hits == threshold)
        found[0] += float((weights * counts.hits).sum())
        found[1] += float((weights * used[table].hits_of(counts.rows)).sum())
    lookups = [sum(counts.num_lookups for counts in half.values()) for half in (chosen, used)]
    return found[0] / max(lookups[0], 1), found[1] / max(lookups[1], 1)
