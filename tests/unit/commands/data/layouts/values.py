"""Cells of columns as public data sets write them, drawn by chance: ids, codes, amounts, texts, lists, times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

ROWS = 2000
_SYLLABLES = ["ba", "ko", "ri", "ten", "lu", "mar", "so", "vi", "del", "pa", "no", "gri", "sta", "ho", "wen", "cy"]


class Values:
    """Cells of `ROWS` rows."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)

    def _popular(self, kinds: int, slope: float = 0.9) -> np.ndarray:
        """Return which of some kinds each row has: a few are frequent, in no order."""
        shares = (1.0 / np.arange(1, kinds + 1) ** slope) * self._draw.gamma(3, 1, kinds)
        return self._draw.choice(kinds, ROWS, p=self._draw.permutation(shares) / shares.sum())

    def _different(self, count: int, least: int, largest: int) -> np.ndarray:
        found = np.zeros(0, np.int64)
        while len(found) < count:
            found = np.union1d(found, self._draw.integers(least, largest, 2 * count))
        return self._draw.permutation(found)[:count]

    def ids(self, kinds: int, least: int, largest: int) -> list[int]:
        """Return ids of some things, that are anywhere between two numbers."""
        return self._different(kinds, least, largest)[self._popular(kinds)].tolist()

    def codes(self, kinds: int, first: int = 0) -> list[int]:
        """Return codes without a gap."""
        return (first + self._popular(kinds)).tolist()

    def some(self, values: Sequence[Any], shares: Sequence[float] = ()) -> list[Any]:
        chosen = self._draw.choice(len(values), ROWS, p=np.array(shares) / sum(shares)) if shares else None
        return [values[n] for n in (self._popular(len(values)) if chosen is None else chosen).tolist()]

    def unique(self, least: int, largest: int) -> list[int]:
        """Return another number in each row, in no order."""
        return self._different(ROWS, least, largest).tolist()

    def rows(self, first: int = 1) -> list[int]:
        return list(range(first, first + ROWS))

    def count(self, mean: float, least: int = 0) -> list[int]:
        """Return numbers of things: the more, the rarer, with a heavy tail."""
        return (least + self._draw.negative_binomial(0.8, 0.8 / (0.8 + mean), ROWS)).tolist()

    def around(self, mean: float, spread: float, least: float = -np.inf, largest: float = np.inf) -> list[int]:
        return np.clip(self._draw.normal(mean, spread, ROWS), least, largest).round().astype(int).tolist()

    def heavy(self, middle: float, spread: float = 1.0, digits: int = 0) -> list[Any]:
        """Return amounts with a tail."""
        found = (middle * np.exp(spread * self._draw.normal(0, 1, ROWS))).round(digits)
        return found.astype(int).tolist() if not digits else [f"{each:.{digits}f}" for each in found]

    def fraction(self, least: float, largest: float, digits: int = 4) -> list[str]:
        return [str(each) for each in self._draw.uniform(least, largest, ROWS).round(digits).tolist()]

    def flag(self, share: float = 0.3, words: tuple[Any, Any] = (0, 1)) -> list[Any]:
        return [words[int(each)] for each in self._draw.random(ROWS) < share]

    def missing(self, cells: Sequence[Any], share: float, word: str = "") -> list[Any]:
        is_missing = self._draw.random(ROWS) < share
        return [word if gone else cell for gone, cell in zip(is_missing, cells, strict=True)]

    def floats(self, cells: Sequence[Any]) -> list[str]:
        """Return integers as pandas writes them where some are missing."""
        return [each if each == "" else f"{each}.0" for each in cells]

    def word(self, number: int) -> str:
        parts = [_SYLLABLES[number % 16], _SYLLABLES[number // 16 % 16], _SYLLABLES[number // 256 % 16]]
        return "".join(parts[: 2 + (number > 255)]).capitalize()

    def words(self, kinds: int) -> list[str]:
        """Return a word of some, in each row."""
        return [self.word(n) for n in self._popular(kinds).tolist()]

    def titles(self, kinds: int, least: int = 2, most: int = 6) -> list[str]:
        """Return a text of several words, of some texts; of 0, another one in each row."""
        texts = [
            " ".join(self.word(int(n)) for n in self._draw.integers(0, 2000, self._draw.integers(least, most + 1)))
            for _ in range(kinds or ROWS)
        ]
        return texts if not kinds else [texts[n] for n in self._popular(kinds).tolist()]

    def names(self, kinds: int) -> list[str]:
        return [f"{self.word(n)} {self.word(7 * n + 3)}" for n in self._popular(kinds, 0.5).tolist()]

    def hexes(self, kinds: int, digits: int) -> list[str]:
        """Return keys; of 0 kinds, another one in each row."""
        made = ["".join(f"{n:x}" for n in self._draw.integers(0, 16, digits)) for _ in range(kinds or ROWS)]
        return made if not kinds else [made[n] for n in self._popular(kinds).tolist()]

    def lists(self, values: Sequence[str], between: str, most: int = 4, ends: str = "{}") -> list[str]:
        sizes = self._draw.integers(1, most + 1, ROWS).tolist()
        shares = 1.0 / np.arange(1, len(values) + 1) ** 0.7
        return [
            between.join(
                ends.format(values[n])
                for n in self._draw.choice(len(values), size, replace=False, p=shares / shares.sum())
            )
            for size in sizes
        ]

    def times(self, form: str, first: str = "2015-01-01", days: int = 700, *, sort: bool = False) -> list[str]:
        """Return times as a format of strftime writes them; `%-m` is a month without a zero in front."""
        at = self._draw.integers(0, days * 86400, ROWS)
        at = np.sort(at) if sort else at
        return [f"{each:{form}}" for each in (np.datetime64(first, "s") + at).tolist()]
