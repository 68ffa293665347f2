"""What the cache costs a training step, against the same step with all rows resident.

    python -m benchmarks.step_overhead

One process; full Criteo-Kaggle row counts (33.76M rows), 26 features, row-wise Adagrad; both models see the
same batches, in turn, in the same run. Reported: the whole DLRM step, the embeddings alone (forward,
backward, cache work, fills), and planning a batch all of whose rows are cached, per id.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from benchmarks.common import interleaved, machine, median_ms, median_ratio, report, shard, single_process
from embershard import CacheConfig, CachedEmbeddingBagCollectionSharder, FrequencyProfile, cache_stats
from embershard.data import Batch, BatchStream, DataConfig, SyntheticConfig, open_source
from embershard.sharding.torchrec import StockEmbeddingBagCollectionSharder, cached_embeddings

DENSE_ARCH = [512, 256, 64, 32]
OVER_ARCH = [512, 512, 256, 1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=0.015)
    parser.add_argument("--policy", choices=["frequency", "lfu", "lru"], default="frequency")
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all row counts")
    parser.add_argument("--profile-batches", type=int, default=1000)
    parser.add_argument("--warmup-batches", type=int, default=100)
    parser.add_argument("--batches", type=int, default=60, help="measured batches, for each of the figures")
    parser.add_argument("--output", help="also write the JSON to this file")
    options = parser.parse_args()
    with single_process() as device:
        report(measure(options, device), options.output)


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All figures of one run."""
    stream = make_stream(options)
    rows = {feature.name: feature.num_rows for feature in stream.schema.sparse}
    profile = None
    if options.policy == "frequency":
        profile = count_profile(itertools.islice(stream, options.profile_batches), rows)
    fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 1e-8}
    config = CacheConfig(ratio=options.ratio, policy=options.policy)
    cached_sharder = CachedEmbeddingBagCollectionSharder(config, profile, dict(fused_params))
    stock_sharder = StockEmbeddingBagCollectionSharder(fused_params=dict(fused_params))
    models = {
        "cached": build(rows, options.dim, cached_sharder, device),
        "resident": build(rows, options.dim, stock_sharder, device),
    }
    steps = {name: make_step(model) for name, model in models.items()}
    embeddings = {name: make_embedding_step(model) for name, model in models.items()}

    for batch in itertools.islice(stream, options.warmup_batches):
        moved = batch.to(device)
        for step in embeddings.values():
            step(moved)
    before = totals(models["cached"])
    parts = {}
    for name, variants in (("step", steps), ("embeddings", embeddings)):
        batches = [batch.to(device) for batch in itertools.islice(stream, options.batches + 5)]
        calls = {key: _by_index(call, batches) for key, call in variants.items()}
        interleaved(calls, range(5), device)
        seconds = interleaved(calls, range(5, len(batches)), device)
        parts[name] = {
            "cached_ms": median_ms(seconds["cached"]),
            "resident_ms": median_ms(seconds["resident"]),
            "cached_over_resident": median_ratio(seconds["cached"], seconds["resident"]),
        }
    after = totals(models["cached"])
    work = {key: after[key] - before[key] for key in before}
    planning = plan_on_hits(models["cached"], stream, options, device)
    num_batches = 2 * (options.batches + 5)
    stream.close()
    return {
        "benchmark": "step_overhead",
        "rows": sum(rows.values()),
        "settings": {k: v for k, v in vars(options).items() if k != "output"},
        "whole_step": parts["step"],
        "embeddings_alone": parts["embeddings"],
        "planning_on_hits_ns_per_id": planning,
        "per_batch": {
            "lookups": work["lookups"] // num_batches,
            "unique_ids": work["unique_ids"] // num_batches,
            "fills": work["fills"] // num_batches,
            "write_backs": work["write_backs"] // num_batches,
        },
        "hit_rate_lookups": round(work["hits_lookups"] / work["lookups"], 4),
        "hit_rate_unique": round(work["hits_unique"] / work["unique_ids"], 4),
        "machine": machine(),
    }


def make_stream(options: argparse.Namespace) -> BatchStream:
    """Criteo-Kaggle-shaped batches without end."""
    config = DataConfig(kind="synthetic", synthetic=SyntheticConfig(scale=options.scale))
    return BatchStream(
        open_source(config),
        batch_size=options.batch_size,
        rank=0,
        world_size=1,
        split="train",
        epochs=None,
        config=config,
    )


def count_profile(batches: Any, rows: dict[str, int]) -> FrequencyProfile:
    """Row counts of some batches."""
    ids = (
        {f"t_{key}": jagged.values() for key, jagged in batch.sparse_features.to_dict().items()} for batch in batches
    )
    return FrequencyProfile.count(ids, {f"t_{name}": num_rows for name, num_rows in rows.items()})


def build(rows: dict[str, int], dim: int, sharder: Any, device: torch.device) -> DistributedModelParallel:
    """A DLRM over all tables."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=dim, num_embeddings=num_rows, feature_names=[name])
        for name, num_rows in rows.items()
    ]
    embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    dlrm = DLRM(embeddings, 13, [*DENSE_ARCH[:-1], dim], OVER_ARCH, dense_device=device)
    return shard(DLRMTrain(dlrm), sharder, device, "table_wise")


def make_step(model: DistributedModelParallel) -> Callable[[Batch], Any]:
    """Forward, backward and both optimizers on one batch."""
    dense = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
    optimizer = torch.optim.SGD(dense, lr=0.01)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()

    return step


def make_embedding_step(model: DistributedModelParallel) -> Callable[[Batch], Any]:
    """Forward and backward of the sharded embeddings alone."""
    embeddings = model.module.model.sparse_arch.embedding_bag_collection
    gradient: dict[str, torch.Tensor] = {}

    def step(batch: Batch) -> None:
        pooled = embeddings(batch.sparse_features).values()
        if "value" not in gradient:
            gradient["value"] = torch.randn_like(pooled)
        pooled.backward(gradient["value"])

    return step


def totals(model: DistributedModelParallel) -> dict[str, int]:
    """The cache's counters, summed over tables."""
    stats = cache_stats(model)
    names = ("lookups", "unique_ids", "hits_unique", "hits_lookups", "fills", "write_backs")
    return {name: sum(getattr(table, name) for table in stats) for name in names}


def plan_on_hits(
    model: DistributedModelParallel, stream: BatchStream, options: argparse.Namespace, device: torch.device
) -> float:
    """Nanoseconds per id to map a batch of hits to slots, pins, scores and counters included."""
    (pool,) = cached_embeddings(model)
    times = []
    for batch in itertools.islice(stream, options.batches):
        features = batch.to(device).sparse_features
        prepare = _preparation(pool, features)
        prepare(0)  # brings the batch's rows in
        times += interleaved({"plan": prepare}, [0], device)["plan"]
    ids = options.batch_size * len(stream.schema.sparse)
    return round(sorted(times)[len(times) // 2] / ids * 1e9, 2)


def _preparation(pool: Any, features: Any) -> Callable[[int], None]:
    def prepare(_: int) -> None:
        keys, lengths = pool._keys(features.values(), features.offsets(), None)
        pool.cache.release(pool.cache.prepare(keys, lengths))

    return prepare


def _by_index(call: Callable[[Batch], Any], batches: list[Batch]) -> Callable[[int], Any]:
    return lambda index: call(batches[index])


if __name__ == "__main__":
    main()
