"""The look-ahead train pipeline: the ids of many batches are known, the rows of the next few are on the device.

    window:   [ in training | resident: the next P | known: the next L, ids only ] <- two arriving <- batches

A batch goes through these stages, several batches at a time, each in another one:

    arrive    the ranks agree that there is a next batch, and exchange its ids (input all-to-all)
    know      each cache learns when its rows are used next, and evicts accordingly
    resident  the missing rows are brought in, into slots that no resident batch uses
    train     forward, backward, update; its slots may be given away from now on

Knowing costs a few bytes per id; holding costs slots. That is why there are two depths.
"""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from embershard.errors import ConfigError
from embershard.pipeline.intake import Intake
from embershard.pipeline.left_steps import BackwardWatch, LeftSteps
from embershard.pipeline.pipelined_forward import Features, OpenStep, PipelinedForward, pipelined_forwards
from embershard.pipeline.prefetch_depth import PrefetchDepth
from embershard.pipeline.staged_batch import StagedBatch
from embershard.pipeline.stats import Depths, LookAheadStats
from embershard.pipeline.streams import Streams
from embershard.pipeline.worker import CacheWorker
from embershard.sharding.torchrec import cached_embeddings
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings

#: One whose ids were sent in the step before, and one whose ids will be sent in this one. Ids are sent behind the
#: collectives of a step's backward: with one batch on its way, the next step would begin by waiting for those.
_MOST_ARRIVING = 2


