"""A cache whose rows are in a file reads and writes what its replay says, to the page, however slow the disk is."""

from __future__ import annotations

import itertools
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.two_levels import replay_two_levels
from embershard.cache.config import CachePolicy
from embershard.cache.file.file_part import FilePart
from embershard.cache.file.file_rows import FileRows, PageIo
from embershard.cache.file.filed_rows import FiledRows
from embershard.cache.homes.shape import PoolShape
from embershard.cache.next_use import KnownBatch
from embershard.cache.parts.part import PoolParts
from embershard.cache.row_cache import RowCache
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.cache.tickets import Ticket
from embershard.planning.simulate.file_tier import FileTraffic, Levels
from embershard.sharding.run_shape import ReplaySettings
from tests.covering import covering
from tests.disks import SlowIo

NUM_ROWS, DIM, SLOTS, PLACES = 600, 64, 30, 90
LOOKAHEAD, READ_AHEAD, PREFETCH = 12, 4, 2
COUNTS = ("rows_read", "pages_read", "rows_written", "pages_written")

Batch = tuple[Tensor, Tensor, KnownBatch | None]


def skewed(num_batches: int, batch_size: int = 9) -> list[Tensor]:
    generator = np.random.default_rng(0)
    drawn = (generator.random((num_batches, batch_size)) ** 3 * NUM_ROWS).astype(np.int64)
    return list(torch.from_numpy(drawn))


def made(folder: Path, policy: CachePolicy, io: PageIo, places: int) -> tuple[FiledRows, FilePart, RowCache]:
    """Rows in a file, and the cache over them with its part."""
    table = ShardWeights("clicks", 7, DIM, -0.5, 0.5)
    filed = FiledRows(PoolShape([NUM_ROWS], DIM, initial=[table]), places, str(folder), io=io)
    cache = RowCache(
        host=filed,
        tables=["clicks"],
        device_payload=lambda slots: [torch.zeros(slots + 1, DIM)],
        num_slots=SLOTS,
        table_of_feature=[0],
        policy=policy,
        device=torch.device("cpu"),
    )
    part = FilePart(filed, cache.state.scores.of_rows, is_on_gpu=False)
    cache.parts = PoolParts([part])
    return filed, part, cache


def trained(batches: list[Tensor], folder: Path, policy: CachePolicy, io: PageIo, places: int) -> FiledRows:
    """Train the batches in the order of a run's stages; return the rows, whose file is closed."""
    filed, part, cache = made(folder, policy, io, places)
    unknown, window = iter(batches), deque[Batch]()
    tickets = deque[Ticket]()
    while True:
        for keys in itertools.islice(unknown, LOOKAHEAD + 1 - len(window)):
            lengths = torch.tensor([keys.numel()])
            window.append((keys, lengths, cache.know(keys, lengths)))
        if not window:
            break
        if not tickets:
            first = prepared(cache, window[0], True)
            assert first is not None
            tickets.append(first)
        cache.freeze_pins()
        for keys, _, known in itertools.islice(window, 1, READ_AHEAD + 1):
            if not part.coming(keys, known):
                break
        for batch in itertools.islice(window, len(tickets), PREFETCH + 1):
            ticket = prepared(cache, batch, False)
            if ticket is None:
                break
            tickets.append(ticket)
        cache.unfreeze_pins()
        cache.begin_update(tickets[0])
        cache.release(tickets.popleft())
        window.popleft()
    filed._file.finish()
    filed._file.close()
    return filed


def prepared(cache: RowCache, batch: Batch, critical_path: bool) -> Ticket | None:
    keys, lengths, known = batch
    return cache.prepare(keys, lengths, critical_path, known, if_it_fits=not critical_path)


def replayed(batches: list[Tensor], policy: CachePolicy, places: int, rows_per_page: int) -> FileTraffic:
    levels = Levels(SLOTS, places, rows_per_page, READ_AHEAD)
    pairs = [(keys, torch.tensor([keys.numel()])) for keys in batches]
    return replay_two_levels(pairs, [NUM_ROWS], levels, ReplaySettings(policy, LOOKAHEAD, PREFETCH))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "most_seconds", "places"), covering((CachePolicy(), CachePolicy("lfu")), (0.0, 0.01), (PLACES, 64))
)
def test_a_training_moves_what_its_replay_says(
    tmp_path: Path, policy: CachePolicy, most_seconds: float, places: int
) -> None:
    batches = skewed(150)
    rows = trained(batches, tmp_path, policy, SlowIo(most_seconds=most_seconds), places)
    traffic = replayed(batches, policy, places, rows._file.rows_per_page)
    found = {name: getattr(rows.counts, name) for name in COUNTS}
    assert found == {name: getattr(traffic, name) for name in COUNTS}
    assert rows._file.pages_patched == traffic.pages_patched
    assert traffic.rows_read > traffic.pages_read > 200
    assert traffic.pages_written > traffic.pages_patched > 50
    other = replayed(batches, policy, places + 1, rows._file.rows_per_page)  # the negative control
    assert found != {name: getattr(other, name) for name in COUNTS}


@pytest.mark.slow
def test_known_batches_that_end_early_leave_nothing_behind(tmp_path: Path) -> None:
    """They are skipped or forgotten: what the cache counts of them is what it has of them."""
    rows, part, cache = made(tmp_path, CachePolicy(), PageIo(), PLACES)
    batches = [(keys, torch.tensor([keys.numel()])) for keys in skewed(8)]
    links = part.known_bytes
    known = [cache.know(*batch) for batch in batches[:4]]
    of_all = part.known_bytes
    for (keys, _), of_slots in zip(batches[:2], known[:2], strict=True):
        assert of_slots is not None
        cache.skip(keys, of_slots)
        cache.skip(keys, of_slots)  # a second call does nothing
    assert links < part.known_bytes < of_all
    cache.forget()
    assert (part.known_bytes, part._of_places) == (links, {})
    again = cache.know(*batches[3])
    assert again is not None
    ticket = prepared(cache, (*batches[3], again), True)
    assert ticket is not None
    assert (part.known_bytes, part._of_places) == (links, {})
    rows._file.close()


def test_rows_on_their_way_to_the_file_are_counted_as_read(tmp_path: Path) -> None:
    """And a page is patched if rows of it went there before, written or still on their way."""
    rows, table = FileRows(str(tmp_path), 100, [torch.empty(0, DIM)], io=SlowIo(most_seconds=0.05)), torch.ones(9, DIM)
    every = torch.arange(3)
    rows.write(torch.tensor([1, 2, 40]), [table], every)
    rows.write(torch.tensor([3, 40, 80]), [table], every)
    rows.read(torch.tensor([1, 2, 80]), [table], every).wait()
    assert (rows.rows_written, rows.pages_written, rows.pages_patched) == (6, 5, 1)
    assert (rows.rows_read, rows.pages_read) == (3, 2)
    rows.close()
