"""What plans count for layers over histories: batches drawn from the lengths that the data have, in groups as training
makes them, and the rank for which all others wait."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from embershard.data import schema_of
from embershard.errors import SetupError
from embershard.extras.length_groups.sizes import MOST_PADDING, are_kept, group_sizes
from embershard.frequency import DataStatistics
from embershard.lazy_names import named
from embershard.models.arch_section import FLOPS_PER_MULTIPLY_ADD, ArchSection
from embershard.planning.simulate.step_replay import Pipeline
from embershard.planning.workload import DrawnLayers
from embershard.sharding.run_shape import RunShape
from embershard.training.config import RunConfig
from embershard.training.fit.model_size import tables_of_run

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: The most micro-batches of ranks that are drawn, and samples in them; at least a step is, of fewer ranks if need be.
_MOST_BATCHES, _MOST_SAMPLES = 1024, 1 << 19
_FLOAT_BYTES = 4.0


@dataclass(frozen=True)
class SectionCosts:
    """What batches cost in the layers of an `ArchSection`, over P features of an event, of dim D, beside so many other
    features. `most_padding`: see `group_sizes`."""

    section: ArchSection
    num_features: int
    dim: int
    num_contexts: int
    most_padding: int

    def of_batch(self, events: Ints) -> tuple[float, float]:
        """Return operations of forward and backward, and numbers kept between them, of samples with so many events.
        Another group counts as the padding that it is worth."""
        tokens = (self.num_contexts + 1 - np.sort(-events)).tolist()
        factors = self.section.token_costs(self.num_features, self.dim)
        sizes = group_sizes(tokens, factors, self.most_padding, self.section.samples_at_once)
        is_kept = are_kept(tokens, sizes, self.section.samples_at_once)
        flops, numbers = FLOPS_PER_MULTIPLY_ADD * float(self.most_padding) * (len(sizes) - 1), 0.0
        for size, first in zip(sizes, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True):
            own_flops, own_numbers = self._of_sample(tokens[first], is_kept)
            flops, numbers = flops + size * own_flops, numbers + size * own_numbers
        return flops, numbers

    @cache  # noqa: B019  batches have few lengths, and such a value is short-lived
    def _of_sample(self, num_tokens: int, is_kept: bool) -> tuple[float, float]:
        sizes = (self.num_features, self.dim, self.num_contexts)
        too_many = self.section.samples_at_once(num_tokens) + 1
        flops, numbers = (
            self.section.sample_cost(*sizes, batch_size, num_tokens - self.num_contexts - 1)
            for batch_size in (1 if is_kept else too_many, 1)
        )
        return flops[0], numbers[1]

    def of_steps(self, events: Ints, pieces: int) -> Floats:
        """Return the same of steps [S, ranks, samples], whose ranks cut theirs into micro-batches: [S, ranks, pieces,
        2]."""
        cut = [[np.array_split(own, pieces) for own in step] for step in events]
        return np.array([[[self.of_batch(piece) for piece in own] for own in step] for step in cut])


def drawn_layers(config: RunConfig, data: DataStatistics, shape: RunShape) -> DrawnLayers:
    """Return what a sample costs in the layers of the config's `ArchSection`: on the rank that all others wait for, in
    each micro-batch; on the mean rank where ranks take turns on cores. Deterministic.

    A run's memory is not counted so: it has room for full histories.
    """
    section, schema = config.model.section, schema_of(config.data)
    assert section is not None
    contexts = len(schema.sparse) - len(config.model.event_features) + (schema.num_dense > 0)
    sizes = (len(config.model.history), config.model.embedding_dim, contexts)
    costs = SectionCosts(section, *sizes, MOST_PADDING[shape.device])
    pieces = min(shape.accumulate, shape.batch_size)
    events = _drawn_events(config, data, shape, pieces)
    steps, full = costs.of_steps(events, pieces), np.full(shape.micro_batch_size, section.max_events)
    flops, numbers = (steps.sum(axis=(0, 1, 2)) / events.size).tolist()
    share = flops / (costs.of_batch(full)[0] / len(full))
    note = (
        f"Histories are of {events.mean():,.0f} events on average and {events.max():,} at most, as the data have them: "
        f"their layers take {share:.2g} of the time of full ones ({section.max_events:,} events)."
    )
    if shape.world_size == 1:
        return DrawnLayers(flops, _FLOAT_BYTES * numbers, note)
    times = undealt = most_of_mean(steps)
    note += f" The slowest rank has {undealt:.2f} times the mean's work"
    with suppress(SetupError):  # without the extra
        dealt = most_of_mean(costs.of_steps(_dealt(config, costs, events, pieces), pieces))
        times = dealt if config.data.deal == "cost" else undealt
        note += f'; dealt (data.deal = "cost") {dealt:.2f}'
    if Pipeline.of_run(shape).cores_for(shape.world_size) is not None:
        times, note = 1.0, f"{note}; the mean counts here, as ranks take turns on cores"
    return DrawnLayers(flops * times, _FLOAT_BYTES * numbers * times, f"{note}.")


def most_of_mean(steps: Floats) -> float:
    """Return the work of the slowest rank in each micro-batch, relative to that of the mean rank, of `of_steps`."""
    flops = steps[..., 0]
    return float(flops.max(axis=1).sum() / flops.mean(axis=1).sum())


def _drawn_events(config: RunConfig, data: DataStatistics, shape: RunShape, pieces: int) -> Ints:
    """Return events of samples, [steps, ranks, samples]: in all as frequent as in the data, in an order by chance."""
    history, section = config.model.history[0], config.model.section
    assert section is not None
    table = next(each for each in tables_of_run(config) if history in each.features)
    shares = data.tables[table.name].bag_sizes
    # Of the scored item's features, those that share the table have an id each.
    lengths = (np.arange(len(shares)) - (len(table.features) - 1)).clip(0, section.max_events)
    together = config.data.deal_ranks or shape.world_size
    ranks = max(1, min(shape.world_size, _MOST_BATCHES, _MOST_SAMPLES // shape.batch_size))
    ranks = ranks // together * together or ranks
    of_step = ranks * shape.batch_size
    count = max(1, min(_MOST_BATCHES // (ranks * pieces), _MOST_SAMPLES // of_step)) * of_step
    below = np.cumsum(shares)
    found = np.searchsorted(below, below[-1] * (np.arange(count) + 0.5) / count)
    return np.random.default_rng(0).permutation(lengths[found]).reshape(-1, ranks, shape.batch_size)


def _dealt(config: RunConfig, costs: SectionCosts, events: Ints, pieces: int) -> Ints:
    """Return the same samples, those of each step dealt by what they cost."""
    deal: Callable[..., Ints] = named("embershard.extras.deal.deal:deal")
    (a, b), more = costs.section.token_costs(costs.num_features, costs.dim), costs.num_contexts + 1
    if config.data.deal_cost is not None and config.data.deal_cost[0] == config.model.history[0]:
        (_, a, b), more = config.data.deal_cost, 0
    tokens, together = events + more, min(config.data.deal_ranks or events.shape[1], events.shape[1])
    shared = (a * tokens + b * tokens**2).reshape(-1, together * events.shape[2])
    found = [
        own[deal(own_costs, together, pieces, number)]
        for number, (own, own_costs) in enumerate(zip(events.reshape(shared.shape), shared, strict=True))
    ]
    return np.array(found).reshape(events.shape)
