"""A lower bound of the seconds of a step: no plan of these costs is faster.

A linear program over all options of all tables. It lets go of four things, each of which can only make a plan faster:

* a table may be in parts: 0.3 of it table-wise, 0.7 row-wise; the collectives of a sharding type are in such parts,
  too, unless a plan is far from the bound: then they are whole;
* shards need no ranks of their own: the slowest rank of a stage takes at least the mean of all ranks, and at least the
  largest shard of every table. Where ranks of a CPU take turns on fewer cores, a shard is as fast as on a core of its
  own: the other ranks of its node may be done;
* memory is one: all ranks together, and all nodes, keep to the sum of their limits; with slots as a share of the rows,
  all pools of one kind of shard;
* a cached table may have any size, and does the work of the next larger of some sizes.

Options that the ranks have no room for are left out. The solver is HiGHS, by scipy (Huangfu and Hall 2018).
"""

from __future__ import annotations

import heapq
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from embershard.cache.config import LEAST_SLOTS
from embershard.errors import ShardingError
from embershard.planning.cost.rates import RankRates, StepWork, changed
from embershard.planning.cost.work import groups_of_collectives
from embershard.planning.cost_arrays import MEMORY, CostArrays, Option
from embershard.planning.simulate.step_formula import STAGES
from embershard.planning.simulate.step_replay import Pipeline, replay_steps
from embershard.sharding.plan import PlanBound, Prediction
from embershard.sharding.run_shape import RunShape
from embershard.sharding.sharding_types import SHARDING_TYPES

Floats = NDArray[np.float64]


#: Stages that need a core, on a CPU; the others need the link, or on one node cores, too.
_NEEDS_CORE = {STAGES.index(name) for name in ("plan", "copies", "lookup", "update")}
#: So near a plan, the bound is not tightened; else with so many linear programs at most, of 10 to 200 ms each.
_NEAR, _MOST_PROGRAMS = 0.01, 16
#: Of the solver, relative to the bound: it is given away.
_TOLERANCE = 1e-6
#: Of a mixed integer program: it ends there with what it has shown so far.
_MOST_NODES = 200


@dataclass(frozen=True)
class Bound:
    """What no plan can be faster than.

    Attributes:
        step_seconds: of a step.
        fixed_seconds: of them, what a step takes without any sharded table.
        own_seconds: of GPUs alone, where both others are beside a host.
    """

    step_seconds: float
    fixed_seconds: float
    own_seconds: float | None = None

    def beside(self, host_seconds: float) -> Bound:
        """Return the bound of GPUs beside a host that takes so long for a step."""
        seconds, fixed = max(self.step_seconds, host_seconds), max(self.fixed_seconds, host_seconds)
        return Bound(seconds, fixed, self.step_seconds)

    def gap(self, step_seconds: float) -> float:
        """Return how much longer a step takes, relative to the bound. Below 0 the bound is none."""
        return step_seconds / self.step_seconds - 1 if self.step_seconds > 0 else 0.0


def tightened(costs: CostArrays, bound: Bound, step_seconds: float) -> Bound:
    """Return a higher bound where a plan's step is far above it: the least over the sharding types and kernels of the
    tables with most work, each with one linear program (branch and bound, Land and Doig 1960). A table that is
    fractions of several types is what relaxes the bound most where one table is most of the work.

    Args:
        costs: of the bound.
        step_seconds: of the plan; the bound need not come closer than `_NEAR` to it.
    """
    with suppress(ShardingError):  # the solver found none
        bound = max(bound, lower_bound(costs, whole_groups=True), key=lambda each: each.step_seconds)
    work = [min(float(option.total_seconds.sum()) for option in options) for options in costs.options]
    order = sorted(range(len(work)), key=lambda table: -work[table])
    open_ones = [(bound.step_seconds, 0, 0, costs)]  # seconds, a number that tells equal ones apart, depth
    programs = 0
    while programs < _MOST_PROGRAMS and open_ones[0][0] * (1 + _NEAR) < step_seconds and open_ones[0][2] < len(order):
        seconds, _, depth, parent = heapq.heappop(open_ones)
        table = order[depth]
        for kind in dict.fromkeys((option.sharding, option.kernel) for option in parent.options[table]):
            options = list(parent.options)
            options[table] = tuple(each for each in options[table] if (each.sharding, each.kernel) == kind)
            child = replace(parent, options=tuple(options))
            programs += 1
            with suppress(ShardingError):  # it does not fit: no plan is so
                found = max(seconds, lower_bound(child).step_seconds)
                heapq.heappush(open_ones, (found, programs, depth + 1, child))
        if not open_ones:  # no plan fits: then there is none to be compared with
            return bound
    return replace(bound, step_seconds=open_ones[0][0])


