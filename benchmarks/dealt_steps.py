"""What dealing samples to ranks by cost saves: the CPU seconds of the slowest rank, dealt and in slices.

    python -m benchmarks.dealt_steps [--ranks 2] [--batch-size 16] [--events 512] [--exponent 1.2]

HSTU trains on samples whose histories have lengths by Zipf's law (NVIDIA's benchmark draws them so), in processes of
their own, step by step in turn: with `data.deal` "cost", "order", and "order" again, which shows the noise. Reported:
the sum over the steps of the CPU seconds of the rank that took most, and what costs told.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.common import machine, make_parser, report, settings_of
from benchmarks.length_groups import start, steps_of
from benchmarks.step_versions import ROOT

_CONFIG = """
[data]
kind = "parquet"
path = "{path}"
shuffle = false
eval_fraction = 0.0
[data.parquet]
sparse = ["user", "item", "hist_item"]
num_rows = [1000, 5000, 5000]
label = "label"
id_mapping = "none"
[model]
arch = "hstu"
embedding_dim = {dim}
dense_arch_layer_sizes = [{dim}]
over_arch_layer_sizes = [{dim}, 1]
history = ["hist_item"]
target = ["item"]
[model.hstu]
num_layers = {layers}
num_heads = 2
head_dim = {head_dim}
max_events = {events}
[cache]
ratio = 0.5
"""
#: First steps, during which the readers run ahead.
_NOT_MEASURED = 8
VARIANTS = {"dealt": "cost", "slices": "order", "slices again": "order"}


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="of a rank (16)")
    parser.add_argument("--events", type=int, default=512, help="of a history, at most (512)")
    parser.add_argument("--exponent", type=float, default=1.2, help="of the lengths (1.2)")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="that are measured, after 9 (30)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(Path(folder), options)
    report(
        {"benchmark": "dealt_steps", "settings": settings_of(options), **found, "machine": machine()}, options.output
    )


def write_samples(path: Path, options: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Write samples in row groups of a global batch, and return the lengths of their histories."""
    random, in_all = np.random.default_rng(0), options.ranks * options.batch_size
    count = in_all * (options.steps + 200)
    kinds = np.arange(1, options.events + 1)
    weights = kinds**-options.exponent
    lengths = random.choice(kinds, count, p=weights / weights.sum())
    ends = np.concatenate([[0], np.cumsum(lengths)])
    events = pa.array(random.integers(0, 5000, ends[-1]))
    table = pa.table(
        {
            "user": random.integers(0, 1000, count),
            "item": random.integers(0, 5000, count),
            "hist_item": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), events),
            "label": random.integers(0, 2, count).astype(np.float32),
        }
    )
    pq.write_table(table, path, row_group_size=in_all)
    return lengths


def compare(folder: Path, options: Any) -> dict[str, Any]:
    """Train with all variants, step by step in turn."""
    path, config = folder / "samples.parquet", folder / "run.toml"
    lengths = write_samples(path, options)
    names = ("dim", "layers", "head_dim", "events")
    config.write_text(_CONFIG.format(path=path, **{name: getattr(options, name) for name in names}), encoding="utf-8")
    words = [str(config), f"train.batch_size={options.batch_size}", "train.log_every=1", "train.device=cpu"]
    slowest: dict[str, list[float]] = {name: [] for name in VARIANTS}
    every: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with contextlib.ExitStack() as stack:
        groups = {
            name: start(stack, ROOT, options.ranks, [*words, f"data.deal={deal}"]) for name, deal in VARIANTS.items()
        }
        before = {name: steps_of(group) for name, group in groups.items()}
        for index in range(options.steps + _NOT_MEASURED):
            for name in sorted(groups, reverse=bool(index % 2)):
                now = steps_of(groups[name])
                spent = [after - was for (after, _), (was, _) in zip(now, before[name], strict=True)]
                before[name] = now
                if index >= _NOT_MEASURED:
                    slowest[name].append(max(spent))
                    every[name].append(sum(spent))
        print({name: round(sum(each), 3) for name, each in slowest.items()}, file=sys.stderr, flush=True)
    sums = {name: sum(each) for name, each in slowest.items()}
    return {
        "lengths": {"mean": float(lengths.mean()), "median": float(np.median(lengths)), "most": int(lengths.max())},
        **{f"{name}, slowest rank, CPU seconds": round(each, 3) for name, each in sums.items()},
        **{f"{name}, all ranks, CPU seconds": round(sum(each), 3) for name, each in every.items()},
        "dealt_over_slices": round(sums["dealt"] / sums["slices"], 3),
        "again_over_slices": round(sums["slices again"] / sums["slices"], 3),
        "median_of_ratios": round(
            statistics.median(a / b for a, b in zip(slowest["dealt"], slowest["slices"], strict=True)), 3
        ),
    }


if __name__ == "__main__":
    main()
