"""The look-ahead pipeline trains a model, an exception is raised at one line of its caches, and training goes on."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embershard import LookAheadPipeline, cache_stats, flush
from embershard.errors import CacheError
from embershard.extras.hot_cold.mode import HotColdShardedEmbeddingBagCollection
from embershard.pipeline.worker import CacheWorker
from embershard.sharding.torchrec import cached_embeddings
from tests.faults.cache_level import Tally
from tests.faults.injection import ERRORS, Injector, is_refusal, no_collections, no_hang
from tests.ranks.look_ahead import Case, Run, as_run, batches, only_our_warnings_raise, reference
from tests.ranks.parity import hot_rows, snapshot
from tests.ranks.workers import RankPool

SECONDS = 120.0  # a fault may cost several timeouts of a group; a busy machine is not a fault
_GROUP_TIMEOUT = datetime.timedelta(seconds=10)
_MEETING_TIMEOUT = datetime.timedelta(seconds=600)  # others may be in the old group still, on a busy machine
_CASE = Case(rows=(200, 90, 150, 60), dims=(16, 16, 8, 8), steps=10, batch_size=8)
_RUN = Run(lookahead=3, prefetch=2, working_set_of=3)


@dataclass(frozen=True)
class Training:
    """A case, and how it is trained."""

    name: str
    case: Case
    run: Run
    world_size: int = 1


_ROW_WISE = replace(_CASE, sharding="row_wise", batch_size=6)
_ROUTES = replace(_ROW_WISE, sharding="table_wise", rows=(200, 200, 200, 200))
TRAININGS = {
    training.name: training
    for training in (
        Training("inline", _CASE, replace(_RUN, worker=False)),
        Training("worker", _CASE, replace(_RUN, worker=True)),
        Training(
            "worker, staged",
            _CASE,
            replace(_RUN, worker=True, transfer="staged", prefetch=1),
        ),
        Training("inline, lfu", replace(_CASE, ratio=0.4), replace(_RUN, worker=False, policy="lfu", prefetch=1)),
        Training("two ranks, inline", _ROW_WISE, replace(_RUN, worker=False), 2),
        Training("two ranks, worker", _ROW_WISE, replace(_RUN, worker=True), 2),
        Training("two ranks, routes, inline", _ROUTES, replace(_RUN, worker=False), 2),
        Training("two ranks, routes, worker", _ROUTES, replace(_RUN, worker=True), 2),
    )
}
_DYADIC = replace(_ROW_WISE, dyadic=True)
NAMES_OF_MODES = ("pooled", "rows", "hot_cold", "data_parallel")
#: Two ranks in every mode, beside stock TorchRec's row-wise tables; no sum of gradients is rounded.
MODES = {
    training.name: training
    for mode, case in {
        "pooled": _DYADIC,
        "rows": replace(_DYADIC, exchange="rows"),
        "hot_cold": replace(_DYADIC, rows=(400, 180, 300, 120), hot=40, hot_every=3),
        "data_parallel": replace(_DYADIC, mode="data_parallel"),
    }.items()
    for training in (
        Training(f"{mode}, inline", case, replace(_RUN, worker=False), 2),
        Training(f"{mode}, worker", case, replace(_RUN, worker=True), 2),
    )
}


@dataclass(frozen=True)
class Point:
    """The `line`-th line of the caches in a thread ("main" or "worker") of a rank."""

    training: str
    thread: str
    line: int
    operation: str
    error: type[BaseException]
    rank: int = 0


#: Numbers of rows, ascending, and their contents.
Copies = tuple[Tensor, list[Tensor]]


@dataclass
class Ended:
    """How a training with a fault ended: "equal", "refused", or neither: "wrong"; and where the fault was. ``copies``:
    of rows, which must be those of the other ranks if none of them refuses."""

    kind: str
    where: str
    problem: str = ""
    has_left: bool = False
    copies: list[Copies] = field(default_factory=list)


class _Left(Exception):  # noqa: N818
    """The rank cannot go on in step with the others."""


def lines_of(training: Training) -> dict[str, list[str]]:
    """For each thread the operation of every line; and proof that the training tests something. On every rank."""
    counters = {"main": Injector(is_alone=training.world_size == 1), "worker": Injector()}
    with settled(), as_run(training.case, training.run) as (model, loop):
        done, error = _train(training, model, loop, counters)
        assert error is None, error
        assert done == training.case.steps
        assert not unlike(training.case, [reference(training.case).after[done]], snapshot(model))
        evictions = [sum(s.evictions for s in pool) for pool in _by_pool(model)]
        assert len(evictions) > 1, "one pool"
        assert min(evictions) > 20, evictions
    return {thread: [operation for operation, _ in counter.events] for thread, counter in counters.items()}


def points(
    training: Training, lines: Sequence[dict[str, list[str]]], count: int, seed: int, only: str | None = None
) -> list[Point]:
    """A sample of the lines of all ranks, or of one operation."""
    found = [
        (thread, line, operation, rank)
        for rank, threads in enumerate(lines)
        for thread, operations in threads.items()
        for line, operation in enumerate(operations)
        if only in (None, operation)
    ]
    drawn = random.Random(seed).sample(found, min(count, len(found)))
    return [
        Point(training.name, thread, line, operation, ERRORS[number % len(ERRORS)], rank)
        for number, (thread, line, operation, rank) in enumerate(drawn)
    ]


def try_points(found: Sequence[Point], folder: str) -> list[Ended]:
    """Each in a training of its own. Called on every rank; the fault's rank knows how it ended."""
    ended, is_alone = [], dist.get_world_size() == 1
    gc.collect()
    if is_alone:
        gc.freeze()  # what is here stays, and collections are quick; a group that is to end must not stay
    else:
        begin_group(f"{folder}/first")
    for number, point in enumerate(found):
        ended.append(_try(point))
        if not is_alone:
            meet(f"{folder}/{number}", ended[-1])
    return ended


