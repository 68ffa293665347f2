"""Every plan of tiny tasks, each predicted as a whole: `python -m tests.unit.planning.exhaustive` tries all tasks.

A bound above one of these plans is none. The plans are rated by the replay of their steps, not by the formula that the
search and the bound share.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from embershard.cache.config import CachePolicy
from embershard.errors import ShardingError
from embershard.frequency.assumed import AssumedTable, assumed_statistics
from embershard.planning.cost.rates import Rates, of_each
from embershard.planning.cost.topology import load_topology
from embershard.planning.make_plan import PlanSearch, best_candidate, sized
from embershard.planning.request import LEAST_COLUMNS, Budget, PlanRequest
from embershard.sharding.run_shape import ReplaySettings
from embershard.sharding.sharding_types import COPIES, SHARDING_TYPES
from embershard.sharding.shards import COLUMN_MULTIPLE, TablePlacement, no_rows_problem
from embershard.sharding.sizes import TableSize
from tests.unit.planning.requests import LFU, data_of, make_request, rates

_CORES = 2
#: Rates of all ranks together, or of none here.
_SHARED = ("seconds_per_collective", "seconds_per_all_reduce_byte", "step_overhead_seconds", "seconds_per_page")


def on_two_ranks(seed: int) -> PlanRequest:
    """Two tables on two ranks, of any size, on a GPU or not, with much memory, little, a ratio, or caches of a size."""
    rng = np.random.default_rng(seed)
    rows = tuple(int(count) for count in 10 ** rng.uniform(1.5, 4, 2))
    dims = tuple(int(dim) for dim in rng.choice([16, 64, 128], 2))
    taken = sum(count * (4 * dim + 4) for count, dim in zip(rows, dims, strict=True))
    budgets = (
        Budget(device_bytes=10**9),
        Budget(device_bytes=400_000 + round(float(rng.uniform(0.3, 0.8)) * taken)),
        Budget(ratio=float(rng.uniform(0.05, 0.5))),
        Budget(cache_bytes=200_000 + taken // 3),
    )
    policy, lookahead = (CachePolicy("lru"), 4) if seed % 3 == 0 else (CachePolicy("lfu"), 0)
    return make_request(
        budgets[seed % len(budgets)],
        effort=1.0,
        rows=rows,
        dims=dims,
        data=replace(data_of(rows), read_seconds_per_sample=None),
        rates=replace(rates(), step_overhead_seconds=0.0),  # nothing hides what tables take
        batch_size=int(rng.choice([16, 256])),
        device="cpu" if seed % 5 == 0 else "cuda",
        exchange="auto" if seed % 7 == 0 else "pooled",
        cache=ReplaySettings(policy, lookahead),
    )


def on_shared_cores(seed: int) -> PlanRequest:
    """Tables on 2, 4 or 8 ranks of a CPU with two cores: two with skewed lookups, or three that are looked up evenly,
    whose blocks of rows are alike. Whole tables leave ranks idle, row-wise ones do not."""
    rng, world_size = np.random.default_rng(seed), (2, 4, 8)[seed % 3]
    is_even = world_size == 8 or seed % 2 == 0
    count = 3 if is_even else 2
    rows = tuple(8 * int(each) for each in 10 ** rng.uniform(1.5, 4, count))
    dims = tuple(int(dim) for dim in rng.choice([16, 32, 64], count))
    bags = [int(bag) for bag in rng.choice([1, 2, 10, 40], count)]
    tables = [AssumedTable(f"t{n}", rows[n], 0.0, bags[n]) for n in range(count)]
    data = assumed_statistics(tables, 10**6) if is_even else data_of(rows, bag_size=bags[0])
    budgets = (Budget(device_bytes=10**9), Budget(ratio=float(rng.uniform(0.05, 0.5))))
    return make_request(
        budgets[int(rng.random() < 0.25)],
        effort=1.0,
        rows=rows,
        dims=dims,
        data=data,
        batch_size=int(rng.choice([64, 512])),
        device="cpu",
        cores_per_node=_CORES,
        world_size=world_size,
        exchange="auto" if seed % 7 == 0 else "pooled",
        cache=LFU,
        rates=replace(load_topology("cpu").rates_for(world_size), step_overhead_seconds=0.0),
        types=(["table_wise"], None, ["table_wise", "column_wise"])[seed // 3 % 3],
    )


def on_two_nodes(seed: int) -> PlanRequest:
    """Two tables on two nodes of two GPUs, where rows may be cut over a node and columns over both."""
    rng = np.random.default_rng(seed)
    rows = tuple(int(count) for count in 10 ** rng.uniform(2, 5, 2))
    dims = tuple(int(dim) for dim in rng.choice([16, 64], 2))
    taken = sum(count * (4 * dim + 4) for count, dim in zip(rows, dims, strict=True))
    budgets = (Budget(device_bytes=10**9), Budget(device_bytes=8_000_000 + taken // 4), Budget(ratio=0.2))
    data = replace(data_of(rows, bag_size=int(rng.choice([1, 5]))), read_seconds_per_sample=None)
    return make_request(
        budgets[seed % len(budgets)],
        effort=1.0,
        rows=rows,
        dims=dims,
        data=data,
        world_size=4,
        ranks_per_node=2,
        batch_size=int(rng.choice([256, 4096])),
        rates=replace(load_topology("h100x2x2").rates_for(4), step_overhead_seconds=0.0),
    )


def by_default(seed: int) -> PlanRequest:
    """Two or three tables on two ranks, with the budget of `cache.ratio`, any exchange, and tables of all sizes."""
    rng = np.random.default_rng(seed)
    count = 2 + seed % 2
    rows = tuple(int(each) for each in np.clip(rng.lognormal(12.0, 2.2, count), 1e3, 5e7))
    dims = tuple(int(dim) for dim in rng.choice([16, 32, 64, 128], count))
    bags = np.clip(rng.lognormal(1.0, 1.0, count), 1, [min(60, each // 20) for each in rows]).astype(int)
    exponents = rng.uniform(0.5, 1.3, count)
    tables = [AssumedTable(f"t{n}", rows[n], float(exponents[n]), int(bags[n])) for n in range(count)]
    request = make_request(
        Budget(ratio=(0.05, 0.1)[seed // 6 % 2]),
        effort=1.0,
        rows=rows,
        dims=dims,
        data=assumed_statistics(tables, 10**8),
        batch_size=int(rng.choice([1024, 8192])),
        device="cpu" if seed % 4 == 0 else "cuda",
        exchange=("pooled", "rows", "auto")[seed // 2 % 3],
        cache=ReplaySettings(CachePolicy("lfu"), 16 if seed % 5 else 0),
    )
    return replace(request, rates=replace(request.rates, step_overhead_seconds=0.0))


def with_copies(seed: int) -> PlanRequest:
    """Two tables, small ones too, of which each rank may have a copy: on two GPUs, on cores that ranks share, or on two
    nodes, where links are slow."""
    rng = np.random.default_rng(seed)
    rows = tuple(int(count) for count in 10 ** rng.uniform(0.7, 4, 2))
    request = (on_two_ranks, on_shared_cores, on_two_nodes)[seed % 3](seed // 3)
    sizes = request.workload.model.tables
    tables = tuple(replace(size, rows=count) for size, count in zip(sizes, rows, strict=False)) + sizes[2:]
    model, bags = replace(request.workload.model, tables=tables), int(rng.choice([1, 3]))
    data = replace(data_of(tuple(size.rows for size in tables), bag_size=bags), read_seconds_per_sample=None)
    budget = request.budget if request.budget.may_mix else Budget(device_bytes=10**9)
    types = [each for each in SHARDING_TYPES if each in {COPIES, *next(iter(request.allowed.values()))}]
    return replace(request, workload=replace(request.workload, model=model, data=data), types=types, budget=budget)


def of_two_speeds(seed: int) -> PlanRequest:
    """GPUs of which some are faster in some kinds of work, and slower in others."""
    request, rng = (on_two_ranks, on_two_nodes, with_copies)[seed % 3](seed // 3), np.random.default_rng(seed)
    (own,) = set(of_each(request.rates, 1))
    names = [field.name for field in fields(own) if field.name not in _SHARED]
    factors = dict(zip(names, 10 ** rng.uniform(-0.5, 0.5, len(names)), strict=True))
    other = replace(own, **{name: float(factors[name] * getattr(own, name)) for name in names})
    shape = replace(request.workload.shape, device="cuda", cores_per_node=None)
    local = shape.world_size // 2
    return replace(request, workload=replace(request.workload, shape=shape), rates=(own,) * local + (other,) * local)


def of_unequal_columns(seed: int) -> PlanRequest:
    """Two tables of columns that two ranks cannot share evenly, or can; ranks of as much memory and speed, or not."""
    request, rng = (on_two_ranks, of_two_speeds)[seed % 2](3 * (seed // 2)), np.random.default_rng(seed)
    dims = (100, int(rng.choice([16, 68, 72, 76, 96])))
    sizes = request.workload.model.tables
    tables = tuple(replace(size, dim=dim) for size, dim in zip(sizes, dims, strict=True))
    # With "auto" an equal cut may exchange rows, and unequal ones, which a search then has no more of, may not.
    shape = replace(request.workload.shape, exchange="pooled")
    workload = replace(request.workload, model=replace(request.workload.model, tables=tables), shape=shape)
    budget, taken = request.budget, sum(size.rows * (4 * size.dim + 4) for size in tables)
    if seed % 3 == 0:
        least = 400_000 + round(float(rng.uniform(0.2, 0.4)) * taken)
        budget = Budget(device_bytes=2 * least, less_bytes=(0, least))
    return replace(request, workload=workload, budget=budget, types=["table_wise", "column_wise"])


#: Numbers of tasks of each kind.
NUM_TASKS = {
    of_unequal_columns: 60,
    of_two_speeds: 90,
    on_two_ranks: 200,
    on_shared_cores: 100,
    on_two_nodes: 200,
    by_default: 60,
    with_copies: 90,
}


#: Kinds whose tables are cut into all columns that a plan's file can say; of the others into as many on each rank.
_ALL_COLUMNS = {of_unequal_columns}


def every_plan(request: PlanRequest, *, all_columns: bool = False) -> Iterator[float]:
    """Yield the seconds of a step of all placements that fit: all sharding types, widths and ranks, with caches and
    without. Where blocks of rows are alike, ranks are, too: then each is counted under one numbering."""
    is_alike = request.workload.data.trace is None and isinstance(request.rates, Rates)
    own = [list(_placements(request, table, all_columns)) for table in request.sharded]
    for tables in itertools.product(*own):
        if is_alike and not _is_in_order(tables):
            continue
        if (
            not no_rows_problem(tables, request.workload.shape.ranks_per_node)
            and (found := sized(request, request.placed(tables))) is not None
        ):
            yield found.step_seconds


def _cuts(dim: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to cut columns into so many blocks, in order; equal ones as plans have them."""
    widths = range(LEAST_COLUMNS, dim, COLUMN_MULTIPLE)
    for first in itertools.product(widths, repeat=count - 1):
        if (last := dim - sum(first)) in widths:
            yield (*first, last) if len({*first, last}) > 1 else ()


