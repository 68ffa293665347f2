"""Whether training with the cache equals training with stock TorchRec, bit for bit, and if not, where they part."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embershard.cache import CacheGrowthWarning
from embershard.data import Batch
from embershard.distributed import Ranks
from embershard.errors import ConfigError
from embershard.extras.verify.comparison import Comparison, Equivalence, Tensors, tensors_of, with_halved_caches
from embershard.sharding.plan import Plan, TablePlacement
from embershard.sharding.torchrec import cached_embeddings
from embershard.sharding.torchrec.planner.placement import built_pools, placements_of
from embershard.training.build import find_profile
from embershard.training.config import RunConfig
from embershard.training.fit.id_rules import refuse_ids
from embershard.training.fit.model_size import table_groups, tables_of_run
from embershard.training.parts.order import without_parts
from embershard.training.trainer import Trainer

if TYPE_CHECKING:
    from embershard.extras.verify.rounding import TableRounding


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

    >>> from embershard.extras.verify.comparison import CachedRun
    >>> caches = (CachedRun(slots=80, rows=900, evictions=7, passed_over=0), CachedRun(40, 900, 30, passed_over=2))
    >>> verdict = Equivalence(steps=4, caches=caches, num_tensors=9, loss_step=None, step=None, differences=())
    >>> verdict.is_equal
    True
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = _Runs(config, ranks, steps, Path(folder))
        return runs.verdict()


class _Runs(Comparison):
    """The pair of runs of some settings."""

    def __init__(self, config: RunConfig, ranks: Ranks, steps: int, folder: Path) -> None:
        _check(config, ranks)
        super().__init__(ranks, min(steps, config.train.max_steps or steps))
        self._folder = folder
        train = replace(config.train, max_steps=self._steps, eval_every=None, deterministic=True)
        self._config = replace(without_parts(config), train=train)
        self._stock: tuple[Any, list[float], Tensors] | None = None  # of the last comparison, and of what it was

    def _halve(self) -> None:
        last, cache, sharding = self._caches[-1], self._config.cache, self._config.sharding
        if sharding.plan is None:
            cache = replace(cache, ratio=last.slots / last.rows / 2, device_bytes=None, overflow="grow")
        else:  # which decides the sizes
            path, smaller = sharding.plan, str(self._folder / f"smaller_{len(self._caches)}.json")

            def save_smaller() -> None:
                with_halved_caches(Plan.load(path)).save(smaller)

            self._ranks.from_first(save_smaller)
            cache = replace(cache, overflow="grow")
            sharding = replace(sharding, plan=smaller)
        self._config = replace(self._config, cache=cache, sharding=sharding)

    def _train(self, steps: int) -> tuple[tuple[list[float], Tensors], tuple[list[float], Tensors]]:
        cached = Trainer(self._config, self._ranks)
        watches = [pool.cache.watch_pins() for pool in cached_embeddings(cached.model)]
        with warnings.catch_warnings():
            if self._caches:  # made small on purpose
                warnings.simplefilter("ignore", CacheGrowthWarning)
            losses = list(_train(cached, steps))
        cached.close()
        self._note_caches(cached.model, sum(w.in_flight if self._config.lookahead else w.own for w in watches))
        return (losses, _tensors_of(cached)), self._train_stock(cached, steps)

    def _train_stock(self, cached: Trainer, steps: int) -> tuple[list[float], Tensors]:
        """Train so many steps with the tables where `cached` has them; return losses, weights and states."""
        own_types: dict[str, Any] = {"host_dtype": "fp32", "host_dtypes": {}, "full_rows": None}
        config = replace(self._config, cache=replace(self._config.cache, enabled=False, **own_types))
        config = replace(config, train=replace(config.train, cuda_graph=False))
        shapes = {table.name: (table.num_rows, table.dim, table.dtype) for table in tables_of_run(config)}
        num_sharding, _ = config.sharding.group_shape(self._ranks.world_size, 1)
        first = self._ranks.rank - self._ranks.rank % num_sharding  # of this rank's group
        tables = tuple(
            replace(table, ranks=tuple(rank - first for rank in table.ranks))
            for table in placements_of(cached.model.plan, shapes, table_groups(self._config))
        )
        if self._stock is None or self._stock[0] != (steps, tables):
            self._stock = None  # frees its memory
            stock = Trainer(self._placed(config, cached, tables), self._ranks)
            rounding = None
            if self._config.cache.rounds_rows:
                profile = find_profile(self._config, stock.source)
                # Of a capability that may be taken out.
                from embershard.extras.verify.rounding import TableRounding, small_tables_of

                small = small_tables_of(self._config, profile)
                rounding = TableRounding(small, stock.model.state_dict(), self._ranks)
            losses = list(_train(stock, steps, rounding))
            stock.close()
            self._stock = (steps, tables), losses, _tensors_of(stock)
        return self._stock[1:]

    def _placed(self, config: RunConfig, cached: Trainer, tables: tuple[TablePlacement, ...]) -> RunConfig:
        """Return `config` with a plan that has the tables at these places."""
        if config.sharding.plan is not None:
            return config
        ranks = self._ranks
        num_sharding, per_node = config.sharding.group_shape(ranks.world_size, ranks.local_world_size)
        pools = ranks.all_gather_objects(built_pools(cached.model, ranks.rank))[:num_sharding]  # of the first group
        plan = Plan(
            world_size=num_sharding,
            ranks_per_node=per_node,
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


def _check(config: RunConfig, ranks: Ranks) -> None:
    refuse_ids(config.data, "stock TorchRec trains rows whose ids never change")
    if not config.cache.enabled:
        raise ConfigError("cache.enabled is false: there is no cache to compare with stock TorchRec. Set it to true.")
    if config.model.frozen:
        raise ConfigError(
            f"model.frozen: got {list(config.model.frozen)}, needed none: stock TorchRec trains every table. Compare "
            "with `--set model.frozen=[]`."
        )
    if config.sharding.groups > 1 and config.cache.rounds_rows:
        raise ConfigError(
            f"sharding.groups = {config.sharding.groups} with rows that are rounded in host memory, also behind each "
            'average, which stock TorchRec does not. Compare with cache.host_dtype = "fp32".'
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
                given = [batch] if isinstance(batch, Batch) else list(batch.taken)
                rounding.after_step([each.sparse_features for each in given])
        if trainer.config.sharding.groups > 1:
            trainer.model.end_step()
        yield trainer.losses.monitor.mean()


def _tensors_of(trainer: Trainer) -> Tensors:
    """Return `tensors_of` a trainer's model."""
    return tensors_of(trainer.model, trainer.optimizers.dense.state_dict()["state"])
