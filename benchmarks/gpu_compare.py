"""Caches of several kinds on a GPU, against all rows in the GPU's memory.

    python -m benchmarks.gpu_compare --tables kaggle --batch-size 16384
    python -m benchmarks.gpu_compare --tables terabyte --batch-size 65536 --ratios 0.015

A DLRM with dim 128 and row-wise Adagrad. Every variant is built beside the resident model (TorchRec's FUSED), trained
in turn with it on the same batches, block by block, and freed. Variants: embershard with `frequency` and with
look-ahead, planned between the steps' launches and in a thread beside them; TorchRec's FUSED_UVM_CACHING with LRU, with
and without its prefetch pipeline, and with LFU (for which FBGEMM has no prefetching), at as many device bytes as
embershard takes; FUSED_UVM. `--precision` is that of the dense layers: in fp32 they hide whatever else a step does.
Also: the speed of the link (benchmarks/link.py), at several dims. Without a GPU the variants of TorchRec that need one
are left out, and the rest only shows that the benchmark works.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from torchrec.distributed.types import CacheParams, ShardingEnv, ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.common import machine, make_parser, report, settings_of, single_process, synchronize
from benchmarks.link import link_speeds
from embershard import (
    CacheConfig,
    CachedEmbeddingBagCollectionSharder,
    FrequencyProfile,
    LookAheadPipeline,
    cache_stats,
)
from embershard.cache.rows.choose_transfer import WhenLocked
from embershard.data import Batch
from embershard.data.sources.synthetic import CRITEO_KAGGLE
from embershard.sharding.torchrec import StockEmbeddingBagCollectionSharder, cached_embeddings
from embershard.sharding.torchrec.spec import CACHED_KERNEL

# Rows of MLPerf's DLRM benchmark on Criteo 1TB, hashed to at most 40M per table
# (https://github.com/mlcommons/training, recommendation_v2).
TERABYTE = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938,
    155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
_OPTIMIZER = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02, "eps": 1e-8}
_SCATTER = 7_368_787  # a prime, so that neighbours in popularity are not neighbours in memory
_NUM_DENSE = 13


@dataclass(frozen=True)
class Variant:
    """One way to train: TorchRec's kernel, embershard's policy or None; with `worker`, a thread plans the batches."""

    name: str
    kernel: str
    policy: str | None = None
    ratio: float | None = None
    algorithm: CacheAlgorithm | None = None
    prefetch: bool = False
    worker: bool = False

    @property
    def needs_cuda(self) -> bool:
        return "uvm" in self.kernel and self.policy is None


RESIDENT = Variant("resident", "fused")


def variants(ratios: list[float]) -> list[Variant]:
    """Return all variants but the resident one."""
    found = []
    for ratio in ratios:
        found += [
            Variant(f"embershard {policy} {ratio:.1%}", CACHED_KERNEL, policy, ratio)
            for policy in ("frequency", "lookahead")
        ]
        name = f"embershard lookahead in a thread {ratio:.1%}"
        found.append(Variant(name, CACHED_KERNEL, "lookahead", ratio, worker=True))
        lru, lfu = CacheAlgorithm.LRU, CacheAlgorithm.LFU
        for algorithm, prefetch in ((lru, False), (lru, True), (lfu, False)):
            how = " with prefetch" if prefetch else ""
            name = f"uvm caching {algorithm.name.lower()}{how} {ratio:.1%}"
            found.append(Variant(name, "fused_uvm_caching", None, ratio, algorithm, prefetch))
    return [*found, Variant("uvm", "fused_uvm")]


class Batches:
    """The same batches for every variant, in pinned memory with a GPU. Ids follow Zipf's law with exponent 1 over each
    table."""

    def __init__(self, rows: list[int], batch_size: int, count: int) -> None:
        self.rows, self.batch_size = rows, batch_size
        made = (self._make(number) for number in range(count))
        self.all = [batch.pin_memory() if torch.cuda.is_available() else batch for batch in made]

    def _make(self, number: int) -> Batch:
        generator = torch.Generator().manual_seed(number)
        values = []
        for rows in self.rows:
            drawn = torch.rand(self.batch_size, generator=generator, dtype=torch.float64)
            rank = torch.exp(drawn * math.log(rows + 1)).long().sub_(1).clamp_(0, rows - 1)
            values.append((rank * _SCATTER + 1) % rows)
        names = [f"f{table}" for table in range(len(self.rows))]
        lengths = torch.ones(self.batch_size * len(names), dtype=torch.int32)
        return Batch(
            torch.randn(self.batch_size, _NUM_DENSE, generator=generator),
            KeyedJaggedTensor(names, torch.cat(values), lengths=lengths),
            torch.randint(0, 2, (self.batch_size,), generator=generator).float(),
        )

    def profile(self, count: int) -> FrequencyProfile:
        """Count the rows of the first batches."""
        counted = [
            {f"t{name[1:]}": jagged.values() for name, jagged in batch.sparse_features.to_dict().items()}
            for batch in self.all[:count]
        ]
        return FrequencyProfile.count(counted, {f"t{table}": rows for table, rows in enumerate(self.rows)})


class Trained:
    """A variant, built and ready to train on the batches in their order."""

    def __init__(self, variant: Variant, batches: Batches, options: argparse.Namespace, device: torch.device) -> None:
        self.variant, self._device = variant, device
        before = _allocated(device)
        self.model = _build(variant, batches, options, device)
        optimizer = torch.optim.SGD([p for n, p in self.model.named_parameters() if "embedding_bags" not in n], lr=0.01)
        self._iterator: Iterator[Batch] = iter(batches.all)
        self._pipeline = _pipeline(variant, self.model, optimizer, options, device)
        self._progress: Callable[[Iterator[Batch]], Any] = self._pipeline.progress
        self.device_bytes = _allocated(device) - before

    def warm_up(self, count: int) -> None:
        """Train on the first batches. The device memory that the pipeline keeps then counts among the device bytes."""
        for pool in cached_embeddings(self.model):
            if isinstance(pool.cache.transfer, WhenLocked):
                pool.cache.transfer.wait_until_locked()
        before = _allocated(self._device)
        self.steps(count)
        self.device_bytes += _allocated(self._device) - before

    def steps(self, count: int) -> float:
        """Train on the next batches; return the seconds per step."""
        synchronize(self._device)
        started = time.perf_counter()
        for _ in range(count):
            self._progress(self._iterator)
        synchronize(self._device)
        return (time.perf_counter() - started) / count

    def counts(self) -> dict[str, float]:
        """Return the counters of embershard's caches."""
        if self.variant.policy is None:
            return {}
        stats = cache_stats(self.model)
        names = ("fills", "write_backs", "bytes_to_device", "bytes_to_host", "critical_path_fills")
        found = {name: float(sum(getattr(table, name) for table in stats)) for name in names}
        stall = self._pipeline.stats().stall_seconds if isinstance(self._pipeline, LookAheadPipeline) else 0.0
        return {**found, "stall_seconds": stall}

    def depths(self) -> dict[str, Any]:
        """Return embershard's look-ahead: less than asked for where `max_known_bytes` was reached."""
        if not isinstance(self._pipeline, LookAheadPipeline):
            return {}
        stats = self._pipeline.stats()
        return {"lookahead_min": stats.lookahead_min, "prefetch_mean": stats.prefetch_mean}


