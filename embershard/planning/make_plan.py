"""Makes a plan: the placement of every table, the size of every cache, and their prediction.

candidates      a local search, with costs from the data, under the budget
least need      where the search finds none: does it fit at all? if not: what would make it fit
slots           the rest of a rank's budget, divided among its pools
prediction      quick for every candidate, from counts; of the best one by replaying the trace
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from embershard.errors import ConfigError, ShardingError
from embershard.planning.budget import LeastNeed, device_memory, least_needs, mixed_need, need_of, resident_needs
from embershard.planning.cost.back_test import caches_note
from embershard.planning.cost_arrays import CostArrays, cost_arrays
from embershard.planning.exchange import exchange_notes
from embershard.planning.local_search import Placed, local_search
from embershard.planning.predict import predict
from embershard.planning.request import PlanRequest, cached
from embershard.planning.simulate.held_part import HeldPart, try_counts
from embershard.planning.slots import split_slots
from embershard.planning.workload import Layout
from embershard.sharding.plan import Plan, PoolPlacement, Prediction
from embershard.sharding.shards import PoolKey, TablePlacement, no_rows_problem
from embershard.sharding.sizes import names_in_pool
from embershard.units import size

if TYPE_CHECKING:
    from embershard.planning.bound import Bound

#: Shares of the memory that the local search may fill, tried in turn.
_ROOMS = (1.0, 0.97, 0.93, 0.87, 0.8)
#: So far above what the search tells, a step is as it was told.
_AS_TOLD = 0.02
_ITERATIONS, _MOST_FOUND = 1800, 3
_MOST_OTHERS = 6  # placements with sharding types of their own, where caches have yet to be sized
_ITERATIONS_PER_TABLE = 240
#: Memory, relative to what resident tables take on average, with which no table need be cached.
_MUCH_ROOM = 1.6
_MOSTLY = 0.5  # of the misses: with more first touches, hit rates say little of a cache's size
#: A step that is slower by this share is as fast.
_AS_FAST = 1e-9
#: So close to the bound a plan is good enough; else the search goes on from it.
_CLOSE = 0.005
_FAR = 0.01  # from it: a tighter bound is looked for
_MOST_BEGINNINGS = 2  # of the fastest placements of all
_MOST_SIMPLE = 1  # simple placements, of which the search goes on, too
_MOST_SHRUNK = 3  # searches for a need that is a byte less, before a refusal
_REFUSAL_EFFORT = 0.25  # of each of them: all together take no longer than the search for a plan
_SKEWED = 1.5  # a block with more lookups than this, relative to its share of the rows, gets a note


@dataclass(frozen=True)
class Candidate:
    """A placement with its pools, and its prediction from counts alone; of the best one what no plan is faster than."""

    layout: Layout
    slots: Mapping[PoolKey, int]
    quick: Prediction
    bound: Bound | None = None

    @property
    def tables(self) -> tuple[TablePlacement, ...]:
        """Placements of all tables."""
        return tuple(self.layout.tables)

    @property
    def pools(self) -> tuple[PoolPlacement, ...]:
        """Caches of all ranks, as a plan's file has them."""
        pools = self.layout.pools.items()
        return tuple(
            PoolPlacement(key.rank, names_in_pool(own), key.sharding, key.columns, self.slots[key])
            for key, own in pools
        )

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, from counts alone."""
        return self.quick.step_seconds


def make_plan(request: PlanRequest, progress: Callable[[int, int], None] | None = None) -> Plan:
    """Return the best plan found. Deterministic: equal requests give equal plans.

    Raises:
        ShardingError: no placement fits; names the table, the tier (or cache), the missing bytes, and what would fit.
    """
    return complete(request, best_candidate(request), progress)


def best_candidate(request: PlanRequest) -> Candidate:
    """Return the fastest placement that fits, by counts alone; of those that are as fast, one without caches, and of
    these the one whose fullest rank has the most device memory left.

    Raises:
        ShardingError: as `make_plan`.
    """
    host_seconds = request.host_seconds * request.workload.shape.pieces
    if request.workload.shape.device == "cuda" and host_seconds:
        # Beside a slower host all placements are as fast: the GPUs' own time tells them apart.
        best = best_candidate(request.without_host)
        told = predict(best.layout, best.slots, request.rates, from_counts=True)
        best = replace(best, quick=told, bound=best.bound and best.bound.beside(host_seconds))
        return min([best, *_as_fast_without_caches(request, best)], key=lambda each: bool(each.slots))
    search = PlanSearch(request)
    found, bound = search.first(), search.bound()
    needs: list[LeastNeed] = []
    gap = bound.gap(min(each.step_seconds for each in found)) if found and bound is not None else 0.0
    if not found or not -_AS_FAST <= gap <= _CLOSE:  # a bound above a plan is none
        if not found:
            needs = least_needs(request)
            found += all_sized(request, [need.tables for need in needs])
        if found:
            found += search.again(found)
    if found:
        limit = min(candidate.step_seconds for candidate in found) * (1.0 + _AS_FAST)
        as_fast = [candidate for candidate in found if candidate.step_seconds <= limit]
        best = min(as_fast, key=lambda each: (bool(each.slots), each.quick.most_device_bytes, each.step_seconds))
        return replace(best, bound=bound and search.tighter(bound, best.step_seconds))
    need = needs[0]
    if not need.excess_rows:
        least = _least_found(request, needs)
        if request.budget.less_bytes and not least.fits_device(request.budget):
            least = min(needs, key=lambda each: each.asked(request.budget))  # found under other limits of ranks, too
        least.check_device(request)
        if (fitting := sized(request, least.tables)) is not None:
            return replace(fitting, bound=bound)
    need.check_pools(request)
    need.check_host(request)
    raise ShardingError(_no_room(request, need))


def _as_fast_without_caches(request: PlanRequest, best: Candidate) -> list[Candidate]:
    """Return the placements without caches that are as fast as one with some: what a GPU does beside a slower host
    costs no time, and what a cache does, it need not do."""
    if not best.slots:
        return []
    limit = best.step_seconds * (1.0 + _AS_FAST)
    found = all_sized(request, [need.tables for need in resident_needs(request)])
    as_fast = sorted(
        (each for each in found if each.step_seconds <= limit), key=lambda each: each.quick.most_device_bytes
    )
    return [replace(each, bound=best.bound) for each in as_fast]


def _least_found(request: PlanRequest, needs: Sequence[LeastNeed]) -> LeastNeed:
    """Return the least of these needs (with caches, and of both kinds), or a lesser one that searches find: for the
    least memory first, anew and from these, then as for a plan, with a byte less than the least so far, until that
    finds none."""
    need = min(needs, key=lambda each: each.asked(request.budget))
    if request.budget.rank_bytes is None or request.workload.shape.world_size == 1 or not request.sharded:
        return need
    request = replace(request, effort=_REFUSAL_EFFORT * request.effort)
    least = replace(request, budget=request.budget.of_rank(need.asked(request.budget)))
    costs = cost_arrays(least, resident=request.may_mix, cached=True)
    begin, rounds = [each.tables for each in needs], _iterations(request, costs)
    searches = (local_search(costs.by_memory, rounds), local_search(costs.by_memory, rounds, begin=begin, seed=1))
    by_memory = [each for own in searches for each in own[:_MOST_FOUND]]
    found = [need_of(request, request.placed(each.tables)) for each in by_memory]
    need = min([need, *found], key=lambda each: each.asked(request.budget))
    for _ in range(_MOST_SHRUNK):
        less = replace(request, budget=request.budget.of_rank(need.asked(request.budget) - 1))
        fitting = PlanSearch(less).first()
        if not fitting:
            break
        need = min((need_of(request, each.tables) for each in fitting), key=lambda each: each.asked(request.budget))
    return need


def _no_room(request: PlanRequest, need: LeastNeed) -> str:
    """Return the message where each rank's least need fits, but the requested ratio or the rows of a node do not."""
    budget = request.budget
    larger = sized(replace(request, budget=replace(budget, device_bytes=2**62, host_bytes=None)), need.tables)
    if budget.ratio is None or budget.device_bytes is None or larger is None:
        return f"{len(request.allowed)} tables do not fit the nodes evenly: give --host-memory more, or use more nodes"
    ranks = larger.quick.ranks
    fullest = max(ranks, key=lambda each: each.total_device_bytes + budget.less(each.rank))
    needed, limit = fullest.total_device_bytes, budget.device_bytes - budget.less(fullest.rank)
    change = device_memory(budget, [each.total_device_bytes for each in ranks])
    ratio = _largest_ratio(request, need.tables)
    return (
        f"the plan does not fit: a rank with {budget.ratio:g} of its rows on the device needs {size(needed)} and "
        f"may use {size(limit)}: {size(needed - limit)} are missing. Smallest change that fits: {change}"
        f"{f'; or --ratios {ratio:g}' if ratio else ''}"
    )


