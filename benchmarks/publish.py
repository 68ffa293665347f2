"""Cost of publications: bytes, what training waits, what tracking costs, and what an apply holds up.

    python -m benchmarks.publish

One rank of `embershard train` (its trainer, without the launcher) on generated clicks of Criteo's shape, with the
quickstart's model, and a cache with look-ahead. It publishes whenever about a hundredth of the rows was trained.

    bytes      of a delta's rows over the touched rows' own bytes, without and with the keys
    wait_ms    for which training stood still per publication, beside the median step
    tracking   median step with tracking over that without, in blocks of 20 steps by turns in one run
    lock_ms    for which an apply kept answers waiting, and `apply_ms`, all of it
    delay      in a second run, with a replica that follows in a process of its own and looks every 50 ms: seconds until
               an update was served, `newest` from the cut on, `oldest` from the cut before on; `lock_ms` as above,
               beside training
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from benchmarks.common import make_parser, report
from benchmarks.one_rank import add_run_options, measured, run_config

if TYPE_CHECKING:
    from embershard.training.config import RunConfig

_WARMUP_STEPS, _BLOCK = 20, 20
_LOOK_SECONDS = 0.05


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    add_run_options(parser)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=25, help="steps from publication to publication")
    parser.add_argument("--delay-steps", type=int, default=200, help="steps of the run with a replica; 0: none")
    options = parser.parse_args()
    report(measured("publish", options, run), options.output)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure in this process."""
    from embershard.distributed import process_group
    from embershard.extras.serving.serving_replica import Replica
    from embershard.extras.serving.write import export_base
    from embershard.launch.screen import silence_libraries
    from embershard.training.trainer import Trainer

    silence_libraries()
    config = _config(options, folder / "published")
    with process_group("cpu") as ranks:
        trainer = Trainer(config, ranks, export=partial(export_base, config))
        training = trainer.train()
        reports = [next(training)]  # the base
        replica = Replica(folder / "published")
        found = train(trainer, training, reports)
        trainer.close()
        found |= {**bytes_of(folder / "published", options.dim), **apply(replica)}
        if options.delay_steps:
            del trainer, training, replica
            found["delay"] = delay(options, folder / "followed", ranks)
    return found


