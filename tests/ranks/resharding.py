"""Runs that go on from a checkpoint in another layout, as one rank of a pool of processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed.checkpoint as dcp

from embershard.cache import CacheConfig
from embershard.data import DataConfig, ParquetConfig
from embershard.distributed import CheckpointConfig
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.config import ShardingConfig
from embershard.sharding.plan import TablePlacement, pools_of
from embershard.training.checkpoint.identity import ORDER
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig
from embershard.training.reports import TrainReport
from embershard.training.trainer import Trainer
from tests.ranks.parity import differences, snapshot
from tests.ranks.planned import here
from tests.small_runs import small_model
from tests.unit.sharding.plans import make_plan, ranks_for

ROWS = {"user": 301, "item": 250, "shop": 97, "day": 31}
DIM, BATCH, SAVED_AT = 8, 24, 6
STEPS = 45  # past the end of an epoch
SAMPLES = 1000
HOT_BYTES = 4000  # rows of 36 bytes: about a sixth of them


@dataclass(frozen=True)
class Layout:
    """Places of the tables, and their caches.

    Attributes:
        sharding: type of all tables.
        kernel: of all tables; "cached" with a cache.
        policy: of the caches; with look-ahead it is "lookahead".
        ratio: slots as a share of the rows.
        lookahead: batches known ahead.
        optimizer: of the tables.
        mode: "hot_cold" and "data_parallel" have no plan.
        exchange: of all tables.
        precision: of the dense layers.
        steps: of the run.
        host_dtype: of the cached rows in host memory; none of int8 is full.
        columns: of the blocks of every table, where they differ.
        dim: of every table.
    """

    sharding: str = "row_wise"
    kernel: str = "cached"
    policy: str = "lfu"
    ratio: float = 0.5
    lookahead: int = 0
    optimizer: str = "rowwise_adagrad"
    mode: str = "sharded"
    exchange: str = "pooled"
    precision: str = "fp32"
    steps: int = STEPS
    host_dtype: str = "fp32"
    columns: tuple[int, ...] = ()
    dim: int = DIM


def write_samples(path: Path) -> None:
    """Samples with skewed ids, and labels that follow from them."""
    random = np.random.default_rng(7)
    ids = {name: (random.random(SAMPLES) ** 3 * rows).astype(np.int64) for name, rows in ROWS.items()}
    columns = {**ids, "age": random.random(SAMPLES).astype(np.float32)}
    labels = ((ids["user"] + ids["item"]) % 3 == 0).astype(np.int64)
    pq.write_table(pa.table({**columns, "label": labels}), path, row_group_size=64)


def make_config(layout: Layout, folder: Path, world_size: int, ranks_per_node: int) -> RunConfig:
    """A small run on `folder / "samples.parquet"` by a plan of the layout."""
    cached = layout.kernel == "cached"
    tables = []
    for number, (name, rows) in enumerate(ROWS.items()):
        ranks = ranks_for(layout.sharding, number, world_size, ranks_per_node, column_shards=2)
        how: Any = layout.sharding, layout.kernel, ranks, layout.exchange
        tables.append(TablePlacement(f"t_{name}", rows, layout.dim, "fp32", *how, columns=layout.columns))
    plan = make_plan(tables, world_size, ranks_per_node, batch_size=BATCH // world_size)
    pools = tuple(pool.with_slots(max(1, int(pool.rows * layout.ratio))) for pool in pools_of(tables, ranks_per_node))
    path = folder / f"plan_{here().rank}.json"
    replace(plan, pools=pools).save(path)
    dense = "sgd" if layout.optimizer == "sgd" else "adam"
    cache = CacheConfig(policy=layout.policy, enabled=True) if cached else CacheConfig(enabled=False)  # type: ignore[arg-type]
    if layout.host_dtype != "fp32":
        full_rows = 0.0 if layout.host_dtype == "int8" else None
        cache = replace(cache, host_dtype=layout.host_dtype, full_rows=full_rows)  # type: ignore[arg-type]
    sharding = ShardingConfig(plan=str(path))
    if layout.mode != "sharded":
        hot_bytes = HOT_BYTES if layout.mode == "hot_cold" else None
        sharding = ShardingConfig(mode=layout.mode, hot_bytes=hot_bytes)  # type: ignore[arg-type]
        cache = replace(cache, ratio=layout.ratio)
    return RunConfig(
        data=DataConfig(
            kind="parquet",
            path=str(folder / "samples.parquet"),
            num_workers=0,
            parquet=ParquetConfig(dense=("age",), sparse=tuple(ROWS), num_rows=tuple(ROWS.values()), id_mapping="none"),
        ),
        model=small_model(layout.dim),
        cache=cache,
        look_ahead=LookAheadConfig(layout.lookahead, 1),
        sharding=sharding,
        embedding_optimizer=EmbeddingOptimizerConfig(kind=layout.optimizer, lr=0.1),  # type: ignore[arg-type]
        dense_optimizer=DenseOptimizerConfig(kind=dense, lr=0.1 if dense == "sgd" else 0.01),  # type: ignore[arg-type]
        train=TrainConfig(
            global_batch_size=BATCH,
            log_every=1,
            max_steps=layout.steps,
            device="cpu",
            precision=layout.precision,  # type: ignore[arg-type]
        ),
        checkpoint=CheckpointConfig(every_steps=SAVED_AT, at_end=False, keep_last=99),
    )


def run(layout: Layout, folder: Path) -> list[float]:
    """A whole run; its checkpoints are in `folder / "whole"`. The losses."""
    return _train(Trainer(config_of(layout, folder), here(), folder / "whole"))


def go_on(layout: Layout, folder: Path, checkpoint: Path, copy: Path, forget: str = "") -> list[float]:
    """Resume in a layout, save what was loaded to `copy`, and train on: the losses.

    Args:
        forget: for negative controls: "states" of the rows, or the "position" (a global batch is left out).
    """
    trainer = Trainer(config_of(layout, folder), here(), copy)
    trainer.resume(checkpoint)
    if forget == "states":
        for part in trainer.model.fused_optimizer.state_dict()["state"].values():
            for state in part.values():
                for shard in state.local_shards():
                    shard.tensor.zero_()
    if forget == "position":
        next(trainer.stream)
    trainer.save()
    trainer.checkpoints = None
    return _train(trainer)


def through_stock(folder: Path, checkpoint: Path, copy: Path, layout: Layout) -> tuple[int, list[str]]:
    """A checkpoint read by torch.distributed.checkpoint into stock TorchRec modules, saved by it, and read so into
    those of the layout: number of tensors compared, and those of the layout that are not as a resume loads them."""

    def tensors(trainer: Trainer) -> dict[str, Any]:
        states = trainer.model.fused_optimizer.state_dict()["state"]
        return {"model": trainer.model.state_dict(), "embedding_optimizer": states}

    def read(trainer: Trainer, place: Path) -> dict[str, Any]:
        found = tensors(trainer)
        dcp.load(found, checkpoint_id=place)
        trainer.model.load_state_dict(found["model"])
        trainer.model.fused_optimizer.load_state_dict({"state": found["embedding_optimizer"]})
        return tensors(trainer)

    of_stock = Layout("table_wise", "device", optimizer=layout.optimizer)
    stock, read_into, resumed = (Trainer(config_of(each, folder), here()) for each in (of_stock, layout, layout))
    dcp.save(read(stock, checkpoint), checkpoint_id=copy)
    read(read_into, copy)
    resumed.resume(checkpoint, allow_changes={ORDER})
    found, expected = snapshot(read_into.model), snapshot(resumed.model)
    for trainer in (stock, read_into, resumed):
        trainer.close()
    return len(expected), differences(expected, found)


def config_of(layout: Layout, folder: Path) -> RunConfig:
    """`make_config` on the ranks of the pool."""
    return make_config(layout, folder, here().world_size, here().local_world_size)


def _train(trainer: Trainer) -> list[float]:
    losses = [report.loss for report in trainer.train() if isinstance(report, TrainReport)]
    trainer.close()
    return losses