def try_sample(
    pool: RankPool, training: Training, count: int, seed: int, folder: str, only: str | None = None
) -> Tally:
    """A sample of a training's points on these ranks, or of one operation. `folder` is for what new groups need."""
    found = points(training, pool.run(lines_of, training), count, seed, only)
    ended, tally = pool.run(try_points, found, folder), Tally()
    for number, point in enumerate(found):
        for rank, each in enumerate(result[number] for result in ended):
            problem = f"{each.where}: rank {rank}: {each.problem}" if each.problem else ""
            if rank == point.rank or problem:
                tally.add(point.operation, each.kind, problem)
    return tally


def _try(point: Point) -> Ended:
    training = {**TRAININGS, **MODES}[point.training]
    is_here = dist.get_rank() == point.rank
    injector = Injector(point.line if is_here else None, point.error, is_alone=training.world_size == 1)
    try:
        with settled(), no_hang(SECONDS):
            reference(training.case)
            ended = _trained_with_a_fault(training, {point.thread: injector}, is_here)
    except BaseException as error:
        ended = Ended("wrong", "", f"{type(error).__name__}: {error}", True)
    ended.where = f"{injector.where} [{training.name}, {point.thread}, rank {point.rank}]"
    if not is_here:
        ended.kind = "refused" if ended.kind == "refused" else "beside"
    elif ended.problem:
        ended.kind = "wrong"
    elif injector.raised is None:
        ended.kind = "not reached"
    return ended