def train(trainer: Any, training: Any, reports: list[Any]) -> dict[str, Any]:
    """Train to the end, with tracking and without by turns; rows without are not published."""
    from embershard.cache.parts.changed import ChangedKeys
    from embershard.training.reports import PublicationReport

    changed, is_tracked = ChangedKeys.changed, [True]

    def switched(self: ChangedKeys, keys: Any) -> None:
        if is_tracked[0]:
            changed(self, keys)

    with mock.patch.object(ChangedKeys, "changed", switched):
        for each in training:  # a report per step, at least
            is_tracked[0] = trainer.steps // _BLOCK % 2 == 0
            if isinstance(each, PublicationReport):
                reports.append(each)
    steps: dict[bool, list[float]] = {True: [], False: []}
    for step, seconds in enumerate(trainer.step_seconds):
        if step >= _WARMUP_STEPS and step % _BLOCK:  # the step behind a switch may have both
            steps[step // _BLOCK % 2 == 0].append(seconds * 1e3)
    median = {is_on: statistics.median(values) for is_on, values in steps.items()}
    deltas = [each for each in reports if each.name.startswith("delta")]
    waits = [each.stall_seconds * 1e3 for each in deltas]
    return {
        "step_ms": {"tracked": round(median[True], 2), "not": round(median[False], 2)},
        "tracking": round(median[True] / median[False], 3),
        "rows": [each.rows for each in deltas],
        "wait_ms": [round(wait, 1) for wait in waits],
        "wait_over_step": round(statistics.median(waits) / median[False], 2),
        "write_ms": [round(each.seconds * 1e3) for each in deltas],
        "base_seconds": round(reports[0].seconds, 1),
    }


def bytes_of(folder: Path, dim: int) -> dict[str, Any]:
    """Return the bytes of rows in deltas over those of the touched rows; dense weights are counted apart."""
    from embershard.distributed.publish.published import DENSE, published, read_publication

    rows = num_bytes = dense = 0
    for _, path in published(folder, "delta"):
        delta = read_publication(path)
        rows, dense = rows + delta.num_rows, dense + delta.files[DENSE][0]
        num_bytes += delta.num_bytes - delta.files[DENSE][0]
    own = rows * dim * 4
    return {"bytes": {"rows": own, "over_rows": round(num_bytes / own, 3),
                      "beyond_keys": round((num_bytes - 8 * rows) / own, 3), "dense": dense}}  # fmt: skip


class _Timed:
    """A lock that notes for how long it was held."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.held = lock, list[float]()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.held.append(time.perf_counter() - self._since)
        self._lock.release()


def apply(replica: Any) -> dict[str, Any]:
    """Apply all deltas to a replica of the base."""
    timed = replica._lock = _Timed(replica._lock)
    taken = []
    while (path := replica.folder / f"delta_{replica.have.seq + 1}").exists():
        started = time.perf_counter()
        replica.apply(path)
        taken.append(time.perf_counter() - started)
    return {
        "apply_ms": [round(seconds * 1e3) for seconds in taken],
        "lock_ms": [round(seconds * 1e3, 1) for seconds in timed.held],
    }


def delay(options: argparse.Namespace, folder: Path, ranks: Any) -> dict[str, Any]:
    """Train while a replica follows; return how old updates were when they were served."""
    from embershard.extras.publications.part import Publisher
    from embershard.extras.serving.write import export_base
    from embershard.training.trainer import Trainer

    config = _config(options, folder, options.delay_steps)
    cuts, cut = [0.0], Publisher.cut

    def timed(self: Publisher, step: int) -> None:
        before = self._newest["seq"]
        cuts.append(time.time())
        cut(self, step)
        if self._newest["seq"] == before:  # it was published already
            cuts.pop()

    ours, theirs = multiprocessing.Pipe()
    with mock.patch.object(Publisher, "cut", timed):
        trainer = Trainer(config, ranks, export=partial(export_base, config))
        training = trainer.train()
        next(training)  # the base
        process = multiprocessing.get_context("spawn").Process(target=_follow, args=(folder, theirs), daemon=True)
        process.start()
        ours.recv()  # it serves the base
        cuts[0] = time.time()
        for _ in training:
            pass
        trainer.close()
    ours.send(len(cuts) - 1)
    served, held = ours.recv()
    process.join()
    ages = {
        name: [served[seq] - cuts[seq - back] for seq in range(1, len(cuts))]
        for name, back in (("newest", 0), ("oldest", 1))
    }
    found = {
        name: {"median": round(statistics.median(age), 3), "most": round(max(age), 3)} for name, age in ages.items()
    }
    return {**found, "lock_ms": [round(seconds * 1e3, 1) for seconds in held]}


def _follow(folder: Path, pipe: Connection) -> None:
    """Take what comes, until the delta that is named last; return when each was served, and for how long the lock was
    held."""
    from embershard.extras.serving.serving_replica import Replica

    replica = Replica(folder)
    timed = replica._lock = _Timed(replica._lock)  # type: ignore[assignment]
    pipe.send("it serves")
    served: dict[int, float] = {}
    last: int | None = None
    while last is None or replica.have.seq < last:
        path = folder / f"delta_{replica.have.seq + 1}"
        if path.exists():
            replica.apply(path)
            served[replica.have.seq] = time.time()
        else:
            time.sleep(_LOOK_SECONDS)
        if last is None and pipe.poll():
            last = pipe.recv()
    pipe.send((served, timed.held))


def _config(options: argparse.Namespace, folder: Path, steps: int | None = None) -> RunConfig:
    return run_config(
        options,
        {"max_steps": steps or options.steps, "log_every": 1},
        checkpoint={"at_end": False},
        publish={"folder": str(folder), "every_steps": options.every},
    )


if __name__ == "__main__":
    main()
