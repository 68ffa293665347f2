"""Training with data-parallel tables beside stock TorchRec, as one rank of a pool of processes."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from embershard import LookAheadPipeline, flush
from embershard.cache.homes.shared import Barriers
from embershard.errors import CacheError, EmbershardError
from embershard.extras.data_parallel import mode as data_parallel
from embershard.extras.data_parallel import node_memory
from embershard.extras.data_parallel.mode import Union
from embershard.sharding.torchrec import cached_embeddings
from tests.ranks import parity, replicated_rows, rows_exchange
from tests.ranks.delays import random_delays
from tests.ranks.look_ahead import Batch, message_of
from tests.ranks.rows_exchange import Faults, Outcome


@dataclasses.dataclass(frozen=True)
class Case(rows_exchange.Case):
    """A configuration. ``sharding`` says which rank writes a row."""

    mode: str = "data_parallel"
    exchange: str = "pooled"
    sharding: str | tuple[str, ...] = "row_wise"
    ratio: float = 0.4


def compare_variants(case: Case, variants: list[tuple[Case, str | None]]) -> list[Outcome]:
    """Weights and states after dyadic gradients against stock TorchRec's, and what differs between the ranks."""
    return rows_exchange.compare_variants(case, variants, FAULTS, unequal_replicas)


def compare_all(cases: list[Case]) -> list[Outcome]:
    """The same for several cases in one call."""
    return [outcome for case in cases for outcome in compare_variants(case, [(case, None)])]


def unequal_replicas(model: Any) -> list[str]:
    """Names of the pools of which some slot, weights or states, differs between the ranks; or the row that is in it."""
    unequal = []
    for pool in cached_embeddings(model):
        cached = pool.cache.contents().rows
        for part in [*(part.detach()[1:] for part in pool.slots.payload), cached.sort().values]:
            parts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(parts, part)
            if not all(torch.equal(part, other) for other in parts):
                unequal.append(pool.cache.name)
    return unequal


def compare_real(case: Case) -> Outcome:
    """The same after gradients of a real loss."""
    return rows_exchange.compare_real(case, unequal_replicas)


def train_with_delays(case: Case, seed: int) -> tuple[list[str], list[str], int]:
    """Look-ahead with waits at random places; only rank 0 plans in a thread beside its training. What differs from
    stock TorchRec's weights and states, what differs between the ranks, and the number of waits."""
    stock = parity.build(case, False, parity.LinearModel)
    rows_exchange.train_linear(stock, dataclasses.replace(case, lookahead=0))
    model = parity.build(case, True, parity.LinearModel)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.0)
    pipeline = LookAheadPipeline(
        model,
        optimizer,
        model.device,
        case.lookahead,
        prefetch=2,
        features=lambda batch: {"embeddings": batch.features},
        worker=dist.get_rank() == 0,
    )
    stream = (Batch(*batch) for batch in rows_exchange.batches(case))
    with random_delays(seed, dist.get_rank()) as waits, contextlib.suppress(StopIteration):
        while True:
            with pipeline.step(stream) as batch:
                model(batch.features, batch.labels).backward()
    pipeline.detach()
    different = parity.differences(parity.snapshot(stock), parity.snapshot(model))
    return different, unequal_replicas(model), sum(waits.values())


def load_while_cached(case: Case) -> list[str]:
    """Trained weights and states are loaded into a model whose caches hold other ones; then both train on."""
    trained, other = (parity.build(case, True, parity.LinearModel) for _ in range(2))
    rows_exchange.train_linear(trained, case)
    rows_exchange.train_linear(other, dataclasses.replace(case, steps=4))
    other.load_state_dict(trained.state_dict())
    other.fused_optimizer.load_state_dict(trained.fused_optimizer.state_dict())
    for model in (trained, other):
        rows_exchange.train_linear(model, dataclasses.replace(case, steps=6))
    return parity.differences(parity.snapshot(trained), parity.snapshot(other)) + unequal_replicas(other)


