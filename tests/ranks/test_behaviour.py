"""What surrounds the exact step: loading, prefetching, evaluation, misuse, bad ids, budgets."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from embershard import (
    CacheConfig,
    CachedEmbeddingBagCollectionSharder,
    CachedEmbeddingCollectionSharder,
    IdTable,
    cache_stats,
    flush,
    plan_sharding,
)
from embershard.sharding.torchrec import StockEmbeddingBagCollectionSharder as StockBagSharder
from embershard.sharding.torchrec import cached_embeddings
from tests.covering import combinations, keep, matrix
from tests.ranks.look_ahead import message_of
from tests.ranks.parity import Case, batches, build, differences, snapshot, train
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks


def _pins(model: Any) -> int:
    return sum(len(pool.cache._in_flight) for pool in cached_embeddings(model))


def load_full_state(case: Case) -> dict[str, Any]:
    """Train A, load its state into a trained B, train both on; what differed, before and after."""
    a, b = build(case, cached=True), build(case, cached=True)
    train(a, case)
    train(b, case, seed=5)  # dirty rows of another history: none may survive the load
    weights = {name: (value.clone() if isinstance(value, Tensor) else value) for name, value in a.state_dict().items()}
    b.load_state_dict(weights)
    b.fused_optimizer.load_state_dict(a.fused_optimizer.state_dict())
    loaded = differences(snapshot(a), snapshot(b))
    losses = train(a, case, steps=10, seed=9) == train(b, case, steps=10, seed=9)
    return {"loaded": loaded, "losses": losses, "later": differences(snapshot(a), snapshot(b))}


class _GpuAtFirst:
    """A CPU whose first question for its type is answered with a GPU's: `DMPCollection` asserts it, and needs none."""

    def __init__(self) -> None:
        self._types = iter(["cuda"])

    @property
    def type(self) -> str:
        return next(self._types, "cpu")


def in_two_dimensions(arguments: dict[str, Any] | None, sequence: bool, weighs_positions: bool) -> str:
    """What sharding a model in TorchRec's 2D parallelism raises: every rank has a copy. `arguments`: of the cached
    sharder; None: TorchRec's own."""
    meta = torch.device("meta")
    if sequence:
        items = [EmbeddingConfig(name="t", num_embeddings=240, embedding_dim=8, feature_names=["f"])]
        module: Any = EmbeddingCollection(items, device=meta)
        sharder: Any = CachedEmbeddingCollectionSharder(**arguments or {})
    else:
        bags = [EmbeddingBagConfig(name="t", num_embeddings=240, embedding_dim=8, feature_names=["f"])]
        module = EmbeddingBagCollection(bags, is_weighted=weighs_positions, device=meta)
        sharder = CachedEmbeddingBagCollectionSharder(**arguments) if arguments is not None else StockBagSharder()
    if weighs_positions:
        processor = PositionWeightedModuleCollection({"f": 4}, device=torch.device("cpu"))
        module = FeatureProcessedEmbeddingBagCollection(module, processor)
        sharder = FeatureProcessedEmbeddingBagCollectionSharder(sharder)
    model = nn.ModuleDict({"tables": module})
    plan = plan_sharding(model, [sharder], world_size=1, local_world_size=1, device="cpu")

    def shard() -> None:
        DMPCollection(
            model,
            _GpuAtFirst(),  # type: ignore[arg-type]
            plan,
            world_size=dist.get_world_size(),
            sharding_group_size=1,
            global_pg=dist.group.WORLD,
            sharders=[sharder],
        )

    return message_of(shard)


def load_one_table(case: Case) -> dict[str, Any]:
    """Load one table only: the others keep what they learned, though their rows were still dirty in the
    cache."""
    model = build(case, cached=True)
    donor = build(case, cached=True)
    train(donor, case, seed=3)
    donated = {k: v for k, v in donor.state_dict().items() if ".t1." in k}
    train(model, case)
    expected = snapshot(model)
    reference = build(case, cached=False)
    train(reference, case)
    train(reference, case, steps=5, seed=4)
    train(model, case, steps=5, seed=4)  # dirty again
    model.load_state_dict(donated, strict=False)
    after = snapshot(model)
    wanted = snapshot(reference)
    donated_now = snapshot(donor)
    others = [n for n in wanted if n.startswith("weight") and ".t1." not in n and "dense" not in n]
    return {
        "changed": bool(expected) and bool(differences(expected, after)),
        "others": [n for n in others if not torch.equal(wanted[n], after[n])],
        "others_compared": len(others),
        "donated": [
            n for n in after if n.startswith("weight") and ".t1." in n and not torch.equal(donated_now[n], after[n])
        ],
    }


