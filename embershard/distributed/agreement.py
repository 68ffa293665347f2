"""Decisions that the ranks make together: whether a next batch enters, when uneven data end, and what a rank trains
that has no batch left.

A step of a sharded model is collective: a rank that has no batch, or whose input failed, must not leave the others
waiting in it. Every decision is one small all-reduce, with which other numbers travel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.distributed.traffic import counted_by_hand, ring_bytes
from embershard.errors import DataError

T = TypeVar("T")


class Supply(IntEnum):
    """The state of a rank's next batch. The ranks agree on the least of their states."""

    FAILED = 0  #: its iterator raised
    ENDED = 1  #: its iterator is exhausted
    NOT_YET = 2  #: it has none now, and may get one
    FULL = 3  #: it has a batch, but no room for it now
    READY = 4  #: it has a batch, and room for it


class Agreement:
    """The ranks' common decision about the next batch; it does not wait for the training step.

    Collective: every rank calls `start` and `result` in turn, in the same order among its other collectives. Any amount
    of work may stand between the two. With one rank, or without a process group, nothing is communicated.

    Args:
        device: of the rank. The all-reduce runs in host memory where the group supports that (gloo, or
            "cpu:gloo,cuda:nccl"). With NCCL alone it runs on the GPU, behind the collectives that training has queued:
            `result` waits for those, too.
        group: the ranks; None means all of them.
        num_told: numbers that every rank tells the others with each decision.

    Attributes:
        wish: the largest number that a rank gave to `start`; the same on every rank after `result`.
        told: the numbers of each rank, float64 [W, num_told]; the same on every rank after `result`.
    """

    def __init__(self, device: torch.device | str, group: dist.ProcessGroup | None = None, num_told: int = 0) -> None:
        device, ranked = torch.device(device), dist.is_available() and dist.is_initialized()
        self.wish, self.told = 0, np.empty((0, num_told))
        self._rank = dist.get_rank() if ranked else 0
        self._nobody = dist.get_world_size() if ranked else 1  # above every rank
        self._failed = self._nobody
        self._group = group
        self._size = dist.get_world_size(group) if ranked else 1
        self._num_told = num_told
        self._all = torch.zeros(self._size, 3 + num_told, dtype=torch.float64)  # each rank adds its own to zeros
        self._place = dist.get_rank(group) if ranked else 0
        self._wait: Callable[[], Any] | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and self._size > 1 and "cpu:" not in dist.get_backend_config(group):
            # A stream of its own: the host then waits for this all-reduce, not for the training step in flight.
            self._stream = torch.cuda.Stream(device)
            self._all = self._all.pin_memory()

    def start(self, state: int, wish: int = 0, tell: Sequence[float] = ()) -> None:
        """Tell the other ranks this rank's `Supply`, its wish, and `num_told` numbers. Does not wait."""
        assert self._wait is None, "result() of the round before comes first"
        assert len(tell) == self._num_told, f"{len(tell)} numbers, and the ranks agreed on {self._num_told}"
        own = [int(state), self._rank if state == Supply.FAILED else self._nobody, wish, *tell]
        numbers = self._all.numpy()
        numbers[:] = 0.0
        numbers[self._place] = own
        if self._size == 1:
            self._wait = lambda: None
            return
        if self._stream is None:  # half of the host's time of an all-gather
            with counted_by_hand("other", ring_bytes(self._all, self._size)):
                group: Any = self._group or dist.group.WORLD
                self._wait = group.allreduce([self._all]).wait  # 15 us less than by `dist.all_reduce`
            return
        with torch.cuda.stream(self._stream):
            on_device = self._all.to(self._stream.device, non_blocking=True)
            dist.all_reduce(on_device, group=self._group, async_op=True).wait()
            self._all.copy_(on_device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        self._wait = done.synchronize

    def result(self) -> Supply:
        """Wait until every rank has called `start`; return the least `Supply`, the same on every rank."""
        assert self._wait is not None, "start() comes first"
        self._wait()
        states, failed, wishes = self._all[:, :3].t().tolist()
        self._failed, self.wish = int(min(failed)), int(max(wishes))
        self.told, self._wait = self._all.numpy()[:, 3:].copy(), None  # last: an interrupt leaves it open
        return Supply(int(min(states)))

    @property
    def is_open(self) -> bool:
        """True from `start` until `result` has returned."""
        return self._wait is not None

    def failure(self) -> DataError:
        """Return the error for ranks whose own input is fine, after `Supply.FAILED`; it names the first failed rank."""
        return DataError(
            f"the input of rank {self._failed} failed, so all ranks stop: a step needs a batch of every rank. That "
            "rank raises the error itself; look for it in its output"
        )


def shortest(batches: Iterable[T], device: torch.device | str, group: dist.ProcessGroup | None = None) -> Iterator[T]:
    """Yield this rank's batches for as long as every rank has one: for training without a pipeline.

    No batch is taken before the loop asks for it, so the state of the input is that of the batch in training. When a
    rank ends first, the others have taken one batch more than they yield. All ranks must leave the loop together.
    `device` and `group` are those of an `Agreement`.

    Raises:
        DataError: another rank's input failed; that rank raises its own exception. All ranks yielded the same number.

    >>> list(shortest(range(3), "cpu"))  # one rank alone gets all its batches
    [0, 1, 2]
    """
    agreement, source = Agreement(device, group), _Source(batches)
    while True:
        batch = source.take()
        agreement.start(source.supply(batch))
        decision = agreement.result()
        if decision == Supply.FAILED:
            raise agreement.failure() if source.error is None else source.error
        if decision == Supply.ENDED:
            return
        yield batch


def longest(
    batches: Iterable[T],
    empty: Callable[[T | None], T],
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[T, bool]]:
    """Yield pairs (batch, is_real) until no rank has a batch: for evaluation, where every sample counts.

    A rank whose batches are over yields a stand-in, so that all ranks yield equally many; ignore the model's
    predictions for it. `empty`, for example `empty_like`, makes it once from the rank's last batch, or from None if the
    rank had no batch. `device` and `group` are those of an `Agreement`.

    Raises:
        DataError: another rank's input (or its `empty`) failed; that rank raises its own exception.

    >>> list(longest(range(2), lambda last: -1, "cpu"))
    [(0, True), (1, True)]
    """
    agreement, source = Agreement(device, group), _Source(batches)
    last: T | None = None
    stand_in: Any = _NONE
    while True:
        batch = source.take()
        supply = source.supply(batch)
        if supply == Supply.ENDED and stand_in is _NONE:
            # Before the agreement: an error here must keep the other ranks from entering the step.
            stand_in = source.attempt(empty, last)
        is_over = supply == Supply.ENDED
        agreement.start(Supply.READY if source.error is None else Supply.FAILED, wish=int(not is_over))
        decision = agreement.result()
        if not agreement.wish:  # all are over: no rank needs a stand-in, not even one that could not be made
            return
        if decision == Supply.FAILED:
            raise agreement.failure() if source.error is None else source.error
        last = last if is_over else batch
        yield (stand_in if is_over else batch), not is_over


_NONE: Any = object()


class _Source:
    """A rank's iterator. Keeps its exception until the other ranks know of it."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.error: Exception | None = None
        self._iterator: Iterator[Any] = self.attempt(iter, batches)
        self._is_over = self.error is not None

    def take(self) -> Any:
        """Return the next batch; `_NONE` at the end and after an exception. Does not ask an ended iterator again."""
        batch = _NONE if self._is_over else self.attempt(next, self._iterator, _NONE)
        self._is_over = batch is _NONE
        return batch

    def supply(self, batch: Any) -> Supply:
        """Return the state of this rank after `take` returned `batch`."""
        if self.error is not None:
            return Supply.FAILED
        return Supply.ENDED if batch is _NONE else Supply.READY

    def attempt(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the function's value, or `_NONE` with its exception in `error`."""
        try:
            return function(*arguments)
        except Exception as error:
            self.error = error
            return _NONE


def empty_like(batch: Any) -> Any:
    """Return a stand-in for a batch: one sample, its numbers zero and its bags empty.

    It has a sample because not all layers run on none: TorchRec's `DLRM_DCN` does not, nor an unsharded
    `EmbeddingBagCollection` before 1.9.

    Args:
        batch: a tensor [B, ...], a KeyedJaggedTensor, or a dataclass, (named) tuple, list or dict of those. Other
            plain values in it (None, text, numbers) stay as they are.

    Raises:
        DataError: the batch holds something else, or it is None: this rank never had one.

    >>> empty_like((torch.ones(4, 2), "train"))
    (tensor([[0., 0.]]), 'train')
    """
    if batch is None:
        raise DataError(
            "got no batch to make a stand-in from: this rank had none at all. Give every rank at least one, or pass as "
            "`empty` a function that makes a batch of one sample without ids from None"
        )
    return _without_content(batch)


def _without_content(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.new_zeros((1, *batch.shape[1:])) if batch.dim() else torch.zeros_like(batch)
    if isinstance(batch, KeyedJaggedTensor):
        if batch.variable_stride_per_key():
            raise DataError(
                "got a KeyedJaggedTensor with another number of samples per feature, needed the same for all; write a "
                "function of your own that makes a batch without content, and pass it as `empty`"
            )
        values, weights = batch.values(), batch.weights_or_none()
        return KeyedJaggedTensor(
            keys=batch.keys(),
            values=values.new_empty((0, *values.shape[1:])),
            lengths=batch.lengths().new_zeros(len(batch.keys())),
            weights=None if weights is None else weights.new_empty((0, *weights.shape[1:])),
        )
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: _without_content(getattr(batch, name)) for name in fields})
    if isinstance(batch, dict):
        return {key: _without_content(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(_without_content, batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map(_without_content, batch))
    if batch is None or isinstance(batch, str | bytes | int | float):
        return batch
    raise DataError(
        f"got a {type(batch).__name__} in a batch, needed tensors, KeyedJaggedTensors, or dataclasses, tuples, lists "
        "and dicts of them; write a function of your own that makes a batch without content, and pass it as `empty`"
    )