def _largest_ratio(request: PlanRequest, tables: Sequence[TablePlacement]) -> float:
    """Return the largest ratio of three digits below the request's with which a placement fits; 0: none."""
    budget = request.budget
    assert budget.ratio is not None, "the budget has one"
    most = math.floor(1000 * budget.ratio)
    ratios = [number / 1000 for number in range(most, 0, -1)]
    fitting = bisect.bisect_left(
        ratios, True, key=lambda each: sized(replace(request, budget=replace(budget, ratio=each)), tables) is not None
    )
    return ratios[fitting] if fitting < len(ratios) else 0.0


def complete(request: PlanRequest, candidate: Candidate, progress: Callable[[int, int], None] | None = None) -> Plan:
    """Return the plan of a candidate, predicted by replaying the trace where it is long enough."""
    shape = request.workload.shape
    bound = None
    if candidate.bound is not None:
        from embershard.planning.bound import certificate

        bound = certificate(candidate.quick, candidate.bound, request.rates, shape)
    _check_pins(request, candidate)
    shape.home.check_slots(candidate.layout.pools, candidate.slots)
    exact = predict(candidate.layout, candidate.slots, request.rates, progress=progress)
    held = _held_part(request, candidate)
    exact, of_drift = (exact, []) if held is None else held.ranged(exact, request.workload.data.share_of_samples)
    return Plan(
        world_size=shape.world_size,
        ranks_per_node=min(shape.ranks_per_node, shape.world_size),
        batch_size=shape.batch_size,
        device=shape.device,
        device_memory_bytes=request.budget.device_bytes,
        host_memory_bytes=request.budget.host_bytes,
        memory_bytes_by_rank=request.budget.by_rank,
        settings=dict(request.settings),
        tables=candidate.tables,
        pools=candidate.pools,
        notes=(*request.notes, *_advice(request, candidate, exact), *of_drift),
        prediction=exact,
        made_from=dict(request.made_from),
        bound=bound,
    )


