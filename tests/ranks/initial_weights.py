"""Initial weights from a counter on this rank: what the tables hold, and which ways of reading them make rows."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from embershard import CacheConfig, flush
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.data import DataConfig
from embershard.data.config import SyntheticConfig
from embershard.errors import CacheError
from embershard.sharding.torchrec import cached_embeddings
from embershard.training.config import TrainConfig
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig
from embershard.training.reports import TrainReport
from embershard.training.trainer import Trainer
from tests.ranks.parity import Case, Outcome, batches, build, differences, snapshot, train
from tests.ranks.planned import here, make_config
from tests.ranks.rounding import loss_rounding

SEED = 11
STEPS, GLOBAL_BATCH = 20, 240
CLOSE, CLOSE_IN_FP64 = (loss_rounding(STEPS, GLOBAL_BATCH, dtype) for dtype in (torch.float32, torch.float64))


def unmade(model: DistributedModelParallel) -> int:
    """Blocks of this rank that were not made."""
    return sum(pool.host._lazy.num_unmade for pool in cached_embeddings(model) if pool.host._lazy)


def whole_tables(case: Case) -> dict[str, Tensor]:
    """The weights of all tables, made at once without any model."""
    tables = {}
    for t, rows in enumerate(case.rows):
        dtype = torch.float16 if t in case.fp16 else torch.float32
        tables[f"t{t}"] = torch.empty(rows, case.dims[t], dtype=dtype)
        ShardWeights(f"t{t}", SEED, case.dims[t], -(rows**-0.5), rows**-0.5).write(tables[f"t{t}"])
    return tables


def wrong_shards(case: Case, seed: int = SEED) -> tuple[list[str], int]:
    """Shards of a new model, cached and stock, that are not the whole tables' parts; number of shards compared.
    ``seed``: of the model."""
    expected, wrong, compared = whole_tables(case), [], 0
    for cached in (True, False):
        state = build(dataclasses.replace(case, init_seed=seed), cached).state_dict()
        for name, value in state.items():
            parts = name.split(".")
            if parts[-1] != "weight" or parts[-2] not in expected:
                continue
            table = expected[parts[-2]]
            shards = [((0, 0), value)]
            if isinstance(value, ShardedTensor):
                shards = [(tuple(shard.metadata.shard_offsets), shard.tensor) for shard in value.local_shards()]
            for (row, column), shard in shards:
                part = table[row : row + shard.shape[0], column : column + shard.shape[1]]
                compared += 1
                if not torch.equal(shard.cpu(), part):
                    wrong.append(f"{'cached' if cached else 'stock'} {name} at {row}, {column}")
    return wrong, compared


def compare_lazy(case: Case) -> tuple[Outcome, int]:
    """Train stock and cached from a counter's weights; rows that the cached model never made are made for the final
    comparison. Also: blocks unmade at the end of the training."""
    case = dataclasses.replace(case, init_seed=SEED)
    stock = build(case, cached=False)
    expected, final = train(stock, case), snapshot(stock)
    model = build(case, cached=True)
    losses = train(model, case)
    left = unmade(model)
    found = snapshot(model)
    different = [f"loss {i}" for i, (a, b) in enumerate(zip(expected, losses, strict=True)) if a != b]
    return Outcome(different + differences(final, found), len(found), 0, []), left


def ways_of_reading(case: Case) -> dict[str, Any]:
    """Blocks unmade after each way of touching a new model, by way; and whether what was read was right."""
    case = dataclasses.replace(case, init_seed=SEED)
    expected = snapshot(build(case, cached=False))
    found: dict[str, Any] = {}

    def new(way: str) -> DistributedModelParallel:
        model = build(case, cached=True)
        found[f"{way}, before"] = unmade(model)
        return model

    model = new("evaluation")
    features, labels = next(batches(case, dist.get_rank()))
    with torch.no_grad():
        model(features, labels)
    found["evaluation"] = unmade(model)

    model = new("optimizer state")
    model.fused_optimizer.state_dict()
    dict(model.named_parameters())
    model.fused_optimizer.step()
    found["optimizer state"] = unmade(model)

    model = new("state dict")
    found["state dict is right"] = differences(expected, snapshot(model, states_first=False)) == []
    found["state dict"] = unmade(model)

    model = new("flush")
    flush(model)
    weights = [pool.host.weights.clone() for pool in cached_embeddings(model)]
    found["flush"] = unmade(model)
    model = new("weight")
    tables: Any = model.module.module if hasattr(model.module, "module") else model.module
    for table in tables.embeddings.embedding_bags.values():
        assert table.weight.shape[0] >= 0
    found["weight"] = unmade(model)
    again = [pool.host.weights for pool in cached_embeddings(model)]
    found["weight is right"] = all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))

    model = new("load of the dense part")
    dense = {name: value for name, value in model.state_dict().items() if "dense" in name}
    model = new("load of the dense part")
    model.load_state_dict(dense, strict=False)
    found["load of the dense part"] = unmade(model)
    found["load is right"] = differences(expected, snapshot(model)) == []
    return found


def checkpoint_of_a_lazy_model(case: Case) -> list[str]:
    """What differs between checkpoints of a model that made some rows and of one that made all at once, each trained
    alike; and after loading one of them into a third model."""
    case = dataclasses.replace(case, init_seed=SEED)
    models = [build(case, cached=True) for _ in range(3)]
    flush(models[1])
    assert [unmade(model) == 0 for model in models] == [False, True, False]
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    contents = []
    for number, model in enumerate(models[:2]):
        train(model, case, steps=3)
        dcp.save(model.state_dict(), checkpoint_id=Path(str(folder[0]), str(number)))
        contents.append(snapshot(model))
    different = differences(*contents)
    loaded = models[2].state_dict()
    dcp.load(loaded, checkpoint_id=Path(str(folder[0]), "0"))
    models[2].load_state_dict(loaded)
    weights = {name: value for name, value in contents[1].items() if name.startswith("weight")}
    found = {name: value for name, value in snapshot(models[2]).items() if name.startswith("weight")}
    return different + differences(weights, found)


def writes_before_rows_are_made(case: Case) -> tuple[str, str]:
    """What a forward says after parameters of a new model were overwritten in place, without and with a flush."""
    said = []
    for flushed in (False, True):
        model = build(dataclasses.replace(case, init_seed=SEED), cached=True)
        if flushed:
            flush(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "embedding" in name:
                    parameter.fill_(0.5)
        features, labels = next(batches(case, dist.get_rank()))
        try:
            model(features, labels)
            said.append("")
        except CacheError as error:
            said.append(str(error))
    return said[0], said[1]


def run_of_global_batches(precision: Literal["fp32", "fp64"] = "fp32") -> tuple[list[float], list[Tensor]]:
    """Losses and first dense parameters of the steps of global batches, on all ranks together."""
    config = make_config(
        None,
        data=DataConfig(synthetic=SyntheticConfig(num_samples=6000, scale=0.0005), num_workers=0, eval_fraction=0.0),
        cache=CacheConfig(ratio=0.3),
        train=TrainConfig(
            global_batch_size=GLOBAL_BATCH, max_steps=STEPS, log_every=1, device="cpu", precision=precision
        ),
        embedding_optimizer=EmbeddingOptimizerConfig(kind="rowwise_adagrad", lr=0.05),
        dense_optimizer=DenseOptimizerConfig(kind="adam", lr=0.002),
    )
    trainer = Trainer(config, here())
    dense = [parameter.detach().clone() for parameter in trainer.optimizers.dense_parameters.values()]
    losses = [report.loss for report in trainer.train() if isinstance(report, TrainReport)]
    trainer.close()
    return losses, dense
