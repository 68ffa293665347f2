"""Tables with small rows in the host tier beside stock TorchRec's, which are rounded after each step, on a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import cache_stats
from embershard.cache.homes import small_sizes as sizes
from embershard.cache.homes.small_rows import SmallRows
from embershard.cache.rows.copies import RowCopies
from embershard.sharding.torchrec import cached_embeddings, spec, without_flushes
from tests.ranks import parity
from tests.ranks.parity import Case, LinearModel
from tests.small_rounding import round_fp16, round_int8, seed_of

SEED = 11
#: Tables of so few rows stay whole here: one of the four.
_WHOLE_ROWS = 400


def small_case(**changes: Any) -> Case:
    """Enough steps on few slots for more than 10,000 evictions on each of two ranks."""
    given: dict[str, Any] = {
        "profile": True, "policy": "lookahead", "init_seed": SEED, "host_dtype": "int8", "full_rows": 0.05,
        "ratio": 0.06, "steps": 150, "batch_size": 24, "overflow": "grow",
    }  # fmt: skip
    return Case(**{**given, **changes})


@dataclass(frozen=True)
class Found:
    """What differed on one rank, and what its caches did. ``num_rounded``: rows of the reference that rounding
    changed."""

    different: list[str]
    evictions: int
    num_compared: int
    num_rounded: int


class Reference:
    """Stock TorchRec's tables, rounded by NumPy where a step looked rows up."""

    def __init__(self, model: DistributedModelParallel, case: Case) -> None:
        self._case, self.num_rounded = case, 0
        self._full: dict[str, set[int]] = {}
        profile = parity.make_profile(case)
        for t, rows in enumerate(case.rows):
            counts = profile.counts[f"t{t}"]
            most = rows if rows <= _WHOLE_ROWS else round((case.full_rows or 0.0) * rows)
            order = sorted(range(rows), key=lambda row: (-int(counts[row]), row))[:most]
            keep = case.host_dtype == "int8" and case.full_rows
            self._full[f"t{t}"] = {row for row in order if counts[row] or most == rows} if keep else set()
        self._shards = list(_shards(model))
        for table, first, _, rows in self._shards:
            self._round(table, range(first, first + len(rows)))

    def after(self, features: KeyedJaggedTensor) -> None:
        """Round what the ranks' batches looked up."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, {name: found.values() for name, found in features.to_dict().items()})
        for name in features.keys():  # noqa: SIM118
            self._round(f"t{name[1]}", torch.cat([each[name] for each in every]).unique().tolist())

    def _round(self, table: str, numbers: Any) -> None:
        small = np.array([row for row in numbers if row not in self._full[table]], np.int64)
        oracle = round_int8 if self._case.host_dtype == "int8" else round_fp16
        for name, first, column, rows in self._shards:
            own = small[(small >= first) & (small < first + len(rows))]
            if name == table and len(own):
                places = torch.from_numpy(own - first).to(rows.device)
                before = rows[places].cpu()
                after = torch.from_numpy(oracle(before.numpy(), own, seed_of(table, SEED), column))
                self.num_rounded += int((after != before).any(1).sum())
                rows[places] = after.to(rows.device)


def _shards(model: DistributedModelParallel) -> Iterator[tuple[str, int, int, Tensor]]:
    """Each of this rank's shards: table, first row, first column, memory."""
    for name, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                yield name.split(".")[-2], *shard.metadata.shard_offsets, shard.tensor.detach()


def train(model: DistributedModelParallel, case: Case, after: Callable[[KeyedJaggedTensor], None]) -> list[float]:
    """As `parity.train`, and call `after` with the ids of each step's batch."""
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "dense" in n], lr=0.05)
    losses = []
    for features, labels in parity.batches(case, dist.get_rank()):
        optimizer.zero_grad()
        loss = model(features.to(model.device), labels.to(model.device))
        loss.backward()
        optimizer.step()
        after(features)
        losses.append(loss.item())
    return losses


def snapshot(model: DistributedModelParallel) -> dict[str, Tensor]:
    """As `parity.snapshot`, with what small rows hold in place of the memory that stands for them."""
    with without_flushes(model):
        found = {f"weight/{table}/{row}/{column}": rows.cpu().clone() for table, row, column, rows in _shards(model)}
        states = {name: value for name, value in parity.snapshot(model).items() if name.startswith("state")}
    for pool in cached_embeddings(model):
        every = pool.cache.read(torch.arange(pool.host.num_rows, device=pool.cache.state.map.device)).cpu()
        for shard in pool.shards:
            rows = every[shard.first_key : shard.first_key + shard.num_rows]
            found[f"weight/{shard.table}/{shard.first_row}/{shard.column}"] = rows
    return {**found, **states}