def _held_part(request: PlanRequest, candidate: Candidate) -> HeldPart | None:
    """Return what counts told of a part of the profile that was held back from them, for caches of this size."""
    shape, tables = request.workload.shape, [table for table in candidate.tables if table.kernel == "cached"]
    rows = sum(shard.rows for members in candidate.layout.pools.values() for shard in members)
    share = min(1.0, sum(candidate.slots.values()) / max(1, rows))
    names = [table.table for table in tables]
    return try_counts(request.workload.data, names, share, shape.global_batch_size, shape.cache)


def _check_pins(request: PlanRequest, candidate: Candidate) -> None:
    """Raise `ConfigError` where two tables of one cache are pinned to other numbers of slots."""
    for pool in candidate.pools:
        wanted = {name: pin.slots for name in pool.tables if (pin := request.pins.get(name)) and pin.slots is not None}
        if len(set(wanted.values())) > 1:
            raise ConfigError(
                f"sharding.pin: {wanted} slots are asked of one cache, of {pool.sharding} tables with {pool.dim} "
                f"columns on rank {pool.rank}. Give them one number, or other ranks or types."
            )


def sized(request: PlanRequest, tables: Sequence[TablePlacement]) -> Candidate | None:
    """Size the caches of a placement as the budget allows; None where it allows too little, or where a cache cannot
    number its rows."""
    workload, limit = request.workload, request.budget.host_bytes
    if not request.may_mix and any(table.kernel == "device" for table in tables):
        return None
    tables = [workload.with_exchange(table) for table in request.pinned(tables)]
    layout = Layout(workload, tables)
    slots = split_slots(layout, request.budget, request.pins)
    if slots is None:
        return None
    quick = predict(layout, slots, request.rates, from_counts=True)
    if limit is not None and quick.most_host_bytes(workload.shape.ranks_per_node) > limit:
        return None
    return Candidate(layout, slots, quick)


