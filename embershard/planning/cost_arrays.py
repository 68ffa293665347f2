"""The costs of every way to place a table, as arrays: what the local search adds up, and what the bound relaxes.

Costs are those of the functions that predict. The work of a shard is linear in its rows and in its share of the
lookups, so that three calls of these functions give the costs of all shards of a table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from embershard.cache.config import LEAST_SLOTS, MOST_POOL_ROWS
from embershard.planning.cost import work
from embershard.planning.cost.rates import TERMS, Rates, StepWork, fastest, of_each
from embershard.planning.request import PlanRequest
from embershard.planning.search_loops import FORMULA, Machine
from embershard.planning.simulate.pool_report import ShardReport
from embershard.planning.simulate.step_formula import STAGES, StepFormula, by_column
from embershard.planning.simulate.step_replay import STAGES as WORK_OF_STAGES
from embershard.planning.simulate.step_replay import Pipeline, num_buckets, stage_seconds
from embershard.planning.slots import needed_slots
from embershard.planning.workload import Workload
from embershard.sharding import memory_model
from embershard.sharding.sharding_types import COPIES, SHARDING_TYPES, Sharding
from embershard.sharding.shards import Exchange, Kernel, TablePlacement
from embershard.sharding.sizes import PlacedShard, TableSize

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_OF_STAGE = {"copies": ("write_backs", "fills")}
#: Columns of the device memory of shards and ranks: what is there whatever the caches' sizes, and of pooled rows
#: without the ids; caches as large as a batch needs; caches as large as the seconds are of; what is kept of each known
#: batch; shards that exchange rows.
MEMORY = ("fixed", "needed", "held", "batch", "by_rows")
_FILLED = 0.93  # share of the memory that caches fill when tables are priced: shards have to be placed, too
_LEVELS = (2.2, 1.5, 1.0, 0.82, 0.66, 0.52, 0.42, 0.33, 0.24)  # slots of a table, relative to those in one cache of all
#: The most of a rank's memory that a table loses from one size to the next, as long as there are not so many sizes.
_STEP, _MOST_SIZES = 0.04, 40
#: Sizes of caches in the bound, which is lower by what a cache of the next size does better.
_BEST_LEVELS, _MOST_LEVELS = 40, 160  # of one table, and of all


@dataclass(frozen=True, eq=False)
class Option:
    """One way to place a table; N shards, in TorchRec's order. In a bound, the last one may be a part of a shard.

    Attributes:
        sharding, kernel, exchange: as in a `TablePlacement`.
        group: tables of one group are exchanged together; "": with those that every placement has.
        seconds: [N, stages] that each shard adds to its rank's step.
        memory: [N, columns] of the device.
        host_bytes: [N].
        row_id_seconds: that every rank's lookup takes longer, to find the distinct ids of its samples.
        level: of its cache's size, in a search from 0, the largest; 0 without a cache.
        pool: shards of one share the caches of their ranks; "" without a cache.
        pool_rows: of all shards.
        columns: of the blocks, where they differ, as in a `TablePlacement`.
    """

    sharding: Sharding
    kernel: Kernel
    exchange: Exchange
    group: str
    seconds: Floats
    memory: Floats
    host_bytes: Floats
    row_id_seconds: float
    level: int = 0
    pool: str = ""
    pool_rows: float = 0.0
    columns: tuple[int, ...] = ()

    @property
    def num_shards(self) -> int:
        """N."""
        return len(self.host_bytes)

    @cached_property
    def total_seconds(self) -> Floats:
        """[stages] of all shards together."""
        return np.asarray(self.seconds.sum(axis=0))

    @cached_property
    def most_seconds(self) -> Floats:
        """[stages] of the shard with most of each."""
        return np.asarray(self.seconds.max(axis=0))

    @cached_property
    def total_memory(self) -> Floats:
        """[columns] of all shards together."""
        return np.asarray(self.memory.sum(axis=0))

    def is_as_good_as(self, other: Option) -> bool:
        """Return True if this one in the place of the other makes no rank's work longer, and none's memory larger."""
        if (self.sharding, self.num_shards, self.group) != (other.sharding, other.num_shards, other.group):
            return False
        fixed, needed, held = (MEMORY.index(name) for name in ("fixed", "needed", "held"))
        more = self.memory - other.memory
        more[:, [needed, held]] += more[:, [fixed]]  # caches are as large as needed, or as held
        more[:, fixed] = 0.0
        is_as_fast = (self.seconds <= other.seconds).all() and self.row_id_seconds <= other.row_id_seconds
        return bool(is_as_fast and (more <= 0).all() and (self.host_bytes <= other.host_bytes).all())


@dataclass(frozen=True, eq=False)
class CostArrays:
    """All options of all sharded tables; T tables, R ranks.

    Attributes:
        tables: in the order of the model.
        options: of each table, at least one.
        base_seconds: [stages] of a rank without a sharded table.
        base_memory: [columns] of such a rank.
        less_bytes: how much less than the limit each rank may use, [R].
        slowdown: seconds of each rank for the same work, relative to those of the options and of `base_seconds`,
            [R, stages]: 1 or more, and ones where all ranks are as fast.
        window: bytes of the known batches from those of one, and of a rank with a table that exchanges rows.
        world_size, ranks_per_node: R, and those of a node.
        device_limit: bytes of a rank; None: not limited.
        ratio: slots of each pool as a share of its rows, where `device_limit` and "held" are slots; None: they are not.
        host_limit: bytes of a node.
        formula: of the seconds of a step.
        ranks: of the tables, where they are decided.
        most_pool_rows: rows that a cache can number; None: those of all tables are fewer.
    """

    tables: tuple[TableSize, ...]
    options: tuple[tuple[Option, ...], ...]
    base_seconds: Floats
    base_memory: Floats
    window: BatchWindow
    world_size: int
    ranks_per_node: int
    device_limit: float | None
    ratio: float | None
    host_limit: float | None
    formula: StepFormula
    less_bytes: Floats
    slowdown: Floats
    ranks: tuple[tuple[int, ...] | None, ...] = ()
    most_pool_rows: int | None = None

    @property
    def without_copies(self) -> CostArrays:
        """The same costs without the options of copies."""
        return replace(self, options=tuple(tuple(o for o in own if o.kernel != "replicated") for own in self.options))

    @cached_property
    def floor_seconds(self) -> float:
        """Seconds of a step that no placement is below: every stage has the least work there is, evenly spread."""
        if not self.tables:
            return float(self.formula.seconds(self.formula.columns(self.base_seconds), 0))
        lookup = STAGES.index("lookup")
        least = self.base_seconds.copy()
        for options in self.options:
            mean = np.array([option.total_seconds for option in options]) / self.world_size
            mean[:, lookup] += [option.row_id_seconds for option in options]
            least += mean.min(axis=0)
        least *= self.world_size / self.capacity
        return float(self.formula.seconds(self.formula.columns(least), self.least_groups))

    @property
    def least_groups(self) -> int:
        """Groups of sharded tables that any placement has: none where all tables may be copies."""
        return int(not all(any(each.kernel == "replicated" for each in options) for options in self.options))

    @cached_property
    def are_alike(self) -> bool:
        """Whether all ranks are as fast."""
        return bool((self.slowdown == 1).all())

    @cached_property
    def capacity(self) -> Floats:
        """How many ranks as fast as `base_seconds` has them all ranks are worth, [stages]."""
        return np.asarray((1 / self.slowdown).sum(axis=0))

    @property
    def rank_memory(self) -> Floats:
        """Memory of each rank without a sharded table, [R, columns]: what it may not use is taken."""
        memory = np.tile(self.base_memory, (self.world_size, 1))
        memory[:, MEMORY.index("fixed")] += self.less_bytes
        return memory

    def device_bytes(self, memory: Floats) -> Floats:
        """Return the bytes [...] of ranks with so much in memory, [..., columns]."""
        fixed, needed, held, batch, by_rows = by_column(memory)
        return fixed + np.maximum(needed, held) + self.window.bytes_of(batch) + (by_rows > 0) * self.window.by_rows

    @property
    def machine(self) -> Machine:
        """The formula and the limits, as the compiled loop of a search reads them."""
        formula, window, pipeline = self.formula, self.window, self.formula.pipeline
        is_ahead = pipeline.lookahead > 0
        limits = [math.inf if limit is None else max(1.0, limit) for limit in (self.device_limit, self.host_limit)]
        return Machine(
            overlap=0 if pipeline.device == "cpu" else is_ahead + 1 + (is_ahead and pipeline.prefetch > 0),
            ranks_per_node=self.ranks_per_node,
            cores=pipeline.cores_for(self.world_size) or 0,
            cores_copy=pipeline.cores_copy(self.world_size),
            formula=np.array([getattr(formula, name) for name in FORMULA], float),
            slowdown=self.slowdown[: 0 if self.are_alike else None],
            limits=np.array([*limits, window.most, window.least, window.limit, window.by_rows], float),
        )

    @property
    def by_memory(self) -> CostArrays:
        """The same options, whose seconds are the bytes that a rank needs at least: the fastest placement of them is
        the one whose fullest rank needs the least."""
        batch = sum(option[0].memory[:, MEMORY.index("batch")].sum() for option in self.options) / self.world_size
        times = float(self.window.bytes_of(np.array(batch))) / batch if batch else 0.0
        weights = {"fixed": 1.0, "needed": 1.0, "batch": times, "by_rows": self.window.by_rows / len(self.options)}
        as_seconds = np.zeros((len(MEMORY), len(STAGES)))
        as_seconds[:, STAGES.index("copies")] = [weights.get(name, 0.0) for name in MEMORY]
        gpu = Pipeline("cuda", self.ranks_per_node)
        return replace(
            self,
            options=tuple(
                tuple(replace(each, seconds=each.memory @ as_seconds, row_id_seconds=0.0) for each in options)
                for options in self.options
            ),
            base_seconds=self.base_memory @ as_seconds,
            device_limit=None,
            slowdown=np.ones_like(self.slowdown),
            formula=StepFormula(gpu, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1, 0.0, 0.0),
        )

    def options_of(self, placed: TablePlacement) -> list[int]:
        """Return the options of a table's placement, larger caches first; those without a cache, where it has none with
        one. None where it has neither."""
        table = next((number for number, size in enumerate(self.tables) if size.table == placed.table), None)
        is_on_ranks_of_its_own = len(set(placed.ranks)) == len(placed.ranks)
        own = () if table is None or not is_on_ranks_of_its_own else self.options[table]
        kind = (placed.sharding, len(placed.ranks) or self.world_size, placed.columns)
        alike = [number for number, each in enumerate(own) if (each.sharding, each.num_shards, each.columns) == kind]
        found = [number for number in alike if own[number].kernel == placed.kernel]
        return found or [number for number in alike if own[number].kernel == "device"]

    def placement(self, table: int, option: int, ranks: Sequence[int]) -> TablePlacement:
        """Return a table's option on these ranks as a `TablePlacement`."""
        size, chosen = self.tables[table], self.options[table][option]
        own_ranks = () if chosen.kernel == "replicated" else tuple(ranks)
        kinds = (chosen.sharding, chosen.kernel, own_ranks, chosen.exchange, size.group, chosen.columns)
        return TablePlacement(size.table, size.rows, size.dim, size.dtype, *kinds)


