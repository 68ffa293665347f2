"""docs/torchrec.md: a restore in new processes goes on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

from embershard import (
    CacheConfig,
    CachedEmbeddingBagCollectionSharder,
    StockEmbeddingBagCollectionSharder,
    plan_sharding,
)
from tests.covering import keep, matrix
from tests.ranks.look_ahead import message_of
from tests.ranks.parity import Case, _constraints, _Model, batches, snapshot
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

CASE = Case(steps=16)
HALF = CASE.steps // 2
DENSE = {
    "adam": partial(torch.optim.Adam, lr=0.02),
    "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True),
}


class Training:
    """A model whose tables are trained by row-wise Adagrad, and its dense optimizer. Learning rates go by the step."""

    def __init__(self, dense: str, cached: bool) -> None:
        self.model, self.dense = build(dense, cached)
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, self.dense])

    def state(self) -> dict[str, Any]:
        """All that is saved."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def train(self, first: int, stop: int) -> list[float]:
        """Losses of the steps from ``first`` to ``stop``."""
        losses = []
        for step, (features, labels) in list(enumerate(batches(CASE, dist.get_rank())))[first:stop]:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.02 * (1 + step)
            self.optimizer.zero_grad()
            loss = self.model(features, labels)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses


def build(dense: str, cached: bool) -> tuple[DistributedModelParallel, KeyedOptimizerWrapper]:
    """The model and its dense optimizer."""
    torch.manual_seed(4)
    model, size = _Model(CASE), dist.get_world_size()
    apply_optimizer_in_backward(RowWiseAdagrad, model.embeddings.parameters(), {"lr": 0.1})
    sharder: Any = StockEmbeddingBagCollectionSharder()
    if cached:
        sharder = CachedEmbeddingBagCollectionSharder(CacheConfig(ratio=0.22))
    plan = plan_sharding(
        model, [sharder], world_size=size, local_world_size=size, device="cpu", constraints=_constraints(CASE, cached)
    )
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    parameters = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    return sharded, KeyedOptimizerWrapper(parameters, DENSE[dense])


def saved(folder: str, dense: str, cached: bool, with_dcp: bool) -> Any:
    """Losses and weights of a whole training, whose first half is saved."""
    training = Training(dense, cached)
    training.train(0, HALF)
    if with_dcp:
        checkpoint.save(training.state(), checkpoint_id=folder)
    else:
        torch.save(training.state(), Path(folder, f"rank_{dist.get_rank()}"))
    return training.train(HALF, CASE.steps), snapshot(training.model)


def restored(folder: str, dense: str, cached: bool, with_dcp: bool, is_initialised: bool) -> Any:
    """Losses and weights of the second half, after what was saved; or what loading it raises."""
    training = Training(dense, cached)
    if is_initialised:
        training.dense.init_state()

    def load() -> None:
        if with_dcp:
            state = training.state()
            checkpoint.load(state, checkpoint_id=folder)
        else:
            state = torch.load(Path(folder, f"rank_{dist.get_rank()}"), weights_only=False)
        training.load(state)

    if said := message_of(load):
        return said, {}
    return training.train(HALF, CASE.steps), snapshot(training.model)


def warm_up() -> tuple[bool, list[str]]:
    """Whether TorchRec's warm-up has a position after a step, and the parameters in its state dict."""
    model, dense = build("adam", cached=True)
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=5, value=0.1)]
    warming = WarmupOptimizer(CombinedOptimizer([model.fused_optimizer, dense]), stages, lr=0.1)
    warming.step()
    return warming._warmup_param in warming.state, list(warming.state_dict()["state"])


@pytest.fixture(scope="module", params=[matrix(1), 2], ids="{} ranks".format)
def pools(request: pytest.FixtureRequest) -> Iterator[tuple[RankPool, RankPool]]:
    """Ranks, and as many that did nothing before."""
    shared = request.getfixturevalue("one_rank" if request.param == 1 else "two_ranks")
    new = RankPool(request.param)
    yield shared, new
    new.close()


@pytest.mark.parametrize("dense", keep(["adam"], DENSE))
@pytest.mark.parametrize("with_dcp", [True, matrix(False)])
@pytest.mark.parametrize("cached", [True, matrix(False)])
def test_losses_after_a_restore_are_those_without(pools, dense, cached, with_dcp, tmp_path) -> None:
    ranks, others = pools
    case = (str(tmp_path), dense, cached, with_dcp)
    whole = ranks.run(saved, *case)
    again = others.run(restored, *case, True)
    for (losses, state), (expected, wanted) in zip(again, whole, strict=True):
        assert losses == expected
        assert [name for name in wanted if not torch.equal(state[name], wanted[name])] == []
    for (losses, _), (expected, _) in zip(others.run(restored, *case, False), whole, strict=True):
        assert losses != expected  # without the states, which only a file of torch.save misses aloud
        assert with_dcp or "Different parameter count" in losses


def test_torchrec_s_warm_up_of_several_optimizers_saves_no_position(one_rank: RankPool) -> None:
    """So the page's learning rates are a function of the step."""
    ((has_position, keys),) = one_rank.run(warm_up)
    assert has_position
    assert [name for name in keys if "warmup" in name] == []
