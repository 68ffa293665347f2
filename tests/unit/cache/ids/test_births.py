"""Rows that begin anew: after any batches, births and failures each id has the row that a dictionary of ids has."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embershard.cache import KnownBatch, RowCache, Ticket
from embershard.cache.config import Policy
from embershard.cache.homes.home import FrozenRows
from embershard.cache.homes.memory import MemoryRows
from embershard.cache.parts.changed import ChangedKeys
from embershard.cache.policies import LfuScores
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.cache.rows.lazy_rows import LazyRows
from embershard.cache.rows.moves import RowMoves
from embershard.cache.rows.transfer import StagedTransfer
from embershard.errors import CacheError
from tests.covering import covering, examples, keep
from tests.unit.cache.harness import DIM, Pool, made_rows, random_operations, run, windowed_operations
from tests.unit.cache.rows.test_initial_weights import weights_of_id
from tests.unit.cache.test_row_cache import operations, window_operations

POLICIES = get_args(Policy)
Births = tuple[Tensor, Tensor]  # rows, and ids that get them


def prepare_with(cache: RowCache, births: Births, *args: Any, **kwargs: Any) -> Ticket | None:
    """Prepare a batch that gives rows to ids."""
    prepare = type(cache).prepare
    cache.reinitialise(*births)
    return prepare(cache, *args, **kwargs)


# -- rows by number: every invariant of the cache ---------------------------------------------------------


class BirthPool(Pool):
    """A `Pool` of which about a third of a batch's rows begin anew, unless a batch in flight uses them."""

    num_births = num_emptied = 0

    def prepare(self, keys: Sequence[int], *args: Any, **kwargs: Any) -> int | None:
        used = self.pinned_rows.union(*(ids.tolist() for _, ids in self.tickets.values()))
        rows = sorted(k for k in set(keys) - used if (k + self.batch) % 3 == 0)
        self.births = torch.tensor(rows, dtype=torch.int64), torch.tensor(rows) * 1000 - self.batch
        prepare = functools.partial(prepare_with, self.cache, self.births)
        with mock.patch.object(self.cache, "prepare", prepare):
            return super().prepare(keys, *args, **kwargs)

    def _leave(self, oldest: int) -> set[int]:
        rows = self.births[0].tolist()
        emptied = set(rows) & self.resident()
        np.add.at(self.expected["evictions"], self.table_of(emptied), 1)
        for row, number in zip(rows, self.births[1].tolist(), strict=True):
            self.rows[0][row] = weights_of_id(table_of(int(self.table_of([row])[0])), number)
            self.rows[1][row], self.rows[2][row] = 0, 0
        if self.scoring == "lfu":
            self.counts[rows] = 0
        self.passing -= emptied
        self.trained -= set(rows)
        self.num_births, self.num_emptied = self.num_births + len(rows), self.num_emptied + len(emptied)
        return super()._leave(oldest) | emptied


@pytest.fixture(autouse=True, scope="module")
def loops_are_compiled() -> None:
    """Initial weights are compiled in the first batch that has any. Numba keeps errors that it handled, and so
    their frames and a ticket, until Python collects cycles: a batch that is abandoned then would stay pinned."""
    run(BirthPool(num_slots=12, policy="lru", lazy=True), random_operations(seed=0, steps=10))
    gc.collect()


def table_of(number: int) -> ShardWeights:
    """The initial weights of the harness."""
    return ShardWeights(f"t{number}", 5, DIM, 0.5, 1.0)


@pytest.mark.slow
@given(operations, st.sampled_from(POLICIES), st.integers(1, 12), st.sampled_from(["plain", StagedTransfer]))
@examples(40)
def test_every_row_is_right_after_any_operations(operations, policy, num_slots, transfer):
    run(BirthPool(num_slots=num_slots, policy=policy, overflow="grow", transfer=transfer, lazy=True), operations)


