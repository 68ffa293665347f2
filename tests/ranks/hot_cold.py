"""Training with copies of the hot rows on every rank beside stock TorchRec, as one rank of a pool of processes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed.model_parallel import DistributedModelParallel

from embershard import cache_stats
from embershard.distributed import row_gradients, without_empty
from embershard.distributed.row_gradients import RowGradients
from embershard.distributed.sent_bytes import SentBytes
from embershard.distributed.traffic import count_sent_bytes, sent_bytes
from embershard.errors import EmbershardError
from embershard.extras.hot_cold.hot_tables import HotTables
from embershard.extras.hot_cold.mode import HotColdShardedEmbeddingBagCollection, announce_hot_batches
from embershard.sharding.torchrec.modes import replicated_rows
from tests.ranks import parity, rows_exchange
from tests.ranks.parity import LinearModel, differences, snapshot
from tests.ranks.replicated_rows import division_missing, rank_left_out
from tests.ranks.replicated_tables import tensors_of
from tests.ranks.rows_exchange import Case, Faults, Outcome, batches, train_linear


@dataclass(frozen=True)
class HotBatchOutcome:
    """What one rank sent, and rows that its caches filled and wrote back, in the steps of hot batches."""

    sent: SentBytes
    rows_moved: int


def build(case: Case) -> DistributedModelParallel:
    """The model with hot rows on every rank, which is told of hot batches."""
    model = parity.build(case, True, LinearModel)
    announce_hot_batches(model)
    return model


def compare_variants(case: Case, variants: list[tuple[Case, str | None]]) -> list[Outcome]:
    """Weights and states after dyadic gradients: stock TorchRec's, beside those with hot rows on every rank."""
    return rows_exchange.compare_variants(case, variants, FAULTS, _unequal_copies)


def compare(case: Case, fault: str | None = None) -> Outcome:
    """The same for one way to train."""
    (outcome,) = compare_variants(case, [(case, fault)])
    return outcome


def compare_real(case: Case) -> Outcome:
    """The same after gradients of a real loss."""
    return rows_exchange.compare_real(case, _unequal_copies)


def hot_steps(case: Case) -> HotBatchOutcome:
    """Train on all batches, one after another; the sums over the hot ones."""
    count_sent_bytes()
    model = build(case)
    total, moved = SentBytes(), 0
    for features, coefficients in batches(case):
        before, rows = sent_bytes(), _moved(model)
        model(features, coefficients).backward()
        if features.is_hot:  # type: ignore[attr-defined]
            values = zip(*map(dataclasses.astuple, (total, sent_bytes() - before)), strict=True)
            total, moved = SentBytes(*map(sum, values)), moved + _moved(model) - rows
    return HotBatchOutcome(total, moved)


def move(case: Case, folder: Path) -> list[str]:
    """Train with hot rows on every rank, go on with stock TorchRec, and back; by checkpoints of torch."""
    hot, stock, back = build(case), parity.build(case, False, LinearModel), build(case)
    train_linear(hot, case)
    train_linear(back, dataclasses.replace(case, steps=3))  # what it has learned must go
    for number, (source, target) in enumerate([(hot, stock), (stock, back)]):
        dcp.save(without_empty(tensors_of(source)), checkpoint_id=folder / str(number))
        tensors = tensors_of(target)
        dcp.load(without_empty(tensors), checkpoint_id=folder / str(number))
        target.load_state_dict(tensors["model"])
        target.fused_optimizer.load_state_dict({"state": tensors["states"]})
    found = differences(snapshot(hot), snapshot(stock)) + differences(snapshot(hot), snapshot(back))
    for model in (hot, stock, back):
        train_linear(model, dataclasses.replace(case, steps=5))
    return found + differences(snapshot(stock), snapshot(hot)) + differences(snapshot(stock), snapshot(back))


def error_of_a_wrong_batch(case: Case) -> str:
    """The message for a batch with cold ids that is said to have none."""
    model = build(case)
    features, coefficients = next(batches(case))
    features.is_hot = True  # type: ignore[attr-defined]
    try:
        model(features, coefficients)
    except EmbershardError as error:
        return str(error)
    return ""


def _moved(model: DistributedModelParallel) -> int:
    return sum(stats.fills + stats.write_backs for stats in cache_stats(model))


def _unequal_copies(model: DistributedModelParallel) -> list[str]:
    """The parts of the copies that differ between ranks."""
    copies = [
        part for module in model.modules() if isinstance(module, HotColdShardedEmbeddingBagCollection)
        for group in module._hot._groups for part in group.rows.payload
    ]  # fmt: skip
    assert copies
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, copies)
    return [f"copies {n}" for n, own in enumerate(copies) if not all(torch.equal(own, other[n]) for other in parts)]


@contextlib.contextmanager
def _not_written_to_the_host() -> Iterator[None]:
    with mock.patch.object(HotTables, "write_to", return_value=torch.empty(0, dtype=torch.int64)):
        yield


@contextlib.contextmanager
def _hot_ids_everywhere() -> Iterator[None]:
    """Hot rows are looked up in their shards, too."""
    add = HotColdShardedEmbeddingBagCollection._add
    with mock.patch.object(
        HotColdShardedEmbeddingBagCollection, "_add", lambda self, cold, hot, ctx: add(self, cold, hot * 0, ctx)
    ):
        yield


@contextlib.contextmanager
def _row_dropped() -> Iterator[None]:
    """The last row that any rank looked up is not trained, on all ranks."""

    def drop(*arguments: Any) -> RowGradients:
        rows, sums = row_gradients.sum_rows(*arguments)
        return RowGradients(rows[:-1], sums[:-1])

    with mock.patch.object(replicated_rows, "sum_rows", drop):
        yield


FAULTS: Faults = {
    "row dropped": _row_dropped,
    "division missing": division_missing,
    "rank left out": rank_left_out,
    "not written to the host": _not_written_to_the_host,
    "hot rows not added": _hot_ids_everywhere,
}
