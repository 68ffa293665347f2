"""A life of a run with settings drawn at random, as ranks of a pool of processes, and the plain training beside it."""

from __future__ import annotations

import json
import os
import signal
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embershard.cache import CacheConfig
from embershard.cache.ids.config import IdTable
from embershard.data import DataConfig
from embershard.data.config import TableConfig, TableFeature
from embershard.distributed import CheckpointConfig, PublishConfig, Supervision, step_of
from embershard.errors import CacheOverflowError, ConfigError
from embershard.models import ModelConfig
from embershard.pipeline.config import LookAheadConfig
from embershard.settings.decoding import to_toml
from embershard.sharding.config import ShardingConfig
from embershard.sharding.plan import TablePlacement, pools_of
from embershard.sharding.torchrec import cache_stats
from embershard.training.checkpoint.identity import ORDER
from embershard.training.checkpoint.resume import resume_run
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig, ScheduleConfig
from embershard.training.reports import EvalReport, TrainReport
from embershard.training.trainer import Trainer
from embershard.training.warm_start import WarmStart
from tests.faults.published_lives import export_quickly
from tests.faults.rank_kills import KILLS
from tests.ranks.planned import here
from tests.unit.sharding.plans import make_plan, ranks_for

DIM, NUM_SAMPLES = 8, 900
#: Rows by feature: what two features look up is one table.
ROWS = {"user": 240, "item": 480, "city": 60}
#: With ids, these many rows of the model that a run begins with.
EARLIER_IDS = {"user": 120, "item": 240}
IDS = {
    "user": IdTable(buckets=12, reserve=0.4),
    "item": IdTable(buckets=12, reserve=0.4, admit_after=2, half_life=6),
}
#: What a resume may forget, for negative controls.
CONTROLS = ("position", "weights")
_HOT_BYTES, _ROW_BYTES = 6000, 4 * DIM + 4 * DIM  # with the states of Adagrad


@dataclass(frozen=True)
class Meaning:
    """What all lives of a run share: settings that a resume compares, and where it ends.

    Attributes:
        bags: an item of a sample is a list.
        ids: users and items are tables of ids.
        warm: the run begins with another one.
        eval_every: steps between evaluations; they belong to what is compared.
        groups, sync_every: replicas of the tables, and steps between averages of their rows.
    """

    optimizer: str = "rowwise_adagrad"
    dense: str = "adam"
    arch: str = "dlrm"
    bags: bool = False
    pooling: str = "sum"
    ids: bool = False
    host_dtype: str = "fp32"
    table_dtype: str = "fp32"
    precision: str = "fp32"
    batch: int = 24
    steps: int = 24
    shuffle: bool = True
    warm: bool = False
    ema: float | None = None
    clip_norm: float | None = None
    dropout: float = 0.0
    warmup_steps: int = 0
    eval_every: int | None = None
    groups: int = 1
    sync_every: int = 1

    @property
    def layers(self) -> str:
        """Name of the program of the layers."""
        return f"{self.arch}_{self.precision}_{self.dropout}"


@dataclass(frozen=True)
class Way:
    """How a life trains, which a resume may change, and how it ends.

    Attributes:
        ratio: slots as a share of the rows.
        full_every, publish_every: None: it saves, or publishes, not at all between its end.
        killed_by: the rank that kills all of them: before the file operation of this number, or behind `step`.
        is_stopped: the rank is asked to stop behind `step`, in place of a kill.
    """

    ranks: int = 1
    sharding: str = "table_wise"
    mode: str = "sharded"
    exchange: str = "pooled"
    policy: str | None = None
    decay: float | None = None
    ratio: float = 0.5
    host: str = "memory"
    slot_map: str | None = None
    transfer: str | None = None
    overflow: str = "grow"
    lookahead: int = 0
    prefetch: int = 1
    accumulate: int = 1
    save_every: int = 5
    full_every: int = 1
    keep_last: int = 2
    keep_best: bool | None = None
    asynchronous: bool | None = None
    workers: int = 0
    parsed_ahead: int = 2
    publish_every: int | None = None
    base_every: int | None = None
    killed_by: int | None = None
    operation: int | None = None
    step: int | None = None
    is_stopped: bool = False