@dataclass(frozen=True)
class BatchWindow:
    """Bytes of the batches that a rank keeps: of all that it may know, but no more in all than a limit, or the batches
    that it cannot do without.

    Attributes:
        most, least: numbers of batches.
        limit: bytes of all of them.
        by_rows: of a rank with tables that exchange rows.
    """

    most: int
    least: int
    limit: float
    by_rows: float

    def bytes_of(self, batch: Floats) -> Floats:
        """Return the bytes of batches of so many bytes each."""
        return np.minimum(self.most * batch, np.maximum(self.limit, self.least * batch))

    @classmethod
    def of(cls, workload: Workload, counted: bool) -> BatchWindow:
        """Return the window of a run; nothing where it is not `counted`."""
        if not counted:
            return cls(0, 0, 0.0, 0.0)
        known, waiting = memory_model.known_batches(workload.shape)
        own_ids = sum(workload.lookups_per_sample.values()) * workload.shape.batch_size
        return cls(known, waiting, float(memory_model.MAX_KNOWN_BYTES), known * own_ids * memory_model.ID_BYTES)


def cost_arrays(request: PlanRequest, *, resident: bool, cached: bool, at_best: bool = False) -> CostArrays:
    """Return the options of all sharded tables.

    What cached rows cost follows from one cache over all ranks. A table may have a share of the slots that it would get
    there, too, so that others stay on the device.

    Args:
        resident, cached: which kinds of tables may be in the plan.
        at_best: for the bound: no plan costs less. Cached tables then have many sizes, each with the memory of that
            size and the fills of the next one.
    """
    workload, shape = request.workload, request.workload.shape
    sized, tables = request.sharded, workload.model.tables
    copies = [PlacedShard(t, 0, 0, t.rows, t.dim, COPIES, "replicated") for t in tables if t not in sized]
    stages = _stages_alone(request, copies, at_best)
    ratio, num_rows = request.budget.ratio, sum(table.rows for table in sized)
    slots_only = at_best and ratio is not None  # of all pools, a share of the rows
    window = BatchWindow.of(workload, counted=request.budget.cache_bytes is None and not slots_only)
    base_memory, limit = _base_memory(workload, copies, window), request.budget.rank_bytes
    if at_best and ratio is not None:
        limit = math.ceil(ratio * num_rows / shape.world_size) + LEAST_SLOTS * len(sized)
    maker = _Options(request, base_memory, window, at_best)
    kernels = [request.kernels(table.table, resident=resident, cached=cached) for table in sized]
    options: list[list[Option]] = [[] for _ in sized]
    levels = maker.levels(sized) if any("cached" in each for each in kernels) else [maker.reports(sized, 1)]
    for own, kinds, table, reports in zip(options, kernels, sized, zip(*levels, strict=True), strict=True):
        own += maker.of(table, reports[0], reports[0], "device", "cached" in kinds) if "device" in kinds else []
        own += [maker.copies(table)] if request.may_be_copied(table) else []
        pairs = list(zip(reports, (*reports[1:], reports[-1]) if at_best else reports, strict=True))
        for number, pair in enumerate(pairs if "cached" in kinds else []):
            if not number or pair != pairs[number - 1]:  # small tables are whole in all but the smallest caches
                own += [replace(each, level=number) for each in maker.of(table, *pair, "cached", True)]
    return CostArrays(
        tables=tuple(sized),
        options=tuple(tuple(own if at_best else _without_worse(own)) for own in options),
        base_seconds=np.array([sum(stages[part] for part in _OF_STAGE.get(name, (name,))) for name in STAGES]),
        base_memory=base_memory,
        window=window,
        world_size=shape.world_size,
        ranks_per_node=min(shape.ranks_per_node, shape.world_size),
        device_limit=None if limit is None else float(limit),
        ratio=ratio if slots_only and not any(pin.slots for pin in request.pins.values()) else None,
        host_limit=None if request.node_bytes is None else float(request.node_bytes),
        formula=_formula(request, stages, min if at_best else max),
        less_bytes=np.array([0.0 if slots_only else float(request.budget.less(r)) for r in range(shape.world_size)]),
        slowdown=maker.slowdown(sized, levels[-1]),
        ranks=tuple(None if (pin := request.pins.get(table.table)) is None else pin.ranks for table in sized),
        most_pool_rows=MOST_POOL_ROWS if num_rows > MOST_POOL_ROWS else None,
    )


