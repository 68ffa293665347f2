"""The folder of a run is copied while the run saves, prunes and publishes: files in any order, some of them cut off. A
resume, scores and a replica of the copy have its newest sound step, bit for bit, or say what is wrong."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from embershard.commands.score import rank_job
from embershard.commands.train import run as run_module
from embershard.distributed import Supervision, complete_checkpoints
from embershard.distributed.checkpoint.best import BestEvaluation
from embershard.distributed.checkpoint.folder import checkpoint_at
from embershard.distributed.checkpoint.load import BoxReader, verify_alone
from embershard.distributed.publish.published import PublicationError
from embershard.errors import CheckpointError, ConfigError, InvalidCheckpointError
from embershard.extras.serving.serving_model import table_names
from embershard.extras.serving.serving_replica import Replica
from embershard.launch.arguments import NEWEST
from embershard.settings.files import CHECKPOINTS, RUN_CONFIG, load_config
from embershard.training.config import RunConfig
from tests.covering import keep
from tests.faults.published_lives import export_quickly
from tests.faults.random_lives import Meaning, Way, config_of, write_samples
from tests.faults.random_runs import different_tensors
from tests.faults.rank_kills import FILE_OPERATIONS, Pools
from tests.ranks.planned import here

pytestmark = [pytest.mark.extra, pytest.mark.slow]

STEPS, _NUM_COPIES, _OPERATIONS = 12, 6, 500  # about so many in a training
_MEANING = Meaning(steps=STEPS, batch=20, eval_every=4, ema=0.9)
_WAY = Way(save_every=2, full_every=3, keep_best=True, publish_every=2, base_every=6, lookahead=2)
_WHOLE = replace(_WAY, keep_last=99, full_every=1, base_every=None)
_READ_BYTES = 4096


class Copy:
    """A copy of a folder, a piece at a time, as `cp -r` makes it: a folder's names are those of one moment."""

    def __init__(self, source: Path, target: Path, chance: random.Random) -> None:
        self.target, self._chance, self._pieces = target, chance, self._folder(source, target)
        self.begins_at, self._at_once = chance.randrange(_OPERATIONS), chance.choice([1, 3, 10, 40])
        self._cut = chance.choice([0.0, 0.0, 0.1])

    def go_on(self) -> None:
        """Copy some pieces."""
        for _ in range(self._at_once):
            next(self._pieces, None)

    def finish(self) -> None:
        for _ in self._pieces:
            pass

    def _folder(self, source: Path, target: Path) -> Iterator[None]:
        target.mkdir()
        names = sorted(os.listdir(source)) if source.exists() else []  # removed since it was listed
        for name in self._chance.sample(names, len(names)):
            yield
            copy = self._folder if (source / name).is_dir() else self._file
            yield from copy(source / name, target / name)

    def _file(self, source: Path, target: Path) -> Iterator[None]:
        if not source.exists():
            return
        with source.open("rb") as file, target.open("wb") as copy:
            left = os.fstat(file.fileno()).st_size
            if self._chance.random() < self._cut:
                left = int(left * self._chance.random())
            while piece := file.read(min(left, _READ_BYTES)):
                copy.write(piece)
                left -= len(piece)
                yield


class Copier:
    """Goes on with copies before each file operation of this process in a folder."""

    def __init__(self) -> None:
        self._folder, self._copies, self._count, self._is_hooked = "", list[Copy](), 0, False
        self._at_work = threading.Lock()  # publications are written by a thread

    @contextmanager
    def copying(self, folder: Path, copies: list[Copy]) -> Iterator[None]:
        self._folder, self._copies, self._count = str(folder), copies, 0
        if not self._is_hooked:
            sys.addaudithook(self._look)
            self._is_hooked = True
        yield
        with self._at_work:
            self._folder = ""
        for copy in copies:
            copy.finish()

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        is_in = self._folder and event in FILE_OPERATIONS and str(arguments[0]).startswith(self._folder)
        if is_in and self._at_work.acquire(blocking=False):  # else an operation of its own, or of another thread
            self._count += 1
            for copy in self._copies:
                if self._count > copy.begins_at:
                    copy.go_on()
            self._at_work.release()


#: Of this process: an audit hook stays to its end.
COPIER = Copier()


def train(root: Path, run: Path, way: Way, copies: Sequence[Copy] = (), resume: int | None = None) -> str:
    """Train the run in a folder to its end, while copies of it are made; return what it says."""
    config, said = config_of(root, _MEANING, way), StringIO()
    if (run / RUN_CONFIG).exists():
        config = load_config(RunConfig, run / RUN_CONFIG)
    config = replace(config, publish=replace(config.publish, folder=str(run / "published")))
    export = partial(export_quickly, config, root / "layers.pt2")
    given: dict[str, Any] = {"resume": resume, "unverified": False, "changes": (), "same_run": "", "go_on": ""}
    with (
        mock.patch.object(run_module, "_base_writer", return_value=export),
        COPIER.copying(run, [*copies]),
        redirect_stdout(said),
    ):
        run_module.train_run(config, here(), run, supervision=Supervision(), **given)
    return said.getvalue()


