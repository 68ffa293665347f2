"""Whether training with the cache equals training with stock TorchRec, bit for bit, and if not, where they part."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embershard.cache import CacheGrowthWarning
from embershard.data import Batch
from embershard.distributed import Ranks
from embershard.errors import ConfigError
from embershard.sharding.plan import Plan, TablePlacement
from embershard.sharding.torchrec import cache_stats, cached_embeddings, flush
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.planner.placement import built_pools, placements_of
from embershard.training.build import find_profile
from embershard.training.checkpoint.host_rows import taking_references
from embershard.training.config import RunConfig
from embershard.training.fit.id_rules import refuse_ids
from embershard.training.fit.model_size import table_groups, tables_of_run
from embershard.training.parts.order import without_parts
from embershard.training.trainer import Trainer

if TYPE_CHECKING:
    from embershard.extras.verify.rounding import TableRounding

#: Tensors of a rank by name, each with the number of its first row in the whole tensor.
_Tensors = dict[str, tuple[int, Tensor]]


@dataclass(frozen=True)
class Difference:
    """A tensor that differs on one rank.

    Attributes:
        tensor: name of the parameter, or of the optimizer's state.
        rank: that holds the part which differs.
        row: the first one that differs, in the whole tensor; 0 for a number.
        num_rows: rows of this part that differ.
        cached, stock: the first value that differs, with the cache and without.
    """

    tensor: str
    rank: int
    row: int
    num_rows: int
    cached: float
    stock: float


@dataclass(frozen=True)
class CachedRun:
    """What the caches did in a compared run, on all ranks.

    Attributes:
        slots: of all caches.
        rows: of all cached tables.
        evictions: of cached rows.
        passed_over: slots that would have been evicted but for their pins, counted once per plan. Without any, the
            comparison would not notice a cache that ignores pins.
    """

    slots: int
    rows: int
    evictions: int
    passed_over: int


@dataclass(frozen=True)
class Equivalence:
    """Result of a comparison.

    Attributes:
        steps: that were trained.
        caches: of the size in the settings, then ever smaller ones. Where something differs, the last one differs.
        num_tensors: compared on all ranks, parts of one tensor on several ranks counted each.
        loss_step: the first step whose loss differs; None where all are equal.
        step: the first step after which a tensor differs, 0 for the initial weights; None where all are equal.
        differences: after that step.
    """

    steps: int
    caches: tuple[CachedRun, ...]
    num_tensors: int
    loss_step: int | None
    step: int | None
    differences: tuple[Difference, ...]

    @property
    def is_equal(self) -> bool:
        """True if nothing differs."""
        return self.loss_step is None and self.step is None


def compare_with_stock(config: RunConfig, ranks: Ranks, steps: int) -> Equivalence:
    """Train the first steps of a run with its cache and look-ahead, and again with stock TorchRec, and compare every
    bit: losses, weights and optimizer states. Collective.

    Both have the same tables at the same places, the same batches, and `train.deterministic`. Where they are equal and
    pins hardly mattered, the cache is halved and compared again, until they did or a smaller cache grows back
    (decision 0055). Where they differ, the step is found by bisection, by training
    again from the start: nothing is read from the caches before the step that is compared.

    Raises:
        ConfigError: nothing is cached, or the run adds up in another order than stock TorchRec.

    With a run's settings, in a process group (`embershard verify` is the command):

    >>> caches = (CachedRun(slots=80, rows=900, evictions=7, passed_over=0), CachedRun(40, 900, 30, passed_over=2))
    >>> verdict = Equivalence(steps=4, caches=caches, num_tensors=9, loss_step=None, step=None, differences=())
    >>> verdict.is_equal
    True
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = _Runs(config, ranks, steps, Path(folder))
        return runs.verdict()