def _stages_alone(request: PlanRequest, copies: Sequence[PlacedShard], at_best: bool) -> dict[str, float]:
    """Return the seconds of each stage without a sharded table, with these copies on every rank: of those that depend
    on tables as if ranks were the fastest in all, of the others the slowest one's. `at_best`: the optimizer's are the
    fastest one's, for its rank may have no table."""
    workload, reports = request.workload, list(map(request.workload.resident_report, copies))

    def seconds_of(kinds: tuple[Rates, ...]) -> dict[str, Floats]:
        layers = [workload.layers_work(each) for each in kinds]
        return stage_seconds([workload.rank_work(copies, reports, 0, own) for own in layers], kinds)

    stages = {name: float(each[0]) for name, each in seconds_of((fastest(request.rates),)).items()}
    if isinstance(request.rates, Rates):
        return stages
    own = seconds_of(tuple(dict.fromkeys(of_each(request.rates, workload.shape.world_size))))
    slowest = int((own["forward"] + own["backward"]).argmax())  # both are between two collectives
    stages |= {name: float(own[name][slowest]) for name in ("forward", "backward")}
    stages |= {name: float(own[name].max()) for name in ("overhead", "input", "all_reduce")}
    return stages | {"optimizer": float(own["optimizer"].min() if at_best else own["optimizer"].max())}


