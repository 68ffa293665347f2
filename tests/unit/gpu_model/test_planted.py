"""Negative controls of `test_whole.py`: tensors on the wrong device, memory that no stream is told of, and waits, each
in six places of modes, models and what they use. Every one is noticed in a short run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from embershard.cache.rows.copies import RowCopies
from embershard.data import Batch
from embershard.extras.hot_cold import hot_tables
from embershard.extras.hot_cold import mode as hot_cold
from embershard.models import history, loss
from embershard.pipeline.module_input import ModuleInput
from embershard.sharding.torchrec import feature_keys
from embershard.sharding.torchrec.modes import replicated_tables, rows_exchange
from embershard.training.parts import loss_monitor
from tests.covering import keep
from tests.unit.gpu_model.cases import Case
from tests.unit.gpu_model.device import CUDA
from tests.unit.gpu_model.test_whole import KEPT, life_on_model, most_waits
from tests.unit.gpu_model.test_whole import samples as samples  # a fixture

pytestmark = pytest.mark.slow

HOT_COLD, ROWS, PLANNED = ("hot_cold", "ple"), ("rows", "dlrm_dcn"), ("planned", "deepfm")
Fault = Callable[[], Any]


def after(owner: Any, name: str, change: Callable[..., Any]) -> Fault:
    """`change` what a function returned, or the object that its constructor made."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return change(args[0] if name == "__init__" else found)

    return lambda: mock.patch.object(owner, name, changed)


def on_host(owner: Any, attribute: str) -> Fault:
    """Objects of a class get an attribute on the host."""

    def moved(found: Any) -> None:
        tensor = getattr(found, attribute)
        setattr(found, attribute, torch.zeros_like(tensor.inner))

    return after(owner, "__init__", moved)


def waiting(owner: Any, name: str) -> Fault:
    """The host waits after each call."""

    def wait(found: Any) -> Any:
        torch.zeros(1, device=CUDA).item()
        return found

    return after(owner, name, wait)


def untold(owner: Any, name: str = "record_stream") -> Fault:
    return lambda: mock.patch.object(owner, name, _nothing)


def _nothing(*args: Any) -> None:
    """A mock would keep its arguments, and so their memory."""


def _waits_and_tells_nobody(self: RowCopies, ticket: Any) -> None:
    if ticket.filled is not None:
        torch.cuda.current_stream(CUDA).wait_event(ticket.filled)


def _without_lengths(context: Any) -> Any:
    context.lengths = torch.empty(0)
    return context


def _mean_on_host(found: Any) -> Any:
    found._is_mean = torch.zeros_like(found._is_mean.inner)
    return found


DEVICES: dict[str, tuple[Fault, tuple[str, str]]] = {
    "lengths of hot bags": (
        after(hot_cold.HotColdShardedEmbeddingBagCollection, "create_context", _without_lengths), HOT_COLD,
    ),
    "means of the exchange of rows": (after(rows_exchange.ExchangesRows, "create_input_dist", _mean_on_host), PLANNED),
    "first keys of a pool": (on_host(feature_keys.FeatureKeys, "_first_keys"), ROWS),
    "first rows of replicated tables": (on_host(replicated_tables.ReplicatedTables, "_first_of_feature"), PLANNED),
    "addends of hot rows": (on_host(hot_tables._Group, "_addends"), HOT_COLD),
    "times of events": (after(history, "_padded", lambda found: torch.zeros_like(found.inner)), ("pooled", "hstu")),
}  # fmt: skip
STREAMS: dict[str, tuple[Fault, tuple[str, str]]] = {
    "hot ids": (untold(hot_cold.HotColdContext), HOT_COLD),
    "bags over distinct rows": (untold(rows_exchange.RowsContext), ROWS),
    "slots and keys of a batch": (
        lambda: mock.patch.object(RowCopies, "wait", _waits_and_tells_nobody), ("planned", "tbsm"),
    ),
    "a batch": (untold(Batch), ("pooled", "dlrm")),
    "a module's input": (untold(ModuleInput), ("pooled", "hstu")),
    "a module's input, with rows": (untold(ModuleInput), ROWS),
}  # fmt: skip
WAITS: dict[str, tuple[Fault, tuple[str, str]]] = {
    "splitting hot ids": (waiting(hot_cold.HotIds, "split"), HOT_COLD),
    "scales of bags": (waiting(rows_exchange.RowsInput, "_scales"), ROWS),
    "replicated tables": (waiting(replicated_tables.ReplicatedTables, "forward"), PLANNED),
    "histories": (waiting(history.HistoryEmbeddings, "_check"), ("planned", "tbsm")),
    "the loss": (waiting(loss, "loss_of"), ("pooled", "wide_deep")),
    "sums of labels": (waiting(loss_monitor, "label_sums"), ("pooled", "shared_bottom")),
}


def case_of(where: tuple[str, str]) -> Case:
    return next(case for case in KEPT if (case.mode, case.arch) == where)


@pytest.mark.parametrize("name", keep({"means of the exchange of rows"}, DEVICES))
def test_a_wrong_device_is_noticed(name: str, samples: Path, tmp_path: Path) -> None:
    fault, where = DEVICES[name]
    how = r"mixes devices|of the host|unknown parameter type"  # the last one: a host's memory given to a stream
    with fault(), pytest.raises((AssertionError, RuntimeError), match=how):
        life_on_model(case_of(where), samples, tmp_path / "gpu")


@pytest.mark.parametrize("name", keep({"bags over distinct rows"}, STREAMS))
def test_memory_that_no_stream_was_told_of_is_noticed(name: str, samples: Path, tmp_path: Path) -> None:
    fault, where = STREAMS[name]
    with fault():
        problems = life_on_model(case_of(where), samples, tmp_path / "gpu").problems
    assert any("is given away while" in problem for problem in problems)


@pytest.mark.matrix
@pytest.mark.parametrize("name", keep({"scales of bags"}, WAITS))
def test_a_further_wait_is_noticed(name: str, samples: Path, tmp_path: Path) -> None:
    fault, where = WAITS[name]
    case = case_of(where)
    with fault():
        lines = life_on_model(case, samples, tmp_path / "gpu").waiting_lines
    assert len(lines) > most_waits(case), lines
