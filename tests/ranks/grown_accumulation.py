"""Random accumulated trainings in caches that grow between the micro-batches, each beside one batch for each update.

`python -m tests.ranks.grown_accumulation --cases 300`: growth x unequal pieces x modes x look-ahead x optimizers x
homes and types of rows x policies, on 1, 2 and 4 ranks. The reference is stock TorchRec on the whole batches; where
host rows are small, a cache of all rows on the whole batches. Gradients are dyadic: weights and optimizer states are
equal bit for bit. Prints a line per case and the totals; ends with 1 where something differs, or little grew.

`--control`: the plan behind a growth takes pinned slots, as an earlier version's did. On one rank, of the cases whose
caches grow while they hold a batch: in how many the rows differ, and in how many the assertion stops it.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import tempfile
import warnings
from typing import Any

from embershard.cache import CacheGrowthWarning
from tests.ranks import accumulation
from tests.ranks.accumulation import Case, Outcome
from tests.ranks.workers import RankError, RankPool

WORLD_SIZES = (1, 2, 1, 2, 1, 4)  # of the cases, in turn
_ROWS, _DIMS = (120, 64, 200, 48), (16, 16, 8, 8)
_SIZES = (0, 1, 2, 3, 5, 8, 13)


def ranks_of(number: int) -> int:
    """Return on how many ranks the case of a number runs."""
    return WORLD_SIZES[number % len(WORLD_SIZES)]


def random_case(seed: int, number: int) -> Case:
    """Return the case of a number; the first updates are small, so that caches grow several times."""
    draw, world_size = random.Random(f"{seed}/{number}"), ranks_of(number)
    pieces, updates = draw.choice([1, 2, 3, 4, 5, 6]), draw.randint(3, 5)
    steps = pieces * updates - draw.randrange(pieces)  # the last update may have fewer
    sizes = [draw.choice(_SIZES) * (1 + step // pieces) // world_size + 1 for step in range(steps)]
    chosen: dict[str, Any] = {
        "rows": _ROWS, "dims": _DIMS, "pieces": pieces, "steps": steps, "sizes": tuple(sizes), "seed": number,
        "overflow": "grow", "ratio": draw.choice([0.02, 0.1, 0.2, 0.3]), "exchange": "pooled",
        "optimizer": draw.choice(["sgd", "adagrad", "rowwise_adagrad"]),
        "policy": draw.choice(["lookahead", "lookahead", "lfu", "lru", "frequency", "static"]),
        "slot_map": draw.choice(["array", "hashed"]), "transfer": draw.choice([None, "staged"]),
        "lookahead": draw.choice([0, 1, 3, 8]), "prefetch": draw.choice([1, 2, 3]),
        "worker": draw.choice([None, False, True]), "between": draw.choice(["", "", "evaluate", "write back", "stats"]),
        "empty_every": draw.choice([0, 0, 3]), "sharding": draw.choice(["table_wise", "row_wise", "column_wise"]),
    }  # fmt: skip
    chosen |= draw.choice(_POOLINGS) | _of_mode(draw, chosen, world_size)
    return Case(**chosen)


_POOLINGS: list[dict[str, Any]] = [{}, {}, {"mean": True}, {"weighted": True}, {"shared": True}]


def _of_mode(draw: random.Random, chosen: dict[str, Any], world_size: int) -> dict[str, Any]:
    """What the mode asks for; rows in a file and small ones, in the modes that have them."""
    several = ["rows", "rows", "data_parallel", "replicated"] if world_size > 1 else []
    mode = draw.choice(["sharded", "sharded", "sharded", "hot_cold", "sequences", *several])
    if mode == "data_parallel":
        return {"mode": "data_parallel", "sharding": "row_wise"}
    if mode == "hot_cold":
        return {"hot": 12, "hot_every": draw.choice([0, 2])}
    if mode == "replicated":
        return {"replicated": (1,)}
    if mode == "sequences":
        return {"sequence": True, "dims": (16,) * 4, "mean": False, "weighted": False, "sharding": "table_wise"}
    found = {"exchange": "rows" if mode == "rows" else "pooled"}
    home = draw.choice(["memory", "memory", "memory", "file", "int8", "fp16"])
    if home == "file":
        return found | {"init_seed": 5, "host_bytes": 1, "policy": "lookahead", "transfer": None}
    if home != "memory":
        found |= {"transfer": None}
        full = {"full_rows": draw.choice([0.0, 0.1]), "profile": True} if home == "int8" else {}
        return found | {"init_seed": 5, "host_dtype": home} | full
    return found


def compared(case: Case, fault: str | None = None) -> Outcome:
    """`accumulation.compare`, quietly; with rows in a file, in a folder of its own."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore", CacheGrowthWarning)
        if case.host_bytes:
            row_bytes = {"sgd": 4, "rowwise_adagrad": 5, "adagrad": 8}[case.optimizer] * 16
            case = dataclasses.replace(case, host_dir=folder, host_bytes=int(0.9 * sum(case.rows) * row_bytes))
        try:
            return accumulation.compare(case, fault)
        except AssertionError as error:
            if fault is None:
                raise
            return Outcome([f"AssertionError: {error}"], 0, 0, 0, (set(), set()), 1)


def differs(case: Case, outcomes: list[Outcome]) -> list[str]:
    """What differs on any rank; iterations, too, but where evaluations count that the reference has not."""
    found = {name for outcome in outcomes for name in outcome.different}
    if case.between != "evaluate" and any(outcome.counts[0] != outcome.counts[1] for outcome in outcomes):
        found.add("iterations")
    return sorted(found)


def describe(case: Case) -> str:
    """The settings of a case that are no defaults."""
    default = Case()
    return ", ".join(f"{name}={value}" for name, value in vars(case).items() if value != getattr(default, name))


def main() -> int:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--control", action="store_true")
    options = parser.parse_args()
    if options.control:
        return _control(options.seed, options.cases)
    total = grown = failed = growths = 0
    for world_size in sorted({*WORLD_SIZES}):
        pool = RankPool(world_size)
        for number in (each for each in range(options.cases) if ranks_of(each) == world_size):
            case = random_case(options.seed, number)
            try:
                outcomes = pool.run(compared, case)
                different, held = differs(case, outcomes), sum(outcome.held_growths for outcome in outcomes)
            except RankError as error:
                different, held = [str(error).strip().splitlines()[-1]], 0
            total, grown, growths = total + 1, grown + bool(held), growths + held
            failed += bool(different)
            print(f"{different or 'equal'}, {world_size} ranks, {held} held growths: {describe(case)}", flush=True)
        pool.close()
    print(f"{failed} of {total} cases differ; caches grew {growths} times while they held batches, in {grown} cases")
    return 1 if failed or 3 * grown < total else 0


def _control(seed: int, cases: int) -> int:
    pool, counts = RankPool(1), {"growth unpins": 0, "growth unpins, checked": 0}
    grown = 0
    for number in range(cases):
        case = random_case(seed, number)
        if ranks_of(number) > 1 or not pool.run(compared, case)[0].held_growths:
            continue
        grown += 1
        for fault in counts:
            counts[fault] += bool(pool.run(compared, case, fault)[0].different)
    pool.close()
    print(f"of {grown} cases with held growths, {counts}")
    return 0 if min(counts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