def _build(
    variant: Variant, batches: Batches, options: argparse.Namespace, device: torch.device
) -> DistributedModelParallel:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high" if options.precision == "tf32" else "highest")
    tables = [
        EmbeddingBagConfig(name=f"t{t}", embedding_dim=options.dim, num_embeddings=rows, feature_names=[f"f{t}"])
        for t, rows in enumerate(batches.rows)
    ]
    embeddings = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    model: nn.Module = (_InBfloat16 if options.precision == "bf16" else DLRMTrain)(
        DLRM(embeddings, _NUM_DENSE, [512, 256, options.dim], [1024, 1024, 512, 256, 1], dense_device=device)
    )
    profile = batches.profile(options.profile_batches) if variant.policy == "frequency" else None
    fused = {**_OPTIMIZER, **({"prefetch_pipeline": True} if variant.prefetch else {})}
    if variant.needs_cuda:
        # Managed memory, FBGEMM's default, is for tables that would fit the GPU: beyond that it can hang the driver.
        fused["uvm_host_mapped"] = _table_bytes(batches.rows, options) > torch.cuda.mem_get_info(device)[0]
    sharder: Any = StockEmbeddingBagCollectionSharder(fused_params=fused)
    if variant.policy is not None:
        config = CacheConfig(ratio=variant.ratio, policy=variant.policy)  # type: ignore[arg-type]
        sharder = CachedEmbeddingBagCollectionSharder(config, profile, fused)
    placement = {table.name: table_wise(rank=0, compute_kernel=variant.kernel) for table in tables}
    module = construct_module_sharding_plan(
        embeddings, placement, sharder, local_size=1, world_size=1, device_type=device.type
    )
    if variant.algorithm is not None:
        # FBGEMM's cache keeps a row's weights there, and its state elsewhere; embershard's slots are a row and its
        # state: 4 of 516 bytes with dim 128.
        share = variant.ratio * (1 + 1 / options.dim) if variant.ratio else None
        for param in module.values():
            param.cache_params = CacheParams(variant.algorithm, share, prefetch_pipeline=variant.prefetch)
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"model.sparse_arch.embedding_bag_collection": module}),
        sharders=[sharder],
    )


