"""What rows in fp16 would buy, where caches are there because rows do not fit: all of them on the devices.

A plan never chooses it: fp16 rounds each row after each update, so it trains other weights. FBGEMM trains such rows on
the device as it trains fp32 ones; optimizer states stay fp32.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from embershard.commands.plan.run import Setup
from embershard.errors import ConfigError
from embershard.extras.what_if.cases import planned_case
from embershard.planning.budget import all_on_devices, resident_needs
from embershard.planning.request import PlanRequest
from embershard.sharding.plan import Plan
from embershard.sharding.sizes import TableSize

_MOST_TRIED = 8  # tables that may be the last one
_MOST_NAMED = 4
_ROUNDS = "fp16 rounds each row after each update: it trains other weights, so no plan chooses it."


def half_rows_sentence(setup: Setup, request: PlanRequest, plan: Plan) -> str:
    """Return a sentence on the tables whose rows in fp16 would let all rows be on the devices, with the time of a step;
    empty where no table is cached for want of memory, or one must be.

    Args:
        setup: the command line.
        request: what the plan is for.
        plan: has a prediction.
    """
    is_pinned = any(pin.kind == "cached" for pin in request.pins.values())
    has_caches = any(table.kernel == "cached" for table in plan.tables)
    if plan.prediction is None or not has_caches or is_pinned or not request.may_mix or _fits(request):
        return ""
    every = [table for table in request.workload.model.tables if table.dtype == "fp32" and table.host_dtype is None]
    halved = fewest_halved(request, every)
    if halved is None:
        return (
            f"With all weights in fp16 (model.table_dtype) rows would not fit {_ranks(plan)} either." if every else ""
        )
    names = [table.table for table in halved]
    request_then = _with_fp16(request, names)
    assert request_then is not None, "it was tried"
    case = planned_case(all_on_devices(request_then), setup.shaped(request.workload.shape.all_ranks), None, setup.price)
    if case.prediction is None:
        return ""
    changes = "--set model.table_dtype=fp16"
    if len(halved) < len(request.workload.model.tables):
        changes = " ".join(f"--set model.table_dtypes.{name}=fp16" for name in names)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    seconds = case.prediction.step_seconds, plan.prediction.step_seconds
    return (
        f"With {', '.join(names[:_MOST_NAMED])}{more} in fp16 {_ranks(plan)} would hold all rows without a cache: a "
        f"step of {1e3 * seconds[0]:.2f} ms, with caches {1e3 * seconds[1]:.2f} ({changes}). {_ROUNDS} These are the "
        "fewest tables: those that save most bytes, and as the last one, of those that are enough, the one that is "
        "looked up least."
    )


def fewest_halved(request: PlanRequest, tables: Sequence[TableSize]) -> list[TableSize] | None:
    """Return the fewest of some tables with which, in fp16, all rows fit the devices; None: not even with all of them.

    Those that save most bytes come first: no other choice of as many saves more. The last one saves no more than is
    needed: of those that are enough, it is looked up least, so that the fewest lookups are of rounded rows.
    """
    by_saved = sorted(tables, key=_saved, reverse=True)

    def is_enough(halved: Sequence[TableSize]) -> bool:
        other = _with_fp16(request, [table.table for table in halved])
        return other is not None and _fits(other)

    count = 1 + bisect.bisect_left(range(len(by_saved)), True, key=lambda last: is_enough(by_saved[: last + 1]))
    if count > len(by_saved):
        return None
    first, others = by_saved[: count - 1], by_saved[count - 1 :]
    lookups = request.workload.lookups_per_sample
    seldom = sorted(others, key=lambda table: (lookups[table.table], -_saved(table)))
    missing = _missing_bytes(request) - sum(map(_saved, first))
    able = [table for table in seldom if _saved(table) >= missing or table is others[0]][:_MOST_TRIED]
    last = next((table for table in able if is_enough([*first, table])), others[0])
    return [*first, last]


def _saved(table: TableSize) -> int:
    return table.rows * table.weight_bytes() // 2


def _missing_bytes(request: PlanRequest) -> int:
    """Return what all rows take more than all devices have together."""
    budget, needed = request.budget, sum(table.rows * table.row_bytes() for table in request.sharded)
    return needed - (budget.device_bytes or 0) * request.workload.shape.world_size + sum(budget.less_bytes)


def _with_fp16(request: PlanRequest, names: Sequence[str]) -> PlanRequest | None:
    """Return the request with these tables in fp16, too; None where changes are not tried, or other settings refuse
    them."""
    types = {table.table: "fp16" if table.table in names else table.dtype for table in request.workload.model.tables}
    try:
        return None if request.on_change is None else request.on_change("model.table_dtypes", types)
    except ConfigError:
        return None


def _fits(request: PlanRequest) -> bool:
    """Return whether the devices hold all rows."""
    return any(need.fits_device(request.budget) for need in resident_needs(request))


def _ranks(plan: Plan) -> str:
    return "1 rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
