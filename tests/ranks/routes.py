"""Trainings whose ids and pooled rows go by a route, as one rank of a pool of processes; and faults of routes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from embershard.sharding.torchrec.modes import routes
from embershard.sharding.torchrec.modes.routes import Columns, Route, RoutedExchange, TorchRecExchange
from tests.ranks import look_ahead
from tests.ranks.look_ahead import Case, Outcome, Run


def _exchanged_samples() -> Any:
    """The ids of the first feature go to the samples of the other rank."""

    def made(self: Route, module: Any, _init: Any = Route.__init__) -> None:
        _init(self, module)
        order = self.by_feature.clone()
        order[: self.world_size] = order[: self.world_size].flip(0)
        self.by_feature = order

    return mock.patch.object(Route, "__init__", made)


def _exchanged_columns() -> Any:
    """The first two blocks of columns take each other's place."""

    def made(self: Columns, *given: Any, _init: Any = Columns.__init__) -> None:
        _init(self, *given)
        order = torch.arange(sum(self.of_rank) // self.width) if self.order is None else self.order.clone()
        order[[0, 1]] = order[[1, 0]]
        self.order, self.inverse = order, order.argsort()

    return mock.patch.object(Columns, "__init__", made)


FAULTS: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "samples exchanged": _exchanged_samples,
    "columns exchanged": _exchanged_columns,
    "gradients not divided": lambda: mock.patch.object(routes, "get_gradient_division", return_value=False),
}


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """How many batches of a module went which way."""
    found: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        for cls in (RoutedExchange, TorchRecExchange):

            def made(self: Any, *given: Any, _init: Any = cls.__init__, _name: str = cls.__name__) -> None:
                found[_name] += 1
                _init(self, *given)

            stack.enter_context(mock.patch.object(cls, "__init__", made))
        yield found


def compare(case: Case, run: Run, fault: str = "") -> tuple[Outcome, Counter[str]]:
    """A training beside stock TorchRec's, and which way its batches went."""
    with counted() as ways, FAULTS[fault]():
        return look_ahead.compare(case, [run])[0], ways