class _Program:
    """A linear program of named variables, all at least 0: rows of `sum(coefficients) <= limit`."""

    def __init__(self) -> None:
        self._num, self._entries, self._limits = 0, ([], [], []), []  # type: ignore[var-annotated]
        self._equal_entries, self._equals = ([], [], []), []  # type: ignore[var-annotated]

    def variables(self, count: int) -> NDArray[np.int64]:
        self._num += count
        return np.arange(self._num - count, self._num)

    def at_most(self, limit: float, *terms: tuple[NDArray[np.int64], Floats | float]) -> None:
        self._add(self._entries, len(self._limits), terms)
        self._limits.append(limit)

    def equal(self, value: float, *terms: tuple[NDArray[np.int64], Floats | float]) -> None:
        self._add(self._equal_entries, len(self._equals), terms)
        self._equals.append(value)

    @staticmethod
    def _add(entries, row, terms) -> None:  # type: ignore[no-untyped-def]
        for where, factors in terms:
            entries[0].append(np.broadcast_to(np.asarray(factors, float), np.shape(where)))
            entries[1].append(np.full(np.shape(where), row))
            entries[2].append(where)

    def least(self, variable: int, whole: NDArray[np.int64] | None = None) -> float:
        """Return the least value of a variable, where those that are `whole` are whole numbers."""

        def matrix(entries, rows):  # type: ignore[no-untyped-def]
            values, row, column = (np.concatenate(each) for each in entries)
            return csr_array((values, (row, column)), shape=(rows, self._num))

        aim = np.zeros(self._num)
        aim[variable] = 1.0
        at_most, limits = matrix(self._entries, len(self._limits)), np.array(self._limits)
        equal, values = matrix(self._equal_entries, len(self._equals)), np.array(self._equals)
        if whole is None:
            found = linprog(aim, A_ub=at_most, b_ub=limits, A_eq=equal, b_eq=values, method="highs")
        else:
            is_whole = np.zeros(self._num)
            is_whole[whole] = 1
            rows = [LinearConstraint(at_most, -np.inf, limits), LinearConstraint(equal, values, values)]
            with _no_output():
                found = milp(aim, integrality=is_whole, constraints=rows, options={"node_limit": _MOST_NODES})
        if found.status == 2:
            raise ShardingError("no plan fits into the memory of all ranks together")
        if whole is not None and found.mip_dual_bound is not None and np.isfinite(found.mip_dual_bound):
            return float(found.mip_dual_bound)  # whether or not the best was found
        if not found.success:
            raise ShardingError(f"the bound could not be computed: {found.message}")
        return float(found.fun)


@contextmanager
def _no_output() -> Iterator[None]:
    """Keep the standard output of the process free of a line that HiGHS writes past its options."""
    if sys.stdout is None:  # the process began without one
        yield
        return
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def lower_bound(costs: CostArrays, *, whole_groups: bool = False) -> Bound:
    """Return the bound for these costs, which are made `at_best`.

    Args:
        whole_groups: a group of tables has its collectives in whole, however little of a table is in it; a higher
            bound, by a mixed integer program.

    Raises:
        ShardingError: no plan can fit.
    """
    costs = _that_fit(costs)
    formula, base = costs.formula, costs.base_seconds
    fixed = float(formula.seconds(formula.columns(base), 0))
    if not costs.tables:
        return Bound(fixed, fixed)
    program = _Program()
    shares = [program.variables(len(options)) for options in costs.options]
    stages = dict(zip(STAGES, program.variables(len(STAGES)), strict=True))
    for own in shares:
        program.equal(1.0, (own, 1.0))
    _add_memory(program, costs, shares)
    if costs.ratio is not None:
        _add_pools(program, costs, shares, costs.ratio)
    for number, name in enumerate(STAGES):
        _slowest(program, costs, shares, np.array([stages[name]]), [number], float(base[number]))
    names = sorted({option.group for options in costs.options for option in options} - {""})
    groups = program.variables(len(names))  # 1 where a table is in the group
    for own, options in zip(shares, costs.options, strict=True):
        for group, name in zip(groups, names, strict=True):
            inside = np.array([float(option.group == name) for option in options])
            if inside.any():
                program.at_most(0.0, (own, inside), (np.array([group]), -1.0))
    step = _add_step(
        program, costs, shares, stages, groups, np.array([groups_of_collectives([each]) for each in names])
    )
    least = program.least(int(step[0]), groups if whole_groups else None)
    return Bound(max(fixed, (1 - _TOLERANCE) * least), fixed)


