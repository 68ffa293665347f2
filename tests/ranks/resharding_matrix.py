"""Every way to go on from a checkpoint of two ranks: `python -m tests.ranks.resharding_matrix`; some minutes.

Prints a line per layout: the tensors that differ from the saved ones, and the largest difference of 64 losses.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.ranks import resharding
from tests.ranks.resharding import SAVED_AT, Layout
from tests.ranks.test_resharding import tensors_that_differ
from tests.ranks.workers import RankError, RankPool

SHARDINGS = ("row_wise", "table_wise", "column_wise", "table_column_wise", "table_row_wise", "grid_shard")


def layouts(world_size: int, optimizer: str) -> Iterator[Layout]:
    """Layouts for so many ranks."""
    base = Layout(optimizer=optimizer)
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
    with tempfile.TemporaryDirectory() as name:
        runs: dict[str, tuple[Path, list[float]]] = {}
        for world_size in (2, 1, 3, 4):
            pool = RankPool(world_size, 2 if world_size == 4 else None)
            for optimizer in ("rowwise_adagrad", "adagrad", "sgd"):
                if world_size == 2:
                    folder = Path(name, optimizer)
                    folder.mkdir()
                    resharding.write_samples(folder / "samples.parquet")
                    runs[optimizer] = folder, pool.run(resharding.run, Layout(optimizer=optimizer), folder)[0]
                for layout in layouts(world_size, optimizer):
                    print(f"{world_size} ranks, {layout}: {outcome(pool, layout, *runs[optimizer])}", flush=True)
            pool.close()


if __name__ == "__main__":
    main()