def _placements(request: PlanRequest, table: TableSize, all_columns: bool) -> Iterator[TablePlacement]:
    ranks = range(request.workload.shape.world_size)
    if request.may_be_copied(table):
        yield TablePlacement(table.table, table.rows, table.dim, table.dtype, COPIES, "replicated", ())
    for name in request.allowed[table.table]:
        counts = [1] if name == "table_wise" else [len(ranks)]
        if name == "column_wise":
            counts = range(2, len(ranks) + 1)
            if not all_columns:
                counts = [
                    n for n in counts if table.dim % (n * COLUMN_MULTIPLE) == 0 and table.dim // n >= LEAST_COLUMNS
                ]
        places = [chosen for count in counts for chosen in itertools.combinations(ranks, count)]
        if SHARDING_TYPES[name].rows_over == "node":
            local = request.workload.shape.ranks_per_node
            nodes = [tuple(ranks[first : first + local]) for first in range(0, len(ranks), local)]
            wide = SHARDING_TYPES[name].cuts_columns
            cut = wide and table.dim % (len(nodes) * COLUMN_MULTIPLE) == 0 and table.dim // len(nodes) >= LEAST_COLUMNS
            places = [tuple(ranks)] if cut else [] if wide else nodes
        for kernel in ("cached", "device"):
            for chosen in places:
                cuts = _cuts(table.dim, len(chosen)) if all_columns and name == "column_wise" else [()]
                for cut in cuts:
                    size = table.table, table.rows, table.dim, table.dtype
                    yield TablePlacement(*size, name, kernel, chosen, columns=cut)  # type: ignore[arg-type]


