"""Groups of ranks with caches beside stock TorchRec's `DMPCollection`, bit by bit, on gloo and the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import model_parallel

from embershard import cache_stats
from embershard.cache.homes import small_sizes as sizes
from embershard.extras.groups.groups import Groups
from embershard.extras.groups.model import GroupedModelParallel
from embershard.extras.groups.row_sync import SyncCounts
from embershard.sharding.torchrec import cached_embeddings, without_flushes
from embershard.sharding.torchrec.compat import GroupedEnv
from embershard.sharding.torchrec.sharders import StockEmbeddingCollectionSharder
from tests.ranks import look_ahead, parity, small_rows
from tests.ranks.look_ahead import Case

SEED = small_rows.SEED


@functools.cache
def _env(groups: Groups) -> GroupedEnv:
    """Made once: process groups have threads, and stay as long as the process."""
    return Groups.make_env(groups, torch.device("cpu"))


@contextlib.contextmanager
def envs_are_kept() -> Iterator[None]:
    """Inside, groups of so many ranks have the same process groups each time."""
    number_of = Groups.make_env

    def make_env(groups: Groups, device: torch.device) -> GroupedEnv:
        with mock.patch.object(Groups, "make_env", number_of):
            return _env(groups)

    with mock.patch.object(Groups, "make_env", make_env):
        yield


@functools.cache
def stock_collection() -> Any:
    """`DMPCollection` for a CPU: of its source, the two lines are replaced that keep it from one."""
    source = inspect.getsource(model_parallel.DMPCollection)
    for line, instead in (
        ('device.type == "cuda" or device.type == "mtia"', "True"),
        # A shard's check compares devices, and those of a CPU have no number.
        ('f"rank:{shard_rank}/{self._device.type}:{shard_rank % get_local_size()}"', 'f"rank:{shard_rank}/cpu"'),
    ):
        assert source.count(line) == 1, line
        source = source.replace(line, instead)
    names = dict(vars(model_parallel))
    exec(source, names)
    logging.getLogger("torchrec").setLevel(logging.ERROR)

    class OnKeptGroups(names["DMPCollection"]):  # type: ignore[misc]
        def _create_process_groups(self, world_size: int, local_size: int, **_: Any) -> tuple[Any, ...]:
            env = _env(Groups(world_size // local_size, world_size))
            return env.device_mesh, env.sharding_pg, env.replica_pg

    return OnKeptGroups


def in_rank_order(tensors: Sequence[Tensor]) -> None:
    """Average over replicas, which are single ranks, by `mean_in_rank_order`."""
    for tensor in tensors:
        tensor.copy_(mean_in_rank_order(copies_of(tensor, dist.group.WORLD)))


def copies_of(tensor: Tensor, group: Any) -> Tensor:
    """The tensors of a group's ranks: [n, ...]."""
    copies = tensor.new_empty(group.size(), *tensor.shape)
    dist.all_gather_into_tensor(copies.view(-1), tensor.contiguous().view(-1), group=group)
    return copies


def mean_in_rank_order(copies: Tensor) -> Tensor:
    """The mean of copies [n, ...], added up in their order; equal numbers stay as they are."""
    total = copies[0].clone()
    for other in copies[1:]:
        total += other
    return torch.where((copies == copies[0]).all(0), copies[0], total / len(copies))


def build_stock(case: Case, groups: int, hook: Callable[[Any], None] | None = None) -> Any:
    """Under `DMPCollection`, from seed 7, with tables of the case's own seed."""
    torch.manual_seed(7)
    model, size = look_ahead.Model(case), dist.get_world_size() // groups
    sharders = parity.sharders_of(case, cached=False)
    sharders[1] = StockEmbeddingCollectionSharder(dict(sharders[1].fused_params), init_seed=case.init_seed)
    return stock_collection()(
        module=model,
        device=torch.device("cpu"),
        plan=parity.plan_of(case, False, model, sharders, size),
        world_size=dist.get_world_size(),
        sharding_group_size=size,
        global_pg=dist.group.WORLD,
        sharders=sharders,
        use_inter_host_allreduce=True,
        custom_all_reduce=hook,
    )


def build_ours(
    case: Case, groups: int, sync_every: int, cached: bool = True, sync_delay: int = 0, **averages: Any
) -> GroupedModelParallel:
    """The same model in groups of ours."""
    torch.manual_seed(7)
    model, size = look_ahead.Model(case), dist.get_world_size() // groups
    sharders = parity.sharders_of(case, cached)
    plan = parity.plan_of(case, cached, model, sharders, size)
    with envs_are_kept():
        of_groups = (model, groups, plan, sharders, torch.device("cpu"), sync_every, sync_delay)
        return GroupedModelParallel(*of_groups, **averages)


def snapshot(model: Any) -> dict[str, list[Tensor]]:
    """Copies of this rank's parts of all weights and optimizer states."""
    pools = list(cached_embeddings(model))
    for pool in pools:
        pool.cache.flush()
    with without_flushes(model):  # rows in a file are not what state dicts refer to
        states = model.fused_optimizer.state_dict()["state"]
        values = {f"{table}.{name}": value for table, own in states.items() for name, value in own.items()}
        values |= model.state_dict()
    found = {}
    for name, value in values.items():
        value = value.to_local() if hasattr(value, "to_local") else value
        parts = value.local_shards() if hasattr(value, "local_shards") else [value]
        found[name] = [_contents(getattr(part, "tensor", part).detach(), pools) for part in parts]
    return {name: parts for name, parts in found.items() if parts}


