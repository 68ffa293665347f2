"""Trainings that publish, and replicas of what they published, on several ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor

from embershard.cache import CacheConfig
from embershard.cache.homes import small_sizes as sizes
from embershard.cache.parts.changed import ChangedKeys
from embershard.cache.row_cache import RowCache
from embershard.cache.tickets import Ticket
from embershard.distributed import CheckpointConfig, PublishConfig
from embershard.distributed.publish.published import published, read_files, read_publication
from embershard.extras.hot_cold.hot_tables import HotPart
from embershard.extras.publications import write
from embershard.extras.serving.serving_model import table_names, weights_of
from embershard.extras.serving.serving_replica import Replica
from embershard.extras.serving.write import export_base
from embershard.extras.verify.comparison import contents
from embershard.frequency.config import ProfileConfig
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.torchrec import cache_stats, cached_embeddings
from embershard.sharding.torchrec.host_tables import HostTables
from embershard.training.checkpoint.host_rows import taking_references
from embershard.training.config import RunConfig
from embershard.training.reports import PublicationReport
from embershard.training.trainer import Trainer
from tests.ranks.planned import here, make_config

#: Tables of so few rows stay whole here where rows are small in host memory.
_WHOLE_ROWS = 20


@dataclass
class Life:
    """What a life of a run gave.

    Attributes:
        different: weights of this rank, by name, in which a follower or a new replica differs from the trainer.
        evictions: of this rank.
        names: of publications, in their order.
        followed: state that the follower had in the end.
    """

    different: list[str]
    evictions: int
    names: list[str]
    problems: list[str]
    followed: str


def _config(
    folder: Path,
    plan: Path | None,
    lookahead: int,
    steps: int,
    dtype: str,
    policy: str,
    batch: int,
    every: int,
    ratio: float,
    host_dtype: str,
    host_bytes: int | None,
    groups: tuple[int, int],
) -> RunConfig:
    full_rows, profile = (0.05, ProfileConfig(samples=1000)) if host_dtype == "int8" else (None, ProfileConfig())
    cache = {"ratio": ratio, "policy": policy, "host_dtype": host_dtype, "full_rows": full_rows}
    of_file = {} if host_bytes is None else {"host": "file", "host_dir": str(folder / "rows"), "host_bytes": host_bytes}
    config = make_config(
        plan,
        cache=CacheConfig(**{**cache, **of_file}),
        profile=profile,
        look_ahead=LookAheadConfig(lookahead),
        publish=PublishConfig(str(folder / "published"), every_steps=every, base_every=2, dtype=dtype),
        checkpoint=CheckpointConfig(every_steps=4, at_end=False, keep_last=9),
    )
    if groups[0] > 1:
        of_groups = dataclasses.replace(config.sharding, groups=groups[0], sync_every=groups[1])
        config = dataclasses.replace(config, sharding=of_groups)
    return dataclasses.replace(
        config, train=dataclasses.replace(config.train, batch_size=batch, max_steps=steps, eval_every=3)
    )


def live(
    folder: Path,
    lookahead: int = 8,
    steps: int = 12,
    start: int | None = None,
    plan: Path | None = None,
    broken: str = "",
    dtype: str = "fp32",
    policy: str = "lookahead",
    batch: int = 50,
    every: int = 2,
    ratio: float = 0.3,
    host_dtype: str = "fp32",
    host_bytes: int | None = None,
    groups: tuple[int, int] = (1, 1),
) -> Life:
    """Train, publish and follow, from the checkpoint of step `start` on; with something `broken`. `groups`: how many,
    and steps from one average of them to the next."""
    rows = (ratio, host_dtype, host_bytes, groups)
    ranks, config = here(), _config(folder, plan, lookahead, steps, dtype, policy, batch, every, *rows)
    with with_fault(broken), mock.patch.object(sizes, "SMALL_TABLE_ROWS", _WHOLE_ROWS):
        trainer = Trainer(config, ranks, folder / "checkpoints", export=partial(export_base, config))
        if start is not None:
            trainer.resume(folder / "checkpoints" / f"step_{start}")
        before = Replica(folder / "published") if start is not None else None  # it has what the life before published
        names, problems, follower = [], [], before
        for report in trainer.train():
            if isinstance(report, PublicationReport) and ranks.is_first:
                names += [report.name] if report.name else []
                problems += [report.problem] if report.problem else []
                follower = follower or Replica(folder / "published")
                follower.update()
        ranks.barrier()
        follower = follower or Replica(folder / "published")
        follower.update()
        for pool in cached_embeddings(trainer.model):
            pool.write_back()
        with taking_references(trainer.model):
            state = trainer.model.state_dict()
        away = [pool for pool in cached_embeddings(trainer.model) if not pool.host.views.are_rows]
        different = [f"{name} ({who.have.name})" for who in (follower, Replica(folder / "published"))
                     for name in differences(state, who, away)]  # fmt: skip
        evictions = sum(stats.evictions for stats in cache_stats(trainer.model))
        ranks.barrier()
        trainer.close()
    return Life(different, evictions, names, problems, follower.have.name)


def differences(state: dict[str, Any], replica: Replica, away: Sequence[HostTables] = ()) -> list[str]:
    """Names of this rank's weights in which a replica differs; those of pools `away` are not in memory."""
    found = []
    with replica.state() as (model, _):
        tables = dict(zip(table_names(model.inputs), model.tables, strict=True))
        dense = weights_of(model.dense)
    for name, weights in state.items():
        if name in dense:
            found += [] if torch.equal(weights, dense[name]) else [name]
            continue
        stored = tables[name.split(".")[-2]].stored
        shards = [((0, 0), weights)]
        if isinstance(weights, ShardedTensor):
            shards = [(shard.metadata.shard_offsets, shard.tensor) for shard in weights.local_shards()]
        for (row, column), rows in shards:
            part = stored[row : row + rows.shape[0], column : column + rows.shape[1]]
            found += [] if torch.equal(contents(rows.detach(), away).to(stored.dtype), part) else [name]
    return found


