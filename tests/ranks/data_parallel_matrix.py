"""All combinations of which `test_data_parallel.py` has a sample: `python -m tests.ranks.data_parallel_matrix`.

Weights and states after dyadic gradients are compared with stock TorchRec's bit for bit, and the caches of all ranks
with each other; means, whose gradients are not dyadic, within the bounds of the tests.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace

from tests.ranks import data_parallel
from tests.ranks.data_parallel import Case
from tests.ranks.workers import RankPool

OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad")
POOLINGS = {"sum": Case(), "weighted": Case(weighted=True), "shared": Case(shared=True), "mean": Case(mean=True)}
#: Slots as a share of the rows: a batch of all ranks must fit.
RATIOS = {1: 0.3, 2: 0.4, 4: 0.6}


def main() -> int:
    """Run them, and print a line each; 0 if all are as they should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RATIOS), choices=list(RATIOS))
    failed = 0
    for world_size in parser.parse_args().ranks:
        pool = RankPool(world_size, timeout_seconds=600)
        for optimizer, pooling, lookahead in itertools.product(OPTIMIZERS, POOLINGS, (0, 4)):
            case = replace(
                POOLINGS[pooling],
                optimizer=optimizer,
                ratio=RATIOS[world_size],
                lookahead=lookahead,
                policy="lookahead" if lookahead else "lfu",
            )
            compare = data_parallel.compare_real if pooling == "mean" else data_parallel.compare_dyadic
            found = pool.run(compare, case)
            is_good = all(
                not outcome.different and not unequal and outcome.loss_error < 1e-6 and outcome.weight_error < 1e-4
                for outcome, unequal in found
            )
            failed += not is_good
            evictions = min(outcome.evictions for outcome, _ in found)
            error = max(outcome.weight_error for outcome, _ in found)
            how = f"within {error:.1e}" if pooling == "mean" else "bitwise"
            line = f"{world_size} ranks  {optimizer:15}  {pooling:8}  look-ahead {lookahead}  {evictions:5} evictions"
            print(f"{line}  {how}  {'ok' if is_good else 'WRONG'}", flush=True)
        pool.close()
    print(f"{failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
