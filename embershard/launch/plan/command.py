"""``embershard plan``: places tables and sizes caches without a GPU at hand, and says what that will give."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from embershard.errors import ConfigError, EmbershardError
from embershard.launch.units import parse_bytes

_HELP = """Place tables and size caches; predict memory, hit rates and step time.

  embershard plan --config run.toml --profile profile.npz --ranks 8 --device-memory 80GB --host-memory 512GB \\
      --topology h100x8 -o plan.json
  embershard plan --config run.toml --profile profile.npz --ranks 1,2,4,8,16 --topology h200x8 --png scaling.png
  embershard plan --config run.toml --profile profile.npz --explain t_C3
  embershard plan --calibrate -o machine.toml --ranks 1,2,4
  embershard plan diff a.json b.json
  embershard train --config run.toml --plan plan.json
"""
_WIDTH = 150
_MOST_RANKS = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 well, 2 wrong usage, settings, or a model that does not fit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["diff"]:
            return _diff(arguments[1:])
        parser = _parser()
        parsed = parser.parse_args(arguments)
        if parsed.calibrate:
            return _calibrate(parsed)
        return _plan(parsed, ["embershard", "plan", *arguments])
    except EmbershardError as error:
        print(f"embershard: {error}", file=sys.stderr)
        return 2


@dataclass(frozen=True)
class _Setup:
    """What the command line and the files say together."""

    config: Any
    data: Any
    topology: Any
    arguments: argparse.Namespace
    command: str

    def request(self, num_ranks: int, ratio: float | None = None) -> Any:
        """For so many ranks, and a share of rows on the device instead of what the config says."""
        from embershard.launch.plan.inputs import budget, make_workload
        from embershard.planning.request import PlanRequest

        config, arguments = self.config, self.arguments
        topology = self._shaped(num_ranks)
        workload = make_workload(
            config,
            self.data,
            world_size=num_ranks,
            ranks_per_node=topology.ranks_per_node,
            device=topology.device,
        )
        device_bytes = _given(arguments.device_memory, topology.device_memory_bytes)
        host_bytes = _given(arguments.host_memory, topology.host_memory_bytes)
        note = topology.note(num_ranks)
        return PlanRequest(
            workload=workload,
            rates=topology.rates_for(num_ranks),
            budget=budget(config, device_bytes, host_bytes, ratio),
            types=arguments.types,
            replicate_rows=arguments.replicate_rows,
            most_ranks_per_node=arguments.ranks_per_node or (None if topology.device == "cpu" else self._devices),
            settings=_settings(config, topology.device),
            made_from=self._origins(),
            notes=() if note is None else (note,),
        )

    @property
    def _devices(self) -> int:
        return int(self.topology.ranks_per_node)

    def _shaped(self, num_ranks: int) -> Any:
        topology = self.topology
        per_node = self.arguments.ranks_per_node
        if per_node is None:
            per_node = num_ranks if topology.device == "cpu" else min(num_ranks, topology.ranks_per_node)
        if num_ranks % per_node:
            raise ConfigError(f"--ranks {num_ranks}: needed a multiple of {per_node}, the ranks per node.")
        return topology.shaped(per_node, num_ranks // per_node)

    def _origins(self) -> dict[str, str]:
        arguments = self.arguments
        return {
            "config": str(arguments.config),
            "profile": str(arguments.profile),
            "topology": str(arguments.topology),
            "command": self.command,
        }


def _given(value: int | None, otherwise: int | None) -> int | None:
    return otherwise if value is None else value


def _settings(config: Any, device: str) -> dict[str, Any]:
    return {**config.predicted_from, "train.device": device}


def _plan(arguments: argparse.Namespace, command: Sequence[str]) -> int:
    # Imported here, because it loads torch and TorchRec, and --help must answer at once.
    from embershard.launch.plan import view as plan_view
    from embershard.planning.planner import make_plan

    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    for path in (arguments.output, arguments.png):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.resolve().parent}; make it first.")
    setup = _read(arguments, shlex.join(command))
    ranks = arguments.ranks or [setup.topology.world_size]
    if max(ranks) > _MOST_RANKS:
        raise ConfigError(f"--ranks {max(ranks)}: needed at most {_MOST_RANKS}.")
    if any(ratio > 1 for ratio in arguments.ratios or ()):
        raise ConfigError(f"--ratios {max(arguments.ratios):g}: needed shares of the rows, in (0, 1].")
    if len(ranks) > 1 or len(arguments.ratios or ()) > 1:
        return _what_if(setup, ranks, console)
    if arguments.png is not None:
        raise ConfigError("--png draws a comparison; give several --ranks or --ratios.")
    request = setup.request(ranks[0], (arguments.ratios or [None])[0])
    with plan_view.progress(console) as progress:
        plan = make_plan(request, progress)
    if arguments.explain:
        plan_view.show_explanations(request, plan, arguments.explain, console)
    else:
        plan_view.show(plan, console, top=arguments.top)
    if arguments.output is not None:
        plan.save(arguments.output)
        console.print(
            f"Written to {arguments.output}. Train with it:  embershard train --config {arguments.config} "
            f"--plan {arguments.output} --nproc {ranks[0]}",
            soft_wrap=True,
            highlight=False,
        )
    return 0


def _what_if(setup: _Setup, ranks: Sequence[int], console: Console) -> int:
    from embershard.launch.plan import view as plan_view
    from embershard.launch.plan.picture import draw_what_if
    from embershard.launch.plan.what_if import try_all

    arguments = setup.arguments
    if arguments.output is not None or arguments.explain:
        raise ConfigError("-o and --explain are for one plan; give one number of --ranks and at most one of --ratios.")
    cases = [(each, ratio) for ratio in (arguments.ratios or [None]) for each in ranks]
    requests: list[tuple[int, float | None, Callable[[], Any]]] = [
        (each, ratio, lambda each=each, ratio=ratio: setup.request(each, ratio))  # type: ignore[misc]
        for each, ratio in cases
    ]
    outcomes = try_all(requests, console)
    plan_view.show_what_if(outcomes, console)
    if arguments.png is not None:
        draw_what_if(outcomes, arguments.png)
        console.print(f"Drawn to {arguments.png}.", soft_wrap=True, highlight=False)
    return 0 if any(outcome.plan is not None for outcome in outcomes) else 2


def _read(arguments: argparse.Namespace, command: str) -> _Setup:
    from embershard.frequency import FrequencyProfile
    from embershard.launch.config import load_config
    from embershard.launch.plan.inputs import check_tables
    from embershard.planning.cost.topology import load_topology
    from embershard.training.config import RunConfig

    if arguments.config is None or arguments.profile is None:
        raise ConfigError("embershard plan needs --config (the run's settings) and --profile (of embershard profile).")
    config = load_config(RunConfig, arguments.config, arguments.overrides)
    profile = FrequencyProfile.load(arguments.profile)
    if profile.statistics is None:
        raise ConfigError(
            f"{arguments.profile} has row counts only; make it with embershard profile, which also finds out what "
            "planning needs."
        )
    check_tables(config, profile.statistics)
    topology = load_topology(arguments.topology)
    if config.train.device != "auto" and config.train.device != topology.device:
        raise ConfigError(
            f"train.device is {config.train.device!r}, and topology {topology.name} is of kind {topology.device!r}; "
            "choose another --topology, or --set train.device=auto."
        )
    return _Setup(config, profile.statistics, topology, arguments, command)


def _diff(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="embershard plan diff", description="Say how two plans differ.")
    parser.add_argument("before", type=Path, metavar="A", help="a plan")
    parser.add_argument("after", type=Path, metavar="B", help="another one")
    arguments = parser.parse_args(argv)
    from embershard.sharding.plan import Plan
    from embershard.sharding.plan_diff import diff_lines

    lines = diff_lines(Plan.load(arguments.before), Plan.load(arguments.after))
    print("\n".join(lines) if lines else "The plans are equal.")
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from embershard.launch.plan.calibrate import run_calibration

    if arguments.output is None or not arguments.output.resolve().parent.is_dir():
        raise ConfigError("--calibrate needs -o FILE.toml in a folder that is there, for the measured topology.")
    run_calibration(arguments.ranks or [1, 2, 4], arguments.output, quick=arguments.quick)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="embershard plan", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the run's settings, a TOML file")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override a setting"
    )
    parser.add_argument("--profile", type=Path, metavar="FILE", help="the data's frequencies, of embershard profile")
    parser.add_argument("--ranks", type=_numbers(int), metavar="N[,N...]", help="ranks; several: compare them")
    parser.add_argument("--ratios", type=_numbers(float), metavar="R[,R...]", help="shares of the rows on the device")
    parser.add_argument("--ranks-per-node", type=int, metavar="N", help="(default: the topology's)")
    parser.add_argument("--device-memory", type=parse_bytes, metavar="SIZE", help="of one rank, a hard limit: 80GB")
    parser.add_argument("--host-memory", type=parse_bytes, metavar="SIZE", help="of one node: 512GB")
    parser.add_argument(
        "--topology", default="cpu", metavar="NAME", help="a machine: h200x8, h100x8x4, cpu, or a TOML file"
    )
    parser.add_argument("--types", type=_words, metavar="T[,T...]", help="sharding types that may be used")
    parser.add_argument(
        "--replicate-rows",
        type=int,
        default=0,
        metavar="N",
        help="replicate tables of up to N rows; the dense optimizer trains them, so it must agree with the tables'",
    )
    parser.add_argument("--explain", action="append", metavar="TABLE", help="why that table is where it is")
    parser.add_argument("--top", type=int, default=12, metavar="N", help="tables to show, the largest first")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the comparison of several --ranks or --ratios")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where the plan (or the topology) goes")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine and write a topology")
    parser.add_argument("--quick", action="store_true", help="with --calibrate: a rough measurement")
    return parser


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    def parse(text: str) -> list[Any]:
        try:
            values = [kind(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"got {text!r}; needed numbers with commas between them") from error
        if any(value <= 0 for value in values):
            raise argparse.ArgumentTypeError(f"got {text!r}; needed numbers above 0")
        return values

    return parse


def _words(text: str) -> list[str]:
    known = ("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard")
    words = text.split(",")
    unknown = [word for word in words if word not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"got {unknown[0]!r}; needed some of {', '.join(known)}")
    return words


if __name__ == "__main__":
    sys.exit(main())
