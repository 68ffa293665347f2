"""Time of a training step with the cache, against the same step with all rows resident.

    python -m benchmarks.step_overhead

One process; full Criteo-Kaggle row counts (33.76M rows), 26 features, row-wise Adagrad. Three models see the same
batches, in turn, in the same run: all rows resident; cached, where every step brings its own rows in; and cached
under the look-ahead pipeline. Reported: the whole DLRM step, the embeddings alone (forward, backward, all cache work),
and planning a batch all of whose rows are cached, per id.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, get_args

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from benchmarks.common import (
    generated_stream,
    interleaved,
    machine,
    make_parser,
    median_ms,
    median_ratio,
    report,
    settings_of,
    shard,
    single_process,
)
from embershard import (
    CacheConfig,
    CachedEmbeddingBagCollectionSharder,
    FrequencyProfile,
    LookAheadPipeline,
    cache_stats,
)
from embershard.cache.config import Scoring
from embershard.data import Batch, BatchStream
from embershard.sharding.torchrec import StockEmbeddingBagCollectionSharder, cached_embeddings
from embershard.sharding.torchrec.feature_keys import FeatureIds

DENSE_ARCH = [512, 256, 64, 32]
OVER_ARCH = [512, 512, 256, 1]
FUSED_PARAMS = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 1e-8}


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    add_step_options(parser)
    parser.add_argument("--policy", choices=get_args(Scoring), default="frequency", help="without look-ahead")
    parser.add_argument("--inline", action="store_true", help="look-ahead without its thread beside the training")
    parser.add_argument("--profile-batches", type=int, default=1000)
    options = parser.parse_args()
    with single_process() as device:
        report(measure(options, device), options.output)


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a step: the model, its cache, and the number of batches."""
    parser.add_argument("--ratio", type=float, default=0.015)
    parser.add_argument("--lookahead", type=int, default=64)
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all row counts")
    parser.add_argument("--warmup-batches", type=int, default=100)
    parser.add_argument("--batches", type=int, default=60, help="measured batches, for each of the figures")


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure all figures of one run."""
    stream = make_stream(options)
    rows = {feature.name: feature.num_rows for feature in stream.schema.sparse}
    profile = None
    if options.policy == "frequency":
        profile = count_profile(itertools.islice(stream, options.profile_batches), rows)
    models = {
        name: build(rows, options.dim, sharder, device) for name, sharder in make_sharders(options, profile).items()
    }
    parts_batches = options.batches + 5
    count = options.warmup_batches + 2 * parts_batches
    batches = [batch.to(device) for batch in itertools.islice(stream, count + options.lookahead + 2)]
    ahead = LookAhead(models["look_ahead"], batches, options, device)
    steps = {name: _by_index(make_step(model), batches) for name, model in models.items()}
    embeddings = {name: _by_index(make_embedding_step(model), batches) for name, model in models.items()}
    steps["look_ahead"], embeddings["look_ahead"] = ahead.step, ahead.embedding_step

    for index in range(options.warmup_batches):
        for step in embeddings.values():
            step(index)
    before = {name: totals(models[name]) for name in ("cached", "look_ahead")}
    parts, start = {}, options.warmup_batches
    for part, variants in (("whole_step", steps), ("embeddings_alone", embeddings)):
        interleaved(variants, range(start, start + 5), device)
        parts[part] = _ratios(interleaved(variants, range(start + 5, start + parts_batches), device))
        start += parts_batches
    after = {name: totals(models[name]) for name in before}
    work = {name: {key: after[name][key] - before[name][key] for key in before[name]} for name in before}
    planning = plan_on_hits(models["cached"], stream, options, device)
    stream.close()
    return {
        "benchmark": "step_overhead",
        "rows": sum(rows.values()),
        "settings": settings_of(options),
        **parts,
        "planning_on_hits_ns_per_id": planning,
        "per_batch": {name: {k: v // (2 * parts_batches) for k, v in done.items()} for name, done in work.items()},
        "hit_rate_lookups": {name: round(w["hits_lookups"] / w["lookups"], 4) for name, w in work.items()},
        "hit_rate_unique": {name: round(w["hits_unique"] / w["unique_ids"], 4) for name, w in work.items()},
        "look_ahead": asdict(ahead.pipeline.stats()),
        "machine": machine(),
    }


class LookAhead:
    """The look-ahead pipeline, called by index as the other variants are, in the batches' order."""

    def __init__(
        self, model: DistributedModelParallel, batches: list[Batch], options: argparse.Namespace, device: torch.device
    ) -> None:
        dense = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
        optimizer = torch.optim.SGD(dense, lr=0.01)
        worker = False if options.inline else None
        self.pipeline = LookAheadPipeline(model, optimizer, device, options.lookahead, options.prefetch, worker=worker)
        self._batches: Iterator[Batch] = iter(batches)
        self._train_embeddings = make_embedding_step(model)

    def step(self, _: int) -> None:
        """Run a whole training step."""
        self.pipeline.progress(self._batches)

    def embedding_step(self, _: int) -> None:
        """Run forward and backward of the embeddings alone, with the pipeline's work."""
        with self.pipeline.step(self._batches) as batch:
            self._train_embeddings(batch)