def keys_of_deltas(folder: Path) -> dict[str, dict[str, set[int]]]:
    """The rows of each table in each delta."""
    found: dict[str, dict[str, set[int]]] = {}
    for _, path in published(folder / "published", "delta"):
        delta = read_publication(path)
        files = read_files(path, delta)
        for part in delta.parts:
            keys = files[part.file][f"{part.place}.keys"].tolist()
            found.setdefault(delta.name, {}).setdefault(part.table, set()).update(keys)
    return found


@contextmanager
def with_fault(what: str) -> Iterator[None]:
    """Do something wrong, which must be noticed."""
    if not what:
        yield
    elif what == "no correction":
        with mock.patch.object(write, "touched_since", return_value={}):
            yield
    elif what == "dirtiness":
        take = HostTables.take_changed

        def of_dirty(self: HostTables, marks: ChangedKeys) -> Tensor:
            cache = self.cache
            used = cache._map.used_slots()
            marks.take()
            marks.changed(cache._map.keys(used[cache.state.is_dirty(used)]))
            return take(self, marks)

        with mock.patch.object(HostTables, "take_changed", of_dirty):
            yield
    elif what == "averages":  # are not heard of
        from embershard.extras.groups.row_sync import RowSync  # other lives go on without that room

        sync = RowSync.sync

        def unheard(self: RowSync) -> None:
            with mock.patch.object(ChangedKeys, "changed", return_value=None):
                sync(self)

        with mock.patch.object(RowSync, "sync", unheard):
            yield
    elif what == "host rows":

        def of_host(self: RowCache, keys: Tensor) -> Tensor:
            return self.host.read(keys) if self.host.rounds else read(self, keys)

        read = RowCache.read
        with mock.patch.object(RowCache, "read", of_host):
            yield
    elif what == "slots":
        begin = RowCache.begin_update

        def by_slots(self: RowCache, ticket: Ticket) -> None:
            ticket.keys = ticket.slots.clamp(0, self.host.num_rows - 1)
            begin(self, ticket)

        with mock.patch.object(RowCache, "begin_update", by_slots):
            yield
    elif what == "hot rows":
        written = HotPart.written_back
        with mock.patch.object(HotPart, "written_back", lambda part: written(part)[:0]):
            yield
    else:
        raise ValueError(what)
