"""`DealtReader`: reads the samples that were dealt to a rank, in place of its slice of a global batch."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from embershard.data import DataConfig, Schema, Source
from embershard.data.block import Block
from embershard.data.hashing import Ids, make_key
from embershard.data.order.stream import SampleReader
from embershard.data.sources.source import Split
from embershard.errors import ConfigError
from embershard.extras.deal.deal import MOST_COST, deal, slowest_cost


@dataclass(frozen=True)
class SampleCost:
    """What a sample costs: a T + b T^2, of T tokens: the ids of its bag of one feature, and some more.

    Attributes:
        feature: whose ids count.
        a, b: integers of 0 or more.
        more: tokens that every sample has.
    """

    feature: str
    a: int
    b: int
    more: int = 0

    def of(self, block: Block, schema: Schema) -> Ids:
        """Return the cost of each sample: int64 [n]."""
        events = block.lengths[schema.keys.index(self.feature)]
        tokens = np.full(block.num_samples, events, np.int64) + self.more
        most = int(tokens.max())
        if (self.a * most + self.b * most**2) * len(tokens) >= MOST_COST:
            raise ConfigError(
                f"data.deal_cost: got {self.a} T + {self.b} T^2, of which {len(tokens)} samples of {most} ids come to "
                "more than 64 bits. Divide both numbers."
            )
        return self.a * tokens + self.b * tokens**2

    def __str__(self) -> str:
        more = f" + {self.more}" if self.more else ""
        terms = [f"{factor} {power}" for factor, power in ((self.a, "T"), (self.b, "T^2")) if factor]
        return f"{' + '.join(terms)}, with T = ids of {self.feature!r}{more}"


class Loads(NamedTuple):
    """What the samples of one global batch cost, of the ranks that share it: those of the slowest rank as they were
    dealt, those of the slowest slice, and a rank's mean."""

    dealt: float
    undealt: float
    mean: float


@dataclass(frozen=True)
class Dealing:
    """How ranks share the samples of their slices.

    Attributes:
        cost: of a sample.
        place, ranks: this rank among those that share with it, which are neighbours.
        pieces: micro-batches of a rank's batch.
    """

    cost: SampleCost
    place: int
    ranks: int
    pieces: int


class DealtReader(SampleReader):
    """Reads the slices of all ranks that share theirs, and keeps the samples that are dealt to this one. Their deal is
    a function of the samples, of the seed and of their position.

    Args:
        dealing: how they are shared.
        loads: gets what each batch that was read costs, by the epoch and the position behind this rank's slice.
    """

    def __init__(
        self,
        source: Source,
        split: Split,
        config: DataConfig,
        *,
        dealing: Dealing,
        loads: MutableMapping[tuple[int, int], Loads],
    ) -> None:
        super().__init__(source, split, config)
        self._schema, self._seed, self._dealing, self._loads = source.schema, config.seed, dealing, loads

    def read(self, epoch: int, ranges: Sequence[tuple[int, int]]) -> Block:
        """Return the samples dealt to the rank whose slice this is, and the slice's own bad rows."""
        [(start, stop)] = ranges
        how, size = self._dealing, stop - start
        first = start - how.place * size
        slices = [(first, start), (start, stop), (stop, first + how.ranks * size)]
        blocks = [super(DealtReader, self).read(epoch, [each]) for each in slices if each[0] < each[1]]
        samples = Block.join(blocks)
        costs = how.cost.of(samples, self._schema)
        dealt = deal(costs, how.ranks, how.pieces, make_key(self._seed, epoch, first))
        undealt = np.arange(len(costs)).reshape(how.ranks, size)
        most, most_of_slices = (float(slowest_cost(costs, each, how.pieces)) for each in (dealt, undealt))
        self._loads[epoch, stop] = Loads(most, most_of_slices, float(costs.sum()) / how.ranks)
        return replace(samples.take(dealt[how.place]), bad=blocks[how.place > 0].bad)
