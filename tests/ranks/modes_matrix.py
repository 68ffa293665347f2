"""Every combination of the modes that add up in another order than TorchRec: `python -m tests.ranks.modes_matrix`.

{exchange of rows, hot and cold batches, data-parallel caches} x {SGD, row-wise Adagrad, Adagrad} x {table-wise,
row-wise, column-wise} x {SUM, MEAN, weighted, shared table} x {1, 2, 4 ranks} x {no look-ahead, look-ahead}, in caches
of which most rows are evicted; some minutes. Each beside stock TorchRec on as many ranks:

* dyadic gradients: weights and optimizer states are equal bit for bit, and all copies of a row are equal;
* real gradients (30 steps at a learning rate of 0.1): losses and weights differ from stock's by less than `MANY` times
  what stock's differ by when it adds samples up in reverse;
* negative controls: with each fault of the mode that concerns the combination, something differs.

Prints a line per combination, and the totals. Ends with 1 where one of the three does not hold. Data-parallel tables
are row-wise ones to TorchRec; the four poolings are all there is to combine.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tests.ranks import data_parallel, hot_cold, rows_exchange
from tests.ranks.rounding import MANY
from tests.ranks.rows_exchange import Case, Outcome
from tests.ranks.workers import RankPool

OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad")
SHARDINGS = ("table_wise", "row_wise", "column_wise")
POOLINGS = {"SUM": Case(), "MEAN": Case(mean=True), "weighted": Case(weighted=True), "shared table": Case(shared=True)}
WORLD_SIZES = (1, 2, 4)
#: Samples of a step, over all ranks: the rows of a batch take up to two thirds of the smallest cache.
_GLOBAL_BATCH_SIZE = 32


@dataclass(frozen=True)
class Mode:
    """``settings`` of its cases; slots as a share of the rows without and with look-ahead; how cases are compared;
    ``faults`` that one rank alone cannot have."""

    settings: dict[str, object]
    ratios: tuple[float, float]
    compare_variants: Callable[[Case, list[tuple[Case, str | None]]], list[Outcome]]
    compare_real: Callable[[Case], Outcome]
    faults: tuple[str, ...]
    shardings: tuple[str, ...] = SHARDINGS


MODES = {
    "rows": Mode(
        {"exchange": "rows"},
        (0.27, 0.4),
        rows_exchange.compare_variants,
        rows_exchange.compare_real,
        tuple(rows_exchange.FAULTS),
    ),
    "hot_cold": Mode(
        {"exchange": "pooled", "hot": 40, "hot_every": 3},
        (0.2, 0.25),
        hot_cold.compare_variants,
        hot_cold.compare_real,
        tuple(hot_cold.FAULTS),
    ),
    "data_parallel": Mode(
        {"exchange": "pooled", "mode": "data_parallel"},
        (0.4, 0.4),
        data_parallel.compare_variants,
        data_parallel.compare_real,
        ("rank left out", "division missing", "rows of other ids"),
        ("row_wise",),
    ),
}


def case_of(pooling: str, sharding: str, optimizer: str, world_size: int, mode: str = "rows") -> Case:
    """Without look-ahead."""
    batch_size = _GLOBAL_BATCH_SIZE // world_size
    case = replace(POOLINGS[pooling], sharding=sharding, optimizer=optimizer, batch_size=batch_size)
    return replace(case, ratio=MODES[mode].ratios[0], **MODES[mode].settings)  # type: ignore[arg-type]


def with_look_ahead(case: Case, mode: str = "rows") -> Case:
    """Four batches ahead; the rows of two are in the caches at a time."""
    return replace(case, lookahead=4, policy="lookahead", ratio=MODES[mode].ratios[1])


def faults_of(pooling: str, world_size: int, mode: str = "rows") -> list[str]:
    """One rank sends nothing, and has nothing to divide by."""
    if world_size == 1:
        return []
    return [fault for fault in MODES[mode].faults if fault != "means not divided" or pooling == "MEAN"]


def outcome(pool: RankPool, mode: str, pooling: str, case: Case, world_size: int) -> tuple[str, bool]:
    """What all ranks found, in words, and whether all of it holds."""
    faults = faults_of(pooling, world_size, mode)
    variants: list[tuple[Case, str | None]] = [(case, None), (with_look_ahead(case, mode), None)]
    by_rank = pool.run(MODES[mode].compare_variants, case, variants + [(case, fault) for fault in faults])
    different = sorted({name for found in by_rank for each in found[:2] for name in each.different})
    evictions = [sum(found[number].evictions for found in by_rank) for number in range(2)]
    unnoticed = [
        fault for number, fault in enumerate(faults, start=2) if not any(found[number].different for found in by_rank)
    ]
    real = pool.run(MODES[mode].compare_real, replace(case, steps=30))
    losses, weights = (max(getattr(each, name) for each in real) for name in ("loss_error", "weight_error"))
    text = f"dyadic: {different or 'equal'}; evictions {evictions[0]:,} and {evictions[1]:,} with look-ahead; "
    text += f"faults noticed: {len(faults) - len(unnoticed)} of {len(faults)}{unnoticed or ''}; "
    text += f"real: losses within {losses:.1f}, weights within {weights:.1f} times the rounding"
    is_close = max(losses, weights) < MANY and not any(each.different for each in real)
    return text, not different and min(evictions) > 50 and not unnoticed and is_close


def combinations(mode: str = "rows") -> Iterator[tuple[str, str, str]]:
    """Pooling, sharding type and optimizer."""
    return itertools.product(POOLINGS, MODES[mode].shardings, OPTIMIZERS)


def main() -> int:
    """Run all combinations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--ranks", type=int, nargs="+", choices=WORLD_SIZES, default=list(WORLD_SIZES))
    options = parser.parse_args()
    total = failed = 0
    for world_size in options.ranks:
        pool = RankPool(world_size, timeout_seconds=600.0)
        for mode in options.modes:
            for names in combinations(mode):
                case = case_of(*names, world_size, mode)
                text, holds = outcome(pool, mode, names[0], case, world_size)
                total, failed = total + 1, failed + (not holds)
                words = f"{mode}, {world_size} ranks, {', '.join(names)}"
                print(f"{'ok' if holds else 'FAILED'}: {words}: {text}", flush=True)
        pool.close()
    print(f"{failed} of {total} combinations failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
