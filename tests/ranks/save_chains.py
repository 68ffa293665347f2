"""Runs whose saves are chains, with a whole save of the same state beside each, as one rank of a pool of processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from embershard.cache import CacheConfig
from embershard.cache.homes.home import FrozenRows
from embershard.cache.parts.changed import ChangedKeys
from embershard.distributed import CheckpointConfig, Manifest, PublishConfig, complete_checkpoints
from embershard.extras.publications.part import Publisher
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.torchrec.host_tables import HostTables
from embershard.sharding.torchrec.inspection import cache_stats, cached_embeddings
from embershard.training.checkpoint import save_chain, table_shards
from embershard.training.checkpoint.identity import ORDER
from embershard.training.checkpoint.save_chain import SaveChain
from embershard.training.config import RunConfig
from embershard.training.reports import SaveReport, TrainReport
from embershard.training.trainer import Trainer
from tests.ranks import planned, resharding, test_trained_ids
from tests.ranks.planned import here
from tests.ranks.resharding import Layout

EVERY, FULL_EVERY, STEPS = 6, 4, 36


@dataclass(frozen=True)
class Saved:
    """Of a rank: evictions; the steps saved as deltas, of `num_saves`; most rows that were put aside for one."""

    evictions: int
    deltas: list[int]
    num_saves: int
    num_aside: int


def config_of(kind: str | Layout, folder: Path, **checkpoint: Any) -> RunConfig:
    """A run of a layout; of "ids", of "replicated" tables beside cached ones, or one of these that publishes."""
    if isinstance(kind, Layout):
        config = resharding.config_of(replace(kind, steps=STEPS), folder)
    elif kind == "ids":
        config = test_trained_ids.make_config(folder / "clicks.parquet", max_steps=STEPS)
    else:
        world_size, per_node = here().world_size, here().local_world_size
        plan = planned.mixed_plan(["row_wise", "table_wise"], world_size, per_node)
        path = folder / f"mixed_{here().rank}.json"
        plan.save(path)
        config = planned.make_config(path, look_ahead=LookAheadConfig(8, 2), cache=CacheConfig(policy="lookahead"))
        config = replace(config, train=replace(config.train, max_steps=STEPS, batch_size=20))
    values = {"every_steps": EVERY, "full_every": FULL_EVERY, "keep_last": 99, "at_end": False}
    return replace(config, checkpoint=CheckpointConfig(**{**values, **checkpoint}))


def train(kind: str | Layout, folder: Path, fault: str = "", publishes: bool = False) -> Saved:
    """Train and save at once: chains in `folder / "chain"`, and whole saves of the same states in `folder / "whole"`.

    Args:
        fault: a planted one, of `FAULTS`.
        publishes: publish between the saves.
    """
    config = config_of(kind, folder, asynchronous=False)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(save_chain, "_SMALL_BYTES", 3000))  # uncached tables have rows in deltas
        if publishes:
            config = replace(config, publish=PublishConfig(folder=str(folder / "published"), every_steps=2))
            stack.enter_context(mock.patch.object(Publisher, "_write_base", lambda self, base, prepare: base))
        if fault:
            stack.enter_context(FAULTS[fault]())
        trainer = Trainer(config, here(), folder / "chain", export=lambda *_: None)
        for report in trainer.train():
            if isinstance(report, SaveReport):
                trainer.prepare_save(folder / "whole").write(trainer.ranks)
    return _saved(trainer, 0)


def _saved(trainer: Trainer, num_aside: int) -> Saved:
    evictions = sum(stats.evictions for stats in cache_stats(trainer.model))
    trainer.close()
    trainer.ranks.barrier()
    assert trainer.checkpoints is not None
    manifests = [Manifest.read(path) for path in complete_checkpoints(trainer.checkpoints)]
    deltas = [each.step for each in manifests if each.parent is not None and sum(part.rows for part in each.shards)]
    return Saved(evictions, deltas, len(manifests), num_aside)


def train_beside(kind: str | Layout, folder: Path) -> Saved:
    """Train the same with saves that read rows some steps late: `folder / "beside"`."""
    aside, goes_on = [0], threading.Event()
    select, close = FrozenRows.select, FrozenRows.close

    def late(rows: FrozenRows, keys: torch.Tensor) -> list[torch.Tensor]:
        if threading.current_thread().name == "embershard-save":
            assert goes_on.wait(600), "training did not go on"
        return select(rows, keys)

    def closed(rows: FrozenRows) -> None:
        aside.append(rows.aside_bytes)
        close(rows)

    trainer = Trainer(config_of(kind, folder), here(), folder / "beside")
    with mock.patch.object(FrozenRows, "select", late), mock.patch.object(FrozenRows, "close", closed):
        for report in trainer.train():
            if isinstance(report, TrainReport) and report.step % EVERY == EVERY - 1:
                goes_on.set()
            elif isinstance(report, SaveReport):
                goes_on.clear()
    return _saved(trainer, max(aside))


def go_on(layout: Layout, folder: Path, step: int) -> Saved:
    """Resume from a step of `folder / "chain"`, and go on with the chain; whole saves of the same states, that which
    was loaded among them, are in `folder / "elsewhere"`."""
    trainer = Trainer(config_of(layout, folder, asynchronous=False), here(), folder / "chain")
    trainer.resume(folder / "chain" / f"step_{step}", allow_changes={ORDER})
    trainer.prepare_save(folder / "elsewhere").write(trainer.ranks)
    for report in trainer.train():
        if isinstance(report, SaveReport):
            trainer.prepare_save(folder / "elsewhere").write(trainer.ranks)
    return _saved(trainer, 0)


@contextmanager
def _states_left_out() -> Iterator[None]:
    """Deltas have the weights of rows, and no states."""
    read = SaveChain._read

    def forget(chain: SaveChain, shard: Any, *rest: Any) -> list[torch.Tensor]:
        found = read(chain, shard, *rest)
        states = [name.startswith(table_shards.STATES) for name in shard.names]
        return [torch.zeros_like(rows) if left else rows for rows, left in zip(found, states, strict=True)]

    with mock.patch.object(SaveChain, "_read", forget):
        yield


@contextmanager
def _cleared_by_a_publication() -> Iterator[None]:
    """What a publication takes counts as saved, too."""
    cut = Publisher.cut

    def clear(publisher: Publisher, step: int) -> None:
        cut(publisher, step)
        for pool in cached_embeddings(publisher._model):
            for part in pool.cache.parts._parts:
                assert isinstance(part, ChangedKeys)
                part.take()

    with mock.patch.object(Publisher, "cut", clear):
        yield


@contextmanager
def _evicted_rows_left_out() -> Iterator[None]:
    """Of the rows that changed, those count that are cached when a save is cut."""
    take = HostTables.take_changed

    def cached(pool: HostTables, marks: ChangedKeys) -> torch.Tensor:
        keys = take(pool, marks)
        return keys[pool.cache._map.lookup(keys) > 0]

    with mock.patch.object(HostTables, "take_changed", cached):
        yield


FAULTS: dict[str, Callable[[], Any]] = {
    "states left out": _states_left_out,
    "marks cleared by a publication": _cleared_by_a_publication,
    "evicted rows left out": _evicted_rows_left_out,
}