def write_in_place_while_dirty(case: Case) -> str:
    """Fill a table's host rows behind the cache's back without a flush; the error's text."""
    model = build(case, cached=True)
    train(model, case, steps=3)
    pool = next(cached_embeddings(model))
    pool.host.weights.fill_(1.0)
    try:
        # Rank-local: straight into the pool, so that no rank waits for another one's all-to-all.
        pool.flush()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def write_in_place_after_flush(case: Case) -> bool:
    """The same after a flush: the new rows are what the model reads."""
    model = build(case, cached=True)
    train(model, case, steps=3)
    flush(model)
    for pool in cached_embeddings(model):
        pool.host.weights.fill_(0.25)
    features, _ = next(batches(case, dist.get_rank(), 1, seed=8))
    pooled = model.module.embeddings(features).to_dict()
    return all(
        torch.equal(pooled[name], (jagged.lengths() * 0.25)[:, None].expand(-1, 16))
        for name, jagged in features.to_dict().items()
    )


def checkpoint_round_trip(case: Case, folder: str, save_cached: bool, load_cached: bool) -> list[str]:
    """Save with torch.distributed.checkpoint, load into another kind of model; what differed."""
    saved = build(case, cached=save_cached)
    train(saved, case)
    state = {"model": saved.state_dict(), "optimizer": saved.fused_optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    loaded = build(case, cached=load_cached)
    train(loaded, case, steps=3, seed=77)
    target = {"model": loaded.state_dict(), "optimizer": loaded.fused_optimizer.state_dict()}
    dcp.load(target, checkpoint_id=folder)
    loaded.load_state_dict(target["model"])
    loaded.fused_optimizer.load_state_dict(target["optimizer"])
    different = differences(snapshot(saved), snapshot(loaded))
    losses = train(saved, case, steps=10, seed=6), train(loaded, case, steps=10, seed=6)
    if losses[0] != losses[1]:
        different.append("losses after loading")
    return different + differences(snapshot(saved), snapshot(loaded))


def prefetch_ahead(case: Case, depth: int) -> list[str]:
    """Make batches resident ``depth`` steps before they train, as a pipeline does; what differs from
    stock."""
    stock, ours = build(case, cached=False), build(case, cached=True)
    train(stock, case)
    optimizer = torch.optim.SGD([p for n, p in ours.named_parameters() if "dense" in n], lr=0.05)
    embeddings = ours.module.embeddings
    waiting: list[Any] = []
    stream = batches(case, dist.get_rank())

    def push(batch: Any) -> None:
        context = embeddings.create_context()
        distributed = embeddings.input_dist(context, batch[0]).wait().wait()
        embeddings.prefetch(ctx=context, dist_input=distributed)
        waiting.append((context, distributed, batch[1]))

    for batch in itertools.islice(stream, depth):
        push(batch)
    while waiting:
        context, distributed, labels = waiting.pop(0)
        optimizer.zero_grad()
        pooled = embeddings.compute_and_output_dist(context, distributed).values()
        loss = ((ours.module.dense(pooled).squeeze(1) - labels) ** 2).mean()
        for batch in itertools.islice(stream, 1):  # between the forward and its backward
            push(batch)
        loss.backward()
        for parameter in ours.module.dense.parameters():  # outside of DDP's forward
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    different = [n for n in differences(snapshot(stock), snapshot(ours)) if "dense" not in n]
    late = sum(stats.critical_path_fills for stats in cache_stats(ours))
    return different + ([f"{late} critical-path fills"] if late else [])


def backward_twice(case: Case) -> str:
    """A second backward through the same forward; the error's text. One rank."""
    model = build(case, cached=True)
    features, _ = next(batches(case, 0, 1))
    pooled = model.module.embeddings(features).values()
    pooled.sum().backward(retain_graph=True)
    try:
        pooled.sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def abandoned_forward(case: Case) -> list[int]:
    """Pins while an output is alive, after it is dropped without a backward, and after a trained batch. One
    rank."""
    model = build(case, cached=True)
    features, labels = next(batches(case, 0, 1))
    loss = model(features, labels)
    pins = [_pins(model)]
    del loss
    gc.collect()
    pins.append(_pins(model))
    model(features, labels).backward()
    return [*pins, _pins(model)]


def convert_the_model(case: Case) -> dict[str, bool]:
    """What `DistributedModelParallel` does to a model when it moves it to its device: here, to doubles. Which
    parameters changed, and whether those of the tables are the host tier's rows, still."""
    model = build(case, cached=True)
    model.module.to(torch.float64)
    pools = list(cached_embeddings(model))
    memory = {rows.untyped_storage().data_ptr() for pool in pools for rows in pool.host.views.table_weights()}
    rows = {n: p for n, p in model.module.named_parameters() if ".t" in n}
    return {
        "dense": all(p.dtype == torch.float64 for n, p in model.module.named_parameters() if n not in rows),
        "rows": any(p.dtype == torch.float64 for p in rows.values()),
        "rows in the host tier": all(p.untyped_storage().data_ptr() in memory for p in rows.values()) and bool(rows),
    }


def bad_id(case: Case, feature: int, bad: int) -> str:
    """An id out of range on this rank; the error's text. Raised before any collective, on every rank
    alike."""
    model = build(case, cached=True)
    features, labels = next(batches(case, dist.get_rank(), 1))
    start = sum(features.length_per_key()[:feature])
    features.values()[start + 2] = bad
    try:
        model(features, labels)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def evaluate_and_count(case: Case) -> dict[str, Any]:
    """Counters and cached keys before and after evaluations, and whether their results equal the stock
    model's."""
    stock, ours = build(case, cached=False), build(case, cached=True)
    train(stock, case, steps=8)
    train(ours, case, steps=8)
    before = [(s.lookups, s.fills, s.evictions, s.write_backs) for s in cache_stats(ours)]
    kept = [pool.cache.state.map.key_of_slot.clone() for pool in cached_embeddings(ours)]
    equal = True
    for step in range(5):
        features, labels = next(batches(case, dist.get_rank(), 1, seed=50 + step))
        with torch.no_grad():
            equal &= bool(torch.equal(stock(features, labels), ours(features, labels)))
    after = [(s.lookups, s.fills, s.evictions, s.write_backs) for s in cache_stats(ours)]
    same = all(
        torch.equal(a, pool.cache.state.map.key_of_slot) for a, pool in zip(kept, cached_embeddings(ours), strict=True)
    )
    return {"equal": equal, "counted": before != after, "same_rows": same}


def device_budget(device_bytes: int) -> dict[str, Any]:
    """Device bytes that the pools of this rank report, and those that their tensors have, under a byte
    budget."""
    from tests.ranks import parity

    case = Case(dims=(16, 8, 16, 32), sharding=("row_wise", "table_wise", "column_wise", "table_wise"), overflow="grow")
    original = parity.CacheConfig
    try:
        parity.CacheConfig = lambda **_: CacheConfig(device_bytes=device_bytes, policy="lfu")  # type: ignore[assignment,misc]
        model = build(case, cached=True)
    finally:
        parity.CacheConfig = original  # type: ignore[misc]
    pools = list(cached_embeddings(model))
    allocated = 0
    for pool in pools:
        slot_map, scores = pool.cache.state.map, pool.cache.state.scores.of_slots()
        tensors = [*pool.slots.payload, slot_map.slot_of_key, slot_map.key_of_slot, slot_map.use_stamp, scores]
        allocated += sum(t.numel() * t.element_size() for t in tensors)
    return {"reported": sum(s.device_bytes for s in cache_stats(model)), "allocated": allocated, "pools": len(pools)}


def sharder_leaves_its_arguments_alone() -> bool:
    """The caller's fused_params are not changed by sharding."""
    fused_params = {"learning_rate": 0.5}
    sharder = CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=0.5), fused_params=fused_params)
    from tests.ranks import parity

    case = Case()
    torch.manual_seed(7)
    model = parity._Model(case)
    plan = parity.plan_sharding(model, [sharder], world_size=1, local_world_size=1, device="cpu")
    parity.DistributedModelParallel(
        model,
        env=parity.ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=[sharder],
    )
    return fused_params == {"learning_rate": 0.5}