@dataclass(frozen=True)
class Lived:
    """What a rank says of a life that ended by itself. `refusal`: why its settings were refused; `operations`: of
    files; `evictions`: of its caches."""

    refusal: str = ""
    operations: int = 0
    evictions: int = 0


def write_samples(folder: Path) -> None:
    """Users and items, of which most are seen a few times, come, are popular and go; some are missing."""
    chance, moments = np.random.default_rng(5), np.arange(NUM_SAMPLES) // 40
    users = chance.zipf(1.3, NUM_SAMPLES) % 150 + 25 * moments
    bags = [
        [f"item {number}" for number in chance.zipf(1.4, size) % 200 + 20 * moment]
        for size, moment in zip(chance.integers(0, 4, NUM_SAMPLES), moments, strict=True)
    ]
    cities = chance.integers(0, 50, NUM_SAMPLES)
    labels = (users + cities) % 3 == 0
    columns = {
        "label": labels.astype(np.int64),
        "age": chance.normal(size=NUM_SAMPLES).astype(np.float32),
        "user": pa.array(users, mask=chance.random(NUM_SAMPLES) < 0.05),
        "items": pa.array(bags),
        "item": pa.array([bag[0] if bag else "none" for bag in bags]),
        "city": cities,
    }
    pq.write_table(pa.table(columns), folder / "samples.parquet", row_group_size=97)


def config_of(root: Path, meaning: Meaning, way: Way) -> RunConfig:
    """The settings of a life of the run in `root`, whose samples are beside it.

    Raises:
        ConfigError: they refuse each other.
    """
    train = TrainConfig(
        global_batch_size=meaning.batch, accumulate=way.accumulate, max_steps=meaning.steps, log_every=1, device="cpu",
        ema=meaning.ema, eval_every=meaning.eval_every, precision=meaning.precision,  # type: ignore[arg-type]
    )  # fmt: skip
    checkpoint = CheckpointConfig(
        every_steps=way.save_every, full_every=way.full_every, keep_last=way.keep_last, keep_best=way.keep_best,
        asynchronous=way.asynchronous,
    )  # fmt: skip
    publish = PublishConfig()
    if way.publish_every is not None:
        publish = PublishConfig(str(root / "published"), every_steps=way.publish_every, base_every=way.base_every)
    return RunConfig(
        data=_data(root.parent, meaning, way),
        model=_model(meaning),
        cache=_cache(root, meaning, way),
        look_ahead=LookAheadConfig(way.lookahead, way.prefetch),
        sharding=_sharding(root, meaning, way),
        embedding_optimizer=EmbeddingOptimizerConfig(kind=meaning.optimizer, lr=0.1),  # type: ignore[arg-type]
        dense_optimizer=DenseOptimizerConfig(kind=meaning.dense, lr=0.02, clip_norm=meaning.clip_norm),  # type: ignore[arg-type]
        schedule=ScheduleConfig(warmup_steps=meaning.warmup_steps),
        train=train,
        checkpoint=checkpoint,
        publish=publish,
        ids=IDS if meaning.ids else {},
    )


def _data(folder: Path, meaning: Meaning, way: Way) -> DataConfig:
    rows: dict[str, Any] = {name: {"num_rows": count, "pooling": meaning.pooling} for name, count in ROWS.items()}
    features = {
        "age": TableFeature("dense"),
        "user": TableFeature("sparse", mapping="ids" if meaning.ids else "modulo", **rows["user"]),
        "item": TableFeature(
            "sparse", column="items" if meaning.bags else "item", mapping="text_ids" if meaning.ids else "text",
            **rows["item"],
        ),
        "city": TableFeature("sparse", mapping="modulo", **rows["city"]),
    }  # fmt: skip
    return DataConfig(
        "table", str(folder / "samples.parquet"), table=TableConfig(features), eval_fraction=0.1, chunk_rows=64,
        shuffle=meaning.shuffle, num_workers=way.workers, prefetch_batches=way.parsed_ahead,
    )  # fmt: skip


