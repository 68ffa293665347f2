"""Chains of small checkpoints: a whole one and deltas, of one rank."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embershard.distributed import Manifest, Ranks, save_checkpoint
from embershard.distributed.checkpoint.manifest import Parent
from embershard.distributed.checkpoint.rows_file import ChangedShard
from embershard.distributed.checkpoint.save import NewLink

ROWS, DIM = 50, 4
NAMES = ("model.t.weight", "states.t.momentum")


class Table:
    """Rows in two shards of columns, with a state per row and shard, and a dense tensor."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self.random = torch.Generator().manual_seed(seed)
        self.weights, self.states = torch.randn(ROWS, DIM, generator=self.random), torch.zeros(2 * ROWS)
        self.dense = torch.zeros(3)

    def tensors(self) -> dict[str, Any]:
        return {"model": {"t.weight": self.weights, "dense": self.dense}, "states": {"t.momentum": self.states}}

    def train(self) -> list[Tensor]:
        """Change some rows; return those of each shard."""
        self.dense += 1
        found = []
        for shard in range(2):
            keys = torch.randint(ROWS, (20,), generator=self.random).unique()
            self.weights[keys, 2 * shard : 2 * shard + 2] += torch.randn(len(keys), 2, generator=self.random)
            self.states[keys + ROWS * shard] += 1
            found.append(keys)
        return found

    def named(self) -> dict[str, Tensor]:
        """All tensors, as a checkpoint names them."""
        return {NAMES[0]: self.weights, NAMES[1]: self.states, "model.dense": self.dense}

    def save(
        self, folder: Path, ranks: Ranks, step: int, parent: Parent | None, keys: list[Tensor], keep_last: int = 99
    ) -> Parent:
        """Save rows `keys` of each shard as a delta of `parent`, or everything; return what the next one follows."""
        token, tensors = f"{self._seed}.{step}", self.tensors()
        link = NewLink(token)
        if parent is not None:
            link = NewLink(token, parent, tuple(self.changed(shard, keys[shard]) for shard in range(2)))
            tensors = {"model": {"dense": self.dense}}
        save_checkpoint(folder, step, tensors, {}, ranks, keep_last=keep_last, run_id="run", link=link)
        return Parent(step, token)

    def changed(self, shard: int, keys: Tensor) -> ChangedShard:
        """Rows of a shard, as they are now."""
        weights, states = self.weights[:, 2 * shard : 2 * shard + 2].clone(), self.states.view(2, ROWS)[shard].clone()
        read = partial(_rows, [weights, states])
        return ChangedShard(NAMES, ((0, 2 * shard), (ROWS * shard,)), (weights, states), keys, read)


def _rows(tensors: list[Tensor], keys: Tensor) -> list[Tensor]:
    return [tensor[keys] for tensor in tensors]


def save_chain(
    folder: Path, ranks: Ranks | None, steps: int = 4, seed: int = 0, full_every: int = 99, keep_last: int = 99
) -> dict[int, dict[str, Tensor]]:
    """Save step 1 whole and those behind as deltas; return the tensors of each step, by name. None: save nothing."""
    table, parent, saved = Table(seed), None, {}
    for step in range(1, steps + 1):
        keys = table.train()
        if ranks is not None:
            follows = parent if (step - 1) % full_every else None
            parent = table.save(folder, ranks, step, follows, keys, keep_last)
        saved[step] = {name: tensor.clone() for name, tensor in table.named().items()}
    return saved


def rewritten(checkpoint: Path, **changes: Any) -> None:
    """Write the manifest again with other values, and the right checksum."""
    manifest = dataclasses.replace(Manifest.read(checkpoint), **changes)
    (checkpoint / "manifest.json").write_text(manifest.text())
