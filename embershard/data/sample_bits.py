"""`SampleBits`: a bit for each sample."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from embershard.data.hashing import Ids

Bits = NDArray[np.uint8]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class SampleBits:
    """A bit for each sample.

    >>> found = SampleBits.of([np.array([True]), np.array([False, True])])
    >>> found.between(1, 3).tolist(), found.count
    ([False, True], 2)

    Attributes:
        bits: uint8 [ceil(num_samples / 8)], in the order of the files, the first sample's bit highest.
        num_samples: those that have a bit.
    """

    bits: Bits
    num_samples: int

    @staticmethod
    def of(parts: Iterable[Flags]) -> SampleBits:
        """Return the bits of all samples from those of some samples after others."""
        packed, rest, num_samples = [np.empty(0, np.uint8)], np.empty(0, np.bool_), 0
        for part in parts:
            num_samples += len(part)
            rest = np.concatenate([rest, part])
            whole = len(rest) // 8 * 8
            packed.append(np.packbits(rest[:whole]))
            rest = rest[whole:]
        return SampleBits(np.concatenate([*packed, np.packbits(rest)]), num_samples)

    @staticmethod
    def at(numbers: Ids, num_samples: int) -> SampleBits:
        """Return the bits that are 1 for the samples with these numbers."""
        bits = np.zeros(-(-num_samples // 8), np.uint8)
        np.bitwise_or.at(bits, numbers >> 3, np.uint8(128) >> (numbers & 7).astype(np.uint8))
        return SampleBits(bits, num_samples)

    @property
    def count(self) -> int:
        """Samples whose bit is 1."""
        return int(np.bitwise_count(self.bits).sum(dtype=np.int64))

    def between(self, start: int, stop: int) -> Flags:
        """Return the bits of the samples [start, stop): bool [stop - start]."""
        first = start // 8
        found = np.unpackbits(self.bits[first : -(-stop // 8)])
        return found[start - 8 * first : stop - 8 * first].view(bool)
