"""Trainings that follow a folder, killed (SIGKILL) at some point and resumed on other ranks, while files arrive; then
the ids of the samples in the surviving history must be those of the files, each once, in the journal's order.
`python -m tests.faults.following [--runs N] [--kills N] [--seed S] [--without journal]`.

The history that survives is that of the checkpoints: what a life trained after the checkpoint from which the next one
goes on does not count. Each rank notes the ids of a batch before it trains.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch

from embershard.data.sources.followed import FollowedSource
from embershard.data.sources.journal import Journal
from embershard.distributed import Supervision, process_group
from embershard.training.checkpoint.resume import resume_run
from embershard.training.config import RunConfig
from embershard.training.trainer import Trainer
from tests.ranks.time_order import GLOBAL_BATCH, HOUR, NUM_ITEMS, NUM_USERS, make_config

NUM_FILES, IDLE_SECONDS, MOST_SECONDS = 8, 1.5, 900.0
_POINTS = {"open", "os.rename", "os.mkdir", "os.remove"}


@dataclass
class _Points:
    """Counts what this process does in the run's folder, and kills it at number `at`."""

    folder: str = ""
    at: int = -1
    count: int = 0

    def reach(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


_HERE = _Points()


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _HERE.folder and event in _POINTS and str(arguments[0]).startswith(_HERE.folder):
        _HERE.reach()


@dataclass
class Files:
    """The files of a run: written to a folder one after another, under names that say nothing of that order.

    Attributes:
        ids, windows: by name, of each row.
        left: names of those that are not there yet.
    """

    folder: Path
    chance: random.Random
    ids: dict[str, list[int]] = field(default_factory=dict)
    windows: dict[str, list[int]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    _tables: dict[str, pa.Table] = field(default_factory=dict)

    def make(self) -> None:
        """Make the rows of all files, in memory."""
        draw, start = np.random.default_rng(self.chance.randrange(1 << 30)), 0
        ending = self.chance.choice([".parquet", ".csv"])
        for number, place in enumerate(self.chance.sample(range(30), NUM_FILES)):
            count = self.chance.choice([1, 7, 20, 45, 90])
            hours = np.sort(draw.uniform(number - 0.7, number + 0.8, count))
            name = f"part_{place}{ending}"
            ids = np.arange(start, start + count)
            columns = {"label": draw.integers(0, 2, count), "number": ids}
            columns |= {"user": draw.integers(0, NUM_USERS, count), "item": draw.integers(0, NUM_ITEMS, count)}
            columns["at"] = (10**6 * HOUR + hours * HOUR).astype(np.int64)
            self._tables[name], self.ids[name] = pa.table(columns), ids.tolist()
            self.windows[name] = (columns["at"] // HOUR).tolist()
            self.left.append(name)
            start += count

    def write_next(self) -> None:
        """Put the next file in its place, when it is complete."""
        name = self.left.pop(0)
        partial = self.folder / f"{name}.tmp"
        if name.endswith(".csv"):
            pyarrow.csv.write_csv(self._tables[name], partial)
        else:
            pq.write_table(self._tables[name], partial, row_group_size=16)
        partial.rename(self.folder / name)

    def expected(self, names: list[str]) -> list[tuple[int, int]]:
        """Return id and window of each sample, in the order in which the files of these names train."""
        found, newest = list[tuple[int, int]](), -1
        for name in names:
            taken = [
                (max(window, newest), sample) for window, sample in zip(self.windows[name], self.ids[name], strict=True)
            ]
            found += [(sample, window) for window, sample in sorted(taken, key=lambda each: each[0])]
            newest = max(newest, *self.windows[name])
        return found


def _config(files: Files, is_shuffled: bool, lookahead: int, ends: bool) -> RunConfig:
    config = make_config(files.folder, lookahead)
    table = replace(config.data.table, files=("part_*",))
    idle_seconds = IDLE_SECONDS if ends else None
    data = replace(config.data, table=table, follow=True, idle_seconds=idle_seconds, shuffle=is_shuffled, chunk_rows=16)
    return replace(config, data=data, checkpoint=replace(config.checkpoint, every_steps=4, keep_last=2))


def _live(root: Path, config: RunConfig, log: Path, without: str | None) -> None:
    """A life on this rank, to the end of the data or its death."""
    note = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with process_group("cpu") as ranks:
        if ranks.is_first:
            _instrument(str(root / "run"))
        finish = _journal_late() if without == "journal" else lambda: None
        trainer = Trainer(config, ranks, root / "run" / "checkpoints", Supervision())
        resume_run(trainer)
        os.write(note, json.dumps({"start": trainer.steps}).encode() + b"\n")
        step = trainer.step

        def noting(batch: Any) -> Any:
            ids = np.rint(np.expm1(batch.dense_features[:, 0].double().numpy())).astype(int).tolist()
            os.write(note, json.dumps({"step": trainer.steps, "ids": ids}).encode() + b"\n")
            _HERE.reach()
            return step(batch)

        trainer.step = noting  # type: ignore[method-assign]
        for _ in trainer.train():
            pass
        trainer.close()
        finish()


def _instrument(folder: str) -> None:
    """Count file operations in the run's folder, and the journal's moments."""
    _HERE.folder = folder
    sys.addaudithook(_watch)
    for owner, name in ((Journal, "append"), (FollowedSource, "offer"), (os, "fsync")):
        _count_around(owner, name)


def _count_around(owner: Any, name: str) -> None:
    inner = getattr(owner, name)

    def counted(*given: Any) -> Any:
        _HERE.reach()
        found = inner(*given)
        _HERE.reach()
        return found

    setattr(owner, name, counted)


def _journal_late() -> Callable[[], None]:
    """Leave out what must be noticed: note files after their samples were offered. Return what notes them."""
    append, offered = Journal.append, list[Any]()

    def late(self: Journal, file: Any) -> None:
        offered.append((self, file))
        self.files.append(file)

    def note() -> None:
        for journal, file in offered:
            append(journal, file)

    Journal.append = late  # type: ignore[method-assign]
    return note


def _start(root: Path, number: int, world_size: int, config: RunConfig, kill_at: int, without: str | None) -> list[int]:
    """Start the ranks of a life; return their process ids."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child:
            children.append(child)
            continue
        status = 1
        try:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            os.environ.update({name: str(value) for name, value in place.items()}, MASTER_PORT=port)
            os.environ.update(MASTER_ADDR="127.0.0.1")
            said = os.open(root / f"life_{number}_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(said, 1)
            os.dup2(said, 2)
            _HERE.at = kill_at if rank == 0 else -1
            _live(root, config, root / f"life_{number}_{rank}.jsonl", without)
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    return children


def _end(
    children: list[int], files: Files, chance: random.Random, most_seconds: float, watched: Path | None
) -> list[int]:
    """Let files arrive until a rank of a life has died, for some time or until the `watched` run has a checkpoint; end
    its ranks. Return their exit codes."""
    ends_at, codes = time.monotonic() + most_seconds, dict[int, int]()
    while len(codes) < len(children):
        for child in children:
            if child not in codes and (found := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(found[1])
        if any(codes.values()) or time.monotonic() > ends_at or (watched and _has_saved(watched)):
            break
        if files.left and chance.random() < 0.3:
            files.write_next()
        time.sleep(0.05)
    for child in children:
        if child not in codes:
            os.kill(child, signal.SIGKILL)
            codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return [codes[child] for child in children]


def try_run(seed: int, root: Path, kills: int, without: str | None = None) -> tuple[str, int]:
    """Let a run live and die so often, then live to its end. Return what is wrong, or nothing; and the kills."""
    chance, num_killed = random.Random(seed), 0
    files = Files(root / "clicks", chance)
    files.folder.mkdir()
    files.make()
    is_shuffled = chance.random() < 0.5
    for life in range(kills + 1):
        is_last, world_size = life == kills, chance.choice([1, 2])
        while is_last and files.left:
            files.write_next()
        config = _config(files, is_shuffled, chance.choice([0, 5]), ends=is_last)
        kill_at, most_seconds = chance.randint(1, 120), chance.uniform(4, 9)
        if is_last or without is not None:
            kill_at, most_seconds = -1, MOST_SECONDS
        children = _start(root, life, world_size, config, kill_at, without)
        watched = root if without is not None and not is_last else None
        codes = _end(children, files, chance, most_seconds, watched)
        num_killed += codes[0] == -signal.SIGKILL
        if codes[0] not in (0, -signal.SIGKILL) or (is_last and any(codes)):
            return f"run {seed}, life {life}: exit codes {codes}: {_said(root, life)}", num_killed
    return _problem(root, files, kills, is_shuffled), num_killed


def _has_saved(root: Path) -> bool:
    """Return whether there is a checkpoint: of a life that leaves something out, which dies then."""
    return any((root / "run" / "checkpoints").glob("step_*[0-9]"))


def _said(root: Path, life: int) -> str:
    return " | ".join(path.read_text()[-300:] for path in sorted(root.glob(f"life_{life}_*.txt")))


def _problem(root: Path, files: Files, kills: int, is_shuffled: bool) -> str:
    found = [sample for batch in _history(root, kills) for sample in batch]
    journal = [json.loads(line)["name"] for line in (root / "run" / "files.jsonl").read_text().splitlines()]
    if sorted(journal) != sorted(files.ids):
        return f"the journal has {journal}"
    wanted = files.expected(journal)
    wanted = wanted[: len(wanted) // GLOBAL_BATCH * GLOBAL_BATCH]
    twice = sorted({sample for sample in found if found.count(sample) > 1})
    if len(found) != len(wanted) or twice:
        return f"{len(found)} samples trained, {len(wanted)} needed; twice: {twice[:9]}"
    window_of = dict(files.expected(journal))
    order = [window_of[sample] for sample in found]
    if order != sorted(order):
        return "a later window trained first"
    if not is_shuffled and found != [sample for sample, _ in wanted]:
        return "another order"
    return ""


def _history(root: Path, kills: int) -> list[list[int]]:
    """Return the ids of each step, of the lives whose steps survived."""
    history = list[list[int]]()
    for life in range(kills + 1):
        of_ranks = [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in sorted(root.glob(f"life_{life}_*.jsonl"))
        ]
        if not of_ranks or not of_ranks[0]:
            continue  # killed before it began
        del history[of_ranks[0][0]["start"] :]
        whole = min(map(len, of_ranks))
        history += [[sample for rank in of_ranks for sample in rank[line]["ids"]] for line in range(1, whole)]
    return history


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.following", description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--kills", type=int, default=5, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--without", choices=["journal"], help="a negative control: it is written after the offer")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    problems, num_killed, started = 0, 0, time.perf_counter()
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        with tempfile.TemporaryDirectory() as folder:
            problem, killed = try_run(seed, Path(folder), arguments.kills, arguments.without)
        num_killed += killed
        problems += bool(problem)
        print(problem or f"run {seed}: every sample once, {killed} kills", flush=True)
    print(f"{num_killed} killed lives in {time.perf_counter() - started:.0f} s: {problems} wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
