"""Samples as numpy arrays, between a source and a batch; rows that are no samples, and what takes their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from embershard.data.hashing import RESERVED_ID, Ids
from embershard.data.schema import Schema, SparseFeature
from embershard.errors import DataError, IdOutOfRangeError
from embershard.known_bounds import ANY_ID, note_bounds

if TYPE_CHECKING:  # torch takes seconds to import, and only batches need it
    from torch import Tensor

    from embershard.data.batch import Batch


Lengths = NDArray[np.int32] | tuple[int, ...]
#: Bad rows that are kept for reports at a time; all are counted.
MOST_KEPT = 1000


@dataclass(frozen=True)
class Block:
    """n samples.

    Attributes:
        dense: float32 [n, D].
        labels: float32 [n], or [n, T] of several.
        values: int64 ids of each sparse feature's bags, sample after sample.
        lengths: int32 [F, n], ids per bag; or one number per feature, where all its bags have the same size.
        weights: float32 [n], of the samples; None: 1 each.
        bad: rows that are not among the samples, because they are none.
    """

    dense: NDArray[np.float32]
    labels: NDArray[np.float32]
    values: tuple[Ids, ...]
    lengths: Lengths
    weights: NDArray[np.float32] | None = None
    bad: tuple[BadRow, ...] = ()

    @property
    def num_samples(self) -> int:
        return len(self.labels)

    def take(self, rows: Ids) -> Block:
        """Return the samples number `rows`, in that order."""
        lengths = self.lengths
        if isinstance(lengths, tuple):
            pairs = zip(self.values, lengths, strict=True)
            values = tuple(v[rows] if size == 1 else v.reshape(-1, size)[rows].ravel() for v, size in pairs)
        else:
            values = tuple(take_bags(v, n, rows) for v, n in zip(self.values, lengths, strict=True))
            lengths = lengths[:, rows]
        weights = None if self.weights is None else self.weights[rows]
        return Block(self.dense[rows], self.labels[rows], values, lengths, weights)

    @staticmethod
    def join(blocks: Sequence[Block]) -> Block:
        """Return the samples of all blocks (at least one), in order."""
        if len(blocks) == 1:
            return blocks[0]
        values = tuple(np.concatenate(parts) for parts in zip(*(b.values for b in blocks), strict=True))
        lengths = blocks[0].lengths
        if not isinstance(lengths, tuple):
            lengths = np.concatenate([np.asarray(b.lengths) for b in blocks], axis=1)
        dense = np.concatenate([b.dense for b in blocks])
        bad = tuple(row for b in blocks for row in b.bad)
        labels = np.concatenate([b.labels for b in blocks])
        weights = None if blocks[0].weights is None else np.concatenate([np.asarray(b.weights) for b in blocks])
        return Block(dense, labels, values, lengths, weights, bad)

    def to_batch(self, schema: Schema) -> Batch:
        """Return the same samples as tensors, which share the memory of the arrays but `values`. Their ids are checked,
        in the thread that reads, so that no step has to look for wrong ones.

        Raises:
            IdOutOfRangeError: an id is no row of its table. A source of one's own gave it: ours name file and row.
        """
        import torch
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        from embershard.data.batch import Batch

        if isinstance(self.lengths, tuple):
            lengths = _equal_lengths(self.lengths, self.num_samples)
        else:
            lengths = torch.from_numpy(np.ascontiguousarray(self.lengths)).view(-1)
        values = torch.from_numpy(np.concatenate(self.values))
        self._check_ids(schema)
        counts = [len(ids) for ids in self.values]  # else a step adds the lengths up
        sparse = KeyedJaggedTensor(keys=schema.keys, values=values, lengths=lengths, length_per_key=counts)
        note_bounds(sparse, _bounds(schema))
        weights = None if self.weights is None else torch.from_numpy(self.weights)
        return Batch(torch.from_numpy(self.dense), sparse, torch.from_numpy(self.labels), weights=weights)

    def _check_ids(self, schema: Schema) -> None:
        for feature, ids, sizes in zip(schema.sparse, self.values, self.lengths, strict=True):
            if not len(ids):
                continue
            if feature.takes_ids:
                has_wrong = ids.min() == RESERVED_ID
            else:
                has_wrong = ids.view(np.uint64).max() >= feature.num_rows  # as words, negative ids are large
            if has_wrong:
                raise _wrong_id(feature, ids, sizes)


def _wrong_id(feature: SparseFeature, ids: Ids, sizes: NDArray[np.int32] | int) -> IdOutOfRangeError:
    if feature.takes_ids:
        is_wrong, problem = ids == RESERVED_ID, "is reserved for missing values. Map these to another id"
    else:
        is_wrong = (ids < 0) | (ids >= feature.num_rows)
        problem = f"is not in [0, {feature.num_rows}). Map ids to rows when reading, or give the table more rows"
    place = int(is_wrong.argmax())
    sample = place // sizes if isinstance(sizes, int) else np.searchsorted(np.cumsum(sizes), place, side="right")
    return IdOutOfRangeError(
        f"table {feature.table or feature.name!r}, feature {feature.name!r}: id {ids[place]} at position {place} of "
        f"the batch (sample {sample}) {problem}"
    )


def empty_block(schema: Schema) -> Block:
    """Return no samples: the block of a rank whose slice begins behind the end of an evaluation."""
    none = tuple(np.empty(0, np.int64) for _ in schema.sparse)
    dense = np.empty((0, schema.num_dense), np.float32)
    labels = np.empty((0, *([] if len(schema.target.labels) == 1 else [len(schema.target.labels)])), np.float32)
    weights = None if schema.target.weight is None else np.empty(0, np.float32)
    return Block(dense, labels, none, np.empty((len(none), 0), np.int32), weights)


def take_bags(values: Ids, lengths: NDArray[np.int32], rows: Ids) -> Ids:
    """Return the ids of the bags number `rows`, bag after bag."""
    if (lengths == 1).all():
        return values[rows]
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    sizes = lengths[rows].astype(np.int64)
    places = np.repeat(starts[rows] - (np.cumsum(sizes) - sizes), sizes)
    places += np.arange(len(places))
    return values.take(places)


def transform_dense(dense: NDArray[np.float32], transform: str) -> None:
    """Apply `dense_transform` in place."""
    if transform == "log1p":
        np.log1p(np.maximum(dense, 0, out=dense), out=dense)


@lru_cache(maxsize=8)
def _bounds(schema: Schema) -> dict[str, float]:
    return {feature.name: ANY_ID if feature.takes_ids else feature.num_rows for feature in schema.sparse}


@lru_cache(maxsize=8)
def _equal_lengths(sizes: tuple[int, ...], num_samples: int) -> Tensor:
    """Return the lengths [F * B] of bags of equal sizes; shared by batches, read only."""
    import torch

    return torch.tensor(sizes, dtype=torch.int32).repeat_interleave(num_samples)


@dataclass(frozen=True)
class BadRow:
    """A row that is not a sample.

    >>> print(BadRow(Path("day_0"), 12, "C2", "C2='xyz': needed 1 to 8 hexadecimal digits, or nothing"))
    day_0:12 C2='xyz': needed 1 to 8 hexadecimal digits, or nothing

    Attributes:
        row: its number in the file, from 1.
        column: the first column that is wrong; "" for the whole row.
        problem: what is wrong, with the value.
        error: the exception of `stops`.
    """

    path: Path
    row: int
    column: str
    problem: str
    error: type[DataError] = DataError

    def __str__(self) -> str:
        return f"{self.path}:{self.row} {self.problem}"

    def stops(self) -> DataError:
        """Return what says so where no bad row is tolerated (`data.bad_rows`), with what tolerates some."""
        return self.error(f"{str(self).rstrip('.')}. To go on without such rows: --set data.bad_rows=0.01")


def no_good_row(bad: BadRow, count: int) -> DataError:
    """Return the error for a stretch of bad rows, the first of which is `bad`, that nothing can replace."""
    rows = f"{count} bad row{'s one after another' if count > 1 else ''}"
    return DataError(
        f"{bad}; and no row near it is good: {rows}. Remove such rows or, of text files, set a larger data.chunk_rows"
    )


def short(value: object) -> str:
    """Return a value as Python writes it, cut after 80 characters: for `BadRow.problem`."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True)
