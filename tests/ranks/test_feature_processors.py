"""Feature processors work with the cached sharder inside of TorchRec's sharder for them."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from embershard import (
    CacheConfig,
    CachedEmbeddingBagCollectionSharder,
    LookAheadPipeline,
    accumulating,
    cache_stats,
    plan_sharding,
)
from embershard.errors import EmbershardError
from embershard.extras.accumulation import HeldLookups
from embershard.sharding.torchrec import StockEmbeddingBagCollectionSharder
from tests.covering import keep, matrix
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

FEATURES, ROWS, MOST_IDS, SAMPLES = ["viewed", "bought"], 300, 4, 16
CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{f}", num_embeddings=ROWS, embedding_dim=8, feature_names=[f]) for f in FEATURES
        ]
        bags = EmbeddingBagCollection(tables, is_weighted=True, device=torch.device("meta"))
        weights = PositionWeightedModuleCollection(dict.fromkeys(FEATURES, MOST_IDS), device=CPU)
        self.bags = FeatureProcessedEmbeddingBagCollection(bags, weights)
        self.over = nn.Linear(8 * len(FEATURES), 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.over(self.bags(batch.sparse_features).values()).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels), logits


def make_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    lengths = torch.randint(0, MOST_IDS + 1, (len(FEATURES) * SAMPLES,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    labels = torch.randint(0, 2, (SAMPLES,), generator=generator).float()
    return Batch(torch.zeros(SAMPLES, 0), KeyedJaggedTensor(FEATURES, ids, lengths=lengths), labels)


def built(sharder: Any, plan: ShardingPlan | None, sharding: str) -> tuple[Any, CombinedOptimizer, ShardingPlan]:
    """Return the sharded model, the optimizer of all of it, and the plan."""
    torch.manual_seed(0)
    model = Model()
    apply_optimizer_in_backward(RowWiseAdagrad, model.bags._embedding_bag_collection.parameters(), {"lr": 0.5})
    size = dist.get_world_size()
    constraints = {f"t_{feature}": ParameterConstraints(sharding_types=[sharding]) for feature in FEATURES}
    plan = plan or plan_sharding(
        model, [sharder], world_size=size, local_world_size=size, device=CPU, constraints=constraints
    )
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    adam = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adam(parameters, lr=0.05))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, adam]), plan


def trained(sharder: Any, plan: ShardingPlan | None, sharding: str, steps: int, pipelined: bool) -> Any:
    """Return losses, weights of all of this rank, the plan, and the evictions."""
    sharded, optimizer, plan = built(sharder, plan, sharding)
    batches, losses = map(make_batch, range(steps)), []
    pipeline = LookAheadPipeline(sharded, optimizer, CPU, lookahead=4) if pipelined else None
    for _ in range(steps):
        with nullcontext(next(batches)) if pipeline is None else pipeline.step(batches) as batch:
            optimizer.zero_grad()
            loss, _ = sharded(batch)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    if pipeline is not None:
        pipeline.detach()
    evictions = [table.evictions for table in cache_stats(sharded)]
    state = {name: _own(value) for name, value in sharded.state_dict().items()}
    return losses, state, plan, evictions


def cached_and_stock(sharding: str, steps: int, pipelined: bool) -> dict[str, Any]:
    """Train with caches and without, under one plan. Collective."""
    config = CacheConfig(ratio=0.4, policy="lookahead" if pipelined else None)
    ours = _with(CachedEmbeddingBagCollectionSharder(config))
    losses, state, plan, evictions = trained(ours, None, sharding, steps, pipelined)
    stock_plan = copy.deepcopy(plan)
    for tables in stock_plan.plan.values():
        for table in tables.values():  # type: ignore[attr-defined]
            table.compute_kernel, table.cache_params = "fused", None
    stock = _with(EmbeddingBagCollectionSharder())
    stock_losses, stock_state, _, _ = trained(stock, stock_plan, sharding, steps, pipelined=False)
    return {
        "same losses": losses == stock_losses,
        "different": [name for name in stock_state if not torch.equal(state[name], stock_state[name])],
        "evictions": evictions,
        "weights of positions": [value.unique().numel() for name, value in state.items() if "position_w" in name],
    }


def accumulated(sharding: str, updates: int, weights_train: bool) -> list[str]:
    """Weights that differ, by more than rounding, between updates of two batches and stock ones of both as one."""
    ours, optimizer, plan = built(_with(CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=0.4))), None, sharding)
    for tables in (stock_plan := copy.deepcopy(plan)).plan.values():
        for table in tables.values():  # type: ignore[attr-defined]
            table.compute_kernel, table.cache_params = "fused", None
    stock, stock_optimizer, _ = built(_with(EmbeddingBagCollectionSharder()), stock_plan, sharding)
    no_gradients = mock.patch.object(HeldLookups, "weight_gradients", lambda self, held: torch.zeros(held.ids.numel()))
    for update in range(updates):
        pair = [make_batch(2 * update), make_batch(2 * update + 1)]
        optimizer.zero_grad()
        with nullcontext() if weights_train else no_gradients, accumulating(ours):
            for batch in pair:
                (ours(batch)[0] / 2).backward()
        optimizer.step()
        stock_optimizer.zero_grad()
        stock(_joined(pair))[0].backward()
        stock_optimizer.step()
    states = [{name: _own(value) for name, value in model.state_dict().items()} for model in (ours, stock)]
    return [name for name, value in states[0].items() if not torch.allclose(value, states[1][name], atol=2e-5)]


def _joined(pair: list[Batch]) -> Batch:
    parts = [batch.sparse_features[feature] for feature in FEATURES for batch in pair]
    ids, lengths = torch.cat([part.values() for part in parts]), torch.cat([part.lengths() for part in parts])
    labels = torch.cat([batch.labels for batch in pair])
    return Batch(torch.zeros(len(labels), 0), KeyedJaggedTensor(FEATURES, ids, lengths=lengths), labels)


def refusals() -> list[str]:
    """What modes that cut bags say: of plans, and under another planner's plan at the first batch."""
    said = []
    rows = {f"t_{feature}": torch.arange(9) for feature in FEATURES}
    plan = trained(_with(CachedEmbeddingBagCollectionSharder()), None, "table_wise", 1, pipelined=False)[2]
    for arguments in ({"exchange": "rows"}, {"hot_rows": rows}, {"mode": "data_parallel"}):
        sharder = _with(CachedEmbeddingBagCollectionSharder(**arguments))  # type: ignore[arg-type]
        for given in (None, plan):
            try:
                trained(sharder, given, "row_wise", 1, pipelined=False)
            except EmbershardError as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def _with(sharder: EmbeddingBagCollectionSharder) -> FeatureProcessedEmbeddingBagCollectionSharder:
    return FeatureProcessedEmbeddingBagCollectionSharder(sharder)


