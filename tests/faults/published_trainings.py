"""Real trainings that publish, over several lives, each killed (SIGKILL) before a file operation or between two, and
resumed on 1, 2 or 4 ranks, with another plan, cache or mode, from an older checkpoint or none, with another learning
rate. After each life a replica that applied every delta from the start, and a new one, must have the trainer's whole
state at their publication, bit for bit; in the end also an export of the last checkpoint.

    python -m tests.faults.published_trainings [--schedules N] [--seed S] [--control NAME] [--commands N]

With a control something is done wrong on purpose, and it must be noticed: in the training (correction, dirtiness,
slots: in some schedule), or to a delta (swapped, dropped, repeated, flipped, foreign: in every one, by its name, and
the replica stays as it is). `--commands`: whole commands, with launchers that are killed, in place of lives in reused
processes.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from embershard.distributed.publish.published import (
    AlreadyAppliedError,
    DamagedError,
    MissingDeltaError,
    OtherChainError,
    PublicationError,
    published,
)
from embershard.extras.serving.serving_model import Model, load, table_names, weights_of
from embershard.extras.serving.serving_replica import Replica
from tests.faults import published_lives
from tests.faults.processes import SETTINGS, Training, still_alive
from tests.faults.processes import STEPS as COMMAND_STEPS
from tests.faults.published_lives import STEPS, Life
from tests.faults.rank_kills import Pools
from tests.ranks import commands, resharding
from tests.ranks.resharding import Layout
from tests.ranks.workers import RankError

#: Faults of a training, by the names of `tests.ranks.publications.with_fault`.
IN_TRAINING = {"correction": "no correction", "dirtiness": "dirtiness", "slots": "slots"}
#: Faults of a delta, and what says so.
OF_DELTAS = {
    "swapped": DamagedError,
    "dropped": MissingDeltaError,
    "repeated": AlreadyAppliedError,
    "flipped": DamagedError,
    "foreign": OtherChainError,
}
_MOST_LIVES = 4
_OPERATIONS = 500, 130  # about so many in a whole life: of the first rank, and of another one


@dataclass
class Tally:
    """What the schedules had in them."""

    lives: int = 0
    kills: int = 0
    checked: int = 0
    evictions: int = 0
    kinds: dict[str, int] = field(default_factory=dict)

    def add(self, what: str) -> None:
        self.kinds[what] = self.kinds.get(what, 0) + 1

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.kinds.items()))
        return (
            f"{self.lives} lives, {self.kills} killed; {self.checked} states of replicas compared; "
            f"{self.evictions:,} evictions in lives that ended; {kinds}"
        )


def chosen_life(chance: random.Random, optimizer: str, before: Life | None) -> Life:
    """Choose how a life trains; what is compared on a resume stays, but for the learning rate at times."""
    ranks = chance.choice([1, 1, 1, 2, 2, 4])
    layout = Layout(optimizer=optimizer, lookahead=chance.choice([0, 4]), policy=chance.choice(["lru", "lfu"]))
    modes = ["sharded", "sharded", "sharded", "hot_cold", "data_parallel"]
    if before is not None:
        modes += [before.layout.mode] * 5  # hot batches are another order, and such a change makes a base
    mode = chance.choice(modes)
    if mode == "sharded":
        kinds = ["row_wise", "table_wise", "column_wise"] if ranks > 1 else ["table_wise"]
        layout = replace(
            layout, sharding=chance.choice(kinds), kernel=chance.choice(["cached", "cached", "cached", "device"]),
            ratio=chance.choice([0.3, 0.5, 0.9]), exchange=chance.choice(["pooled", "pooled", "rows"]),
        )  # fmt: skip
    else:
        layout = replace(layout, mode=mode, ratio=0.7)
    if layout.kernel == "device":
        layout = replace(layout, lookahead=0, exchange="pooled")
    elif layout.lookahead:
        layout = replace(layout, policy="lookahead")
    kill: dict[str, Any] = {}
    if chance.random() < 0.8:
        killer = chance.randrange(ranks)
        kill = {"killed_by": killer, "operation": chance.randrange(_OPERATIONS[killer > 0])}
        if chance.random() < 0.2:
            kill |= {"operation": None, "step": chance.randint(1, STEPS - 1)}
    rate = 0.1 if before is None else before.rate
    if before is not None and chance.random() < 0.1:
        rate *= 0.9
    dtype = "fp32" if before is None else before.dtype
    if chance.random() < 0.1:
        dtype = chance.choice(["fp32", "fp16"])
    return Life(
        layout, ranks, rate, dtype, chance.choice([1, 2, 3]), chance.choice([3, 4, 5]),
        chance.choice([None, None, 2, 3]), chance.choice([2, 99]), **kill,
    )  # fmt: skip


def try_schedule(seed: int, root: Path, pools: Pools, tally: Tally, fault: str = "") -> str:
    """Let a run live several times in `root`; return what is wrong, or nothing."""
    chance = random.Random(seed)
    optimizer, life, follower = chance.choice(["rowwise_adagrad", "sgd"]), None, None
    resharding.write_samples(root / "samples.parquet")
    number = 0
    while True:
        life = chosen_life(chance, optimizer, life)
        if number >= _MOST_LIVES - 1 or (number and chance.random() < 0.2):
            life = replace(life, killed_by=None)
        life = replace(life, broken=fault)
        left = _take_back(root, chance, tally) if number else ""
        who = f"schedule {seed}, life {number}{left} ({life})"
        try:
            ended = pools.run(life.ranks, published_lives.live, root, life, number > 0)
        except RankError as error:
            return f"{who}: it failed: {error}"
        tally.lives, tally.kills, number = tally.lives + 1, tally.kills + (ended is None), number + 1
        for what in (f"{life.ranks} ranks", life.layout.mode, life.layout.kernel, f"exchange {life.layout.exchange}"):
            tally.add(what)
        try:
            follower = follow(root, follower, tally)
            if follower is not None and chance.random() < 0.3:
                compare(root, Replica(root / "published"), tally)
            if ended is not None:
                tally.evictions += sum(evictions for evictions, _ in ended)
                if life.killed_by is None:
                    _compare_with_export(root, follower, tally)
                    _compare_with_export(root, Replica(root / "published"), tally)
                    return ""
        except (DiffersError, PublicationError) as error:
            return f"{who}: {type(error).__name__}: {error}"


def _take_back(root: Path, chance: random.Random, tally: Tally) -> str:
    """Remove the newest checkpoint, or all of them, at times; return what was done."""
    found = sorted((root / "run" / "checkpoints").glob("step_*[0-9]"), key=lambda path: int(path.name[5:]))
    kept = len(found) - (chance.random() < 0.25)
    if chance.random() < 0.05:
        kept = 0
    for path in found[max(0, kept) :]:
        shutil.rmtree(path)
        tally.add("checkpoints removed")
    return f", without {[path.name for path in found[max(0, kept) :]]}" if kept < len(found) else ""


class DiffersError(AssertionError):
    """A replica has not what it must have."""


def follow(root: Path, follower: Replica | None, tally: Tally) -> Replica | None:
    """Let a replica that lives through all of it take what is there, one publication after the other."""
    if follower is None:
        bases = published(root / "published", "base")
        if not bases:
            return None
        with mock.patch.object(Replica, "update"):  # from the base on, delta by delta
            follower = Replica(root / "published")
        compare(root, follower, tally)
    while (path := root / "published" / f"delta_{follower.have.seq + 1}").exists():
        try:
            follower.apply(path)
        except PublicationError:
            break  # `update` knows whether there is a base in its place
        tally.add("deltas applied")
        compare(root, follower, tally)
    if follower.update():
        tally.add("bases taken in place of deltas")
    compare(root, follower, tally)
    return follower


def compare(root: Path, replica: Replica, tally: Tally) -> None:
    """Raise unless the replica has the trainer's whole state at its publication, each weight of it."""
    tally.checked += 1
    with replica.state() as (model, have):
        tables = dict(zip(table_names(model.inputs), (table.stored for table in model.tables), strict=True))
        dense = weights_of(model.dense)
        seen = {name: torch.zeros(rows.shape, dtype=torch.bool) for name, rows in tables.items()}
        for file in (root / "states").glob(f"{have.token}.rank_*"):
            for name, row, column, expected in torch.load(file):
                found = dense.pop(name) if row < 0 else _part(tables[name], row, column, expected)
                if row >= 0:
                    _part(seen[name], row, column, expected)[:] = True
                if not torch.equal(_bits(found), _bits(expected.to(found.dtype))):
                    raise DiffersError(f"{name} differs at {have.name}, step {have.step}")
        unknown = [*dense, *(name for name, marks in seen.items() if not marks.all())]
        if unknown:
            raise DiffersError(f"{have.name}, step {have.step}: the trainer did not have all of {unknown}")


