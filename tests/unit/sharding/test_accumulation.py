"""Lookups that FBGEMM trains together: bit for bit those of one batch, for every way in which FBGEMM pools."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard import CachedEmbeddingBagCollectionSharder, IdTable, LookAheadPipeline, accumulating, plan_sharding
from embershard.distributed import Ranks
from embershard.errors import CacheError, ConfigError
from embershard.extras.accumulation import VARIABLE, HeldLookups
from embershard.sharding.torchrec.slots import SlotTable
from tests.covering import covering

pytestmark = pytest.mark.extra

ROWS, DIM, FEATURES = 40, 4, 3
OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
Piece = tuple[Tensor, Tensor, Tensor | None]  # lengths [F, B], ids, weights


def _slots(optimizer: str, pooling: PoolingMode) -> SlotTable:
    arguments = {"optimizer": OPTIMIZERS[optimizer], "learning_rate": 0.1, "eps": 1e-6}
    slots = SlotTable(DIM, [0, 0, 1], torch.device("cpu"), pooling, SparseType.FP32, arguments)
    slots.resize(ROWS)
    torch.manual_seed(3)
    slots.payload[0].data.copy_(torch.randn(ROWS + 1, DIM))
    return slots


def _stock(optimizer: str) -> SplitTableBatchedEmbeddingBagsCodegen:
    torch.manual_seed(3)
    tables = [(ROWS, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU)] * FEATURES
    tbe = SplitTableBatchedEmbeddingBagsCodegen(tables, optimizer=OPTIMIZERS[optimizer], learning_rate=0.1, eps=1e-6)
    tbe.init_embedding_weights_uniform(-1, 1)
    return tbe


def _piece(seed: int, samples: Sequence[int], is_weighted: bool) -> list[Tensor | None]:
    """Bag lengths per feature, of a batch whose features may differ in their samples; ids and weights."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [torch.randint(0, 4, (count,), generator=generator) for count in samples]
    count = int(sum(each.sum() for each in lengths))
    ids = torch.randint(1, ROWS, (count,), generator=generator)
    weights = torch.rand(count, generator=generator) if is_weighted else None
    return [lengths, ids, weights]  # type: ignore[list-item]


def _offsets(lengths: Sequence[Tensor]) -> Tensor:
    return torch.nn.functional.pad(torch.cat(list(lengths)).cumsum(0), (1, 0))


def _one(pieces: list[list[Any]]) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """All pieces as one batch, put together feature by feature."""
    lengths = [torch.cat(of_feature) for of_feature in zip(*(piece[0] for piece in pieces), strict=True)]
    parts = [[ids.split([int(n.sum()) for n in own]) for own, *rest in [piece] for ids in rest[:1]] for piece in pieces]
    ids = torch.cat([part[0][f] for f in range(FEATURES) for part in parts])
    if pieces[0][2] is None:
        return lengths, ids, None
    weights = [piece[2].split([int(n.sum()) for n in piece[0]]) for piece in pieces]
    return lengths, ids, torch.cat([own[f] for f in range(FEATURES) for own in weights])


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("optimizer", "pooling", "count"), covering([*OPTIMIZERS], ["sum", "mean", "weighted", "none"], [1, 2, 3, 8])
)
def test_one_update_of_several_lookups_is_that_of_one_batch(optimizer: str, pooling: str, count: int) -> None:
    mode = {"mean": PoolingMode.MEAN, "none": PoolingMode.NONE}.get(pooling, PoolingMode.SUM)
    pieces = [_piece(seed, [5 + seed % 2] * FEATURES, pooling == "weighted") for seed in range(count)]
    one, several = _slots(optimizer, mode), _slots(optimizer, mode)
    lengths, ids, weights = _one(pieces)
    expected = one(ids, _offsets(lengths), per_sample_weights=weights)
    held = HeldLookups(several)
    outputs = [held.forward(own, _offsets(bags), per_sample_weights=w) for bags, own, w in pieces]
    if mode == PoolingMode.NONE:  # by feature, and in it by piece
        sizes = [[int(n.sum()) for n in bags] for bags, *_ in pieces]
        parts = [output.split(own) for output, own in zip(outputs, sizes, strict=True)]
        found = torch.cat([part[f] for f in range(FEATURES) for part in parts])
    else:
        found = torch.cat(outputs)
    assert torch.equal(found, expected)
    gradients = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9))
    before = [rows.clone() for rows in several.payload]
    expected.backward(gradients)
    found.backward(gradients)
    assert all(map(torch.equal, before, several.payload)), "nothing trains before the end"
    held.train()
    assert all(map(torch.equal, one.payload, several.payload))
    assert not torch.equal(before[0], several.payload[0])
    assert one.tbe.iter.equal(several.tbe.iter)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])  # those that FBGEMM does so