def _trained_with_a_fault(training: Training, injectors: dict[str, Injector], is_here: bool) -> Ended:
    (injector,), case = injectors.values(), training.case
    with as_run(case, training.run) as (model, loop), impatient(model):
        done, error = _train(training, model, loop, injectors)
        expected = reference(case).after
        if error is None:
            problem = ", ".join(unlike(case, [expected[done]], snapshot(model)))
            return Ended("equal", "", problem, copies=copies_of(model))
        if not is_here:  # the other rank left
            problem = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
            return Ended("refused" if refuses(model) else "beside", "", problem, True, copies_of(model))
        if error is injector.raised or is_of_ranks(error):  # in a step: each table has seen its batch, or has not
            kind = "equal" if error is injector.raised else "refused"
            error = None
            try:
                problem = ", ".join(unlike(case, expected[done : done + 2], snapshot(model)))
                return Ended(kind, "", problem, True, copies_of(model))
            except BaseException as refusal:
                error = refusal
        if not is_refusal(error, injector.raised):
            return Ended("wrong", "", f"{type(error).__name__}: {error}", True)
        return Ended("refused", "", _not_refused(model, injector), True)


def is_of_ranks(error: BaseException | None) -> bool:
    """Whether a rank says that it does not go on with the others: in data-parallel caches, or exchanging ids."""
    said = ("planned batch", "did not come to", "the exchange of ids with the other ranks did not end")
    return isinstance(error, CacheError) and any(text in str(error) for text in said)


@contextlib.contextmanager
def impatient(model: nn.Module) -> Iterator[None]:
    """Data-parallel caches wait seconds, not minutes, for a rank that has left."""
    with contextlib.ExitStack() as stack:
        for pool in cached_embeddings(model):
            share = getattr(pool.host, "_share", None)  # of rows that ranks share
            for barriers in () if share is None else (share.barriers, share.at_writes):
                stack.enter_context(mock.patch.object(barriers, "_timeout_seconds", 2.0))
        yield


def refuses(model: nn.Module) -> bool:
    """Whether this rank's tables cannot be saved: a change of them did not end."""
    try:
        snapshot(model)
    except CacheError:
        return True
    return False


def copies_of(model: nn.Module) -> list[Copies]:
    """The rows of which other ranks have copies, too."""
    found = []
    for module in model.modules():
        if isinstance(module, HotColdShardedEmbeddingBagCollection):
            for group in module._hot._groups:
                num_rows = 0 if module._hot._is_behind else len(group.rows.payload[0])  # taken at the next forward
                rows = [part[:num_rows].clone() for part in group.rows.payload]
                found.append((torch.arange(num_rows), rows))
    for pool in cached_embeddings(model):
        if pool.host.is_shared:
            slots = pool.cache.state.map.used_slots()
            keys, order = pool.cache.state.map.keys(slots).sort()
            found.append((keys, [part.detach()[slots[order]] for part in pool.slots.payload]))
    return found


def _unequal(own: list[Copies], others: list[Copies]) -> int:
    """Rows that two ranks have, with different contents."""
    number = 0
    for (keys, rows), (other_keys, other_rows) in zip(own, others, strict=True):
        here, there = torch.isin(keys, other_keys), torch.isin(other_keys, keys)
        pairs = zip(rows, other_rows, strict=True)
        differ = [(part[here] != other[there]).unsqueeze(-1).flatten(1).any(dim=1) for part, other in pairs]
        number += int(torch.stack(differ).any(dim=0).sum())
    return number


def _train(
    training: Training, model: nn.Module, loop: LookAheadPipeline, injectors: dict[str, Injector]
) -> tuple[int, BaseException | None]:
    """To the end of the data, also when a fault comes outside of a step's body: how many steps were done, and what
    ended the training if it was not the end of the data."""
    iterator, done, is_inside = iter(batches(training.case)), 0, False
    main = injectors.get("main") or contextlib.nullcontext()
    raised: BaseException | None = None
    with _worker_traced(injectors.get("worker")):
        while True:
            try:
                with main, loop.step(iterator) as batch:
                    is_inside = True
                    loop._optimizer.zero_grad()
                    loss, _ = model(batch)
                    loss.backward()
                    loop._optimizer.step()
                    is_inside, done = False, done + 1
            except StopIteration:
                return done, None
            except BaseException as error:
                loss = batch = None  # as the end of a training function would: what they hold is pinned
                is_fault = any(error is injector.raised for injector in injectors.values())
                if is_inside or not is_fault or raised is not None:
                    return done, error.with_traceback(None)
                raised = error.with_traceback(None)


