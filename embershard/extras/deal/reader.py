"""`DealtReader`: reads the samples that were dealt to a rank, in place of its slice of a global batch."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from embershard.data import DataConfig, Source
from embershard.data.block import BadRow, Block
from embershard.data.hashing import Ids, make_key
from embershard.data.order.stream import SampleReader
from embershard.data.sources.source import FileSource, Split
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

    def of(self, num_ids: Ids) -> Ids:
        """Return the costs of samples with so many ids of the feature: int64 [n]."""
        tokens = num_ids + self.more
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


class _Part(NamedTuple):
    """Samples of one chunk: their ids of a feature, the bad rows among them, and what reads some, by their places."""

    num_ids: Ids
    bad: tuple[BadRow, ...]
    take: Callable[[Ids], Block]


class DealtReader(SampleReader):
    """Reads the numbers of ids in the slices of all ranks that share theirs, and the samples that are dealt to this
    one. Their deal is a function of the samples, of the seed and of their position.

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
        self._seed, self._dealing, self._loads = config.seed, dealing, loads
        self._feature = source.schema.keys.index(dealing.cost.feature)

    def read(self, epoch: int, ranges: Sequence[tuple[int, int]]) -> Block:
        """Return the samples dealt to the rank whose slice this is, and the slice's own bad rows."""
        [(start, stop)] = ranges
        how, size = self._dealing, stop - start
        first = start - how.place * size
        parts = self._parts(epoch, first, first + how.ranks * size)
        costs = how.cost.of(np.concatenate([part.num_ids for part in parts]))
        dealt = deal(costs, how.ranks, how.pieces, make_key(self._seed, epoch, first))
        undealt = np.arange(len(costs)).reshape(how.ranks, size)
        most, most_of_slices = (float(slowest_cost(costs, each, how.pieces)) for each in (dealt, undealt))
        self._loads[epoch, stop] = Loads(most, most_of_slices, float(costs.sum()) / how.ranks)
        own = self._parts(epoch, start, stop) if any(part.bad for part in parts) else []
        return replace(_taken(parts, dealt[how.place]), bad=tuple(row for part in own for row in part.bad))

    def _parts(self, epoch: int, start: int, stop: int) -> list[_Part]:
        return [self._part(*each) for each in self._orders.get(epoch).locate(start, stop)]

    def _part(self, chunk: int, rows: Ids) -> _Part:
        """Return samples of a chunk; of a parsed one, ids are copied of those alone that are taken."""
        if not isinstance(self._source, FileSource):
            block = self._source.read(self._split, chunk, rows)
            return _Part(self._counted(block).values[0], block.bad, block.take)
        parsed, members, among = self._source.parsed(self._split, chunk)
        mine, counts = members[rows], replace(parsed, samples=self._counted(parsed.samples))
        counted = counts.take(mine, among, replaces=True)
        return _Part(counted.values[0], counted.bad, lambda places: parsed.take(mine[places], among, replaces=True))

    def _counted(self, block: Block) -> Block:
        """Return the same samples with nothing but their numbers of ids."""
        counts = np.full(block.num_samples, block.lengths[self._feature], np.int64)
        return Block(block.dense[:, :0], block.labels, (counts,), (1,))


def _taken(parts: Sequence[_Part], places: Ids) -> Block:
    """Return the samples at these places of all parts, one part after another."""
    rising, found, first = np.sort(places), [], 0
    for part in parts:
        last = first + len(part.num_ids)
        here = slice(*np.searchsorted(rising, (first, last)))
        found += [part.take(rising[here] - first)] if here.start < here.stop else []
        first = last
    mine = Block.join(found)
    return mine if np.array_equal(rising, places) else mine.take(np.searchsorted(rising, places))
