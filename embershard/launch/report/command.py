"""`embershard report`: shows what a run gave, beside what its plan predicted."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embershard.errors import ConfigError
from embershard.launch.arguments import make_parser, positive
from embershard.launch.screen import wide_console
from embershard.planning.cost.recalibrate import Recalibration, recalibrated
from embershard.planning.cost.topology import Topology, load_topology, save_topology
from embershard.planning.verify.compare import compare
from embershard.planning.verify.measured import MeasuredRun
from embershard.planning.verify.notes import notes
from embershard.sharding.plan import Plan

_HELP = """Show what a run gave; set what its plan predicted beside what was measured.

  embershard report runs/mine
  embershard report runs/mine --predicted
  embershard report runs/mine --recalibrate machine.toml
  embershard plan --config run.toml --profile profile.npz --topology machine.toml
"""
_TOP = 12


def main(argv: Sequence[str]) -> int:
    """Run `embershard report`; return 0.

    Raises:
        EmbershardError: an option has no effect, or a file is missing or wrong.
    """
    arguments = _parser().parse_args(argv)
    _check_usage(arguments)
    _report(arguments)
    return 0


@dataclass(frozen=True)
class _Run:
    """A finished run's folder."""

    folder: Path
    result: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> _Run:
        file = folder / "result.json"
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            what = "the run has not ended, or it failed" if folder.is_dir() else "there is no such folder"
            raise ConfigError(f"{file}: not found; {what}. Give the --run-dir of a run that ended.") from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: cannot be read ({error}). Needed is what embershard train wrote.") from error
        if not isinstance(result, dict):
            raise ConfigError(f"{file}: got a JSON {type(result).__name__}, needed what embershard train wrote.")
        return cls(folder, result)

    def plan(self, given: Path | None) -> Plan:
        """Return the plan to compare with: the run's own unless another one is given."""
        if given is not None:
            return Plan.load(given)
        if not (self.folder / "plan.json").exists():
            raise ConfigError(
                f"{self.folder} was trained without a plan, so nothing was predicted. Train with one (embershard train "
                "--plan FILE), or name a plan to compare with (--plan FILE)."
            )
        return Plan.load(self.folder / "plan.json")

    def other_settings(self, plan: Plan) -> list[str]:
        """Return the settings that differ from those that the plan's prediction assumed, as sentences.

        Raises:
            ConfigError: its config.toml is missing, or of another version.
        """
        from embershard.launch.config import RUN_CONFIG, load_config
        from embershard.training.config import RunConfig  # loads torch

        config = load_config(RunConfig, self.folder / RUN_CONFIG)
        return plan.other_settings(config.predicted_from(self.result.get("device"), self.result.get("world_size", 1)))

    def num_checkpoints(self, run: MeasuredRun) -> int:
        """Return the checkpoints written in the counted steps."""
        try:
            lines = (self.folder / "metrics.jsonl").read_bytes().splitlines()
        except OSError:
            return 0
        num_checkpoints = 0
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a damaged line
                report = json.loads(line)
                num_checkpoints += report["kind"] == "checkpoint" and report["step"] > run.all_steps - run.steps
        return num_checkpoints


def _report(arguments: argparse.Namespace) -> None:
    run = _Run.read(arguments.run_dir)
    from embershard.launch.report import view  # loads torch, and --help must answer at once

    console = wide_console()
    console.quiet = arguments.json
    values: dict[str, Any] = {"run": str(run.folder)}
    top = arguments.top or _TOP
    if arguments.predicted:
        plan = run.plan(arguments.plan)
        comparison = compare(plan, run.result)
        measured = MeasuredRun.from_result(run.result)
        lines = notes(plan, measured, _other_settings(run, plan), run.num_checkpoints(measured))
        values["predicted"] = view.comparison_values(comparison, lines)
        view.show_comparison(comparison, lines, console, top)
        if comparison.is_step_time_off and measured.plan_digest == plan.digest and arguments.recalibrate is None:
            view.show_advice(run.folder, console)
    if arguments.recalibrate is not None:
        changed = _recalibrate(arguments, run)
        values["recalibrated"] = view.recalibration_values(changed, arguments.recalibrate)
        view.show_recalibration(changed, arguments.recalibrate, console)
    if not arguments.predicted and arguments.recalibrate is None:
        values["result"] = run.result
        if not arguments.json:
            view.show_run(run.folder, run.result, console, top)
    if arguments.json:
        print(json.dumps(values, indent=2, allow_nan=False))


def _other_settings(run: _Run, plan: Plan) -> list[str]:
    try:
        return run.other_settings(plan)
    except ConfigError as error:
        return [f"not known, since the run's config cannot be read: {error}"]


def _recalibrate(arguments: argparse.Namespace, run: _Run) -> Recalibration:
    plan, output = run.plan(arguments.plan), arguments.recalibrate
    others = [text for text in run.other_settings(plan) if text.startswith(("train.batch_size", "model.", "train.dev"))]
    if others:
        raise ConfigError(
            f"{others[0]}: the work of the run is not the plan's, and its speed says nothing about the rates. "
            "Recalibrate with a run as it was planned."
        )
    changed = recalibrated(
        _topology(arguments.topology, plan), plan, run.result, name=output.stem, run_name=run.folder.resolve().name
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
    """Raise where an option has no effect."""
    if arguments.plan is not None and not arguments.predicted and arguments.recalibrate is None:
        raise ConfigError("--plan has no effect without --predicted or --recalibrate.")
    if arguments.topology is not None and arguments.recalibrate is None:
        raise ConfigError("--topology has no effect without --recalibrate.")
    if arguments.top is not None and arguments.json:
        raise ConfigError("--top has no effect with --json, which has all tables.")
    if arguments.recalibrate is not None and arguments.recalibrate.suffix != ".toml":
        raise ConfigError(f"--recalibrate {arguments.recalibrate}: needed a file name that ends in .toml.")


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("report", _HELP)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of a run that ended")
    parser.add_argument("--predicted", action="store_true", help="set what the plan predicted beside what was measured")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="compare with this plan (default: the run's own)")
    parser.add_argument(
        "--recalibrate",
        type=Path,
        metavar="OUT.toml",
        help="write the topology with its rates corrected, so that they give the step time that was measured",
    )
    parser.add_argument(
        "--topology", metavar="NAME", help="to correct: a machine or a TOML file (default: the one of the plan)"
    )
    parser.add_argument("--json", action="store_true", help="print the same numbers as JSON, for all tables")
    parser.add_argument("--top", type=positive, metavar="N", help=f"tables to show (default: {_TOP})")
    return parser