def scores(run: Path, *words: str) -> Tensor:
    """Return what `embershard predict` writes of what the run holds out."""
    output = run.with_name(f"{run.name}.parquet")
    output.unlink(missing_ok=True)
    with redirect_stdout(StringIO()):
        rank_job("predict", [str(run), "-o", str(output), *words]).run(here(), Supervision())
    return torch.tensor(pq.read_table(output)["logit"].to_pylist())


def problems_of_copies(root: Path, seed: int) -> tuple[list[str], int]:
    """Train a run whose saves are all kept, and one that is copied meanwhile; return what is wrong with copies, and how
    many had a sound step."""
    chance, whole, run = random.Random(seed), root / "whole", root / "run"
    train(root, whole, _WHOLE)
    expected = {step: scores(whole, "--step", str(step)) for step in range(2, STEPS + 1, 2)}
    copies = [Copy(run, root / f"copy_{number}", chance) for number in range(_NUM_COPIES)]
    train(root, run, _WAY, copies)
    sound = [_sound_steps(copy.target) for copy in copies]
    pairs = zip((copy.target for copy in copies), sound, strict=True)
    return [f"{copy.name}: {found}" for copy, steps in pairs for found in _problems(root, copy, steps, expected)], sum(
        map(bool, sound)
    )


def _sound_steps(run: Path) -> list[int]:
    found = []
    for path in complete_checkpoints(run / CHECKPOINTS):
        try:
            found.append(verify_alone(path).step)
        except InvalidCheckpointError:
            continue
    return found


def _problems(root: Path, copy: Path, sound: list[int], expected: dict[int, Tensor]) -> Iterator[str]:
    try:
        best = BestEvaluation.find(copy / CHECKPOINTS)
    except InvalidCheckpointError:
        best = None
    of_best = best.step if best is not None and best.step in sound else max(sound, default=0)
    for words, step in {("--step", "last"): max(sound, default=0), (): of_best}.items():
        try:
            if not torch.equal(scores(copy, *words), expected[step]):
                yield f"predict {words}: not those of step {step}"
        except (CheckpointError, ConfigError) as error:
            yield from _needless(error, copy, sound)
    yield from _problems_of_replica(copy, root / "whole" / CHECKPOINTS)
    try:
        said = train(root, copy, _WAY, resume=NEWEST)
        if sound and f"Continuing from {checkpoint_at(copy / CHECKPOINTS, sound[-1])} at step" not in said:
            yield f"the resume did not go on from step {sound[-1]}: {said}"
        last = (checkpoint_at(folder / CHECKPOINTS, STEPS) for folder in (copy, root / "whole"))
        yield from (f"resumed: {different}" for different in different_tensors(*last))
    except (CheckpointError, ConfigError) as error:
        yield from _needless(error, copy, sound)


def _needless(error: Exception, copy: Path, sound: list[int]) -> Iterator[str]:
    """Yield a refusal that a sound step and its settings gave no reason for, or that names no file."""
    try:
        load_config(RunConfig, copy / RUN_CONFIG)
    except ConfigError:
        sound = []
    if sound or str(copy) not in str(error):
        yield f"{type(error).__name__}: {error}"


def _problems_of_replica(copy: Path, checkpoints: Path) -> Iterator[str]:
    try:
        replica = Replica(copy / "published")
    except PublicationError as error:
        if str(copy) not in str(error):
            yield f"replica: {error}"
        return
    with replica.state() as (model, have):
        reader = BoxReader(checkpoint_at(checkpoints, have.step))
        tensors = {name.split(".")[-2]: name for name in reader.tensors if name.startswith("model.")}
        for name, table in zip(table_names(model.inputs), model.tables, strict=True):
            if not torch.equal(reader.read_whole(tensors[name]), table.stored):
                yield f"replica: {name} is not that of step {have.step}"


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.mark.parametrize("seed", keep([0], range(8)))
def test_a_copy_of_a_run_that_saves(pools: Pools, tmp_path: Path, seed: int) -> None:
    write_samples(tmp_path)
    root = tmp_path / "runs"
    root.mkdir()
    found = pools.run(1, problems_of_copies, root, seed)
    assert found is not None
    problems, num_sound = found[0]
    assert problems == []
    assert num_sound >= 1
