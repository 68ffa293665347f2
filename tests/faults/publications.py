"""Lives of a run that publishes, each killed (SIGKILL) at a file operation, or between two; then the replicas must have
the weights of the last life, bit for bit, and its ids. `python -m tests.faults.publications [--schedules N] [--seed S]
[--without correction|touches|deleted|reused|given]`.

The publisher, the files and the replicas are the real ones. In place of a training, rows are changed by random numbers,
other ones in each life: no resume trains the same bits again. tests/ranks/test_publications.py has real trainings.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor

from embershard.cache.ids.config import IdTable
from embershard.cache.ids.id_map import IdMap, ResolvedIds, mixed
from embershard.cache.parts.changed import ChangedKeys
from embershard.distributed import PublishConfig
from embershard.distributed.changed_rows import NO_ID, BehindRows, ChangedRows, TouchedRows
from embershard.distributed.publish.published import PublicationError, tensors_in
from embershard.distributed.tensors_file import safetensors
from embershard.extras.publications import part as publisher_module
from embershard.extras.publications.part import Publisher
from embershard.extras.serving.serving_model import table_names, weights_of
from embershard.extras.serving.serving_replica import Replica
from embershard.extras.serving.write import SavedIds
from embershard.sharding.torchrec.ids.id_tables import PoolIdMaps
from embershard.whole_file import whole_file
from tests.faults.children import in_child
from tests.unit.distributed.publications import ABOUT, INPUTS, TABLES, OneRank, program

IDS = IdTable(buckets=3, reserve=0.4)
_SPREAD = -7046029254386353131
STEPS, PUBLISH_EVERY, SAVE_EVERY = 14, 2, 5
_OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.copyfile", "shutil.rmtree"}


@dataclass
class _Kill:
    """Counts file operations in `folder`, and kills this process at number `at`."""

    folder: str = ""
    at: int = -1
    count: int = 0


_KILL = _Kill()


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _KILL.at < 0 or event not in _OPERATIONS or not str(arguments[0]).startswith(_KILL.folder):
        return
    _KILL.count += 1
    if _KILL.count > _KILL.at:
        os.kill(os.getpid(), signal.SIGKILL)


class _Pool:
    """A pool of one table whose rows all change in place. A bit of a row is stamped by preparation alone."""

    def __init__(self, table: str, rows: Tensor) -> None:
        self.table, self.rows = table, rows
        self.cache = SimpleNamespace(tables=[table])
        self._marks = ChangedKeys(SimpleNamespace(num_rows=len(rows), version=0), torch.device("cpu"))

    def forget(self) -> None:
        self._marks.take()

    def touch(self, table: str, behind: BehindRows) -> None:
        if table == self.table:
            self._marks.changed(behind.keys)

    def take(self) -> list[TouchedRows]:
        keys = self._marks.take()
        return [TouchedRows(self.table, 0, keys, self.rows[keys])]

    def train(self, random: torch.Generator) -> None:
        keys = torch.randint(len(self.rows), (3,), generator=random)
        self._marks.changed(keys)
        self.rows[keys] = torch.randn(3, self.rows.shape[1], generator=random)

    def state(self) -> dict[str, Tensor]:
        """What replicas must have."""
        return {self.table: self.rows}

    def saved(self) -> dict[str, Tensor]:
        """What a checkpoint has."""
        return {self.table: self.rows}


class _IdPool(_Pool):
    """A table of ids: batches are resolved ahead, and rows begin anew ahead of the training."""

    def __init__(self, table: str, rows: Tensor, saved: dict[str, Tensor]) -> None:
        super().__init__(table, rows)
        self._map = IdMap(table, IDS, IDS.buckets_of(table, len(rows)), seed=1)
        if saved:
            self._map.load({"records": saved["records"].numpy(), "candidates": np.empty((0, 2), np.int64)})
        self._maps = PoolIdMaps([self._map], [0], [0], SimpleNamespace(name=table))  # type: ignore[arg-type]
        self._ahead = deque[ResolvedIds]()

    def forget(self) -> None:
        super().forget()
        self._maps.note_changes()

    def touch(self, table: str, behind: BehindRows) -> None:
        super().touch(table, behind)
        self._maps.touch(table, 0, behind.id_rows, behind.ids)

    def take(self) -> list[TouchedRows]:
        keys, (changed,) = self._maps.take_changes(self._marks.take())
        return [TouchedRows(self.table, 0, keys, self.rows[keys], changed)]

    def train(self, random: torch.Generator) -> None:
        while len(self._ahead) < 3:
            ids = torch.randint(30, (5,), generator=random) + 4 * self._map.head
            found = self._map.resolve(mixed((ids * _SPREAD).numpy()))
            self.rows[found.born] = torch.randn(len(found.born), self.rows.shape[1], generator=random)
            self._ahead.append(found)
        used = torch.from_numpy(self._ahead.popleft().rows).unique()
        self._map.commit()
        self._marks.changed(used)
        self.rows[used] = torch.randn(len(used), self.rows.shape[1], generator=random)

    def state(self) -> dict[str, Tensor]:
        return exported(self.table, self.rows, self.saved()["records"])

    def saved(self) -> dict[str, Tensor]:
        records = torch.from_numpy(self._map.tensors()["records"])
        return {self.table: self.rows, "records": records}


def exported(table: str, rows: Tensor, records: Tensor) -> dict[str, Tensor]:
    """A table of ids as an export has it."""
    ids = SavedIds.of_records(table, IDS, records)
    (cleared,) = ids.cleared([rows])
    return {table: cleared, **{f"{table}.{name}": tensor for name, tensor in ids.tensors().items()}}


@dataclass
class _Saved:
    """What stands in for a checkpoint: written whole."""

    path: Path
    content: dict[str, Tensor]
    scalars: dict[str, Any]
    ready: Callable[[], None]

    def write(self, _: Any) -> Path:
        self.ready()
        partial = self.path.with_name(self.path.name + ".tmp")
        partial.mkdir(parents=True)
        (partial / "tensors").write_bytes(b"".join(safetensors(self.content)))
        (partial / "scalars.json").write_text(json.dumps(self.scalars))
        partial.rename(self.path)
        return self.path


class Life:
    """A life of the run: from a checkpoint, or from the beginning, to its last step or its death.

    Args:
        root: of the run; `published` and `checkpoints` are in it.
        start: the checkpoint to go on from; None: from the beginning.
        starts_again: there was one, and it is gone.
        seed: of its updates.
        published: how it publishes.
    """

    def __init__(
        self, root: Path, start: Path | None, starts_again: bool, seed: int, layers: bytes, **published: Any
    ) -> None:
        self._root, self._layers = root, layers
        self._random = torch.Generator().manual_seed(seed)
        first = torch.Generator().manual_seed(0)
        self.tables = {name: torch.randn(shape, generator=first) for name, shape in TABLES.items()}
        saved = dict[str, Tensor]()
        self.dense = {"weight": torch.zeros(1, 8), "bias": torch.zeros(1)}
        self.step, run_id, token = 0, f"run{seed}", None
        if start is not None:
            saved, scalars = (
                tensors_in((start / "tensors").read_bytes()),
                json.loads((start / "scalars.json").read_text()),
            )
            self.tables = {name: saved[name] for name in TABLES}
            self.dense = {name: saved[name] for name in self.dense}
            self.step, run_id, token = scalars["step"], scalars["run_id"], scalars["published"]["token"]
        self._pools = [_Pool("t_user", self.tables["t_user"]), _IdPool("t_item", self.tables["t_item"], saved)]
        how = {"every_steps": PUBLISH_EVERY, "base_every": 3, "keep_bases": 2, **published}
        config = PublishConfig(str(root / "published"), **how)
        tables = tuple(SimpleNamespace(name=name, num_rows=r, dim=c, tensor="") for name, (r, c) in TABLES.items())
        with mock.patch.multiple(
            publisher_module, cached_embeddings=lambda _: self._pools, PublishedPool=lambda pool: pool
        ):
            self.publisher = Publisher(config, None, tables, _OneRank(), root / "checkpoints", self._export)
            self.publisher._state = dict
            self.publisher._dense = lambda: {name: weight.clone() for name, weight in self.dense.items()}
            self.publisher.starts_again = starts_again
            if start is not None:
                self.publisher.resume(token, is_changed=False)
            self.run_id = self.publisher.begin(run_id, self.step, self._prepare)

    def run(self) -> None:
        """Train, publish and save, to the last step."""
        while self.step < STEPS:
            self._train()
            self.step += 1
            if self.publisher.is_due(self.step):
                self.publisher.cut(self.step)
            list(self.publisher.reports())
            if self.step % SAVE_EVERY == 0:
                ready = self.publisher.before_save(self.step)
                self._prepare(self._root / "checkpoints", self.publisher.newest, ready).write(None)
        list(self.publisher.end(self.step))

    def _train(self) -> None:
        for pool in self._pools:
            pool.train(self._random)
        self.dense["weight"] += torch.randn(1, 8, generator=self._random)

    def state(self) -> dict[str, Tensor]:
        """What replicas must have, by name."""
        return self.dense | {name: tensor for pool in self._pools for name, tensor in pool.state().items()}

    def _prepare(self, folder: Path, published: Any = None, ready: Callable[[], None] = lambda: None) -> Any:
        saved = self.dense | {name: tensor for pool in self._pools for name, tensor in pool.saved().items()}
        content = {name: tensor.clone() for name, tensor in saved.items()}
        scalars = {"step": self.step, "run_id": getattr(self, "run_id", ""), "published": published}
        return _Saved(folder / f"step_{self.step}", content, scalars, ready)

    def _export(self, checkpoint: Path, dtype: str, folder: Path) -> None:
        saved = tensors_in((checkpoint / "tensors").read_bytes())
        (folder / "tables").mkdir(parents=True)
        items = exported("t_item", saved["t_item"], saved["records"])
        ids = {"ids": items["t_item.ids"], "rows": items["t_item.rows"]}
        for name, tensors in (
            ("t_user", {"rows": saved["t_user"]}), ("t_item", {"rows": items["t_item"]}), ("t_item.ids", ids)
        ):  # fmt: skip
            (folder / "tables" / f"{name}.safetensors").write_bytes(b"".join(safetensors(tensors)))
        weights = {name: saved[name] for name in self.dense}
        (folder / "dense.safetensors").write_bytes(b"".join(safetensors(weights)))
        (folder / "dense.pt2").write_bytes(self._layers)
        (folder / "inputs.json").write_text(json.dumps({**INPUTS, "id_tables": {"t_item": {"buckets": 3}}}))
        (folder / "export.json").write_text(json.dumps({**ABOUT, "dtype": dtype, "step": self.step}))


class _OneRank(OneRank):
    def with_own_group(self) -> Any:
        return self


def _live(root: Path, *given: Any, kill_at: int = -1) -> tuple[int, int]:
    """Run a life in a process of its own; return its exit status and the file operations that it made."""

    def operations() -> int:
        sys.addaudithook(_watch)
        _KILL.folder, _KILL.count = str(root / "published"), 0
        _KILL.at = kill_at if kill_at >= 0 else 1 << 60
        life = Life(root, *given)
        life.run()
        found, _KILL.at = _KILL.count, -1
        content = life.state()
        with whole_file(root / "last") as partial:
            partial.write_bytes(b"".join(safetensors(content)))
        return found

    return in_child(root / "count", operations)


def try_schedule(seed: int, layers: bytes, operations: int) -> str:
    """Let a run live several times, killed at operations by chance; return what is wrong, or nothing.

    Args:
        operations: file operations of a whole life.
    """
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        root, follower, kills = Path(folder), None, 0
        for life in range(1 + chance.randint(1, 3)):
            start = _start(root, chance)
            is_last = life == 3 or (life > 0 and chance.random() < 0.3)
            kill_at = -1 if is_last else chance.randrange(operations)
            starts_again = life > 0 and start is None
            status, _ = _live(root, start, starts_again, 1000 * seed + life, layers, kill_at=kill_at)
            if status == signal.SIGKILL:
                kills += 1
            elif status:
                return f"schedule {seed}, life {life}: it failed ({status})"
            follower, problem = _follow(root, follower)
            if problem:
                return f"schedule {seed}, life {life}: {problem}"
        if status:
            start = _start(root, chance)
            status, _ = _live(root, start, start is None, 1000 * seed + 99, layers)
            if status:
                return f"schedule {seed}: the last life failed ({status})"
        last = tensors_in((root / "last").read_bytes())
        for who, replica in (("a follower", follower), ("a new replica", None)):
            replica, problem = _follow(root, replica)
            if problem or replica is None or (problem := _differs(replica, last)):
                return f"schedule {seed} ({kills} kills): {who}: {problem or 'nothing is published'}"
    return ""


def _start(root: Path, chance: random.Random) -> Path | None:
    """Choose the checkpoint to go on from: the newest; at times an older one, or none. Later ones are removed."""
    for left in root.glob("checkpoints/*.tmp"):
        shutil.rmtree(left)
    found = sorted(root.glob("checkpoints/step_*"), key=lambda path: int(path.name[5:]))
    kept = len(found) if chance.random() < 0.6 else chance.randint(0, len(found))
    for path in found[kept:]:
        shutil.rmtree(path)
    return found[kept - 1] if kept else None


def _follow(root: Path, follower: Replica | None) -> tuple[Replica | None, str]:
    """Let a replica that lives through all of it take what is there."""
    if follower is None and not list((root / "published").glob("base_*[0-9]")):
        return None, ""
    try:
        follower = follower or Replica(root / "published")
        follower.update()
    except PublicationError as error:
        return follower, str(error)
    return follower, ""


def _differs(replica: Replica, last: dict[str, Tensor]) -> str:
    with replica.state() as (model, have):
        found = dict(zip(table_names(INPUTS), (table.stored for table in model.tables), strict=True))
        found |= weights_of(model.dense)
        places = model.places[table_names(INPUTS).index("t_item")]
        found |= {"t_item.ids": places.ids, "t_item.rows": places.rows}
        different = [name for name, tensor in found.items() if not torch.equal(tensor, last[name])]
        return f"{', '.join(different)} at {have.name} differs from the trainer" if different else ""


def whole_life(layers: bytes) -> int:
    """Return the file operations of a life that is not killed."""
    with tempfile.TemporaryDirectory() as folder:
        status, operations = _live(Path(folder), None, False, 1, layers)
        assert status == 0, "a life without a kill"
        return operations


def break_code(what: str | None) -> None:
    """Leave something out, which the schedules must notice."""
    if what == "correction":
        publisher_module.write.touched_since = lambda *_: {}
    if what == "touches":  # as dirtiness: what was written back is clean
        changed = ChangedKeys.changed
        ChangedKeys.changed = lambda self, keys: changed(self, keys[::2])
    if what in ("deleted", "reused", "given"):
        take = PoolIdMaps.take_changes

        def broken(self: PoolIdMaps, keys: Tensor) -> tuple[Tensor, list[ChangedRows]]:
            keys, (found,) = take(self, keys)
            if what == "deleted":
                stays = found.new != NO_ID
                return keys, [ChangedRows(found.rows[stays], found.old[stays], found.new[stays], found.live)]
            if what == "reused":
                return keys, [replace(found, old=torch.full_like(found.old, NO_ID))]
            return keys[~torch.isin(keys, found.rows)], [found]  # the weights of rows that were given away

        PoolIdMaps.take_changes = broken


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.publications", description=__doc__)
    parser.add_argument("--schedules", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--without", choices=["correction", "touches", "deleted", "reused", "given"], help="a negative control"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    break_code(arguments.without)
    layers, started, problems = program(), time.perf_counter(), []
    operations = whole_life(layers)
    for seed in range(arguments.seed, arguments.seed + arguments.schedules):
        if problem := try_schedule(seed, layers, operations):
            problems.append(problem)
            print(problem, flush=True)
    seconds = time.perf_counter() - started
    print(f"{arguments.schedules} schedules of lives with {operations} file operations in {seconds:.0f} s: "
          f"{len(problems)} wrong")  # fmt: skip
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
