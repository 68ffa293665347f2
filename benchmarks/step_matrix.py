"""Training steps of many shapes: with all rows resident, cached, and with look-ahead, in turn on the same batches.

    python -m benchmarks.step_matrix

Shapes: ranks x batch size per rank x embedding dim x dense part (none, the quickstart's, a DLRM's). Criteo Kaggle's
33.76M rows at dim 16; at other dims rows are scaled so that the tables take the same memory. Caches hold `--ratio` of
the rows and start from a profile of 200,000 samples. Every rank of every variant is a process of its own; while one
variant steps, the others wait. A turn is `--steps-per-turn` steps and one before them that is not measured: it finds
the cores' caches full of the other variants' data and code. With one step per turn, every step does, and is measured.

Reported per shape: median milliseconds of a step, the medians of the ratios to resident and to the cached variant,
and how far the 99th percentile and the longest step are above the median. Then geometric means and the worst shape.
A ratio is one of turns: with look-ahead, some of the work is done at every fourth step, and a ratio of single steps
would leave it out.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.common import generated_stream, machine, make_parser, median_ms, median_ratio, report, settings_of
from benchmarks.step_overhead import count_profile
from benchmarks.step_server import DENSE_PARTS, Settings, Variant

_PROFILE_SAMPLES = 200_000
_FULL_DIM = 16  # the dim at which all of Criteo Kaggle's rows are there
_ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--dense", nargs="+", choices=list(DENSE_PARTS), default=list(DENSE_PARTS))
    parser.add_argument(
        "--variants", nargs="+", choices=get_args(Variant), default=["resident", "cached", "look_ahead"]
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all row counts")
    parser.add_argument("--ratio", type=float, default=0.015)
    parser.add_argument("--lookahead", type=int, default=64)
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--warmup-steps", type=int, default=30)
    parser.add_argument("--steps", type=int, default=80, help="measured steps of each variant and shape")
    parser.add_argument("--steps-per-turn", type=int, default=8)
    options = parser.parse_args()
    shapes = []
    for shape in itertools.product(options.ranks, options.batch_sizes, options.dims, options.dense):
        shapes.append(measure(options, *shape))
        print(json.dumps(shapes[-1]), file=sys.stderr, flush=True)
    result = {
        "benchmark": "step_matrix",
        "settings": settings_of(options),
        "summary": summary(shapes),
        "shapes": shapes,
        "machine": machine(),
    }
    report(result, options.output)


def measure(options: argparse.Namespace, ranks: int, batch_size: int, dim: int, dense: str) -> dict[str, Any]:
    """Time all variants of one shape, step by step."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        settings = Settings(
            variant="resident",
            rank=0,
            world_size=ranks,
            store="",
            batch_size=batch_size,
            dim=dim,
            dense=dense,
            scale=options.scale * _FULL_DIM / dim,
            ratio=options.ratio,
            lookahead=options.lookahead,
            prefetch=options.prefetch,
            profile=f"{folder}/profile.npz",
            num_steps=options.warmup_steps + 2 * options.steps,
        )
        save_profile(settings)
        variants = {
            name: stack.enter_context(serving({**asdict(settings), "variant": name, "store": f"{folder}/{name}"}))
            for name in options.variants
        }
        for variant in variants.values():
            answers(variant, "ready")
        for variant in variants.values():
            for _ in range(options.warmup_steps):
                step(variant)
        seconds: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(options.steps // options.steps_per_turn):
            for name in sorted(variants, reverse=bool(turn % 2)):
                seconds[name] += take_turn(variants[name], options.steps_per_turn)
    shape = {"ranks": ranks, "batch_size": batch_size, "dim": dim, "dense": dense}
    return {**shape, **figures(seconds, options.steps_per_turn)}


def save_profile(settings: Settings) -> None:
    """Count the first samples of the data, and save the profile where the variants find it."""
    with generated_stream(settings.scale, settings.batch_size, settings.rank, settings.world_size) as stream:
        rows = {feature.name: feature.num_rows for feature in stream.schema.sparse}
        num_batches = max(1, _PROFILE_SAMPLES // settings.batch_size)
        count_profile(itertools.islice(stream, num_batches), rows).save(settings.profile)


@contextlib.contextmanager
def serving(settings: dict[str, Any]) -> Iterator[list[subprocess.Popen[str]]]:
    """Run the ranks of one variant."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "benchmarks.step_server", json.dumps({**settings, "rank": rank})],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(settings["world_size"])
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def step(variant: Sequence[subprocess.Popen[str]]) -> float:
    """Run one step on all ranks; return the seconds of the slowest."""
    for rank in variant:
        assert rank.stdin is not None
        rank.stdin.write("step\n")
        rank.stdin.flush()
    return max(float(answer) for answer in answers(variant))


def take_turn(variant: Sequence[subprocess.Popen[str]], num_steps: int) -> list[float]:
    """Run `num_steps` steps, and one before them unless it is a single one; return the seconds of each."""
    if num_steps > 1:
        step(variant)
    return [step(variant) for _ in range(num_steps)]


def answers(variant: Sequence[subprocess.Popen[str]], wanted: str | None = None) -> list[str]:
    """Read the next line of every rank, or lines up to the one that is `wanted`."""
    found = []
    for rank in variant:
        assert rank.stdout is not None
        line = next((line.strip() for line in rank.stdout if wanted in (None, line.strip())), None)
        if line is None:
            raise RuntimeError(f"a rank ended with exit status {rank.wait()}; its error is shown above")
        found.append(line)
    return found


def figures(seconds: dict[str, list[float]], steps_per_turn: int = 1) -> dict[str, Any]:
    """Return medians, ratios and tails."""
    found: dict[str, Any] = {f"{name}_ms": median_ms(values) for name, values in seconds.items()}
    sums = {name: sums_of(values, steps_per_turn) for name, values in seconds.items()}
    for name, values in seconds.items():
        found |= {f"{name}_over_{of}": median_ratio(sums[name], sums[of]) for of in references(name, seconds)}
        p50, p99, most = np.percentile(values, [50, 99, 100])
        found |= {f"{name}_p99_over_p50": round(p99 / p50, 3), f"{name}_most_over_p50": round(most / p50, 3)}
    return found


def sums_of(values: list[float], count: int) -> list[float]:
    """Return the sum of every `count` values; what is left at the end is dropped."""
    return [sum(values[i : i + count]) for i in range(0, len(values) - count + 1, count)]


def references(name: str, seconds: dict[str, list[float]]) -> list[str]:
    """Return the variants that `name` is compared with."""
    return [of for of in ("resident", "cached") if of in seconds and of != name and name != "resident"]


def summary(shapes: list[dict[str, Any]]) -> dict[str, float]:
    """Return the geometric mean and the maximum of every ratio over the shapes."""
    found = {}
    for key in (key for key in shapes[0] if "_over_" in key and "p50" not in key):
        ratios = [shape[key] for shape in shapes]
        found[f"{key}_mean"] = round(math.exp(sum(map(math.log, ratios)) / len(ratios)), 3)
        found[f"{key}_worst"] = max(ratios)
    return found


if __name__ == "__main__":
    main()
