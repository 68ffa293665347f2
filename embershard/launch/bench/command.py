"""`embershard bench`: runs benchmarks, and shows their figures beside those stored for this kind of machine."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embershard.errors import ConfigError
from embershard.launch.arguments import make_parser
from embershard.launch.bench.compare import comparison_lines, stored_results
from embershard.launch.screen import make_table, say, wide_console

_HELP = """Run the project's benchmarks, and set their figures beside those in benchmarks/results that were measured on
this kind of machine: the ratio, and whether it is more than 20 % off. Without a name, list them. What follows -- goes
to the benchmark. They need the source tree, an otherwise idle machine, and minutes. Exit codes: 0; 1 where one failed.

  embershard bench
  embershard bench command_start
  embershard bench exchange -- --ranks 2
"""


def main(argv: Sequence[str]) -> int:
    """Run `embershard bench`; return the exit code.

    Raises:
        ConfigError: there is no source tree, or no such benchmark.
    """
    split = argv.index("--") if "--" in argv else len(argv)
    arguments = _parser().parse_args(argv[:split])
    folder = Path(__file__).parents[3] / "benchmarks"
    if not folder.is_dir():
        raise ConfigError(
            "benchmarks are in embershard's source tree, not in the installed package. Run this in a clone of it."
        )
    names = sorted(path.stem for path in folder.glob("*.py") if _is_benchmark(path.read_text(encoding="utf-8")))
    unknown = [name for name in arguments.names if name not in names]
    if unknown:
        raise ConfigError(f"there is no benchmark {unknown[0]!r}; there are {', '.join(names)}.")
    if not arguments.names:
        _list(folder, names)
        return 0
    return max(_run(folder, name, argv[split + 1 :]) for name in arguments.names)


def _is_benchmark(program: str) -> bool:
    """Return whether a program takes `--output`, the file for its figures. Others only serve benchmarks."""
    return "\ndef main(" in program and bool(re.search(r"\b(options|arguments)\.output\b", program))


def _list(folder: Path, names: Sequence[str]) -> None:
    table = make_table("benchmarks", ["name", "results of", "what it measures"], [])
    for name in names:
        machines = {str(found["machine"]["cpu"]) for found in stored_results(folder / "results", name)}
        text = (folder / f"{name}.py").read_text(encoding="utf-8").partition('"""')[2]
        table.add_row(name, ", ".join(sorted(machines)) or "none", text.partition("\n")[0].partition(": `python")[0])
    wide_console().print(table)


def _run(folder: Path, name: str, more: Sequence[str]) -> int:
    console = wide_console()
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary) / "result.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", *more, "--output", str(output)]
        say(console, f"benchmarks.{name} {' '.join(more)}".rstrip())
        code = subprocess.run(command, cwd=folder.parent, stdout=subprocess.DEVNULL).returncode
        if code or not output.is_file():
            say(console, f"{name} failed (exit code {code}).")
            return 1
        new: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    say(console, *comparison_lines(new, stored_results(folder / "results", name)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("bench", _HELP, "[NAME ...] [-- OPTION ...]")
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run")
    return parser