class LookAheadPipeline:
    """Trains a sharded model with its embedding rows brought in ahead of time. Used as TorchRec's train pipelines are.

    The model returns ``(losses, output)``. All ranks must call the same methods in the same order; they stop together
    when the first one has no batch left. Evaluation, checkpoints and flushes between two steps are safe: outside of a
    step the model's forward is its own.

    Args:
        model: a ``DistributedModelParallel``.
        optimizer: of the dense parameters; the tables' optimizer is fused into their backward.
        device: of this rank.
        lookahead: L, batches whose ids are known beyond the one in training.
        prefetch: P, the most batches whose rows are on the device beyond the one in training; fewer where they do not
            fit and, where a thread plans beside the training, as few as keep the steps from waiting.
        features: gives each sharded module's input, by name, from a batch; without it the model is traced.
        max_known_bytes: known batches may take this much memory; fewer are known where they would take more.
        worker: plan and copy rows in a thread beside the training. Default: on a CPU (on a GPU they have streams).

    Raises:
        ConfigError: not 1 <= P <= L.
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
        max_known_bytes: int = 2**30,
        worker: bool | None = None,
    ) -> None:
        if not 1 <= prefetch <= lookahead:
            raise ConfigError(f"got lookahead={lookahead}, prefetch={prefetch}; needed 1 <= prefetch <= lookahead")
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._lookahead, self._prefetch = lookahead, prefetch
        self._features, self._max_known_bytes = features, max_known_bytes
        self._intake = Intake(self._device, self._check)
        self._streams = Streams(self._device)
        self._pools = list(cached_embeddings(model))
        has_worker = self._device.type == "cpu" if worker is None else worker
        self._worker = CacheWorker() if has_worker else None
        self._forwards: list[PipelinedForward] | None = None
        self._open = OpenStep()
        self._depth = PrefetchDepth(prefetch, is_adaptive=has_worker)
        self._left = LeftSteps()
        self._hook: Any = None
        self._backward = BackwardWatch()
        self._num_begun = 0
        self._window: deque[StagedBatch] = deque()
        self._arriving: deque[StagedBatch] = deque()
        self._unknown: deque[StagedBatch] = deque()  # those in the window that the caches do not know yet
        self._is_full = False
        self._failure: Exception | None = None  # of the thread beside a step that was otherwise complete
        self._num_resident = 0
        self._is_due = False  # the step in training is over; what is not needed for the next one can wait
        self._stall_seconds = 0.0
        self._depths = Depths()
        self._token = object()  # by which the caches know who announces batches to them
        weakref.finalize(self, _end_ahead, self._pools, self._token).atexit = False

    def progress(self, batches: Iterator[Any]) -> Any:
        """One step on the next batch: forward, backward, update. Returns the model's output.

        In evaluation mode it is the forward alone.

        Raises:
            StopIteration: a rank has no batch left, and all that were under way have trained.
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
        """For a training loop of one's own: a context with the next batch, on the device. In it, run the model's
        forward and backward once.

        Raises:
            StopIteration: as :meth:`progress`.
        """
        self._left.check()
        if torch.is_grad_enabled():  # an evaluation announces nothing: what a pipeline that trains announced stays
            for pool in self._pools:
                pool.look_ahead_for(self._token)
        try:
            self._advance(batches)
        except Exception as error:
            self._left.say(self._num_begun, error, must_wait=False)  # the others may be in the step already
            raise
        if not self._window:
            self._intake.reopen()
            self._open.end(is_ahead=False)
            raise StopIteration
        return self._step(batches)

    def detach(self) -> None:
        """Give the model's modules their own forwards back, and forget what was ahead; those batches do not train."""
        self._finish_ahead()
        for staged in [*self._window, *self._arriving]:
            staged.close()
        _end_ahead(self._pools, self._token)
        self._window.clear()
        self._unknown.clear()
        self._arriving.clear()
        self._intake.forget()
        self._is_full, self._failure = False, None
        for forward in self._forwards or []:
            forward.remove()
        self._forwards = None
        self._open.end(is_ahead=False)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def stats(self) -> LookAheadStats:
        """What the pipeline did so far."""
        stall_seconds = self._stall_seconds + sum(pool.cache.stall_seconds for pool in self._pools)
        return self._depths.stats(self._depth.depth, self._known_bytes, stall_seconds)

    @contextmanager
    def _step(self, batches: Iterator[Any]) -> Iterator[Any]:
        started, trains, number = time.perf_counter(), torch.is_grad_enabled(), self._num_begun
        staged = self._begin(trains)
        is_given = is_whole = False
        try:
            if trains and self._worker is not None:
                self._start(self._worker, self._coming())
            self._num_begun += 1
            is_given = True
            yield staged.on_device
            is_whole = True
        except (Exception, KeyboardInterrupt) as error:
            is_whole = is_given and self._open.is_forwarded and (self._backward.is_done or not trains)
            if is_given and not is_whole:
                self._left.say(number, error)
                self._left.explain(number, error)
            raise
        finally:
            self._open.end(is_ahead=trains and bool(self._window))
            try:
                if is_whole:
                    self._pay_debts(batches)
            finally:
                stall_seconds = self._finish_ahead()
                if is_given:
                    staged.close()
                else:
                    self._window.appendleft(staged)  # for the next step
        if trains:
            self._depth.add(time.perf_counter() - started, stall_seconds)
            self._depths.add(
                known=None if self._intake.is_over else len(self._window),
                resident=None if len(self._window) < self._depth.depth else self._num_resident,
            )

    def _begin(self, trains: bool) -> StagedBatch:
        """The next batch leaves the window, and its inputs are handed out. When this fails, no batch has left it."""
        staged = self._window[0]
        staged.begin()
        if trains and self._worker is None:
            self._look_ahead(self._coming(1))
        self._backward.is_done = False
        self._open.begin(staged.inputs, trains)
        self._window.popleft()
        if self._unknown and self._unknown[0] is staged:
            self._unknown.popleft()  # only training concerns the caches
        return staged

    def _coming(self, first: int = 0) -> list[StagedBatch]:
        """The batches that are to be resident, from place ``first`` of the window on."""
        return list(itertools.islice(self._window, first, first + self._depth.depth))

    def _pay_debts(self, batches: Iterator[Any]) -> None:
        """What a step owes the other ranks, whatever its body did after its backward."""
        for arriving in self._arriving:
            arriving.send()
        self._offer(batches)

    def _advance(self, batches: Iterator[Any]) -> None:
        """Fill the window: all of it at the first step, later what one step took."""
        self._finish_ahead()  # of a step whose end was interrupted
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self._weigh()
        admitted = True
        while len(self._window) <= self._lookahead:
            if not self._arriving:
                admitted = self._admit(batches)
                if not admitted:
                    break
            self._arrive()
            if len(self._unknown) > 1 and torch.is_grad_enabled():  # many, at the first step: how much do they take?
                self._know()
            self._weigh()
        while admitted and len(self._arriving) < _MOST_ARRIVING:
            admitted = self._admit(batches)
        if self._window and torch.is_grad_enabled():
            self._know()
            self._window[0].make_resident(critical_path=True)
        self._weigh()

    def _weigh(self) -> None:
        """Whether what is known leaves memory for more."""
        known_bytes = self._known_bytes
        self._is_full = known_bytes >= self._max_known_bytes and len(self._window) > self._prefetch + 1
        self._depths.most_known_bytes = max(self._depths.most_known_bytes, known_bytes)

    def _start(self, worker: CacheWorker, coming: Sequence[StagedBatch]) -> None:
        """Begin with what the batches ahead need, beside the training of the present one."""
        for pool in self._pools:
            pool.cache.freeze_pins()  # whether the present batch is through when a plan is made must not matter
        worker.start(functools.partial(self._look_ahead, coming))

    def _finish_ahead(self) -> float:
        """How long the step waited for it, in seconds. What failed is raised by the next step: this one is complete."""
        if self._worker is None:
            return 0.0
        self._is_due = self._depth.is_adaptive
        stall_seconds = 0.0
        try:
            stall_seconds = self._worker.join()
        except Exception as error:
            self._failure = error
        finally:
            self._is_due = False
            for pool in self._pools:
                pool.cache.unfreeze_pins()
        self._stall_seconds += stall_seconds
        return stall_seconds

    def _look_ahead(self, coming: Sequence[StagedBatch]) -> None:
        """Tell the caches what arrived, and bring in the rows of the next batches, in order, as far as they fit."""
        self._know()
        self._num_resident = 0
        for staged in coming:
            if self._num_resident and self._is_due:
                break  # the next step waits for this; later batches can come in beside it
            if not staged.make_resident(critical_path=False):
                break
            self._num_resident += 1

    # -- the stages

    def _offer(self, batches: Iterator[Any]) -> None:
        """Take the next batch, and tell the other ranks."""
        if self._arriving:
            self._intake.has_let_in(self._arriving[-1].batch)
        self._intake.offer(batches, self._is_full, self._depth.wish)

    def _admit(self, batches: Iterator[Any]) -> bool:
        """Let the next batch in if all ranks have one; False if not now, or never."""
        self._offer(batches)
        is_in = self._intake.admit(self._let_in)
        self._depth.agree(self._intake.wish)
        return is_in

    def _let_in(self, batch: Any) -> None:
        assert self._forwards is not None, "a batch that was not checked"
        self._arriving.append(StagedBatch(batch, self._device, self._forwards, self._streams))

    def _check(self, batch: Any) -> None:
        """Whatever this rank may find wrong with a batch, it must find before the others count on it."""
        if self._forwards is None:
            self._forwards = pipelined_forwards(self._model, batch, self._open, self._features)
            watch = self._backward  # not self: the model would keep the pipeline alive
            self._hook = self._model.register_forward_hook(lambda *called: watch.follow(called[-1]))
        for forward in self._forwards:
            forward.check(batch)

    def _arrive(self) -> None:
        """The ids of the batch that was first under way are here."""
        staged = self._arriving[0]  # it leaves when it is complete: an exception loses no batch
        staged.receive()
        self._window.append(self._arriving.popleft())
        self._unknown.append(staged)

    def _know(self) -> None:
        """The caches learn what arrived."""
        while self._unknown:
            self._unknown.popleft().know()

    @property
    def _known_bytes(self) -> int:
        chains = sum(pool.cache.chain_bytes for pool in self._pools)
        return chains + sum(staged.known_bytes for staged in self._window)


def _end_ahead(pools: list[CachedTableBatchedEmbeddings], token: object) -> None:
    for pool in pools:
        pool.end_ahead_of(token)
