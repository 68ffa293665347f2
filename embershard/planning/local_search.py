"""Local search over placements: takes tables out and puts each where the step becomes shortest, again and again.

Ruin and recreate (Schrimpf et al. 2000): a few tables are taken out, those of the slowest rank among them, and are put
back one after the other, each with the option and on the ranks that make the step shortest. Moves, swaps, and changes
of sharding type, width and cache are all such steps. Worse placements are accepted at first, less and less of them.
Each sharding type has collectives of its own, so it begins with few types, and goes on with the best of these.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from embershard.planning.cost.work import groups_of_collectives
from embershard.planning.cost_arrays import CostArrays, Option
from embershard.planning.search_loops import FULLEST_SECONDS, PENALTY, SPREAD, prices
from embershard.planning.simulate.step_formula import STAGES
from embershard.sharding.sharding_types import SHARDING_TYPES
from embershard.sharding.shards import PoolKey, TablePlacement, rows_by_pool

Floats = NDArray[np.float64]

#: Tables that are taken out at a time.
_MOST_OUT = 6
#: Share of a table's options that an insertion overlooks, so that it does not always end in the same placement (the
#: "blinks" of Christiaens and Vanden Berghe 2020).
_OVERLOOKED = 0.15
#: So close to what no placement is faster than, the search ends.
_AS_GOOD = 1.0005
#: It ends, too, after so many rounds (at least) in which the step became shorter by less than this share.
_PATIENCE, _GAIN = 60, 2e-4
#: Worse placements that are accepted at first, relative to the seconds of a step; and rounds without a better one than
#: the best, after which it goes on from that.
_TEMPERATURE, _MOST_AWAY = 0.003, 25
#: Share of the rounds that take tables from two ranks, the others from any.
_OF_TWO_RANKS = 0.5
#: Share of the rounds with each set of sharding types, and how many of them are improved further, in turn.
_HEATS = ((1 / 30, 5), (2 / 15, 2))


@dataclass(frozen=True)
class Choice:
    """The place of one table: its option, and the rank of each shard."""

    option: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Placed:
    """A placement of the sharded tables, and the seconds of a step as the costs tell."""

    tables: tuple[TablePlacement, ...]
    step_seconds: float


def local_search(
    costs: CostArrays,
    iterations: int,
    *,
    begin: Sequence[Sequence[TablePlacement]] = (),
    first_types: Sequence[Container[str]] = (),
    seed: int = 0,
) -> list[Placed]:
    """Return placements of the sharded tables, the best first, all of them within the memory as far as the costs tell.
    Deterministic.

    Args:
        iterations: tables are taken out so often, for each of a few placements to begin with.
        begin: placements to begin with, in place of those that are made here.
        first_types: sharding types that each of those made here may have, in place of the best sets of types; a table
            that may have none of them has its own.
    """
    found: dict[tuple[Choice, ...], tuple[float, float]] = {}
    rng = np.random.default_rng(seed)
    states: Iterable[_SearchState]
    ways = [_ways(options) for options in costs.options]
    if begin:
        states = _given(costs, ways, begin)
    elif first_types:
        states = [_made(_SearchState(costs, ways), types) for types in first_types]
    else:
        states = _of_few_types(costs, ways, iterations, found, rng)
    for state in states:
        found.update(_improve(state, iterations, rng))
    best = sorted(found, key=lambda choices: found[choices])
    return [
        Placed(
            tuple(costs.placement(table, each.option, each.ranks) for table, each in enumerate(choices)),
            found[choices][1],
        )
        for choices in best
    ]


def _of_few_types(
    costs: CostArrays,
    ways: Sequence[Sequence[_Way]],
    iterations: int,
    found: dict[tuple[Choice, ...], tuple[float, float]],
    rng: np.random.Generator,
) -> list[_SearchState]:
    """Return the best placements after a few rounds with each set of types; `found` gets those on the way."""
    states = [_made(_SearchState(costs, ways, types), None) for types in _sets_of_types(costs)]
    for share, most in _HEATS:
        for state in states:
            found.update(_improve(state, math.ceil(share * iterations), rng))
        states = sorted(states, key=_SearchState.value_with_its_groups)[:most]
    return states


def _sets_of_types(costs: CostArrays) -> list[frozenset[str]]:
    """Return sharding types, one, two, or all: each has collectives of its own, so the best plan has few."""
    names = list(dict.fromkeys(option.sharding for options in costs.options for option in options))
    few = [frozenset(each) for count in (1, 2) for each in itertools.combinations(names, count)]
    return list(dict.fromkeys([*few, frozenset(names)]))


def _made(state: _SearchState, types: Container[str] | None) -> _SearchState:
    """Place the tables with these types, those with most seconds first."""
    for table in state.by_size():
        state.insert(table, types)
    return state


def _given(
    costs: CostArrays, ways: Sequence[Sequence[_Way]], given: Sequence[Sequence[TablePlacement]]
) -> Iterator[_SearchState]:
    """Yield the placements that these costs know, each rank's caches as large as it has room for."""
    numbers = {size.table: number for number, size in enumerate(costs.tables)}
    for tables in given:
        own = {
            numbers[each.table]: (costs.options_of(each), each.ranks or tuple(range(costs.world_size)))
            for each in tables
            if each.table in numbers
        }
        if not all(options for options, _ in own.values()):
            continue
        last = max((each.level for options in costs.options for each in options), default=0)
        levels = np.zeros(costs.world_size, np.int64)  # of each rank, larger caches first
        while True:
            state = _SearchState(costs, ways)
            for table, (options, ranks) in own.items():
                level = levels[[*ranks]].max()
                allowed = [option for option in options if costs.options[table][option].level <= level]
                state.put(table, Choice((allowed or options[:1])[-1], ranks))
            may_shrink = (state.over_limit > 0) & (levels < last)
            if not may_shrink.any():
                break
            levels[may_shrink] += 1
        yield state