def flush_alone(case: Case) -> list[str]:
    """What the host tier lacks after training and `flush`: rows that are not as in their slots, by pool."""
    model = parity.build(case, True)
    parity.train(model, case)
    if dist.get_rank() == 0:
        time.sleep(0.5)  # the other one must not read before
    flush(model)
    different = []
    for pool in cached_embeddings(model):
        keys = pool.cache.contents().rows
        if not torch.equal(pool.cache.read(keys), pool.host.weights[keys]):
            different.append(pool.cache.name)
    return different


def flush_a_broken_cache(case: Case) -> str:
    """What a flush says on rank 0, whose first pool is broken, before rank 1 comes to it; on rank 1 what follows."""
    model = parity.build(case, True)
    parity.train(model, case)
    pools = list(cached_embeddings(model))
    if dist.get_rank() == 1:
        dist.barrier()
        return message_of(lambda: flush(model))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(pools[0], "flush", side_effect=CacheError("planted")))
        for pool in pools:
            stack.enter_context(mock.patch.object(pool.host._share.at_writes, "_timeout_seconds", 5.0))
        said = message_of(lambda: flush(model))
    dist.barrier()
    return said


def memory_of_tables(case: Case) -> tuple[int, int, int]:
    """Bytes of a model's rows and states in memory that ranks share: as the tables have them, and this rank's resident
    and proportional share of it, once every rank has read all of it."""
    gc.collect()  # earlier models
    rss_before, pss_before = _shared_memory()
    model = parity.build(case, True)
    pools = list(cached_embeddings(model))
    for pool in pools:
        for part in pool.host.parts:
            part.sum()
    rss, pss = _shared_memory()
    needed = sum(part.nbytes for pool in pools for part in pool.host.parts)
    return needed, rss - rss_before, pss - pss_before


def _shared_memory() -> tuple[int, int]:
    """This rank's resident and proportional share of memory without a name, in bytes. All ranks read it together."""
    dist.barrier()
    sizes = re.sub(r"\n\w*Size:.*", "", Path("/proc/self/smaps").read_text())
    dist.barrier()
    found = re.findall(r"memfd:embershard-rows.*\nRss: +(\d+) kB\nPss: +(\d+) kB", sizes)
    return 1024 * sum(int(rss) for rss, _ in found), 1024 * sum(int(pss) for _, pss in found)


def error_of(case: Case, fault: str | None = None) -> str:
    """The message of building and of the first step."""
    try:
        with FAULTS[fault]() if fault else contextlib.nullcontext():
            rows_exchange.train_linear(parity.build(case, True, parity.LinearModel), dataclasses.replace(case, steps=1))
    except EmbershardError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def _two_machines() -> Iterator[None]:
    with mock.patch.object(node_memory, "_machine", return_value=(f"host{dist.get_rank()}",)):
        yield


@contextlib.contextmanager
def _own_ids_only() -> Iterator[None]:
    """A rank takes the rows of other ranks for those of its own ids."""

    def shifted(rows: Tensor, context: Any, group: Any) -> Tensor:
        context.union = Union((context.union.own + 1) % max(1, rows.shape[0]))
        return rows

    forward = data_parallel.UnionOutput.forward

    def wrong(self: Any, rows: Tensor, context: Any) -> Any:
        return forward(self, shifted(rows, context, None), context)

    with mock.patch.object(data_parallel.UnionOutput, "forward", wrong):
        yield


@contextlib.contextmanager
def _ranks_do_not_meet() -> Iterator[None]:
    with mock.patch.object(Barriers, "wait"):
        yield


FAULTS: Faults = {
    "rank left out": replicated_rows.rank_left_out,
    "division missing": replicated_rows.division_missing,
    "rows of other ids": _own_ids_only,
    "two machines": _two_machines,
    "ranks do not meet": _ranks_do_not_meet,
}