@pytest.mark.slow
@given(window_operations, st.integers(1, 14), st.sampled_from([None, 1]))
@examples(40)
def test_every_row_is_right_in_a_window(operations, num_slots, pinned_table):
    num_slots = num_slots + 1 if pinned_table else num_slots
    arguments = {"overflow": "grow", "pinned_table": pinned_table, "lazy": True}
    run(BirthPool(num_slots=num_slots, policy="lookahead", **arguments), operations)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_long_histories(policy):
    pool = BirthPool(num_slots=12 if policy != "lookahead" else 20, policy=policy, lazy=True)
    steps = windowed_operations(seed=3, steps=60) if policy == "lookahead" else random_operations(seed=0, steps=60)
    run(pool, steps)
    assert pool.num_emptied > 20, "rows began anew in a slot"
    assert pool.num_births > pool.num_emptied + 20, "and rows that were not cached"


@pytest.mark.slow
def test_uses_counted_for_the_old_id_are_noticed():
    """Negative control: the score of a row that begins anew is not reset."""
    with mock.patch.object(LfuScores, "restore"), pytest.raises(AssertionError):
        run(BirthPool(num_slots=12, policy="lfu", lazy=True), random_operations(seed=0, steps=60))


# -- ids: a dictionary of them, with quarantine, look-ahead and saves ---------------------------------------------


CAPACITY, NUM_TABLES, PER_TABLE = 24, 2, 5
_Row = tuple[Tensor, Tensor, Tensor]  # weights and states