def _is_in_order(tables: Sequence[TablePlacement]) -> bool:
    """Return True if ranks come into use in the order of their numbers."""
    used = 0
    for table in tables:
        new = [rank for rank in table.ranks if rank >= used]  # copies have none
        if table.sharding != "row_wise" and new != list(range(used, used + len(new))):
            return False
        used += len(new) if table.sharding != "row_wise" else 0
    return True


@dataclass(frozen=True)
class Tried:
    """A task, in seconds of a step: the best of all plans, the plan that is found, and the bound."""

    num_plans: int
    best: float | None
    found: float | None
    bound: float | None

    @property
    def problem(self) -> str:
        """What is wrong; empty where nothing is."""
        if self.best is None:
            return "" if self.found is None else "a plan where none fits"
        if self.bound is None or self.found is None:
            return "no bound, or no plan, where one fits"
        if self.bound > self.best * (1 + 1e-9):
            return f"a bound of {self.bound * 1e3:.4f} ms, and a plan of {self.best * 1e3:.4f}"
        return "" if self.best * (1 - 1e-9) <= self.found else "a plan that is not among all"


def tried(request: PlanRequest, *, all_columns: bool = False) -> Tried:
    """Try every plan of a task."""
    seconds, bound = list(every_plan(request, all_columns=all_columns)), PlanSearch(request).bound()
    try:
        candidate = best_candidate(request)
        found, bound = candidate.step_seconds, candidate.bound
    except ShardingError:
        found = None
    return Tried(len(seconds), min(seconds, default=None), found, None if bound is None else bound.step_seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = {make.__name__: make for make in NUM_TASKS}
    parser.add_argument("--tasks", type=int, default=max(NUM_TASKS.values()), help="of a kind, at most (default: all)")
    parser.add_argument("--first", type=int, default=0, help="of the tasks of a kind (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=list(kinds), help="default: all")
    options = parser.parse_args()
    num_wrong = 0
    for make in (kinds[name] for name in options.kinds):
        of_kind = []
        for seed in range(options.first, min(NUM_TASKS[make], options.first + options.tasks)):
            of_kind.append(tried(make(seed), all_columns=make in _ALL_COLUMNS))
            if of_kind[-1].problem:
                num_wrong += 1
                print(f"{make.__name__} {seed}: {of_kind[-1].problem}", flush=True)
        fitting = [each for each in of_kind if each.best and each.found and each.bound]
        above = [100 * (each.found / each.best - 1) for each in fitting]  # type: ignore[operator]
        told = [100 * (each.found / each.bound - 1) for each in fitting]  # type: ignore[operator]
        print(
            f"{make.__name__}: {len(of_kind)} tasks, {len(fitting)} with a plan, "
            f"{sum(each.num_plans for each in of_kind):,} plans; {sum(bool(each.problem) for each in of_kind)} wrong. "
            f"The best was not found in {sum(each > 1e-6 for each in above)}. Found over the best, percent: median "
            f"{statistics.median(above):.2f}, most {max(above):.2f}; over the bound: median "
            f"{statistics.median(told):.2f}, most {max(told):.2f}",
            flush=True,
        )
    return 1 if num_wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