def all_sized(request: PlanRequest, tried: Sequence[tuple[TablePlacement, ...]]) -> list[Candidate]:
    """Return the placements that fit and that FBGEMM can train."""
    ranks_per_node = min(request.workload.shape.ranks_per_node, request.workload.shape.world_size)
    trained = [tables for tables in dict.fromkeys(tried) if not no_rows_problem(tables, ranks_per_node)]
    candidates = [sized(request, tables) for tables in trained]
    return [candidate for candidate in candidates if candidate is not None]


class PlanSearch:
    """The searches for plans of a request, and what no plan is faster than; what options cost is worked out once."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request

    def first(self) -> list[Candidate]:
        """Return simple placements, and the best that the local search finds, those that fit."""
        return all_sized(self._request, simple_placements(self._request)) + self._searched()

    def again(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Return what a search finds from the fastest of these, and from whole tables in a simple order, with the
        caches that take less memory than all rows. Without caches if the fastest has none, for they only add work. From
        the best of all it goes on with copies where these are allowed, so that no plan is slower for that."""
        request, fastest = self._request, sorted(found, key=lambda each: each.step_seconds)[:_MOST_BEGINNINGS]
        begin = [each.tables for each in fastest]
        if request.may_mix:
            needs = [need_of(request, tables) for tables in simple_placements(request)[1::2]]
            mixed = [own.tables for need in needs if (own := mixed_need(request, need)) is not None]
            simple = sorted(all_sized(request, mixed), key=lambda each: each.step_seconds)
            begin += [each.tables for each in simple[:_MOST_SIMPLE]]
        again = self._searched(begin, resident=not fastest[0].slots, seed=1)
        if any(map(request.may_be_copied, request.sharded)):
            best = min([*found, *again], key=lambda each: each.step_seconds)
            begin = [best.tables, *(self._with_copies(best, factor) for factor in (1.0, math.inf))]
            again += self._searched(begin, resident=not best.slots, seed=2, copies=True)
        return again

    def _with_copies(self, candidate: Candidate, factor: float) -> tuple[TablePlacement, ...]:
        """Return its tables with copies of those that are then less than so many times the work, for all ranks
        together."""
        costs, tables = self._costs if candidate.slots else self._costs_without_caches, []
        for number, placed in enumerate(each for each in candidate.tables if each.kernel != "replicated"):
            own, known = costs.options[number], costs.options_of(placed)
            copies = [place for place, each in enumerate(own) if each.kernel == "replicated"]
            seconds = [own[each].total_seconds.sum() for each in (*known[:1], *copies)]  # as it is, and as a copy
            is_less = len(seconds) == 2 and seconds[1] < factor * seconds[0]
            tables.append(costs.placement(number, copies[0], ()) if is_less else placed)
        return self._request.placed(tables)

    def bound(self) -> Bound | None:
        """Return what no plan can be faster than; None for one rank, or where no plan fits."""
        if not self._has_choices:
            return None
        from embershard.planning.bound import lower_bound  # loads scipy's solvers

        try:
            return lower_bound(self.costs_at_best)
        except ShardingError:
            return None

    def tighter(self, bound: Bound, step_seconds: float) -> Bound:
        """Return the bound, higher where a plan with a step of so many seconds is far above it."""
        from embershard.planning.bound import tightened

        return tightened(self.costs_at_best, bound, step_seconds) if bound.gap(step_seconds) > _FAR else bound

    @property
    def _has_choices(self) -> bool:
        return self._request.workload.shape.world_size > 1 and bool(self._request.sharded)

    @cached_property
    def _costs(self) -> CostArrays:
        return cost_arrays(self._request, resident=self._request.may_mix, cached=True)

    @cached_property
    def _costs_without_caches(self) -> CostArrays:
        return cost_arrays(self._request, resident=True, cached=False)

    @cached_property
    def costs_at_best(self) -> CostArrays:
        """Costs that no plan is below."""
        request = self._request
        costs = cost_arrays(request, resident=request.may_mix, cached=not request.may_mix, at_best=True)
        fits = False
        if costs.device_limit is not None and request.may_mix:
            mean = sum((each[0].total_memory for each in costs.options), costs.base_memory * costs.world_size)
            mean = mean / costs.world_size
            with_one = (costs.device_bytes(mean + each.memory.max(axis=0)) for own in costs.options for each in own)
            most = max(_MUCH_ROOM * float(costs.device_bytes(mean)), *map(float, with_one))
            fits = most + costs.less_bytes.max() <= costs.device_limit
        if fits:  # with much memory left: a cache only adds work, so without a limit none is needed
            return replace(costs, device_limit=None)
        return cost_arrays(request, resident=True, cached=True, at_best=True) if request.may_mix else costs

    def _searched(
        self,
        begin: Sequence[tuple[TablePlacement, ...]] = (),
        *,
        resident: bool = True,
        seed: int = 0,
        copies: bool = False,
    ) -> list[Candidate]:
        """Return the best placements of the local search that fit.

        Args:
            begin: placements to begin with; none: it makes its own.
            resident: first without caches, which only add work, and with them only where that finds none, or none that
                is close to what no such placement is faster than: caches let tables be whole where they would not fit.
            seed: of its chances.
            copies: tables may be copies, too, where that is allowed.
        """
        if not self._has_choices:
            return []
        found: list[Candidate] = []
        if resident and self._request.may_be_resident:
            costs = self._costs_without_caches if copies else self._costs_without_caches.without_copies
            found = self._fitting(costs, begin, seed)
            least = min((each.step_seconds for each in found), default=math.inf)
            if least <= (1 + _CLOSE) * costs.floor_seconds or (found and begin):
                return found
        return found + self._fitting(self._costs if copies else self._costs.without_copies, begin, seed)

    def _fitting(self, costs: CostArrays, begin: Sequence[tuple[TablePlacement, ...]], seed: int) -> list[Candidate]:
        """Return the best placements under these costs that fit. Costs are those of the prediction, but for the sizes
        of caches: where no placement fits after all, or all are slower than their costs say, since caches on some ranks
        got less than the tables' mean, the search is repeated with less memory."""
        request, iterations = self._request, _iterations(self._request, costs)
        may_shrink = costs.device_limit is not None and any(o.kernel == "cached" for own in costs.options for o in own)
        found: list[Candidate] = []
        for room in _ROOMS if may_shrink else (1.0,):
            limit = None if costs.device_limit is None else room * costs.device_limit
            placements = local_search(replace(costs, device_limit=limit), iterations, begin=begin, seed=seed)
            found += all_sized(request, [request.placed(each.tables) for each in _worth_sizing(placements)])
            told = min((each.step_seconds for each in placements), default=math.inf)
            if not placements or min((each.step_seconds for each in found), default=math.inf) <= (1 + _AS_TOLD) * told:
                break
        return found