class _Runs:
    """The pair of runs, trained as often as needed."""

    def __init__(self, config: RunConfig, ranks: Ranks, steps: int, folder: Path) -> None:
        _check(config, ranks)
        self._ranks, self._folder = ranks, folder
        self._steps = min(steps, config.train.max_steps or steps)
        train = replace(config.train, max_steps=self._steps, eval_every=None, deterministic=True)
        self._config = replace(without_parts(config), train=train)
        self._caches: list[CachedRun] = []
        self._num_tensors = 0
        self._stock: tuple[Any, list[float], _Tensors] | None = None  # of the last comparison, and of what it was

    def verdict(self) -> Equivalence:
        """Train all steps, with smaller caches until pins mattered; where something differs, find the first step."""
        loss_step, differences = self._compare(self._steps)
        while loss_step is None and not differences and self._halve():
            loss_step, differences = self._compare(self._steps)
        caches, num_tensors = tuple(self._caches), self._num_tensors
        step = self._steps if differences else None
        if loss_step not in (None, step):
            _, found = self._compare(loss_step)
            if found:
                step, differences = loss_step, found
        equal = -1
        while step is not None and step - equal > 1:
            middle = (equal + step) // 2
            _, found = self._compare(middle)
            if found:
                step, differences = middle, found
            else:
                equal = middle
        return Equivalence(self._steps, caches, num_tensors, loss_step, step, tuple(differences))

    def _halve(self) -> bool:
        """Halve the caches for the next run; return False if pins mattered as often as there were steps, or if the
        last run's caches grew back."""
        last = self._caches[-1]
        if last.passed_over >= self._steps or (len(self._caches) > 1 and last.slots >= self._caches[-2].slots):
            return False
        cache, sharding = self._config.cache, self._config.sharding
        if sharding.plan is None:
            cache = replace(cache, ratio=last.slots / last.rows / 2, device_bytes=None, overflow="grow")
        else:  # which decides the sizes
            path, smaller = sharding.plan, str(self._folder / f"smaller_{len(self._caches)}.json")

            def save_smaller() -> None:
                plan = Plan.load(path)
                pools = tuple(replace(pool, slots=max(1, pool.slots // 2)) for pool in plan.pools)
                replace(plan, pools=pools, prediction=None).save(smaller)  # a prediction is of other slots

            self._ranks.from_first(save_smaller)
            cache = replace(cache, overflow="grow")
            sharding = replace(sharding, plan=smaller)
        self._config = replace(self._config, cache=cache, sharding=sharding)
        return True

    def _compare(self, steps: int) -> tuple[int | None, list[Difference]]:
        """Train so many steps with both; return the first step whose loss differs, and all tensors that do."""
        cached = Trainer(self._config, self._ranks)
        watches = [pool.cache.watch_pins() for pool in cached_embeddings(cached.model)]
        with warnings.catch_warnings():
            if self._caches:  # made small on purpose
                warnings.simplefilter("ignore", CacheGrowthWarning)
            losses = list(_train(cached, steps))
        cached.close()
        stats = cache_stats(cached.model)
        passed_over = sum(watch.in_flight if self._config.lookahead else watch.own for watch in watches)
        counts = [sum(getattr(table, name) for table in stats) for name in ("slots", "rows", "evictions")]
        self._caches.append(CachedRun(*map(self._sum, [*counts, passed_over])))
        tensors = _tensors_of(cached)
        stock_losses, stock = self._train_stock(cached, steps)
        pairs = enumerate(zip(losses, stock_losses, strict=True), 1)
        loss_step = next((number for number, (a, b) in pairs if repr(a) != repr(b)), None)
        differences = list(_differences(tensors, stock, self._ranks.rank))
        self._num_tensors = self._sum(len(tensors))
        gathered: list[list[Difference]] = self._ranks.all_gather_objects(differences)
        return loss_step, [difference for on_rank in gathered for difference in on_rank]

    def _train_stock(self, cached: Trainer, steps: int) -> tuple[list[float], _Tensors]:
        """Train so many steps with the tables where `cached` has them; return losses, weights and states."""
        own_types: dict[str, Any] = {"host_dtype": "fp32", "host_dtypes": {}, "full_rows": None}
        config = replace(self._config, cache=replace(self._config.cache, enabled=False, **own_types))
        shapes = {table.name: (table.num_rows, table.dim, table.dtype) for table in tables_of_run(config)}
        tables = placements_of(cached.model.plan, shapes, table_groups(self._config))
        if self._stock is None or self._stock[0] != (steps, tables):
            self._stock = None  # frees its memory
            stock = Trainer(self._placed(config, cached, tables), self._ranks)
            rounding = None
            if self._config.cache.rounds_rows:
                profile = find_profile(self._config, stock.source)
                from embershard.extras.verify.rounding import TableRounding  # of a capability that may be taken out

                rounding = TableRounding(self._config, profile, stock.model.state_dict(), self._ranks)
            losses = list(_train(stock, steps, rounding))
            stock.close()
            self._stock = (steps, tables), losses, _tensors_of(stock)
        return self._stock[1:]

    def _placed(self, config: RunConfig, cached: Trainer, tables: tuple[TablePlacement, ...]) -> RunConfig:
        """Return `config` with a plan that has the tables at these places."""
        if config.sharding.plan is not None:
            return config
        ranks = self._ranks
        pools = ranks.all_gather_objects(built_pools(cached.model, ranks.rank))
        plan = Plan(
            world_size=ranks.world_size,
            ranks_per_node=ranks.local_world_size,
            batch_size=config.train.rank_batch_size(ranks.world_size),
            device="cuda" if ranks.device.type == "cuda" else "cpu",
            device_memory_bytes=None,
            host_memory_bytes=None,
            settings={},
            tables=tables,
            pools=tuple(pool for on_rank in pools for pool in on_rank),
        )
        path = self._folder / "plan.json"
        ranks.from_first(lambda: plan.save(path))  # the first rank reads it, too
        return replace(config, sharding=replace(config.sharding, plan=str(path)))

    def _sum(self, number: int) -> int:
        return int(self._ranks.all_gather(torch.tensor(float(number), dtype=torch.float64)).sum())


def _check(config: RunConfig, ranks: Ranks) -> None:
    refuse_ids(config.data, "stock TorchRec trains rows whose ids never change")
    if not config.cache.enabled:
        raise ConfigError("cache.enabled is false: there is no cache to compare with stock TorchRec. Set it to true.")
    if config.model.frozen:
        raise ConfigError(
            f"model.frozen: got {list(config.model.frozen)}, needed none: stock TorchRec trains every table. Compare "
            "with `--set model.frozen=[]`."
        )
    if config.sharding.mode != "sharded":
        raise ConfigError(
            f'sharding.mode = "{config.sharding.mode}" adds up in another order than stock TorchRec, or trains on '
            'another one, so bits may differ. Compare in mode "sharded".'
        )
    path, exchanges = config.sharding.plan, {config.sharding.exchange}
    if path is not None:
        tables = ranks.from_first(lambda: Plan.load(path)).tables
        exchanges = {table.exchange for table in tables}
        replicated = [table.table for table in tables if table.kernel == "replicated"]
        if replicated:
            raise ConfigError(
                f"{path} replicates the tables {replicated[:5]}, which stock TorchRec trains in another way. Compare "
                "with a plan that has none (embershard plan without --replicate-rows)."
            )
    if exchanges != {"pooled"} and ranks.world_size > 1:
        raise ConfigError(
            'sharding.exchange is "rows" or "auto", or the plan has tables that exchange rows, which adds gradients up '
            'in another order than stock TorchRec, so bits may differ on several ranks. Compare with "pooled", or on '
            "one rank (--nproc 1)."
        )


def _train(trainer: Trainer, steps: int, rounding: TableRounding | None = None) -> Iterator[float]:
    """Train, and yield the mean loss of all ranks of each step. `rounding`: of tables without a cache."""
    for _ in range(steps if trainer.total_steps is None else min(steps, trainer.total_steps)):
        with trainer.upcoming.next() as batch:
            trainer.step(batch)
            if rounding is not None:
                rounding.after_step([batch] if isinstance(batch, Batch) else list(batch.taken))
        yield trainer.losses.monitor.mean()


def _tensors_of(trainer: Trainer) -> _Tensors:
    """Return this rank's part of all weights and optimizer states. Trained rows are written back before."""
    model = trainer.model
    pools = list(cached_embeddings(model))
    with taking_references(model):
        found = _found_in(trainer)
    return {name: (first, _contents(part, pools)) for name, (first, part) in found.items()}


def _contents(part: Tensor, pools: Sequence[CachedTableBatchedEmbeddings]) -> Tensor:
    """Return rows in place of the memory that stands for them; others as they are."""
    return next((rows for pool in pools if (rows := pool.host.read_part(part)) is not None), part)


def _found_in(trainer: Trainer) -> _Tensors:
    flush(trainer.model)
    model = trainer.model
    states = {
        **model.fused_optimizer.state_dict()["state"],
        **{f"{name} (dense)": values for name, values in trainer.optimizers.dense.state_dict()["state"].items()},
    }
    groups: list[dict[str, Any]] = [model.state_dict()]
    groups += [{f"{of}: {name}": value for name, value in values.items()} for of, values in states.items()]
    return {name: part for group in groups for key, value in group.items() for name, part in _parts(key, value)}


def _parts(name: str, value: Any) -> Iterator[tuple[str, tuple[int, Tensor]]]:
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            first = shard.metadata.shard_offsets
            yield f"{name} from {tuple(first)}" if any(first[1:]) else name, (first[0], shard.tensor.detach())
    elif isinstance(value, Tensor):
        yield name, (0, value.detach())


def _differences(cached: _Tensors, stock: _Tensors, rank: int) -> Iterator[Difference]:
    """Yield what differs in any bit, sorted by name. On a GPU cached rows are in host memory, and stock's are not."""
    assert cached.keys() == stock.keys(), f"not of one model: {sorted(cached.keys() ^ stock.keys())[:5]}"
    for name, (first, on_device) in sorted(cached.items()):
        ours, theirs = on_device.cpu(), stock[name][1].cpu()
        is_other = (_bits(ours) != _bits(theirs)).any(dim=1)
        rows = is_other.nonzero().flatten().tolist()
        if rows:
            row = (tensor.reshape(len(is_other), -1)[rows[0]].tolist() for tensor in (ours, theirs))
            pairs = list(zip(*row, strict=True))
            values = next(((a, b) for a, b in pairs if repr(a) != repr(b)), pairs[0])  # two NaNs may differ in bits
            yield Difference(name, rank, first + rows[0], len(rows), *values)


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes [R, ...] of a tensor's rows; a number is one row."""
    return tensor.reshape(len(tensor) if tensor.dim() else 1, -1).contiguous().view(torch.uint8)