def _model(meaning: Meaning) -> ModelConfig:
    arch: Any = meaning.arch
    bottom = {} if arch in ("fm", "deepfm", "wide_deep") else {"dense_arch_layer_sizes": (8, DIM)}
    top = {} if arch == "fm" else {"over_arch_layer_sizes": (8, 1)}
    return ModelConfig(arch, DIM, dropout=meaning.dropout, table_dtype=meaning.table_dtype, **bottom, **top)  # type: ignore[arg-type]


def _cache(root: Path, meaning: Meaning, way: Way) -> CacheConfig:
    if way == plain(meaning, way) and not _needs_cache(meaning, way):
        return CacheConfig(enabled=False)
    settings: dict[str, Any] = {"policy": way.policy, "decay": way.decay, "host": way.host, "overflow": way.overflow}
    settings |= {"slot_map": way.slot_map, "transfer": way.transfer, "host_dtype": meaning.host_dtype}
    if way.host != "memory":
        settings["host_dir"] = str(root / "rows")
    if way.host == "file":
        size = way.ranks // meaning.groups
        settings["host_bytes"] = int(max(0.4, 2.5 * way.ratio) * sum(ROWS.values()) / size) * _ROW_BYTES
    if meaning.host_dtype == "int8":
        settings["full_rows"] = 0.0
    if _is_planned(meaning, way):
        return CacheConfig(**settings)
    return CacheConfig(ratio=way.ratio, **settings)


def _needs_cache(meaning: Meaning, way: Way) -> bool:
    return meaning.ids or meaning.host_dtype != "fp32" or way.mode != "sharded" or way.exchange != "pooled"


def _is_planned(meaning: Meaning, way: Way) -> bool:
    return way.mode == "sharded" and not meaning.ids


