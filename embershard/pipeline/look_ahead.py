"""The look-ahead train pipeline: it knows the ids of many batches, and holds the rows of the next few on the device.

The step of batch i, with a full window; P is the prefetch depth, L the look-ahead::

    stage     batches          GPU stream         CPU thread    collective
    train     i                the caller's       the caller's  yes         forward, backward, update
    resident  i + 1 ... i + P  prepare            either *      no          copy missing rows into slots not in use
    near      i + 1 ... i + N  -                  either *      no          bring rows nearer (N by the pools' parts)
    know      i + L            prepare            the caller's  no          tell the caches when rows are used next (+)
    receive   i + L            distribute         the caller's  yes         the ids, which were sent in the step before
    send      i + L + 1        distribute         the caller's  yes         ids, behind the step's backward
    arrive    i + L + 2        copy, distribute   the caller's  yes         copy to the device; exchange sizes of ids

* the caller's or the worker, whichever makes steps shorter (`WorkerTrial`).

`LookAheadPipeline.step` runs them: `_advance` before the step, `_look_ahead` beside it, `_pay_debts` behind its
backward. Knowing costs a few bytes per id; holding rows costs slots. That is why there are two depths.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from embershard.cache.gpu.readback import ReadTogether
from embershard.errors import ConfigError
from embershard.pipeline.intake import Intake
from embershard.pipeline.left_steps import LeftSteps
from embershard.pipeline.pipelined_forward import Features, ModelInputs
from embershard.pipeline.staged_batch import IdExchange, StagedBatch, Streams, Window
from embershard.pipeline.worker import CacheWorker, PrefetchDepth, WorkerTrial
from embershard.sharding.memory_model import MAX_KNOWN_BYTES, known_together
from embershard.sharding.torchrec import cached_embeddings
from embershard.sharding.torchrec.compat import name_work_for_profilers_only
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.modes.routes import Told
from embershard.units import size

_log = logging.getLogger(__name__)

#: One batch whose ids were sent in the step before, and one whose ids are sent in this step. Ids are sent behind the
#: collectives of a step's backward: with a single batch arriving, the next step would begin by waiting for those.
_MOST_ARRIVING = 2


class LookAheadPipeline:
    """Trains a sharded model whose embedding rows are brought in ahead of time. Used like TorchRec's train pipelines.

    The model returns `(losses, output)`. All ranks must call the same methods in the same order; they stop together
    when the first one has no batch left. Evaluation, checkpoints and flushes between two steps are safe: outside of a
    step the model's forward is its own.

    Args:
        model: a `DistributedModelParallel`.
        optimizer: of the dense parameters; the tables' optimizer is fused into their backward.
        device: of this rank.
        lookahead: L, batches known beyond the one in training; up to three more wait to become known
            (`known_together`).
        prefetch: P, the most batches resident beyond the one in training: fewer where they do not fit and, on a CPU,
            as few as keep steps from waiting.
        features: gives each sharded module's input, by name, from a batch; None: the model is traced.
        max_known_bytes: memory for known batches; fewer are known, with a warning, where they would take more.
        micro_batches: so many batches train together, each in a step of its own (`embershard.accumulating`). Tables of
            ids need the number: ids of all of them get rows together.
        worker: plan and copy rows in a thread beside the training, or not. Default: on a CPU the faster of the two, as
            measured during the training; on a GPU not (there are streams).
        num_carried: numbers of a rank that may travel with the agreement on a next batch (`carrier`).

    Raises:
        ConfigError: not 1 <= P <= L, or fewer batches ahead than train together.

    With a sharded `model` (`examples/torchrec_dlrm.py` is a whole program):

    >>> pipeline = LookAheadPipeline(model, optimizer, torch.device("cpu"), lookahead=4)
    >>> batches = iter(loader)
    >>> try:
    ...     while True:
    ...         output = pipeline.progress(batches)
    ... except StopIteration:
    ...     print(pipeline.stats().steps, "steps")
    8 steps
    >>> pipeline.detach()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        lookahead: int = 64,
        prefetch: int = 2,
        *,
        features: Features | None = None,
        max_known_bytes: int = MAX_KNOWN_BYTES,
        micro_batches: int = 1,
        worker: bool | None = None,
        num_carried: int = 0,
    ) -> None:
        if not 1 <= prefetch <= lookahead:
            raise ConfigError(f"got lookahead={lookahead}, prefetch={prefetch}; needed 1 <= prefetch <= lookahead")
        if not 1 <= micro_batches <= lookahead:
            raise ConfigError(
                f"got micro_batches={micro_batches}, lookahead={lookahead}; needed 1 <= micro_batches <= lookahead"
            )
        name_work_for_profilers_only()
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._lookahead, self._prefetch, self._max_known_bytes = lookahead, prefetch, max_known_bytes
        self._known_together = known_together(lookahead)
        self._inputs = ModelInputs(model, features)
        self._intake = Intake(self._device, self._inputs.check, self._inputs.tell, self._inputs.num_told, num_carried)
        self._streams = Streams(self._device)
        self._exchange = IdExchange()
        self._pools = list(cached_embeddings(model))
        for pool in self._pools:
            pool.micro_batches = micro_batches
        is_tried = worker is None and self._device.type == "cpu"
        self._trial = WorkerTrial() if is_tried else None
        self._worker = CacheWorker(self._device) if worker or is_tried else None
        self._depth = PrefetchDepth(prefetch, is_adaptive=self._worker is not None)
        # Caches that are the same on all ranks must make the same plans, whichever rank is late.
        self._num_coming = max((pool.num_coming for pool in self._pools), default=0)
        self._coming: Sequence[StagedBatch] = ()  # whose rows come nearer
        self._may_stop = self._depth.is_adaptive and not any(pool.host.is_shared for pool in self._pools)
        self._left = LeftSteps()
        self._window = Window(micro_batches)
        self._depths = Depths()
        self._num_begun = 0  # steps
        self._num_resident = 0
        self._begun: tuple[ReadTogether[bool], Sequence[StagedBatch]] | None = None  # a plan, and its batch first
        self._failure: Exception | None = None  # of that plan
        self._is_full = self._is_told_full = False  # the known batches take all the memory that they may
        self._is_in_debt = False  # to the other ranks, by a step that was interrupted
        self._token = object()  # by which the caches know who announces batches to them
        weakref.finalize(self, _end_ahead, self._pools, self._token).atexit = False

    def progress(self, batches: Iterator[Any]) -> Any:
        """Train the next batch (forward, backward, update) and return the model's output.

        In evaluation mode, run its forward alone.

        Raises:
            StopIteration: a rank has no batch left, and all batches ahead have trained.
        """
        with self.step(batches) as batch:
            if self._model.training:
                self._optimizer.zero_grad()
            losses, output = self._model(batch)
            if self._model.training:
                torch.sum(losses, dim=0).backward()
                self._optimizer.step()
        return output

    def step(self, batches: Iterator[Any]) -> Any:
        """Return a context with the next batch, on the device: for a training loop of one's own.

        Run the model's forward and backward once in it. An iterator that will have more batches gives `Supply.NOT_YET`
        while it has none.

        Raises:
            StopIteration: as :meth:`progress`; or no batch is there yet, and all batches ahead have trained.
        """
        self._left.check()
        if torch.is_grad_enabled():  # an evaluation announces nothing, and keeps what another pipeline announced
            forgotten = [pool for pool in self._pools if pool.look_ahead_for(self._token)]
            if forgotten:
                self._window.forget(forgotten)
        try:
            self._advance(batches)
        except Exception as error:
            self._left.say(self._num_begun, error, must_wait=False)  # the others may be in the step already
            raise
        if not self._window:
            self._intake.reopen()
            self._inputs.step.end(is_ahead=False)
            raise StopIteration
        return self._step(batches)

    @property
    def carrier(self) -> Intake | None:
        """What takes numbers of a step along to the other ranks; None where nothing does, or data have ended."""
        return self._intake if self._intake.carries else None

    def detach(self) -> None:
        """Give the model's modules their own forwards back, and drop the batches ahead: they do not train."""
        self._join()
        self._failure = None
        if self._worker is not None:
            self._worker.failure = None
        self._window.clear()
        _end_ahead(self._pools, self._token)
        for pool in self._pools:
            pool.micro_batches = 1
        self._intake.forget()
        self._is_full = self._is_in_debt = False
        self._inputs.remove()

    def stats(self) -> LookAheadStats:
        """Return what the pipeline did so far."""
        stall_seconds = self._depths.stall_seconds + sum(pool.cache.counters.stall_seconds for pool in self._pools)
        uses_worker = self._worker is not None if self._trial is None else self._trial.uses_worker
        return self._depths.stats(self._depth.depth, self._known_bytes, stall_seconds, uses_worker)

    # -- the schedule

    @contextmanager
    def _step(self, batches: Iterator[Any]) -> Iterator[Any]:
        """One step. The batch leaves the window and trains, those after it become resident beside it."""
        started, trains, number = time.perf_counter(), torch.is_grad_enabled(), self._num_begun
        worker = self._worker if self._trial is None or self._trial.uses_worker else None
        staged = self._begin(trains, plans=trains and worker is None)
        is_given = is_whole = False
        try:
            self._window.take_first()
            if trains and worker is not None:
                self._start(worker)
            self._num_begun += 1
            is_given = True
            yield staged.on_device
            is_whole = True
        except (Exception, KeyboardInterrupt) as error:
            is_whole = is_given and self._inputs.step.is_forwarded and (self._inputs.backward.is_done or not trains)
            if is_given and not is_whole:
                self._left.say(number, error)
                self._left.explain(number, error)
            raise
        finally:
            try:
                self._inputs.step.end(is_ahead=trains and len(self._window) > 0)
            finally:  # an interrupt there pays, too: the other ranks count on it
                try:
                    if is_whole:
                        self._pay_debts(batches)
                finally:
                    stall_seconds = self._join()
                    if is_given:
                        staged.close()
                    else:
                        self._window.put_back(staged)  # for the next step
        if trains:
            step_seconds = time.perf_counter() - started
            self._depth.add(step_seconds, stall_seconds)
            if self._trial is not None:
                self._trial.add(step_seconds)
            self._depths.add(
                known=None if self._intake.is_over else self._window.num_known,
                resident=None if len(self._window) < self._depth.depth else self._num_resident,
            )

    def _advance(self, batches: Iterator[Any]) -> None:
        """Before a step: fill the window. At the first step with L batches, later with as many as the last one took."""
        self._join()  # a step whose end was interrupted
        self._intake.note_entered(self._window.newest_arriving)  # before it leaves that place
        if self._is_in_debt:
            self._pay_debts(batches)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self._worker is not None:
            self._worker.check()  # what failed beside the last step: that step was complete
        self._weigh()
        is_in = True
        while len(self._window) < self._lookahead + self._known_together:
            if not self._window.num_arriving:
                is_in = self._let_next_in(batches)
                if not is_in:
                    break
            with self._exchange:
                self._window.arrive()
            self._know()  # how much does it take?
            self._weigh()
        while is_in and self._window.num_arriving < _MOST_ARRIVING:
            is_in = self._let_next_in(batches)
        if self._window and torch.is_grad_enabled():
            self._know()
            self._window.first.make_resident(critical_path=True)

    def _know(self) -> None:
        """Tell the caches about new batches, once there are several or few others are known."""
        window = self._window
        is_due = window.num_unknown >= self._known_together or window.num_known <= self._prefetch + 1
        if torch.is_grad_enabled() and (is_due or self._intake.is_over):
            window.know(self._intake.is_over)

    def _begin(self, trains: bool, plans: bool) -> StagedBatch:
        """Hand out the inputs of the step's batch, the window's first."""
        staged = self._window.first
        staged.begin()
        if self._num_coming and trains:
            self._coming = self._window.coming(1, self._num_coming)
        if plans:
            self._plan_ahead(self._window.coming(1, self._depth.depth))
        self._inputs.backward.is_done = False
        self._inputs.step.begin(staged.inputs, trains)
        return staged

    def _start(self, worker: CacheWorker) -> None:
        """Begin to make the batches ahead resident, beside the training of this one."""
        for pool in self._pools:
            pool.cache.freeze_pins()  # plans must not depend on when the present batch is released
        worker.start(functools.partial(self._look_ahead, self._window.coming(0, self._depth.depth)))

    def _plan_ahead(self, coming: Sequence[StagedBatch]) -> None:
        """Make the next batches resident, in this thread. On a GPU, the plan of the first one that is not is only
        begun: `_join` reads its numbers behind the launch of this step's backward, when they have long been there."""
        if self._device.type != "cuda":
            self._look_ahead(coming)
            return
        self._num_resident = 0
        for number, staged in enumerate(coming):
            begun = staged.begin_resident(critical_path=False)
            if begun.is_waiting:
                self._begun = begun, coming[number:]
                return
            if not staged.end_resident(begun):
                return
            self._num_resident += 1

    def _look_ahead(self, coming: Sequence[StagedBatch], num_before: int = 0) -> None:
        """Make the next batches resident, in order, as many as fit, after `num_before` others."""
        self._num_resident = num_before
        for staged in self._coming:
            if not staged.bring_nearer():
                break
        for staged in coming:
            if self._num_resident and self._may_stop and self._worker is not None and self._worker.is_awaited:
                break  # the next step waits for this thread, and needs the first batch only
            if not staged.make_resident(critical_path=False):
                break
            self._num_resident += 1

    def _pay_debts(self, batches: Iterator[Any]) -> None:
        """Do what this step owes the other ranks, even if its body failed after the backward."""
        self._is_in_debt = True
        with self._exchange:
            self._window.send()
        self._offer(batches)
        self._is_in_debt = False

    def _join(self) -> float:
        """Wait for the work beside the step, and end the plan that was begun; return the seconds waited. What fails is
        raised before the next step, as this one is complete."""
        begun, self._begun = self._begun, None
        if begun is not None:
            plan, (staged, *others) = begun
            try:
                if staged.end_resident(plan):
                    self._look_ahead(others, self._num_resident + 1)
            except Exception as error:
                self._failure = error
        if self._worker is None:
            return 0.0
        try:
            stall_seconds = self._worker.join()
        finally:
            for pool in self._pools:
                pool.cache.unfreeze_pins()
        self._depths.stall_seconds += stall_seconds
        return stall_seconds

    # -- batches come in

    def _offer(self, batches: Iterator[Any]) -> None:
        """Take the next batch from the iterator, and tell the other ranks."""
        self._intake.offer(batches, self._is_full, self._depth.wish)

    def _let_next_in(self, batches: Iterator[Any]) -> bool:
        """Let the next batch in if every rank has one; return False if not now, or never."""
        self._offer(batches)
        is_in = self._intake.enter(self._let_in)
        self._depth.agree(self._intake.wish)
        return is_in

    def _let_in(self, batch: Any, announced: Any, told: Told) -> None:
        with self._exchange:
            self._window.add(StagedBatch(batch, announced, self._device, self._inputs, self._streams, told))

    def _weigh(self) -> None:
        """Decide if there is memory to know more batches."""
        known_bytes, window = self._known_bytes, self._window
        knows_most = any(pool.knows_most for pool in self._pools)
        is_full = knows_most or known_bytes >= self._max_known_bytes
        self._is_full = is_full and len(window) > self._prefetch + 1
        self._depths.most_known_bytes = max(self._depths.most_known_bytes, known_bytes)
        if self._is_full and not self._is_told_full and len(window) < self._lookahead:
            self._is_told_full = True
            why, larger = f"they take {size(known_bytes)}, and max_known_bytes is {size(self._max_known_bytes)}", ""
            if knows_most:
                why = "no more uses of rows can be told apart in one pool"
            else:
                larger = ", or a larger max_known_bytes,"
            _log.warning(
                "%d of lookahead=%d batches are known ahead: %s. Smaller batches or more ranks%s let more be known; a "
                "smaller lookahead asks for no more",
                *(len(window), self._lookahead, why, larger),
            )

    @property
    def _known_bytes(self) -> int:
        return self._window.known_bytes + sum(pool.known_bytes for pool in self._pools)


