"""A TorchRec program with a look-ahead pipeline, whose rows are in memory or in a file, and what it saves and loads."""

from __future__ import annotations

import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from embershard import (
    CacheConfig,
    CachedEmbeddingBagCollectionSharder,
    LookAheadPipeline,
    cache_stats,
    file_counts,
    load_program,
    plan_sharding,
    save_program,
)
from embershard.cache.file.file_counts import FileCounts
from embershard.cache.file.file_rows import FileRows
from embershard.cache.file.filed_rows import FiledRows
from embershard.errors import CheckpointError
from embershard.sharding.torchrec import cached_embeddings
from embershard.training.checkpoint.host_rows import taking_references
from tests.faults.rank_kills import FILE_OPERATIONS, is_writing
from tests.ranks.look_ahead import Batch, Case, Model
from tests.ranks.parity import OPTIMIZERS, _constraints, batches, snapshot

MIXED = ("row_wise", "column_wise", "table_wise", "table_wise")
STEPS, HALF = 40, 26
#: Of the rows, those that are in memory where some are in a file.
SHARE = 0.3


def case_of(sharding: Any = MIXED, optimizer: str = "rowwise_adagrad") -> Case:
    """Of few ids per batch: rows are in all homes."""
    return Case(sharding=sharding, optimizer=optimizer, steps=STEPS, batch_size=6, ratio=0.06)


class Program:
    """A model of tables under a fused optimizer, a dense layer under Adam, and a pipeline. ``host``: of the rows."""

    lookahead = 6

    def __init__(self, case: Case, host: str, folder: str) -> None:
        torch.manual_seed(4)
        self.case, model, size = case, Model(case), dist.get_world_size()
        row_bytes = {"sgd": 64, "rowwise_adagrad": 68, "adagrad": 128}[case.optimizer]
        of_file = {"host": "file", "host_dir": folder, "host_bytes": int(SHARE * sum(case.rows) * row_bytes) // size}
        cache = CacheConfig(
            ratio=case.ratio, policy="lookahead", overflow="grow", **(of_file if host == "file" else {})
        )
        fused: dict[str, Any] = {"optimizer": OPTIMIZERS[case.optimizer], "learning_rate": 0.1, "eps": 1e-6}
        sharder = CachedEmbeddingBagCollectionSharder(cache, fused_params=fused, init_seed=5)
        plan = plan_sharding(
            model, [sharder], world_size=size, local_world_size=size, device="cpu",
            constraints=_constraints(case, cached=True),
        )  # fmt: skip
        self.model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
        parameters = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        self.dense = KeyedOptimizerWrapper(parameters, partial(torch.optim.Adam, lr=0.02))
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, self.dense])

    def state(self) -> dict[str, Any]:
        """All that is saved where rows are in memory."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def train(
        self, first: int, stop: int, at: int | None = None, save: Callable[[], Any] = lambda: None
    ) -> list[float]:
        """Losses of the steps from ``first`` to ``stop``; ``save`` before step ``at``, with batches ahead."""
        given = list(batches(self.case, dist.get_rank()))[first:stop]
        coming, losses = iter([Batch(*each) for each in given]), []
        pipeline = LookAheadPipeline(self.model, self.optimizer, torch.device("cpu"), self.lookahead, 2)
        for step in range(first, stop):
            if step == at:
                save()
            losses.append(float(pipeline.progress(coming).sum()))
        pipeline.detach()
        return losses

    def homes(self) -> dict[str, int]:
        """Rows on the device, only in memory, only in the file, and nowhere yet."""
        found = dict.fromkeys(("device", "memory", "file", "unmade"), 0)
        for pool in cached_embeddings(self.model):
            assert isinstance(pool.host, FiledRows)
            keys = torch.arange(pool.host.num_rows)
            cached, placed = pool.cache._map.lookup(keys) > 0, pool.host.places.of(keys) > 0
            written = pool.host._file.is_written(keys)
            parts = (cached, placed & ~cached, written & ~placed & ~cached, ~(written | placed | cached))
            for name, part in zip(found, parts, strict=True):
                found[name] += int(part.sum())
        return found

    def rows(self) -> dict[str, Tensor]:
        """All weights and states of this rank's rows and layers, wherever they are."""
        if all(pool.host.views.are_rows for pool in cached_embeddings(self.model)):
            return snapshot(self.model)
        for pool in cached_embeddings(self.model):
            pool.write_back()
        found = {}
        with taking_references(self.model):
            groups = {"weight": self.model.state_dict()}
            groups["state"] = {
                f"{table}.{name}": value
                for table, states in self.model.fused_optimizer.state_dict()["state"].items()
                for name, value in states.items()
            }
        for kind, values in groups.items():
            for name, value in values.items():
                parts = (
                    [((), value)]
                    if not isinstance(value, ShardedTensor)
                    else [(tuple(shard.metadata.shard_offsets), shard.tensor) for shard in value.local_shards()]
                )
                for offsets, part in parts:
                    away = [pool.host.read_part(part.detach()) for pool in cached_embeddings(self.model)]
                    rows = next((each for each in away if each is not None), part.detach().clone())
                    found[f"{kind}/{name}/{offsets}" if offsets else f"{kind}/{name}"] = rows
        return found


