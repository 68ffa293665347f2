"""`Trainer` with tables of ids: stock TorchRec with a dictionary, bit for bit; resumes, signals and scores."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache import CacheConfig
from embershard.cache.ids.config import IdTable
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.commands import cli
from embershard.data import Batch, DataConfig, StreamState, open_source
from embershard.data.config import TableConfig, TableFeature
from embershard.distributed import CheckpointConfig, Ranks, Supervision
from embershard.pipeline.config import LookAheadConfig
from embershard.run_result import IdTotals
from embershard.settings.decoding import to_toml
from embershard.sharding.config import ShardingConfig
from embershard.sharding.plan import Plan
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
from tests.covering import keep, matrix
from tests.oracle.id_dictionary import IdDictionary, mix
from tests.ranks.id_tables import maps_of, shards
from tests.ranks.planned import here
from tests.ranks.workers import RankPool
from tests.small_runs import small_model
from tests.unit.cache.rows.test_initial_weights import weights_of_id

pytestmark = pytest.mark.ranks

GLOBAL_BATCH, STEPS, DIM = 48, 60, 8
CAPACITY = {"t_user": 240, "t_item": 480}
RULES = {"user": IdTable(buckets=6, reserve=0.4), "item": IdTable(buckets=12, reserve=0.4, admit_after=2, half_life=6)}
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
        model=small_model(DIM),
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
    slots = tuple(sorted(pool.cache.num_slots for pool in cached_embeddings(trainer.model) if pool.keys.gives_rows))
    evicted_rows = sum(stats.evictions for stats in cache_stats(trainer.model))
    totals = trainer.part(IdTables).result()["ids"]
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


EVERY = 17


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clicks(tmp_path_factory.mktemp("clicks"))


Whole = Callable[[RankPool, str], tuple[list[Trained], Path]]


@pytest.fixture(scope="module")
def whole(clicks: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The whole run of a pool with tables sharded in a way, which tests share, and the folder of its checkpoints."""

    @functools.cache
    def of(pool: RankPool, kind: str) -> tuple[list[Trained], Path]:
        checkpoints = tmp_path_factory.mktemp("whole")
        return pool.run(partial(train, eval_every=EVERY), clicks, checkpoints, kind), checkpoints

    return of


def joined(runs: list[Trained]) -> Maps:
    """The ids of all ranks' shards."""
    return {table: {x: place for run in runs for x, place in run.maps.get(table, {}).items()} for table in CAPACITY}


def differences(found: Trained, expected: Trained) -> list[str]:
    """What a rank has otherwise, of losses, evaluations, and tensors; of tables of ids the rows that ids have."""
    different = [f"loss {a[0]}" for a, b in zip(found.losses, expected.losses, strict=True) if a != b]
    different += [] if found.evaluations == expected.evaluations else ["evaluations"]
    assert found.tensors.keys() == expected.tensors.keys()
    for name, values in found.tensors.items():
        table, _, first = name.split(" ") if " " in name else ("", "", "0")
        others = expected.tensors[name]
        if table in CAPACITY:
            rows = [row - int(first) for row, _, _ in found.maps.get(table, {}).values()]
            here = [row for row in rows if 0 <= row < len(values)]
            values, others = values[here], others[here]
        different += [] if torch.equal(values, others) else [name]
    return different


def is_caught(found: list[Trained], stock: list[Trained]) -> bool:
    return all(differences(a, b) != [] for a, b in zip(found, stock, strict=True))


@pytest.mark.parametrize(
    ("pool", "kind"), [matrix("one", "row_wise"), matrix("two", "table_wise"), ("two", "row_wise")]
)
def test_a_training_is_stock_s_with_a_dictionary(one_rank, two_ranks, clicks, whole, pool, kind):
    """Losses, evaluations between steps, weights, states, and every id's row, count and last use; ids were evicted."""
    ranks: RankPool = one_rank if pool == "one" else two_ranks
    found, _ = whole(ranks, kind)
    stock = ranks.run(partial(train_stock, eval_every=EVERY), clicks, kind)
    assert {each for run in found for each in run.sharding} == {kind}
    assert joined(found) == stock[0].maps
    assert [differences(a, b) for a, b in zip(found, stock, strict=True)] == [[]] * len(found)
    assert len(found[0].evaluations) == STEPS // EVERY + 1
    for table, totals in found[0].ids.items():
        expected = stock[0].ids[table]
        for name in ("live", "admitted", "evicted", "refused"):
            assert getattr(totals, name) == getattr(expected, name)
        assert totals.evicted > 300
        assert totals.evicted_age is not None
        assert totals.evicted_age >= 1
    if pool == "one":  # what compares is the same on two
        assert is_caught(found, ranks.run(partial(train_stock, eval_every=EVERY, forgets=False), clicks, kind))