def _end_ahead(pools: list[CachedTableBatchedEmbeddings], token: object) -> None:
    for pool in pools:
        pool.end_ahead_of(token)


@dataclass(frozen=True)
class LookAheadStats:
    """Counts of what a pipeline did on this rank.

    >>> depths = Depths()
    >>> depths.add(known=64, resident=1)
    >>> depths.stats(prefetch_depth=1, known_bytes=2**20, stall_seconds=0.1, uses_worker=True).lookahead_min
    64

    Attributes:
        steps: batches trained.
        lookahead_min, lookahead_mean: batches known beyond the one in training, while there was more data; None without
            such a step.
        prefetch_min, prefetch_mean: batches resident beyond the one in training, while there were enough; None without
            such a step.
        prefetch_depth: batches that the pipeline now holds where they fit; the same on all ranks.
        known_bytes, max_known_bytes: memory of the batches that are known and not trained, now and at most, in bytes.
        stall_seconds: time that steps waited for rows.
        uses_worker: a thread beside the training plans now.
    """

    steps: int
    lookahead_min: int | None
    lookahead_mean: float | None
    prefetch_min: int | None
    prefetch_mean: float | None
    prefetch_depth: int
    known_bytes: int
    max_known_bytes: int
    stall_seconds: float
    uses_worker: bool

    def by_step(self, micro_batches: int) -> LookAheadStats:
        """Return the counts of a training whose steps have so many batches each."""
        depths: dict[str, Any] = {
            name: None if value is None else value / micro_batches if name.endswith("mean") else value // micro_batches
            for name in ("lookahead_min", "lookahead_mean", "prefetch_min", "prefetch_mean", "prefetch_depth")
            for value in [getattr(self, name)]
        }
        return replace(self, steps=self.steps // micro_batches, **depths)


@dataclass
class _Depth:
    least: int | None = None
    count: int = 0
    total: int = 0

    def add(self, depth: int | None) -> None:
        if depth is not None:
            self.least = depth if self.least is None else min(depth, self.least)
            self.count, self.total = self.count + 1, self.total + depth

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class Depths:
    """Totals over the steps so far."""

    steps: int = 0
    most_known_bytes: int = 0
    stall_seconds: float = 0.0
    _known: _Depth = field(default_factory=_Depth)
    _resident: _Depth = field(default_factory=_Depth)

    def add(self, known: int | None, resident: int | None) -> None:
        """Count a step; a depth that only the end of the data limits is None."""
        self.steps += 1
        self._known.add(known)
        self._resident.add(resident)

    def stats(self, prefetch_depth: int, known_bytes: int, stall_seconds: float, uses_worker: bool) -> LookAheadStats:
        """Return the totals; the arguments are values of now."""
        return LookAheadStats(
            steps=self.steps,
            lookahead_min=self._known.least,
            lookahead_mean=self._known.mean,
            prefetch_min=self._resident.least,
            prefetch_mean=self._resident.mean,
            prefetch_depth=prefetch_depth,
            known_bytes=known_bytes,
            max_known_bytes=self.most_known_bytes,
            stall_seconds=stall_seconds,
            uses_worker=uses_worker,
        )
