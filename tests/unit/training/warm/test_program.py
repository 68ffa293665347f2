"""`embershard.load_from`: the models of TorchRec programs begin with trained ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import (
    CacheConfig,
    CachedEmbeddingBagCollectionSharder,
    StockEmbeddingBagCollectionSharder,
    load_from,
    plan_sharding,
)
from embershard.errors import ConfigError, InvalidCheckpointError
from tests.unit.training.warm.models import run_of, write_samples
from tests.unit.training.warm.test_warm_starts import rows_of, train

pytestmark = pytest.mark.extra

CPU = torch.device("cpu")
ROWS = {"user": 60, "item": 40, "shop": 30}


class Program(nn.Module):
    """Tables, and a layer over them."""

    def __init__(self, rows: dict[str, int], width: int = 4) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{name}", num_embeddings=count, embedding_dim=8, feature_names=[name])
            for name, count in rows.items()
        ]
        self.bags = EmbeddingBagCollection(tables, device=torch.device("meta"))
        self.over = nn.Linear(8 * len(rows), width)

    def forward(self, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        outputs = self.over(self.bags(batch).values())
        return outputs.square().mean(), outputs


def program(
    rows: dict[str, int] = ROWS,
    *,
    cached: bool = True,
    optimizer: Any = RowWiseAdagrad,
    cache: CacheConfig = CacheConfig(ratio=0.5),  # noqa: B008
    init_seed: int | None = None,
    **sizes: int,
) -> tuple[DistributedModelParallel, KeyedOptimizerWrapper]:
    model = Program(rows, **sizes)
    _apply_optimizer_in_backward(optimizer, model.bags.parameters(), {"lr": 0.1})
    sharders: list[Any] = [
        CachedEmbeddingBagCollectionSharder(cache, init_seed=init_seed)
        if cached
        else StockEmbeddingBagCollectionSharder()
    ]
    plan = plan_sharding(model, sharders, world_size=1, local_world_size=1, device=CPU)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(model, env=env, device=CPU, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())), lambda given: torch.optim.Adam(given, lr=0.1)
    )
    return sharded, dense


def step(model: DistributedModelParallel, dense: KeyedOptimizerWrapper, count: int = 3) -> None:
    for number in range(count):
        ids = torch.arange(3 * len(ROWS)) + number
        loss, _ = model(KeyedJaggedTensor(list(ROWS), ids, lengths=torch.ones_like(ids)))
        dense.zero_grad()
        loss.backward()
        dense.step()


def tensors(model: DistributedModelParallel, dense: KeyedOptimizerWrapper) -> dict[str, Tensor]:
    found: dict[str, Any] = dict(model.state_dict())
    found |= {n: v for states in model.fused_optimizer.state_dict()["state"].values() for n, v in states.items()}
    for parameter, states in dense.state_dict()["state"].items():
        found |= {f"{parameter}.{name}": value for name, value in states.items()}
    return {
        name: (value.local_shards()[0].tensor if hasattr(value, "local_shards") else value).detach().clone()
        for name, value in found.items()
    }


def save(model: DistributedModelParallel, dense: KeyedOptimizerWrapper, folder: Path) -> dict[str, Tensor]:
    state = {
        "model": model.state_dict(),
        "embedding_optimizer": model.fused_optimizer.state_dict()["state"],
        "dense_optimizer": dense.state_dict()["state"],
    }
    dcp.save(state, checkpoint_id=folder)
    return tensors(model, dense)


@pytest.mark.smoke
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "stock"])
def test_a_program_begins_with_another_one(ranks, tmp_path, cached):
    trained = program()
    step(*trained)
    old = save(*trained, tmp_path)
    new = program(cached=cached)
    said = load_from(new[0], tmp_path, dense_optimizer=new[1], allow_unverified=True)
    assert str(said).startswith(f"From {tmp_path}: 3 tables taken; 2 layers taken.")
    found = tensors(*new)
    assert found.keys() == old.keys()
    assert all(torch.equal(found[name], old[name]) for name in old)
    step(*trained)
    step(*new)
    assert all(torch.equal(a, b) for a, b in zip(tensors(*trained).values(), tensors(*new).values(), strict=True))


def test_names_and_sizes_may_differ(ranks, tmp_path):
    trained = program()
    step(*trained)
    old = save(*trained, tmp_path)
    rows = {"user": 80, "product": 40, "shop": 30}
    new = program(rows)
    before = tensors(*new)
    said = load_from(new[0], tmp_path, renames={"t_item": "t_product"}, without=["over"], allow_unverified=True)
    fates = {entry.name: entry.fate for entry in said.matching.entries}
    assert fates == {
        "t_user": "grown", "t_product": "renamed", "t_shop": "taken", "over.weight": "new", "over.bias": "new"
    }  # fmt: skip
    found = tensors(*new)
    bags = "bags.embedding_bags.{}.weight"
    assert torch.equal(found[bags.format("t_product")], old[bags.format("t_item")])
    assert torch.equal(found[bags.format("t_user")][:60], old[bags.format("t_user")])
    assert torch.equal(found[bags.format("t_user")][60:], before[bags.format("t_user")][60:])
    assert torch.equal(found["t_product.momentum1"], old["t_item.momentum1"])
    assert torch.equal(found["over.weight"], before["over.weight"])


def test_states_that_are_saved_under_other_names_are_told_to_be_missing(ranks, tmp_path):
    trained = program()
    step(*trained)
    states = {
        "embedding_optimizer": trained[0].fused_optimizer.state_dict(),
        "dense_optimizer": trained[1].state_dict(),
    }
    dcp.save({"model": trained[0].state_dict(), **states}, checkpoint_id=tmp_path)
    new = program()
    said = load_from(new[0], tmp_path, dense_optimizer=new[1], allow_unverified=True)
    assert "It has no states of optimizers: they begin at 0." in str(said)
    assert not tensors(*new)["t_item.momentum1"].any()


def test_from_a_run(ranks, tmp_path):
    old = train(run_of(write_samples(tmp_path / "samples.parquet")), ranks, tmp_path)
    new = program()
    said = load_from(new[0], tmp_path, without=["over"])
    assert {entry.fate for entry in said.matching.entries if entry.kind == "table"} == {"taken"}
    for table in ("t_user", "t_item", "t_shop"):
        assert torch.equal(tensors(*new)[f"bags.embedding_bags.{table}.weight"], old[rows_of(table)])


def test_refusals_change_nothing(ranks, tmp_path):
    trained = program()
    step(*trained)
    save(*trained, tmp_path)
    others = program(width=5), program({"user": 20, "item": 40, "shop": 30}), program(optimizer=torch.optim.SGD)
    layer = r"dimension 0: got 5 entries, needed 4: what .* sizes back, or without=\[\"over\.weight\"\] begins it anew"
    problems = rf"layer over\.weight +4 x 24 +5 x 24 +{layer}", "40 rows have no place", "no states"
    for new, said in zip(others, problems, strict=True):
        before = tensors(*new)
        with pytest.raises(ConfigError, match=said):
            load_from(new[0], tmp_path, allow_unverified=True)
        after = tensors(*new)
        assert all(torch.equal(before[name], after[name]) for name in before)
    new = program()
    sgd = KeyedOptimizerWrapper(dict(new[0].module.over.named_parameters()), lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(ConfigError, match=r"optimizer dense_optimizer .*exp_avg.* no states"):
        load_from(new[0], tmp_path, dense_optimizer=sgd, allow_unverified=True)
    with pytest.raises(ConfigError, match=r"renames=\{\"a\": \"b\"\} .* has no 'a'"):
        load_from(new[0], tmp_path, renames={"a": "b"}, allow_unverified=True)
    with pytest.raises(InvalidCheckpointError, match=r"no checkpoint with a manifest.*allow_unverified=True"):
        load_from(new[0], tmp_path)
    with pytest.raises(ConfigError, match="KeyedOptimizerWrapper"):
        load_from(new[0], tmp_path, dense_optimizer=torch.optim.Adam(new[0].parameters()))  # type: ignore[arg-type]