@contextlib.contextmanager
def _worker_traced(injector: Injector | None) -> Iterator[None]:
    if injector is None:
        yield
        return
    start = CacheWorker.start
    with mock.patch.object(CacheWorker, "start", lambda self, job: start(self, lambda: injector.run(job))):
        yield


def _not_refused(model: nn.Module, injector: Injector) -> str:
    for name, attempt in {"a snapshot": lambda: snapshot(model), "a flush": lambda: flush(model)}.items():
        try:
            attempt()
        except BaseException as error:
            if not is_refusal(error, injector.raised):
                return f"{name} of a broken pool says {type(error).__name__}: {error}"
        else:
            return f"{name} of a broken pool is not refused"
    return ""


def unlike(case: Case, expected: Sequence[dict[str, Tensor]], found: dict[str, Tensor]) -> list[str]:
    """Tables, weights and states together, that equal none of the `expected` snapshots; and dense parameters, each by
    itself, as torch's optimizer updates them one after the other. Hot rows of a table are trained apart."""
    expected, found = [_halves(case, each) for each in expected], _halves(case, found)
    names: dict[str, list[str]] = {}
    for name in found:
        table = re.search(r"\bt\d+\b", name)
        names.setdefault(f"{table[0]}{name[name.find(' hot') :]}" if table else name, []).append(name)
    assert all(set(each) == set(found) for each in expected)
    assert len(names) > 3, names
    return [
        f"{table} differs"
        for table, group in names.items()
        if not any(all(torch.equal(each[name], found[name]) for name in group) for each in expected)
    ]


def _halves(case: Case, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hot rows of each table apart from the others, if the case has some."""
    if case.hot is None:
        return {f"{name} hot: no": rows for name, rows in found.items()}
    halves, hot = {}, hot_rows(case)
    for name, rows in found.items():
        table, place = re.search(r"\bt\d+\b", name), re.search(r"\((\d+),", name)
        is_hot = torch.zeros(rows.shape[:1], dtype=torch.bool)
        if table and place:
            is_hot = torch.isin(torch.arange(len(rows)) + int(place[1]), hot[table[0]])
        halves.update({f"{name} hot: yes": rows[is_hot], f"{name} hot: no": rows[~is_hot]})
    return halves


def _by_pool(model: nn.Module) -> list[list[Any]]:
    stats = cache_stats(model)
    half = len(stats) // 2  # of two pools, which have as many tables
    return [stats[:half], stats[half:]]


@contextlib.contextmanager
def settled() -> Iterator[None]:
    only_our_warnings_raise()
    with no_collections():
        yield


# -- ranks that left


def meet(store: str, ended: Ended) -> None:
    """All ranks go on together. Where one has left, the others find out, and a new group is made. If no rank refuses,
    their copies are compared."""
    try:
        if ended.has_left:
            raise _Left
        dist.barrier()
    except (_Left, RuntimeError):
        begin_group(store)
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, (ended.kind, ended.copies))
    if all(kind not in ("refused", "wrong") for kind, _ in others):
        number = max(_unequal(ended.copies, copies) for _, copies in others)
        if number:
            ended.kind, ended.problem = "wrong", f"{number} rows are not as on the other ranks"


def begin_group(store: str) -> None:
    """In place of the present group. A rank that waits in that one for others notices at once where they hold nothing
    of it any more, and else after the group's timeout."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gc.collect()
    dist.destroy_process_group()
    gc.collect()
    gc.freeze()  # what is here without a group stays, and collections are quick
    os.makedirs(os.path.dirname(store), exist_ok=True)
    here = dist.FileStore(f"{store}.here", world_size)
    here.set(str(rank), "")
    here.wait(list(map(str, range(world_size))), _MEETING_TIMEOUT)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=_GROUP_TIMEOUT
    )
