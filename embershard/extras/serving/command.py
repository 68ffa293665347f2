"""`embershard export`: tables, a plain torch module, and the mapping of ids, from a run's checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from embershard.commands.score import add_run, run_config
from embershard.errors import ConfigError
from embershard.launch.arguments import check_new_folder, make_parser, positive
from embershard.launch.screen import plain_console, say, silence_libraries
from embershard.settings.files import CHECKPOINTS

_SAMPLES = 4096

_HELP = """Write a trained model to a new folder, for programs without embershard. See docs/serving.md.

module:   model.py, dense.pt2, inputs.json, export.json, and tables/NAME.safetensors: a torch module on the CPU. In fp32
it scores as embershard predict does, bit for bit. Of other types, the error on samples is in export.json.
parquet:  tables/NAME.parquet with the columns row and embedding, inputs.json and export.json.

  embershard export runs/mine -o exported
  embershard export runs/mine -o exported8 --dtype int8
  embershard export runs/mine -o tables --format parquet
"""


def main(argv: Sequence[str]) -> int:
    """Run `embershard export`; return the exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.format == "parquet" and arguments.dtype is not None:
        raise ConfigError("--dtype has no effect with --format parquet, which has fp32 numbers. Leave it out.")
    is_exact = arguments.dtype in (None, "fp32")
    for name in ("samples", "data"):
        if is_exact and getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} has no effect: without rounding, no error is measured. Leave it out.")
    check_new_folder(arguments.output)
    from embershard.extras.serving.write import ExportRequest, write_export  # it loads TorchRec, --help does not wait

    silence_libraries()
    request = ExportRequest(
        config=run_config(arguments, needs_samples=not is_exact),
        checkpoints=arguments.run_dir / CHECKPOINTS,
        step=arguments.step,
        is_module=arguments.format == "module",
        dtype=arguments.dtype or "fp32",
        num_samples=arguments.samples or _SAMPLES,
    )
    say(plain_console(), *write_export(request, arguments.output))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("export", _HELP)
    add_run(parser)
    parser.add_argument("-o", dest="output", type=Path, required=True, metavar="DIR", help="the new folder")
    text = "what is written (default: %(default)s)"
    parser.add_argument("--format", choices=["module", "parquet"], default="module", help=text)
    text = "number type of the tables (default: fp32)"
    parser.add_argument("--dtype", choices=["fp32", "fp16", "int8", "int4"], help=text)
    text = f"samples to measure the error on (default: {_SAMPLES})"
    parser.add_argument("--samples", type=positive, metavar="N", help=text)
    return parser
