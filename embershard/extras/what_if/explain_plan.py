"""A whole plan in five sentences; the last is what caches buy: its job without any, and on a quarter of the ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console

from embershard.commands.plan.run import Setup
from embershard.commands.plan.view import hits_cells
from embershard.errors import ConfigError
from embershard.extras.what_if.cases import planned_case
from embershard.extras.what_if.half_rows import half_rows_sentence
from embershard.launch.screen import say
from embershard.planning.budget import all_on_devices, ranks_without_caches
from embershard.planning.cost.rates import Rates
from embershard.planning.request import PlanRequest
from embershard.planning.uncertainty import PlannedCase
from embershard.sharding.plan import Plan
from embershard.units import size

_MOST_PARTS = 3
_QUARTER = 4
_MOST_TRIED = 5  # numbers of ranks from a quarter on
_NEARLY = 0.99
_RESIDENT = ("slots", "device_tables", "replicated")  # of a rank's device memory: rows


def show_plan_explanation(setup: Setup, request: PlanRequest, plan: Plan, console: Console) -> None:
    """Print what a plan is, what its steps wait for, how good it is, which table matters, and what caches buy."""
    with console.status("planning without caches, and on fewer ranks"):
        bought = " ".join(filter(None, (_bought(setup, request), half_rows_sentence(setup, request, plan))))
    sentences = (_rows(request, plan), _step(plan), _gap(plan), _tables(plan), bought)
    say(console, *(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1)))


def _rows(request: PlanRequest, plan: Plan) -> str:
    assert plan.prediction is not None, "a new plan has one"
    tables = request.workload.model.tables
    on_devices = sum(rank.device_bytes.get(use, 0) for rank in plan.prediction.ranks for use in _RESIDENT)
    budgets = [plan.memory_bytes_of(rank) for rank in range(plan.world_size)]
    of_all = f" of {size(sum(each or 0 for each in budgets))}" if None not in budgets else ""
    return (
        f"{len(tables)} tables with {sum(table.rows for table in tables):,} rows take "
        f"{size(sum(table.rows * table.row_bytes() for table in tables))} with their optimizer states; this plan uses "
        f"{size(on_devices)}{of_all} on {plan.world_size} devices for rows."
    )


def _step(plan: Plan) -> str:
    prediction = plan.prediction
    assert prediction is not None, "a new plan has one"
    slowest = max(prediction.ranks, key=lambda rank: rank.step_seconds)
    parts = sorted(slowest.seconds.items(), key=lambda part: -part[1])[:_MOST_PARTS]
    told = ", ".join(f"{name.replace('_', ' ')} {seconds * 1e3:.2f}" for name, seconds in parts if seconds)
    host = ""
    if plan.device == "cuda" and slowest.seconds.get("overhead", 0.0) >= _NEARLY * prediction.step_seconds:
        host = (
            " Overhead is the time of the host's thread, an assumption of the machine: all that fits beside it is as "
            "fast, so memory and price tell plans apart, and speed does not."
        )
    return (
        f"A step of {plan.batch_size * plan.world_size:,} samples takes {prediction.step_seconds * 1e3:.2f} ms "
        f"({prediction.samples_per_second:,.0f} samples/s); of rank {slowest.rank}, the slowest, the longest parts "
        f"take, if nothing ran beside them, {told} ms.{host}"
    )


def _gap(plan: Plan) -> str:
    if plan.bound is None:
        return "How far the best plan could be from this one is not known: with one rank there is little to choose."
    change = f" A step becomes 5 % shorter by {plan.bound.change}." if plan.bound.change else ""
    return plan.bound.sentence + change


def _tables(plan: Plan) -> str:
    assert plan.prediction is not None, "a new plan has one"
    kinds = Counter(f"{table.sharding}, {table.kernel}" for table in plan.tables)
    places = "; ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    misses = defaultdict[str, float](float)
    for part in plan.prediction.tables:
        misses[part.table] += part.misses
    name = max(misses, key=misses.__getitem__)
    if not misses[name]:
        return f"Tables are {places}, and every lookup finds its row on the device."
    hits, *_ = hits_cells([part for part in plan.prediction.tables if part.table == name])
    return (
        f"Tables are {places}; {name} has {misses[name] / sum(misses.values()):.0%} of the rows that are fetched in a "
        f"step: {hits} of its lookups hit."
    )


def _bought(setup: Setup, request: PlanRequest) -> str:
    if not request.may_mix:
        return (
            "How many ranks hold all rows without a cache is not known: give the devices' memory (--topology of GPUs, "
            "or --device-memory), and no size of caches."
        )
    if not isinstance(request.rates, Rates):
        return "Ranks are of several kinds of machines: for other numbers of them name other nodes (--topology)."
    fewest = ranks_without_caches(request)
    if fewest is None or fewest < _QUARTER:
        found = "No number of ranks that was tried holds" if fewest is None else "Fewer than 4 ranks hold"
        return f"{found} all rows without a cache, so none is planned on a quarter of them."
    samples = request.workload.shape.global_batch_size
    whole = _case(setup, all_on_devices(setup.request(fewest)), samples)
    tried = [whole]
    for fewer in _of_some(setup, range(fewest // _QUARTER, fewest)):
        tried.append(_case(setup, fewer, samples))
        if tried[-1].prediction is not None:
            break
    cached = tried[-1]
    if whole.prediction is None or cached.prediction is None or cached is whole:
        return f"Without a cache, {whole.sentence}; with caches on fewer ranks, {cached.problem or 'none was tried'}"
    longer = cached.prediction.step_seconds / whole.prediction.step_seconds
    money = cached.cost_per_hour / whole.cost_per_hour * longer
    return (
        f"Without a cache, {samples:,} samples a step take {_told(whole)}; with caches they take {_told(cached)}: "
        f"{longer:.2f} times as long, and a sample costs {money:.2f} times as much."
    )


def _of_some(setup: Setup, ranks: Sequence[int]) -> Iterator[PlanRequest]:
    """Yield the requests for the first of these numbers of ranks that fill nodes."""
    found = 0
    for number in ranks:
        try:
            yield setup.request(number)
        except ConfigError:
            continue
        found += 1
        if found == _MOST_TRIED:
            return


def _case(setup: Setup, request: PlanRequest, samples: int) -> PlannedCase:
    """Plan a request with so many samples on all ranks together."""
    shape = request.workload.shape
    shape = replace(shape, batch_size=max(1, round(samples / shape.all_ranks)))
    request = replace(request, workload=replace(request.workload, shape=shape))
    return planned_case(request, setup.shaped(shape.all_ranks), None, setup.price)


def _told(case: PlannedCase) -> str:
    assert case.prediction is not None, "it fits"
    cost = "" if case.price is None else f", {case.cost_per_hour:,.2f} an hour"
    ranks = "1 rank" if case.num_ranks == 1 else f"{case.num_ranks} ranks"
    return f"{ranks} ({case.prediction.step_seconds * 1e3:.2f} ms{cost})"