def _without_worse(options: Sequence[Option]) -> list[Option]:
    """Return the options without those that the first of their kind, or the one kept before them, is as good as."""
    kept: list[Option] = []
    of_kind: dict[tuple[str, int, tuple[int, ...]], list[Option]] = {}
    for each in options:
        own = of_kind.setdefault((each.sharding, each.num_shards, each.columns), [])
        if not any(other.is_as_good_as(each) for other in own[:1] + own[-1:]):
            own.append(each)
            kept.append(each)
    return kept


def _base_memory(workload: Workload, copies: Sequence[PlacedShard], window: BatchWindow) -> Floats:
    if not window.least:  # the budget is for caches alone
        return np.zeros(len(MEMORY))
    model, shape, per_sample = workload.model, workload.shape, sum(workload.lookups_per_sample.values())
    batch = memory_model.own_batch_bytes(model, shape, per_sample)
    batch += sum(memory_model.known_batch_bytes(copy, shape, workload.lookups_per_step(copy)) for copy in copies)
    taken = float(sum(workload.memory(copies, {}).device.values()))
    return np.array([taken - float(window.bytes_of(np.array(batch))), 0.0, 0.0, batch, 0.0])


def _formula(
    request: PlanRequest, stages: Mapping[str, float], of_ranks: Callable[[list[float]], float]
) -> StepFormula:
    """`of_ranks` of several speeds: the slowest one's latencies, or the fastest one's."""
    shape, rates = request.workload.shape, of_each(request.rates, request.workload.shape.world_size)
    sizes = shape.pieces * work.sizes_bytes(1, shape.world_size) if shape.world_size > 1 else 0.0
    own = ("overhead", "forward", "backward", "optimizer", "input", "all_reduce")
    away = max(0, shape.world_size - shape.ranks_per_node) / max(1, shape.world_size - 1)
    return StepFormula(
        pipeline=Pipeline.of_run(shape),
        **{name: stages[name] for name in own},
        buckets=num_buckets(request.workload.model.dense_parameter_bytes, shape.pieces > 1),
        latency=shape.pieces * of_ranks([each.seconds_per_collective for each in rates]) if sizes else 0.0,
        group_seconds=of_ranks(
            [
                sizes * (away * each.seconds_per_network_byte + (1 - away) * each.seconds_per_all_to_all_byte)
                for each in rates
            ]
        ),
    )


