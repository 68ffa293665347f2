"""A process group that hands every collective on to gloo, and notes it: which thread called which one, on what."""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo, _update_default_pg
from torchrec.distributed import comm

_BACKEND = "noted"
_MOST_SECONDS = 0.003
#: Names of torch's calls, and of gloo's that answer them.
_CALLS = {
    **{name: name for name in ("allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "broadcast")},
    **{name: name for name in ("reduce", "reduce_scatter", "gather", "scatter", "alltoall", "alltoall_base")},
    **{name: name for name in ("barrier", "monitored_barrier", "_allgather_base", "_reduce_scatter_base")},
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
#: Of calls where ranks give different tensors, the argument that is alike on all of them.
_ALIKE = {"gather": 1, "scatter": 0, "reduce_scatter": 1, "allgather": 0}


@dataclass(frozen=True)
class Call:
    """A collective, as one rank began it.

    Attributes:
        group: its name, the same on all ranks.
        thread: name of the thread.
        in_order: the thread is the main one, or runs a backward.
        tensors: types and shapes that must be alike on all ranks; of an all-to-all whose parts have sizes of their own,
            types alone.
        sizes: of such an all-to-all, how many numbers it sends to each rank, and gets from each.
    """

    group: str
    kind: str
    thread: str
    in_order: bool
    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    sizes: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        tensors = ", ".join(f"{dtype.removeprefix('torch.')}{list(shape)}" for dtype, shape in self.tensors)
        return f"{self.kind} of {tensors or 'nothing'}"


class Noted(dist.ProcessGroup):
    """gloo, with a list of what it was asked for.

    Args:
        before: called before each collective.
    """

    def __init__(self, inner: ProcessGroupGloo, calls: list[Call], before: Callable[[], None]) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self._calls, self._before = inner, calls, before

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:  # noqa: N802
        return _BACKEND

    def _get_sequence_number_for_group(self) -> int:
        return len(self._calls)

    def note(self, kind: str, arguments: Sequence[Any]) -> None:
        """Note a call that the calling thread is about to make."""
        self._before()
        thread = threading.current_thread()
        in_order = thread is threading.main_thread() or torch._C._current_graph_task_id() != -1
        tensors = list(_tensors(arguments[_ALIKE[kind]] if kind in _ALIKE else arguments))
        shapes, sizes = [tuple(tensor.shape) for tensor in tensors], ()
        if kind == "alltoall_base" and (arguments[2] or arguments[3]):
            sizes = tuple(
                tuple(rows * math.prod(shape[1:]) for rows in given)
                for shape, given in zip(shapes[::-1], arguments[3:1:-1], strict=True)
            )
            shapes = [() for _ in shapes]
        types = [str(tensor.dtype) for tensor in tensors]
        self._calls.append(
            Call(self.group_name, kind, thread.name, in_order, tuple(zip(types, shapes, strict=True)), sizes)
        )


def _handing_on(kind: str) -> Any:
    def call(self: Noted, *arguments: Any, **options: Any) -> Any:
        self.note(kind, arguments)
        return getattr(self.inner, kind)(*arguments, **options)

    return call


for _name, _kind in _CALLS.items():
    setattr(Noted, _name, _handing_on(_kind))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


@contextlib.contextmanager
def noted_calls(seed: int | None = None) -> Iterator[list[Call]]:
    """All groups are noted ones meanwhile: a new default group, and those that are made. Gives the calls of this rank.
    Collective.

    Args:
        seed: of waits of up to some milliseconds before each call, which are others on each rank and thread.
    """
    calls: list[Call] = []
    made: list[dist.ProcessGroup] = []
    rank, default, new_group = dist.get_rank(), dist.group.WORLD, dist.new_group
    delays = threading.local()

    def wait() -> None:
        if seed is not None:
            if not hasattr(delays, "numbers"):
                delays.numbers = random.Random(f"{seed} {rank} {threading.current_thread().name}")
            time.sleep(_MOST_SECONDS * delays.numbers.random() ** 4)  # some are long beside the others

    def noted_group(*arguments: Any, **options: Any) -> Any:
        group = new_group(*arguments, **{**options, "backend": _BACKEND})
        if isinstance(group, Noted):
            made.append(group)
        return group

    def make(store: Any, rank: int, size: int, timeout: Any) -> Noted:
        return Noted(ProcessGroupGloo(store, rank, size, timeout), calls, wait)

    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, make, devices=["cpu"])
    plugin = dist.Backend._plugins[_BACKEND.upper()]
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [dist.destroy_process_group(group) for group in reversed(made)])
        stack.callback(_update_default_pg, default)
        stack.enter_context(
            mock.patch.dict(dist.Backend._plugins, {_BACKEND.upper(): plugin._replace(creator_fn=make)})
        )
        stack.enter_context(mock.patch.object(dist, "new_group", noted_group))
        for kept in ("_INTRA_PG", "_CROSS_PG"):  # TorchRec keeps a node's group for the life of a process
            stack.enter_context(mock.patch.object(comm, kept, None))
        _update_default_pg(noted_group())
        yield calls


def disorder(of_ranks: Sequence[Sequence[Call]], default: str) -> list[str]:
    """Return what is wrong with the calls of all ranks: groups whose ranks call in another order, or exchange other
    numbers of rows than their partners; calls of the default group by a thread that may come in between."""
    found = []
    for call in itertools.chain.from_iterable(of_ranks):
        if call.group == default and not call.in_order:
            found.append(f"thread {call.thread!r} calls {call} in the group of the training")
    for group in sorted({call.group for calls in of_ranks for call in calls}):
        members = [[call for call in calls if call.group == group] for calls in of_ranks]
        if group != default:
            members = [calls for calls in members if calls]
        for number, calls in enumerate(itertools.zip_longest(*members)):
            texts = [str(call) for call in calls]
            place = f"group {group}, call {number}"
            if len(set(texts)) > 1:
                found.append(f"{place}: {' | '.join(texts)}")
                break
            if calls[0].sizes:
                sent, got = ([call.sizes[end] for call in calls] for end in (0, 1))
                if [*zip(*sent, strict=True)] != got:
                    found.append(f"{place}: {texts[0]} sends {sent}, and gets {got}")
                    break
    return found
