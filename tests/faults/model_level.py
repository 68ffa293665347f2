"""The look-ahead pipeline trains a model, an exception is raised at one line of its caches, and training goes on."""

from __future__ import annotations

import contextlib
import datetime
import gc
import os
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from embershard import LookAheadPipeline, cache_stats, flush
from embershard.pipeline.worker import CacheWorker
from tests.faults.cache_level import Tally
from tests.faults.injection import ERRORS, Injector, is_refusal, no_collections, no_hang
from tests.ranks.look_ahead import Case, Run, as_run, batches, only_our_warnings_raise, reference
from tests.ranks.parity import snapshot
from tests.ranks.workers import RankPool

_SECONDS = 20.0
_GROUP_TIMEOUT = datetime.timedelta(seconds=8)
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
TRAININGS = {
    training.name: training
    for training in (
        Training("inline", _CASE, replace(_RUN, worker=False)),
        Training("worker", _CASE, replace(_RUN, worker=True)),
        Training(
            "worker, staged, hashed",
            _CASE,
            replace(_RUN, worker=True, transfer="staged", slot_map="hashed", prefetch=1),
        ),
        Training("inline, lfu", replace(_CASE, ratio=0.4), replace(_RUN, worker=False, policy="lfu", prefetch=1)),
        Training("two ranks, inline", _ROW_WISE, replace(_RUN, worker=False), 2),
        Training("two ranks, worker", _ROW_WISE, replace(_RUN, worker=True), 2),
    )
}


#: The exchange of ids. A rank that begins it again makes a collective that the others are not in.
_COLLECTIVE = {
    "StagedBatch.__init__",
    "PipelinedForward.start",
    "ModuleInput.send",
    "ModuleInput.receive",
    "tensors_of",
    "_reader",
    "_parts_of_features",
    "_attributes",
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


@dataclass
class Ended:
    """How a training with a fault ended: "equal", "refused", or neither: "wrong"; and where the fault was."""

    kind: str
    where: str
    problem: str = ""
    has_left: bool = False


class _Left(Exception):  # noqa: N818
    """The rank cannot go on in step with the others."""


def lines_of(training: Training) -> dict[str, list[str]]:
    """For each thread the operation of every line; and proof that the training tests something. On every rank."""
    counters = {"main": Injector(), "worker": Injector()}
    with _settled(), as_run(training.case, training.run) as (model, loop):
        done, error = _train(training, model, loop, counters)
        assert error is None, error
        assert done == training.case.steps
        assert not unlike([reference(training.case).after[done]], snapshot(model))
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
        if (len(lines) == 1 or operation not in _COLLECTIVE) and only in (None, operation)
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
        _begin_group(f"{folder}/first")
    for number, point in enumerate(found):
        ended.append(_try(point))
        if not is_alone:
            _meet(f"{folder}/{number}", ended[-1])
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
    training = TRAININGS[point.training]
    is_here = dist.get_rank() == point.rank
    injector = Injector(point.line if is_here else None, point.error)
    try:
        with _settled(), no_hang(_SECONDS):
            reference(training.case)
            kind, problem, has_left = _trained_with_a_fault(training, {point.thread: injector}, is_here)
    except BaseException as error:
        kind, problem, has_left = "wrong", f"{type(error).__name__}: {error}", True
    where = f"{injector.where} [{training.name}, {point.thread}, rank {point.rank}]"
    if not is_here:
        return Ended("beside", where, problem, has_left)
    if injector.raised is None and not problem:
        return Ended("not reached", where)
    return Ended("wrong" if problem else kind, where, problem, has_left)


def _trained_with_a_fault(training: Training, injectors: dict[str, Injector], is_here: bool) -> tuple[str, str, bool]:
    (injector,) = injectors.values()
    with as_run(training.case, training.run) as (model, loop):
        done, error = _train(training, model, loop, injectors)
        expected = reference(training.case).after
        if error is None:
            return "equal", ", ".join(unlike([expected[done]], snapshot(model))), False
        if not is_here:  # the other rank left
            return "beside", "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}", True
        if error is injector.raised:  # in a step: each table has seen its batch, or has not
            error = None
            try:
                return "equal", ", ".join(unlike(expected[done : done + 2], snapshot(model))), True
            except BaseException as refusal:
                error = refusal
        if not is_refusal(error, injector.raised):
            return "wrong", f"{type(error).__name__}: {error}", True
        return "refused", _not_refused(model, injector), True


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


def unlike(expected: Sequence[dict[str, Tensor]], found: dict[str, Tensor]) -> list[str]:
    """Tables, weights and states together, that equal none of the `expected` snapshots; and dense parameters, each by
    itself, as torch's optimizer updates them one after the other."""
    names: dict[str, list[str]] = {}
    for name in found:
        table = re.search(r"\bt\d+\b", name)
        names.setdefault(table[0] if table else name, []).append(name)
    assert all(set(each) == set(found) for each in expected)
    assert len(names) > 3, names
    return [
        f"{table} differs"
        for table, group in names.items()
        if not any(all(torch.equal(each[name], found[name]) for name in group) for each in expected)
    ]


def _by_pool(model: nn.Module) -> list[list[Any]]:
    stats = cache_stats(model)
    return [stats[:2], stats[2:]]


@contextlib.contextmanager
def _settled() -> Iterator[None]:
    only_our_warnings_raise()
    with no_collections():
        yield


# -- ranks that left


def _meet(store: str, ended: Ended) -> None:
    """All ranks go on together. Where one has left, the others find out, and a new group is made."""
    try:
        if ended.has_left:
            raise _Left
        dist.barrier()
    except (_Left, RuntimeError):
        _begin_group(store)


def _begin_group(store: str) -> None:
    """In place of the present group. A rank that waits in that one for others notices at once where they hold nothing
    of it any more, and else after the group's timeout."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gc.collect()
    dist.destroy_process_group()
    gc.collect()
    os.makedirs(os.path.dirname(store), exist_ok=True)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=_GROUP_TIMEOUT
    )
