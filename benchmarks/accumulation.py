"""Memory and processor time of a step whose batch is cut into pieces (`train.accumulate`).

    python -m benchmarks.accumulation

A process for each number of pieces trains the same batches of a DLRM with wide dense layers. Reported: the most memory
that a process took beyond what it had before its first step, and the processor time of a step (median).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

from benchmarks.common import machine, make_parser, median_ms, report, settings_of
from embershard import RunConfig, Trainer, process_group
from embershard.launch.screen import silence_libraries
from embershard.settings.decoding import decode


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--batch-size", type=int, default=16_384)
    parser.add_argument("--width", type=int, default=512, help="of three layers of the upper MLP")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pieces", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--one", help="measure these settings, as JSON, and print the figures")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(json.loads(options.one))))
        return
    settings = settings_of(options)
    found = {}
    for pieces in options.pieces:
        own = json.dumps({**settings, "pieces": pieces})
        command = [sys.executable, "-m", "benchmarks.accumulation", "--one", own]
        found[str(pieces)] = json.loads(
            subprocess.run(command, check=True, capture_output=True).stdout.splitlines()[-1]
        )
    result = {"benchmark": "accumulation", "settings": settings, "machine": machine(), "pieces": found}
    report(result, options.output)


def measure(settings: dict[str, Any]) -> dict[str, float]:
    """Train; return MiB and milliseconds."""
    silence_libraries()
    layers, rows = [settings["width"]] * 3, settings["batch_size"] * (settings["steps"] + 2)
    values = {
        "data": {"kind": "synthetic", "num_workers": 0, "synthetic": {"num_samples": rows, "scale": 0.001}},
        "model": {"embedding_dim": 16, "dense_arch_layer_sizes": [512, 16], "over_arch_layer_sizes": [*layers, 1]},
        "cache": {"ratio": 0.9},
        "look_ahead": {"lookahead": 1, "prefetch": 1},
        "train": {
            "batch_size": settings["batch_size"],
            "accumulate": settings["pieces"],
            "device": "cpu",
            "log_every": 1_000_000,
        },
    }
    with process_group("cpu") as ranks:
        trainer = Trainer(decode(RunConfig, values), ranks)
        before, seconds = _peak_bytes(), []
        for _ in range(settings["steps"]):
            began = time.process_time()
            with trainer.upcoming.next() as batch:
                trainer.step(batch)
            seconds.append(time.process_time() - began)
        found = {"more_mib": round((_peak_bytes() - before) / 2**20, 1), "step_cpu_ms": median_ms(seconds[1:])}
        trainer.close()
    return found


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