@dataclass
class IdMap:
    """Which id has which row of a table: the longest unused leaves, and its row is given away Q batches later. Row 0 is
    for ids without a row of their own."""

    first_row: int
    quarantine: int
    reserve: int
    row_of: dict[int, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    free: deque[int] = field(default_factory=lambda: deque(range(1, CAPACITY)))
    waiting: deque[tuple[int, int]] = field(default_factory=deque)

    def resolve(self, batch: int, ids: list[int]) -> tuple[list[int], dict[int, int], list[int]]:
        """Rows of the ids, born ids with their rows, and ids that leave."""
        while self.waiting and self.waiting[0][1] <= batch:
            self.free.append(self.waiting.popleft()[0])
        births = {}
        for x in sorted(set(ids) - set(self.row_of)):
            if self.free:
                births[x] = self.row_of[x] = self.first_row + self.free.popleft()
        self.last.update(dict.fromkeys(set(ids) & set(self.row_of), batch))
        idle = sorted((self.last[x], x) for x in self.row_of if self.last[x] < batch)
        leaving = [x for _, x in idle[: max(0, len(self.row_of) - (CAPACITY - 1 - self.reserve))]]
        for x in leaving:
            self.waiting.append((self.row_of.pop(x) - self.first_row, batch + self.quarantine))
            del self.last[x]
        return [self.row_of.get(x, self.first_row) for x in ids], births, leaving


@dataclass
class Batch:
    """A known batch: keys of the pool, (table, id) of each with None for ids without a row, and what `resolve` said."""

    keys: list[int]
    ids: list[tuple[int, int | None]]
    born: dict[tuple[int, int], int]
    leaving: list[tuple[int, int]]
    maps: list[IdMap]  # after it
    known: KnownBatch | None = None
    ticket: Ticket | None = None

    @property
    def births(self) -> Births:
        return torch.tensor(list(self.born.values()), dtype=torch.int64), torch.tensor([x for _, x in self.born])


class Run:
    """A cache trained on ids, beside a dictionary of them. At most `prefetch` batches are prepared ahead of the one
    that trains, and two more are known. `values` are those of the last trained batch."""

    def __init__(
        self, policy: Policy, prefetch: int, quarantine: int | None = None, reserve: int = 6, num_slots: int = 32
    ) -> None:
        self.pool = Pool((CAPACITY,) * NUM_TABLES, num_slots=num_slots, policy=policy, overflow="grow", lazy=True)
        self.cache, self.host, self.prefetch = self.pool.cache, self.pool.host, prefetch
        self.rng = np.random.default_rng(0)
        quarantine = prefetch if quarantine is None else quarantine
        self.committed = [IdMap(t * CAPACITY, quarantine, reserve) for t in range(NUM_TABLES)]
        others = [torch.empty(1, DIM) for _ in range(NUM_TABLES)]
        for number, weights in enumerate(others):
            table_of(number).write(weights)
        self.values: dict[tuple[int, int | None], _Row] = {
            (t, None): (weights[0], torch.zeros(()), torch.zeros(DIM)) for t, weights in enumerate(others)
        }
        self.step, self.ahead = 0, deque[Batch]()
        self.saving: tuple[FrozenRows, dict[int, _Row]] | None = None
        self.num_left = self.num_saved = self.num_born_in_a_slot = 0

    def know(self) -> None:
        """Make the next batch known."""
        maps = copy.deepcopy(self.ahead[-1].maps if self.ahead else self.committed)
        number, batch = self.step + len(self.ahead), Batch([], [], {}, [], maps)
        for t, each in enumerate(maps):
            ids = (7919 * (number // 2 + self.rng.geometric(0.15, PER_TABLE)) * (1 - 2 * t)).tolist()
            rows, born, leaving = each.resolve(number, ids)
            batch.keys += rows
            batch.ids += [(t, x if x in each.row_of else None) for x in ids]
            batch.born.update({(t, x): row for x, row in born.items()})
            batch.leaving += [(t, x) for x in leaving]
        batch.known = self.cache.know(*self.pool.split_by_feature(batch.keys))
        self.ahead.append(batch)

    def prepare(self, batch: Batch, is_next: bool) -> None:
        births = batch.births
        if batch.ticket is None:
            self.num_born_in_a_slot += int((self.pool.map.lookup(births[0]) > 0).sum())
            arguments = (*self.pool.split_by_feature(batch.keys), is_next, batch.known, not is_next)
            batch.ticket = prepare_with(self.cache, births, *arguments)

    def train(self) -> None:
        """Prepare what may be prepared, and train the next batch."""
        while len(self.ahead) < self.prefetch + 3:
            self.know()
        for number in range(self.prefetch + 1):
            self.prepare(self.ahead[number], number == 0)
            if self.ahead[number].ticket is None:
                break
        batch = self.ahead.popleft()
        self.cache.wait(batch.ticket)
        self.cache.begin_update(batch.ticket)
        slots, step = batch.ticket.slots.unique(), float(self.step)
        for held, new in zip(self.pool.slots, updated([s[slots] for s in self.pool.slots], step), strict=True):
            held[slots] = new
        self.cache.release(batch.ticket)
        for t, x in batch.born:
            self.values[t, x] = weights_of_id(table_of(t), x), torch.zeros(()), torch.zeros(DIM)
        for one in set(batch.ids):
            self.values[one] = updated([v[None] for v in self.values[one]], step, squeeze=True)
        for one in batch.leaving:
            del self.values[one]
        self.num_left += len(batch.leaving)
        self.committed, self.step = batch.maps, self.step + 1

    def forget(self) -> None:
        """All known batches are taken back; others will come."""
        self.cache.cancel(forwarded=False)
        self.cache.forget()
        self.ahead.clear()

    def rows(self) -> dict[int, _Row]:
        """The rows of all ids that live, and those for the others."""
        maps = self.committed
        return {maps[t].first_row if x is None else maps[t].row_of[x]: v for (t, x), v in self.values.items()}

    def check(self) -> None:
        rows = self.rows()
        read = self.cache.read(torch.tensor(list(rows)))
        assert torch.equal(read, torch.stack([weights for weights, *_ in rows.values()])), "an id has other weights"

    def save(self) -> None:
        """Begin a save in the background."""
        self.cache.write_back()
        self.saving = self.host.freeze(), {row: tuple(v.clone() for v in value) for row, value in self.rows().items()}

    def end_save(self) -> None:
        assert self.saving is not None
        frozen, rows = self.saving
        for number, tensor in enumerate(self.host.parts):
            saved, expected = frozen.read(tensor)[list(rows)], torch.stack([value[number] for value in rows.values()])
            assert torch.equal(saved, expected), "a save has rows of another step"
        frozen.close()
        self.saving, self.num_saved = None, self.num_saved + 1

    def steps(self, count: int) -> None:
        """Train, with saves that take a while, and batches that are taken back; then compare weights and states."""
        for _ in range(count):
            self.train()
            self.check()
            if self.step % 7 == 3:
                self.save()
            elif self.saving and self.step % 7 == 1:
                self.end_save()
            if self.step % 17 == 16:
                self.forget()
        self.cache.flush()
        rows = self.rows()
        for number, tensor in enumerate(self.host.parts):
            assert torch.equal(tensor[list(rows)], torch.stack([value[number] for value in rows.values()]))


def updated(payload: Sequence[Tensor], step: float, squeeze: bool = False) -> _Row:
    weights, momentum, square = payload
    momentum = momentum * 0.5 + weights.sum(1) + step
    square = square + weights * weights
    weights = weights - 0.1 * momentum[:, None] / (square + 1)
    return (weights[0], momentum[0], square[0]) if squeeze else (weights, momentum, square)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "prefetch"), covering(POLICIES, (0, 1, 2, 3)))
def test_every_id_has_the_row_of_the_dictionary(policy, prefetch):
    run = Run(policy, prefetch)
    run.steps(80)
    assert run.num_left > 100
    assert run.num_saved > 8
    if policy != "lru":  # there, rows that nobody uses leave the cache before they are given away
        assert run.num_born_in_a_slot > 15, "rows began anew while their slots had the old id's"
    assert sum(s.evictions for s in run.cache.stats()) > run.num_born_in_a_slot + 50, "of other rows"


# -- negative controls ---------------------------------------------------------


def _weights_alone(host: MemoryRows, keys: Tensor, ids: Tensor) -> None:
    """`MemoryRows.reinitialise` without states."""
    host.make(keys)
    host.before_write(keys)
    host._lazy.reinitialise(keys, ids)


def _by_row(lazy: LazyRows, keys: Tensor, ids: Tensor) -> None:
    """`LazyRows.reinitialise` by row."""
    for key in keys.tolist():
        lazy._pool.write(torch.from_numpy(lazy._out).view(-1, DIM)[key : key + 1], key)


def _no_slot(moves: RowMoves, keys: Tensor, ids: Tensor) -> None:
    """`RowMoves.reinitialise`, while what the slots hold is found by the next plan."""
    moves._host.reinitialise(keys, ids)


FAULTS: dict[str, Any] = {
    "states_kept": (MemoryRows, "reinitialise", _weights_alone),
    "weights_by_row": (LazyRows, "reinitialise", _by_row),
    "a_save_loses_its_rows": (FrozenRows, "put_aside", lambda *_: None),
    "slots_of_the_dead_are_found": (RowMoves, "reinitialise", _no_slot),
    "nothing_begins_anew": (RowCache, "reinitialise", lambda *_: None),
}


@pytest.mark.parametrize("fault", keep(["states_kept"], FAULTS))
def test_a_fault_is_noticed(fault):
    run = Run("lfu", prefetch=2)
    with mock.patch.object(*FAULTS[fault]), pytest.raises(AssertionError):
        run.steps(80)


def test_rows_that_are_not_put_aside_for_births_alone_are_noticed():
    """Negative control: rows that are written back are, but those that begin anew are not."""
    before_write, reinitialise = MemoryRows.before_write, MemoryRows.reinitialise

    def careless(host: MemoryRows, keys: Tensor, ids: Tensor) -> None:
        with mock.patch.object(MemoryRows, "before_write"):
            reinitialise(host, keys, ids)
        assert MemoryRows.before_write is before_write

    with mock.patch.object(MemoryRows, "reinitialise", careless), pytest.raises(AssertionError, match="another step"):
        Run("lfu", prefetch=2).steps(80)


def test_a_block_that_is_made_after_a_row_began_anew_is_noticed():
    """Negative control: its by-row weights would replace those of the id."""
    reinitialise = MemoryRows.reinitialise

    def careless(host: MemoryRows, keys: Tensor, ids: Tensor) -> None:
        with mock.patch.object(MemoryRows, "make"):
            reinitialise(host, keys, ids)

    with mock.patch.object(MemoryRows, "reinitialise", careless), pytest.raises(AssertionError):
        Run("lfu", prefetch=2).steps(80)


@pytest.mark.slow
def test_a_quarantine_shorter_than_the_batches_prepared_ahead_is_noticed():
    """With few free rows, which are given away at once, and room for all batches."""
    Run("lfu", prefetch=3, quarantine=3, reserve=2, num_slots=48).steps(40)
    with pytest.raises(AssertionError, match="an id has other weights"):
        Run("lfu", prefetch=3, quarantine=1, reserve=2, num_slots=48).steps(40)


# -- failures ---------------------------------------------------------


class FailingRun(Run):
    """Preparing fails now and then, and is repeated: in whichever call, what it did is done again."""

    num_failed = 0

    def prepare(self, batch: Batch, is_next: bool) -> None:
        place = (self.step * 5 + is_next) % len(PLACES)
        if batch.ticket is None and batch.born:
            with interrupted(*PLACES[place](self), is_late=self.step % 2 == 0) as failed:
                super().prepare(batch, is_next)
            self.num_failed += failed.is_set
        super().prepare(batch, is_next)


PLACES: list[Any] = [
    lambda run: (run.host, "reinitialise"),
    lambda run: (run.host, "before_write"),
    lambda run: (run.host._lazy, "reinitialise"),
    lambda run: (run.cache._planner, "removal"),
    lambda run: (run.cache._planner, "plan"),
    lambda run: (run.cache._scores, "restore"),
    lambda run: (run.cache._copies.transfer, "fill"),
    lambda run: (run.cache._copies, "finish"),
]


class _Flag:
    is_set = False


@contextlib.contextmanager
def interrupted(owner: Any, name: str, is_late: bool = True) -> Iterator[_Flag]:
    """Let calls raise an interrupt, after their work or without it."""
    call, flag = getattr(owner, name), _Flag()

    def interrupt(*arguments: Any) -> None:
        if is_late:
            call(*arguments)
        flag.is_set = True
        raise KeyboardInterrupt

    with mock.patch.object(owner, name, interrupt), contextlib.suppress(KeyboardInterrupt):
        yield flag


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lfu", "lookahead"])
def test_preparing_may_fail_anywhere_and_is_repeated(policy):
    run = FailingRun(policy, prefetch=2)
    run.steps(80)
    assert run.num_failed > 60


@pytest.mark.parametrize("step", ["unbind", "free"])
def test_emptying_slots_that_is_interrupted_ends_the_pool(step):
    pool = Pool(num_slots=6, policy="lru", lazy=True)
    pool.step([1, 2, 3])
    births = torch.tensor([2]), torch.tensor([77])
    with interrupted(pool.map, step):
        pool.cache.reinitialise(*births)
    for use in (pool.cache.flush, lambda: pool.step([1]), lambda: pool.cache.reinitialise(*births)):
        with pytest.raises(CacheError, match=r"emptying the slots of reinitialised rows did not end .Keyboard"):
            use()


def test_a_row_that_a_batch_in_flight_uses_does_not_begin_anew():
    """And nothing has changed; once the batch has trained, or is cancelled, it may."""
    pool = Pool(num_slots=6, policy="lru", lazy=True)
    number = pool.prepare([1, 2, 3])
    births = torch.tensor([5, 2]), torch.tensor([76, 77])
    before = pool.observed()
    with pytest.raises(CacheError, match=r"tables t0, t1, t2: row 2 is to be reinitialised while batch 1, which uses"):
        pool.cache.reinitialise(*births)
    assert pool.observed() == before
    pool.check()
    pool.prepare([7])
    pool.cancel(number)
    pool.cache.reinitialise(*births)  # the slot has the stamp of the batch that was cancelled
    assert torch.equal(pool.cache.read(births[0]), torch.stack([weights_of_id(table_of(0), x) for x in (76, 77)]))


def test_nothing_but_their_rows_changes():
    pool = Pool(num_slots=6, policy="lru", lazy=True)
    pool.cache.parts.add(changed := ChangedKeys(pool.host, torch.device("cpu")))
    pool.step([1, 2, 3])
    keys, lengths = pool.split_by_feature([2, 5])
    ticket = prepare_with(pool.cache, (torch.tensor([2, 5]), torch.tensor([7, 8])), keys, lengths)
    assert changed.take().tolist() == [2, 5]
    pool.cache.begin_update(ticket)
    pool.cache.release(ticket)
    assert changed.take().tolist() == [2, 5]
    assert made_rows(pool.host).nonzero().flatten().tolist() == list(range(6)), "blocks of 2 rows"
    assert torch.equal(pool.cache.read(torch.tensor([1, 3])), pool.rows[0][[1, 3]])


def test_births_where_rows_cannot_begin_anew_are_refused():
    pool = Pool(num_slots=6)
    with pytest.raises(CacheError, match=r"reinitialised from a counter.*give init_seed"):
        pool.cache.reinitialise(torch.tensor([2]), torch.tensor([7]))
    pool.check()
