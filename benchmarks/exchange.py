"""Bytes between ranks, and time of the embeddings' step: pooled embeddings against distinct rows.

    python -m benchmarks.exchange --ranks 4

Generated batches shaped like Criteo Kaggle's (26 tables, 33.76M rows, one id per feature), row-wise Adagrad, caches of
5 % of the rows. Table-wise and row-wise tables, with both exchanges, see the same batches in turn, in one run. Reported
per variant: bytes that a rank sends in a step (mean of ranks; ids, embeddings, gradients), and the median over steps of
the first rank's wall time and of the mean CPU time of the ranks, one thread each. No look-ahead and no dense part.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import tempfile
import time
from collections.abc import Callable
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.common import generated_stream, machine, make_parser, report, settings_of
from benchmarks.step_overhead import FUSED_PARAMS
from embershard import CacheConfig, CachedEmbeddingBagCollectionSharder, plan_sharding
from embershard.data import DataConfig, SyntheticConfig, open_source
from embershard.distributed.traffic import count_sent_bytes, sent_bytes
from embershard.sharding.shards import Exchange

_WARMUP_STEPS = 3
_VARIANTS: tuple[tuple[str, Exchange], ...] = (
    ("table_wise", "pooled"),
    ("table_wise", "rows"),
    ("row_wise", "pooled"),
    ("row_wise", "rows"),
)


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4096, help="samples per rank")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--scale", type=float, default=1.0, help="of the row counts")
    parser.add_argument("--steps", type=int, default=13, help="the first 3 are not counted")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (options, folder), options.ranks)  # type: ignore[no-untyped-call]


def _rank(rank: int, options: argparse.Namespace, folder: str) -> None:
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.ranks)
    count_sent_bytes()
    with generated_stream(options.scale, options.batch_size, rank, options.ranks) as stream:
        batches = [batch.sparse_features for batch in itertools.islice(stream, options.steps)]
    source = open_source(DataConfig(kind="synthetic", synthetic=SyntheticConfig(scale=options.scale)))
    rows = {feature.name: feature.num_rows for feature in source.schema.sparse}
    steps = {f"{sharding}, {exchange}": _step(rows, options, sharding, exchange) for sharding, exchange in _VARIANTS}
    gathered: list[dict[str, tuple[float, float, float]]] = [{} for _ in range(options.ranks)]
    dist.all_gather_object(gathered, _measure(steps, batches))
    if rank == 0:
        variants = {name: _summary([found[name] for found in gathered]) for name in steps}
        report({"settings": settings_of(options), "machine": machine(), "variants": variants}, options.output)
    dist.destroy_process_group()


def _step(rows: dict[str, int], options: argparse.Namespace, sharding: str, exchange: Exchange) -> Any:
    """Return a function that runs forward and backward of the sharded embeddings on one batch."""
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=options.dim, num_embeddings=count, feature_names=[name])
        for name, count in rows.items()
    ]
    module = EmbeddingBagCollection(tables, device=torch.device("meta"))
    sharder = CachedEmbeddingBagCollectionSharder(
        CacheConfig(ratio=0.05, policy="lfu"), fused_params=dict(FUSED_PARAMS), init_seed=1, exchange=exchange
    )
    wrapper = torch.nn.Sequential(module)
    plan = plan_sharding(
        wrapper,
        [sharder],
        world_size=options.ranks,
        local_world_size=options.ranks,
        device="cpu",
        constraints={table.name: ParameterConstraints(sharding_types=[sharding]) for table in tables},
        batch_size=options.batch_size,
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    model = DistributedModelParallel(wrapper, env=env, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    gradient = torch.randn(options.batch_size, options.dim * len(tables))
    return lambda features: model(features).values().backward(gradient)


def _measure(
    steps: dict[str, Callable[[KeyedJaggedTensor], None]], batches: list[KeyedJaggedTensor]
) -> dict[str, tuple[float, float, float]]:
    """Return medians of wall and CPU seconds, and the mean of bytes sent, by variant."""
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in steps}
    for batch in batches:
        for name, step in steps.items():
            dist.barrier()
            sent, wall, cpu = sent_bytes(), time.perf_counter(), time.process_time()
            step(batch)
            taken[name].append(
                (time.perf_counter() - wall, time.process_time() - cpu, (sent_bytes() - sent).in_training)
            )
    counted = {name: list(zip(*values[_WARMUP_STEPS:], strict=True)) for name, values in taken.items()}
    return {name: (median(walls), median(cpus), fmean(sent)) for name, (walls, cpus, sent) in counted.items()}


def _summary(of_ranks: list[tuple[float, float, float]]) -> dict[str, float]:
    walls, cpus, sent = zip(*of_ranks, strict=True)
    return {
        "wall_ms": round(walls[0] * 1e3, 1),
        "cpu_ms": round(fmean(cpus) * 1e3, 1),
        "sent_bytes": round(fmean(sent)),
    }


if __name__ == "__main__":
    main()