@pytest.mark.parametrize("sharding", keep(["column_wise"], ["table_wise", "row_wise", "column_wise"]))
def test_loading_replaces_everything_cached(two_ranks: RankPool, sharding: str) -> None:
    for result in two_ranks.run(load_full_state, Case(sharding=sharding)):
        assert result == {"loaded": [], "losses": True, "later": []}


def test_loading_one_table_keeps_what_the_others_learned(two_ranks: RankPool) -> None:
    results = two_ranks.run(load_one_table, Case(sharding="row_wise", optimizer="sgd"))
    for result in results:
        assert result == {"changed": True, "others": [], "others_compared": 3, "donated": []}


def test_rows_written_behind_the_cache(two_ranks: RankPool) -> None:
    for message in two_ranks.run(write_in_place_while_dirty, Case()):
        assert message.startswith("CacheError")
        assert "embershard.flush(model)" in message
    assert two_ranks.run(write_in_place_after_flush, Case()) == [True, True]


@pytest.mark.parametrize(("save_cached", "load_cached"), [(True, False), (False, True), matrix(True, True)])
def test_checkpoints_are_stock_checkpoints(two_ranks, tmp_path, save_cached, load_cached) -> None:
    case = Case(sharding=("row_wise", "table_wise", "row_wise", "table_wise"), ratio=0.35)
    assert two_ranks.run(checkpoint_round_trip, case, str(tmp_path), save_cached, load_cached) == [[], []]