def saved(case: Case, host: str, folder: str, lookahead: int = 6) -> Any:
    """Losses and rows of a whole training, saved in its midst with batches ahead; the homes of rows then, evictions,
    and what was read from files."""
    program, homes = Program(case, host, folder), dict[str, int]()
    program.lookahead = lookahead

    def save() -> None:
        if host == "file":
            homes.update(program.homes())
        save_program(folder, HALF, program.model, program.optimizer, scalars={"seen": HALF * 6})

    losses = program.train(0, STEPS, HALF, save)
    evictions = sum(table.evictions for table in cache_stats(program.model))
    return losses, program.rows(), homes, evictions, file_counts(program.model)


def saved_at_once(case: Case, folder: str) -> dict[str, Tensor]:
    """This rank's rows when it saved them, in a file."""
    program = Program(case, "file", folder)
    program.train(0, HALF)
    save_program(folder, HALF, program.model, program.optimizer)
    return program.rows()


def counted(case: Case, host: str, folder: str) -> Any:
    """What the file tier did in a training, by rank and by pipeline."""
    program = Program(case, host, folder)
    before = file_counts(program.model)
    program.train(0, HALF)
    own = file_counts(program.model)
    return before, own, FileCounts.total(pool.host.counts for pool in cached_embeddings(program.model))


def saved_by_torch(case: Case, folder: str) -> Any:
    """Losses and rows of a training with rows in memory, saved by torch.distributed.checkpoint."""
    program = Program(case, "memory", folder)
    losses = program.train(0, STEPS, HALF, lambda: dcp.save(program.state(), checkpoint_id=f"{folder}/of_torch"))
    return losses, program.rows()


def saved_unread(case: Case, folder: str) -> Any:
    """As `saved`, by a save that does not read the file."""
    program = Program(case, "file", folder)

    def save() -> None:
        with mock.patch.object(FileRows, "is_written", lambda _, keys: torch.zeros(len(keys), dtype=torch.bool)):
            save_program(folder, HALF, program.model, program.optimizer)

    return program.train(0, STEPS, HALF, save), program.rows()


def loaded(case: Case, host: str, folder: str, checkpoint: str, before: int = 0) -> Any:
    """Losses and rows of the rest of a training, and the scalars. ``before``: steps that trained before the load."""
    program = Program(case, host, folder)
    program.dense.init_state()
    if before:
        program.train(0, before)
    scalars = load_program(checkpoint, program.model, program.optimizer, allow_unverified="torch" in checkpoint)
    at_start = program.rows()
    return program.train(HALF, STEPS), program.rows(), scalars, at_start


def loaded_by_torch(case: Case, folder: str, checkpoint: str) -> Any:
    """As `loaded`, with rows in memory, by torch.distributed.checkpoint alone."""
    program = Program(case, "memory", folder)
    program.dense.init_state()
    state = program.state()
    dcp.load(state, checkpoint_id=checkpoint)
    program.model.load_state_dict(state["model"])
    program.optimizer.load_state_dict(state["optimizer"])
    return program.train(HALF, STEPS), program.rows()