def _whole(table: TableSize) -> PlacedShard:
    return PlacedShard(table, 0, 0, table.rows, table.dim, "table_wise", "cached")


def _joined(blocks: Sequence[tuple[Option, float]], columns: tuple[int, ...] = ()) -> Option:
    """Return the option of these blocks of columns, or of such parts of them, side by side."""
    names, rows = ("seconds", "memory", "host_bytes"), sum(part * each.pool_rows for each, part in blocks)
    arrays: Any = {name: np.concatenate([part * getattr(each, name) for each, part in blocks]) for name in names}
    return replace(blocks[0][0], columns=columns, pool_rows=rows, **arrays)


class _Options:
    """Makes options."""

    def __init__(self, request: PlanRequest, base_memory: Floats, window: BatchWindow, at_best: bool) -> None:
        self._request, self._workload, self._shape = request, request.workload, request.workload.shape
        self._base_memory, self._window, self._at_best = base_memory, window, at_best
        self._rates = fastest(request.rates)

    def levels(self, tables: Sequence[TableSize]) -> list[tuple[ShardReport, ...]]:
        """Return what one cache over all ranks does with each table, for caches of several sizes: so many that no table
        has far fewer slots in one than in the one before."""
        found = {slots: self.reports(tables, slots) for slots in self.slots(tables)}
        if self._at_best or self._request.budget.ratio is not None:
            return list(found.values())
        slot_bytes = np.array([memory_model.pool_memory([_whole(each)], self._shape).slot_bytes for each in tables])
        held: dict[int, Floats] = {}
        while len(found) < _MOST_SIZES:
            held |= {n: slot_bytes * [each.held_rows for each in found[n]] for n in found.keys() - held.keys()}
            pairs = itertools.pairwise(sorted(found, reverse=True))
            steps = [(float((held[large] - held[small]).max()), (large + small) // 2) for large, small in pairs]
            most, slots = max(steps, default=(0.0, 0))
            if most <= _STEP * (self._request.budget.rank_bytes or 0) or slots in found:
                break
            found[slots] = self.reports(tables, slots)
        return [found[slots] for slots in sorted(found, reverse=True)]

    def slowdown(self, tables: Sequence[TableSize], reports: Sequence[ShardReport]) -> Floats:
        """Return the seconds of each rank for the same work, relative to the fastest one's in each kind, [R, stages];
        for a bound as if all of a stage's work were of the kind in which a rank is fastest."""
        rates, found = self._request.rates, np.ones((self._shape.world_size, len(STAGES)))
        if isinstance(rates, Rates):
            return found
        of_tables = [self._workload.shard_work(*pair) for pair in zip(map(_whole, tables), reports, strict=True)]
        done = replace(StepWork.total(of_tables), row_ids=float(self._shape.exchange != "pooled"))
        for column, name in enumerate(STAGES):
            stages = [WORK_OF_STAGES[part] for part in _OF_STAGE.get(name, (name,))]
            kinds = set[str]().union(*stages) - {"num_collectives"}
            terms = [(getattr(done, kind), rate) for kind, rate, _ in TERMS if kind in kinds and getattr(done, kind)]
            own = np.array([[amount * getattr(each, rate) for amount, rate in terms] for each in rates])
            best = np.array([amount * getattr(self._rates, rate) for amount, rate in terms])
            if (used := best > 0).any():
                by_kind = (own[:, used] / best[used]).min(axis=1)
                found[:, column] = by_kind if self._at_best else own.sum(axis=1) / best.sum()
        return found

    def slots(self, tables: Sequence[TableSize]) -> list[int]:
        """Return numbers of slots, of all ranks together: those that fill most of the memory, and shares of them."""
        budget, rows = self._request.budget, sum(table.rows for table in tables)
        if self._at_best:
            count = max(4, min(_BEST_LEVELS, _MOST_LEVELS // max(1, len(tables))))
            return [1, *np.unique(np.geomspace(max(1, rows // 10**5), rows, count).round().astype(int)).tolist()]
        if budget.ratio is not None:
            return [round(budget.ratio * rows)]
        mean = (budget.rank_bytes or 0) - sum(budget.less_bytes) / self._shape.world_size
        low, high, left = 0, rows, _FILLED * mean
        while high - low > max(1, rows // 1000):
            middle = (low + high) // 2
            low, high = (middle, high) if self._taken(tables, middle) <= left else (low, middle)
        return list(dict.fromkeys(max(1, min(rows, round(low * level))) for level in _LEVELS))

    def _taken(self, tables: Sequence[TableSize], slots: int) -> float:
        """Return a rank's mean bytes with all tables in one cache of so many slots, and all ids on one rank: it keeps
        fewer batches."""
        memory = self._base_memory.copy()
        for table, report in zip(tables, self.reports(tables, slots), strict=True):
            memory += self._memory(_whole(table), report, report, np.ones(1), np.ones(1))[0] / self._shape.world_size
        fixed, needed, held, batch, _ = memory
        window = self._window.bytes_of(batch * self._shape.world_size) / self._shape.world_size
        return float(fixed + max(needed, held) + window)

    def reports(self, tables: Sequence[TableSize], slots: int) -> tuple[ShardReport, ...]:
        """Return what one cache of so many slots over all ranks does with each table."""
        return self._workload.counted_reports([_whole(each) for each in tables], max(1, slots)) if tables else ()

    def of(self, table: TableSize, size: ShardReport, done: ShardReport, kernel: Kernel, cached: bool) -> list[Option]:
        """Return the options of a table, from the reports of one cache over all ranks of its `size`, and of the one
        that does its work (`done`). `cached`: it may be in a cache."""
        shape, names = self._shape, self._request.allowed[table.table]
        if kernel == "device" and not self._at_best:  # FBGEMM cannot train a rank without a row
            local = min(shape.ranks_per_node, shape.world_size)
            fit = [name for name in names if not SHARDING_TYPES[name].is_too_small(table.rows, shape.world_size, local)]
            names = fit if fit or cached else names
        found = []
        for name in cast("list[Sharding]", names):
            for cut in self._request.column_cuts(table, name, more=self._at_best):
                is_even = len(set(cut)) == 1
                exchange = self._workload.exchange_of(table.table, name, cut[0]) if is_even else "pooled"
                whole = PlacedShard(table, 0, 0, table.rows, table.dim, name, kernel, exchange)
                own = {each: self._block(replace(whole, columns=each), size, done) for each in sorted(set(cut))}
                if not self._at_best:
                    found.append(_joined([(own[each], 1.0) for each in cut], () if is_even else cut))
                    continue
                for each, block in own.items():  # a plan of uneven blocks is a mixture of plans of even ones
                    count = table.dim / each
                    found.append(_joined([(block, min(1.0, count - n)) for n in range(math.ceil(count))]))
        return found

    def copies(self, table: TableSize) -> Option:
        """Return the option of a copy on every rank, whose messages are of mean rows: no plan costs less."""
        workload, shape, num_ranks = self._workload, self._shape, self._shape.world_size
        copy = PlacedShard(table, 0, 0, table.rows, table.dim, COPIES, "replicated")
        own = workload.shard_work(copy, workload.resident_report(copy))
        done = StepWork.total([own, workload.copies_work([table.table], table.dim, at_least=True)])
        by_stage = stage_seconds([done], self._rates)
        seconds = np.stack([sum(by_stage[part] for part in _OF_STAGE.get(name, (name,))) for name in STAGES], axis=-1)
        memory, lookups = np.zeros(len(MEMORY)), workload.lookups_per_step(copy)
        memory[0] = sum(memory_model.resident_bytes([copy]).values())
        memory[0] += memory_model.vector_bytes(copy, shape.batch_size, lookups)
        memory[3] = memory_model.known_batch_bytes(copy, shape, lookups)
        is_paid = any(each.dim == table.dim for each in self._request.replicated)  # their gradients travel together
        return Option(
            COPIES,
            "replicated",
            "pooled",
            group="" if is_paid else f"{COPIES} of {table.dim}",
            seconds=np.tile(seconds, (num_ranks, 1)),
            memory=np.tile(memory, (num_ranks, 1)),
            host_bytes=np.zeros(num_ranks),
            row_id_seconds=0.0,
        )

    def _block(self, whole: PlacedShard, size: ShardReport, done: ShardReport) -> Option:
        """Return the option of one block of columns: all of its shards by rows."""
        workload, shape, table, kernel = self._workload, self._shape, whole.table, whole.kernel
        local = min(shape.ranks_per_node, shape.world_size)
        blocks = SHARDING_TYPES[whole.sharding].row_blocks(shape.world_size, local)
        bounds = np.minimum(np.arange(blocks + 1) * -(-table.rows // blocks), table.rows)
        shares, parts = workload.block_shares(table.table, bounds), np.diff(bounds) / table.rows
        arriving = workload.as_exchanged(whole, done)
        if kernel == "device":
            arriving = replace(arriving, fills=0.0, write_backs=0.0)
        if self._at_best and (kernel == "cached" or shape.device == "cuda") and np.ptp(shares - parts):
            # A batch has fewer distinct rows of blocks that are looked up unevenly, and caches of their own.
            arriving = replace(arriving, unique_ids=0.0, hits_unique=0.0, fills=0.0, write_backs=0.0)
        corners = [workload.shard_work(whole, arriving.part(*part)) for part in ((0, 0), (1, 0), (0, 1))]
        by_stage = stage_seconds(corners, self._rates)
        none, all_lookups, all_rows = np.stack(
            [sum(by_stage[part] for part in _OF_STAGE.get(name, (name,))) for name in STAGES], axis=-1
        )
        seconds = none + np.outer(shares, all_lookups - none) + np.outer(parts, all_rows - none)
        host = memory_model.growing_bytes(whole, shape)
        row_ids = workload.lookups_per_sample[table.table] * shape.batch_size if whole.exchange == "rows" else 0.0
        return Option(
            whole.sharding,
            kernel,
            whole.exchange,
            group=next(iter(work.exchange_groups([whole]))),
            seconds=seconds,
            memory=self._memory(whole, size, done, shares, parts),
            host_bytes=parts * host,
            row_id_seconds=row_ids * self._rates.seconds_per_row_id,
            pool=f"{whole.sharding}, {whole.columns} {table.dtype}, {whole.exchange}" if kernel == "cached" else "",
            pool_rows=float(table.rows),
        )

    def _memory(
        self, whole: PlacedShard, report: ShardReport, done: ShardReport, shares: Floats, parts: Floats
    ) -> Floats:
        """Return the memory, [N, columns], of a table's blocks of rows with these shares of lookups and rows.

        The first slot of each shard is a cache's null slot: shards that share a cache need fewer."""
        workload, shape, budget = self._workload, self._shape, self._request.budget
        lookups = workload.lookups_per_step(whole)
        ends = [memory_model.vector_bytes(whole, shape.global_batch_size, part) for part in (0.0, lookups)]
        kept = [memory_model.known_batch_bytes(whole, shape, part) for part in (0.0, lookups)]
        found = np.zeros((len(parts), len(MEMORY)))
        in_slots = self._at_best and budget.ratio is not None
        if budget.cache_bytes is None and not in_slots:
            found[:, 0] = ends[0] + shares * (ends[1] - ends[0])
            found[:, 3] = kept[0] + shares * (kept[1] - kept[0])
            found[:, 4] = float(whole.exchange == "rows")
        if whole.kernel == "device":
            found[:, 0] += parts * sum(memory_model.resident_bytes([whole]).values())
            return found
        memory = memory_model.pool_memory([whole], shape)
        found[:, 0] += parts * memory.map_bytes + (0.0 if self._at_best else memory.slot_bytes)
        needed, held = needed_slots(report.step_rows, workload.most_unique_ids([whole])), report.held_rows
        if not shape.cache.policy.is_recency:  # rows that do not stay need slots, too, while their batch is trained
            held += done.unique_ids - done.hits_unique
        if self._at_best:  # a batch has fewer of the rows of a block that is looked up unevenly
            needed = 0.0 if np.ptp(shares - parts) else needed_slots(report.step_rows)
        if in_slots:  # where a batch does not fit, rows do not stay, and it has the slots that it needs
            found[:, :2], found[:, 2] = 0.0, parts * min(whole.rows, held) * (report.held_rows >= 1)
            return found
        if budget.ratio is not None:
            needed = held = budget.ratio * whole.rows
        found[:, 1] = np.minimum(parts * whole.rows, parts * needed) * memory.slot_bytes
        found[:, 2] = np.minimum(parts * whole.rows, parts * held) * memory.slot_bytes
        return found