@pytest.mark.parametrize(("sharding", "depth"), combinations([("row_wise", 3)], ("table_wise", "row_wise"), (1, 2, 3)))
def test_prefetching_ahead_is_exact(two_ranks: RankPool, sharding: str, depth: int) -> None:
    """Rows are filled between another batch's forward and backward; no step waits for one."""
    case = Case(sharding=sharding, ratio=0.2 + 0.15 * depth)
    assert two_ranks.run(prefetch_ahead, case, depth) == [[], []]


#: Arguments of the cached sharder, and the kind of module.
WAYS_IN: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "bags": ({}, False, False),
    "sequences": ({}, True, False),
    "rows": ({"exchange": "rows"}, False, False),
    "data_parallel": ({"mode": "data_parallel"}, False, False),
    "hot rows": ({"hot_rows": {"t": torch.arange(9)}}, False, False),
    "ids": ({"ids": {"t": IdTable()}, "init_seed": 1}, False, False),
    "ids in sequences": ({"ids": {"t": IdTable()}, "init_seed": 1}, True, False),
    "feature processors": ({}, False, True),
}


@pytest.mark.parametrize("way", keep(["bags", "sequences", "feature processors"], WAYS_IN))
def test_two_dimensions_are_refused(two_ranks: RankPool, way: str) -> None:
    """Their sync averages slots by number, in which the copies have different rows."""
    for said in two_ranks.run(in_two_dimensions, *WAYS_IN[way]):
        assert said.startswith("ShardingError: CachedEmbedding")
        assert "2D parallelism" in said
        assert "the same slot of two caches has different rows" in said


def test_stock_tables_in_two_dimensions_are_not_refused(two_ranks: RankPool) -> None:
    """They come further: to torch, which takes no stand-in for a GPU."""
    for said in two_ranks.run(in_two_dimensions, None, False, False):
        assert said.startswith("TypeError: device() received")


def test_a_second_backward_is_refused(one_rank: RankPool) -> None:
    (message,) = one_rank.run(backward_twice, Case(ratio=0.5))
    assert message.startswith("CacheError")
    assert "second backward" in message


def test_a_forward_without_backward_gives_its_pins_back(one_rank: RankPool) -> None:
    assert one_rank.run(abandoned_forward, Case(ratio=0.5)) == [[1, 0, 0]]


@pytest.mark.parametrize("sequence", keep([False], [False, True]))
def test_converting_the_model_leaves_cached_rows_where_they_are(one_rank: RankPool, sequence: bool) -> None:
    (found,) = one_rank.run(convert_the_model, Case(sequence=sequence))
    assert found == {"dense": True, "rows": False, "rows in the host tier": True}


@pytest.mark.parametrize("sharding", keep(["row_wise"], ["table_wise", "row_wise"]))
@pytest.mark.parametrize("bad", keep([-1, 2000], [-1, 2000, 2**40]))
def test_an_id_out_of_range_is_named(two_ranks: RankPool, sharding: str, bad: int) -> None:
    for rank, message in enumerate(two_ranks.run(bad_id, Case(sharding=sharding), 2, bad)):
        assert message.startswith("IdOutOfRangeError"), message
        for part in (f"rank {rank}", "table 't2'", "feature 'f2'", f"id {bad} ", "position 2", "[0, 2000)"):
            assert part in message, message


def test_evaluation_reads_through_the_cache_and_leaves_it_alone(two_ranks: RankPool) -> None:
    for result in two_ranks.run(evaluate_and_count, Case(sharding="row_wise")):
        assert result == {"equal": True, "counted": False, "same_rows": True}


@pytest.mark.parametrize("device_bytes", keep([60_000], [60_000, 150_000]))
def test_a_byte_budget_is_kept_and_reported(two_ranks: RankPool, device_bytes: int) -> None:
    for result in two_ranks.run(device_budget, device_bytes):
        assert result["pools"] >= 2
        assert result["reported"] == result["allocated"] <= device_bytes
        assert result["allocated"] > 0.9 * device_bytes


def test_the_callers_arguments_stay_as_they_are(one_rank: RankPool) -> None:
    assert one_rank.run(sharder_leaves_its_arguments_alone) == [True]
