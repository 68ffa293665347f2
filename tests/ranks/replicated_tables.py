"""Replicated tables beside cached ones, against stock TorchRec with all tables sharded; dyadic gradients."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from embershard.distributed import without_empty
from embershard.distributed.traffic import count_sent_bytes, sent_bytes
from tests.ranks import parity
from tests.ranks.parity import differences, snapshot
from tests.ranks.rows_exchange import Case, train_linear


@dataclass(frozen=True)
class Outcome:
    """``different``: names of weights and states that are not those of stock TorchRec, or differ between ranks."""

    different: list[str]
    num_compared: int


def compare(case: Case) -> Outcome:
    """Weights and states on all ranks."""
    models = [_build(case, cached) for cached in (False, True)]
    for model in models:
        train_linear(model, case)
    expected, found = (_of_all_ranks(model) for model in models)
    return Outcome(differences(expected, found) + _unequal(models[1]), len(found))


def compare_all(cases: list[Case]) -> list[Outcome]:
    """:func:`compare` for several cases in one call."""
    return [compare(case) for case in cases]


def move(case: Case, folder: Path) -> list[str]:
    """Train with copies, go on with shards, and with copies again; by checkpoints of torch. Then all train on."""
    copies, shards, back = _build(case, True), _build(case, False), _build(case, True)
    train_linear(copies, case)
    for number, (source, target) in enumerate([(copies, shards), (shards, back)]):
        dcp.save(without_empty(tensors_of(source)), checkpoint_id=folder / str(number))
        tensors = tensors_of(target)
        dcp.load(without_empty(tensors), checkpoint_id=folder / str(number))
        target.load_state_dict(tensors["model"])
        target.fused_optimizer.load_state_dict({"state": tensors["states"]})
    found = differences(_of_all_ranks(copies), _of_all_ranks(shards))
    for model in (copies, shards, back):
        train_linear(model, dataclasses.replace(case, steps=5))
    expected = _of_all_ranks(shards)
    return found + differences(expected, _of_all_ranks(copies)) + differences(expected, _of_all_ranks(back))


def bytes_of_a_step(case: Case) -> tuple[float, float, float, int]:
    """Bytes of ids, embeddings and gradients that this rank sent in a step; distinct rows that it looked up."""
    count_sent_bytes()
    model = _build(case, True)
    before = sent_bytes()
    features = train_linear(model, dataclasses.replace(case, steps=1))
    sent = sent_bytes() - before
    num_rows = sum(len(features[name].values().unique()) for name in case.features)
    return sent.ids, sent.embeddings, sent.gradients, num_rows


def _build(case: Case, cached: bool) -> DistributedModelParallel:
    return parity.build(case, cached, parity.LinearModel)


def tensors_of(model: DistributedModelParallel) -> dict[str, Any]:
    """Weights and states, for a checkpoint."""
    return {"model": model.state_dict(), "states": model.fused_optimizer.state_dict()["state"]}


def _of_all_ranks(model: DistributedModelParallel) -> dict[str, Tensor]:
    """Whole tables by name: replicated ones, and sharded ones that have one shard, have equal names."""
    found: dict[str, Tensor] = {}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, snapshot(model))
    for part in parts:
        found.update({name.removesuffix("/(0, 0)").removesuffix("/(0,)"): value for name, value in part.items()})
    return found


def _unequal(model: DistributedModelParallel) -> list[str]:
    """Names of whole tensors that differ between the ranks."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, snapshot(model))
    first = parts[0]
    whole = [name for name in first if not name.endswith(")")]
    return [
        f"{name} on rank {r}"
        for r, part in enumerate(parts)
        for name in whole
        if not torch.equal(first[name], part[name])
    ]
