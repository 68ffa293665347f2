"""`embershard plan`: places tables, sizes caches and predicts the result, without a GPU at hand."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

from rich.console import Console

from embershard.errors import ConfigError
from embershard.launch.arguments import add_config_word, add_settings, add_trust, check_output, make_parser, set_words
from embershard.launch.screen import progress_bar, say, wide_console
from embershard.units import parse_bytes

if TYPE_CHECKING:  # they load torch and TorchRec, and --help must answer at once: functions import what they need
    from embershard.frequency import DataStatistics
    from embershard.planning.cost.topology import Topology
    from embershard.planning.request import PlanRequest
    from embershard.sharding.sizes import ModelSize
    from embershard.training.config import RunConfig

N = TypeVar("N", int, float)

_HELP = """Place tables and size caches; predict memory, hit rates and step time.

  embershard plan run.toml --profile profile.npz --ranks 8 --device-memory 72GiB --topology h100x8 -o plan.json
  embershard plan --tables tables.toml --ranks 1,2,4,8,16 --topology h200x8 --png scaling.png
  embershard plan run.toml --profile profile.npz --simulate --ranks 1..4096 --topology h100x8
  embershard plan --calibrate -o machine.toml --ranks 1,2,4
  embershard plan diff a.json b.json
"""
_MOST_RANKS, _MOST_EFFORT, _MOST_BYTES = 4096, 1000, 2**60
#: Settings without effect beside `--plan`, which gives them.
_OF_PLANNING = ("cache.ratio", "cache.device_bytes", "sharding.exchange", "sharding.plan")
_HOT_COLD_NOTE = (
    'Hit rates, bytes and times are predicted for sharding.mode="sharded", without hot rows: with them, hot batches '
    "send no embeddings, and the caches see lookups of cold rows only. Memory has room for the hot rows."
)


def main(argv: Sequence[str]) -> int:
    """Run `embershard plan` or `embershard plan diff`; return 0, or 2 where no compared case fits.

    Raises:
        EmbershardError: an option, a setting or a file is wrong, or the model does not fit.
    """
    if argv[:1] == ["diff"]:
        return _diff(argv[1:])
    arguments = _parser().parse_intermixed_args(argv)
    if arguments.calibrate:
        return _calibrate(arguments)
    return _plan(arguments, shlex.join(["embershard", "plan", *argv]))


@dataclass(frozen=True)
class _Setup:
    """The command line and its files, read."""

    config: RunConfig
    data: DataStatistics
    topology: Topology
    arguments: argparse.Namespace
    command: str
    model: ModelSize | None = None
    note: str | None = None

    def request(self, num_ranks: int, ratio: float | None = None) -> PlanRequest:
        """Return the request for so many ranks; `ratio` overrides the config's share of rows on the device."""
        from embershard.commands.plan.inputs import budget, make_workload
        from embershard.planning.request import PlanRequest

        config, arguments = self.config, self.arguments
        topology = self.shaped(num_ranks)
        device_bytes, host_bytes = arguments.device_memory, arguments.host_memory
        if device_bytes is None:
            device_bytes = topology.device_memory_bytes
        if host_bytes is None:
            host_bytes = topology.host_memory_bytes
        hot_cold = _HOT_COLD_NOTE if config.sharding.mode == "hot_cold" else None
        of_machine = (
            topology.cores_note,
            topology.note(num_ranks),
            topology.reserve_note(device_bytes),
            topology.precision_note(config.train.precision),
        )
        most_ranks = None if topology.device == "cpu" else self.topology.ranks_per_node
        return PlanRequest(
            workload=make_workload(
                config,
                self.data,
                num_ranks,
                ranks_per_node=topology.ranks_per_node,
                device=topology.device,
                cores_per_node=topology.cores_per_node,
                reserve_bytes=topology.reserve_within(device_bytes),
                model=self.model,
            ),
            rates=topology.rates_for(num_ranks),
            budget=budget(config, device_bytes, host_bytes, ratio),
            types=arguments.types,
            replicate_rows=arguments.replicate_rows,
            most_ranks_per_node=arguments.ranks_per_node or most_ranks,
            settings=config.predicted_from(topology.device, num_ranks),
            made_from={
                **{name: str(getattr(arguments, name)) for name in self.files},
                "command": self.command,
            },
            notes=[note for note in (self.note, *of_machine, hot_cold) if note is not None],
            on_ranks=lambda other: self.request(other, ratio),
            topology=topology,
            effort=arguments.effort,
        )

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the arguments that the plan is made from."""
        names = ("config", "profile", "tables", "topology")
        return tuple(name for name in names if getattr(self.arguments, name) is not None)

    def shaped(self, num_ranks: int) -> Topology:
        """Return the machine with so many ranks. A CPU's ranks are all on one node, unless they are simulated."""
        topology, per_node = self.topology, self.arguments.ranks_per_node
        if per_node is None:
            on_one_node = topology.device == "cpu" and not self.arguments.simulate
            per_node = num_ranks if on_one_node else min(num_ranks, topology.ranks_per_node)
        if num_ranks % per_node:
            raise ConfigError(f"--ranks {num_ranks}: needed a multiple of {per_node}, the ranks per node.")
        try:
            return topology.shaped(per_node, num_ranks // per_node)
        except ConfigError as error:
            raise ConfigError(f"--topology {self.arguments.topology}, {num_ranks} ranks: {error}") from error


def _plan(arguments: argparse.Namespace, command: str) -> int:
    for path in (arguments.output, arguments.png):
        if path is not None:
            check_output(path)
    console = wide_console()
    with console.status("reading settings and profile"):
        setup = _read(arguments, command)
        from embershard.commands.plan import view
        from embershard.planning.make_plan import make_plan

    ranks, ratios = arguments.ranks or [setup.topology.world_size], arguments.ratios or [None]
    if max(ranks) > _MOST_RANKS:
        raise ConfigError(f"--ranks {max(ranks)}: needed at most {_MOST_RANKS}.")
    if any(ratio > 1 for ratio in arguments.ratios or ()):
        raise ConfigError(f"--ratios {max(arguments.ratios):g}: needed shares of the rows, in (0, 1].")
    if arguments.simulate:
        return _simulate(setup, ranks, ratios, console)
    if len(ranks) > 1 or len(ratios) > 1:
        return _what_if(setup, ranks, ratios, console)
    request = setup.request(ranks[0], ratios[0])
    with progress_bar(console, "pools replayed") as on_progress:
        plan = make_plan(request, on_progress)
    if arguments.explain:
        view.show_explanations(request, plan, arguments.explain, console)
    else:
        view.show(plan, console, top=arguments.top)
    if arguments.png is not None:
        from embershard.commands.plan import picture
        from embershard.commands.plan.what_if import PlannedCase

        case = PlannedCase(ranks[0], ratios[0], plan)
        picture.save(picture.plan_figure(case, setup.topology), arguments.png)
        say(console, f"Drawn to {arguments.png}.")
    if arguments.output is not None:
        plan.save(arguments.output)
        train = "" if setup.model is not None else f" Train with it:  {_train_command(arguments, ranks[0])}"
        say(console, f"Written to {arguments.output}.{train}")
    return 0


def _train_command(arguments: argparse.Namespace, num_ranks: int) -> str:
    """Return the command that trains with the plan, with all settings but those that the plan has instead."""
    kept = [text for text in arguments.overrides if text.partition("=")[0].strip() not in _OF_PLANNING]
    words = ["--config", str(arguments.config), *set_words(kept)]
    words += ["--plan", str(arguments.output), "--nproc", str(num_ranks)]
    return f"embershard train {shlex.join(words)}"


def _what_if(setup: _Setup, ranks: Sequence[int], ratios: Sequence[float | None], console: Console) -> int:
    from embershard.commands.plan.view import show_what_if
    from embershard.commands.plan.what_if import try_all

    arguments = setup.arguments
    if arguments.output is not None or arguments.explain:
        raise ConfigError("-o and --explain are for one plan; give one number of --ranks and at most one of --ratios.")
    outcomes = try_all([(each, ratio) for ratio in ratios for each in ranks], setup.request, console)
    console.print()
    show_what_if(outcomes, console)
    if arguments.png is not None:
        from embershard.commands.plan import picture

        picture.save(picture.what_if_figure(outcomes, setup.topology), arguments.png)
        say(console, f"Drawn to {arguments.png}.")
    return 0 if any(outcome.plan is not None for outcome in outcomes) else 2


def _simulate(setup: _Setup, ranks: Sequence[int], ratios: Sequence[float | None], console: Console) -> int:
    from embershard.commands.plan.view import show_simulation, write_simulation
    from embershard.planning.simulate_scaling import simulate_scaling

    arguments = setup.arguments
    if arguments.explain or len(ratios) > 1:
        raise ConfigError("--simulate takes -o FILE.json and --png, and neither --explain nor several --ratios.")
    with console.status("") as status:
        runs = simulate_scaling(
            sorted(set(ranks)),
            lambda num_ranks: (setup.request(num_ranks, ratios[0]), setup.shaped(num_ranks)),
            lambda num_ranks: status.update(f"{num_ranks} ranks"),
        )
    topology = setup.shaped(max(ranks))
    show_simulation(runs, topology, console)
    if arguments.output is not None:
        write_simulation(runs, topology, arguments.output)
        say(console, f"Written to {arguments.output}.")
    if arguments.png is not None and any(not run.problem for run in runs):
        from embershard.commands.plan import picture

        picture.save(picture.simulation_figure(runs, topology), arguments.png)
        say(console, f"Drawn to {arguments.png}.")
    return 0 if any(not run.problem for run in runs) else 2


def _read(arguments: argparse.Namespace, command: str) -> _Setup:
    from embershard.frequency import FrequencyProfile
    from embershard.settings.files import load_config
    from embershard.training.config import RunConfig

    if arguments.tables is not None:
        return _of_tables(arguments, command)
    if arguments.config is None or arguments.profile is None:
        raise ConfigError(_missing(arguments))
    config = load_config(RunConfig, arguments.config, arguments.overrides, trust_code=arguments.trust_code)
    statistics = FrequencyProfile.load(arguments.profile).statistics
    if statistics is None:
        raise ConfigError(
            f"{arguments.profile} has row counts only; make it with embershard profile, which also finds out what "
            "planning needs."
        )
    from embershard.commands.plan.inputs import check_tables  # loads torch: behind the files, which may be wrong

    check_tables(config, statistics)
    return _Setup(config, statistics, _topology(config, arguments), arguments, command)


def _of_tables(arguments: argparse.Namespace, command: str) -> _Setup:
    """Read tables that are given as numbers."""
    from embershard.commands.plan.tables_file import read_lookups, read_tables
    from embershard.settings.files import load_config
    from embershard.training.config import RunConfig

    if arguments.profile is not None:
        raise ConfigError("--tables is for a plan without data: it takes no --profile.")
    if arguments.config is None:
        config, statistics, model = read_tables(arguments.tables, arguments.overrides, arguments.trust_code)
        return _Setup(config, statistics, _topology(config, arguments), arguments, command, model, config.note)
    run = load_config(RunConfig, arguments.config, arguments.overrides, trust_code=arguments.trust_code)
    tables, statistics, model = read_lookups(arguments.tables, run)
    return _Setup(run, statistics, _topology(run, arguments), arguments, command, model, tables.note)


def _topology(config: RunConfig, arguments: argparse.Namespace) -> Topology:
    from embershard.planning.cost.topology import load_topology

    topology = load_topology(arguments.topology)
    if config.train.device not in ("auto", topology.device):
        raise ConfigError(
            f"train.device is {config.train.device!r}, and topology {topology.name} is of kind {topology.device!r}; "
            "choose another --topology, or --set train.device=auto."
        )
    if topology.device == "cuda" and config.data.has_ids:
        raise ConfigError(
            f"--topology {topology.name}: got a machine with GPUs, and tables of this run take any id, which are on a "
            "CPU only so far. Plan for --topology cpu, or let ids share rows (docs/ids.md)."
        )
    return topology.at(config.train.precision)


def _missing(arguments: argparse.Namespace) -> str:
    """Return what is wrong without a config or a profile, with the command that makes a profile of these settings."""
    if arguments.config is None:
        return (
            "a plan needs a run's settings and a profile of its data. Give a file of settings or an example, and "
            "--profile FILE: embershard plan quickstart --profile profile.npz. Without data, "
            "give the numbers of its tables: --tables tables.toml"
        )
    words = ["--config", str(arguments.config), *set_words(arguments.overrides), "-o", "profile.npz"]
    return (
        f"--profile is missing: a plan is made from the frequencies of the data. Make a profile, and give it as "
        f"--profile profile.npz:  embershard profile {shlex.join(words)}"
    )


def _diff(argv: Sequence[str]) -> int:
    parser = make_parser("plan diff", "Say how two plans differ.\n\n  embershard plan diff a.json b.json\n")
    parser.add_argument("before", type=Path, metavar="A", help="a plan")
    parser.add_argument("after", type=Path, metavar="B", help="another one")
    arguments = parser.parse_args(argv)
    from embershard.sharding.plan import Plan
    from embershard.sharding.plan_diff import diff_lines

    lines = diff_lines(Plan.load(arguments.before), Plan.load(arguments.after))
    print("\n".join(lines) or "The plans are equal.")
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    if arguments.output is None:
        raise ConfigError("--calibrate needs -o FILE.toml, where the measured topology goes.")
    check_output(arguments.output)
    from embershard.commands.plan.calibrate import run_calibration

    run_calibration(arguments.ranks or [1, 2, 4], arguments.output, quick=arguments.quick)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("plan", _HELP, "[CONFIG] --profile FILE [options]")
    add_settings(parser)
    add_trust(parser)
    add_config_word(parser)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="the data's frequencies, of embershard profile")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="tables as numbers, for a plan without data")
    parser.add_argument("--ranks", type=_ranks, metavar="N[,N...]", help="ranks; several, or 1..64: compare them")
    parser.add_argument("--ratios", type=_numbers(float), metavar="R[,R...]", help="shares of the rows on the device")
    parser.add_argument("--ranks-per-node", type=_at_least(1), metavar="N", help="(default: the topology's)")
    parser.add_argument("--device-memory", type=_memory, metavar="SIZE", help="of one rank, a hard limit: 72GiB")
    parser.add_argument("--host-memory", type=_memory, metavar="SIZE", help="of one node: 512GiB")
    parser.add_argument(
        "--topology", default="cpu", metavar="NAME", help="a machine: h200x8, h100x8x4, cpu, or a TOML file"
    )
    parser.add_argument("--types", type=_sharding_types, metavar="T[,T...]", help="sharding types that may be used")
    parser.add_argument(
        "--replicate-rows",
        type=_at_least(0),
        default=0,
        metavar="N",
        help="replicate tables of up to N rows",
    )
    parser.add_argument("--effort", type=_effort, default=1.0, metavar="N", help="search N times as long")
    parser.add_argument("--simulate", action="store_true", help="estimate how training scales, step by step")
    parser.add_argument("--explain", action="append", metavar="TABLE", help="why that table is where it is")
    parser.add_argument("--top", type=_at_least(0), default=12, metavar="N", help="tables to show, the largest first")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the plan, the comparison, or the simulation")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="where the plan (topology, simulation) goes")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine and write a topology")
    parser.add_argument("--quick", action="store_true", help="with --calibrate: a rough measurement")
    return parser


