"""All ranks leave one step, each by an exception at a line of its own, and train on where they may.

Every table, and the hot rows of each, must have trained all batches, or all but the one that was left; rows that
several ranks have must be equal on them. Or ranks refuse, and say why.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn

from embershard import LookAheadPipeline
from embershard.errors import EmbershardError, StepError
from embershard.pipeline import left_steps
from tests.faults.cache_level import Tally, unguarded
from tests.faults.injection import ERRORS, Injector, is_refusal, no_hang
from tests.faults.model_level import (
    MODES,
    SECONDS,
    Ended,
    Training,
    begin_group,
    copies_of,
    impatient,
    is_of_ranks,
    meet,
    settled,
    unlike,
)
from tests.ranks.look_ahead import Case, as_run, batches, build, plain, reference, train
from tests.ranks.parity import snapshot
from tests.ranks.workers import RankPool

#: Time for the other rank to leave the step, too: it does at once, or waits for this one.
_GRACE = datetime.timedelta(seconds=1)
#: Half of the points: so many lines before the step's end, behind which often no collective is left.
_LAST = 110
#: Where a rank has the gradients of all ranks, and has not trained.
_EXCHANGED = " sum_rows"


@dataclass(frozen=True)
class Point:
    """A line of every rank's main thread, in the body of one step."""

    training: str
    step: int
    lines: tuple[int, ...]
    error: type[BaseException]


@dataclass(frozen=True)
class Body:
    """The lines of a step's body in a rank's main thread: the first one's number, and where each is."""

    first: int
    places: list[str]

    def last(self, place: str) -> int | None:
        """The last line at this place."""
        return next((self.first + n for n, at in reversed([*enumerate(self.places)]) if at.endswith(place)), None)


def bodies_of(training: Training, is_guarded: bool) -> list[Body]:
    """Of every step on this rank."""
    injector = Injector()
    bodies: list[range] = []
    with _guards(is_guarded), settled(), as_run(training.case, training.run) as (model, loop):
        error = _train(training, model, loop, injector, bodies)
        assert error is None, error
        assert not unlike(training.case, [reference(training.case).after[-1]], snapshot(model))
    return [Body(lines.start, [injector.events[line][1] for line in lines]) for lines in bodies]


def points(training: Training, bodies: Sequence[Sequence[Body]], count: int, seed: int) -> list[Point]:
    """Lines of all ranks in the same step: anywhere in it, or near its end. First, where rows have copies: rank 0 has
    all gradients and has not trained, the others have."""
    rng, found = random.Random(seed), []
    for number in range(count):
        step = rng.randrange(2, training.case.steps - 2)
        spans = [range(body.first, body.first + len(body.places)) for body in (of_rank[step] for of_rank in bodies)]
        lines = tuple(rng.choice(span[-_LAST:] if number % 2 else span) for span in spans)
        exchanged = bodies[0][step].last(_EXCHANGED)
        if not number and exchanged is not None:
            lines = (exchanged, *(span[-1] for span in spans[1:]))
        found.append(Point(training.name, step, lines, ERRORS[number % len(ERRORS)]))
    return found


def try_points(found: Sequence[Point], folder: str, is_guarded: bool) -> list[Ended]:
    """Each in a training of its own. Called on every rank."""
    gc.collect()
    begin_group(f"{folder}/first")
    ended = []
    for number, point in enumerate(found):
        with _guards(is_guarded):
            ended.append(_try(point))
        meet(f"{folder}/{number}", ended[-1])
    return ended


def try_sample(
    pool: RankPool, training: Training, count: int, seed: int, folder: str, is_guarded: bool = True
) -> Tally:
    """A sample of a training's points on these ranks. A point is refused if one rank refuses."""
    found = points(training, pool.run(bodies_of, training, is_guarded), count, seed)
    ended, tally = pool.run(try_points, found, folder, is_guarded), Tally()
    for number in range(len(found)):
        of_ranks = [result[number] for result in ended]
        problem = "; ".join(f"{each.where}: {each.problem}" for each in of_ranks if each.problem)
        if not problem and any(each.kind == "beside" for each in of_ranks) and not _is_refused(of_ranks):
            problem = f"{of_ranks[0].where}: no rank says why it ended"
        kind = "wrong" if problem else "refused" if _is_refused(of_ranks) else "equal"
        tally.add(training.name, kind, problem)
    return tally


def _guards(are_set: bool) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if are_set else unguarded()


def _is_refused(of_ranks: Sequence[Ended]) -> bool:
    return any(each.kind == "refused" for each in of_ranks)


def _try(point: Point) -> Ended:
    training, rank = MODES[point.training], dist.get_rank()
    injector = Injector(point.lines[rank], point.error)
    try:
        with settled(), no_hang(SECONDS), mock.patch.object(left_steps, "GRACE", _GRACE):
            reference(training.case)
            _without(training.case, point.step)
            ended = _left(training, point, injector)
    except BaseException as error:
        ended = Ended("wrong", "", f"{type(error).__name__}: {error}", True)
    ended.where = f"{injector.where} [{training.name}, step {point.step}, rank {rank}]"
    return ended


def _left(training: Training, point: Point, injector: Injector) -> Ended:
    case = training.case
    with as_run(case, training.run) as (model, loop), impatient(model):
        error = _train(training, model, loop, injector, [])
        whole, without = reference(case).after, _without(case, point.step)
        kind, expected = "equal", [whole[-1], without[-1]]
        if error is not None:
            is_named = isinstance(error, StepError) or is_of_ranks(error) or is_refusal(error, None)
            if not is_named and (isinstance(error, EmbershardError) or not isinstance(error, RuntimeError)):
                return Ended("wrong", "", f"{type(error).__name__}: {error}", True)
            kind, expected = "refused" if is_named else "beside", whole[point.step :] + without[point.step :]
        try:
            different = unlike(case, expected, snapshot(model))
        except BaseException as refusal:
            problem = "" if is_refusal(refusal, None) else f"the snapshot says {refusal}"
            return Ended("refused", "", problem, error is not None)
        return Ended(kind, "", ", ".join(different), error is not None, copies_of(model))


def _train(
    training: Training, model: nn.Module, loop: LookAheadPipeline, injector: Injector, bodies: list[range]
) -> BaseException | None:
    """To the end of the data, past the step that is left; what ended the training if it was not that."""
    iterator: Any = iter(batches(training.case))
    has_left = False
    while True:
        try:
            with injector, loop.step(iterator) as batch:
                first = injector.count
                loop._optimizer.zero_grad()
                loss, _ = model(batch)
                loss.backward()
                loop._optimizer.step()
                bodies.append(range(first, injector.count))
        except StopIteration:
            return None
        except BaseException as error:
            loss = batch = None  # as the end of a training function would: what they hold is pinned
            is_fault = injector.raised is not None and injector.raised in (error, error.__cause__)
            _drop_frames(error)
            if has_left or not is_fault:
                return error
            has_left = True


def _drop_frames(error: BaseException | None) -> None:
    """So that nothing keeps the model, and with it the group, in which another rank may wait."""
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


@functools.lru_cache(maxsize=8)
def _without(case: Case, step: int) -> list[dict[str, Tensor]]:
    """Stock TorchRec after so many batches, of which one is left out."""
    stock = build(case, cached=False)
    data = batches(case)
    del data[step]
    after = [snapshot(stock)]
    train(plain(stock), data, lambda _: after.append(snapshot(stock)))
    return after
