"""What the ranks decide together: whether a next batch enters, and when uneven data ends.

A step of a sharded model is collective, so a rank that has no batch, or whose input failed, must not leave the others
waiting in it. All decisions are one small all-reduce (MIN).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.errors import DataError

T = TypeVar("T")


class Supply(IntEnum):
    """What a rank can say about its next batch. The ranks agree on the least of them."""

    FAILED = 0  #: its iterator raised
    ENDED = 1  #: its iterator is exhausted
    FULL = 2  #: it has a batch, but no room for it now
    READY = 3  #: it has a batch, and room for it


class Agreement:
    """The ranks' common decision about the next batch, without a wait where training waits.

    Collective: every rank calls `start` and `result` in turn, in the same order among its other collectives. Any amount
    of work may stand between the two. With one rank, or without a process group, nothing is communicated.

    Args:
        device: of the rank. The all-reduce runs in host memory where the group can do that (gloo, or
            "cpu:gloo,cuda:nccl"). With NCCL alone it runs on the GPU, where it comes after the collectives that the
            training has queued: `result` waits for those, too.
        group: the ranks; None is all of them.
    """

    def __init__(self, device: torch.device | str, group: dist.ProcessGroup | None = None) -> None:
        self._minimum = _Minimum(torch.device(device), group)
        self._failed = self._minimum.nobody
        self.wish = 0

    def start(self, state: int, wish: int = 0) -> None:
        """Tells the others this rank's `Supply`, and a number of which the largest one will count; does not wait."""
        failed = state == Supply.FAILED
        self._minimum.start(int(state), self._minimum.rank if failed else self._minimum.nobody, -wish)

    def result(self) -> Supply:
        """The least `Supply` of all ranks: the same on every rank, and so is `wish`, the largest one. Waits until every
        rank has called `start`."""
        state, self._failed, least = self._minimum.result()
        self.wish = -least
        return Supply(state)

    def failure(self) -> DataError:
        """What a rank raises whose own input is fine, after `Supply.FAILED`: names the first rank that failed."""
        return _failure_of(self._failed)


def shortest(batches: Iterable[T], device: torch.device | str, group: dist.ProcessGroup | None = None) -> Iterator[T]:
    """This rank's batches for as long as every rank has one: for training without a pipeline.

    No batch is taken before the loop asks for it, so the state of the input is that of the batch in training. Where a
    rank ends first, the others have taken one batch more than they yield. Ranks that leave the loop early must leave it
    all together.

    Args:
        batches: this rank's; its own `next` may raise.
        device: see `Agreement`.
        group: see `Agreement`.

    Raises:
        DataError: another rank's input failed; that rank raises its own exception. All ranks yielded the same number.
    """
    minimum = _Minimum(torch.device(device), group)
    source = _Source(batches)
    while True:
        batch = source.take()
        minimum.start(int(batch is not _NONE), minimum.nobody if source.error is None else minimum.rank)
        everybody_has_one, failed, _ = minimum.result()
        source.check(failed, minimum.nobody)
        if not everybody_has_one:
            return
        yield batch


def longest(
    batches: Iterable[T],
    empty: Callable[[T | None], T],
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
) -> Iterator[tuple[T, bool]]:
    """Goes on until no rank has a batch: for evaluation, where every sample counts and nothing may hang.

    Args:
        batches: this rank's; its own `next` may raise.
        empty: makes the stand-in of a rank whose batches are over, from its last one, or from None where it had none.
            `empty_like`, for example. Called once.
        device: see `Agreement`.
        group: see `Agreement`.

    Yields:
        Pairs (batch, is_real), as many on every rank. What the model says of a stand-in is to be ignored.

    Raises:
        DataError: another rank's input (or its `empty`) failed; that rank raises its own exception.
    """
    minimum = _Minimum(torch.device(device), group)
    source = _Source(batches)
    last: T | None = None
    stand_in: Any = _NONE
    while True:
        batch = source.take()
        is_real = batch is not _NONE
        over = source.error is None and not is_real
        if over and stand_in is _NONE:
            # Before the others are told, so that they do not go into the step without this rank.
            stand_in = source.attempt(empty, last)
        minimum.start(int(over), minimum.nobody if source.error is None else minimum.rank)
        everybody_is_over, failed, _ = minimum.result()
        if everybody_is_over:  # nobody needs a stand-in, not even one that could not be made
            return
        source.check(failed, minimum.nobody)
        last = batch if is_real else last
        yield (batch if is_real else stand_in), is_real