@pytest.mark.matrix  # from the checkpoint of a step: below
@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_a_resume_goes_on_from_a_signal_and_with_other_shards(two_ranks, clicks, whole, tmp_path, kind):
    found, checkpoints = whole(two_ranks, kind)
    again = two_ranks.run(partial(train, stop_after=30), clicks, tmp_path / "a2", kind)
    assert [run.losses[-1][0] for run in again] == [31, 31]
    rest = two_ranks.run(partial(train, resume=31), clicks, tmp_path / "a2", kind)
    for before, after, expected in zip(again, rest, found, strict=True):
        assert before.losses + after.losses == expected.losses
        assert after.maps == expected.maps
        assert differences(after, _from(expected, 31)) == []
    other = "table_wise" if kind == "row_wise" else "row_wise"
    resumed = two_ranks.run(partial(train, resume=20), clicks, _copy(checkpoints, 20, tmp_path), other)
    assert joined(resumed) == joined(found)


@pytest.mark.parametrize("kind", keep(["row_wise"], ["table_wise", "row_wise"]))
def test_a_resume_goes_on_on_any_ranks(one_rank, two_ranks, clicks, whole, tmp_path, kind):
    """On as many ranks bit for bit; on others with the same ids."""
    found, checkpoints = whole(two_ranks, kind)
    rest = two_ranks.run(partial(train, resume=40), clicks, _copy(checkpoints, 40, tmp_path / "two"), kind)
    for after, expected in zip(rest, found, strict=True):
        assert after.maps == expected.maps
        assert differences(after, _from(expected, 40)) == []
    everything = joined(found)
    (alone,) = one_rank.run(partial(train, resume=40), clicks, _copy(checkpoints, 40, tmp_path), kind)
    assert alone.maps == everything
    weights = torch.cat([rows for name, rows in sorted(alone.tensors.items()) if name.startswith("t_user weight")])
    for run in found:
        for name, rows in run.tensors.items():
            if name.startswith("t_user weight"):
                first = int(name.split(" ")[2])
                here = [row for row, _, _ in everything["t_user"].values() if first <= row < first + len(rows)]
                assert here
                torch.testing.assert_close(rows[[row - first for row in here]], weights[here], rtol=1e-3, atol=1e-4)


@pytest.mark.matrix
def test_in_float64_losses_do_not_depend_on_the_number_of_ranks(one_rank, two_ranks, four_ranks, clicks):
    """Of tables placed whole, from the first step to the last; in float32 they do."""
    runs = [
        pool.run(partial(train, pooling="sum", precision="fp64"), clicks, None, "table_wise")
        for pool in (one_rank, two_ranks, four_ranks)
    ]
    alone = [loss for _, loss in runs[0][0].losses]
    assert len(alone) == STEPS
    for ranks in runs[1:]:
        assert joined(ranks) == joined(runs[0])
        assert [loss for _, loss in ranks[0].losses] == pytest.approx(alone, rel=0, abs=1e-12)
    rounded = two_ranks.run(partial(train, pooling="sum"), clicks, None, "table_wise")[0].losses
    assert [loss for _, loss in rounded] != pytest.approx(alone, rel=0, abs=1e-9)


def planned(clicks: Path, folder: Path, num_ranks: int, *more: str) -> Plan:
    """The plan of the commands, in FOLDER/plan.json, with other caches than those of the settings."""
    settings, profile, plan = (str(folder / name) for name in ("run.toml", "profile.npz", "plan.json"))
    Path(settings).write_text(to_toml(make_config(clicks)))
    assert cli.main(["profile", "--config", settings, "-o", profile]) == 0
    words = ["--config", settings, "--profile", profile, "--ratios", "0.4", "--ranks", str(num_ranks), "-o", plan]
    assert cli.main(["plan", *words, *more]) == 0
    return Plan.load(Path(plan))


