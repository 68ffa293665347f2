"""Runs whose saves are chains, killed (SIGKILL) at a file operation of a save, a compaction or a pruning; what is left
must be valid, equal a run that was not killed bit for bit, go on with it, and load on other ranks and plans.
`python -m tests.faults.save_chains [--schedules N] [--steps N]`.

A schedule kills at one operation: an open, a write (half of it is written), an fsync, a rename or a removal. Of runs
with rows in a file (`file_kills.py`), pages that are read and written are operations, too. Schedules
are spread evenly over all operations of a run with its saves and prunings, of a compaction, and of `ckpt prune`. With
`--steps`, so many steps of a small table without a model show that the disk is bounded as `saves_at_once` says.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from embershard.cache.file.file_rows import PageIo
from embershard.commands import ckpt
from embershard.commands.ckpt import differences
from embershard.distributed import Manifest, complete_checkpoints, step_of, verify_checkpoint
from embershard.distributed.checkpoint import digests
from embershard.distributed.checkpoint.chain import Chain
from embershard.distributed.checkpoint.compact import compact
from embershard.distributed.checkpoint.folder import folder_bytes, saves_at_once
from embershard.distributed.checkpoint.load import BoxReader, verify_alone
from embershard.training.checkpoint.resume import resume_run
from embershard.training.config import RunConfig
from embershard.training.reports import SaveReport
from embershard.training.trainer import Trainer
from tests.faults.children import in_child
from tests.faults.rank_kills import is_writing
from tests.ranks import resharding
from tests.ranks.planned import here
from tests.ranks.resharding import Layout
from tests.ranks.workers import RankPool
from tests.unit.distributed.chains import Table, save_chain

LAYOUT = Layout("table_wise", ratio=0.3, steps=15)
ELSEWHERE = Layout("row_wise", ratio=0.6, policy="lru")
EVERY, FULL_EVERY, KEEP_LAST = 2, 3, 2
#: Of so many runs that were killed, one goes on to its end; of the others, what is left is compared and loaded.
_GOES_ON_EVERY = 4
_OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}
_GROUPS = ("model.", "embedding_optimizer.", "dense_optimizer.")


@dataclass
class _Kill:
    """Counts file operations in `folder`, and kills this process at number `at`."""

    folder: str
    at: int
    count: int = 0

    def watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _OPERATIONS:
            return
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes, os.PathLike)) else ""
        is_removal = event in ("os.remove", "os.rmdir")  # by names within a folder
        if is_removal or (path.startswith(self.folder) and (event != "open" or is_writing(arguments))):
            self.operation()

    def operation(self) -> None:
        self.count += 1
        if self.count > self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, file: Any, view: memoryview) -> None:
        if self.count == self.at:
            _write(file, view[: len(view) // 2])
        self.operation()
        _write(file, view)

    def sync(self, handle: int) -> None:
        self.operation()
        _sync(handle)

    def move(self, writes: bool, file: int, pages: Any, page_bytes: int, *memory: Any) -> None:
        if self.count == self.at:
            _move(writes, file, pages[: len(pages) // 2], page_bytes, *memory)
        self.operation()
        _move(writes, file, pages, page_bytes, *memory)


_write, _sync, _move = digests._DigestedFile._write, os.fsync, PageIo._move


def killed(folder: Path, work: Callable[[], None], kill_at: int | None = None) -> tuple[int, int]:
    """Do something in a process of its own, killed at an operation in `folder`; return its exit status, and how many
    operations there were if it was not."""

    def operations() -> int:
        _be_alone()
        kill = _Kill(str(folder), 1 << 60 if kill_at is None else kill_at)
        sys.addaudithook(kill.watch)
        digests._DigestedFile._write = lambda file, view: kill.write(file, view)  # type: ignore[method-assign]
        PageIo._move = lambda _, *arguments: kill.move(*arguments)  # type: ignore[method-assign]
        os.fsync = kill.sync
        work()
        found, kill.at = kill.count, 1 << 60
        return found

    return in_child(folder.parent / "count", operations)


def _be_alone() -> None:
    logging.disable(logging.WARNING)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    store = tempfile.mkdtemp()
    dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)


def config_of(layout: Layout, samples: Path, full_every: int = FULL_EVERY, keep_last: int = KEEP_LAST) -> RunConfig:
    config = resharding.config_of(layout, samples)
    checkpoint = replace(config.checkpoint, every_steps=EVERY, full_every=full_every, keep_last=keep_last, at_end=True)
    return replace(config, checkpoint=checkpoint)


def live(samples: Path, checkpoints: Path, **settings: int) -> None:
    """Train to the end, from the newest valid checkpoint on."""
    trainer = Trainer(config_of(LAYOUT, samples, **settings), here(), checkpoints)
    resume_run(trainer)
    for _ in trainer.train():
        pass
    trainer.close()


def reload(samples: Path, checkpoint: Path, copy: Path) -> None:
    """As one rank of several, with tables in other places: load a checkpoint, and save it whole."""
    trainer = Trainer(config_of(ELSEWHERE, samples, full_every=1), here(), copy)
    verify_checkpoint(checkpoint, trainer.ranks)
    trainer.resume(checkpoint)
    trainer.save()
    trainer.close()


def different_rows(checkpoint: Path, other: Path) -> list[str]:
    """Return the names of weights and optimizer states that differ."""
    return [name for name, *_ in differences(checkpoint, other) if name.startswith(_GROUPS)]


class Schedules:
    """Kills of runs, compactions and prunings, beside a run that was not killed.

    Args:
        root: an empty folder.
    """

    def __init__(self, root: Path) -> None:
        self._root, self._samples, self._reference = root, root / "samples", root / "reference"
        self._samples.mkdir()
        resharding.write_samples(self._samples / "samples.parquet")
        self._work("reference", lambda: live(self._samples, self._reference, full_every=1, keep_last=99))
        chain = root / "chain"
        self.operations = {
            "save": self._work("run", lambda: live(self._samples, self._new("run"))),
            "chain": self._work("chain", lambda: live(self._samples, chain, keep_last=99)),
        }
        self._chain = complete_checkpoints(chain)
        links = [path for path in self._chain if Manifest.read(path).parent is not None]
        assert len(links) >= len(self._chain) // 2, "deltas"
        self._delta = links[-1].name
        self.operations["compact"] = self._on_copy("compact", None)[1]
        self.operations["prune"] = self._on_copy("prune", None)[1]
        del self.operations["chain"]
        self._pool: RankPool | None = None
        self._loaded = set[tuple[str, ...]]()  # chains that two ranks have loaded

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def points(self, count: int) -> list[tuple[str, int]]:
        """Operations, spread evenly over all of them."""
        every = [(kind, at) for kind, number in self.operations.items() for at in range(number)]
        return [every[number * len(every) // count] for number in range(min(count, len(every)))]

    def try_one(self, kind: str, at: int) -> str:
        """Kill at an operation; return what is wrong then, or nothing."""
        folder = self._new("run")
        if kind == "save":
            status, _ = killed(folder, lambda: live(self._samples, folder), at)
        else:
            status, _ = self._on_copy(kind, at)
        if status != signal.SIGKILL:
            return f"{kind} {at}: it ended with status {status}"
        problem = self._wrong(folder, kind)
        if not problem and (found := complete_checkpoints(folder)):
            problem = self._elsewhere(found[-1])
        if problem:
            return f"{kind} {at}: {problem}"
        if kind != "save":  # the lock of a run's folder is held to the end of a process
            killed(folder, lambda: self._again(kind, folder))
        elif at % _GOES_ON_EVERY:
            return ""
        else:
            status, _ = killed(folder, lambda: live(self._samples, folder))
            if status:
                return f"{kind} {at}: the resumed run ended with status {status}"
        left = [path.name for path in folder.iterdir() if path.name.startswith("step_") and path.name.endswith(".tmp")]
        problem = self._wrong(folder, kind) or (f"{left} are left" if left else "")
        last = f"step_{LAYOUT.steps}"
        if not problem and not (folder / last).exists():
            problem = f"{last} is missing"
        return f"{kind} {at}, gone on with: {problem}" if problem else ""

    def _on_copy(self, kind: str, at: int | None) -> tuple[int, int]:
        folder = self._new("run")
        shutil.copytree(self._root / "chain", folder, dirs_exist_ok=True)
        return killed(folder, lambda: self._again(kind, folder), at)

    def _again(self, kind: str, folder: Path) -> None:
        if kind == "compact":
            compact(folder / self._delta)
        else:
            with open(os.devnull, "w") as quiet:
                out, sys.stdout = sys.stdout, quiet
                try:
                    ckpt.main(["prune", str(folder), "--keep", "2"])
                finally:
                    sys.stdout = out

    def _wrong(self, folder: Path, kind: str) -> str:
        """Verify all that is complete, and compare the newest, and what was compacted, with the reference."""
        found = complete_checkpoints(folder)
        try:
            for path in found:
                verify_alone(path)
            compared = found[-1:] if kind == "save" else [folder / self._delta, *found[-1:]]
            for path in filter(Path.exists, compared):
                if different := self._different(path):
                    return f"{path.name}: {different} differ"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "" if found or kind == "save" else "nothing is left"

    def _different(self, checkpoint: Path) -> list[str]:
        return different_rows(checkpoint, self._reference / checkpoint.name)

    def _elsewhere(self, checkpoint: Path) -> str:
        links = tuple(Chain.of(checkpoint).names)
        if links in self._loaded:  # its bits were compared above
            return ""
        self._loaded.add(links)
        if self._pool is None:
            self._pool = RankPool(2)
        copy = self._new("copy")
        self._pool.run(reload, self._samples, checkpoint, copy)
        different = self._different(copy / checkpoint.name)
        return f"{checkpoint.name} on two ranks: {different} differ" if different else ""

    def _new(self, name: str) -> Path:
        folder = self._root / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder

    def _work(self, name: str, work: Callable[[], None]) -> int:
        status, operations = killed(self._root / name, work)
        assert status == 0, f"{name} ended with status {status}"
        return operations


def kill_small_saves(root: Path) -> tuple[int, list[str]]:
    """Kill saves of a small table without a training at every file operation; return their number, and what is wrong
    with what was left."""
    steps, folder, problems = 7, root / "small", list[str]()
    states = save_chain(folder, None, steps)

    def live() -> None:
        save_chain(folder, here(), steps, full_every=3, keep_last=2)

    status, operations = killed(folder, live)
    assert status == 0, "a life without a kill"
    for at in range(operations):
        shutil.rmtree(folder, ignore_errors=True)
        status, _ = killed(folder, live, at)
        if status != signal.SIGKILL:
            problems.append(f"small saves {at}: it ended with status {status}")
        for path in complete_checkpoints(folder):
            try:
                verify_alone(path)
                boxes = BoxReader(path)
                expected = states[step_of(path) or 0]
                if boxes.tensors.keys() != expected.keys():
                    raise AssertionError(f"{sorted(boxes.tensors)} are there")
                wrong = [name for name in expected if not torch.equal(boxes.read_whole(name), expected[name])]
                problems += [f"small saves {at}: {path.name}: {name} differs" for name in wrong]
            except Exception as error:
                problems.append(f"small saves {at}: {type(error).__name__}: {error}")
    return operations, problems


class Disk:
    """Watches the disk that a run's saves take, beside what `saves_at_once` tells."""

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._most = saves_at_once(KEEP_LAST, FULL_EVERY)
        self.problems = list[str]()
        self._largest = self._num_deltas = self._num_saves = self._of_whole = self._of_delta = 0

    def look(self) -> None:
        """A save was written."""
        there = complete_checkpoints(self._checkpoints)
        self._num_saves += 1
        newest = Manifest.read(there[-1])
        if newest.parent is None:
            self._of_whole = max(self._of_whole, folder_bytes(there[-1]))
        else:
            self._num_deltas += 1
            self._of_delta = max(self._of_delta, folder_bytes(there[-1]))
        if len(there) > sum(self._most):
            self.problems.append(f"{len(there)} saves after {self._num_saves}, needed at most {sum(self._most)}")
        self._largest = max(self._largest, sum(map(folder_bytes, there)))

    def end(self) -> list[str]:
        """Return what is wrong."""
        told = self._most[0] * self._of_whole + self._most[1] * self._of_delta
        print(
            f"{self._num_saves} saves, {self._num_deltas} of them deltas: at most {self._largest:,} bytes at once, "
            f"told {told:,}; the largest whole one {self._of_whole:,}, the largest delta {self._of_delta:,}",
            flush=True,
        )
        if self._largest > told:
            self.problems.append(f"{self._largest} bytes at once, needed at most {told}")
        if self._num_deltas < self._num_saves // 2:
            self.problems.append(f"{self._num_deltas} deltas")
        return self.problems