def crashed_saves(folder: Path) -> tuple[int, list[str]]:
    """What is wrong with what a program loads of a folder that a dead save left, for each file operation of the save:
    its newest sound step is neither the one before nor that of the save, its rows are others, or it cannot go on; and
    the number of operations."""
    program, images, rows, problems = Program(case_of(), "file", str(folder)), Images(folder / "saves"), {}, []
    program.train(0, 3)
    for step in (3, 6):
        rows[step] = program.rows()
        with images.of_operations() if step == 6 else nullcontext():
            save_program(images.folder, step, program.model, program.optimizer, scalars={"at": step}, keep_last=1)
        program.train(step, step + 3)
    for image in images.taken:
        step = load_program(image, program.model, program.optimizer)["at"]
        found = program.rows()
        different = [name for name, expected in rows[step].items() if not torch.equal(found[name], expected)]
        problems += [f"{image.name}: step {step}: {name}" for name in different]
        left = save_program(image, 6 if step == 3 else 9, program.model, program.optimizer, keep_last=1)
        names = sorted(path.name for path in image.iterdir())
        problems += [] if names == [left.name] else [f"{image.name}: {names} are left"]
    return len(images.taken), problems


class Images:
    """What a process that dies at a file operation in `folder` leaves of it: copies, each in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.taken, self._is_copying = folder, list[Path](), True
        sys.addaudithook(self._look)

    @contextmanager
    def of_operations(self) -> Iterator[None]:
        """Take one before each operation, and one at the end."""
        self._is_copying = False
        yield
        self._take()
        self._is_copying = True

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        is_here = event in FILE_OPERATIONS and str(arguments[0]).startswith(str(self.folder))
        if is_here and not self._is_copying and (event != "open" or is_writing(arguments)):
            self._take()

    def _take(self) -> None:
        self._is_copying = True
        self.taken.append(self.folder.with_name(f"image_{len(self.taken)}"))
        shutil.copytree(self.folder, self.taken[-1])
        self._is_copying = False


def loaded_by_folder(folder: str) -> list[str]:
    """What a program is told where it goes on from a folder whose newest checkpoint is damaged, and saves again."""
    program, said = Program(case_of(), "memory", folder), list[str]()
    for step in (2, 4, 6):
        program.train(step - 2, step)
        save_program(folder, step, program.model, program.optimizer, keep_last=9)
    said.append(str(load_program(folder, program.model, program.optimizer)["step"]))
    said.append(str(load_program(folder, program.model, program.optimizer, step=2)["step"]))
    if dist.get_rank() == 0:
        file = next(Path(folder, "step_6").glob("*.distcp"))
        file.write_bytes(file.read_bytes()[:-1])
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        said.append(str(load_program(folder, program.model, program.optimizer)["step"]))
        save_program(folder, 5, program.model, program.optimizer, keep_last=9)
        said.append(str(load_program(folder, program.model, program.optimizer)["step"]))
    said += [str(each.message) for each in caught if each.category is UserWarning]
    for wrong in (Path(folder, "nothing"), Path(folder, "step_9")):
        try:
            load_program(wrong, program.model, program.optimizer)
        except CheckpointError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def refused(folder: str) -> dict[str, str]:
    """What saves and loads that cannot be say."""
    program, found = Program(case_of(), "file", folder), dict[str, str]()
    program.train(0, 3)
    path = save_program(Path(folder), 3, program.model, program.optimizer)
    other = Program(case_of(), "file", folder)
    calls: dict[str, Callable[[], Any]] = {
        "state dict": program.model.state_dict,
        "dense only": lambda: save_program(folder, 4, program.model, program.dense),
        "again": lambda: save_program(folder, 3, program.model, program.optimizer),
        "no states": lambda: load_program(path, other.model, other.optimizer),
        "damaged": lambda: load_program(path, program.model, program.optimizer),
    }
    for name, call in calls.items():
        if name == "damaged" and dist.get_rank() == 0:
            file = next(path.glob("*.distcp"))
            file.write_bytes(b"x" + file.read_bytes()[1:])
        dist.barrier()
        try:
            call()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
