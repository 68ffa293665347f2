"""Runs of `Trainer` with tables of ids, and of stock TorchRec where a dictionary says which id has which row."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache import CacheConfig
from embershard.cache.ids.config import IdTable
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.data import Batch, DataConfig, StreamState, open_source
from embershard.data.config import TableConfig, TableFeature
from embershard.distributed import CheckpointConfig, Ranks, Supervision
from embershard.models import ModelConfig
from embershard.pipeline.config import LookAheadConfig
from embershard.run_result import IdTotals
from embershard.sharding.config import ShardingConfig
from embershard.sharding.torchrec import CachedEmbeddingBagCollectionSharder, StockEmbeddingBagCollectionSharder
from embershard.sharding.torchrec.inspection import cache_stats, cached_embeddings
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.fit.id_rules import id_rules
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig
from embershard.training.parts.id_tables import IdTables
from embershard.training.reports import EvalReport, TrainReport
from embershard.training.steps import open_stream
from embershard.training.trained_run import Scorer, open_trained
from embershard.training.trainer import Trainer
from tests.oracle.id_dictionary import IdDictionary, mix
from tests.ranks.id_tables import maps_of, shards
from tests.ranks.planned import here
from tests.unit.cache.rows.test_initial_weights import weights_of_id

GLOBAL_BATCH, STEPS, DIM = 48, 60, 8
CAPACITY = {"t_user": 240, "t_item": 480}
RULES = {
    "user": IdTable(buckets=6, reserve=0.4),
    "item": IdTable(buckets=12, reserve=0.4, admit_after=2, half_life=6),
}
Maps = dict[str, dict[int, tuple[int, int, int]]]


def write_clicks(folder: Path) -> Path:
    """Users, items in bags and cities, of which the first two come, are popular and go; some are missing."""
    chance, rows = np.random.default_rng(5), GLOBAL_BATCH * (STEPS + 8)
    moments = np.arange(rows) // GLOBAL_BATCH
    users = (chance.zipf(1.3, rows) % 150 + 25 * moments).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    items = [
        [f"item {number}" for number in chance.zipf(1.4, size) % 200 + 20 * moment]
        for size, moment in zip(chance.integers(0, 4, rows), moments, strict=True)
    ]
    columns = {
        "label": pa.array(chance.integers(0, 2, rows)),
        "age": pa.array(chance.normal(size=rows)),
        "user": pa.array(users.view(np.int64), mask=chance.random(rows) < 0.05),
        "item": pa.array(items),
        "city": pa.array(chance.integers(0, 50, rows)),
    }
    path = folder / "clicks.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=97)
    return path


def make_config(path: Path, pooling: str = "mean", **train: Any) -> RunConfig:
    features = {
        "age": TableFeature("dense"),
        "user": TableFeature("sparse", num_rows=240, mapping="ids"),
        "item": TableFeature("sparse", num_rows=480, mapping="text_ids", pooling=pooling),
        "city": TableFeature("sparse", num_rows=51, mapping="modulo"),
    }
    return RunConfig(
        data=DataConfig("table", str(path), table=TableConfig(features), shuffle=False, num_workers=0),
        model=ModelConfig(embedding_dim=DIM, dense_arch_layer_sizes=(8, DIM), over_arch_layer_sizes=(8, 1)),
        cache=CacheConfig(ratio=0.6),
        look_ahead=LookAheadConfig(8, 2),
        embedding_optimizer=EmbeddingOptimizerConfig(lr=0.1),
        dense_optimizer=DenseOptimizerConfig(lr=0.05),
        train=TrainConfig(
            **{"global_batch_size": GLOBAL_BATCH, "max_steps": STEPS, "log_every": 1, "device": "cpu"} | train
        ),
        checkpoint=CheckpointConfig(every_steps=20, keep_last=9),
        ids=RULES,
    )


@contextlib.contextmanager
def sharded(kind: str) -> Iterator[None]:
    """Tables are sharded in this way, with the cache and without."""
    with contextlib.ExitStack() as stack:
        for sharder in (CachedEmbeddingBagCollectionSharder, StockEmbeddingBagCollectionSharder):
            stack.enter_context(mock.patch.object(sharder, "sharding_types", return_value=[kind]))
        yield


@dataclass(frozen=True)
class Trained:
    """What a rank has of a run: losses of its steps, its figures of evaluations, ids, weights and states by table; the
    slots of its caches of ids, and the rows that all caches evicted."""

    losses: list[tuple[int, float]]
    evaluations: list[dict[str, Any]]
    maps: Maps
    ids: dict[str, IdTotals]
    tensors: dict[str, Tensor]
    sharding: set[str]
    slots: tuple[int, ...] = ()
    evicted_rows: int = 0


def train(
    path: Path,
    checkpoints: Path | None,
    kind: str | None,
    *,
    resume: int | None = None,
    stop_after: int | None = None,
    plan: Path | None = None,
    **changes: Any,
) -> Trained:
    """Train, from a checkpoint on if there is one, until the end or a signal; as a plan says, if there is one."""
    config = dataclasses.replace(make_config(path, **changes), sharding=ShardingConfig(plan=plan and str(plan)))
    with contextlib.nullcontext() if kind is None else sharded(kind):
        trainer = Trainer(config, here(), checkpoints, Supervision())
    if resume is not None:
        assert checkpoints is not None
        trainer.resume(checkpoints / f"step_{resume}")
    losses, evaluations = [], []
    for report in trainer.train():
        if isinstance(report, TrainReport):
            losses.append((report.step, report.loss))
            if report.step == stop_after and trainer.ranks.is_first:
                trainer.supervision.signal = signal.SIGINT
        elif isinstance(report, EvalReport):
            evaluations.append(report.quality)
    placed = {each.sharding_type for plan in trainer.model.plan.plan.values() for each in plan.values()}  # type: ignore[attr-defined]
    maps, tensors = maps_of(trainer.model), _tensors(trainer)
    slots = tuple(sorted(pool.cache.num_slots for pool in cached_embeddings(trainer.model) if pool.ids))
    evicted_rows = sum(stats.evictions for stats in cache_stats(trainer.model))
    totals = trainer.part(IdTables).totals()["ids"]
    found = Trained(losses, evaluations, maps, totals, tensors, placed, slots, evicted_rows)
    trainer.close()
    return found


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Rows of the tables here, by name, kind and first row, and the dense parameters."""
    found = {name: values.detach().clone() for name, values in trainer.optimizers.dense_parameters.items()}
    for table in (*CAPACITY, "t_city"):
        found |= {f"{table} {kind} {first}": rows.clone() for kind, first, rows in shards(trainer.model, table)}
    return found