def _sharding(root: Path, meaning: Meaning, way: Way) -> ShardingConfig:
    of_groups = {"groups": meaning.groups, "sync_every": meaning.sync_every}
    if way.mode != "sharded":
        hot = _HOT_BYTES if way.mode == "hot_cold" else None
        return ShardingConfig(mode=way.mode, hot_bytes=hot, exchange=way.exchange, **of_groups)  # type: ignore[arg-type]
    if meaning.ids:  # their rows per bucket are TorchRec's to cut
        return ShardingConfig(exchange=way.exchange, **of_groups)  # type: ignore[arg-type]
    is_stock = way == plain(meaning, way) and not _needs_cache(meaning, way)
    tables, size = [], way.ranks // meaning.groups
    for number, (name, rows) in enumerate(ROWS.items()):
        ranks = ranks_for(way.sharding, number, size, size, column_shards=2)
        how: Any = way.sharding, "device" if is_stock else "cached", ranks, way.exchange
        tables.append(TablePlacement(f"t_{name}", rows, DIM, meaning.table_dtype, *how))  # type: ignore[arg-type]
    plan = make_plan(tables, size, size, batch_size=meaning.batch // way.ranks)
    pools = tuple(pool.with_slots(max(1, int(pool.rows * way.ratio))) for pool in pools_of(tables, size))
    path = root / f"plan_{os.environ.get('RANK', 0)}.json"
    replace(plan, pools=pools).save(path)
    return ShardingConfig(plan=str(path), **of_groups)


def plain(meaning: Meaning, way: Way) -> Way:
    """The training that adds up as this one does, and has nothing else of it: no cache, where there may be none."""
    kept = {name: getattr(way, name) for name in ("ranks", "sharding", "mode", "exchange", "accumulate")}
    lookahead = int(meaning.ids and way.accumulate > 1)  # ids of all micro-batches get rows together
    return Way(**kept, ratio=1.0, lookahead=lookahead, save_every=999, asynchronous=False)


def live(root: Path, meaning: Meaning, way: Way, number: int, control: str = "") -> Lived:
    """Train from the newest checkpoint on, to the last step, to a request to stop, or to death; the losses are in
    `losses.jsonl`.

    Args:
        number: of the life.
        control: what a resume forgets, one of `CONTROLS`.
    """
    ranks = here()
    is_killer = ranks.rank == way.killed_by
    folders = [root / name for name in ("run", "rows", "published")]
    KILLS.watch(folders, ranks.all_gather_objects(os.getpid()))
    try:
        trainer = _trainer(root, meaning, way)
    except ConfigError as error:
        return Lived(str(error))
    resume_run(trainer, allow_changes={ORDER})
    if control and trainer.steps:
        _forget(trainer, control)
    KILLS.at = way.operation if is_killer else None
    with (root / "losses.jsonl").open("a") as losses:
        if ranks.is_first:
            print(json.dumps(["start", number, trainer.steps]), file=losses, flush=True)
        try:
            for report in trainer.train():
                if ranks.is_first and (line := _line(report)):
                    print(json.dumps(line), file=losses, flush=True)
                if is_killer and way.step is not None and trainer.steps >= way.step:
                    if not way.is_stopped:
                        KILLS.now()
                    trainer.supervision.signal = signal.SIGTERM
        except CacheOverflowError:
            if way.overflow != "raise":
                raise
            KILLS.now()  # the other ranks wait
        finally:
            KILLS.at = None
            trainer.close()
    return Lived("", KILLS.count, sum(stats.evictions for stats in cache_stats(trainer.model)))


def _forget(trainer: Trainer, control: str) -> None:
    if control == "position":
        next(trainer.stream)
        return
    for parameter in trainer.optimizers.dense_parameters.values():
        parameter.data += 1e-6


def _trainer(root: Path, meaning: Meaning, way: Way) -> Trainer:
    config = config_of(root, meaning, way)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # caches that are too small grow
        return Trainer(
            config,
            here(),
            root / "run" / "checkpoints",
            Supervision(),
            export=partial(export_quickly, config, root.parent / f"{meaning.layers}.pt2"),
            start=WarmStart(root / "earlier") if meaning.warm else None,
        )


def export(root: Path, meaning: Meaning, way: Way, checkpoint: Path) -> None:
    """Write an export of a checkpoint to `root / "exported"`."""
    config = config_of(root, meaning, way)
    export_quickly(config, root.parent / f"{meaning.layers}.pt2", checkpoint, "fp32", root / "exported")


def _line(report: Any) -> list[Any] | None:
    if isinstance(report, TrainReport):
        return ["loss", report.step, report.loss.hex()]
    if isinstance(report, EvalReport):
        return ["eval", report.step, report.quality["logloss"].hex()]
    return None


def train_earlier(root: Path, meaning: Meaning) -> None:
    """Make the run that a warm one begins with: with fewer rows of ids, which move."""
    meaning = replace(meaning, steps=6, warm=False, groups=1, sync_every=1)
    config = config_of(root, meaning, plain(meaning, Way()))
    if meaning.ids:
        features = dict(config.data.table.features)
        features |= {name: replace(features[name], num_rows=rows) for name, rows in EARLIER_IDS.items()}
        data = replace(config.data, table=replace(config.data.table, features=features))
        config = replace(config, data=data)
    folder = root / "earlier"
    trainer = Trainer(config, here(), folder / "checkpoints")
    for _ in trainer.train():
        pass
    trainer.close()
    (folder / "config.toml").write_text(to_toml(config))


def train_plain(root: Path, meaning: Meaning, way: Way, first: int, last: int, checkpoint: Path | None) -> list[Any]:
    """Train from a step to another as plainly as a way can be; return the lines of its losses. The checkpoint at its
    end is in `root / "plain" / str(first)`.

    Args:
        checkpoint: to go on from; None: the run's beginning.
    """
    config = config_of(root, replace(meaning, steps=last), plain(meaning, way))
    start = WarmStart(root / "earlier") if meaning.warm and checkpoint is None else None
    trainer = Trainer(config, here(), root / "plain" / str(first), start=start)
    if checkpoint is not None:
        assert step_of(checkpoint) == first
        trainer.resume(checkpoint, allow_changes={ORDER})
    lines = [line for report in trainer.train() if (line := _line(report))]
    trainer.close()
    return lines
