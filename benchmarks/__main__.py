"""The benchmarks: `python -m benchmarks` lists them; with names it runs them, beside the results that are stored."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.compare import comparison_lines, stored_results
from embershard.launch.arguments import Parser, help_parts
from embershard.launch.screen import make_table, say, wide_console

_FOLDER = Path(__file__).parent
_HELP = """Run benchmarks, and set their figures beside those in benchmarks/results that were measured on this kind of
machine: the ratio, and whether it is more than 20 % off. Without a name, list them. What follows -- goes to the
benchmark. They need an otherwise idle machine, and minutes. Exit codes: 0; 1 where one failed; 2 for wrong usage.

  python -m benchmarks
  python -m benchmarks command_start
  python -m benchmarks exchange -- --ranks 2
"""


def main(argv: Sequence[str]) -> int:
    """Run the benchmarks that are named, or list all; return the exit code."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(prog="python -m benchmarks", usage="%(prog)s [NAME ...] [-- OPTION ...]", **help_parts(_HELP))
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run")
    arguments = parser.parse_args(argv[:split])
    names = sorted(path.stem for path in _FOLDER.glob("*.py") if _is_benchmark(path.read_text(encoding="utf-8")))
    unknown = [name for name in arguments.names if name not in names]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(names)}.")
    if not arguments.names:
        _list(names)
        return 0
    return max(_run(name, argv[split + 1 :]) for name in arguments.names)


def _is_benchmark(program: str) -> bool:
    """Return whether a program takes `--output`, the file for its figures. Others only serve benchmarks."""
    return "\ndef main(" in program and bool(re.search(r"\b(options|arguments)\.output\b", program))


def _list(names: Sequence[str]) -> None:
    table = make_table("benchmarks", ["name", "results of", "what it measures"], [])
    for name in names:
        machines = {str(found["machine"]["cpu"]) for found in stored_results(_FOLDER / "results", name)}
        text = (_FOLDER / f"{name}.py").read_text(encoding="utf-8").partition('"""')[2]
        table.add_row(name, ", ".join(sorted(machines)) or "none", text.partition("\n")[0].partition(": `python")[0])
    wide_console().print(table)


def _run(name: str, more: Sequence[str]) -> int:
    console = wide_console()
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary) / "result.json"
        command = [sys.executable, "-m", f"benchmarks.{name}", *more, "--output", str(output)]
        say(console, f"benchmarks.{name} {' '.join(more)}".rstrip())
        code = subprocess.run(command, cwd=_FOLDER.parent, stdout=subprocess.DEVNULL).returncode
        if code or not output.is_file():
            say(console, f"{name} failed (exit code {code}).")
            return 1
        new: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    say(console, *comparison_lines(new, stored_results(_FOLDER / "results", name)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
