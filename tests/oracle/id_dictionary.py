"""Ids without a bound, as dictionaries: which id has which row after each batch.

Every rule is a sentence in Python. Nothing is fast, nothing is shared with the package but the settings.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from embershard.cache.ids.config import IdTable

WORD = 2**64
WAYS = 8


def mix(number: int) -> int:
    """SplitMix64's finaliser, signed."""
    z = number % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    z ^= z >> 31
    return z - WORD if z >= WORD // 2 else z


@dataclass
class Bucket:
    """Ids of one bucket, all mixed. ``free``: rows in the order in which they may be used, and from which batch on."""

    size: int
    rows: dict[int, int] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    free: list[tuple[int, int]] = field(default_factory=list)
    candidates: dict[int, list[tuple[int, int, int] | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.free = [(0, row) for row in range(1, self.size)]


class IdDictionary:
    """A table: what `IdMap` promises for all of its buckets.

    ``fault``: a planted one. "counts kept": an id that comes back has the count that it left with; "ties by row": of
    ids that are used alike, those of the lowest rows leave; "a coin per occurrence", and "coins in order of arrival".
    """

    def __init__(self, table: str, config: IdTable, capacity: int, seed: int, fault: str = "") -> None:
        self.config, self.layout = config, config.buckets_of(table, capacity)
        self.buckets = [Bucket(self.layout.rows) for _ in range(self.layout.num_buckets)]
        self.coins = int.from_bytes(
            hashlib.blake2b(f"{seed} {table} admission".encode(), digest_size=8).digest(), "little"
        )
        self.clock = self.admitted = self.evicted = self.refused = 0
        self.fault, self.left_with, self.tossed = fault, dict[int, int](), 0

    def copy(self) -> IdDictionary:
        return copy.deepcopy(self)

    def resolve(self, ids: Iterable[int]) -> tuple[dict[int, int | None], dict[int, int]]:
        """Rows of a batch's ids (mixed; None: zeros), and the ids of the rows that it gives away."""
        self.clock += 1
        counted, born = Counter(ids), dict[int, int]()
        for x in sorted(counted):
            number, bucket = self._bucket(x)
            if x in bucket.rows:
                bucket.counts[x] = self._decayed(bucket, x) + counted[x]
                bucket.last[x] = self.clock
        for x in sorted(counted):
            number, bucket = self._bucket(x)
            if x not in bucket.rows and self._is_admitted(bucket, x, counted[x]):
                if bucket.free and bucket.free[0][0] <= self.clock:
                    row = bucket.free.pop(0)[1]
                    self._forget_candidate(bucket, x)
                    bucket.rows[x], bucket.last[x] = row, self.clock
                    bucket.counts[x] = counted[x] + (self.left_with.get(x, 0))
                    born[number * self.layout.rows + row] = x
                    self.admitted += 1
                else:
                    self.refused += 1
        found = {x: self._row(x) for x in counted}
        gave = {row // self.layout.rows for row in born}
        for number, bucket in enumerate(self.buckets):
            expires = self.config.ttl_steps is not None and self.clock % len(self.buckets) == number
            self._evict(bucket, is_due=number in gave, expires=expires)
        return found, born

    def find(self, ids: Iterable[int]) -> dict[int, int | None]:
        return {x: self._row(x) for x in ids}

    def live(self) -> dict[int, tuple[int, int, int]]:
        """Row, count and last use of every id."""
        return {
            x: (number * self.layout.rows + row, bucket.counts[x], bucket.last[x])
            for number, bucket in enumerate(self.buckets)
            for x, row in bucket.rows.items()
        }

    def waiting(self) -> dict[int, int]:
        """Counts of ids without a row."""
        return {
            entry[0]: entry[1]
            for bucket in self.buckets
            for members in bucket.candidates.values()
            for entry in members
            if entry is not None
        }

    def _bucket(self, x: int) -> tuple[int, Bucket]:
        number = x % WORD % len(self.buckets)
        return number, self.buckets[number]

    def _row(self, x: int) -> int | None:
        number, bucket = self._bucket(x)
        shared = 0 if self.config.unadmitted == "shared" else None
        row = bucket.rows.get(x, shared)
        return None if row is None else number * self.layout.rows + row

    def _decayed(self, bucket: Bucket, x: int) -> int:
        age = self.clock - bucket.last[x]
        return bucket.counts[x] >> (age // self.config.half_life) if self.config.half_life else bucket.counts[x]

    def _is_admitted(self, bucket: Bucket, x: int, count: int) -> bool:
        if self.config.admit_probability is not None:
            key = mix(self.coins + self.clock * 0x9E3779B97F4A7C15)
            if self.fault == "coins in order of arrival":
                self.tossed += 1
                key = mix(self.coins + self.tossed)
            tosses = count if self.fault == "a coin per occurrence" else 1
            coins = [mix(x ^ mix(key + n) if n else x ^ key) % WORD >> 11 for n in range(tosses)]
            return min(coins) < int(self.config.admit_probability * 2**53)
        if self.config.admit_after == 1:
            return True
        members = self._members(bucket, x)
        mine = [place for place, entry in enumerate(members) if entry is not None and entry[0] == x]
        empty = [place for place, entry in enumerate(members) if entry is None]
        old = [
            (entry[1], entry[2], entry[0], place)
            for place, entry in enumerate(members)
            if entry is not None and entry[2] < self.clock
        ]
        if mine:
            count += members[mine[0]][1]
        place = (mine or empty or [min(old)[3]] if mine or empty or old else [None])[0]
        if place is not None:
            members[place] = (x, count, self.clock)
        return count >= self.config.admit_after

    def _members(self, bucket: Bucket, x: int) -> list[tuple[int, int, int] | None]:
        chosen = ((x % WORD) >> 8) % 2**32 % -(-bucket.size // WAYS)
        return bucket.candidates.setdefault(chosen, [None] * WAYS)

    def _forget_candidate(self, bucket: Bucket, x: int) -> None:
        if self.config.admit_after > 1:
            members = self._members(bucket, x)
            for place, entry in enumerate(members):
                if entry is not None and entry[0] == x:
                    members[place] = None

    def _evict(self, bucket: Bucket, is_due: bool, expires: bool) -> None:
        is_low = len(bucket.free) < self.layout.least_free
        if not ((is_due and is_low) or expires):
            return
        ttl = self.config.ttl_steps
        leaving = [x for x in bucket.rows if ttl is not None and bucket.last[x] < self.clock - ttl]
        others = [x for x in bucket.rows if x not in leaving and bucket.last[x] < self.clock]
        is_lru, ties = self.config.eviction == "lru", bucket.rows if self.fault == "ties by row" else None
        others.sort(
            key=lambda x: (0 if is_lru else self._decayed(bucket, x), bucket.last[x], x if ties is None else ties[x])
        )
        if is_low:
            leaving += others[: max(0, self.layout.reserve - len(bucket.free) - len(leaving))]
        for row, x in sorted((bucket.rows[x], x) for x in leaving):
            bucket.free.append((self.clock + self.config.quarantine, row))
            if self.fault == "counts kept":
                self.left_with[x] = bucket.counts[x]
            del bucket.rows[x], bucket.counts[x], bucket.last[x]
        self.evicted += len(leaving)