def weight_gradients(steps: int, weights_train: bool) -> dict[str, Any]:
    """Weighted bags whose weights have gradients, or have none, behind caches and in stock TorchRec: what differs."""
    found = []
    for cached in (True, False):
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(name=f"t_{f}", num_embeddings=ROWS, embedding_dim=8, feature_names=[f]) for f in FEATURES
        ]
        bags = EmbeddingBagCollection(tables, is_weighted=True, device=torch.device("meta"))
        apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.5})
        sharder = (
            CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=0.4))
            if cached
            else StockEmbeddingBagCollectionSharder()
        )
        size = dist.get_world_size()
        plan = plan_sharding(bags, [sharder], world_size=size, local_world_size=size, device=CPU)
        model = DistributedModelParallel(bags, device=CPU, plan=plan, sharders=[sharder])
        gradients = list[Tensor | None]()
        for step in range(steps):
            features = make_batch(step).sparse_features
            weights = torch.rand(features.values().numel(), generator=torch.Generator().manual_seed(step))
            weights.requires_grad_(weights_train)
            given = KeyedJaggedTensor(FEATURES, features.values(), lengths=features.lengths(), weights=weights)
            (model(given).values() ** 2).sum().backward()
            gradients.append(weights.grad)
        states = model.fused_optimizer.state_dict()["state"]
        rows = {name: _own(value) for name, value in model.state_dict().items()}
        rows |= {f"{name} {key}": _own(value) for name, state in states.items() for key, value in state.items()}
        found.append((gradients, rows))
    (gradients, rows), (stock_gradients, stock_rows) = found
    return {
        "gradients": [gradient is not None for gradient in gradients],
        "stock has them": [gradient is not None for gradient in stock_gradients],
        "different": [name for name in stock_rows if not torch.equal(rows[name], stock_rows[name])]
        + [
            f"gradient {step}"
            for step, (own, stock) in enumerate(zip(gradients, stock_gradients, strict=True))
            if own is not None and stock is not None and not torch.equal(own, stock)
        ],
        "compared": len(stock_rows),
    }


