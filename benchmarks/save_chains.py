"""Saves of what changed: their bytes, and training steps beside them and beside whole ones.

    python -m benchmarks.save_chains

One rank of `embershard train` (its trainer, without the launcher) on generated clicks of Criteo's shape, with the
quickstart's model, and a cache with look-ahead. Every second save is a delta, written like the whole ones while
training goes on: both kinds meet the same machine, by turns.

    bytes_ratio    bytes of a delta's files of rows, over those of the rows that updates trained since the save before
                   (counted apart, in each backward), their states and an 8-byte key
    delta_share    bytes of a delta over those of a whole save, all files
    step_ms        of the steps while a save of the kind runs, and `interval`: of all from one save to the next
    save_seconds   from the step to the complete save; `wait_ms`: in which training stood still
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.common import make_parser, report
from benchmarks.one_rank import add_run_options, measured, run_config


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    add_run_options(parser)
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--every", type=int, default=100, help="steps from save to save")
    options = parser.parse_args()
    report(measured("save_chains", options, run), options.output)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train in this process."""
    from embershard import flush
    from embershard.distributed import Manifest, process_group
    from embershard.launch.screen import silence_libraries
    from embershard.sharding.torchrec import cached_embeddings
    from embershard.training.reports import SaveReport
    from embershard.training.trainer import Trainer

    silence_libraries()
    train = {"max_steps": options.every * (options.saves + 1), "log_every": 10}
    checkpoint = {"every_steps": options.every, "full_every": 2, "keep_last": 1, "at_end": False}
    found: dict[str, dict[str, list[float]]] = {kind: {} for kind in ("whole", "delta")}
    with process_group("cpu") as ranks:
        trainer = Trainer(run_config(options, train, checkpoint=checkpoint), ranks, folder / "run")
        flush(trainer.model)
        pools = [(pool, pool.track_changes()) for pool in cached_embeddings(trainer.model)]
        trained = dict[int, int]()
        for each in trainer.train():
            if trainer.steps % options.every == 0 and trainer.steps not in trained:
                trained[trainer.steps] = sum(
                    len(marks.take()) * (8 + pool.host.row_bytes) for pool, marks in pools
                )  # with states and keys
            if isinstance(each, SaveReport):
                manifest = Manifest.read(each.path)
                of_kind = found["whole" if manifest.parent is None else "delta"]
                beside = [seconds * 1e3 for seconds in trainer.step_seconds[each.step : trainer.steps]]
                rows = sum(entry.bytes for name, entry in manifest.files.items() if name.startswith("rows_"))
                for name, values in (
                    ("beside", beside),
                    ("files", [manifest.num_bytes]),
                    ("rows", [rows / max(1, trained[each.step])]),
                    ("seconds", [each.seconds]),
                    ("wait", [each.stall_seconds * 1e3]),
                    ("steps", [each.step]),
                ):
                    of_kind.setdefault(name, []).extend(values)
        for of_kind in found.values():
            starts = [int(step) for step in of_kind["steps"]]
            spans = [trainer.step_seconds[start : start + options.every] for start in starts]
            of_kind["interval"] = [seconds * 1e3 for span in spans for seconds in span]
        trainer.close()
    return _figures(found)


def _figures(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    median = {kind: {name: statistics.median(values) for name, values in of.items()} for kind, of in found.items()}
    return {
        "bytes_ratio": [round(ratio, 4) for ratio in found["delta"]["rows"]],
        "delta_share": round(median["delta"]["files"] / median["whole"]["files"], 4),
        "step_ms": {kind: {name: round(median[kind][name], 2) for name in ("beside", "interval")} for kind in found},
        "num_steps_beside": {kind: len(of["beside"]) for kind, of in found.items()},
        "mean_interval_ms": {kind: round(statistics.mean(of["interval"]), 2) for kind, of in found.items()},
        "save_seconds": {kind: round(of["seconds"], 2) for kind, of in median.items()},
        "wait_ms": {kind: round(of["wait"], 1) for kind, of in median.items()},
    }


if __name__ == "__main__":
    main()