def train_stock(path: Path, kind: str, *, eval_every: int | None = None, forgets: bool = True) -> Trained:
    """The same training by stock TorchRec: before each step, a dictionary gives rows to ids, which begin anew.

    Args:
        forgets: False, a planted fault: rows keep what they learned of another id.
    """
    config, ranks = make_config(path, eval_every=eval_every), here()
    rows = {
        name: dataclasses.replace(feature, mapping="none") if feature.takes_ids else feature
        for name, feature in config.data.table.features.items()
    }
    table = dataclasses.replace(config.data.table, features=rows)
    data = dataclasses.replace(config.data, table=table)
    stock_config = dataclasses.replace(config, data=data, cache=CacheConfig(enabled=False), ids={})
    with sharded(kind):
        stock = Trainer(stock_config, ranks)
    seed = config.train.seed
    tables = {name: IdDictionary(name, rules, CAPACITY[name], seed) for name, rules in id_rules(config).items()}
    losses, evaluations = [], []
    for step, batch in enumerate(_batches(config, ranks, StreamState(seed=config.data.seed)), 1):
        found = {}
        for name, born_in in tables.items():
            found[name], born = born_in.resolve(itertools.chain(*ranks.all_gather_objects(_ids(batch, name))))
            if forgets:
                _begin_anew(stock, name, born, seed)
        assert stock.step(_with_rows(batch, found)) is None
        losses.append((step, stock.losses.monitor.mean()))
        if step == STEPS or (eval_every and step % eval_every == 0):
            evaluations.append(_evaluated(stock, config, ranks, tables))
        if step == STEPS:
            break
    stock.close()
    live = {name: table.live() for name, table in tables.items()}
    totals = {
        name: IdTotals(
            live=len(live[name]),
            admitted=table.admitted,
            evicted=table.evicted,
            refused=table.refused,
            evicted_age=None,
        )
        for name, table in tables.items()
    }
    return Trained(losses, evaluations, live, totals, _tensors(stock), {kind})


def _batches(config: RunConfig, ranks: Ranks, state: StreamState | None) -> Iterator[Batch]:
    with open_stream(config, open_source(config.data), ranks, state) as stream:
        yield from stream


def _ids(batch: Batch, table: str) -> list[int]:
    return [mix(x) for x in batch.sparse_features[table.removeprefix("t_")].values().tolist()]


def _with_rows(batch: Batch, found: dict[str, dict[int, int | None]]) -> Batch:
    features, values = batch.sparse_features, []
    for name, part in features.to_dict().items():
        rows = part.values()
        if f"t_{name}" in found:
            rows = torch.tensor([found[f"t_{name}"][x] for x in _ids(batch, f"t_{name}")], dtype=torch.int64)
        values.append(rows)
    given = KeyedJaggedTensor(features.keys(), torch.cat(values), lengths=features.lengths())
    return dataclasses.replace(batch, sparse_features=given)


def _begin_anew(trainer: Trainer, table: str, born: dict[int, int], seed: int) -> None:
    bound = 1 / CAPACITY[table] ** 0.5
    init = ShardWeights(table, seed, DIM, -bound, bound)
    for kind, first, tensor in shards(trainer.model, table):
        for row, x in born.items():
            if first <= row < first + tensor.shape[0]:
                tensor[row - first] = weights_of_id(init, x) if kind == "weight" else 0


def _evaluated(stock: Trainer, config: RunConfig, ranks: Ranks, tables: dict[str, IdDictionary]) -> dict[str, Any]:
    """Quality on the held-out samples, whose ids are looked up and not counted."""
    translated = [
        _with_rows(batch, {name: table.find(_ids(batch, name)) for name, table in tables.items()})
        for batch in _batches(config, ranks, None)
    ]

    @contextlib.contextmanager
    def stream(*_: Any) -> Iterator[Any]:
        yield _Stream(translated)

    with mock.patch("embershard.training.parts.evaluations.open_stream", stream):
        report = stock.evaluate()
    assert report is not None
    return report.quality


class _Stream:
    """Batches as a stream."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches, self.num_samples, self.bad_rows = iter(batches), 0, mock.Mock()

    def __iter__(self) -> Iterator[Batch]:
        return self._batches

    def __next__(self) -> Batch:
        return next(self._batches)


def score(path: Path, checkpoints: Path) -> tuple[dict[str, Any], Maps]:
    """What the newest checkpoint's model says of the held-out samples, and the ids that it knows on this rank."""
    ranks, config = here(), make_config(path)
    trained = open_trained(config, checkpoints, ranks)
    scorer = Scorer(trained, open_source(config.data), ranks, Supervision())
    quality = scorer.evaluate().quality
    return quality, maps_of(scorer.model)
