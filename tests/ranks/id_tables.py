"""Train tables of ids with the cache, and with stock TorchRec, where a dictionary says which id has which row."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import (
    CacheConfig,
    CachedEmbeddingBagCollectionSharder,
    CachedEmbeddingCollectionSharder,
    cache_stats,
    plan_sharding,
)
from embershard.cache.homes.memory import MemoryRows
from embershard.cache.ids.config import IdTable
from embershard.cache.ids.id_map import IdMap
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.cache.rows.lazy_rows import LazyRows
from embershard.cache.rows.moves import RowMoves
from embershard.sharding.torchrec import (
    StockEmbeddingBagCollectionSharder,
    StockEmbeddingCollectionSharder,
    cached_embeddings,
)
from embershard.sharding.torchrec.ids.id_tables import KnownIds, PoolIdMaps, id_counts
from embershard.sharding.torchrec.ids.id_tables import maps_of as maps_of_pool
from embershard.sharding.torchrec.slots import SlotTable
from tests.oracle.id_dictionary import IdDictionary, mix
from tests.ranks import look_ahead, parity
from tests.ranks.look_ahead import Batch, Model
from tests.unit.cache.rows.test_initial_weights import weights_of_id

SEED = 11
_SPREAD = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Case(look_ahead.Case):
    """``rules``: of each table, whose ``rows`` are its capacity; None: a table of row numbers. ``lookahead``: 0 trains
    without a pipeline. ``handovers``: steps before which another pipeline takes over. ``reload_every``: so many steps
    the model loads its own state. ``failing``: steps that an exception ends between forward and backward, and
    ``interrupted``: that SIGINT ends there. ``fault``: a planted one, by name. ``popular``: ids of a table at a time;
    each step brings ``new`` ones. ``shares``: a rank's batch is what so many ranks have without it."""

    rows: tuple[int, ...] = (240, 480, 360)
    dims: tuple[int, ...] = (16, 16, 8)
    rules: tuple[IdTable | None, ...] = (
        IdTable(buckets=6, reserve=0.4),
        IdTable(buckets=12, reserve=0.4, admit_after=2, half_life=6),
        None,
    )
    steps: int = 120
    ratio: float = 0.5
    lookahead: int = 0
    prefetch: int = 2
    worker: bool | None = None
    evaluate_every: int = 7
    handovers: tuple[int, ...] = ()
    reload_every: int = 0
    failing: tuple[int, ...] = ()
    interrupted: tuple[int, ...] = ()
    fault: str = ""
    popular: int = 150
    new: int = 25
    shares: int = 1
    seed: int = 0

    @property
    def ids(self) -> dict[str, IdTable]:
        """Rules by table."""
        return {f"t{t}": rules for t, rules in enumerate(self.rules) if rules is not None}


@dataclass(frozen=True)
class Outcome:
    """What one rank saw. ``different`` is empty when everything was bitwise equal."""

    different: list[str]
    num_compared: int
    evicted_ids: int
    counts: dict[str, tuple[int, int, int, int]]
    oracle_counts: dict[str, tuple[int, int, int, int]]
    evicted_rows: int
    zeros: int
    maps: dict[str, dict[int, tuple[int, int, int]]]
    losses: list[float]


def batches(case: Case, rank: int, first: int = 0, steps: int | None = None) -> list[Batch]:
    """A rank's batches, of ids that come, are popular and go; those of tables of row numbers do not."""
    count = case.steps - first if steps is None else steps
    return [batch_of(case, rank, step) for step in range(first, first + count)]


def batch_of(case: Case, rank: int, step: int) -> Batch:
    """A rank's batch of one step."""
    shares = [_drawn(case, rank * case.shares + share, step) for share in range(case.shares)]
    lengths, values, weights, labels = (list(parts) for parts in zip(*shares, strict=True))
    ids = np.concatenate([part for feature in zip(*values, strict=True) for part in feature])
    weighted = [part for feature in zip(*weights, strict=True) for part in feature]
    features = KeyedJaggedTensor(
        case.features,
        torch.from_numpy(ids),
        lengths=torch.from_numpy(np.concatenate(lengths, axis=1).flatten()),
        weights=torch.from_numpy(np.concatenate(weighted)) if case.weighted else None,
    )
    return Batch(features, torch.from_numpy(np.concatenate(labels)))


