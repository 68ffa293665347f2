"""Trainings that follow a folder, killed (SIGKILL) at some point and resumed on other ranks, while files arrive; then
the ids of the samples in the surviving history must be those of the files, each once, in the journal's order.
`python -m tests.faults.following [--runs N] [--kills N] [--seed S] [--files N] [--bad N] [--without journal|begun]`.

With `--bad N` so many of the files are bad, in the ways of `tests.faults.bad_files`, and files that wait in the journal
change or vanish between lives. A life must end at a bad file and name it. What a user would do follows: the file is
mended or removed, and the run resumed; nobody touches the journal.

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
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import torch

from embershard.distributed import Supervision, process_group
from embershard.extras.following.followed import FollowedSource, Journal
from embershard.training.checkpoint.resume import resume_run
from embershard.training.config import RunConfig
from embershard.training.trainer import Trainer
from tests.faults import bad_files
from tests.faults.children import fork
from tests.ranks.time_order import GLOBAL_BATCH, HOUR, NUM_ITEMS, NUM_USERS, make_config

IDLE_SECONDS, MOST_SECONDS = 1.5, 900.0
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
        bad: of those that are bad, until they are mended: in which way.
    """

    folder: Path
    chance: random.Random
    count: int = 8
    num_bad: int = 0
    ids: dict[str, list[int]] = field(default_factory=dict)
    windows: dict[str, list[int]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    _tables: dict[str, pa.Table] = field(default_factory=dict)

    def make(self) -> None:
        """Make the rows of all files, in memory."""
        draw, start = np.random.default_rng(self.chance.randrange(1 << 30)), 0
        ending = self.chance.choice([".parquet", ".csv"])
        ways = [list(bad_files.WAYS)[number % len(bad_files.WAYS)] for number in range(self.num_bad)]
        way_of = dict(zip(self.chance.sample(range(self.count), self.num_bad), ways, strict=True))
        for number, place in enumerate(self.chance.sample(range(4 * self.count), self.count)):
            count = self.chance.choice([1, 7, 20, 45, 90])
            hours = np.sort(draw.uniform(number - 0.7, number + 0.8, count))
            way = way_of.get(number)
            name = f"part_{place}{ending if way is None else bad_files.ending_of(way)}"
            if way is not None:
                self.bad[name], count = way, max(count, bad_files.LEAST_ROWS)
                hours = np.sort(draw.uniform(number - 0.7, number + 0.8, count))
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
        self.write(self.left.pop(0))

    def write(self, name: str) -> None:
        partial = self.folder / f"{name}.tmp"
        if name.endswith(".csv"):
            pyarrow.csv.write_csv(self._tables[name], partial)
        else:
            pq.write_table(self._tables[name], partial, row_group_size=16, write_page_checksum=True)
        if name in self.bad:
            bad_files.spoil(self.bad[name], partial)
        partial.rename(self.folder / name)

    def change(self, name: str) -> None:
        """Put other samples into a file, as many; or remove it."""
        if self.chance.random() < 0.5:
            return self.remove(name)
        start = 1 + max(map(max, self.ids.values()))  # float32 tells them apart
        self.ids[name] = list(range(start, start + len(self.ids[name])))
        table = self._tables[name]
        self._tables[name] = table.set_column(table.column_names.index("number"), "number", [self.ids[name]])
        self.write(name)

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()
        del self.ids[name], self.windows[name]

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


def _mend(files: Files, said: str) -> str:
    """Do what a user would where a life said why it ended: mend the file, or remove it. Return its name."""
    name = next((name for name in files.bad if f"/{name}" in said and "mend it in place" in said), "")
    if name:
        del files.bad[name]
        files.remove(name) if files.chance.random() < 0.3 else files.write(name)
    return name


def _change_waiting(root: Path, files: Files, lives: int) -> None:
    """Change a file that the journal has, and of which nothing has trained in any life."""
    seen = {sample for life in range(lives) for batch in _history(root, life + 1) for sample in batch}
    waiting = [name for name in _journal(root) if name in files.ids and seen.isdisjoint(files.ids[name])]
    if waiting:
        files.change(files.chance.choice(waiting))


def _remove_begun(root: Path, files: Files) -> None:
    """Remove the file of which a part has trained at the newest checkpoint, as nobody may."""
    steps = [int(path.name[5:]) for path in (root / "run" / "checkpoints").glob("step_*[0-9]")]
    start, position = 0, GLOBAL_BATCH * max(steps, default=0)
    for name in _journal(root):
        end = start + len(files.ids[name])
        if start < position < end:
            return files.remove(name)
        start = end


def _journal(root: Path) -> list[str]:
    journal = root / "run" / "files.jsonl"
    return [json.loads(line)["name"] for line in journal.read_bytes().splitlines()] if journal.exists() else []


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
        if without == "begun":
            FollowedSource.num_begun = lambda self, position: 0  # type: ignore[method-assign]
            FollowedSource.check_state = lambda *_: None  # type: ignore[method-assign]
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

    def live(rank: int) -> None:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_PORT=port)
        os.environ.update(MASTER_ADDR="127.0.0.1")
        said = os.open(root / f"life_{number}_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(said, 1)
        os.dup2(said, 2)
        _HERE.at = kill_at if rank == 0 else -1
        _live(root, config, root / f"life_{number}_{rank}.jsonl", without)

    return [fork(partial(live, rank)) for rank in range(world_size)]


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


def try_run(
    seed: int, root: Path, kills: int, without: str | None = None, count: int = 8, num_bad: int = 0
) -> tuple[str, int]:
    """Let a run live and die so often, then live to its end. Return what is wrong, or nothing; and the kills."""
    chance, num_killed, life, named = random.Random(seed), 0, 0, list[str]()
    files = Files(root / "clicks", chance, count, num_bad)
    files.folder.mkdir()
    if num_bad:
        bad_files.make_no_files(files.folder)
    files.make()
    is_shuffled = chance.random() < 0.5
    is_over, wanted = False, sorted(files.bad)
    while not is_over:
        is_last, world_size = num_killed >= kills, chance.choice([1, 1, 1, 2] if num_bad else [1, 2])
        while is_last and files.left:
            files.write_next()
        config = _config(files, is_shuffled, chance.choice([0, 5]), ends=is_last)
        kill_at, most_seconds = chance.randint(1, 120 + 40 * num_bad), chance.uniform(4, 9)
        if is_last or without is not None:
            kill_at, most_seconds = -1, MOST_SECONDS
        children = _start(root, life, world_size, config, kill_at, without)
        watched = root if without is not None and not is_last else None
        codes = _end(children, files, chance, most_seconds, watched)
        life += 1
        if num_bad and 1 in codes and (name := _mend(files, _said(root, life - 1, 3000))):
            named.append(name)
            continue
        if codes[0] not in (0, -signal.SIGKILL) or (is_last and any(codes)):
            return f"run {seed}, life {life - 1}: exit codes {codes}: {_said(root, life - 1)}", num_killed
        num_killed += codes[0] == -signal.SIGKILL
        is_over = is_last
        if not is_last and without == "begun":
            _remove_begun(root, files)
        elif not is_last and num_bad:
            _change_waiting(root, files, life)
    if sorted(named) != wanted:
        return f"bad files {wanted}; named were {sorted(named)}", num_killed
    return _problem(root, files, life, is_shuffled), num_killed


def _has_saved(root: Path) -> bool:
    """Return whether there is a checkpoint: of a life that leaves something out, which dies then."""
    return any((root / "run" / "checkpoints").glob("step_*[0-9]"))


def _said(root: Path, life: int, most: int = 300) -> str:
    return " | ".join(path.read_text()[-most:] for path in sorted(root.glob(f"life_{life}_*.txt")))


def _problem(root: Path, files: Files, lives: int, is_shuffled: bool) -> str:
    found = [sample for batch in _history(root, lives) for sample in batch]
    journal = _journal(root)
    if sorted(journal) != sorted(files.ids):
        return f"the journal has {journal}"
    wanted = files.expected(journal)
    wanted = wanted[: len(wanted) // GLOBAL_BATCH * GLOBAL_BATCH]
    twice = sorted({sample for sample in found if found.count(sample) > 1})
    window_of = dict(files.expected(journal))
    strange = [sample for sample in found if sample not in window_of]
    if len(found) != len(wanted) or twice or strange:
        of_none = f"of no file: {strange[:9]}"
        return f"{len(found)} samples trained, {len(wanted)} needed; twice: {twice[:9]}; {of_none}"
    order = [window_of[sample] for sample in found]
    if order != sorted(order):
        return "a later window trained first"
    if not is_shuffled and found != [sample for sample, _ in wanted]:
        return "another order"
    return ""


def _history(root: Path, lives: int) -> list[list[int]]:
    """Return the ids of each step, of the lives whose steps survived."""
    history = list[list[int]]()
    for life in range(lives):
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
    parser.add_argument("--files", type=int, default=8, help="of each run")
    parser.add_argument("--bad", type=int, default=0, help="files of them that are bad")
    controls = "a negative control: it is written after the offer; or files of which a part has trained are dropped"
    parser.add_argument("--without", choices=["journal", "begun"], help=controls)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    problems, num_killed, started = 0, 0, time.perf_counter()
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        with tempfile.TemporaryDirectory() as folder:
            given = (arguments.kills, arguments.without, arguments.files, arguments.bad)
            problem, killed = try_run(seed, Path(folder), *given)
        num_killed += killed
        problems += bool(problem)
        print(problem or f"run {seed}: every sample once, {killed} kills, {arguments.bad} bad files named", flush=True)
    print(f"{num_killed} killed lives in {time.perf_counter() - started:.0f} s: {problems} wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