def _improve(
    state: _SearchState, iterations: int, rng: np.random.Generator
) -> list[tuple[tuple[Choice, ...], tuple[float, float]]]:
    """Return the best placements on the way, with their value and their seconds: each is better than those before."""
    kept: list[tuple[tuple[Choice, ...], tuple[float, float]]] = []
    floor, patience, last = state.floor, max(_PATIENCE, iterations // 4), 0
    value, best, lowest = state.value(), math.inf, math.inf
    first, first_value, since = state.choices(), value, 0  # the best so far, whether or not it fits
    for iteration in range(iterations + 1):
        if value < (1.0 - _GAIN) * lowest:
            lowest, last = value, iteration
        if value < first_value:
            first, first_value, since = state.choices(), value, iteration
        if state.fits and (own := state.value_with_its_groups()) < best:
            best = own
            kept.append((tuple(state.choices()), (own, state.seconds())))
        is_done = best <= _AS_GOOD * floor or iteration - last > patience
        if iteration == iterations or not state.num_tables or is_done:
            break
        if iteration - since > _MOST_AWAY:
            state.change(first)
            value, since = state.value(), iteration
        out = state.pick(rng)
        before = [(table, state.take(table)) for table in out]
        rng.shuffle(out)
        for table in out:
            state.insert(table, rng=rng)
        changed = state.value()
        heat = _TEMPERATURE * (1 - iteration / iterations) * abs(value)
        if changed <= value or (heat and rng.random() < math.exp(-(changed - value) / heat)):
            value = changed
            continue
        for table in out:
            state.take(table)
        for table, choice in before:
            state.put(table, choice)
    state.change(first)
    return kept[-3:]


class _SearchState:
    """A placement: the totals of all ranks, and where each table is.

    Args:
        ways: of each table, to be placed.
        only: sharding types that tables are put back with, if they can be; what these exchange is paid for, with tables
            or without. Empty: all.
    """

    def __init__(self, costs: CostArrays, ways: Sequence[Sequence[_Way]], only: frozenset[str] = frozenset()) -> None:
        self._costs, ranks = costs, costs.world_size
        self._totals = costs.base_seconds * costs.slowdown
        self._memory = costs.rank_memory
        self._host = np.zeros(ranks)
        self._groups: Counter[str] = Counter()
        self._pools: Counter[PoolKey] = Counter()  # their rows, where these are limited
        self._choices: dict[int, Choice] = {}
        self._node_of = np.arange(ranks) // costs.ranks_per_node
        self._limit = math.inf if costs.device_limit is None else max(1.0, costs.device_limit)
        self._host_limit = math.inf if costs.host_limit is None else max(1.0, costs.host_limit)
        self._paid = only
        self._ways = [[part for way in own if (part := way.of(only))] or own for own in ways] if only else ways
        self._machine = costs.machine

    @property
    def num_tables(self) -> int:
        return len(self._costs.tables)

    def by_size(self) -> list[int]:
        """Return the tables, those with most seconds first."""
        seconds = [max(float(each.total_seconds.sum()) for each in options) for options in self._costs.options]
        return sorted(range(self.num_tables), key=lambda table: -seconds[table])

    def choices(self) -> list[Choice]:
        return [self._choices[table] for table in range(self.num_tables)]

    @property
    def floor(self) -> float:
        return self._costs.floor_seconds

    @property
    def over_limit(self) -> Floats:
        """Device memory of each rank above its limit, [R]."""
        return self._over_limit(self._memory)

    @property
    def fits(self) -> bool:
        return not self._excess(self._memory, self._host).any()

    def value(self) -> float:
        """Return the seconds of a step, with what tells equal ones apart."""
        groups = groups_of_collectives(self._groups.keys() | self._paid)
        return float(self._of_totals(self._totals, self._memory, self._host, groups))

    def value_with_its_groups(self) -> float:
        """Return the value of the placement as it is, without what no table exchanges."""
        return float(self._of_totals(self._totals, self._memory, self._host, groups_of_collectives(self._groups)))

    def seconds(self) -> float:
        """Return the seconds of a step."""
        formula = self._costs.formula
        return float(formula.seconds(formula.slowest(self._totals), groups_of_collectives(self._groups)))

    def pick(self, rng: np.random.Generator) -> list[int]:
        """Return tables to take out: of the slowest rank of a random stage, and others."""
        columns = self._costs.formula.columns(self._totals)
        slowest = int(columns[:, rng.integers(columns.shape[1])].argmax())
        if not self.fits:
            slowest = int(self._costs.device_bytes(self._memory).argmax())
        there = [table for table, choice in self._choices.items() if slowest in choice.ranks]
        count = int(rng.integers(1, min(_MOST_OUT, self.num_tables) + 1))
        first = [there[int(rng.integers(len(there)))]] if there else []
        others = rng.permutation(self.num_tables).tolist()
        if rng.random() < _OF_TWO_RANKS:
            two = {slowest, int(rng.integers(self._costs.world_size))}
            others = [table for table in others if not two.isdisjoint(self._choices[table].ranks)]
        return list(dict.fromkeys([*first, *others]))[:count]

    def change(self, choices: Sequence[Choice]) -> None:
        """Put all tables to these places."""
        for table, choice in enumerate(choices):
            if self._choices[table] != choice:
                self.take(table)
                self.put(table, choice)

    def take(self, table: int) -> Choice:
        """Take a table out; return where it was."""
        choice = self._choices.pop(table)
        option = self._costs.options[table][choice.option]
        self._add(option, choice.ranks, -1.0)
        self._pools.subtract(self._pool_rows(table, choice))
        self._groups[option.group] -= 1
        if not self._groups[option.group]:
            del self._groups[option.group]
        return choice

    def put(self, table: int, choice: Choice) -> None:
        """Put a table to a place."""
        option = self._costs.options[table][choice.option]
        self._add(option, choice.ranks, 1.0)
        self._pools.update(self._pool_rows(table, choice))
        self._groups[option.group] += 1
        self._choices[table] = choice

    def _add(self, option: Option, ranks: Sequence[int], sign: float) -> None:
        where = np.asarray(ranks)  # each once
        more = option.seconds if self._costs.are_alike else option.seconds * self._costs.slowdown[where]
        self._totals[where] += sign * more
        self._memory[where] += sign * option.memory
        self._host[where] += sign * option.host_bytes
        if option.row_id_seconds:
            lookup = STAGES.index("lookup")
            self._totals[:, lookup] += sign * option.row_id_seconds * self._costs.slowdown[:, lookup]

    def _pool_rows(self, table: int, choice: Choice) -> dict[PoolKey, int]:
        """Return the rows that a table adds to caches at a place; none where all rows are few."""
        if self._costs.most_pool_rows is None:
            return {}
        placed = self._costs.placement(table, choice.option, choice.ranks)
        pools = rows_by_pool([placed], self._costs.ranks_per_node)
        return {key: sum(rows.values()) for key, rows in pools.items()}

    def _has_room(self, table: int, choice: Choice) -> bool:
        """Return whether caches can number their rows with a table at a place, too."""
        rows = self._pool_rows(table, choice)
        return not rows or max(self._pools[key] + own for key, own in rows.items()) <= (self._costs.most_pool_rows or 0)

    def insert(self, table: int, types: Container[str] | None = None, rng: np.random.Generator | None = None) -> None:
        """Put a table to where the step becomes shortest, with one of these sharding types; with `rng`, some options
        are overlooked by chance."""
        if self._costs.ranks and self._costs.ranks[table] is not None:
            self._insert_on(table, self._costs.ranks[table] or ())
            return
        best, found, paid = math.inf, None, self._groups.keys() | self._paid
        counted = groups_of_collectives(paid)
        ways = self._ways[table]
        if types is not None:
            ways = [part for way in ways if (part := way.of(types))] or ways
        for way in ways:
            groups = np.array([counted if name in paid else counted + weight for name, weight in way.weights], float)
            values, ranks = self._prices(way, groups)
            if rng is not None:
                values[rng.random(len(values)) < _OVERLOOKED] = math.inf
            while (value := float(values[place := int(values.argmin())])) < best:
                choice = Choice(way.numbers[place], tuple(ranks[place].tolist()))
                if self._has_room(table, choice):
                    best, found = value, choice
                found, values[place] = found or choice, math.inf
        if best == math.inf and rng is not None:
            self.insert(table)
        else:
            self.put(table, found or Choice(0, ()))

    def _prices(self, way: _Way, groups: Floats) -> tuple[Floats, NDArray[np.int64]]:
        """Return the value with each of the options, [O], and the best ranks for its shards, [O, N]."""
        size, per_node, machine = self._costs.world_size, self._costs.ranks_per_node, self._machine
        options = way.seconds, way.memory, way.host_bytes, way.everywhere, groups, way.on_one_node
        now = self._totals, self._memory, self._host, {"any": 1, "node": per_node, "all": size}[way.kind]
        run = machine.overlap, machine.ranks_per_node, machine.cores, machine.cores_copy
        return prices(*options, *now, *run, machine.slowdown, machine.formula, machine.limits)

    def _insert_on(self, table: int, ranks: tuple[int, ...]) -> None:
        """Put a table on ranks that are decided, with the option that makes the step shortest there."""
        values = {}
        for number, option in enumerate(self._costs.options[table]):
            if option.num_shards == len(ranks):
                self.put(table, Choice(number, ranks))
                values[number] = self.value()
                self.take(table)
        self.put(table, Choice(min(values, key=values.__getitem__), ranks))

    def _of_totals(self, totals: Floats, memory: Floats, host: Floats, groups: float) -> Floats:
        """Return the value, [...], of totals [..., R, stages]."""
        formula = self._costs.formula
        seconds = formula.seconds(formula.slowest(totals), groups)
        spread = np.sqrt(np.square(totals.sum(axis=-1)).mean(axis=-1))
        if self._limit < math.inf:
            seconds = seconds + FULLEST_SECONDS * self._costs.device_bytes(memory).max(axis=-1) / self._limit
        return np.asarray((seconds + SPREAD * spread) * (1 + PENALTY * self._excess(memory, host)))

    def _excess(self, memory: Floats, host: Floats) -> Floats:
        """Return by how much the ranks are over their memory, and the nodes over theirs, relative to it, [...]."""
        excess = np.zeros(host.shape[:-1])
        if self._limit < math.inf:
            excess = excess + self._over_limit(memory).sum(axis=-1) / self._limit
        if self._host_limit < math.inf:
            firsts = np.arange(0, host.shape[-1], self._costs.ranks_per_node)
            of_nodes = np.add.reduceat(host, firsts, axis=-1)
            excess = excess + np.maximum(0.0, of_nodes - self._host_limit).sum(axis=-1) / self._host_limit
        if (most := self._costs.most_pool_rows) is not None:
            excess = excess + sum(max(0, rows - most) for rows in self._pools.values()) / most
        return np.asarray(excess)

    def _over_limit(self, memory: Floats) -> Floats:
        """Return the bytes above the limit, [..., R], of ranks with so much in memory, [..., R, columns]."""
        return np.asarray(np.maximum(0.0, self._costs.device_bytes(memory) - self._limit))


@dataclass(frozen=True, eq=False)
class _Way:
    """Options of a table with N shards each, which are priced together; O options.

    Attributes:
        numbers: of the options.
        kind: where the shards are: each on "any" rank of its own, or one on each rank of a "node" or of "all".
        seconds: [O, N, stages].
        memory: [O, N, columns].
        host_bytes: [O, N].
        everywhere: [O, stages] on all ranks.
        types, groups: of the options.
        on_one_node: [O] the shards need ranks of one node.
    """

    numbers: tuple[int, ...]
    kind: str
    seconds: Floats
    memory: Floats
    host_bytes: Floats
    everywhere: Floats
    types: tuple[str, ...]
    groups: tuple[str, ...]
    on_one_node: NDArray[np.bool_]

    @cached_property
    def weights(self) -> list[tuple[str, float]]:
        """The options' groups, each with how many `groups_of_collectives` counts for it."""
        return [(group, groups_of_collectives([group])) for group in self.groups]

    def of(self, types: Container[str]) -> _Way | None:
        """Return those options that have one of these types; None: none has."""
        kept = [number for number, name in enumerate(self.types) if name in types]
        if len(kept) in (0, len(self.types)):
            return self if kept else None
        return _Way(
            tuple(self.numbers[number] for number in kept),
            self.kind,
            self.seconds[kept],
            self.memory[kept],
            self.host_bytes[kept],
            self.everywhere[kept],
            tuple(self.types[number] for number in kept),
            tuple(self.groups[number] for number in kept),
            self.on_one_node[kept],
        )


def _ways(options: Sequence[Option]) -> list[_Way]:
    """Sort a table's options by where their shards are."""
    kinds: dict[tuple[str, int], list[int]] = {}
    for number, option in enumerate(options):
        over = SHARDING_TYPES[option.sharding].rows_over
        kind = {"one": "any", "copies": "all"}.get(over, over)
        kinds.setdefault((kind, option.num_shards), []).append(number)
    found = []
    for (kind, _), numbers in kinds.items():
        own = [options[number] for number in numbers]
        everywhere = np.zeros((len(own), len(STAGES)))
        everywhere[:, STAGES.index("lookup")] = [option.row_id_seconds for option in own]
        seconds, memory, host = (np.array([getattr(o, n) for o in own]) for n in ("seconds", "memory", "host_bytes"))
        types = tuple(option.sharding for option in own)
        on_one_node = np.array([SHARDING_TYPES[name].on_one_node for name in types])
        groups = tuple(option.group for option in own)
        found.append(_Way(tuple(numbers), kind, seconds, memory, host, everywhere, types, groups, on_one_node))
    return found