def empty_like(batch: Any) -> Any:
    """A stand-in for a batch where a rank has none: one sample, its numbers zero and its bags empty.

    One sample and not none, because not all layers run on none: in TorchRec 1.8 a sharded ``DLRM`` does, ``DLRM_DCN``
    and an unsharded ``EmbeddingBagCollection`` do not.

    Args:
        batch: a tensor [B, ...], a KeyedJaggedTensor, or a dataclass, (named) tuple, list or dict of those; other plain
            values in it (None, text, numbers) stay as they are.

    Raises:
        DataError: something else is in the batch, or there is none: this rank never had one.
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
        return _empty_bags(batch)
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


def _empty_bags(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    if features.variable_stride_per_key():
        raise DataError(
            "got a KeyedJaggedTensor with another number of samples per feature, needed the same for all; write a "
            "function of your own that makes a batch without content, and pass it as `empty`"
        )
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values().new_empty((0, *features.values().shape[1:])),
        lengths=features.lengths().new_zeros(len(features.keys())),
        weights=None if weights is None else weights.new_empty((0, *weights.shape[1:])),
    )


_NONE: Any = object()


class _Source:
    """A rank's iterator, whose exceptions are kept until the other ranks know."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.error: Exception | None = None
        self._iterator: Iterator[Any] = self.attempt(iter, batches)
        self._is_over = self.error is not None

    def take(self) -> Any:
        """The next batch; `_NONE` at the end and after an exception. An iterator that has ended is left alone."""
        batch = _NONE if self._is_over else self.attempt(next, self._iterator, _NONE)
        self._is_over = batch is _NONE
        return batch

    def attempt(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns, or `_NONE` and the exception in `error`."""
        try:
            return function(*arguments)
        except Exception as error:
            self.error = error
            return _NONE

    def check(self, failed: int, nobody: int) -> None:
        """Raises where a rank failed: this rank's own exception if it has one."""
        if self.error is not None:
            raise self.error
        if failed != nobody:
            raise _failure_of(failed)


class _Minimum:
    """Elementwise minimum of three small integers over all ranks; asynchronous."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        ranked = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if ranked else 0
        self.nobody = dist.get_world_size() if ranked else 1  # above every rank
        self._group = group
        self._alone = not ranked or dist.get_world_size(group) == 1
        self._values = torch.empty(3, dtype=torch.int64)
        self._wait: Callable[[], Any] | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and not self._alone and "cpu:" not in dist.get_backend_config(group):
            # A stream of its own: the host then waits for this all-reduce, not for the training step in flight.
            self._stream = torch.cuda.Stream(device)
            self._values = self._values.pin_memory()
            with torch.cuda.stream(self._stream):
                self._on_device = torch.empty(3, dtype=torch.int64, device=device)

    def start(self, *values: int) -> None:
        """Up to three numbers; the others are 0."""
        assert self._wait is None, "result() of the round before comes first"
        numbers = [*values, 0, 0][:3]
        if self._stream is None:
            for place, value in enumerate(numbers):
                self._values[place] = value
            work = None if self._alone else dist.all_reduce(self._values, dist.ReduceOp.MIN, self._group, async_op=True)
            self._wait = work.wait if work is not None else _at_once
            return
        with torch.cuda.stream(self._stream):
            for place, value in enumerate(numbers):
                self._on_device[place].fill_(value)
            dist.all_reduce(self._on_device, dist.ReduceOp.MIN, self._group, async_op=True).wait()
            self._values.copy_(self._on_device, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        self._wait = done.synchronize

    def result(self) -> tuple[int, int, int]:
        assert self._wait is not None, "start() comes first"
        wait, self._wait = self._wait, None
        wait()
        first, second, third = self._values.tolist()
        return first, second, third


def _at_once() -> None:
    """Nothing to wait for."""


def _failure_of(rank: int) -> DataError:
    return DataError(
        f"the input of rank {rank} failed, so no rank goes on: a step needs a batch of every rank. That rank raises "
        "the error itself; look for it in its output"
    )