def _part(table: Tensor, row: int, column: int, like: Tensor) -> Tensor:
    return table[row : row + like.shape[0], column : column + like.shape[1]]


def _bits(weights: Tensor) -> Tensor:
    return weights.contiguous().flatten().view(torch.uint8)


def _compare_with_export(root: Path, replica: Replica | None, tally: Tally) -> None:
    """Raise unless the replica is what an export of the last checkpoint is."""
    tally.checked += 1
    different = ["no replica"] if replica is None else replica_differences(load(root / "exported"), replica, STEPS)
    if different:
        raise DiffersError(f"an export of the last checkpoint differs: {different}")


def replica_differences(trained: Model, replica: Replica, step: int) -> list[str]:
    """Return which tables and weights of a replica are not those of an export, and what it has in place of the step."""
    with replica.state() as (model, have):
        pairs = zip(table_names(trained.inputs), model.tables, trained.tables, strict=True)
        found = [name for name, one, other in pairs if not torch.equal(_bits(one.stored), _bits(other.stored))]
        weights = weights_of(trained.dense)
        found += [name for name, weight in weights_of(model.dense).items() if not torch.equal(weight, weights[name])]
        return [*found, *([] if have.step == step else [have.name])]


# -- deltas that are not what was published


def refuses(control: str, root: Path, other: Path, chance: random.Random) -> str:
    """Hand a replica a wrong delta; return what is wrong with its answer, or nothing.

    Args:
        root, other: two runs.
    """
    folder, tally = root / "tampered", Tally()
    shutil.rmtree(folder, ignore_errors=True)
    newest = max(seq for seq, _ in published(root / "published", "delta"))
    base = max(seq for seq, _ in published(root / "published", "base") if seq <= newest - 2)
    shutil.copytree(root / "published" / f"base_{base}", folder / f"base_{base}")
    replica = Replica(folder)
    place = chance.randint(base + 1, newest - 1)
    for seq in range(base + 1, newest + 1):
        shutil.copytree(root / "published" / f"delta_{seq}", folder / f"delta_{seq}")
    for seq in range(base + 1, place):
        replica.apply(folder / f"delta_{seq}")
    wrong = _tamper(control, folder, place, other, chance)
    if control == "repeated":
        replica.apply(wrong)
    said = ""
    try:
        replica.apply(wrong)
        said = f"delta_{place}, {control}: was applied"
    except PublicationError as error:
        if not isinstance(error, OF_DELTAS[control]):
            said = f"delta_{place}, {control}: {type(error).__name__}: {error}"
    have = place if control == "repeated" else place - 1
    if replica.have.seq != have:
        said = f"delta_{place}, {control}: the replica has {replica.have.name}"
    compare(root, replica, tally)
    return said


