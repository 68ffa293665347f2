"""`ReplicatedRows` on several ranks beside one FBGEMM table that gets the samples of all ranks.

Gradients are dyadic rationals with few digits, so that sums in any order have the same bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division

from embershard.distributed import row_gradients
from embershard.distributed.row_gradients import RowGradients
from embershard.sharding.torchrec.modes import replicated_rows
from embershard.sharding.torchrec.modes.replicated_rows import ReplicatedRows
from embershard.sharding.torchrec.slots import SlotTable
from tests.ranks.parity import OPTIMIZERS

NUM_ROWS, DIM, FEATURES, SAMPLES = 40, 8, 4, 6
SECOND_TABLE = 20  # its first row
NEVER = 32  # nobody looks this row up, nor those after it


@dataclass(frozen=True)
class Case:
    """One configuration."""

    optimizer: str = "rowwise_adagrad"
    mean: bool = False
    weighted: bool = False
    weight_decay: float = 0.0
    steps: int = 8


@dataclass(frozen=True)
class Outcome:
    """``different``: parts that are not those of the one table. ``ranks_differ``: parts that differ between ranks.
    ``untouched_changed``: rows that nobody looked up and that changed. ``decayed``: rows with a gradient of zero that
    changed in the first step."""

    different: list[str]
    ranks_differ: list[str]
    untouched_changed: int
    decayed: int


Bags = tuple[Tensor, Tensor, Tensor | None, Tensor]


def compare(case: Case, fault: str | None = None) -> Outcome:
    """Train both, and compare weights and states on this rank."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        rows, reference, start, decayed = _train(case)
    parts = {"weights": rows.payload[0]} | {f"state {n}": part for n, part in enumerate(rows.payload[1:])}
    expected = [part.detach()[1:] for part in reference.payload]
    different = [
        name for (name, part), want in zip(parts.items(), expected, strict=True) if not torch.equal(part, want)
    ]
    ranks_differ = [name for name, part in parts.items() if not _is_equal_on_ranks(part)]
    changed = (rows.payload[0][NEVER:] != start[NEVER:]).any(dim=1)
    return Outcome(different, ranks_differ, int(changed.sum()), decayed)


def _train(case: Case) -> tuple[ReplicatedRows, SlotTable, Tensor, int]:
    fused: dict[str, Any] = {"optimizer": OPTIMIZERS[case.optimizer], "learning_rate": 0.1, "eps": 1e-6}
    if case.weight_decay:
        fused.update(weight_decay=case.weight_decay, weight_decay_mode=WeightDecayMode.L2)
    pooling = PoolingMode.MEAN if case.mean else PoolingMode.SUM
    common: Any = (torch.device("cpu"), pooling, SparseType.FP32, fused)
    rows = ReplicatedRows(NUM_ROWS, DIM, [0, 0, 1, 1], *common)
    reference = SlotTable(DIM, [0, 0, 1, 1], *common)
    reference.resize(NUM_ROWS)
    start = torch.rand(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(1)) - 0.5
    rows.payload[0].copy_(start)
    reference.payload[0].data[1:] = start
    world_size, decayed = dist.get_world_size(), 0
    for step in range(case.steps):
        of_rank = [_batch(case, step, rank) for rank in range(world_size)]
        ids, offsets, scales, coefficients = of_rank[dist.get_rank()]
        before = rows.payload[0].clone()
        (rows(rows.prepare(ids, offsets, scales)) * coefficients).sum().backward()
        if step == 0:
            decayed = _decayed(of_rank, before != rows.payload[0])
        ids, offsets, scales, coefficients = _join(of_rank)
        pooled = reference(ids + 1, offsets, per_sample_weights=scales)
        (pooled * coefficients / world_size).sum().backward()
    return rows, reference, start, decayed


