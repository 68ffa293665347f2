"""Every combination with the exchange of distinct rows: `python -m tests.ranks.rows_exchange_matrix`; some minutes.

{SGD, row-wise Adagrad, Adagrad} x {table-wise, row-wise, column-wise} x {SUM, MEAN, weighted, shared table} x {1, 2, 4
ranks} x {no look-ahead, look-ahead}, in caches of which most rows are evicted. Each beside stock TorchRec on as many
ranks:

* dyadic gradients: weights and optimizer states are equal bit for bit;
* real gradients (30 steps at a learning rate of 0.1): losses and weights are within `LOSS_BOUND` and `WEIGHT_BOUND`;
* negative controls: with each fault of `FAULTS` that concerns the combination, something differs.

Prints a line per combination, and the totals. Ends with 1 where one of the three does not hold.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace

from tests.ranks import rows_exchange
from tests.ranks.rows_exchange import FAULTS, LOSS_BOUND, WEIGHT_BOUND, Case
from tests.ranks.workers import RankPool

OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad")
SHARDINGS = ("table_wise", "row_wise", "column_wise")
POOLINGS = {
    "SUM": Case(),
    "MEAN": Case(mean=True),
    "weighted": Case(weighted=True),
    "shared table": Case(shared=True),
}
WORLD_SIZES = (1, 2, 4)
#: Samples of a step, over all ranks: the rows of a batch take up to two thirds of the smallest cache.
_GLOBAL_BATCH_SIZE = 32


def case_of(pooling: str, sharding: str, optimizer: str, world_size: int) -> Case:
    """Without look-ahead."""
    batch_size = _GLOBAL_BATCH_SIZE // world_size
    return replace(POOLINGS[pooling], sharding=sharding, optimizer=optimizer, batch_size=batch_size, ratio=0.27)


def with_look_ahead(case: Case) -> Case:
    """Four batches ahead; the rows of two are in the caches at a time."""
    return replace(case, lookahead=4, policy="lookahead", ratio=0.4)


def faults_of(pooling: str, world_size: int) -> list[str]:
    """One rank sends nothing, and has nothing to divide by."""
    if world_size == 1:
        return []
    return [fault for fault in FAULTS if fault != "means not divided" or pooling == "MEAN"]


def outcome(pool: RankPool, pooling: str, case: Case, world_size: int) -> tuple[str, bool]:
    """What all ranks found, in words, and whether all of it holds."""
    faults = faults_of(pooling, world_size)
    variants: list[tuple[Case, str | None]] = [(case, None), (with_look_ahead(case), None)]
    by_rank = pool.run(rows_exchange.compare_variants, case, variants + [(case, fault) for fault in faults])
    different = sorted({name for found in by_rank for each in found[:2] for name in each.different})
    evictions = [sum(found[number].evictions for found in by_rank) for number in range(2)]
    unnoticed = [
        fault for number, fault in enumerate(faults, start=2) if not any(found[number].different for found in by_rank)
    ]
    real = pool.run(rows_exchange.compare_real, replace(case, steps=30))
    losses, weights = (max(getattr(each, name) for each in real) for name in ("loss_error", "weight_error"))
    text = f"dyadic: {different or 'equal'}; evictions {evictions[0]:,} and {evictions[1]:,} with look-ahead; "
    text += f"faults noticed: {len(faults) - len(unnoticed)} of {len(faults)}{unnoticed or ''}; "
    text += f"real: losses within {losses:.0e}, weights within {weights:.0e}"
    is_close = losses < LOSS_BOUND and weights < WEIGHT_BOUND and not any(each.different for each in real)
    return text, not different and min(evictions) > 50 and not unnoticed and is_close


def combinations() -> Iterator[tuple[str, str, str]]:
    """Pooling, sharding type and optimizer."""
    return itertools.product(POOLINGS, SHARDINGS, OPTIMIZERS)


def main() -> int:
    """Run all combinations."""
    failed = 0
    for world_size in WORLD_SIZES:
        pool = RankPool(world_size)
        for names in combinations():
            text, holds = outcome(pool, names[0], case_of(*names, world_size), world_size)
            failed += not holds
            print(f"{'ok' if holds else 'FAILED'}: {world_size} ranks, {', '.join(names)}: {text}", flush=True)
        pool.close()
    print(f"{failed} of {len(list(combinations())) * len(WORLD_SIZES)} combinations failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
