"""Every way to go on from a checkpoint of two ranks: `python -m tests.ranks.resharding_matrix --ranks 2 1 3 4`.

Prints a line per layout: the tensors that differ from the saved ones, and the largest difference of 64 losses. Takes
some minutes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.ranks import resharding
from tests.ranks.resharding import SAVED_AT, Layout
from tests.ranks.test_resharding import tensors_that_differ
from tests.ranks.workers import RankError, RankPool

_TIMEOUT_SECONDS = 600.0  # also on a machine that others keep busy
STEPS = SAVED_AT + 64
SHARDINGS = ("row_wise", "table_wise", "column_wise", "table_column_wise", "table_row_wise", "grid_shard")


def layouts(world_size: int, optimizer: str, precision: str) -> Iterator[Layout]:
    """Layouts for so many ranks."""
    base = Layout(optimizer=optimizer, precision=precision, steps=STEPS)
    for sharding in SHARDINGS if world_size > 1 else ("table_wise",):
        for kernel in ("cached", "device"):
            yield replace(base, sharding=sharding, kernel=kernel)
    for ratio, policy, lookahead in ((0.2, "lru", 0), (1.0, "lfu", 0), (0.4, "lookahead", 0), (0.4, "lookahead", 4)):
        sharding = "row_wise" if world_size > 1 else "table_wise"
        yield replace(base, sharding=sharding, ratio=ratio, policy=policy, lookahead=lookahead)
    if optimizer == "sgd":
        yield replace(base, sharding="data_parallel", kernel="replicated")


def outcome(pool: RankPool, layout: Layout, folder: Path, losses: list[float]) -> str:
    """What a run in the layout shows."""
    saved = folder / "whole" / f"step_{SAVED_AT}"
    with tempfile.TemporaryDirectory() as copy:
        try:
            found = pool.run(resharding.go_on, layout, folder, saved, Path(copy))[0]
        except RankError as error:
            return str(error).strip().splitlines()[-1]
        different = tensors_that_differ(saved, Path(copy) / saved.name)
    largest = max(abs(a - b) for a, b in zip(found, losses[SAVED_AT:], strict=True))
    return f"tensors that differ: {different or 'none'}; losses: {largest:.1e}"


def main() -> None:
    """Run all layouts."""
    parser = argparse.ArgumentParser(prog="python -m tests.ranks.resharding_matrix", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 1, 3, 4], help="numbers of ranks that go on")
    parser.add_argument("--precision", default="fp32", help="train.precision: fp32 (the default) or fp64")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        runs = saved_runs(Path(name), arguments.precision)
        for world_size in arguments.ranks:
            pool = _pool(world_size)
            for optimizer, (folder, losses) in runs.items():
                for layout in layouts(world_size, optimizer, arguments.precision):
                    print(f"{world_size} ranks, {layout}: {outcome(pool, layout, folder, losses)}", flush=True)
            pool.close()


def saved_runs(folder: Path, precision: str) -> dict[str, tuple[Path, list[float]]]:
    """Train on two ranks with every optimizer; return folders and losses."""
    runs, pool = {}, _pool(2)
    for optimizer in ("rowwise_adagrad", "adagrad", "sgd"):
        place = folder / optimizer
        place.mkdir()
        resharding.write_samples(place / "samples.parquet")
        layout = Layout(optimizer=optimizer, precision=precision, steps=STEPS)
        runs[optimizer] = place, pool.run(resharding.run, layout, place)[0]
    pool.close()
    return runs


def _pool(world_size: int) -> RankPool:
    return RankPool(world_size, 2 if world_size == 4 else None, timeout_seconds=_TIMEOUT_SECONDS)


if __name__ == "__main__":
    main()
