"""What a CUDA graph does, on a CPU: a call's operations are recorded with their memory, and repeated without Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from embershard.extras.dense_graph import DenseGraph
from embershard.training.dense_call import DenseCall

T = TypeVar("T")
#: Operations that wait for the device, or whose sizes depend on values: no capture has them.
REFUSED = ("_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2", "unique_dim")


class Recorded(TorchDispatchMode):
    """Records operations. `replay` repeats them on the memory that they had, views and all: inputs are read where they
    were, and results are written where they were, whatever Python would do now.

    Raises:
        RuntimeError: an operation that a capture refuses.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in REFUSED:
            raise RuntimeError(f"{name} cannot be captured: it waits for the device")
        found = func(*args, **(kwargs or {}))
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view:  # the memory of a view stays the same
            own = [] if any(each.alias_info for each in func._schema.returns) else _tensors(found)
            self._calls.append((func, args, kwargs or {}, own))
        return found

    @torch.no_grad()
    def replay(self) -> None:
        """Repeat all operations."""
        for func, args, kwargs, own in self._calls:
            found = func(*args, **kwargs)
            for place, value in zip(own, _tensors(found), strict=False):  # in place: there are none
                place.copy_(value)


def _tensors(found: Any) -> list[Tensor]:
    return [each for each in tree_leaves(found) if isinstance(each, Tensor)]


def record(compute: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    """In place of `embershard.extras.dense_graph.capture`. As there, a call warms up, and the recorded one gives no
    results before it is repeated."""
    compute()
    with Recorded() as recorded:
        found = compute()
    for each in _tensors(found):
        each.fill_(torch.nan)
    return found, recorded.replay


@contextmanager
def calls_recorded() -> Iterator[None]:
    """While it lasts, trainers that are made record their calls."""
    begin = DenseCall.__init__

    def recording(call: DenseCall, *given: Any) -> None:
        begin(call, *given)
        call.by = DenseGraph(call, record)

    with mock.patch.object(DenseCall, "__init__", recording):
        yield