def bounded_disk(root: Path, steps: int) -> list[str]:
    """Train so many steps; return what is wrong with the disk that its saves took."""
    samples, checkpoints = root / "samples", root / "checkpoints"
    samples.mkdir()
    resharding.write_samples(samples / "samples.parquet")
    trainer, disk = Trainer(config_of(replace(LAYOUT, steps=steps), samples), here(), checkpoints), Disk(checkpoints)
    for report in trainer.train():
        if isinstance(report, SaveReport):
            disk.look()
    trainer.close()
    return disk.end()


def bounded_disk_of_small_saves(root: Path, steps: int) -> list[str]:
    """Change rows of a small table in so many steps, without a model, and save every ten; then compare the last one."""
    table, disk, parent, nothing = Table(), Disk(root), None, [torch.empty(0, dtype=torch.int64)] * 2
    changed = nothing
    for step in range(1, steps + 1):
        changed = [torch.cat(pair).unique() for pair in zip(changed, table.train(), strict=True)]
        if step % 10:
            continue
        parent = table.save(root, here(), step, parent if step // 10 % FULL_EVERY else None, changed, KEEP_LAST)
        changed = nothing
        disk.look()
    newest = complete_checkpoints(root)[-1]
    verify_alone(newest)
    boxes = BoxReader(newest)
    wrong = [name for name, tensor in table.named().items() if not torch.equal(boxes.read_whole(name), tensor)]
    return disk.end() + [f"{name} differs in {newest.name}" for name in wrong]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.save_chains", description=__doc__)
    parser.add_argument("--schedules", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="schedule to begin with")
    parser.add_argument("--small", action="store_true", help="kill saves of a small table at every operation, too")
    parser.add_argument("--steps", type=int, default=0, help="of a run whose disk is watched")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    problems, started = list[str](), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.schedules:
            schedules = Schedules(Path(folder))
            points = schedules.points(arguments.schedules)[arguments.first :]
            for number, point in enumerate(points, start=arguments.first + 1):
                if problem := schedules.try_one(*point):
                    problems.append(problem)
                    print(problem, flush=True)
                if number % 20 == 0:
                    print(f"{number} schedules, {time.perf_counter() - started:.0f} s", flush=True)
            schedules.close()
            print(f"{len(points)} kills at {schedules.operations} file operations: {len(problems)} wrong")
        if arguments.small:
            operations, found = kill_small_saves(Path(folder))
            problems += found
            print(f"{operations} kills, one at each file operation of small saves: {len(found)} wrong", flush=True)
    if arguments.steps:
        _be_alone()
        with tempfile.TemporaryDirectory() as folder:
            problems += bounded_disk_of_small_saves(Path(folder), arguments.steps)
    print(f"{time.perf_counter() - started:.0f} s; wrong: {problems or 'nothing'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
