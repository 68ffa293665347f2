"""What a survey keeps of values: distinct ones, numbers, and what separators cut texts into. In bounded memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from embershard.data.hashing import Ids, Words
from embershard.data.sources.table.cells import has_separator, split_cells, stripped
from embershard.data.sources.table.decode import MOST_BYTES, text_words

#: Hashes that are kept of each column. The estimate of distinct values is exact up to so many, then within 3 %.
KEPT_HASHES = 4096
_KEPT_NUMBERS = 1 << 16
SECONDS_PER_DAY = 86400
#: Separators that texts have for no other reason: Hive's, and ASCII's of files, groups, records and units.
CONTROLS = ("\x01", "\x02", "\x03", "\x1c", "\x1d", "\x1e", "\x1f")
_DIGITS = r"^[0-9.,%+-]*$"


@dataclass
class DistinctCount:
    """Estimates the number of distinct values from the smallest of their 64-bit hashes.

    Attributes:
        kept: the smallest hashes, rising; all of them where there are fewer than `KEPT_HASHES`.
        count: values, distinct or not.
    """

    kept: Words = field(default_factory=lambda: np.zeros(0, np.uint64))
    count: int = 0

    def add(self, words: Words) -> None:
        self.count += len(words)
        if len(self.kept) == KEPT_HASHES:
            words = words[words < self.kept[-1]]
        self.kept = np.union1d(self.kept, words)[:KEPT_HASHES]

    @property
    def is_exact(self) -> bool:
        return len(self.kept) < KEPT_HASHES

    @property
    def estimate(self) -> int:
        """Distinct values.

        >>> from embershard.data.hashing import mix64
        >>> count = DistinctCount()
        >>> count.add(mix64(np.arange(100_000, dtype=np.uint64)))
        >>> 97_000 < count.estimate < 103_000
        True
        """
        if self.is_exact:
            return len(self.kept)
        return min(self.count, round((KEPT_HASHES - 1) / (float(self.kept[-1]) / 2.0**64)))


@dataclass
class NumberSummary:
    """Mean, spread and range of numbers, and an evenly spaced sample of them. `are_days`: as seconds, whole days."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float = np.inf
    largest: float = -np.inf
    are_whole: bool = True
    are_days: bool = True
    _sample: list[NDArray[np.float64]] = field(default_factory=list)
    _step: int = 1
    _num_sampled: int = 0

    def add(self, numbers: NDArray[np.float64]) -> None:
        """Add numbers that float32 holds, or times: the squares of larger ones would not be finite."""
        if not len(numbers):
            return
        first = -self.count % self._step
        total = self.count + len(numbers)
        change = float(numbers.mean()) - self.mean
        self.squares += (
            float(((numbers - numbers.mean()) ** 2).sum()) + change * change * self.count * len(numbers) / total
        )
        self.mean += change * len(numbers) / total
        self.count = total
        self.least, self.largest = min(self.least, float(numbers.min())), max(self.largest, float(numbers.max()))
        self.are_whole = self.are_whole and bool((numbers == np.trunc(numbers)).all())
        self.are_days = self.are_days and not bool((numbers % SECONDS_PER_DAY).any())
        self._sample.append(numbers[first :: self._step].copy())
        self._num_sampled += len(self._sample[-1])
        while self._num_sampled > 2 * _KEPT_NUMBERS:
            self._sample = [np.concatenate(self._sample)[::2]]
            self._num_sampled, self._step = len(self._sample[0]), 2 * self._step

    @property
    def std(self) -> float:
        return float(np.sqrt(self.squares / self.count)) if self.count else 0.0

    def quantiles(self, parts: int) -> list[float]:
        """Return the distinct ones of the `parts + 1` quantiles of the sample, rising."""
        return np.unique(np.quantile(self.sample, np.linspace(0, 1, parts + 1))).tolist()

    def share_at_least(self, number: float) -> float:
        """Return the share of the sample that is at least `number`."""
        return float((self.sample >= number).mean())

    @property
    def sample(self) -> NDArray[np.float64]:
        """Some of the numbers, evenly spaced; all where there are few."""
        return np.concatenate([np.zeros(0), *self._sample])


@dataclass
class PartCounts:
    """What a separator cuts the cells of a column into: values, without the blanks around them.

    Attributes:
        distinct: the values.
        cells: that have the separator.
        most: values of a cell.
        values: those of all cells.
        digits: how many of them are digits, in cells that have the separator.
        blanks: how many have blanks around them.
        too_long: how many are above `MOST_BYTES`.
    """

    separator: str
    distinct: DistinctCount = field(default_factory=DistinctCount)
    cells: int = 0
    most: int = 0
    values: int = 0
    digits: int = 0
    blanks: int = 0
    too_long: int = 0

    def add(self, texts: pa.Array, words: Words, numbers: Ids) -> None:
        """Add different texts, their hashes, and how many cells have each."""
        has_it = has_separator(texts, self.separator)
        if not pc.any(has_it).as_py() and not self.cells:
            self.distinct.add(words)
            self.values += int(numbers.sum())
            self.most = max(self.most, 1)
            return
        lists = split_cells(texts, self.separator)
        found = lists.flatten()
        bare = stripped(found)
        words, sizes, is_empty = text_words(bare)
        is_short = sizes <= MOST_BYTES
        self.distinct.add(words[~is_empty & is_short])
        lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
        of_cells = np.repeat(numbers, lengths)
        has_several = np.repeat(has_it.to_numpy(zero_copy_only=False), lengths)
        are_digits = pc.match_substring_regex(bare, _DIGITS).to_numpy(zero_copy_only=False)
        self.cells += int(numbers[has_it.to_numpy(zero_copy_only=False)].sum())
        self.most = max(self.most, int(lengths.max(initial=0)))
        self.values += int(of_cells.sum())
        self.digits += int(of_cells[has_several & are_digits].sum())
        self.blanks += int(of_cells[pc.not_equal(bare, found).to_numpy(zero_copy_only=False)].sum())
        self.too_long += int((~is_short).sum())