def _pipeline(
    variant: Variant,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: argparse.Namespace,
    device: torch.device,
) -> Any:
    if variant.policy == "lookahead":
        worker = variant.worker or device.type == "cpu"
        return LookAheadPipeline(model, optimizer, device, options.lookahead, options.prefetch, worker=worker)
    if variant.policy is not None:  # rows come in ahead of their step, too: only eviction does not look forward
        return LookAheadPipeline(model, optimizer, device, options.prefetch, options.prefetch)
    if device.type != "cuda":
        return _Plain(model, optimizer)
    kind = PrefetchTrainPipelineSparseDist if variant.prefetch else TrainPipelineSparseDist
    return kind(model, optimizer, device, execute_all_batches=True)


class _InBfloat16(DLRMTrain):
    """The model with automatic mixed precision."""

    def forward(self, batch: Batch) -> Any:
        with torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16):
            return super().forward(batch)


class _Plain:
    """A loop in place of TorchRec's pipelines, which need streams."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def progress(self, batches: Iterator[Batch]) -> None:
        self._optimizer.zero_grad()
        self._model(next(batches))[0].backward()
        self._optimizer.step()


def compare(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Time every variant beside the resident model."""
    rows = _rows(options)
    steps = options.warmup_steps + options.blocks * options.block_steps
    batches = Batches(rows, options.batch_size, steps + options.lookahead + options.prefetch + 4)
    cases, left_out = [], []
    for variant in [v for v in variants(options.ratios) if any(word in v.name for word in options.variants)]:
        if variant.needs_cuda and device.type != "cuda":
            left_out.append(variant.name)
            continue
        try:
            cases.append(_case(variant, batches, options, device))
        except Exception as error:
            if not (variant.needs_cuda or isinstance(error, torch.cuda.OutOfMemoryError)):
                raise
            left_out.append(f"{variant.name}: {str(error).splitlines()[0]}")
        print(json.dumps((cases or left_out)[-1]), file=sys.stderr, flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {"rows": sum(rows), "table_bytes": _table_bytes(rows, options), "cases": cases, "left_out": left_out}


def _case(variant: Variant, batches: Batches, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    resident, cached = (Trained(each, batches, options, device) for each in (RESIDENT, variant))
    for each in (resident, cached):
        each.warm_up(options.warmup_steps)
    before, seconds = cached.counts(), {"resident": [], variant.name: []}  # type: ignore[var-annotated]
    for block in range(options.blocks):
        for each in (resident, cached) if block % 2 == 0 else (cached, resident):
            seconds[each.variant.name].append(each.steps(options.block_steps))
    steps = options.blocks * options.block_steps
    done = {name: (now - before[name]) / steps for name, now in cached.counts().items()}
    own, other = statistics.median(seconds[variant.name]), statistics.median(seconds["resident"])
    ratio = statistics.median(b / a for a, b in zip(seconds[variant.name], seconds["resident"], strict=True))
    moved = done.get("bytes_to_device", 0.0) + done.get("bytes_to_host", 0.0)
    return {
        "variant": variant.name,
        "step_ms": round(own * 1e3, 3),
        "resident_step_ms": round(other * 1e3, 3),
        "speed_of_resident": round(ratio, 4),
        "samples_per_second": round(options.batch_size / own),
        "device_bytes": cached.device_bytes,
        "resident_device_bytes": resident.device_bytes,
        **cached.depths(),
        "per_step": {name: round(value, 6) for name, value in done.items()},
        "link_gb_per_second": round(moved / own / 1e9, 3),
    }


def _rows(options: argparse.Namespace) -> list[int]:
    sizes = [table.num_rows for table in CRITEO_KAGGLE] if options.tables == "kaggle" else list(TERABYTE)
    return [max(3, round(min(rows, options.max_rows) * options.scale)) for rows in sizes]


def _table_bytes(rows: list[int], options: argparse.Namespace) -> int:
    return sum(rows) * int(options.dim) * 4


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--tables", choices=("kaggle", "terabyte"), default="kaggle")
    parser.add_argument("--max-rows", type=int, default=23_000_000, help="of a table; 23M: 61 GB of the terabyte's")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all row counts")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), default="fp32", help="of the dense layers")
    parser.add_argument("--batch-size", type=int, default=16_384)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.005, 0.015, 0.05, 0.2])
    parser.add_argument("--variants", nargs="+", default=[""], help="words of which a variant's name has one")
    parser.add_argument("--lookahead", type=int, default=64)
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--profile-batches", type=int, default=40)
    parser.add_argument("--warmup-steps", type=int, default=30)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--block-steps", type=int, default=10)
    parser.add_argument("--link-dims", type=int, nargs="*", default=[16, 32, 64, 128, 256])
    options = parser.parse_args()
    with single_process() as device:
        result = {
            "benchmark": "gpu_compare",
            "settings": settings_of(options),
            "link_gb_per_second": link_speeds(device, options.link_dims),
            **compare(options, device),
            "machine": machine(),
        }
        report(result, options.output)


if __name__ == "__main__":
    main()
