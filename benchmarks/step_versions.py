"""The time of a training step in this tree, against an older commit: both in one run, step by step in turn.

    python -m benchmarks.step_versions --old REVISION

Each version trains in a process of its own, on the same batches: full Criteo-Kaggle row counts, 26 features, row-wise
Adagrad, cached without look-ahead or through the look-ahead pipeline. While one of them steps, the other one waits.
Reported: medians, and the median of the ratios new over old.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import machine, make_parser, median_ms, median_ratio, report, settings_of
from benchmarks.step_overhead import add_step_options

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("whole_step", "embeddings_alone")

_SERVER = """
import argparse, itertools, json, sys, time
from benchmarks import step_overhead
from benchmarks.common import single_process

options = argparse.Namespace(**json.loads(sys.argv[1]))
with single_process() as device:
    stream = step_overhead.make_stream(options)
    rows = {feature.name: feature.num_rows for feature in stream.schema.sparse}
    sharder = step_overhead.make_sharders(options, None)[options.variant]
    model = step_overhead.build(rows, options.dim, sharder, device)
    count = options.warmup_batches + 2 * options.batches + options.lookahead + 8
    batches = [batch.to(device) for batch in itertools.islice(stream, count)]
    if options.variant == "look_ahead":
        ahead = step_overhead.LookAhead(model, batches, options, device)
        calls = {"whole_step": ahead.step, "embeddings_alone": ahead.embedding_step}
    else:
        whole, embeddings = step_overhead.make_step(model), step_overhead.make_embedding_step(model)
        calls = {"whole_step": lambda n: whole(batches[n]), "embeddings_alone": lambda n: embeddings(batches[n])}
    print("ready", flush=True)
    for index, part in enumerate(sys.stdin):
        started = time.perf_counter()
        calls[part.strip()](index)
        print(time.perf_counter() - started, flush=True)
    stream.close()
"""


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--old", required=True, help="a git revision")
    parser.add_argument("--variants", nargs="+", default=["cached", "look_ahead"], choices=["cached", "look_ahead"])
    add_step_options(parser)
    options = parser.parse_args()
    settings = {**vars(options), "policy": "lfu", "inline": False, "background": False}
    found = {}
    with checkout(options.old) as old:
        for variant in options.variants:
            found[variant] = compare({"old": old, "new": ROOT}, {**settings, "variant": variant})
    result = {"benchmark": "step_versions", "settings": settings_of(options), **found, "machine": machine()}
    report(result, options.output)


@contextlib.contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """Check a revision out into a folder of its own, for as long as the context lasts."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "old")
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), revision], cwd=ROOT, check=True, stdout=2)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def compare(trees: dict[str, Path], settings: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Time both versions, step by step."""
    with contextlib.ExitStack() as stack:
        versions = {name: stack.enter_context(serving(tree, settings)) for name, tree in trees.items()}
        for version in versions.values():
            _read(version, "ready")
        for _ in range(settings["warmup_batches"]):
            for version in versions.values():
                step(version, PARTS[1])
        seconds: dict[str, dict[str, list[float]]] = {part: {name: [] for name in versions} for part in PARTS}
        for part in PARTS:
            for index in range(settings["batches"]):
                for name in sorted(versions, reverse=bool(index % 2)):
                    seconds[part][name].append(step(versions[name], part))
    found = {}
    for part, by_name in seconds.items():
        found[part] = {f"{name}_ms": median_ms(values) for name, values in by_name.items()}
        found[part]["new_over_old"] = median_ratio(by_name["new"], by_name["old"])
    return found


@contextlib.contextmanager
def serving(tree: Path, settings: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """Run a process that trains a step for every line that it is sent."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVER, json.dumps(settings)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def step(version: subprocess.Popen[str], part: str) -> float:
    """Run one step; return its seconds."""
    assert version.stdin is not None
    version.stdin.write(part + "\n")
    version.stdin.flush()
    return float(_read(version))


def _read(version: subprocess.Popen[str], wanted: str | None = None) -> str:
    assert version.stdout is not None
    for line in version.stdout:
        if wanted is None or line.strip() == wanted:
            return line.strip()
    raise RuntimeError(f"a version ended with exit status {version.wait()}; its error is shown above")


if __name__ == "__main__":
    main()
