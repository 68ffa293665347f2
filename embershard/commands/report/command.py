"""`embershard report`: what a run gave, beside what its plan predicted; or runs and sweeps as a page or a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embershard.errors import ConfigError, SetupError
from embershard.launch.arguments import check_output, make_parser, positive
from embershard.launch.screen import say, wide_console
from embershard.lazy_names import named
from embershard.planning.cost.topology import Topology, load_topology, save_topology
from embershard.planning.recalibrate import Recalibration, recalibrated
from embershard.planning.verify.compare import compare, notes
from embershard.reports.run_folder import RunFolder, is_sweep
from embershard.run_result import RESULT, RunResult
from embershard.settings.files import METRICS, RUN_CONFIG
from embershard.sharding.plan import Plan

_HELP = """Show what a run gave; set what its plan predicted beside what was measured; or make a page with figures, or a
table, of runs and sweeps; or a page of a plan.

  embershard report runs/mine
  embershard report runs/mine runs/other sweeps/ratios -o report.html
  embershard report runs/mine runs/other sweeps/ratios --format markdown
  embershard report plan.json -o plan.html
  embershard report runs/mine --predicted
  embershard report runs/mine --recalibrate machine.toml
  embershard plan --config run.toml --profile profile.npz --topology machine.toml
"""
_TOP = 12
_SCREEN_OPTIONS = ("predicted", "plan", "recalibrate", "topology", "json", "top")


def main(argv: Sequence[str]) -> int:
    """Run `embershard report`; return 0.

    Raises:
        EmbershardError: an option has no effect, or a file is missing or wrong.
    """
    arguments = _parser().parse_args(argv)
    _check_usage(arguments)
    if arguments.format is not None:
        from embershard.reports.results import results_text

        print(results_text(arguments.folders, arguments.format))
        return 0
    if arguments.output is None:
        _report(arguments)
        return 0
    check_output(arguments.output)
    try:
        write_page = named("embershard.extras.report_page.write:write_page")
    except ModuleNotFoundError as error:
        if error.name not in ("plotly", "jinja2"):
            raise
        raise SetupError(
            f'-o needs Plotly and Jinja2, and {error.name} is not installed. Try: pip install "plotly>=6" "jinja2>=3.1"'
        ) from error
    write_page(arguments.folders, arguments.output)
    say(wide_console(), f"Written to {arguments.output}: open it in a browser.")
    return 0


def _report(arguments: argparse.Namespace) -> None:
    run = RunFolder.read(arguments.folders[0])
    result = run.result
    assert result is not None, "it was read"
    from embershard.reports import run_tables  # loads torch, and --help must answer at once

    console = wide_console()
    console.quiet = arguments.json
    values: dict[str, Any] = {"run": str(run.path)}
    top = arguments.top or _TOP
    if arguments.predicted:
        plan = run.plan(arguments.plan)
        comparison = compare(plan, result)
        try:
            others = run.other_settings(plan)
        except ConfigError as error:
            others = [f"not known, since the run's config cannot be read: {error}"]
        lines = notes(plan, result, others, run.num_checkpoints(result))
        values["predicted"] = run_tables.comparison_values(comparison, lines)
        run_tables.show_comparison(comparison, lines, console, top)
        if comparison.is_step_time_off and result.plan_digest == plan.digest and arguments.recalibrate is None:
            command = f"embershard report {run.path} --recalibrate machine.toml"
            say(console, f"Advice: correct the machine's rates by this run:  {command}")
    if arguments.recalibrate is not None:
        changed = _recalibrate(arguments, run, result)
        values["recalibrated"] = run_tables.recalibration_values(changed, arguments.recalibrate)
        run_tables.show_recalibration(changed, arguments.recalibrate, console)
    if not arguments.predicted and arguments.recalibrate is None:
        values["result"] = result.to_dict()
        if not arguments.json:
            run_tables.show_run(run, result, console, top)
    if arguments.json:
        print(json.dumps(values, indent=2, allow_nan=False))


def _recalibrate(arguments: argparse.Namespace, run: RunFolder, result: RunResult) -> Recalibration:
    plan, output = run.plan(arguments.plan, may_be_others=False), arguments.recalibrate
    others = [
        text for text in run.other_settings(plan) if text.startswith(("train.batch_size", "model.", "train.device"))
    ]
    if others:
        raise ConfigError(
            f"{others[0]}: the work of the run is not the plan's, and its speed says nothing about the rates. "
            "Recalibrate with a run as it was planned."
        )
    changed = recalibrated(
        _topology(arguments.topology, plan), plan, result, name=output.stem, run_name=run.path.resolve().name
    )
    save_topology(changed.topology, output)
    return changed


def _topology(given: str | None, plan: Plan) -> Topology:
    """Load a topology by name or file; by default the one that the plan was made with, where the catalogue has it."""
    if given is not None:
        return load_topology(given)
    name = plan.made_from.get("topology")
    if name is None:
        raise ConfigError("The plan does not say for which machine it was made. Name it: --topology NAME or FILE.toml.")
    try:
        return load_topology(name)
    except ConfigError as error:
        raise ConfigError(
            f"The plan was made for topology {name!r}, which is not in the catalogue. Give its file: --topology "
            "FILE.toml."
        ) from error


def _check_usage(arguments: argparse.Namespace) -> None:
    """Raise where an option has no effect, or what is given does not fit together."""
    given = [f"--{name}" for name in _SCREEN_OPTIONS if getattr(arguments, name)]
    for file in filter(Path.is_file, arguments.folders):
        if file.name in (RESULT, METRICS, RUN_CONFIG):
            raise ConfigError(f"{file} is a file of a run; give its folder: {file.parent}.")
        if arguments.format is not None:
            raise ConfigError(f"{file} is a file, of which --format has no table: give runs and sweeps.")
    if arguments.format is not None:
        given += ["-o"] if arguments.output is not None else []
        if given:
            raise ConfigError(f"{given[0]} has no effect with --format, which prints a table; to keep it: > FILE.")
        return
    if arguments.output is not None:
        if given:
            raise ConfigError(f"{given[0]} has no effect with -o; the page has all that is known.")
        if arguments.output.suffix != ".html":
            raise ConfigError(f"-o {arguments.output}: needed a file name that ends in .html.")
        return
    if (file := next(filter(Path.is_file, arguments.folders), None)) is not None:
        raise ConfigError(f"{file} is a file: of a plan there is a page, -o FILE.html.")
    if len(arguments.folders) > 1:
        raise ConfigError(
            f"got {len(arguments.folders)} folders, which need -o FILE.html or --format; or give one run."
        )
    if is_sweep(arguments.folders[0]):
        raise ConfigError(
            f"{arguments.folders[0]} is the folder of a sweep, which needs -o FILE.html or --format; or give a run."
        )
    if arguments.plan is not None and not arguments.predicted and arguments.recalibrate is None:
        raise ConfigError("--plan has no effect without --predicted or --recalibrate.")
    if arguments.topology is not None and arguments.recalibrate is None:
        raise ConfigError("--topology has no effect without --recalibrate.")
    if arguments.top is not None and arguments.json:
        raise ConfigError("--top has no effect with --json, which has all tables.")
    if arguments.recalibrate is not None and arguments.recalibrate.suffix != ".toml":
        raise ConfigError(f"--recalibrate {arguments.recalibrate}: needed a file name that ends in .toml.")


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("report", _HELP, "RUN_OR_SWEEP ... [options]")
    text = "folder of a run; with -o or --format also of a sweep; with -o also the file of a plan"
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN_OR_SWEEP", help=text)
    text = "write a page of all these, which opens offline"
    parser.add_argument("-o", dest="output", type=Path, metavar="FILE.html", help=text)
    text = "print a table of results in this format"
    parser.add_argument("--format", choices=("json", "csv", "latex", "markdown"), help=text)
    parser.add_argument("--predicted", action="store_true", help="set what the plan predicted beside what was measured")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="compare with this plan (default: the run's own)")
    text = "write the topology with its rates corrected, so that they give the step time that was measured"
    parser.add_argument("--recalibrate", type=Path, metavar="OUT.toml", help=text)
    text = "to correct: a machine or a TOML file (default: the one of the plan)"
    parser.add_argument("--topology", metavar="NAME", help=text)
    parser.add_argument("--json", action="store_true", help="print the same numbers as JSON, for all tables")
    parser.add_argument("--top", type=positive, metavar="N", help=f"tables to show (default: {_TOP})")
    return parser