def compare(case: Case, fault: str | None = None) -> Found:
    """Train both, and compare every bit. ``fault``: what is done wrongly in the cached one."""
    with mock.patch.object(sizes, "SMALL_TABLE_ROWS", _WHOLE_ROWS):
        stock = parity.build(replace(case, host_dtype="fp32", full_rows=None), cached=False)
        reference = Reference(stock, case)
        initial = snapshot(stock)
        losses = train(stock, case, (lambda _: None) if fault == "reference_not_rounded" else reference.after)
        with faulty(fault):
            ours = parity.build(case, cached=True)
            different = [f"initial {name}" for name in parity.differences(initial, snapshot(ours))]
            found = train(ours, case, lambda _: None)
            pairs = enumerate(zip(losses, found, strict=True))
            different += [f"loss {step}" for step, (a, b) in pairs if a != b]
            final = snapshot(ours)
        different += parity.differences(snapshot(stock), final)
    evictions = sum(table.evictions for table in cache_stats(ours))
    return Found(different, evictions, len(final), reference.num_rounded)


@contextmanager
def faulty(fault: str | None) -> Iterator[None]:
    """A context in which small rows are rounded wrongly."""
    right_round, right_write, right_full = SmallRows.round, SmallRows.write, spec.full_rows_of
    with ExitStack() as stack:
        if fault == "slot_not_rounded":

            def leave_one(rows: SmallRows, slots: Tensor, places: Tensor, keys: Tensor, **rest: Any) -> None:
                others = places != 200  # of 230: the first ones have the most frequent rows, which are full
                right_round(rows, slots, places[others], keys[others], **rest)

            # Rounded when it leaves: the host would refuse it.
            stack.enter_context(mock.patch.object(SmallRows, "round", leave_one))
            stack.enter_context(mock.patch.object(SmallRows, "write", _at_write(right_round, right_write)))
        elif fault == "full_shifted":
            shifted = lambda table, num_rows, *rest: (  # noqa: E731
                np.unique((right_full(table, num_rows, *rest) + 1) % num_rows)
            )
            stack.enter_context(mock.patch.object(spec, "full_rows_of", shifted))
        elif fault == "at_write_backs":
            stack.enter_context(mock.patch.object(RowCopies, "round", return_value=None))
            stack.enter_context(mock.patch.object(SmallRows, "write", _at_write(right_round, right_write)))
        yield


def _at_write(right_round: Any, right_write: Any) -> Any:
    def write(rows: SmallRows, keys: Tensor, slots: Tensor, places: Tensor | None = None) -> None:
        values = slots.clone()
        right_round(rows, values, torch.arange(len(keys)) if places is None else places, keys, are_distinct=True)
        right_write(rows, keys, values, places)

    return write


def rows_of_all_ranks(case: Case) -> dict[str, list[float]]:
    """Train a linear model with dyadic gradients on the global batches of two ranks, on however many there are; return
    all rows of each table, from all ranks."""
    world_size = dist.get_world_size()
    with mock.patch.object(sizes, "SMALL_TABLE_ROWS", _WHOLE_ROWS):
        model = parity.build(case, cached=True, make_model=LinearModel)
        streams = [parity.batches(case, rank) for rank in range(2)]
        for parts in zip(*streams, strict=True):
            features, labels = parts[dist.get_rank()] if world_size == 2 else _joined(parts)
            coefficients = (labels.view(-1, 1) * 8).floor() / 8 * world_size  # TorchRec divides by the ranks
            model(features, coefficients.expand(-1, 16 * len(case.rows))).backward()
    rows: dict[str, Tensor] = {}
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, snapshot(model))
    for found in every:
        for name, value in found.items():
            if name.startswith("weight/t"):
                _, table, first, _ = name.split("/")
                rows[f"{table} {int(first):6d}"] = value
    tables = sorted({name.split()[0] for name in rows})
    return {
        table: torch.cat([rows[name] for name in sorted(rows) if name.startswith(f"{table} ")]).flatten().tolist()
        for table in tables
    }


def _joined(parts: Sequence[tuple[KeyedJaggedTensor, Tensor]]) -> tuple[KeyedJaggedTensor, Tensor]:
    """The samples of the ranks' batches as one batch."""
    keys = parts[0][0].keys()
    found = [features[key] for key in keys for features, _ in parts]
    values, lengths = torch.cat([each.values() for each in found]), torch.cat([each.lengths() for each in found])
    return KeyedJaggedTensor(keys, values, lengths=lengths), torch.cat([labels for _, labels in parts])