def _drawn(case: Case, rank: int, step: int) -> tuple[Any, list[Any], list[Any], Any]:
    """Lengths [F, B], ids and weights of each feature, and labels [B]."""
    random = np.random.default_rng([step, rank, case.seed])
    lengths = random.integers(0, 6, (len(case.features), case.batch_size))
    values = []
    for name, count in zip(case.features, lengths.sum(1), strict=True):
        drawn = random.zipf(1.3, count) % case.popular
        table = int(name[1])
        if case.rules[table] is None:
            values.append(drawn * 7 % case.rows[table])
        else:
            words = (drawn + case.new * step).astype(np.uint64) * np.uint64(_SPREAD)
            values.append(words.view(np.int64))
    weights = [random.random(len(ids), np.float32) for ids in values]
    return lengths, values, weights, random.random(case.batch_size, np.float32)


def evaluated(case: Case, rank: int, step: int) -> Batch:
    """A batch to evaluate after ``step``, with ids that went, are there, and are still to come."""
    return batches(case, rank + 100 // case.shares, max(0, step + (3 if step % 2 else -2)), 1)[0]


def build(case: Case, cached: bool) -> DistributedModelParallel:
    """The sharded model, from seed 7, on this rank."""
    torch.manual_seed(7)
    model = Model(case)
    params: dict[str, Any] = {"optimizer": parity.OPTIMIZERS[case.optimizer], "learning_rate": 0.1, "eps": 1e-6}
    if cached:
        config = CacheConfig(ratio=case.ratio, policy=case.policy, overflow="raise")  # type: ignore[arg-type]
        sharders: list[Any] = [
            CachedEmbeddingBagCollectionSharder(config, fused_params=dict(params), init_seed=SEED, ids=case.ids),
            CachedEmbeddingCollectionSharder(config, fused_params=dict(params), init_seed=SEED, ids=case.ids),
        ]
    else:
        sharders = [
            StockEmbeddingBagCollectionSharder(dict(params), init_seed=SEED),
            StockEmbeddingCollectionSharder(dict(params), init_seed=SEED),
        ]
    world_size = dist.get_world_size()
    constraints = parity._constraints(case, cached)
    plan = plan_sharding(
        model, sharders, world_size=world_size, local_world_size=world_size, device="cpu", constraints=constraints
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(model, env=env, device=torch.device("cpu"), plan=plan, sharders=sharders)


class Stock:
    """The stock model, and a dictionary of each table's ids."""

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, build(case, cached=False)
        self.tables = {
            name: IdDictionary(name, rules, case.rows[int(name[1])], SEED) for name, rules in case.ids.items()
        }
        self._optimizer = look_ahead.dense_optimizer(self.model)
        self.losses: list[float] = []
        self.zeros = 0
        self._clear(self._unused())

    def train(self, first: int = 0, stop: int | None = None) -> None:
        """All steps, or some, and evaluations in between."""
        for step in range(first, self.case.steps if stop is None else stop):
            self.step(step)

    def step(self, step: int, updates: bool = True) -> None:
        """One step; without updates, as if it ended between forward and backward."""
        mine, found = self.resolve(step)
        batch = self._with_rows(mine, found)
        self._optimizer.zero_grad()
        loss, output = self.model(batch)
        if updates and step not in self.case.failing + self.case.interrupted:
            loss.backward()
            self._optimizer.step()
        self._clear(self._unused())
        self.losses.append(output.item())
        if self.case.evaluate_every and step % self.case.evaluate_every == 0:
            self.losses.append(self._evaluate(evaluated(self.case, dist.get_rank(), step)))

    def resolve(self, step: int) -> tuple[Batch, dict[str, dict[int, int | None]]]:
        """This rank's batch of a step, and the rows of all ranks' ids; those that are given away begin anew."""
        everyone = [batch_of(self.case, rank, step) for rank in range(dist.get_world_size())]
        found = {}
        for name, table in self.tables.items():
            found[name], born = table.resolve([x for batch in everyone for x in self.ids_of(batch, name)])
            self._begin_anew(name, born)
        return everyone[dist.get_rank()], found

    def _evaluate(self, batch: Batch) -> float:
        found = {name: table.find(self.ids_of(batch, name)) for name, table in self.tables.items()}
        with torch.no_grad():
            return float(self.model(self._with_rows(batch, found))[1])

    def ids_of(self, batch: Batch, table: str) -> list[int]:
        """A batch's ids of a table, mixed."""
        parts = batch.features.to_dict()
        return [mix(x) for name in self.case.features if name[1] == table[1] for x in parts[name].values().tolist()]

    def _with_rows(self, batch: Batch, found: dict[str, dict[int, int | None]]) -> Batch:
        values = []
        for name, part in batch.features.to_dict().items():
            table = f"t{name[1]}"
            rows = part.values().tolist()
            if table in found:
                size = self.tables[table].layout.rows
                buckets = self.tables[table].layout.num_buckets
                mixed = [mix(x) for x in rows]
                self.zeros += sum(found[table][x] is None for x in mixed)
                rows = [
                    x % 2**64 % buckets * size if found[table][x] is None else found[table][x] for x in mixed
                ]  # an unused row has the zeros
            values += rows
        features = batch.features
        given = KeyedJaggedTensor(
            features.keys(), torch.tensor(values), lengths=features.lengths(), weights=features.weights_or_none()
        )
        return Batch(given, batch.labels)

    def _unused(self) -> dict[str, list[int]]:
        return {
            name: [b * table.layout.rows for b in range(table.layout.num_buckets)]
            for name, table in self.tables.items()
            if table.config.unadmitted == "zero"
        }

    def _begin_anew(self, table: str, born: dict[int, int]) -> None:
        number = int(table[1])
        bound = 1 / self.case.rows[number] ** 0.5
        init = ShardWeights(table, SEED, self.case.dims[number], -bound, bound)
        weights = {row: weights_of_id(init, x) for row, x in born.items()}
        for kind, first, tensor in shards(self.model, table):
            for row, fresh in weights.items():
                if first <= row < first + tensor.shape[0]:
                    tensor[row - first] = fresh if kind == "weight" else 0

    def _clear(self, unused: dict[str, list[int]]) -> None:
        for table, rows in unused.items():
            for _, first, tensor in shards(self.model, table):
                for row in rows:
                    if first <= row < first + tensor.shape[0]:
                        tensor[row - first] = 0


@torch.no_grad()
def shards(model: DistributedModelParallel, table: str) -> Iterator[tuple[str, int, Tensor]]:
    """Kind ("weight" or the name of a state), first row and rows of a table's tensors on this rank; not copies."""
    values = {("weight", name): value for name, value in model.state_dict().items()}
    for name, states in model.fused_optimizer.state_dict()["state"].items():
        values |= {(state.rpartition(".")[2], name): value for state, value in states.items()}
    for (kind, name), value in values.items():
        if f".{table}.weight" in name and isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                yield kind, shard.metadata.shard_offsets[0], shard.tensor.detach()


def maps_of(model: DistributedModelParallel) -> dict[str, dict[int, tuple[int, int, int]]]:
    """Row, count and last use of the ids of this rank's shards, by table."""
    found: dict[str, dict[int, tuple[int, int, int]]] = {}
    for pool in cached_embeddings(model):
        for ids_map in maps_of_pool(pool):
            records = ids_map.tensors()["records"]
            first = ids_map._first * ids_map._all.rows
            for row in np.flatnonzero(records[:, 1] >= 0):
                x, uses = (int(word) for word in records[row])
                found.setdefault(ids_map.table, {})[x] = (first + int(row), uses >> 32, uses & (2**32 - 1))
    return found


def train_cached(case: Case) -> tuple[DistributedModelParallel, list[float]]:
    """The cached model, and its losses."""
    model = build(case, cached=True)
    return model, go_on(case, model, 0)


def go_on(case: Case, model: DistributedModelParallel, first: int) -> list[float]:
    """Losses of the steps from `first` on."""
    run = look_ahead.Run(lookahead=case.lookahead, prefetch=case.prefetch, worker=case.worker)
    losses = list[float]()
    for start, stop in itertools.pairwise((first, *case.handovers, case.steps)):
        loop: Any = look_ahead.pipeline(model, run) if case.lookahead else look_ahead.plain(model)
        iterator = (batch_of(case, dist.get_rank(), step) for step in range(start, case.steps))
        for step in range(start, stop):
            if step in case.failing + case.interrupted:
                losses.append(_failing(loop, model, iterator, step in case.interrupted))
            else:
                losses.append(loop.progress(iterator).item())
            if case.reload_every and step % case.reload_every == 0:
                model.load_state_dict(model.state_dict())
                model.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
            if case.evaluate_every and step % case.evaluate_every == 0:
                with torch.no_grad():
                    losses.append(float(model(evaluated(case, dist.get_rank(), step))[1]))
        if case.lookahead:
            loop.detach()
    return losses


def _failing(loop: Any, model: DistributedModelParallel, data: Iterator[Batch], is_interrupt: bool) -> float:
    """A step that an exception or an interrupt ends after the forward: its loss."""
    found: Tensor | None = None
    with contextlib.suppress(KeyboardInterrupt if is_interrupt else ZeroDivisionError), loop.step(data) as batch:
        _, found = model(batch)
        if is_interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes begin without it
            signal.raise_signal(signal.SIGINT)
        raise ZeroDivisionError
    return found.item()


def compare(case: Case) -> Outcome:
    """Stock with a dictionary, and the cache with ids; what differed on this rank."""
    look_ahead.only_our_warnings_raise()
    stock = Stock(case)
    stock.train()
    with fault(case.fault):
        model, losses = train_cached(case)
    return outcome_of(stock, model, losses)


def outcome_of(stock: Stock, model: DistributedModelParallel, losses: list[float]) -> Outcome:
    """What differs, after as many steps."""
    different = [f"loss {i}" for i, (a, b) in enumerate(zip(stock.losses, losses, strict=True)) if a != b]
    num_compared, maps = 0, maps_of(model)
    for name, table in stock.tables.items():
        live = table.live()
        first_rows = [(first, first + len(rows)) for kind, first, rows in shards(model, name) if kind == "weight"]
        mine = {x: place for x, place in live.items() if any(a <= place[0] < b for a, b in first_rows)}
        if maps.get(name, {}) != mine:
            different.append(f"map of {name}")
        used = [row for row, _, _ in live.values()]
        if table.config.unadmitted == "shared":
            used += [b * table.layout.rows for b in range(table.layout.num_buckets)]
        expected = {(kind, first): rows for kind, first, rows in shards(stock.model, name)}
        for kind, first, rows in shards(model, name):
            here = [row - first for row in used if first <= row < first + rows.shape[0]]
            num_compared += len(here)
            if not torch.equal(rows[here], expected[kind, first][here]):
                different.append(f"{kind} of {name}")
    counts = {
        name: (counts.live, counts.admitted, counts.evicted, counts.refused)
        for name, counts in id_counts(model).items()
    }
    evicted = sum(table.evicted for table in stock.tables.values())
    return Outcome(
        different=different,
        num_compared=num_compared,
        evicted_ids=evicted // dist.get_world_size(),
        counts=counts,
        oracle_counts={
            name: (len(table.live()), table.admitted, table.evicted, table.refused)
            for name, table in stock.tables.items()
        },
        evicted_rows=sum(stats.evictions for stats in cache_stats(model)),
        zeros=stock.zeros,
        maps=maps,
        losses=losses,
    )


@contextlib.contextmanager
def fault(name: str) -> Iterator[None]:
    """A planted fault, in force while the cached model trains."""
    with contextlib.ExitStack() as stack:
        if name == "states kept":
            reinitialise = MemoryRows.reinitialise

            def keep_states(self: MemoryRows, keys: Tensor, ids: Tensor) -> None:
                kept = {state: rows.clone() for state, rows in self.states.items()}
                reinitialise(self, keys, ids)
                for state, rows in kept.items():
                    self.states[state].data.copy_(rows)

            stack.enter_context(mock.patch.object(MemoryRows, "reinitialise", keep_states))
        elif name == "weights by row":
            by_id = LazyRows.reinitialise
            stack.enter_context(
                mock.patch.object(LazyRows, "reinitialise", lambda self, keys, ids: by_id(self, keys, keys))
            )
        elif name == "overwritten too early":
            resolve = PoolIdMaps._resolve

            def hasty(self: PoolIdMaps, batches: Any) -> list[KnownIds]:
                step, *others = resolve(self, batches)
                step.evicted_in = 0
                return [step, *others]

            stack.enter_context(mock.patch.object(PoolIdMaps, "_resolve", hasty))
        elif name == "evaluation from the head":
            nothing = (np.empty(0, np.int64),) * 3
            stack.enter_context(mock.patch.object(IdMap, "_of_committed", return_value=nothing))
        elif name == "save from the head":

            def of_head(self: IdMap) -> dict[str, Any]:
                records, candidates = self._records.copy(), self._candidates.copy()
                records[:: 2 * self._all.rows] = self.committed
                return {"records": records.reshape(-1, 2), "candidates": candidates.reshape(-1, 2)}

            stack.enter_context(mock.patch.object(IdMap, "tensors", of_head))
        elif name == "born as zeros":

            def zeros(self: LazyRows, keys: Tensor, ids: Tensor) -> None:
                self._out.reshape(self._num_rows, -1)[keys.numpy()] = 0

            stack.enter_context(mock.patch.object(LazyRows, "reinitialise", zeros))
        elif name == "slots of the dead found":
            no_slots = mock.patch.object(RowMoves, "reinitialise", lambda self, *rows: self._host.reinitialise(*rows))
            stack.enter_context(no_slots)
        elif name == "zero trained":
            stack.enter_context(mock.patch.object(SlotTable, "clear_zeros"))
        else:
            assert not name, name
        yield


def save(case: Case, steps: int, folder: str) -> dict[str, dict[int, tuple[int, int, int]]]:
    """Train so many steps, with stock too, and save while batches are known and prepared ahead; this rank's maps."""
    stock = Stock(case)
    stock.train(stop=steps)
    checkpoint.save(_saved(stock.model), checkpoint_id=f"{folder}/stock")
    model = build(case, cached=True)
    loop = look_ahead.pipeline(model, look_ahead.Run(lookahead=case.lookahead, prefetch=case.prefetch, worker=False))
    iterator = iter(batches(case, dist.get_rank()))
    for _ in range(steps):
        loop.progress(iterator)
    checkpoint.save(_saved(model), checkpoint_id=f"{folder}/cached")
    found = maps_of(model)
    loop.detach()
    return found


def resume(case: Case, steps: int, folder: str) -> Outcome:
    """Go on from what `save` saved, on any ranks; what differs from stock, which went on too."""
    look_ahead.only_our_warnings_raise()
    stock = Stock(case)
    for step in range(steps):
        stock.resolve(step)
    load(stock.model, f"{folder}/stock")
    stock.train(first=steps)
    return outcome_of(stock, *_resumed(case, steps, folder))


def _resumed(case: Case, steps: int, folder: str) -> tuple[DistributedModelParallel, list[float]]:
    model = build(case, cached=True)
    load(model, f"{folder}/cached")
    return model, go_on(case, model, steps)


def load(model: DistributedModelParallel, folder: str) -> None:
    """A checkpoint of any ranks."""
    values = _saved(model)
    if not values["optimizer"]["state"]:  # a rank without tables: nothing is what no checkpoint has
        del values["optimizer"]
    checkpoint.load(values, checkpoint_id=folder)
    model.load_state_dict(values["model"])
    if "optimizer" in values:
        model.fused_optimizer.load_state_dict(values["optimizer"])


def loaded_maps(case: Case, folder: str) -> dict[str, dict[int, tuple[int, int, int]]]:
    """A checkpoint's maps on this rank."""
    model = build(case, cached=True)
    load(model, f"{folder}/cached")
    return maps_of(model)


def without_ids(case: Case) -> str:
    """What loading the rows of a table, and not whose they are, raises."""
    model = build(case, cached=True)
    values = {name: value for name, value in model.state_dict().items() if not name.endswith(".ids")}
    return look_ahead.message_of(lambda: model.load_state_dict(values))


def _saved(model: DistributedModelParallel) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}


def warnings_of(case: Case) -> list[str]:
    """What TorchRec and FBGEMM log, as warnings or worse, while the case trains: as a program would see it."""
    model, said = build(case, cached=True), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torchrec")
    level = logger.level
    logger.setLevel(logging.WARNING)
    for place in (logger, logging.getLogger()):
        place.addHandler(handler)
    try:
        go_on(case, model, 0)
    finally:
        logger.setLevel(level)
        for place in (logger, logging.getLogger()):
            place.removeHandler(handler)
    return said


def refusal(case: Case) -> str:
    """Type and text of what sharding the case raises."""
    return look_ahead.message_of(lambda: build(case, cached=True))


def with_rules(case: Case, **rules: Any) -> Case:
    """The case, with other rules for its tables of ids."""
    return dataclasses.replace(
        case, rules=tuple(None if each is None else dataclasses.replace(each, **rules) for each in case.rules)
    )
