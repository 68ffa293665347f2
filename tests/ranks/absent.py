"""Training where a rank has no sample (B = 0) in some batches, beside stock TorchRec, as one rank of a pool."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embershard.extras.hot_cold.mode import announce_hot_batches
from tests.ranks import parity
from tests.ranks.parity import LinearModel, differences, snapshot
from tests.ranks.rows_exchange import Case, batches, means_by_length, train_linear


def compare_all(cases: list[Case]) -> list[list[str]]:
    """Whole weights and states that are not those of stock TorchRec with table-wise tables, for each case.

    Initial weights from a seed depend on no placement, and neither do the states of an optimizer by elements.
    """
    expected: dict[Case, dict[str, Tensor]] = {}
    found = []
    with means_by_length():
        for case in cases:
            of_samples = {name: getattr(case, name) for name in ("mean", "hot", "hot_every")}
            stock = replace(cases[0], exchange="pooled", sharding="table_wise", mode="sharded", **of_samples)
            if stock not in expected:
                expected[stock] = _trained(stock, False)
            found.append(differences(expected[stock], _trained(case, True)))
    return found


def _trained(case: Case, cached: bool) -> dict[str, Tensor]:
    model = parity.build(case, cached, LinearModel)
    announce_hot_batches(model)
    train_linear(model, case)
    return whole_tables(model)


def whole_tables(model: Any) -> dict[str, Tensor]:
    """Weights and states of the tables, put together from the shards of all ranks."""
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, snapshot(model))
    found: dict[str, Tensor] = {}
    for name, rows in (part for of_rank in shards for part in of_rank.items()):
        place = re.fullmatch(r"(weight|state)/.*\.t(\d)\.\w+(?:/\((\d+), (\d+)\))?", name)
        if place is not None and rows.numel():
            kind, table, row, column = place[1], int(place[2]), int(place[3] or 0), int(place[4] or 0)
            whole = found.setdefault(f"{kind} of t{table}", torch.full((parity.ROWS[table], 16), torch.inf))
            whole[row : row + rows.shape[0], column : column + rows.shape[1]] = rows
    return found


def evaluate(cases: list[Case]) -> list[list[str]]:
    """The batches of which embeddings without gradients are not those of stock TorchRec with table-wise tables, for
    each case. Weights are rounded, so that sums are not."""
    different = []
    with means_by_length(), torch.no_grad():
        for case in cases:
            plain = replace(case, exchange="pooled", sharding="table_wise")
            models = [parity.build(plain, False, LinearModel), parity.build(case, True, LinearModel)]
            for model in models:
                for value in model.state_dict().values():
                    for shard in value.local_shards() if isinstance(value, ShardedTensor) else ():
                        shard.tensor.copy_((shard.tensor * 256).round() / 256)
            announce_hot_batches(models[1])
            found = [[model(*batch) for batch in batches(case)] for model in models]
            different.append([f"batch {n}" for n, both in enumerate(zip(*found, strict=True)) if both[0] != both[1]])
    return different


def error_of_training(case: Case, cached: bool) -> str:
    """The first line of the error that the first step raises on this rank."""
    try:
        train_linear(parity.build(case, cached, LinearModel), replace(case, steps=1))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""