def _effort(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MOST_EFFORT:
        raise argparse.ArgumentTypeError(f"got {text!r}; needed a number above 0, at most {_MOST_EFFORT}")
    return value


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text) if text.strip().lstrip("+-").isdecimal() else least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"got {text!r}; needed a whole number, {least} or more")
        return value

    return parse


def _memory(text: str) -> int:
    value = parse_bytes(text)
    if not 1 <= value <= _MOST_BYTES:
        raise argparse.ArgumentTypeError(f"got {text!r}; needed 1 to {_MOST_BYTES} bytes (an exbibyte)")
    return value


def _numbers(kind: Callable[[str], N]) -> Callable[[str], list[N]]:
    def parse(text: str) -> list[N]:
        try:
            values = [kind(part) for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"got {text!r}; needed numbers with commas between them") from error
        if any(not value > 0 for value in values):  # NaN is not
            raise argparse.ArgumentTypeError(f"got {text!r}; needed numbers above 0")
        return values

    return parse


def _ranks(text: str) -> list[int]:
    """Parse numbers of ranks, or a range like `1..64`, whose numbers double."""
    first, dots, last = text.partition("..")
    if not dots:
        return _numbers(int)(text)
    (low,), (high,) = _numbers(int)(first), _numbers(int)(last)
    if low > high:
        raise argparse.ArgumentTypeError(f"got {text!r}; needed FEWEST..MOST, for instance 1..64")
    return [low * 2**power for power in range((high // low).bit_length())]


def _sharding_types(text: str) -> list[str]:
    from embershard.sharding.sharding_types import Sharding

    known = [name for name in get_args(Sharding) if name != "data_parallel"]
    types = text.split(",")
    unknown = [name for name in types if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"got {unknown[0]!r}; needed some of {', '.join(known)}")
    return types
