"""A life of a real training that publishes, as ranks of a pool of processes: it is killed (SIGKILL, all ranks at once)
before a file operation of a publication or a checkpoint, or behind a step. Before each publication every rank writes
its whole state down, not only what was touched: what a replica must have.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embershard.distributed import CheckpointConfig, PublishConfig
from embershard.distributed.checkpoint.folder import checkpoint_at
from embershard.distributed.publish.published import Publication
from embershard.distributed.tensors_file import safetensors
from embershard.extras.publications import write
from embershard.extras.publications.part import Publisher
from embershard.extras.serving import write as export_module
from embershard.sharding.torchrec import cache_stats, cached_embeddings, without_flushes
from embershard.training.checkpoint.identity import ORDER
from embershard.training.checkpoint.resume import resume_run
from embershard.training.config import RunConfig
from embershard.training.trainer import Trainer
from tests.faults.rank_kills import KILLS
from tests.ranks import resharding
from tests.ranks.planned import here
from tests.ranks.publications import with_fault
from tests.ranks.resharding import Layout

STEPS = 14
RATE = "embedding_optimizer.lr"


@dataclass(frozen=True)
class Life:
    """How a life of a run trains, and where it ends.

    Attributes:
        rate: learning rate of the tables.
        killed_by: the rank that kills all of them; None: the life ends by itself.
        operation: before which it does so, counted from 0 in its folders; else behind `step`.
        broken: what is done wrong; see `tests.ranks.publications.with_fault`.
    """

    layout: Layout
    ranks: int = 1
    rate: float = 0.1
    dtype: str = "fp32"
    every: int = 2
    save_every: int = 4
    base_every: int | None = None
    keep_last: int = 99
    killed_by: int | None = None
    operation: int | None = None
    step: int | None = None
    broken: str = ""


def config_of(root: Path, life: Life) -> RunConfig:
    """The settings of a life of the run in `root`."""
    config = resharding.config_of(replace(life.layout, steps=STEPS), root)
    where = str(root / "published")
    publish = PublishConfig(where, every_steps=life.every, base_every=life.base_every, dtype=life.dtype)  # type: ignore[arg-type]
    return replace(
        config,
        embedding_optimizer=replace(config.embedding_optimizer, lr=life.rate),
        checkpoint=CheckpointConfig(every_steps=life.save_every, keep_last=life.keep_last),
        publish=publish,
    )


def live(root: Path, life: Life, is_resumed: bool) -> tuple[int, int]:
    """Train from the newest checkpoint on, to the last step or to death. Return evictions and file operations; the
    first rank also writes an export of the last checkpoint."""
    ranks, config = here(), config_of(root, life)
    is_killer = ranks.rank == life.killed_by
    KILLS.watch((root / "published", root / "run"), ranks.all_gather_objects(os.getpid()))
    export = partial(export_quickly, config, root / "dense.pt2")
    with with_fault(life.broken), _kept_states(root / "states"):
        trainer = Trainer(config, ranks, root / "run" / "checkpoints", export=export)
        if is_resumed:
            resume_run(trainer, allow_changes={ORDER, RATE})
        KILLS.at = life.operation if is_killer else None
        for _ in trainer.train():
            if is_killer and life.operation is None and trainer.steps >= (life.step or 0):
                KILLS.now()
        KILLS.at = None
        trainer.close()
        evictions = sum(stats.evictions for stats in cache_stats(trainer.model))
    last = checkpoint_at(root / "run" / "checkpoints", STEPS)
    ranks.from_first(lambda: (shutil.rmtree(root / "exported", True), export(last, life.dtype, root / "exported"))[1])
    return evictions, KILLS.count


def export_quickly(config: RunConfig, recorded: Path, checkpoint: Path, dtype: Any, folder: Path) -> None:
    """As `export_base`; the program of the layers, which takes seconds to record, is recorded once, in a file."""

    def save(layers: Any, path: Path) -> None:
        shutil.copyfile(recorded, path)
        weights = {name.removeprefix("model."): weight for name, weight in layers.state_dict().items()}
        path.with_name("dense.safetensors").write_bytes(b"".join(safetensors(weights)))

    with ExitStack() as stack:
        if recorded.exists():
            stack.enter_context(mock.patch.object(export_module, "dense_program", lambda layers, _: layers))
            stack.enter_context(mock.patch.object(torch.export, "save", save))
        export_module.export_base(config, checkpoint, dtype, folder)
    if not recorded.exists():
        shutil.copyfile(folder / "dense.pt2", recorded)


# -- what a replica must have


@contextmanager
def _kept_states(folder: Path) -> Iterator[None]:
    """Write the whole state down before each publication, by its token."""
    dense, base = Publisher._dense, Publisher._write_base

    def before_delta(self: Publisher) -> dict[str, Tensor]:
        _keep(folder, f"{self._name}.{self._num_cuts}", self._model)
        return dense(self)

    def before_base(self: Publisher, publication: Publication, prepare: Any) -> Publication:
        _keep(folder, publication.token, self._model)
        return base(self, publication, prepare)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Publisher, "_dense", before_delta))
        stack.enter_context(mock.patch.object(Publisher, "_write_base", before_base))
        stack.enter_context(mock.patch.object(write, "safetensors", _counted(safetensors)))
        yield


def _counted(pieces: Callable[..., Any]) -> Callable[..., Any]:
    """Each piece that is written of a file is an operation."""

    def found(tensors: Any) -> Iterator[Any]:
        for piece in pieces(tensors):
            KILLS.add()
            yield piece

    return found


def _keep(folder: Path, token: str, model: Any) -> None:
    folder.mkdir(exist_ok=True)
    torch.save(whole_state(model), folder / f"{token}.rank_{dist.get_rank()}")


def whole_state(model: Any) -> list[tuple[str, int, int, Tensor]]:
    """This rank's weights: name, first row, first column, rows. Nothing is written back: that would change what is
    dirty. The weights around the tables have the row -1."""
    found, cached = [], set()
    hots: list[Any] = [module._hot for module in model.modules() if hasattr(module, "_hot")]
    for pool in cached_embeddings(model):
        rows = pool.cache.read(torch.arange(pool.host.num_rows))
        for hot in hots:
            for shard in hot._shards:
                if shard.host is pool.host and not hot._is_behind:
                    rows[shard.keys] = shard.rows.payload[0][shard.start : shard.start + len(shard.keys)]
        for place, (first, count) in zip(pool.shards, pool.host.own_rows, strict=True):
            cached.add(place.table)
            key = place.first_key + first
            found.append((place.table, place.first_row + first, place.column, rows[key : key + count].clone()))
    with without_flushes(model):
        state = model.state_dict()
    for name, weights in state.items():
        table = name.split(".")[-2]
        if isinstance(weights, ShardedTensor):
            if table not in cached:
                for shard in weights.local_shards():
                    found.append((table, *shard.metadata.shard_offsets, shard.tensor.detach().clone()))
        elif dist.get_rank() == 0:
            is_table = table.startswith("t_")
            found.append((table if is_table else name, 0 if is_table else -1, 0, weights.detach().clone()))
    return found