def _worth_sizing(placements: Sequence[Placed]) -> list[Placed]:
    """Return the best placements, one of those that are alike, and where caches have yet to be sized the best with each
    set of sharding types: costs of two sets may differ by less than what the sizes of their caches add.

    Args:
        placements: the best first.
    """
    by_seconds: dict[tuple[str, frozenset[tuple[str, str]]], Placed] = {}
    others: dict[frozenset[tuple[str, str]], Placed] = {}
    for each in placements:
        kinds = frozenset((table.sharding, table.kernel) for table in each.tables)
        if by_seconds.setdefault((f"{each.step_seconds:.9e}", kinds), each) is each:
            others.setdefault(kinds, each)
    best, has_caches = list(by_seconds.values()), any(kernel == "cached" for kinds in others for _, kernel in kinds)
    return list(dict.fromkeys([*best[:_MOST_FOUND], *list(others.values())[: _MOST_OTHERS * has_caches]]))


def _iterations(request: PlanRequest, costs: CostArrays) -> int:
    return round(request.effort * min(_ITERATIONS, _ITERATIONS_PER_TABLE * len(costs.tables)))


def simple_placements(request: PlanRequest) -> list[tuple[TablePlacement, ...]]:
    """Place whole tables, where that is allowed, all with caches or without: table i on rank i mod W; and one after the
    other, those with most bytes of lookups first, each on the rank with the fewest; the same by lookups, by bytes and
    by columns. A plan must not be slower."""
    if not request.allowed or not all("table_wise" in types for types in request.allowed.values()):
        return []
    sizes, world_size = request.sharded, request.workload.shape.world_size
    lookups = [request.workload.lookups_per_sample[size.table] for size in sizes]
    all_weights = (
        [own * size.row_bytes() for own, size in zip(lookups, sizes, strict=True)],
        lookups,
        [float(size.rows * size.row_bytes()) for size in sizes],
        [float(size.dim) for size in sizes],
    )
    in_turn, found = [number % world_size for number in range(len(sizes))], []
    for ranks in (in_turn, *(_greedy(weights, world_size) for weights in all_weights)):
        pairs = zip(sizes, ranks, strict=True)
        tables = request.placed([cached(each, "table_wise", [rank]) for each, rank in pairs])
        found += [request.without_caches(tables), tables]
    return found