@pytest.mark.matrix
@pytest.mark.parametrize(("pool", "kind"), [("one", "row_wise"), ("two", "table_wise"), ("two", "row_wise")])
def test_a_planned_training_is_the_same(one_rank, two_ranks, clicks, whole, tmp_path, pool, kind, capsys):
    """With the caches of a plan, where it places the tables in the same way: all but what is cached."""
    ranks: RankPool = one_rank if pool == "one" else two_ranks
    plan = planned(clicks, tmp_path, 1 if pool == "one" else 2, "--types", kind)
    assert "Hit rates of t_user, t_item are an estimate" in " ".join(capsys.readouterr().out.split())
    expected, _ = whole(ranks, kind)
    found = ranks.run(partial(train, plan=tmp_path / "plan.json"), clicks, None, None)
    for rank, (run, other) in enumerate(zip(found, expected, strict=True)):
        assert run.sharding == other.sharding == {kind}
        pools = [pool for pool in plan.pools if pool.rank == rank and set(pool.tables) <= set(CAPACITY)]
        assert run.slots == tuple(sorted(pool.slots for pool in pools))
        assert run.maps == other.maps or kind == "table_wise"  # on ranks of their own
        assert run.losses == other.losses
    assert joined(found) == joined(expected)
    assert rows_of(found) == rows_of(expected)
    assert sum(run.evicted_rows for run in found) > 1000
    assert {run.slots for run in found} != {run.slots for run in expected}
    assert min(totals.evicted for totals in found[0].ids.values()) > 300
    assert found[0].ids == expected[0].ids


@pytest.mark.matrix
def test_a_plan_may_place_ids_as_it_likes(two_ranks, clicks, whole, tmp_path):
    """Ids have the same rows anywhere."""
    plan = planned(clicks, tmp_path, 2)
    assert {table.kernel for table in plan.tables if table.table in CAPACITY} == {"cached"}
    found = two_ranks.run(partial(train, plan=tmp_path / "plan.json"), clicks, None, None)
    assert joined(found) == joined(whole(two_ranks, "row_wise")[0])


def rows_of(runs: list[Trained]) -> dict[tuple[str, str, int], list[float]]:
    """What the rows of ids, and all of the city's, have: by table, kind and row, of all ranks."""
    live = {table: {row for row, _, _ in ids.values()} for table, ids in joined(runs).items()}
    found = {}
    for run in runs:
        for name, rows in run.tensors.items():
            table, kind, first = name.split(" ") if " " in name else (name, "", "0")
            for row, values in enumerate(rows.reshape(len(rows), -1).tolist(), int(first)):
                if row in live.get(table, {row}):
                    found[table, kind, row] = values
    return found


def test_scores_are_those_of_the_training(one_rank, two_ranks, clicks, whole):
    """By a checkpoint, on any ranks: ids without a row get what training gave them, and nothing is counted."""
    trained, checkpoints = whole(two_ranks, "row_wise")
    expected = trained[0].evaluations[-1]
    (alone,) = one_rank.run(score, clicks, checkpoints)
    together = two_ranks.run(score, clicks, checkpoints)
    for quality, _ in (alone, *together):
        assert quality["samples"] == expected["samples"] > 200
        assert quality == pytest.approx(expected, rel=1e-6)
    assert alone[1] == joined(trained)


def _from(run: Trained, step: int) -> Trained:
    """The run without the steps up to this one, and with its last evaluation alone."""
    losses = [loss for loss in run.losses if loss[0] > step]
    return Trained(losses, run.evaluations[-1:], run.maps, run.ids, run.tensors, run.sharding)


def _copy(checkpoints: Path, step: int, folder: Path) -> Path:
    """A checkpoint of the whole run, for a run of its own."""
    name = f"step_{step}"
    shutil.copytree(checkpoints / name, folder / f"from_{step}" / name)
    return folder / f"from_{step}"