def _batch(case: Case, step: int, rank: int) -> Bags:
    """Bags of 0, 1, 2 or 4 rows; the last samples have gradients of zero; a rank has no id in every fifth step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    lengths = torch.tensor([0, 1, 2, 4])[torch.randint(0, 4, (FEATURES * SAMPLES,), generator=generator)]
    if (step + rank) % 5 == 4:
        lengths.zero_()
    per_feature = lengths.view(FEATURES, SAMPLES).sum(dim=1).tolist()
    ranges = [(0, SECOND_TABLE)] * 2 + [(SECOND_TABLE, NEVER)] * 2
    ids = torch.cat(
        [torch.randint(*ends, (n,), generator=generator) for ends, n in zip(ranges, per_feature, strict=True)]
    )
    scales = torch.randint(1, 9, ids.shape, generator=generator) / 4 if case.weighted else None
    coefficients = torch.randint(-8, 9, (SAMPLES, FEATURES * DIM), generator=generator) / 4
    coefficients[SAMPLES // 2 :] = 0
    return ids, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), scales, coefficients


def _join(of_rank: list[Bags]) -> Bags:
    """The samples of all ranks as one batch, feature after feature."""
    ids, lengths, scales = [], [], []
    for feature in range(FEATURES):
        for own_ids, offsets, own_scales, _ in of_rank:
            ends = offsets[feature * SAMPLES], offsets[(feature + 1) * SAMPLES]
            ids.append(own_ids[ends[0] : ends[1]])
            scales += [] if own_scales is None else [own_scales[ends[0] : ends[1]]]
            lengths.append(offsets.diff()[feature * SAMPLES : (feature + 1) * SAMPLES])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)])
    return torch.cat(ids), offsets, torch.cat(scales) if scales else None, torch.cat([bags[3] for bags in of_rank])


def _decayed(of_rank: list[Bags], changed: Tensor) -> int:
    """Rows that only samples with a gradient of zero looked up, and that changed."""
    touched, trained = (torch.zeros(NUM_ROWS, dtype=torch.bool) for _ in range(2))
    for ids, offsets, _, _ in of_rank:
        sample = torch.repeat_interleave(torch.arange(FEATURES * SAMPLES) % SAMPLES, offsets.diff())
        touched[ids] = True
        trained[ids[sample < SAMPLES // 2]] = True
    return int((touched & ~trained & changed.any(dim=1)).sum())


def _is_equal_on_ranks(part: Tensor) -> bool:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return all(torch.equal(part, other) for other in parts)


@contextlib.contextmanager
def _touch_dropped() -> Iterator[None]:
    """Rows with a sum of zero are not updated."""

    def drop(*arguments: Any) -> RowGradients:
        rows, sums = row_gradients.sum_rows(*arguments)
        is_trained = sums.any(dim=1)
        return RowGradients(rows[is_trained], sums[is_trained])

    with mock.patch.object(replicated_rows, "sum_rows", drop):
        yield


@contextlib.contextmanager
def division_missing() -> Iterator[None]:
    """Gradients are not divided by the number of ranks."""
    before = get_gradient_division()
    set_gradient_division(False)
    try:
        yield
    finally:
        set_gradient_division(before)


@contextlib.contextmanager
def rank_left_out() -> Iterator[None]:
    """The gradients of rank 0 are lost on all ranks."""
    gather = row_gradients._gather

    def lose(*arguments: Any) -> list[tuple[Tensor, Tensor]]:
        first, *others = gather(*arguments)
        return [(first[0], first[1] * 0), *others]

    with mock.patch.object(row_gradients, "_gather", lose):
        yield


@contextlib.contextmanager
def _own_gradients_only() -> Iterator[None]:
    """No rank hears of another one's gradients."""
    with mock.patch.object(row_gradients, "_gather", lambda rows, gradients, group: [(rows, gradients)]):
        yield


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "touch dropped": _touch_dropped,
    "division missing": division_missing,
    "rank left out": rank_left_out,
    "own gradients only": _own_gradients_only,
}
