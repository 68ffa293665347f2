"""Time of a step with small and with large tables, and the share of the tables in device memory.

    python -m benchmarks.table_scale

Two models differ in the rows of their tables only (1M against 104M in all): the same number of slots, the same batches,
the same hit rate, measured in turn. Hot rows fit the cache; cold rows are evicted before they are used again. Device
bytes are those of all tensors on the device, at dim 128 and ratio 0.015.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.common import (
    interleaved,
    machine,
    make_parser,
    median_ms,
    median_ratio,
    report,
    settings_of,
    single_process,
)
from benchmarks.step_overhead import build, make_embedding_step, make_step, totals
from embershard import CacheConfig, CachedEmbeddingBagCollectionSharder, cache_stats
from embershard.data import Batch

_STRIDE = 7_368_787  # a prime: scatters consecutive numbers over a table


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--small-rows", type=int, default=1_000_000)
    parser.add_argument("--large-rows", type=int, default=104_000_000)
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--slots", type=int, default=60_000)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--cold-share", type=float, default=0.05, help="share of lookups that miss")
    parser.add_argument("--policy", choices=["lfu", "lru"], default="lfu")
    parser.add_argument("--warmup-batches", type=int, default=30)
    parser.add_argument("--batches", type=int, default=60)
    options = parser.parse_args()
    with single_process() as device:
        result = {
            "benchmark": "table_scale",
            "settings": settings_of(options),
            "step_time": step_time(options, device),
            "device_bytes": [device_bytes(policy, device) for policy in ("lru", "lfu")],
            "machine": machine(),
        }
        report(result, options.output)


def step_time(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Time whole steps and embeddings alone at both sizes, in turn."""
    sizes = {"small": options.small_rows, "large": options.large_rows}
    models = {name: _model(rows, options, device) for name, rows in sizes.items()}
    steps = {name: make_step(model) for name, model in models.items()}
    embeddings = {name: make_embedding_step(model) for name, model in models.items()}
    number = iter(range(10**6))
    for _ in range(options.warmup_batches):
        step = next(number)
        for name, rows in sizes.items():
            embeddings[name](make_batch(step, rows, options).to(device))
    before = {name: totals(model) for name, model in models.items()}
    result: dict[str, Any] = {}
    for part, calls in (("whole_step", steps), ("embeddings_alone", embeddings)):
        numbers = [next(number) for _ in range(options.batches)]
        seconds = interleaved(
            {name: _prepared(calls[name], numbers, rows, options, device) for name, rows in sizes.items()},
            range(len(numbers)),
            device,
        )
        result[part] = {
            "small_ms": median_ms(seconds["small"]),
            "large_ms": median_ms(seconds["large"]),
            "large_over_small": median_ratio(seconds["large"], seconds["small"]),
        }
    for name, model in models.items():
        work = {key: value - before[name][key] for key, value in totals(model).items()}
        result[name] = {
            "rows": sizes[name],
            "hit_rate_lookups": round(work["hits_lookups"] / work["lookups"], 4),
            "fills_per_batch": work["fills"] // (2 * options.batches),
        }
    return result


def device_bytes(policy: str, device: torch.device, rows: int = 4_000_000, dim: int = 128) -> dict[str, Any]:
    """Return the device memory of a cache of 1.5 %, as a share of the tables' weights."""
    sharder = _sharder(CacheConfig(ratio=0.015, policy=policy))  # type: ignore[arg-type]
    model = build({f"C{t}": rows // 4 for t in range(4)}, dim, sharder, device)
    used = sum(stats.device_bytes for stats in cache_stats(model))
    table_bytes = rows * dim * 4
    return {
        "policy": policy,
        "rows": rows,
        "dim": dim,
        "ratio": 0.015,
        "table_bytes": table_bytes,
        "device_bytes": used,
        "share": round(used / table_bytes, 5),
    }


def make_batch(step: int, rows: int, options: argparse.Namespace) -> Batch:
    """Return batch number `step`: hot ids drawn from as many rows as half the slots, cold ids in turn, scattered."""
    generator = torch.Generator().manual_seed(step)
    rows_per_table = rows // options.tables
    num_hot = options.slots // (2 * options.tables)
    values = []
    for table in range(options.tables):
        hot = (torch.rand(options.batch_size, generator=generator) ** 2 * num_hot).long()
        num_cold = int(options.batch_size * options.cold_share)
        order = torch.randperm(options.batch_size, generator=generator)[:num_cold]
        turn = (step * num_cold + torch.arange(num_cold)) % (rows_per_table - num_hot)
        hot[order] = num_hot + turn
        values.append((hot * _STRIDE + table) % rows_per_table)
    return Batch(
        torch.randn(options.batch_size, 13, generator=generator),
        KeyedJaggedTensor(
            keys=[f"C{t}" for t in range(options.tables)],
            values=torch.cat(values),
            lengths=torch.ones(options.tables * options.batch_size, dtype=torch.int32),
        ),
        torch.randint(0, 2, (options.batch_size,), generator=generator).float(),
    )


def _model(rows: int, options: argparse.Namespace, device: torch.device) -> DistributedModelParallel:
    sharder = _sharder(CacheConfig(ratio=options.slots / rows, policy=options.policy, overflow="raise"))
    return build({f"C{t}": rows // options.tables for t in range(options.tables)}, options.dim, sharder, device)


def _sharder(config: CacheConfig) -> CachedEmbeddingBagCollectionSharder:
    fused_params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.02}
    return CachedEmbeddingBagCollectionSharder(config, fused_params=fused_params)


def _prepared(
    call: Callable[[Batch], Any], numbers: list[int], rows: int, options: argparse.Namespace, device: torch.device
) -> Callable[[int], Any]:
    batches = [make_batch(number, rows, options).to(device) for number in numbers]
    return lambda index: call(batches[index])


if __name__ == "__main__":
    main()
