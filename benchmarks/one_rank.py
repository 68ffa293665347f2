"""One rank of `embershard train`, its trainer without the launcher, on generated clicks of Criteo's shape."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import machine, settings_of

if TYPE_CHECKING:
    from embershard.training.config import RunConfig

_CRITEO_ROWS = 33_762_577


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run_config` and `measured`."""
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--ratio", type=float, default=0.015)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")


def measured(
    name: str, options: argparse.Namespace, run: Callable[[argparse.Namespace, Path], dict[str, Any]]
) -> dict[str, Any]:
    """Return the report of what `run` finds in a folder, which is removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=f"{name}_", dir=options.folder))
    try:
        found = run(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    settings = {key: value for key, value in settings_of(options).items() if key != "folder"}
    return {"benchmark": name, "settings": settings, **found, "machine": machine()}


def run_config(options: argparse.Namespace, train: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    """Return the settings: the quickstart's model, and a cache with look-ahead.

    Args:
        train: further settings of the section "train".
        sections: further sections.
    """
    from embershard.settings.decoding import decode
    from embershard.training.config import RunConfig

    synthetic = {"num_samples": 10_000_000, "scale": options.rows / _CRITEO_ROWS}
    values = {
        "data": {"kind": "synthetic", "synthetic": synthetic, "eval_fraction": 0.0},
        "model": {
            "embedding_dim": options.dim,
            "dense_arch_layer_sizes": [64, 32, options.dim],
            "over_arch_layer_sizes": [128, 64, 1],
        },
        "cache": {"ratio": options.ratio},
        "look_ahead": {"lookahead": 64},
        "embedding_optimizer": {"kind": "rowwise_adagrad", "lr": 0.05},
        "train": {"batch_size": options.batch_size, "device": "cpu", **train},
        **sections,
    }
    return decode(RunConfig, values)
