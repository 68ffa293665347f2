"""Hot samples: those that look up hot rows only. `HotSamples` has a bit for each training sample.

In `PackedOrder` the hot samples of an epoch come before the cold ones, so that batches of either kind are ranges of it.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from embershard.data.block import Block
from embershard.data.hashing import Ids
from embershard.data.order.order import ChunkTable, EpochOrder, spans
from embershard.data.sample_bits import Bits, Flags, SampleBits
from embershard.errors import DataError
from embershard.whole_file import whole_file


class HotRowsFilter:
    """Tells hot samples from cold ones.

    >>> rows = HotRowsFilter([np.array([1, 3])])
    >>> block = Block(np.zeros((3, 1)), np.zeros(3), (np.array([3, 1, 2]),), np.array([[2, 0, 1]]))
    >>> rows.hot_samples(block).tolist()
    [True, True, False]

    Args:
        rows: by sparse feature, in the schema's order: the hot rows of its table, int64 ascending.
    """

    def __init__(self, rows: Sequence[Ids]) -> None:
        self._num_rows = [int(of_table[-1]) + 1 if len(of_table) else 0 for of_table in rows]
        self._bits = [_bits_of(of_table, size) for of_table, size in zip(rows, self._num_rows, strict=True)]

    def hot_samples(self, block: Block) -> Flags:
        """Return for each of the n samples whether all its ids are hot: bool [n]. One without ids is hot."""
        found = np.ones(block.num_samples, bool)
        for feature, ids in enumerate(block.values):
            is_hot = self._are_hot(feature, ids)
            lengths = block.lengths[feature]
            if isinstance(lengths, int):
                found &= is_hot.reshape(-1, lengths).all(axis=1)
            else:
                samples = np.repeat(np.arange(block.num_samples), lengths)
                found[samples[~is_hot]] = False
        return found

    def _are_hot(self, feature: int, ids: Ids) -> Flags:
        bits, size = self._bits[feature], self._num_rows[feature]
        if not size:
            return np.zeros(len(ids), bool)
        inside = np.minimum(ids, size - 1)
        return ((bits[inside >> 3] >> (7 - (inside & 7)).astype(np.uint8)) & 1).astype(bool) & (ids < size)


def _bits_of(rows: Ids, size: int) -> Bits:
    flags = np.zeros(size, bool)
    flags[rows] = True
    return np.packbits(flags)


@dataclass(frozen=True, eq=False)
class HotSamples(SampleBits):
    """Which training samples are hot.

    Attributes:
        digest: of the data and the hot rows.

    >>> hot = HotSamples(np.packbits([True, False, True]), 3, digest="")
    >>> hot.between(1, 3).tolist(), round(hot.share, 2)
    ([False, True], 0.67)
    """

    digest: str

    @property
    def share(self) -> float:
        """Share of the samples that are hot."""
        return self.count / max(1, self.num_samples)

    def in_chunks(self, chunks: ChunkTable) -> HotChunks:
        """Return the hot samples of each chunk of the training data."""
        return HotChunks(self, chunks)

    def save(self, path: Path) -> None:
        """Write a `.npz` file; an earlier one is replaced when the new one is complete."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial, partial.open("wb") as file:
            np.savez(file, bits=self.bits, num_samples=self.num_samples, digest=self.digest)

    @classmethod
    def load(cls, path: Path) -> HotSamples:
        """Read a saved file; nothing is unpickled.

        Raises:
            DataError: the file is damaged or of another kind.
        """
        try:
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                found = cls(file["bits"], int(file["num_samples"]), str(file["digest"]))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"{path}: got no file of hot samples ({error}); remove it, and it is made again") from error
        if found.bits.dtype != np.uint8 or found.bits.shape != (-(-found.num_samples // 8),):
            raise DataError(f"{path}: got bits of another number of samples; remove it, and it is made again")
        return found


class HotChunks:
    """The hot samples of each chunk.

    Args:
        chunks: of the training data: C.

    Attributes:
        num_rows: int64 [C], all samples of each chunk.
        num_hot: int64 [C], its hot ones.
    """

    def __init__(self, hot: HotSamples, chunks: ChunkTable) -> None:
        if hot.num_samples != chunks.num_samples:
            raise DataError(
                f"the hot samples are of {hot.num_samples} training samples, and there are {chunks.num_samples}; "
                "find them again for these data"
            )
        self._hot = hot
        self.num_rows = chunks.rows
        self._starts = np.cumsum(chunks.rows) - chunks.rows
        self.num_hot = np.array([self.flags(chunk).sum() for chunk in range(len(chunks.rows))], np.int64)

    def flags(self, chunk: int) -> Flags:
        """Return whether the chunk's samples are hot: bool [its rows]."""
        start = int(self._starts[chunk])
        return self._hot.between(start, start + int(self.num_rows[chunk]))

    def packed(self, order: EpochOrder) -> PackedOrder:
        """Return the order of the same epoch with the hot samples first."""
        return PackedOrder(order, self)


class PackedOrder:
    """The order of one epoch with the hot samples first: positions [0, num_hot) are hot, the others are cold.

    Among each other, the samples of a kind are in the epoch's order. So neighbours still share chunks, and an epoch
    reads each chunk twice, once for each kind.

    Args:
        order: of the same epoch, without kinds.
        hot: the hot samples of each chunk.

    Attributes:
        num_hot: samples.
    """

    def __init__(self, order: EpochOrder, hot: HotChunks) -> None:
        self._order, self._hot = order, hot
        num_hot = hot.num_hot[order.chunks]
        self._sizes = np.concatenate([num_hot, hot.num_rows[order.chunks] - num_hot])
        self._ends = np.cumsum(self._sizes)
        self.num_hot = int(num_hot.sum())

        @lru_cache(maxsize=8)
        def rows_of(chunk: int, is_hot: bool) -> Ids:
            rows = order.rows_of(chunk)
            return rows[hot.flags(chunk)[rows] == is_hot]

        self._rows_of = rows_of

    def hot_among_first(self, count: int) -> int:
        """Return how many of the first `count` samples of the order without kinds are hot."""
        chunks = self._order.chunks
        ends, num_hot = np.cumsum(self._hot.num_rows[chunks]), self._hot.num_hot[chunks]
        whole = int(np.searchsorted(ends, count, side="right"))  # chunks
        found = int(num_hot[:whole].sum())
        for chunk, rows in self._order.locate(int(ends[whole - 1]) if whole else 0, count):
            found += int(self._hot.flags(chunk)[rows].sum())
        return found

    def locate(self, start: int, stop: int) -> list[tuple[int, Ids]]:
        """Return the places of the samples at positions [start, stop): pairs of a chunk and rows of it, in order."""
        parts = []
        for place, first, last in spans(self._ends, self._sizes, start, stop):
            kind, number = divmod(place, len(self._order.chunks))
            chunk = int(self._order.chunks[number])
            parts.append((chunk, self._rows_of(chunk, kind == 0)[first:last]))
        return parts