def _greedy(weights: Sequence[float], num_ranks: int) -> list[int]:
    """Return the rank of each: the heaviest first, each on the rank with the least weight.

    >>> _greedy([1.0, 3.0, 1.0], num_ranks=2)
    [1, 0, 1]
    """
    load, ranks = [0.0] * num_ranks, [0] * len(weights)
    for number in sorted(range(len(weights)), key=lambda number: -weights[number]):
        ranks[number] = min(range(num_ranks), key=load.__getitem__)
        load[ranks[number]] += weights[number]
    return ranks


def _advice(request: PlanRequest, candidate: Candidate, exact: Prediction) -> list[str]:
    workload, shape, machine = request.workload, request.workload.shape, request.topology
    notes = [] if machine is None else [machine.error_note(exact.bottleneck)]
    if machine is not None and machine.device == "cuda" and not machine.rates and candidate.slots:
        notes.append(caches_note(exact.planning_seconds))
    if exact.method == "counts" and candidate.slots:
        notes.append(
            "Hit rates are from counts alone, in the long run: the profile's trace has too few batches of "
            f"{shape.global_batch_size:,} samples to be replayed. They hold where the profiled samples come again; the "
            "estimate for new data is beside them."
        )
    rows = [sum(shard.rows for shard in members) for members in candidate.layout.pools.values()]
    has_all = sum(candidate.slots.values()) >= sum(rows)
    if exact.first_touch_share > _MOSTLY and not has_all:
        notes.append(
            f"The profile is too short to tell sizes of caches apart: {exact.first_touch_share:.0%} of the misses are "
            f"first touches, of rows that the caches never had before. Fills and times are of {exact.num_steps:,} such "
            "steps. What a size is worth in the long run is an estimate: a power law for rows that were seen rarely or "
            "never. Profile more samples for a better one."
        )
    grown = [
        rank.rank
        for rank, planned in zip(exact.ranks, candidate.quick.ranks, strict=True)  # no cache grows in the quick one
        if rank.device_bytes["slots"] > planned.device_bytes["slots"]
    ]
    if grown:
        notes.append(
            f"The caches of ranks {grown[:8]} will grow: one batch needs more rows than they have slots. The "
            "prediction counts that; give them more (--device-memory, a larger cache.ratio), or use a smaller batch."
        )
    notes += exchange_notes(workload, candidate.tables)
    notes += _notes_on_tables(request, candidate)
    if not candidate.slots:
        notes.append("All rows fit the devices: no table is cached.")
    elif has_all:
        notes.append("Every row has a slot: nothing is ever evicted.")
    return notes


def _notes_on_tables(request: PlanRequest, candidate: Candidate) -> list[str]:
    """Return what is special about single tables: where their hot rows lie, ids of any kind, copies."""
    notes = [
        f"Table {table}: hot rows lie together, its busiest block of rows gets {times:.1f} times its share of lookups. "
        'Scatter them with id_mapping = "hash".'
        for table, times in candidate.layout.busiest_blocks().items()
        if times > _SKEWED
    ]
    if named := [table.table for table in request.workload.model.tables if table.buckets]:
        notes.append(
            f"Hit rates of {', '.join(named[:5])}{', ...' if named[5:] else ''} are an estimate: these tables take any "
            "id, and the profile hashes ids onto rows. They are planned by their capacity."
        )
    copies = [each.table for each in candidate.tables if each.kernel == "replicated"]
    if request.workload.shape.device == "cuda" and set(copies) - {each.table for each in request.replicated}:
        notes.append(
            f"Every rank has a copy of {len(copies)} tables. Their collectives are predicted; that the host's thread "
            "takes longer, for the operations that train them, is not."
        )
    return notes
