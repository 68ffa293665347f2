"""One rank of one variant of a training step, run for every line on standard input.

    python -m benchmarks.step_server SETTINGS

SETTINGS is JSON, with the fields of `Settings`. Prints `ready`, and then the seconds of each step.
`benchmarks.step_matrix` starts it and says when to step, so that variants take turns on the same batches.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from benchmarks.common import generated_stream
from benchmarks.step_overhead import DENSE_ARCH, FUSED_PARAMS, OVER_ARCH, make_embedding_step, make_step
from embershard import (
    CacheConfig,
    CachedEmbeddingBagCollectionSharder,
    FrequencyProfile,
    LookAheadPipeline,
    plan_sharding,
)
from embershard.data import Batch, BatchStream
from embershard.sharding.torchrec import StockEmbeddingBagCollectionSharder

Variant = Literal["resident", "cached", "inline", "look_ahead"]
#: Layers of the bottom and the top MLP, but for the bottom's last one: the embedding's dim.
DENSE_PARTS: dict[str, tuple[list[int], list[int]]] = {
    "none": ([16], [16, 1]),  # trained by nobody: the step is that of the embeddings
    "quickstart": ([64, 32], [128, 64, 1]),
    "dlrm": (DENSE_ARCH[:-1], OVER_ARCH),
}
DENSE_FEATURES = 13


@dataclass(frozen=True)
class Settings:
    """A variant of a step, on one rank.

    Attributes:
        variant: all rows resident; cached without look-ahead; with look-ahead, planning inline or as it is by default.
        dense: a key of `DENSE_PARTS`.
        scale: factor on Criteo Kaggle's row counts.
        batch_size: samples per rank.
        profile: file of a frequency profile.
        num_steps: steps that will be asked for, warm-up included.
    """

    variant: Variant
    rank: int
    world_size: int
    store: str
    batch_size: int
    dim: int
    dense: str
    scale: float
    ratio: float
    lookahead: int
    prefetch: int
    profile: str
    num_steps: int


def main() -> None:
    """Serve steps until standard input ends."""
    settings = Settings(**json.loads(sys.argv[1]))
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    torch.set_num_threads(max(1, torch.get_num_threads() // settings.world_size))
    dist.init_process_group(
        "gloo", init_method=f"file://{settings.store}", rank=settings.rank, world_size=settings.world_size
    )
    with generated_stream(settings.scale, settings.batch_size, settings.rank, settings.world_size) as stream:
        step = make_server_step(settings, stream)
        print("ready", flush=True)
        for _ in sys.stdin:
            started = time.perf_counter()
            step()
            print(time.perf_counter() - started, flush=True)


def make_server_step(settings: Settings, stream: BatchStream) -> Callable[[], None]:
    """Return a function that trains the next batch. Batches are parsed before: only training is timed."""
    rows = {feature.name: feature.num_rows for feature in stream.schema.sparse}
    model = build(settings, rows)
    batches: list[Batch] = list(itertools.islice(stream, settings.num_steps + settings.lookahead + 4))
    upcoming = iter(batches)
    train = make_embedding_step(model) if settings.dense == "none" else make_step(model)
    if settings.variant in ("resident", "cached"):
        return lambda: train(next(upcoming))
    dense = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
    pipeline = LookAheadPipeline(
        model,
        torch.optim.SGD(dense, lr=0.01),
        torch.device("cpu"),
        settings.lookahead,
        settings.prefetch,
        worker=False if settings.variant == "inline" else None,
    )

    def step() -> None:
        with pipeline.step(upcoming) as batch:
            train(batch)

    return step


def build(settings: Settings, rows: dict[str, int]) -> DistributedModelParallel:
    """Build the sharded model."""
    torch.manual_seed(settings.rank)
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=settings.dim, num_embeddings=count, feature_names=[name])
        for name, count in rows.items()
    ]
    bottom, top = DENSE_PARTS[settings.dense]
    dlrm = DLRM(
        EmbeddingBagCollection(tables, device=torch.device("meta")), DENSE_FEATURES, [*bottom, settings.dim], top
    )
    model = DLRMTrain(dlrm)
    fused_params = dict(FUSED_PARAMS)
    if settings.variant == "resident":
        sharder = StockEmbeddingBagCollectionSharder(fused_params=fused_params)
    else:
        profile = FrequencyProfile.load(settings.profile)
        sharder = CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=settings.ratio), profile, fused_params)
    constraints = {table.name: ParameterConstraints(sharding_types=["table_wise"]) for table in tables}
    plan = plan_sharding(
        model,
        [sharder],
        world_size=settings.world_size,
        local_world_size=settings.world_size,
        device="cpu",
        constraints=constraints,
        batch_size=settings.batch_size,
    )
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
