"""One cache beside plain tensors, an exception at one line of one operation, and what became of the rows."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from embershard.cache import KnownBatch, Ticket
from embershard.cache.guards import ChangeGuard
from embershard.cache.planner import CachePlan
from embershard.cache.rows.moves import RowMoves
from embershard.cache.rows.transfer import StagedTransfer
from embershard.errors import CacheError, CacheOverflowError
from tests.faults.injection import ERRORS, GROUPS, HangError, Injector, is_refusal, no_collections, no_hang
from tests.unit.cache import harness

T = TypeVar("T")
Operation = tuple[Any, ...]

_SECONDS = 30.0  # a busy machine is not a fault
_CACHE = GROUPS["cache"]


@dataclass(frozen=True)
class Setting:
    """One cache and what is done with it."""

    name: str
    operations: tuple[Operation, ...]
    policy: str = "lookahead"
    staged: bool = False
    overflow: str = "raise"
    pinned_table: int | None = None
    warmup: bool = False
    num_slots: int = 10
    lazy: bool = False

    def pool(self) -> harness.Pool:
        """A new pool; only its cache and its plain tensors are used."""
        return harness.Pool(
            num_slots=self.num_slots,
            policy=self.policy,  # type: ignore[arg-type]
            overflow=self.overflow,
            decay=0.5 if self.policy == "lfu" else None,
            profile=[key % 5 for key in range(30)] if self.warmup else None,
            warmup=self.warmup,
            pinned_table=self.pinned_table,
            transfer=functools.partial(StagedTransfer, buffer_bytes=100) if self.staged else "plain",
            lazy=self.lazy,
        )


def stream(steps: int, seed: int, extras: dict[int, list[Operation]], lookahead: int = 2, size: int = 4) -> Any:
    """Batches that are known ahead, prepared while others are in flight, and trained; `extras` come after a step."""
    rng = np.random.default_rng(seed)
    operations: list[Operation] = []
    for step in range(steps):
        keys = tuple(int(key) for key in ((rng.random(size) ** 1.5 * 30).astype(int) * 7 + step) % 30)
        operations.append(("know", keys))
        if step >= lookahead:
            operations.append(("prepare_known", step % 3 == 0))
        if step > lookahead:
            operations.append(("train",))
        operations += extras.get(step, [])
    return (*operations, ("train",), ("prepare_known", False), ("train",), ("stats",))


_MIXED: dict[int, list[Operation]] = {
    3: [("flush",), ("read", (1, 5, 17, 29))],
    4: [("prepare", (2, 2, 9, 17)), ("cancel",)],
    5: [("load", (3, 4, 17, 20), 0.5)],
    6: [("host_changed", (0, 7, 14, 21), 0.25), ("hold",), ("prepare_known", True), ("let_go",)],
    7: [("skip",), ("read", (0, 7))],
    8: [("fail", "fill"), ("stats",)],
    9: [("fail", "write_back"), ("forget",), ("flush",), ("prepare", (1, 2, 3, 11)), ("abandon",)],
}
_GROWS: dict[int, list[Operation]] = {
    **_MIXED,
    6: [("train",), ("train",), ("prepare", tuple(range(13))), ("train",)],
    9: [("train",), ("train",), ("prepare", tuple(range(4, 23))), ("train",), ("flush",)],
}
_STAGED = {step: [each for each in extra if each[0] != "fail"] for step, extra in _MIXED.items()}
_CHANGED_UNDER_TRAINED: dict[int, list[Operation]] = {
    3: [("changed_under_trained", (3, 4, 17, 20), 0.5)],
    6: [("flush",)],
    8: [("changed_under_trained", (0, 1, 2, 5, 8, 11), 0.25)],
}
_LAZY: dict[int, list[Operation]] = {
    3: [("read", (1, 5, 17, 29))],
    4: [("prepare", (2, 2, 9, 17)), ("cancel",)],
    6: [("hold",), ("prepare_known", True), ("let_go",)],
    7: [("fail", "fill"), ("read", (0, 7))],
    8: [("flush",), ("load", (3, 4, 17, 20), 0.5)],
    9: [("host_changed", (0, 7, 14, 21), 0.25)],
}

SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("look-ahead", stream(10, 0, _MIXED)),
        Setting("look-ahead, staged", stream(10, 1, _STAGED), staged=True),
        Setting("look-ahead, grows, pinned table", stream(10, 2, _GROWS), overflow="grow", pinned_table=1),
        Setting("look-ahead, grows, staged", stream(10, 3, _GROWS | _STAGED | {6: _GROWS[6]}), "lookahead", staged=True,
                overflow="grow", warmup=True),
        Setting("lfu, warm-up", stream(10, 4, _MIXED), "lfu", warmup=True, pinned_table=1),
        Setting("lfu, staged, grows", stream(10, 5, _STAGED | {6: _GROWS[6]}), "lfu", staged=True, overflow="grow"),
        Setting("lru", stream(10, 6, _MIXED), "lru"),
        Setting("lru, staged", stream(10, 7, _STAGED), "lru", staged=True),
        Setting("look-ahead, written under trained rows", stream(10, 8, _CHANGED_UNDER_TRAINED)),
        Setting("look-ahead, lazy rows", stream(10, 9, _LAZY), warmup=True, num_slots=14, lazy=True),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """A line of an operation: the `line`-th of the `call`-th call of the cache."""

    setting: str
    call: int
    line: int
    operation: str
    place: str
    error: type[BaseException]


class Player:
    """Does a setting's operations. The truth are the pool's plain tensors.

    Args:
        point: where to raise; the call that fails is repeated, as by a user who tries again. None: count lines.
    """

    def __init__(self, setting: Setting, point: Point | None = None) -> None:
        self.pool = setting.pool()
        self.cache = self.pool.cache
        self.operations = setting.operations
        self.calls: list[list[tuple[str, str]]] = []
        self.num_calls = 0
        self.point = point
        self.injector = Injector(files=_CACHE)
        if point is not None:
            self.injector = Injector(point.line, point.error, _CACHE)
        self.known: deque[tuple[KnownBatch | None, tuple[int, ...]]] = deque()
        self.flying: deque[tuple[Ticket, Tensor]] = deque()
        self.evicted = 0
        self.hides_refusal = False  # one was being raised when the fault came: a traceback shows both

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """A call of the cache. Rows that a thread makes later are made first: its pace would choose what runs."""
        for thread in threading.enumerate():
            if thread.name == "embershard-rows":
                thread.join()
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if self.point is None:
            injector = Injector(files=_CACHE)
            try:
                with injector:
                    return function(*args, **kwargs)
            finally:
                self.calls.append(injector.events)
        if number == self.point.call:
            try:
                with self.injector:
                    return function(*args, **kwargs)
            except BaseException as error:
                if error is not self.injector.raised:
                    raise
                self.hides_refusal = isinstance(error.__context__, CacheError)
            self.injector.raised = self.injector.raised.with_traceback(None)  # nothing keeps its frames
            self.injector.raised.__context__ = None  # nor the end of a generator, which has its result
        return function(*args, **kwargs)

    def play(self) -> None:
        """All operations, and a flush at the end."""
        for name, *arguments in self.operations:
            getattr(self, f"_{name}")(*arguments)
        while self.flying:
            self._cancel()
        self._flush()

    def _split(self, keys: Iterable[int]) -> tuple[Tensor, Tensor]:
        return self.pool.split_by_feature(list(keys))

    def _know(self, keys: tuple[int, ...]) -> None:
        self.known.append((self.call(self.cache.know, *self._split(keys)), keys))

    def _prepare(self, keys: tuple[int, ...], known: KnownBatch | None = None, if_it_fits: bool = False) -> bool:
        ids, lengths = self._split(keys)
        try:
            ticket = self.call(self.cache.prepare, ids, lengths, True, known, if_it_fits)
        except CacheOverflowError:
            return False
        if ticket is not None:
            self.flying.append((ticket, ids))
        return ticket is not None

    def _prepare_known(self, if_it_fits: bool) -> None:
        if self.known and self._prepare(self.known[0][1], self.known[0][0], if_it_fits):
            self.known.popleft()

    def _train(self) -> None:
        if not self.flying:
            return
        ticket, ids = self.flying[0]
        self.call(self.cache.wait, ticket)
        self.call(self.cache.read_by_forward, ticket)
        self.call(self.cache.begin_update, ticket)
        slots, distinct = ticket.slots.unique(), ids.unique()
        for payload, rows in ((self.pool.slots, slots), (self.pool.rows, distinct)):
            weights, momentum, square = (tensor[rows] for tensor in payload)
            momentum = momentum * 0.5 + weights.sum(1)
            square = square + weights * weights + 1
            weights = weights - 0.1 * momentum[:, None] / (square + 1)
            for tensor, new in zip(payload, (weights, momentum, square), strict=True):
                tensor[rows] = new
        self.call(self.cache.release, ticket)
        self.flying.popleft()

    def _cancel(self) -> None:
        if self.flying:
            self.call(self.flying[-1][0].cancel)
            self.flying.pop()

    def _abandon(self) -> None:
        if self.flying:
            self.flying.pop()

    def _hold(self) -> None:
        self.call(self.cache.freeze_pins)

    def _let_go(self) -> None:
        self.call(self.cache.unfreeze_pins)

    def _flush(self) -> None:
        self.call(self.cache.flush)

    def _read(self, keys: tuple[int, ...]) -> None:
        found = self.call(self.cache.read, torch.tensor(keys))
        assert torch.equal(found, self.pool.rows[0][list(keys)]), "rows that were read differ"

    def _stats(self) -> None:
        self.call(self.cache.stats)

    def _skip(self) -> None:
        if self.known:
            known, keys = self.known.popleft()
            if known is not None:
                self.call(self.cache.skip, self._split(keys)[0], known)

    def _forget(self) -> None:
        self.call(self.cache.forget)
        self.known = deque((None, keys) for _, keys in self.known)

    def _write(self, keys: tuple[int, ...], value: float, in_place: bool) -> None:
        for tensor in (*self.pool.host.parts, *self.pool.rows):
            (tensor if in_place else tensor.data)[list(keys)] = value

    def _load(self, keys: tuple[int, ...], value: float) -> None:
        """A write that torch counts; the next operation notices."""
        self._flush()
        self._write(keys, value, in_place=True)
        self._read(keys)

    def _host_changed(self, keys: tuple[int, ...], value: float) -> None:
        """A write that torch does not count."""
        self._flush()
        self._write(keys, value, in_place=False)
        self.call(self.cache.host_rows_changed, torch.tensor(keys))

    def _changed_under_trained(self, keys: tuple[int, ...], value: float) -> None:
        """Somebody writes without a flush. What was trained since is lost, which must be said."""
        self.cache._copies.finish()
        self._write(keys, value, in_place=True)
        assert self._says_what_is_lost(), "trained rows were lost, and nobody said so"
        for truth, host in zip(self.pool.rows, self.pool.host.parts, strict=True):
            truth.copy_(host)

    def _says_what_is_lost(self) -> bool:
        try:
            self.call(self.cache.read, torch.tensor([0]))
        except CacheError as error:
            if "did not end" in str(error):
                raise
            return True
        return self.hides_refusal

    def _fail(self, copy: str) -> None:
        """A copy of the next known batch fails by itself, as far as it came."""
        if not self.known:
            return
        move = self.cache._copies.transfer
        do = getattr(move, copy)

        def fail(*arguments: Tensor) -> None:
            do(*arguments)
            raise OSError("copy")

        known, keys = self.known[0]
        with mock.patch.object(move, copy, fail), contextlib.suppress(OSError):
            self.call(self.cache.prepare, *self._split(keys), True, known)

    # -- what must hold

    def problem(self) -> str:
        """What is wrong at the end; "" when nothing is."""
        slots = self.pool.map.used_slots()
        keys = self.pool.map.keys(slots)
        if not torch.equal(self.pool.map.lookup(keys), slots):
            return "keys and slots do not belong together"
        if int((self.pool.map.slot_of_key > 0).sum()) != slots.numel():
            return "a key has a slot that another one has"
        for held, host, truth in zip(self.pool.slots, self.pool.host.parts, self.pool.rows, strict=True):
            if not torch.equal(host, truth):
                rows = (host != truth).reshape(host.shape[0], -1).any(1).nonzero().flatten().tolist()
                return f"rows differ in the host tier: {rows}"
            if not torch.equal(held[slots], truth[keys]):
                return "rows differ in their slots"
        if len(self.cache._in_flight):
            return "a batch is pinned that nobody holds"
        stats = self.cache.stats()
        if sum(s.fills - s.evictions for s in stats) != slots.numel():
            return f"{sum(s.fills - s.evictions for s in stats)} rows are counted, {slots.numel()} are there"
        if any(not 0 <= s.hits_unique <= s.unique_ids for s in stats):
            return "more hits than ids"
        self.evicted = sum(s.evictions for s in stats)
        return ""

    def not_refused(self) -> str:
        """Which operation of a broken cache does not refuse; "" when all do."""
        cache, (ids, lengths) = self.cache, self._split((1, 2, 17, 20))
        tries: dict[str, Callable[[], Any]] = {
            "know": lambda: cache.know(ids, lengths),
            "prepare": lambda: cache.prepare(ids, lengths),
            "prepare if it fits": lambda: cache.prepare(ids, lengths, False, None, True),
            "flush": cache.flush,
            "read": lambda: cache.read(ids),
            "stats": cache.stats,
            "host rows changed": cache.host_rows_changed,
            "some host rows changed": lambda: cache.host_rows_changed(ids),
        }
        if cache.next_use_index is None:
            del tries["know"]
        for name, attempt in tries.items():
            try:
                attempt()
            except CacheError as error:
                if not is_refusal(error, self.injector.raised):
                    return f"{name} of a broken cache says {error}"
            else:
                return f"{name} of a broken cache is not refused"
        for ticket, _ in self.flying:
            cache.release(ticket)
        cache.cancel(forwarded=False)
        if self.known and self.known[0][0] is not None:
            cache.skip(self._split(self.known[0][1])[0], self.known[0][0])
        cache.forget()
        return ""


def points(setting: Setting) -> list[Point]:
    """Every line of every call, with one exception each in turn; and proof that the setting tests something."""
    with _quiet():
        player = Player(setting)
        player.play()
        problem = player.problem()
        assert not problem, problem
        assert player.evicted > 10, "hardly anything was evicted"
    found = [(call, line, *where) for call, lines in enumerate(player.calls) for line, where in enumerate(lines)]
    shift = sum(map(ord, setting.name))
    return [
        Point(setting.name, call, line, operation, place, ERRORS[(number + shift) % len(ERRORS)])
        for number, (call, line, operation, place) in enumerate(found)
    ]


def try_point(point: Point) -> tuple[str, str]:
    """How it ended, "equal" or "refused", or neither of them: "wrong" and what is."""
    with _quiet():
        player = Player(SETTINGS[point.setting], point)
        kind, problem = "wrong", ""
        try:
            with no_hang(_SECONDS):
                player.play()
                problem = player.problem()
                kind = "equal"
        except HangError as error:
            problem = str(error)
        except CacheError as error:
            if player.injector.raised is not None and is_refusal(error, player.injector.raised):
                kind, problem = "refused", player.not_refused()
            else:
                problem = f"{type(error).__name__}: {error}"
        except BaseException as error:
            problem = f"{type(error).__name__}: {error}"
        if player.injector.raised is None:
            problem = problem or "the line was not reached"
    return ("wrong", f"{player.injector.where} [{point.setting}]: {problem}") if problem else (kind, "")


def each_place_once(seed: int) -> list[Point]:
    """For every line in every operation one point, drawn from all settings."""
    found = chosen(None, seed)
    random.Random(seed).shuffle(found)
    return list({(point.operation, point.place): point for point in found}.values())


def chosen(count: int | None, seed: int, names: Iterable[str] = SETTINGS) -> list[Point]:
    """`count` points of these settings, drawn with a seed; None: all."""
    found = [point for name in names for point in points(SETTINGS[name])]
    return found if count is None or count >= len(found) else random.Random(seed).sample(found, count)


@dataclass
class Tally:
    """How many points of each operation ended how."""

    ended: dict[str, Counter[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, name: str, kind: str, problem: str = "") -> None:
        """One more."""
        self.ended.setdefault(name, Counter())[kind] += 1
        if problem:
            self.problems.append(problem)

    def join(self, name: str, other: Tally) -> None:
        """Those of another tally, under one name."""
        self.ended.setdefault(name, Counter()).update(other.totals)
        self.problems += other.problems

    @property
    def totals(self) -> Counter[str]:
        """Over all names."""
        return sum(self.ended.values(), Counter())


def try_points(found: Iterable[Point], by_setting: bool = False) -> Tally:
    """Try each; counted by operation or by setting."""
    tally = Tally()
    with no_collections():
        for point in found:
            tally.add(point.setting if by_setting else point.operation, *try_point(point))
    return tally


# -- negative controls: what must be found


@contextlib.contextmanager
def unguarded() -> Iterator[None]:
    """Changes set no mark, and nobody looks for one."""
    with (
        mock.patch.object(ChangeGuard, "check", return_value=None),
        mock.patch.object(ChangeGuard, "change", return_value=contextlib.nullcontext()),
    ):
        yield


@contextlib.contextmanager
def bound_too_early() -> Iterator[None]:
    """The map promises rows before they are in their slots."""

    def early(self: RowMoves, plan: CachePlan, known: Any, lengths: Tensor, critical: bool, *training: Any) -> None:
        self._copies.write_back_evicted(plan)
        self._planner.evict(plan)
        self._planner.note_filled(plan, known)
        self._copies.fill_missed(plan)
        self._counters.add_plan(plan, lengths, critical)

    with mock.patch.object(RowMoves, "execute", early):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