def make_sharders(options: argparse.Namespace, profile: FrequencyProfile | None) -> dict[str, Any]:
    """Return a sharder for each variant."""
    cached = CacheConfig(ratio=options.ratio, policy=options.policy)
    ahead = CacheConfig(ratio=options.ratio, policy="lookahead")
    return {
        "cached": CachedEmbeddingBagCollectionSharder(cached, profile, dict(FUSED_PARAMS)),
        "look_ahead": CachedEmbeddingBagCollectionSharder(ahead, profile, dict(FUSED_PARAMS)),
        "resident": StockEmbeddingBagCollectionSharder(fused_params=dict(FUSED_PARAMS)),
    }


def _ratios(seconds: dict[str, list[float]]) -> dict[str, float]:
    found = {f"{name}_ms": median_ms(values) for name, values in seconds.items()}
    for name in ("cached", "look_ahead"):
        found[f"{name}_over_resident"] = median_ratio(seconds[name], seconds["resident"])
    return found


def make_stream(options: argparse.Namespace) -> BatchStream:
    """Return the stream that the options ask for. `step_versions` calls it in older commits, too."""
    return generated_stream(options.scale, options.batch_size)


def count_profile(batches: Any, rows: dict[str, int]) -> FrequencyProfile:
    """Count the rows of some batches."""
    ids = (
        {f"t_{key}": jagged.values() for key, jagged in batch.sparse_features.to_dict().items()} for batch in batches
    )
    return FrequencyProfile.count(ids, {f"t_{name}": num_rows for name, num_rows in rows.items()})


def build(rows: dict[str, int], dim: int, sharder: Any, device: torch.device) -> DistributedModelParallel:
    """Build a DLRM over all tables, sharded."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=dim, num_embeddings=num_rows, feature_names=[name])
        for name, num_rows in rows.items()
    ]
    embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    dlrm = DLRM(embeddings, 13, [*DENSE_ARCH[:-1], dim], OVER_ARCH, dense_device=device)
    return shard(DLRMTrain(dlrm), sharder, device, "table_wise")


def make_step(model: DistributedModelParallel) -> Callable[[Batch], Any]:
    """Return a function that runs forward, backward and both optimizers on one batch."""
    dense = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
    optimizer = torch.optim.SGD(dense, lr=0.01)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()

    return step


def make_embedding_step(model: DistributedModelParallel) -> Callable[[Batch], Any]:
    """Return a function that runs forward and backward of the sharded embeddings alone."""
    embeddings = model.module.model.sparse_arch.embedding_bag_collection
    gradient: dict[str, torch.Tensor] = {}

    def step(batch: Batch) -> None:
        pooled = embeddings(batch.sparse_features).values()
        if "value" not in gradient:
            gradient["value"] = torch.randn_like(pooled)
        pooled.backward(gradient["value"])

    return step


def totals(model: DistributedModelParallel) -> dict[str, int]:
    """Return the cache's counters, summed over tables."""
    stats = cache_stats(model)
    names = ("lookups", "unique_ids", "hits_unique", "hits_lookups", "fills", "critical_path_fills", "write_backs")
    return {name: sum(getattr(table, name) for table in stats) for name in names}


def plan_on_hits(
    model: DistributedModelParallel, stream: BatchStream, options: argparse.Namespace, device: torch.device
) -> float:
    """Return the nanoseconds per id to map a batch of hits to slots, with pins, scores and counters."""
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
        pool.cache.release(pool.keys.prepare(FeatureIds.of(features), True, None, if_it_fits=False))

    return prepare


def _by_index(call: Callable[[Batch], Any], batches: list[Batch]) -> Callable[[int], Any]:
    return lambda index: call(batches[index])


if __name__ == "__main__":
    main()