def _tamper(control: str, folder: Path, place: int, other: Path, chance: random.Random) -> Path:
    """Do it to a delta, and return the one that a replica gets next."""
    delta, following = folder / f"delta_{place}", folder / f"delta_{place + 1}"
    if control == "swapped":
        delta.rename(folder / "aside")
        following.rename(delta)
        (folder / "aside").rename(following)
    elif control == "dropped":
        shutil.rmtree(delta)
        return following
    elif control == "flipped":
        file = chance.choice(sorted(delta.iterdir()))
        content = bytearray(file.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        file.write_bytes(content)
    elif control == "foreign":
        found = published(other / "published", "delta")
        shutil.rmtree(delta)
        seq = next((seq for seq, _ in found if seq == place), found[0][0])
        delta = folder / f"delta_{seq}"
        shutil.rmtree(delta, ignore_errors=True)
        shutil.copytree(other / "published" / f"delta_{seq}", delta)
    return delta


def whole_run(root: Path, pools: Pools, seed: int) -> Path:
    """A run of one life that publishes after each step."""
    root.mkdir()
    resharding.write_samples(root / "samples.parquet")
    life = Life(Layout(lookahead=4, policy="lookahead", sharding="table_wise"), rate=0.1 + 0.01 * seed, every=1)
    pools.run(life.ranks, published_lives.live, root, life, False)
    return root


# -- whole commands


def _settings(chance: random.Random, folder: Path) -> list[str]:
    """The same training, by another cache."""
    given = [text for text in SETTINGS if not text.startswith(("train.batch_size", "look_ahead"))]
    return [
        *given, "train.global_batch_size=128", "train.batch_size=none", "cache.ratio=0.3",
        f"publish.folder={folder / 'published'}", "publish.every_steps=3", "publish.base_every=4",
        f"cache.policy={chance.choice(['lru', 'lfu', 'lookahead'])}", f"look_ahead.lookahead={chance.choice([0, 8])}",
    ]  # fmt: skip


def try_command(seed: int, folder: Path) -> str:
    """Train by the command, and kill launcher and ranks; return what is wrong, or nothing."""
    chance, follower = random.Random(seed), None
    for life in range(_MOST_LIVES):
        more = ["--nproc", str(chance.choice([1, 2])), *(["--resume"] if life else [])]
        run = Training(folder / "run", *more, settings=_settings(chance, folder))
        if life < _MOST_LIVES - 1:
            step = chance.randrange(3, COMMAND_STEPS - 2)
            steps = range(step, COMMAND_STEPS + 1)
            run.wait_for(lambda steps=steps, run=run: any(f"step {n}/" in run.text for n in steps))
            time.sleep(chance.uniform(0, 0.3))
            processes = run.ranks()
            run.process.kill()
            for process in processes:
                process.kill()
            still_alive(processes)
        run.end()
        if follower is None and list((folder / "published").glob("base_*[0-9]")):
            follower = Replica(folder / "published")
        if follower is not None:
            follower.update()
    done = commands.run(["export", str(folder / "run"), "-o", str(folder / "exported"), "--step", "last"], folder)
    if done.returncode:
        return f"command {seed}: {done.stderr[-300:]}"
    trained = load(folder / "exported")
    for who, replica in (("a follower", follower), ("a new replica", Replica(folder / "published"))):
        if replica is None or (different := replica_differences(trained, replica, COMMAND_STEPS)):
            return f"command {seed}: {who} differs: {different}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.published_trainings", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--schedules", type=int, default=300)
    parser.add_argument("--commands", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", choices=[*IN_TRAINING, *OF_DELTAS])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started, problems, tally, pools = time.perf_counter(), list[str](), Tally(), Pools()
    seeds = range(arguments.seed, arguments.seed + arguments.schedules)
    with tempfile.TemporaryDirectory() as name:
        if arguments.control in OF_DELTAS:
            runs = [whole_run(Path(name, f"run_{number}"), pools, number) for number in range(2)]
            found = [refuses(arguments.control, *runs, random.Random(seed)) for seed in seeds]
            problems += filter(None, found)
        else:
            fault = IN_TRAINING.get(arguments.control, "")
            for seed in seeds:
                root = Path(name, str(seed))
                root.mkdir()
                if (recorded := Path(name, "dense.pt2")).exists():
                    shutil.copyfile(recorded, root / "dense.pt2")
                problem = try_schedule(seed, root, pools, tally, fault)
                if (root / "dense.pt2").exists():
                    shutil.copyfile(root / "dense.pt2", recorded)
                shutil.rmtree(root)
                problems += [problem] if problem else []
                print(problem or f"schedule {seed}: equal", flush=True)
    pools.close()
    for seed in range(arguments.seed, arguments.seed + arguments.commands):
        with tempfile.TemporaryDirectory() as name:
            problem = try_command(seed, Path(name))
        problems += [problem] if problem else []
        print(problem or f"command {seed}: equal", flush=True)
    seconds = time.perf_counter() - started
    if arguments.control in OF_DELTAS:
        print(f"{arguments.control}: {arguments.schedules} wrong deltas in {seconds:.0f} s")
    else:
        print(f"{arguments.schedules} schedules, {arguments.commands} commands in {seconds:.0f} s: {tally}")
    if arguments.control in IN_TRAINING:
        print(f"{arguments.control}: noticed in {len(problems)}")
        return 0 if problems else 1
    print(f"{len(problems)} wrong")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
