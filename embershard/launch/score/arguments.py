"""Arguments that `embershard predict`, `embershard eval`, `embershard export` and their programs have in common."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from embershard.errors import ConfigError
from embershard.launch.arguments import add_overrides, add_trust, text_override, whole
from embershard.launch.config import CHECKPOINTS, RUN_CONFIG, load_config
from embershard.training.config import RunConfig

#: Settings that have an effect on scores or on how they are computed. The others belong to the training.
_SETTINGS = ("data.", "cache.", "model.", "train.batch_size", "train.global_batch_size", "train.device")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add `RUN`, `--step N`, `--data PATH`, `--trust-code` and `--set KEY=VALUE`, which become the list `overrides`."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--step", type=whole, metavar="N", help="use the checkpoint of this step (default: the newest valid one)"
    )
    parser.add_argument(
        "--data", metavar="PATH", help="a file or folder, all of it (default: what the run's settings hold out)"
    )
    add_trust(parser)
    add_overrides(parser, "override a setting of the run's data, cache or batch; may be repeated")


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add `-o FILE`."""
    parser.add_argument(
        "-o", dest="output", type=Path, required=True, metavar="FILE", help="Parquet file for the scores"
    )


def run_config(arguments: argparse.Namespace, *, needs_samples: bool = True) -> RunConfig:
    """Return the settings of the run, with the data that were asked for as its held-out part.

    Args:
        needs_samples: False: it may hold nothing out.

    Raises:
        ConfigError: there is no run, a setting has no effect here, or nothing is held out.
    """
    file = arguments.run_dir / RUN_CONFIG
    if not file.is_file():
        raise ConfigError(f"{arguments.run_dir} has no {RUN_CONFIG}; give the --run-dir of a run of embershard train.")
    for override in arguments.overrides:
        if not override.startswith(_SETTINGS):
            key = override.partition("=")[0]
            raise ConfigError(f"--set {key} has no effect here: the model is trained. Leave it out.")
    overrides = list(arguments.overrides)
    if arguments.data is not None:
        overrides.append(text_override("data.path", arguments.data))
    overrides = ["train.eval_every=none", *overrides]
    config = load_config(RunConfig, file, overrides, trust_code=arguments.trust_code, run_dir=arguments.run_dir)
    if arguments.data is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval_path=None, eval_fraction=1.0))
    if needs_samples and not config.holds_out:
        raise ConfigError("The run holds nothing out (data.eval_fraction is 0). Give the samples: --data PATH.")
    return config


def checkpoints_of(arguments: argparse.Namespace) -> Path:
    """Return the folder of the run's checkpoints."""
    folder: Path = arguments.run_dir / CHECKPOINTS
    return folder