def _that_fit(costs: CostArrays) -> CostArrays:
    """Return the costs without the options that no ranks have room for: shards of a table on N ranks at most need less
    than N limits together, beside what every rank has."""
    if costs.device_limit is None or not costs.window.least:  # of a budget for all caches, a rank may have more
        return costs
    room = costs.device_limit - float(costs.device_bytes(costs.base_memory)) - float(costs.less_bytes.min())
    names = dict(zip(MEMORY, range(len(MEMORY)), strict=True))

    def fits(option: Option) -> bool:
        memory = option.total_memory
        taken = memory[names["fixed"]] + max(memory[names["needed"]], memory[names["held"]])
        return bool(taken <= room * min(option.num_shards, costs.world_size) * (1 + _TOLERANCE))

    options = tuple(tuple(option for option in own if fits(option)) for own in costs.options)
    if not all(options):
        raise ShardingError("no plan fits: a table needs more memory than the ranks have that it may be on")
    return replace(costs, options=options)


def _add_memory(program: _Program, costs: CostArrays, shares: list[NDArray[np.int64]]) -> None:
    """All ranks together have the sum of their limits. A part of a batch takes at least as much of it as if all parts
    came to one rank, which keeps the fewest batches."""
    nodes, world_size = -(-costs.world_size // costs.ranks_per_node), costs.world_size
    if costs.host_limit is not None:
        pairs = zip(shares, costs.options, strict=True)
        terms = [(own, np.array([float(o.host_bytes.sum()) for o in options])) for own, options in pairs]
        program.at_most(costs.host_limit * nodes, *terms)
    if costs.device_limit is None:
        return
    batch = MEMORY.index("batch")
    most = sum(max(float(o.total_memory[batch]) for o in options) for options in costs.options)
    most += costs.base_memory[batch]
    times = float(costs.window.bytes_of(np.array(most))) / most if most else 0.0
    for cache in ("needed", "held"):
        weights = np.array([{"fixed": 1.0, "batch": times, cache: 1.0}.get(name, 0.0) for name in MEMORY])
        left = (costs.device_limit - float(costs.base_memory @ weights)) * world_size - float(costs.less_bytes.sum())
        pairs = zip(shares, costs.options, strict=True)
        terms = [(own, np.array([float(o.total_memory @ weights) for o in options])) for own, options in pairs]
        program.at_most(left, *terms)


def _add_pools(program: _Program, costs: CostArrays, shares: list[NDArray[np.int64]], ratio: float) -> None:
    """Shards that share caches have a share of their own rows as slots, and no others' slots: all ranks together, and
    a few more for each shard."""
    held, more = MEMORY.index("held"), LEAST_SLOTS + 1
    for pool in sorted({option.pool for options in costs.options for option in options} - {""}):
        terms = []
        for own, options in zip(shares, costs.options, strict=True):
            over = [o.total_memory[held] - ratio * o.pool_rows - more * o.num_shards for o in options]
            inside = np.array([option.pool == pool for option in options])
            terms.append((own[inside], np.array(over)[inside]))
        program.at_most(0.0, *terms)


def _slowest(
    program: _Program,
    costs: CostArrays,
    shares: list[NDArray[np.int64]],
    variable: NDArray[np.int64],
    columns: list[int],
    fixed: float,
) -> None:
    """The variable is at least the seconds of the slowest rank in these stages together: the mean over the ranks, each
    table's largest shard, and of ranks of several speeds what each kind has of the tables that all ranks have."""
    lookup, alone = STAGES.index("lookup") in columns, _alone(costs, columns)
    # Ranks of several speeds share the work as if each had its part, and a shard is on one of the fastest.
    capacity, fastest = float(costs.capacity[columns].max()), float(costs.slowdown[:, columns].min())
    mean = costs.world_size / capacity
    means = []
    for own, options in zip(shares, costs.options, strict=True):
        everywhere = np.array([option.row_id_seconds * lookup for option in options])
        totals = np.array([option.total_seconds for option in options])[:, columns].sum(axis=1) / capacity
        if len(columns) == 1:
            largest = np.array([option.most_seconds for option in options])[:, columns[0]]
        else:
            largest = np.array([option.seconds[:, columns].sum(axis=1).max() for option in options])
        totals, largest = totals + mean * everywhere, fastest * (alone * largest + everywhere)
        means.append((own, totals))
        program.at_most(-fixed, (variable, -1.0), (own, largest))
    program.at_most(-fixed, (variable, -1.0), *means)
    kinds = np.unique(costs.slowdown, axis=0)
    for kind in kinds if len(kinds) > 1 else ():
        where = (costs.slowdown == kind).all(axis=1)
        terms = []
        for own, options in zip(shares, costs.options, strict=True):
            on_all = [SHARDING_TYPES[each.sharding].rows_over in ("all", "copies") for each in options]
            there = [each.seconds[where].mean(axis=0) if on_all[n] else 0 * kind for n, each in enumerate(options)]
            terms.append((own, np.array(there)[:, columns] @ kind[columns]))
        program.at_most(-fixed, (variable, -1.0), *terms)


def _alone(costs: CostArrays, columns: list[int]) -> float:
    """Return the seconds of such work on a rank whose node has none but that of all ranks, relative to those on one
    whose ranks are all busy: where L ranks take turns on C cores, C/L. Links of nodes are not shared so."""
    formula, local = costs.formula, min(costs.ranks_per_node, costs.world_size)
    cores = formula.pipeline.cores_for(costs.world_size)
    on_cores = formula.pipeline.cores_copy(costs.world_size) or _NEEDS_CORE.issuperset(columns)
    return cores / local if cores is not None and on_cores else 1.0


def _add_step(
    program: _Program,
    costs: CostArrays,
    shares: list[NDArray[np.int64]],
    stages: dict[str, int],
    groups: NDArray[np.int64],
    weights: Floats,
) -> NDArray[np.int64]:
    """Return the variable of a step: see `StepFormula.seconds`, whose maxima are rows here. `weights`: of the groups,
    as `groups_of_collectives` counts them."""
    formula, step = costs.formula, program.variables(1)
    _, last_bucket, late = map(float, formula.reduction(costs.least_groups))  # at least
    out, back, sent = formula.latencies(weights)  # proportional, as is the all-reduce's: `out` again
    sent = sent - np.where(weights < 1, weights * formula.group_seconds, 0.0)  # copies announce no sizes
    base = dict(zip(STAGES, map(float, costs.base_seconds), strict=True))

    def of(*names: str) -> tuple[NDArray[np.int64], float]:
        return np.array([stages[name] for name in names]), 1.0

    def at_least(fixed: float, per_group: Floats | float, *terms: tuple[NDArray[np.int64], float]) -> None:
        program.at_most(-fixed, (step, -1.0), (groups, per_group), *terms)

    dense = formula.forward + formula.backward + formula.optimizer
    if formula.pipeline.device == "cpu":
        first = program.variables(1)
        columns = [STAGES.index(name) for name in ("plan", "copies", "lookup")]
        _slowest(program, costs, shares, first, columns, sum(base[name] for name in ("plan", "copies", "lookup")))
        fixed = formula.input + formula.overhead + dense + formula.all_reduce
        at_least(fixed, 2 * out + back + sent, (first, 1.0), of("embeddings", "gradients", "update", "ids"))
        return step
    looked_up, updated = program.variables(1), program.variables(1)
    program.at_most(-last_bucket, (updated, -1.0))
    _slowest(program, costs, shares, updated, [STAGES.index("update")], base["update"])
    at_least(max(formula.input, formula.overhead), 0.0)
    if not formula.pipeline.lookahead:  # nothing is brought in beside a step
        columns = [STAGES.index(name) for name in ("plan", "copies", "lookup")]
        _slowest(program, costs, shares, looked_up, columns, sum(base[name] for name in ("plan", "copies", "lookup")))
        between = of("embeddings", "gradients", "ids")
        at_least(dense + late, out + back + sent, (looked_up, 1.0), (updated, 1.0), between)
        return step
    both = [STAGES.index(name) for name in ("lookup", "update")]
    _slowest(program, costs, shares, looked_up, both, base["lookup"] + base["update"])
    _slowest(program, costs, shares, looked_up, both[:1], base["lookup"] + last_bucket)
    exchanged = of("embeddings", "gradients")
    at_least(dense + late, out + back, (looked_up, 1.0), exchanged)
    at_least(dense + late, out + back + sent, (updated, 1.0), of("ids"), exchanged)
    at_least(formula.all_reduce, 2 * out + back + sent, of("ids"), exchanged)
    at_least(0.0, 0.0, of("copies"))
    at_least(0.0, 0.0, of("plan"))
    return step


#: What a machine has -> the rates that it decides.
_RESOURCES = {
    "arithmetic of the dense layers": ("seconds_per_flop",),
    "start of kernels": ("seconds_per_launch",),
    "memory of the device": ("seconds_per_activation_byte", "seconds_per_update_byte", "seconds_per_embedding_byte"),
    "planning of caches": ("seconds_per_planned_id", "seconds_per_unique_id", "seconds_per_row_id"),
    "link to the host's memory": (
        "seconds_per_fill", "seconds_per_write_back", "seconds_per_byte_to_device", "seconds_per_byte_to_host",
    ),
    "link between ranks": ("seconds_per_all_to_all_byte", "seconds_per_network_byte", "seconds_per_all_reduce_byte"),
    "latency of collectives": ("seconds_per_collective",),
    "overhead of a step": ("step_overhead_seconds",),
}  # fmt: skip
_GAIN = 0.05
_HALVINGS = 6
_MOST_RANKS = 256  # replays of more take seconds


def certificate(quick: Prediction, bound: Bound, rates: RankRates, shape: RunShape) -> PlanBound:
    """Return the bound of a plan with this prediction, from counts alone."""
    slowest = max(quick.ranks, key=lambda rank: rank.step_seconds)
    works, pipeline = [StepWork(**rank.work) for rank in quick.ranks], Pipeline.of_run(shape)
    own_gap = None
    if bound.own_seconds:
        without_host = changed(rates, lambda own: replace(own, step_overhead_seconds=0.0))
        own_gap = replay_steps(works, without_host, pipeline).step_seconds / bound.own_seconds - 1
    return PlanBound(
        step_seconds=quick.step_seconds,
        least_seconds=bound.step_seconds,
        fixed_seconds=bound.fixed_seconds,
        rank=slowest.rank,
        stage=quick.bottleneck,
        change=_smallest_change(works, rates, pipeline) if len(works) <= _MOST_RANKS else "",
        own_gap=own_gap,
    )


def _smallest_change(works: Sequence[StepWork], rates: RankRates, pipeline: Pipeline) -> str:
    """Return the resource that need be faster by the least for a step that is shorter by `_GAIN`, and by how much."""

    def helps(names: Sequence[str], share: float) -> bool:
        faster = changed(rates, lambda own: replace(own, **{name: share * getattr(own, name) for name in names}))
        return replay_steps(works, faster, pipeline).step_seconds <= wanted

    wanted = (1 - _GAIN) * replay_steps(works, rates, pipeline).step_seconds
    most, best = 0.0, ""
    for resource, names in _RESOURCES.items():
        low, high = 0.0, 1.0
        if not helps(names, max(low, most)):  # not at all, or only if it is faster than what is known to help
            continue
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if helps(names, middle) else (low, middle)
        if low > most or not best:
            most, best = low, resource
    if not best:
        return ""
    return f"{best}: {1 / most:.2g} times as fast" if most else f"{best}: none at all"