def test_features_with_other_numbers_of_samples(optimizer: str) -> None:
    """As if the pieces were the batches of further ranks."""
    one, several = _stock(optimizer), _stock(optimizer)
    pieces = [_piece(seed, samples, False) for seed, samples in enumerate([(5, 2, 4), (1, 6, 3), (4, 4, 0)])]
    lengths, ids, _ = _one(pieces)
    sizes = [[len(piece[0][f]) for piece in pieces] for f in range(FEATURES)]
    expected = one(ids, _offsets(lengths), **{VARIABLE: sizes})
    held = HeldLookups(several)
    outputs = [
        held.forward(own, _offsets(bags), **{VARIABLE: [[len(each)] for each in bags]}) for bags, own, _ in pieces
    ]
    assert torch.equal(torch.cat(outputs), expected)
    gradients = torch.randint(-8, 9, expected.shape, generator=torch.Generator().manual_seed(9)) / 4
    expected.backward(gradients)
    torch.cat(outputs).backward(gradients)
    held.train()
    assert all(map(torch.equal, one.split_embedding_weights(), several.split_embedding_weights()))
    states = (itertools.chain(*tbe.split_optimizer_states()) for tbe in (one, several))
    assert all(itertools.starmap(torch.equal, zip(*states, strict=True)))


def test_weights_that_train_get_their_gradients() -> None:
    lengths, ids, weights = _piece(4, [6] * FEATURES, True)
    weights = weights.requires_grad_()  # type: ignore[union-attr]
    slots = _slots("sgd", PoolingMode.SUM)
    held = HeldLookups(slots)
    output = held.forward(ids, _offsets(lengths), per_sample_weights=weights)  # type: ignore[arg-type]
    gradient = torch.randn(output.shape)
    (found,) = torch.autograd.grad(output, weights, gradient)
    rows = slots.payload[0].detach()[ids].double()
    bag = torch.arange(6 * FEATURES).repeat_interleave(torch.cat(lengths))  # type: ignore[arg-type]
    of_bag = gradient.double().view(6, FEATURES, DIM).transpose(0, 1).reshape(-1, DIM)
    torch.testing.assert_close(found.double(), (rows * of_bag[bag]).sum(dim=1), rtol=1e-5, atol=1e-6)


def test_weights_that_train_need_a_cache() -> None:
    tbe = _stock("sgd")
    lengths, ids, weights = _piece(4, [6] * FEATURES, True)
    held = HeldLookups(tbe)
    output = held.forward(ids, _offsets(lengths), per_sample_weights=weights.requires_grad_())  # type: ignore[arg-type, union-attr]
    with pytest.raises(ConfigError, match="trained weights of ids"):
        output.sum().backward()


def test_a_second_backward_is_refused() -> None:
    slots = _slots("sgd", PoolingMode.SUM)
    lengths, ids, _ = _piece(4, [6] * FEATURES, False)
    held = HeldLookups(slots)
    output = held.forward(ids, _offsets(lengths))  # type: ignore[arg-type]
    output.sum().backward(retain_graph=True)
    with pytest.raises(CacheError, match="second backward"):
        output.sum().backward()


def _trained_on_ids(updates: Sequence[Sequence[Sequence[int]]], together: int) -> dict[str, Tensor]:
    """State of a table of ids behind updates of one batch or more; the pipeline makes `together` known at once."""
    table = EmbeddingBagConfig(name="users", num_embeddings=480, embedding_dim=4, feature_names=["user"])
    bags = torch.nn.ModuleDict({"bags": EmbeddingBagCollection([table], device=torch.device("meta"))})
    _apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.5})
    sharders = [CachedEmbeddingBagCollectionSharder(init_seed=1, ids={"users": IdTable()})]
    plan = plan_sharding(bags, sharders, world_size=1, local_world_size=1, device="cpu")
    model = DistributedModelParallel(bags, device=torch.device("cpu"), plan=plan, sharders=sharders)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    pipeline = LookAheadPipeline(
        model,
        optimizer,
        torch.device("cpu"),
        lookahead=6,
        features=lambda batch: {"bags": batch.sparse_features},
        micro_batches=together,
    )
    batches = (
        Batch(
            torch.zeros(len(ids), 0),
            KeyedJaggedTensor(["user"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64)),
            torch.zeros(len(ids)),
        )
        for update in updates
        for ids in update
    )
    for update in updates:
        with accumulating(model) if together > 1 else nullcontext():
            for _ in update:
                with pipeline.step(batches) as batch:
                    model.module["bags"](batch.sparse_features).values().sum().backward()
    pipeline.detach()
    return {name: torch.cat([s.tensor for s in each.local_shards()]) for name, each in model.state_dict().items()}


@pytest.mark.slow
def test_the_last_update_of_the_data_may_have_fewer_batches(ranks: Ranks) -> None:
    """Ids of what is left get rows together; they equal those of the same updates, each of one batch."""
    updates = [[[5, 2**40], [7, 5], [9, 11]], [[2**41, 7], [13, 5]]]
    whole = [[[one for ids in update for one in ids]] for update in updates]
    found, expected = _trained_on_ids(updates, 3), _trained_on_ids(whole, 1)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    with pytest.raises(CacheError, match="2 batches in one update, and the ids of 3 got rows together"):
        _trained_on_ids([updates[0][:2], [updates[0][2], *updates[1]]], 3)
