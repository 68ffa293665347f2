"""A pool's operations, one at a time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch

from embershard.cache.rows.stream_order import StreamOrder

_Method = TypeVar("_Method", bound=Callable[..., Any])


class _Pool(Protocol):
    _lock: threading.RLock
    _stream_order: StreamOrder


def one_at_a_time(method: _Method) -> _Method:
    """Let one thread and one stream at a time run the method: while a worker plans ahead, an evaluation or a flush in
    the training thread waits."""

    @functools.wraps(method)
    def locked(self: _Pool, *args: Any, **kwargs: Any) -> Any:
        with self._lock, torch.no_grad(), self._stream_order.next():
            return method(self, *args, **kwargs)

    return cast(_Method, locked)
