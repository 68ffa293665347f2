"""Settings of a table that takes any id, and its cut into buckets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from embershard.errors import ConfigError
from embershard.settings.resume_rules import OfModel

#: Numbers of buckets to choose from: each is a multiple of many numbers of ranks.
_BUCKETS = (240, 120, 60, 24)
_LEAST_ROWS = 1024  # of a bucket, where another number of buckets allows it
_MOST_ROWS = 2**31 - 1
_MOST_BATCHES = 2**31 - 1  # as far as uses are counted, too
_COIN_BITS = 53
#: Tensors of a table's ids in a state dict, beside "weight", and those of `IdMap.tensors`.
ID_TENSORS = {"ids": "records", "id_candidates": "candidates"}
_RECORD_BYTES, _CELL_BYTES, _FREE_BYTES = 16, 8, 4  # of an id and its uses; cells of the hash table; free rows


@dataclass(frozen=True)
class IdTable:
    """Rules by which ids get rows of a table with a fixed number of rows, its capacity, and lose them.

    All numbers of batches are global batches of training, whatever the number of ranks.

    >>> IdTable(admit_after=2, eviction="lfu", half_life=1000).buckets_of("users", 240_000).num_buckets
    120
    """

    admit_after: OfModel[int] = 1
    """An id gets a row at this many occurrences. Those of ids without a row are counted for about as many ids as there
    are rows."""

    admit_probability: OfModel[float | None] = None
    """In place of `admit_after`: the probability, from 2^-53 to below 1, with which an id without a row gets one in a
    batch. One coin per id and batch, a function of seed, table, id and batch."""

    eviction: OfModel[Literal["lfu", "lru"]] = "lfu"
    """Ids that lose their rows first: the least used, then those unused for longest; or `lru`: unused for longest."""

    half_life: OfModel[int | None] = None
    """Batches without a use after which `lfu` halves an id's count. Default: never."""

    ttl_steps: OfModel[int | None] = None
    """An id that no batch has used for more than this many batches loses its row, at the latest as many batches
    afterwards as there are buckets. Default: only when others need it."""

    unadmitted: OfModel[Literal["shared", "zero"]] = "shared"
    """Embedding of ids without a row: a row that those of a bucket share, and train; or zeros, which nothing trains."""

    buckets: OfModel[int | None] = None
    """Parts of the table, each with ids and rows of its own. Shards have whole buckets, so the number of ranks must
    divide it. Default: 240, 120, 60 or 24, whichever first has 1,024 rows in a bucket."""

    quarantine: OfModel[int] = 4
    """Batches from an eviction until the row may be used again. As many batches, less one, can be resident ahead of
    their step."""

    reserve: OfModel[float] = 1 / 16
    """Share of a bucket's rows that evictions keep free for new ids, those in quarantine included: at least 2 rows."""

    def __post_init__(self) -> None:
        for name in ("admit_after", "half_life", "ttl_steps", "buckets", "quarantine"):
            value = getattr(self, name)
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (is_whole and 1 <= value <= _MOST_BATCHES):
                raise ConfigError(f"{name}: got {value!r}, needed a whole number from 1 to {_MOST_BATCHES}")
        for name, choices in (("eviction", ("lfu", "lru")), ("unadmitted", ("shared", "zero"))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}: got {getattr(self, name)!r}, needed one of {', '.join(choices)}")
        for name in ("admit_probability", "reserve"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ConfigError(f"{name}: got {value!r}, needed a number between 0 and 1")
        if self.admit_probability is not None and self.coin_bound == 0:
            raise ConfigError(
                f"admit_probability: got {self.admit_probability!r}, needed at least 2^-{_COIN_BITS} (1.2e-16): coins "
                f"have {_COIN_BITS} bits, and none would win. Set a larger one"
            )
        if self.admit_probability is not None and self.admit_after != 1:
            raise ConfigError(
                f"admit_after={self.admit_after} and admit_probability={self.admit_probability}: one of them decides "
                "which ids get rows. Remove the other"
            )
        if self.half_life is not None and self.eviction != "lfu":
            raise ConfigError(f'half_life={self.half_life} has no effect with eviction="{self.eviction}", needed "lfu"')

    @property
    def decay(self) -> int:
        """What the loops take: -1 for `lru`, the half-life for `lfu`, 0 without one."""
        return -1 if self.eviction == "lru" else self.half_life or 0

    @property
    def coin_bound(self) -> int:
        """Coins of 53 bits below it win; 0: there are none."""
        return int((self.admit_probability or 0) * 2**_COIN_BITS)

    @property
    def row_bytes(self) -> int:
        """Host memory of the map, per row of the table."""
        return self.saved_row_bytes + _CELL_BYTES + _FREE_BYTES

    @property
    def saved_row_bytes(self) -> int:
        """The part of it that a checkpoint has."""
        return 2 * _RECORD_BYTES if self.admit_after > 1 else _RECORD_BYTES

    def candidates_of(self, buckets: Buckets) -> int:
        """Return for how many ids without a row uses are counted in a bucket."""
        return 8 * -(-buckets.rows // 8) if self.admit_after > 1 else 0

    def buckets_of(self, table: str, capacity: int) -> Buckets:
        """Cut a table of `capacity` rows into buckets.

        Raises:
            ConfigError: they cannot be cut into buckets of equal size, of at least 8 rows.
        """
        fitting = [number for number in _BUCKETS if capacity >= _LEAST_ROWS * number]
        number = self.buckets or (fitting or _BUCKETS[-1:])[0]
        rest, least = capacity % number, 8 * number
        if rest or capacity < least or capacity > _MOST_ROWS:
            nearest = max(capacity + (number - rest) % number, least)
            raise ConfigError(
                f"table {table!r}: got {capacity} rows in {number} buckets, needed a multiple of {number} from {least} "
                f"to {_MOST_ROWS}. Give the table {min(nearest, _MOST_ROWS // number * number)} rows, or set another "
                "number of buckets, which the number of ranks divides"
            )
        rows = capacity // number
        return Buckets(number, rows, max(2, int(rows * self.reserve)))


@dataclass(frozen=True)
class Buckets:
    """A table as buckets of equal size. Bucket b has rows [b * rows, (b + 1) * rows); no id has the first of them.

    Attributes:
        num_buckets: of the whole table.
        rows: of a bucket.
        reserve: rows of a bucket that evictions keep free.
    """

    num_buckets: int
    rows: int
    reserve: int

    @property
    def least_free(self) -> int:
        """Ids are evicted when fewer rows of a bucket are free: half of the reserve, so that few batches evict."""
        return max(1, self.reserve // 2)
