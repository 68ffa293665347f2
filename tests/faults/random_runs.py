"""Runs of settings that are drawn at random, killed (SIGKILL) up to three times, at file operations or behind steps,
and resumed with other settings and ranks; what they have in the end equals a plain training: one that nobody killed,
and that has no cache, no look-ahead and no saves in between, where its settings allow that.

    python -m tests.faults.random_runs [--runs N] [--seed S] [--control NAME] [--groups N]

Where lives of a run add up in another order (other ranks, modes or pieces), the plain training does so from the same
step on: losses, figures of evaluations, weights, states, averages and ids are compared bit for bit in any case. So is
a replica of what a run published, with an export of the last checkpoint. Settings that refuse each other are drawn
again, and counted. A control damages the run on purpose, which must be noticed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from embershard.distributed import complete_checkpoints
from embershard.distributed.checkpoint.folder import leftovers
from embershard.distributed.checkpoint.load import BoxReader, read_scalars, verify_alone
from embershard.distributed.publish.published import PublicationError
from embershard.errors import ConfigError, EmbershardError
from embershard.extras.serving.serving_model import load
from embershard.extras.serving.serving_replica import Replica
from tests.faults import random_lives
from tests.faults.published_trainings import replica_differences
from tests.faults.random_lives import Meaning, Way, config_of, write_samples
from tests.faults.rank_kills import Pools
from tests.ranks.workers import RankError

_OPERATIONS = 250  # about so many in a whole life
_GROUPS = ("model.", "embedding_optimizer.", "dense_optimizer.", "average.")
_SCALARS = ("step", "samples", "stream", "evaluations")
_NEXT_RANK = "\n\n"
_MOST_LIVES = 30
_MOST_REFUSALS = 99  # of one run, by ranks
_IDS_BUCKETS = 12


@dataclass
class Tally:
    """What the runs had in them."""

    runs: int = 0
    lives: int = 0
    kills: int = 0
    refused: int = 0
    replicas: int = 0
    evictions: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, settings: Meaning | Way) -> None:
        for each in fields(settings):
            value = getattr(settings, each.name)
            if value != each.default and each.name not in ("killed_by", "operation", "step"):
                self.kinds[f"{each.name}={value}"] += 1

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in sorted(self.kinds.items()))
        return (
            f"{self.runs} runs, {self.lives} lives, {self.kills} killed, {self.evictions:,} evictions in those that "
            f"were not; {self.refused} draws refused, {self.replicas} replicas compared; {kinds}"
        )


def drawn_meaning(chance: random.Random, groups: int | None = None) -> Meaning:
    """Draw what the lives of a run share. `groups`: so many, in place of a number that is drawn."""
    some = chance.choice
    drawn = Meaning(
        optimizer=some(["sgd", "rowwise_adagrad", "rowwise_adagrad", "adagrad"]),
        dense=some(["sgd", "adagrad", "adam", "adamw"]),
        arch=some(["dlrm", "dlrm", "dlrm_dcn", "fm", "deepfm", "wide_deep"]),
        bags=some([False, True]),
        pooling=some(["sum", "mean"]),
        ids=some([False, False, True]),
        host_dtype=some(["fp32", "fp32", "fp32", "fp16", "int8"]),
        table_dtype=some(["fp32", "fp32", "fp32", "fp16"]),
        precision=some(["fp32", "fp32", "fp32", "bf16", "fp64"]),
        batch=some([8, 12, 20, 24, 36]),
        steps=chance.randint(8, 24),
        shuffle=some([False, True]),
        warm=some([False, False, True]),
        ema=some([None, None, 0.9]),
        clip_norm=some([None, None, 0.5]),
        dropout=some([0.0, 0.0, 0.0, 0.3]),
        warmup_steps=some([0, 0, 9]),
        eval_every=some([None, None, 4, 7]),
    )
    groups = groups or some([1, 1, 1, 2])
    if groups == 1:
        return drawn
    return replace(drawn, groups=groups, sync_every=some([1, 2, 3, 5]), ids=False)


def drawn_way(chance: random.Random, meaning: Meaning, is_last: bool) -> Way:
    """Draw how a life trains, and where it ends."""
    some = chance.choice
    ranks = some([1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 4] if meaning.groups == 1 else [2, 2, 2, 4])
    ratio, lookahead = some([0.1, 0.3, 0.5, 0.8, 1.0]), some([0, 1, 3, 8])
    ends: dict[str, Any] = {}
    if not is_last:
        ends = {"killed_by": chance.randrange(ranks), "operation": int(chance.triangular(0, _OPERATIONS, 40))}
        if chance.random() < 0.4:
            ends |= {"operation": None, "step": chance.randint(1, meaning.steps - 1), "is_stopped": some([False, True])}
    policy = some([None, "lookahead", "lru", "lfu"])
    return Way(
        ranks=ranks,
        sharding=some(["table_wise", "row_wise", "column_wise"]) if ranks > 1 and not meaning.ids else "table_wise",
        mode=some(["sharded"] * 5 + ["hot_cold", "data_parallel"]),
        exchange=some(["pooled", "pooled", "rows"]),
        policy=policy,
        decay=some([None, 0.9]) if policy == "lfu" else None,
        ratio=ratio,
        host=some(["memory", "memory", "mmap", "file"]),
        slot_map=some([None, "array", "hashed"]),
        transfer=some([None, None, "plain", "staged"]),
        overflow=some(["grow", "grow", "grow", "raise"]),
        lookahead=lookahead,
        prefetch=chance.randint(1, max(1, lookahead)),
        accumulate=1 if meaning.dropout else some([1, 1, 2, 3, 5]),  # masks depend on it
        save_every=chance.randint(1, 6),
        full_every=some([1, 2, 4]),
        keep_last=chance.randint(1, 3),
        keep_best=True if meaning.eval_every and chance.random() < 0.3 else None,
        asynchronous=some([None, False]),
        workers=some([0, 0, 1, 2]),
        parsed_ahead=chance.randint(1, 4),
        publish_every=some([None, None, 1, 3] if meaning.groups == 1 else [None]),
        base_every=None,
        **ends,
    )


def valid_way(chance: random.Random, meaning: Meaning, is_last: bool, root: Path, tally: Tally) -> Way:
    """Draw until settings do not refuse each other."""
    while True:
        way = drawn_way(chance, meaning, is_last)
        try:
            config_of(root, meaning, way)
        except ConfigError:
            tally.refused += 1
            continue
        return way


class Run:
    """A run in `root`, which lives and dies; samples are beside the folder.

    Args:
        root: an empty folder.
        control: what is done to it before it is compared.
        groups: so many; None: a number that is drawn.
    """

    def __init__(
        self, seed: int, root: Path, pools: Pools, tally: Tally, control: str = "", groups: int | None = None
    ) -> None:
        self._chance, self._root, self._pools, self._tally = random.Random(seed), root, pools, tally
        self._control, self._refusals, self._groups = control, 0, groups
        self._meaning = self._drawn_meaning()
        self._lives = list[tuple[Way, int | None]]()  # with the step from which it went on; None: killed before

    def _drawn_meaning(self) -> Meaning:
        while True:
            meaning = drawn_meaning(self._chance, self._groups)
            try:
                config_of(self._root, meaning, random_lives.plain(meaning, Way(ranks=meaning.groups)))
            except ConfigError:
                self._tally.refused += 1
                continue
            return meaning

    def __str__(self) -> str:
        return " | ".join([_changed(self._meaning), *(f"{start}: {_changed(way)}" for way, start in self._lives)])

    def problem(self) -> str:
        """Let it live, and compare; return what is wrong, or nothing."""
        try:
            if self._meaning.warm:
                self._pools.run(1, random_lives.train_earlier, self._root, self._meaning)
            self._live()
            return ", ".join([*self._left(), *self._published(), *self._different()][:9])
        except (RankError, AssertionError, EmbershardError, PublicationError) as error:
            print(error, file=sys.stderr)  # with the stacks of ranks
            return f"{type(error).__name__}: {str(error).partition(_NEXT_RANK)[0].splitlines()[-1]}"

    def _live(self) -> None:
        kills, is_over, self._tally.runs = self._chance.choice([0, 1, 1, 2, 3]), False, self._tally.runs + 1
        self._tally.add(self._meaning)
        while not is_over:
            way = valid_way(self._chance, self._meaning, len(self._lives) >= kills, self._root, self._tally)
            number = len(self._lives)
            self._lives.append((way, None))
            ended = self._pools.run(way.ranks, random_lives.live, self._root, self._meaning, way, number, self._control)
            if ended is not None and ended[0].refusal:
                self._lives.pop()
                self._tally.refused += 1
                self._refusals += 1
                assert self._refusals < _MOST_REFUSALS, f"{_changed(way)}: {ended[0].refusal}"
                continue
            starts = [start for kind, life, start in self._lines() if kind == "start" and life == number]
            self._lives[-1] = way, starts[0] if starts else None
            if starts == [0] and way.publish_every is None:  # it began anew: a later life would be refused by name
                shutil.rmtree(self._root / "published", ignore_errors=True)
            assert len(self._lives) < _MOST_LIVES, "it does not come to its end"
            self._tally.add(way)
            self._tally.lives, self._tally.kills = self._tally.lives + 1, self._tally.kills + (ended is None)
            self._tally.evictions += sum(each.evictions for each in ended or ())
            is_over = ended is not None and self._last.exists()

    @property
    def _last(self) -> Path:
        return self._root / "run" / "checkpoints" / f"step_{self._meaning.steps}"

    def _lines(self) -> list[Any]:
        path = self._root / "losses.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def _left(self) -> Iterator[str]:
        """Yield what is wrong with what the run left on the disk."""
        folder = self._root / "run" / "checkpoints"
        for path in complete_checkpoints(folder):
            verify_alone(path)
        yield from (f"{path.name} is left" for path in leftovers(folder))
        if (rows := self._root / "rows").exists():
            yield from (f"rows/{path.name} is left" for path in rows.iterdir())

    def _published(self) -> Iterator[str]:
        """Yield what a replica has otherwise than an export of the last checkpoint, if the last life published."""
        way, _ = self._lives[-1]
        if way.publish_every is not None:
            self._pools.run(1, random_lives.export, self._root, self._meaning, way, self._last)
            replica, trained = Replica(self._root / "published"), load(self._root / "exported")
            self._tally.replicas += 1
            yield from (
                f"of the replica, {name} differs" for name in replica_differences(trained, replica, self._meaning.steps)
            )

    def _different(self) -> Iterator[str]:
        """Yield what differs from plain trainings, of which each goes on where the one before ends."""
        expected, checkpoint = dict[tuple[str, int], str](), None
        for way, first, last in self._segments():
            done = self._pools.run(
                way.ranks, random_lives.train_plain, self._root, self._meaning, way, first, last, checkpoint
            )
            assert done is not None
            checkpoint = self._root / "plain" / str(first) / f"step_{last}"
            expected |= {(kind, step): value for kind, step, value in done[0]}
        found = self._surviving_lines()
        for (before, _), (_, start) in pairwise(self._lives):
            # It makes up for an evaluation in its own order of sums, with small rows cut in its own way.
            if before.is_stopped or start == self._meaning.steps:
                found.pop(("eval", start), None)
        for kind, step in found:
            if found[kind, step] != expected.get((kind, step)):
                yield f"{kind} at step {step}: {found[kind, step]}, needed {expected.get((kind, step))}"
        starts = {start for _, start in self._lives}
        missing = [step for kind, step in expected if kind == "loss" and (kind, step) not in found]
        if not starts.issuperset(missing):  # the last ones before a kill may not have been told
            yield f"no losses of the steps {missing}"
        assert checkpoint is not None
        yield from different_tensors(self._last, checkpoint)
        # An evaluation that is due where a run is asked to stop is left out, and a plain training ends with one.
        is_one = len(self._segments()) == 1 and not any(way.is_stopped for way, _ in self._lives)
        names = [name for name in _SCALARS if name != "evaluations" or is_one]
        scalars = [read_scalars(path) for path in (self._last, checkpoint)]
        yield from (f"{name} differs" for name in names if scalars[0].get(name) != scalars[1].get(name))

    def _segments(self) -> list[tuple[Way, int, int]]:
        """Return the ways by which steps that survived add up: from which step to which."""
        found = list[tuple[Way, int, int]]()
        lives = [(way, start) for way, start in self._lives if start is not None]
        ends = [start for _, start in lives[1:]] + [self._meaning.steps]
        for (way, start), end in zip(lives, ends, strict=True):
            same = random_lives.plain(self._meaning, way)
            if end > start and found and random_lives.plain(self._meaning, found[-1][0]) == same:
                found[-1] = (found[-1][0], found[-1][1], end)
            elif end > start:
                found.append((way, start, end))
        return found

    def _surviving_lines(self) -> dict[tuple[str, int], str]:
        found = dict[tuple[str, int], str]()
        for kind, step, value in self._lines():
            if kind == "start":
                found = {key: one for key, one in found.items() if key[1] <= value}
            else:
                assert found.setdefault((kind, step), value) == value, f"{kind} at step {step}: {value} the second time"
        return found


def different_tensors(found: Path, expected: Path) -> Iterator[str]:
    """Yield what two checkpoints have otherwise: weights, states, averages and ids; of tables of ids, the rows that ids
    have or share."""
    verify_alone(expected)
    readers = BoxReader(found), BoxReader(expected)
    names = [{name for name in reader.tensors if name.startswith(_GROUPS)} for reader in readers]
    yield from (f"{name} is in one of them" for name in sorted(names[0] ^ names[1]))
    for name in sorted(names[0] & names[1]):
        first, second = (reader.read_whole(name) for reader in readers)
        if ids := _ids_of(name, names[0]):
            has_id = readers[1].read_whole(ids)[:, 1] >= 0
            has_id[:: len(has_id) // _IDS_BUCKETS] = True
            first, second = first[has_id], second[has_id]
        if not torch.equal(_bits(first), _bits(second)):
            yield f"{found.name}: {name} differs"


def _ids_of(name: str, names: set[str]) -> str:
    """Return the name of the tensor that says which rows of this one have ids, or nothing."""
    path, _, kind = name.rpartition(".")
    table = f".{path.split('.')[-1]}.ids"
    if kind in ("ids", "id_candidates"):
        return ""
    return next((each for each in names if each.endswith(table)), "")


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _changed(settings: Meaning | Way) -> str:
    changed = [each for each in fields(settings) if getattr(settings, each.name) != each.default]
    return ", ".join(f"{each.name}={getattr(settings, each.name)}" for each in changed) or "defaults"


def try_run(seed: int, folder: Path, pools: Pools, tally: Tally, control: str = "", groups: int | None = None) -> str:
    """Try one run in an empty folder; return what is wrong, with the command that shows it, or nothing."""
    write_samples(folder)
    root = folder / "run"
    root.mkdir()
    run = Run(seed, root, pools, tally, control, groups)
    problem, asked = run.problem(), "" if groups is None else f" --groups {groups}"
    return problem and f"python -m tests.faults.random_runs --runs 1 --seed {seed}{asked}: {problem} ({run})"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.random_runs", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, help="so many in each run; default: one, or two, as is drawn")
    parser.add_argument("--control", choices=random_lives.CONTROLS, default="")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started, problems, tally, pools = time.perf_counter(), 0, Tally(), Pools()
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        with tempfile.TemporaryDirectory() as name:
            problem = try_run(seed, Path(name), pools, tally, arguments.control, arguments.groups)
        problems += bool(problem)
        print(problem or f"run {seed}: equal", flush=True)
    pools.close()
    print(f"{time.perf_counter() - started:.0f} s; {tally}")
    print(f"{problems} of {arguments.runs} runs differ")
    return (problems == 0) if arguments.control else (problems > 0)


if __name__ == "__main__":
    sys.exit(main())
