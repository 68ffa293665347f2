"""What the tests on a GPU train, and how each is judged. A test without a GPU runs all of it on the CPU once, so that
nothing fails there for a silly reason (tests/ranks/test_cases_of_gpu_tests.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from embershard.distributed import PublishConfig
from embershard.extras.verify.comparison import Equivalence
from embershard.extras.verify.equivalence import compare_with_stock
from embershard.settings.decoding import to_toml
from embershard.training.config import RunConfig
from tests.ranks import own_models, parity, planned, replicated_tables, rows_exchange, small_rows
from tests.ranks.rows_exchange import Case
from tests.ranks.workers import RankPool
from tests.unit.data.targets import target_config, write_targets
from tests.unit.data.windows import make_windows

_SAMPLES = 32  # of all ranks: the rows of a batch take up to two thirds of the smallest cache
_HOT = Case(exchange="pooled", hot=40, hot_every=3, ratio=0.2, init_seed=3)
_ROWS = Case(ratio=0.27, init_seed=3)
_COPIES = Case(init_seed=3, replicated=(1, 3), ratio=0.3)
#: Modes, with dyadic gradients: sums have the same bits in any order, atomic ones, too. With and without look-ahead.
MODES: dict[str, Case] = {
    "rows": _ROWS,
    "rows, mean": replace(_ROWS, mean=True),
    "rows, mean, row-wise": replace(_ROWS, mean=True, sharding="row_wise"),
    "rows, weighted, column-wise": replace(_ROWS, weighted=True, sharding="column_wise"),
    "rows, look-ahead": replace(_ROWS, lookahead=4, policy="lookahead", ratio=0.4),
    "rows, evaluation": replace(_ROWS, evaluate_every=3, sharding="row_wise"),
    "hot_cold": _HOT,
    "hot_cold, mean": replace(_HOT, mean=True),
    "hot_cold, rows": replace(_HOT, exchange="rows", sharding="row_wise"),
    "hot_cold, look-ahead": replace(_HOT, lookahead=4, policy="lookahead", ratio=0.3),
    "hot_cold, evaluation": replace(_HOT, evaluate_every=2),
}
REPLICATED: dict[str, Case] = {
    "replicated": _COPIES,
    "replicated, mean": replace(_COPIES, mean=True),
    "replicated, look-ahead": replace(_COPIES, lookahead=4, policy="lookahead", ratio=0.35),
}
#: Thousands of uses of each row of one table in a batch: FBGEMM cuts them at 1,024, and adds the parts with atomics.
MANY_USES = parity.Case(rows=(60_000, 3), dims=(16, 16), batch_size=4096, ratio=0.3, steps=6)
#: Small rows in host memory, beside rounded stock.
SMALL_ROWS: dict[str, parity.Case] = {
    "int8": small_rows.small_case(steps=60),
    "int8, staged, sgd": small_rows.small_case(steps=60, transfer="staged", optimizer="sgd"),
    "fp16": small_rows.small_case(steps=60, host_dtype="fp16", full_rows=None),
    "fp16, staged, adagrad": small_rows.small_case(
        steps=60, host_dtype="fp16", full_rows=None, transfer="staged", optimizer="adagrad"
    ),
}
TARGETS = ("several", "weighted regression", "tasks", "classes")
HISTORIES = ("din", "tbsm", "hstu")
RUNS = (*TARGETS, *HISTORIES, "own model", "cuda graph")


def check_mode(pool: RankPool, name: str, device: str, num_ranks: int) -> None:
    """Weights and states of a mode are those of stock TorchRec."""
    outcomes: list[Any]
    if name in REPLICATED:
        outcomes = pool.run(replicated_tables.compare, replace(REPLICATED[name], device=device))
    else:
        case = replace(MODES[name], device=device, batch_size=_SAMPLES // num_ranks)
        outcomes = [found for (found,) in pool.run(rows_exchange.compare_variants, case, [(case, None)])]
        assert sum(found.evictions for found in outcomes) > 20
    assert [found.different for found in outcomes] == [[] for _ in outcomes]
    assert all(found.num_compared >= 4 for found in outcomes)


def compare_deterministic(case: parity.Case) -> parity.Outcome:
    """Cached beside stock, with torch's deterministic algorithms, which FBGEMM obeys, too."""
    torch.use_deterministic_algorithms(True)
    try:
        return parity.compare(case)[case.policy]
    finally:
        torch.use_deterministic_algorithms(False)


def check_many_uses(pool: RankPool, device: str) -> None:
    """Bits are equal in deterministic mode."""
    for outcome in pool.run(compare_deterministic, replace(MANY_USES, device=device)):
        assert outcome.different == []
        assert sum(stats.evictions for stats in outcome.stats) > 1000


def check_small_rows(pool: RankPool, name: str, device: str) -> None:
    """Rows are those of stock TorchRec, which NumPy rounds after each step."""
    case = replace(SMALL_ROWS[name], device=device)
    for found in pool.run(small_rows.compare, case if device == "cuda" else replace(case, transfer=None)):
        assert found.different == []
        assert found.evictions > 4000
        assert found.num_rounded > 4000


def run_config(name: str, folder: Path, device: str) -> RunConfig:
    """Settings of a small run, whose data are written to `folder`."""
    graph = name == "cuda graph"
    if name in TARGETS or graph:
        config = target_config(write_targets(folder / "samples.parquet"), "weighted" if graph else name)
    elif name in HISTORIES:
        config = own_models.history_config(name, make_windows(folder, users=2000, items=3000, history=6))
        config = replace(config, cache=replace(config.cache, ratio=0.06))
    else:
        config = own_models.own_config(cache=replace(own_models.own_config().cache, ratio=0.025))
    on_gpu = device == "cuda"
    return replace(config, train=replace(config.train, device=device, cuda_graph=graph and on_gpu))


def verdict(config: RunConfig) -> Equivalence:
    """`embershard verify`, as a rank."""
    device = torch.device("cuda", 0) if config.train.device == "cuda" else torch.device("cpu")
    return compare_with_stock(config, replace(planned.here(), device=device), own_models.STEPS)


def check_run(pool: RankPool, name: str, folder: Path, device: str) -> None:
    """The run's steps are those of stock TorchRec."""
    for found in pool.run(verdict, run_config(name, folder, device)):
        assert found.is_equal, found
        assert found.caches[0].evictions > 20


def check_publication(embershard: Callable[[Sequence[str]], Any], folder: Path, device: str) -> None:
    """A run publishes what it trains; its held-out samples get the scores that it was measured by.

    Args:
        embershard: runs a command, which must succeed.
    """
    config = run_config("weighted regression", folder, device)
    config = replace(config, publish=PublishConfig(str(folder / "published"), every_steps=4))
    (folder / "run.toml").write_text(to_toml(config))
    run_dir, scores = folder / "run", folder / "scores.parquet"
    embershard(["train", "--config", str(folder / "run.toml"), "--nproc", "1", "--run-dir", str(run_dir)])
    embershard(["publish", "verify", str(folder / "published")])
    embershard(["predict", str(run_dir), "--data", str(folder / "samples.parquet"), "-o", str(scores)])
    found = pq.read_table(scores)["score"].to_pylist()
    stars = pq.read_table(folder / "samples.parquet")["stars"].to_pylist()
    assert len(found) == len(stars)
    assert all(map(math.isfinite, found))
    assert len(set(found)) > len(found) // 2, "one score for all is not learned"
