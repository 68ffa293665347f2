"""The seconds of a step, once steps repeat, as a formula of what each rank has to do: what `step_replay` plays out.

A search asks for thousands of placements a second, and a bound needs maxima and sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embershard.planning.simulate.step_replay import Pipeline

Floats = NDArray[np.float64]

#: Columns of the seconds of shards and ranks: the stages of a step whose work depends on the tables.
STAGES = ("plan", "copies", "lookup", "embeddings", "gradients", "update", "ids")
#: Of `StepFormula.columns` on a CPU, those that need a core; the others need the link, or on one node cores, too.
_ON_CORES = [0, 3, 5]


def by_column(values: Floats) -> Floats:
    """Return the values with their last axis first, as `numpy.moveaxis`, which takes as long as the arithmetic."""
    return values.transpose((values.ndim - 1, *range(values.ndim - 1)))


@dataclass(frozen=True)
class StepFormula:
    """Seconds of a step from the ranks' totals, as `replay_steps` has them once steps repeat.

    On a GPU: the training stream waits for the slowest rank at each collective; planning, copies and the host's work
    are hidden up to the step; so are all collectives together, on their own stream. Without look-ahead, ids are sent,
    planned and filled between the steps. On a CPU, stages follow each other,
    and the slowest rank decides in each segment between two collectives. Where L ranks take turns on C cores, each has
    C/L of one, and a whole one once C ranks are left. A node is then done after the work of its slowest rank, and 1/C
    of that of the L - C ranks with the least, in seconds of a whole core. So is an exchange on one node: cores copy it.

    Attributes:
        pipeline: what overlaps.
        overhead: of a step, whatever its work.
        forward: of the dense part; `backward`, `optimizer`, `input`: of the dense part.
        all_reduce: of the dense gradients, without tables; in so many `buckets`.
        latency: of a collective of each piece; `group_seconds` of the sizes that are announced per group and step.
    """

    pipeline: Pipeline
    overhead: float
    forward: float
    backward: float
    optimizer: float
    input: float
    all_reduce: float
    buckets: int
    latency: float
    group_seconds: float

    def latencies(self, num_groups: Floats | float) -> tuple[Floats, Floats, Floats]:
        """Return what so many groups of tables add to the embeddings, the gradients and the ids of a step."""
        groups = np.asarray(num_groups, float)
        each = 5 / 7 * groups * self.latency
        return each, each, 4 * each + groups * self.group_seconds

    def reduction(self, num_groups: Floats | float) -> tuple[Floats, Floats, Floats]:
        """Return the seconds of the all-reduce with so many groups of tables: all, the last bucket, which is
        behind the gradients of the embeddings, and how much the buckets before it delay these."""
        reduced, count = self.all_reduce + 5 / 7 * np.asarray(num_groups) * self.latency, self.buckets
        if count == 1:
            return reduced, reduced, np.zeros_like(reduced)
        first, last = self.backward + (count - 1) * reduced, (count - 1) * self.backward + reduced
        return reduced, reduced / count, np.maximum(0.0, np.maximum(first, last) / count - self.backward)

    def columns(self, totals: Floats) -> Floats:
        """Return what the seconds are maxima of, [..., columns], from totals [..., stages]."""
        plan, copies, lookup, embeddings, gradients, update, ids = by_column(totals)
        if self.pipeline.device == "cpu" or not self.pipeline.lookahead:
            first, last = plan + copies + lookup, update
            return np.stack([first, embeddings, gradients, last, ids, first + last], axis=-1)
        lookup = lookup if self.pipeline.prefetch else plan + copies + lookup
        return np.stack([lookup + update, embeddings, gradients, update, ids, copies, plan, lookup], axis=-1)

    def slowest(self, totals: Floats) -> Floats:
        """Return when the last of the ranks is done with each column, [..., columns], from totals [..., R, stages]."""
        columns = self.columns(totals)
        found, num_ranks = columns.max(axis=-2), columns.shape[-2]
        if (cores := self.pipeline.cores_for(num_ranks)) is not None:
            on_cores = slice(None) if self.pipeline.cores_copy(num_ranks) else _ON_CORES
            local, own = min(self.pipeline.ranks_per_node, num_ranks), columns[..., on_cores]
            ranked = np.sort(own.reshape(*own.shape[:-2], -1, local, own.shape[-1]), axis=-2)
            ends = (cores * ranked[..., -1, :] + ranked[..., : local - cores, :].sum(axis=-2)) / local
            found[..., on_cores] = ends.max(axis=-2)
        return found

    def seconds(self, maxima: Floats, num_groups: Floats | float) -> Floats:
        """Return the seconds of a step, [...], from the `slowest` columns, [..., columns]."""
        out, back, sent = self.latencies(num_groups)
        all_reduce, last_bucket, late = self.reduction(num_groups)
        if self.pipeline.device == "cpu":
            first, embeddings, gradients, last, ids, _ = by_column(maxima)
            fixed = self.input + self.overhead + self.forward + self.backward + all_reduce + self.optimizer
            return fixed + first + embeddings + out + gradients + back + last + ids + sent
        at_least = max(self.input, self.overhead)
        if not self.pipeline.lookahead:
            first, embeddings, gradients, update, ids, _ = by_column(maxima)
            train = first + embeddings + out + self.forward + self.backward + late + gradients + back
            train = train + np.maximum(update, last_bucket) + self.optimizer + ids + sent
            return np.maximum(train, at_least)
        both, embeddings, gradients, update, ids, copies, plan, lookup = by_column(maxima)
        looked_up, updated = np.maximum(both, last_bucket + lookup), np.maximum(update, last_bucket)
        train = np.maximum(looked_up, updated + ids + sent) + self.optimizer
        train = train + embeddings + out + self.forward + self.backward + late + gradients + back
        link = embeddings + out + gradients + back + ids + sent + all_reduce
        return np.maximum.reduce([train, link, copies, plan, np.full_like(train, at_least)])