def _contents(part: Tensor, pools: list[Any]) -> Tensor:
    elsewhere = (pool.host.read_part(part) for pool in pools)
    return next((rows for rows in elsewhere if rows is not None), part).clone()


def differences(first: dict[str, list[Tensor]], second: dict[str, list[Tensor]]) -> list[str]:
    """Names of what is not equal bit for bit."""
    return [
        name
        for name in sorted(first.keys() | second.keys())
        if len(first.get(name, ())) != len(second.get(name, ()))
        or not all(map(torch.equal, first.get(name, ()), second.get(name, ())))
    ]


@dataclass(frozen=True)
class Outcome:
    """What one rank saw. ``different`` is empty when everything was bitwise equal."""

    different: list[str]
    num_compared: int
    evictions: int
    late: int
    counts: SyncCounts
    rows: int


def train_stock(model: Any, case: Case, sync_every: int) -> list[Any]:
    """With a `sync` behind every so many steps."""

    def after(step: int) -> None:
        if (step + 1) % sync_every == 0:
            model.sync()

    return look_ahead.train(look_ahead.plain(model), look_ahead.batches(case), after)


def train_ours(
    model: GroupedModelParallel,
    case: Case,
    lookahead: int = 0,
    worker: bool | None = None,
    after: Callable[[int], None] = lambda step: None,
) -> list[Any]:
    """With `end_step` behind every step."""

    def end(step: int) -> None:
        model.end_step()
        after(step)

    if not lookahead:
        return look_ahead.train(look_ahead.plain(model), look_ahead.batches(case), end)
    loop = look_ahead.pipeline(model, look_ahead.Run(lookahead=lookahead, worker=worker, policy=case.policy))
    losses = look_ahead.train(loop, look_ahead.batches(case), end)
    loop.detach()
    return losses


def compare(
    case: Case,
    groups: int = 2,
    sync_every: int = 1,
    lookahead: int = 0,
    worker: bool | None = None,
    in_order: bool = False,
    cached: bool = True,
) -> Outcome:
    """Ours beside stock; what differed on this rank."""
    return _compare(case, groups, sync_every, lookahead, worker, in_order, cached)


def _compare(
    case: Case, groups: int, sync_every: int, lookahead: int, worker: bool | None, in_order: bool, cached: bool
) -> Outcome:
    plain = dataclasses.replace(case, policy="lfu", ratio=1.0, cached=None, host_dir=None, host_bytes=None)
    expected, losses = _stock(plain, groups, sync_every, in_order)
    model = build_ours(case, groups, sync_every, cached)
    found = train_ours(model, case, lookahead, worker)
    return outcome(model, expected, losses, found)


def outcome(
    model: GroupedModelParallel, expected: dict[str, list[Tensor]], losses: Sequence[Any], found: Sequence[Any]
) -> Outcome:
    """What of a trained model and its losses is not as expected."""
    different = [f"loss {step}" for step, (a, b) in enumerate(zip(losses, found, strict=True)) if a != b]
    stats = cache_stats(model)
    final = snapshot(model)
    return Outcome(
        different + differences(expected, final),
        len(final),
        sum(each.evictions for each in stats),
        sum(each.critical_path_fills for each in stats),
        model.sync_counts,
        sum(pool.host.num_rows for pool in cached_embeddings(model)),
    )


@functools.lru_cache(maxsize=2)
def _stock(case: Case, groups: int, sync_every: int, in_order: bool) -> tuple[dict[str, list[Tensor]], list[Any]]:
    stock = build_stock(case, groups, in_rank_order if in_order else None)
    losses = train_stock(stock, case, sync_every)
    return snapshot(stock), losses


def group_case(**changes: Any) -> Case:
    """Four tables in caches of a fifth of their rows, with initial weights from a seed."""
    given: dict[str, Any] = {"init_seed": SEED, "ratio": 0.22, "dims": (8, 8, 8, 8), "overflow": "grow"}
    return Case(**{**given, **changes})


def compare_small(case: Case, sync_every: int) -> tuple[list[str], int, int]:
    """Small rows in host memory, beside tables on the device that NumPy rounds behind each step and each average: what
    differed on this rank, evictions, and rows that rounding changed."""
    with mock.patch.object(sizes, "SMALL_TABLE_ROWS", 400):
        whole = build_ours(dataclasses.replace(case, host_dtype="fp32", full_rows=None), 2, sync_every, cached=False)
        reference = small_rows.Reference(whole, case)

        def rounded(batch: look_ahead.Batch) -> None:
            reference.after(batch.features)
            if whole.end_step():
                for t, rows in enumerate(case.rows):
                    reference._round(f"t{t}", range(rows))

        given = look_ahead.batches(case)
        losses = look_ahead.train(look_ahead.plain(whole), given, lambda step: rounded(given[step]))
        model = build_ours(case, 2, sync_every)
        found = train_ours(model, case, 8)
        different = [f"loss {step}" for step, (a, b) in enumerate(zip(losses, found, strict=True)) if a != b]
        different += parity.differences(small_rows.snapshot(whole), small_rows.snapshot(model))
    return different, sum(each.evictions for each in cache_stats(model)), reference.num_rounded
