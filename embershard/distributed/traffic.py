"""Counts the bytes that a rank sends to the others, by kind, at the operations of torch.distributed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embershard.distributed.sent_bytes import SentBytes


class _Counter:
    """Totals of this process. Whole numbers where the operation has no ring: those are floats."""

    def __init__(self) -> None:
        self.library: torch.library.Library | None = None
        self.totals = dict.fromkeys((field.name for field in dataclasses.fields(SentBytes)), 0.0)

    def add(self, name: str, num_bytes: float, is_integer: bool) -> None:
        self.totals[_only.get() or _kind(name, is_integer)] += num_bytes


_counter = _Counter()
_only: ContextVar[str | None] = ContextVar("only", default=None)  # of a thread: another one sends beside the training


def count_sent_bytes() -> None:
    """Count from now on, until the process ends. A second call does nothing.

    Every backend's operations pass torch's dispatcher, DDP's in C++ too. A kernel at its autograd key reads the sizes
    and calls the operation: it copies nothing, and does not wait for it. That takes about 23 microseconds of CPU time
    per operation (gloo, 2 ranks, Intel Xeon, a scratch script). Operations on tensors of `torch.inference_mode` have no
    such key, and are not counted.
    """
    if _counter.library is None:
        _counter.library = torch.library.Library("c10d", "IMPL")
        for name, sent in _SENT.items():
            _counter.library.impl(name, _counting(name, sent), "Autograd", with_keyset=True)


def sent_bytes() -> SentBytes:
    """Return what this rank sent since counting began."""
    return SentBytes(**_counter.totals)


@contextmanager
def counted_as(kind: str) -> Iterator[None]:
    """Return a context, or a decorator of a function, of which all that it sends is of one kind of `SentBytes`."""
    before = _only.set(kind)
    try:
        yield
    finally:
        _only.reset(before)


def counted_by_hand(kind: str, num_bytes: float) -> AbstractContextManager[Any]:
    """Return a context of one operation that the caller counts, as so many bytes of a kind: its tensors have no
    gradients. A kernel would take 40 microseconds to count it (gloo, 2 ranks, Intel Xeon)."""
    if _counter.library is not None:
        _counter.totals[_only.get() or kind] += num_bytes
    return torch._C._AutoDispatchBelowAutograd()  # that kernel is autograd's


#: What is no part of training.
counted_as_other = partial(counted_as, "other")


def _kind(name: str, is_integer: bool) -> str:
    """Return the kind of an operation, by what training uses it for."""
    if torch._C._current_graph_task_id() != -1:  # inside a backward
        return "dense_all_reduce" if name.startswith("allreduce") else "gradients"
    if name.startswith(("alltoall", "_reduce_scatter", "reduce_scatter")):
        return "ids" if is_integer else "embeddings"
    return "other"


def _counting(name: str, sent: Callable[[int, int, tuple[Any, ...]], float]) -> Callable[..., Any]:
    operation = getattr(torch.ops.c10d, name).default

    def kernel(keys: Any, *arguments: Any) -> Any:
        position = _GROUP_POSITION.get(name, 2)
        group = dist.ProcessGroup.unbox(arguments[position])
        ranks = group.size()
        if ranks > 1:
            first = arguments[min(1, position - 1)]
            while isinstance(first, (list, tuple)):
                first = first[0] if first else None
            is_integer = first is not None and first.dtype in (torch.int32, torch.int64)
            _counter.add(name, sent(group.rank(), ranks, arguments), is_integer)
        return operation.redispatch(keys & torch._C._after_autograd_keyset, *arguments)

    return kernel


def _nbytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else sum(map(_nbytes, value))


def _all_to_all(rank: int, ranks: int, arguments: tuple[Any, ...]) -> float:
    """Of a tensor cut by `input_split_sizes`, all but this rank's own part."""
    sent, splits = arguments[1], arguments[4]
    if not splits:
        return sent.nbytes * (ranks - 1) / ranks
    kept = splits[rank] * (sent.nbytes // len(sent)) if len(sent) else 0
    return float(sent.nbytes - kept)


def _all_but_own(rank: int, ranks: int, arguments: tuple[Any, ...]) -> float:
    """Of tensors with one entry per rank, all but this rank's own."""
    inputs = arguments[1]
    per_rank = inputs[0] if isinstance(inputs[0], (list, tuple)) else inputs
    return float(_nbytes(per_rank) - _nbytes(per_rank[rank]))


def _to_each_other(rank: int, ranks: int, arguments: tuple[Any, ...]) -> float:
    return float((ranks - 1) * _nbytes(arguments[1]))


def _own_share_stays(rank: int, ranks: int, arguments: tuple[Any, ...]) -> float:
    return _nbytes(arguments[1]) * (ranks - 1) / ranks


def ring_bytes(summed: Any, ranks: int) -> float:
    """Return the bytes that a rank sends for a sum of tensors over all ranks."""
    return 2 * (ranks - 1) / ranks * _nbytes(summed)


#: Bytes that leave a rank, from its rank, the number of ranks, and the operation's arguments.
_SENT: dict[str, Callable[[int, int, tuple[Any, ...]], float]] = {
    "alltoall_base_": _all_to_all,
    "alltoall_": _all_but_own,
    "allgather_": _to_each_other,
    "_allgather_base_": _to_each_other,
    "allgather_into_tensor_coalesced_": _to_each_other,
    "_reduce_scatter_base_": _own_share_stays,
    "reduce_scatter_": _all_but_own,
    "reduce_scatter_tensor_coalesced_": _own_share_stays,
    "allreduce_": lambda _, ranks, arguments: ring_bytes(arguments[0], ranks),
    "allreduce_coalesced_": lambda _, ranks, arguments: ring_bytes(arguments[0], ranks),
    "broadcast_": lambda rank, ranks, sent: float((ranks - 1) * _nbytes(sent[0])) if rank == sent[2] else 0.0,
    "gather_": lambda rank, _, arguments: 0.0 if rank == arguments[3] else float(_nbytes(arguments[1])),
    "scatter_": lambda *given: _all_but_own(*given) if given[0] == given[2][3] else 0.0,
    "send": lambda _rank, _ranks, arguments: float(_nbytes(arguments[0])),
}
#: Of the process group among the arguments, where it is not 2.
_GROUP_POSITION = {"allreduce_": 1, "allreduce_coalesced_": 1, "broadcast_": 1, "send": 1}
