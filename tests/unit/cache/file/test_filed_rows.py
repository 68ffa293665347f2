"""`FiledRows` beside plain tensors of all rows: after any schedule every row is right, wherever it is, and no place has
two owners."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embershard.cache.file import places as places_module
from embershard.cache.file.file_rows import PageIo
from embershard.cache.file.filed_rows import FiledRows
from embershard.cache.homes.shape import PoolShape
from embershard.cache.next_use import KnownBatch
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.errors import CacheOverflowError, ConfigError
from tests.covering import examples
from tests.disks import HeldIo, SlowIo

DIM, ROWS = 64, (50, 1, 39)  # 7 rows to a page
TABLES = [ShardWeights(name, 7, 128, -0.5, 0.5, first, 64) for first, name in enumerate(["clicks", "users", "shops"])]
NUM_ROWS, ON_DEVICE, BATCH = sum(ROWS), 12, 6


class Tier:
    """Rows of three tables, of which some are on a device that this class is; and what they should be.

    `truth` [R, ...] has the rows as host memory and the file should have them, `device` those that are pinned.
    """

    def __init__(self, folder: Path | str, num_places: int, io: PageIo | None = None, seed: int = 0) -> None:
        like = [torch.empty(0, DIM), torch.empty(0), torch.empty(0, DIM)]
        states = [("momentum", torch.Size([]), torch.float32), ("square", torch.Size([DIM]), torch.float32)]
        self.rows = FiledRows(PoolShape(ROWS, DIM, torch.float32, states, TABLES), num_places, str(folder), io=io)
        self.truth = [torch.zeros(NUM_ROWS, *part.shape[1:]) for part in like]
        for table, part in zip(TABLES, self.truth[0].split(ROWS), strict=True):
            table.write(part)
        self.device: dict[int, list[Tensor]] = {}
        self.known: deque[tuple[KnownBatch, Tensor]] = deque()
        self._random = torch.Generator().manual_seed(seed)

    # -- what a cache does

    def know(self) -> None:
        keys = torch.randint(NUM_ROWS, (int(self._number(1, BATCH)),), generator=self._random)
        self.known.append((self.rows.know(keys, torch.tensor([keys.numel()])), keys))

    def file(self) -> None:
        for known, keys in self.known:
            if not self.rows.file(keys, known):
                break
        if self.known:
            assert isinstance(self.rows.file(self.known[0][1], self.known[0][0]), bool)

    def bring_in(self) -> None:
        """Train the oldest known batch: fetch what the device lacks, change it, and evict others."""
        if self.known:
            known, keys = self.known.popleft()
            self._bring_in(keys.unique().tolist(), known)

    def bring_in_unknown(self) -> None:
        self._bring_in(torch.randint(NUM_ROWS, (BATCH,), generator=self._random).unique().tolist(), None)

    def _bring_in(self, wanted: list[int], known: KnownBatch | None) -> None:
        missing = [key for key in wanted if key not in self.device]
        self.rows.bring_in(torch.tensor(missing, dtype=torch.int64), known)
        self._fetch(missing)
        self.check()  # both what came and what goes have places
        excess = max(0, len(self.device) - ON_DEVICE)
        self._evict([key for key in self.device if key not in wanted][:excess])
        for key in wanted:
            for part in self.device[key]:
                part.normal_(generator=self._random)

    def unpin(self) -> None:
        self._evict([key for key in self.device if self._number(0, 1)])

    def flush(self) -> None:
        self._write_back(list(self.device))

    def skip(self) -> None:
        if self.known:
            self.rows.skip(*self.known.popleft())

    def forget(self) -> None:
        self.rows.forget()
        self.known.clear()

    def read(self) -> None:
        keys = torch.randint(NUM_ROWS, (20,), generator=self._random)
        assert_equal(self.rows.select(keys), [part[keys] for part in self.truth])
        assert_equal([self.rows.read(keys)], [self.truth[0][keys]])

    def read_block(self) -> None:
        first, stop = self._block()
        found = [torch.full_like(part[: stop - first + 1], 7) for part in self.truth]
        self.rows.read_block(first, stop, found)
        assert_equal([part[:-1] for part in found], [part[first:stop] for part in self.truth])
        assert all(bool((part[-1] == 7).all()) for part in found)

    def put_block(self) -> None:
        first, stop = self._block()
        values = [torch.randn(part[first:stop].shape, generator=self._random) for part in self.truth]
        self.rows.put_block(first, values)
        for part, new in zip(self.truth, values, strict=True):
            part[first:stop] = new
        self._fetch([key for key in self.device if first <= key < stop])

    def copy_pinned(self) -> None:
        keys = list(self.device)
        found = [part.new_zeros(len(keys) + 1, *part.shape[1:]) for part in self.truth]
        to = torch.randperm(len(keys), generator=self._random)
        self.rows.copier(found)(torch.tensor(keys, dtype=torch.int64), to)
        assert_equal([part[to] for part in found], [part[keys] for part in self.truth])

    # -- the device

    def _fetch(self, keys: list[int]) -> None:
        places = self.rows.places_of(torch.tensor(keys, dtype=torch.int64))
        for key, place in zip(keys, places, strict=True):
            self.device[key] = [part[place].clone() for part in self.rows.parts]
            assert_equal(self.device[key], [part[key] for part in self.truth])

    def _write_back(self, keys: list[int]) -> None:
        for key, place in zip(keys, self.rows.places_of(torch.tensor(keys, dtype=torch.int64)), strict=True):
            for own, truth, part in zip(self.rows.parts, self.truth, self.device[key], strict=True):
                own.data[place] = part
                truth[key] = part

    def _evict(self, keys: list[int]) -> None:
        self._write_back(keys)
        self.rows.unpin(torch.tensor(keys, dtype=torch.int64))
        for key in keys:
            del self.device[key]

    # -- what must hold

    def check(self) -> None:
        slot_map = self.rows.places._map
        places = slot_map.lookup(torch.arange(NUM_ROWS))
        here = places.nonzero().flatten()
        assert here.numel() == places[here].unique().numel() == slot_map.num_slots - slot_map.num_free
        assert torch.equal(slot_map.keys(places[here]), here)
        assert torch.equal(slot_map.used_slots(), places[here].sort().values)
        is_pinned = slot_map.use_stamp == places_module._PINNED
        pinned = slot_map.keys(is_pinned.nonzero().flatten())
        assert sorted(pinned.tolist()) == sorted(self.device), "what is pinned is bound, and nothing else is"
        free = slot_map.next_free(slot_map.num_free)
        assert not is_pinned[free].any()
        assert not torch.isin(free, places[here]).any()

    def check_contents(self) -> None:
        everything = torch.arange(NUM_ROWS)
        assert_equal(self.rows.select(everything), self.truth)

    def _number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self._random))

    def _block(self) -> tuple[int, int]:
        first, stop = sorted((self._number(0, NUM_ROWS), self._number(0, NUM_ROWS)))
        return first, stop


def assert_equal(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def run(tier: Tier, operations: Iterable[str]) -> None:
    for name in operations:
        getattr(tier, name)()
        tier.check()
    tier.check_contents()
    tier._evict(list(tier.device))
    tier.check()
    tier.check_contents()
    tier.rows._file.close()


#: Of a training, whose batches are filed and brought in one after the other; and what comes between.
_TRAINING = ["know", "know", "file", "file", "bring_in", "bring_in"]
_BETWEEN = ["bring_in_unknown", "unpin", "flush", "read", "read_block", "put_block", "copy_pinned"]
_TAKEN_BACK = ["skip", "forget"]


def schedules(*names: str) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(names), max_size=60)


@pytest.mark.slow
@given(schedules(*_TRAINING, *_BETWEEN), st.sampled_from([24, 40, NUM_ROWS, 200]), st.integers(0, 99), st.booleans())
@examples(150)
def test_every_row_is_right_after_any_schedule(
    operations: list[str], num_places: int, seed: int, is_slow: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(Tier(folder, num_places, SlowIo(seed, 0.002) if is_slow else None, seed), operations)


@pytest.mark.slow
@given(schedules(*_TRAINING, *_TRAINING, *_BETWEEN, *_TAKEN_BACK), st.sampled_from([24, 40]), st.integers(0, 99))
@examples(150)
def test_batches_that_are_taken_back_leave_every_row_right(operations: list[str], num_places: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(Tier(folder, num_places, SlowIo(seed, 0.004), seed), operations)


# -- reads of batches that are taken back

#: Pages have 7 rows; of a file that `with_a_file` made, the first 40 rows are in it.
SHARED, OTHER = 3, 25


def with_a_file(folder: Path, io: PageIo | None = None) -> Tier:
    """Rows 0 to 39 were on the device, and left memory, which has 24 places; now rows 66 to 89 are there."""
    tier = Tier(folder, 24, io)
    for first in (*range(0, 40, 5), *range(66, 90, 6)):
        tier._bring_in(list(range(first, min(first + 6, NUM_ROWS))), None)
        tier._evict(list(tier.device))
    tier.rows._file.finish()  # rows on their way would be found without a read
    assert not tier.rows.places._map.lookup(torch.arange(40)).any()
    assert tier.rows._file.is_written(torch.arange(40)).all()
    return tier


def announce(tier: Tier, *keys: int) -> None:
    wanted = torch.tensor(keys)
    tier.known.append((tier.rows.know(wanted, torch.tensor([wanted.numel()])), wanted))
    assert tier.rows.file(wanted, tier.known[-1][0])


def announce_held(tier: Tier, io: HeldIo, key: int) -> None:
    """Announce a batch whose row is on its way until somebody waits for it."""
    io.hold(key // 7)
    announce(tier, key)
    work = tier.rows._works[tier.known[-1][0]]
    wait = work.wait

    def let_go() -> float:
        io.hold()
        return wait()

    work.wait = let_go  # type: ignore[method-assign]


def pin_a_row_of_a_batch_that_was_skipped(tier: Tier, io: HeldIo) -> None:
    """Another batch wants a row that is on its way for the one that is skipped."""
    announce_held(tier, io, SHARED)
    announce(tier, SHARED, OTHER)
    tier.skip()
    tier.bring_in()


def put_out_a_row_of_batches_that_were_forgotten(tier: Tier, io: HeldIo) -> None:
    """Its place is given to another row while it is on its way."""
    announce_held(tier, io, SHARED)
    tier.forget()
    for first in (40, 45, 50, 55, 60):
        announce(tier, *range(first, first + 5))
        tier.bring_in()
        tier._evict(list(tier.device))


def file_after_a_batch_was_lost(tier: Tier, io: HeldIo) -> None:
    """The one before was filed, and is never brought in: an exception came between."""
    announce_held(tier, io, SHARED)
    announce(tier, SHARED, OTHER)
    tier.known.popleft()
    tier.bring_in()


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule",
    [
        pin_a_row_of_a_batch_that_was_skipped,
        put_out_a_row_of_batches_that_were_forgotten,
        file_after_a_batch_was_lost,
    ],
)
def test_rows_on_their_way_for_a_batch_that_is_taken_back_arrive(
    tmp_path: Path, schedule: Callable[[Tier, HeldIo], None]
) -> None:
    io = HeldIo()
    tier = with_a_file(tmp_path, io)
    schedule(tier, io)
    tier.check()
    run(tier, ["read_block"])


# -- limits


@pytest.mark.slow
def test_a_batch_that_does_not_fit_yet_is_filed_later(tmp_path: Path) -> None:
    """It waits for those before it; nothing of it is read, and no place changes hands."""
    tier = with_a_file(tmp_path)
    announce(tier, *range(12))
    announce(tier, *range(12, 22))
    keys = torch.arange(22, 32)
    known = tier.rows.know(keys, torch.tensor([10]))
    tier.known.append((known, keys))
    read = tier.rows.counts.rows_read
    assert not tier.rows.file(keys, known)
    tier.check()
    assert tier.rows.counts.rows_read == read
    tier.bring_in()
    assert not tier.rows.file(keys, known), "the first one's rows are on the device"
    tier.unpin()
    tier._evict(list(tier.device))
    assert tier.rows.file(keys, known)
    assert tier.rows.counts.rows_read == read + 10
    run(tier, ["bring_in", "bring_in"])


def test_a_batch_that_was_not_filed_takes_places_of_those_that_were(tmp_path: Path) -> None:
    """And these get theirs anew."""
    tier = with_a_file(tmp_path)
    announce(tier, *range(10))
    announce(tier, *range(10, 20))
    tier._bring_in(list(range(30, 40)), None)
    run(tier, ["bring_in", "unpin", "bring_in"])


def test_more_rows_than_places_are_told(tmp_path: Path) -> None:
    tier = with_a_file(tmp_path)
    tier._bring_in(list(range(20)), None)
    with pytest.raises(
        CacheOverflowError, match=r"a batch needs 6 rows in host memory, which has 24 places, .* set a la"
    ):
        tier.rows.bring_in(torch.arange(30, 36), None)
    tier.check()
    tier.check_contents()


def test_late_reads_are_counted(tmp_path: Path) -> None:
    io = HeldIo()
    tier = with_a_file(tmp_path, io)
    announce(tier, SHARED)
    tier.rows._works[tier.known[0][0]].wait()
    tier.bring_in()
    assert tier.rows.counts.late_batches == 0
    announce_held(tier, io, OTHER)
    run(tier, ["bring_in"])
    assert tier.rows.counts.late_batches == 1
    assert tier.rows.counts.wait_seconds > 0


def test_columns_that_no_counter_draws_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r'cache.host: got "file" for tables with 6 columns .* needed a multiple of 4'
    ):
        FiledRows(PoolShape([10], 6, initial=[ShardWeights("clicks", 7, 6, -0.5, 0.5)]), 5, str(tmp_path))