class ParsedChunk:
    """The samples of a physical chunk, and those of its rows that are not samples.

    Attributes:
        samples: the good rows, in order.
        bad: the others, by their number in the chunk, from 0; in order.
    """

    samples: Block
    bad: Mapping[int, BadRow] = field(default_factory=dict)

    def take(self, rows: Ids, among: Ids, *, replaces: bool) -> Block:
        """Return the samples number `rows` of the chunk, in that order.

        Args:
            among: the rows of the chunk, in order, that are in the same split; `rows` are some of them.
            replaces: give a good row of `among` in place of each bad one, so that there are `len(rows)` samples.
                The good ones are evenly spread, and a function of the chunk alone. Otherwise leave bad rows out.

        Raises:
            DataError: all rows of `among` are bad, so that nothing can replace them.
        """
        if not self.bad:
            return self.samples.take(rows)
        is_good = np.ones(self.samples.num_samples + len(self.bad), np.bool_)
        is_good[np.fromiter(self.bad, np.int64, len(self.bad))] = False
        is_bad = ~is_good[rows]
        found = rows[is_bad]
        taken = rows if replaces else rows[~is_bad]
        if replaces and len(found):
            good_here, bad_here = (among[each[among]] for each in (is_good, ~is_good))
            if not len(good_here):
                raise no_good_row(self.bad[int(found[0])], len(bad_here))
            taken = rows.copy()
            taken[is_bad] = good_here[np.searchsorted(bad_here, found) * len(good_here) // len(bad_here)]
        block = self.samples.take(np.cumsum(is_good)[taken] - 1)
        return dataclasses.replace(block, bad=tuple(self.bad[row] for row in found.tolist()))


@dataclass
class BadRowTally:
    """Counts the bad rows among samples that were read.

    Attributes:
        num_samples: samples read, bad rows included.
        num_bad: bad rows among them; a row counts each time that it is read.
        rows: the first `MOST_KEPT` of them.
    """

    num_samples: int = 0
    num_bad: int = 0
    rows: list[BadRow] = field(default_factory=list)

    def add(self, num_samples: int, bad: tuple[BadRow, ...]) -> None:
        """Count `num_samples` more, of which some are `bad`."""
        self.num_samples += num_samples
        self.num_bad += len(bad)
        self.rows += bad[: MOST_KEPT - len(self.rows)]

    def take(self) -> BadRowTally:
        """Return what was counted since the last call, and start again."""
        counted = dataclasses.replace(self)
        self.num_samples, self.num_bad, self.rows = 0, 0, []
        return counted