def _own(value: Any) -> Tensor:
    found: Tensor = value.local_shards()[0].tensor if hasattr(value, "local_shards") and value.local_shards() else value
    return found.clone() if isinstance(found, Tensor) and not hasattr(found, "local_shards") else torch.empty(0)


@pytest.mark.parametrize(
    ("ranks", "sharding", "pipelined"),
    [matrix("one_rank", "table_wise", True), matrix("two_ranks", "table_wise", False), ("two_ranks", "row_wise", True)],
)
def test_weights_of_positions_train_as_in_torchrec(request, ranks, sharding, pipelined) -> None:
    pool: RankPool = request.getfixturevalue(ranks)
    for found in pool.run(cached_and_stock, sharding, 20, pipelined):
        assert found["same losses"]
        assert found["different"] == []
        assert found["weights of positions"] == [MOST_IDS] * 2  # they begin at 1
        assert sum(found["evictions"]) > 0


@pytest.mark.parametrize("weights_train", keep([True], [False, True]))
@pytest.mark.parametrize("ranks", keep(["two_ranks"], ["one_rank", "two_ranks"]))
def test_weights_of_ids_have_the_gradients_of_torchrec(request, ranks, weights_train) -> None:
    """Several ranks exchange weights without their gradients: TorchRec has none there, either."""
    pool: RankPool = request.getfixturevalue(ranks)
    for found in pool.run(weight_gradients, 6, weights_train):
        assert found["different"] == []
        assert found["compared"] == 4
        assert found["gradients"] == found["stock has them"] == [weights_train and ranks == "one_rank"] * 6


@pytest.mark.extra
@pytest.mark.parametrize("sharding", keep(["row_wise"], ["table_wise", "row_wise"]))
def test_weights_of_positions_train_in_updates_of_several_batches(two_ranks: RankPool, sharding: str) -> None:
    assert two_ranks.run(accumulated, sharding, 6, True) == [[], []]
    assert any("position_w" in name for name in two_ranks.run(accumulated, sharding, 6, False)[0])


def test_modes_that_cut_bags_refuse_them(two_ranks: RankPool) -> None:
    for said in two_ranks.run(refusals):
        plans = [text for text in said if text.startswith("ShardingError: FeatureProcessed")]
        assert [text.rpartition("Leave ")[2] for text in plans] == [
            'exchange="rows" out',
            "hot_rows out",
            'mode="data_parallel" out',
        ]
        others = [text for text in said if text not in plans]
        assert [text.partition(": ")[0] for text in others] == ["ConfigError"] * 3
        assert "exchange of distinct rows: the tables of ['viewed', 'bought'] are weighted" in others[0]
        assert "hot rows on every rank: the tables of ['viewed', 'bought'] are weighted" in others[1]
