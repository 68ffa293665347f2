"""What `embershard plan` does: reads settings and a profile, makes one plan or compares several, and shows them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from embershard.commands.plan import view
from embershard.commands.plan.inputs import budget, check_tables, make_workload, read_lookups, read_tables
from embershard.errors import ConfigError
from embershard.frequency import DataStatistics, FrequencyProfile
from embershard.launch.arguments import set_words
from embershard.launch.screen import progress_bar, save_figure, say, wide_console
from embershard.lazy_names import named
from embershard.planning.budget import all_on_devices, ranks_without_caches
from embershard.planning.cost.topology import Topology, load_topology
from embershard.planning.many_ranks import plan_with_care
from embershard.planning.request import PlanRequest
from embershard.planning.uncertainty import PlannedCase, uncertainty
from embershard.planning.workload import Workload
from embershard.settings.files import load_config
from embershard.sharding.sizes import ModelSize
from embershard.training.config import RunConfig
from embershard.training.fit.host_types import host_type_notes

MOST_RANKS = 4096
#: Settings without effect beside `--plan`, which gives them.
_OF_PLANNING = ("cache.ratio", "cache.device_bytes", "sharding.exchange", "sharding.plan")
_DISK_NOTE = (
    'cache.host = "file": the pages of a step are predicted, and the time to move them is not: how fast is the disk? '
    "embershard doctor measures it; give it as disk_pages_per_second in the topology's file."
)
_HOT_COLD_NOTE = (
    'Hit rates, bytes and times are predicted for sharding.mode="sharded", without hot rows: with them, hot batches '
    "send no embeddings, and the caches see lookups of cold rows only. Memory has room for the hot rows."
)


@dataclass(frozen=True)
class Setup:
    """The command line and its files, read."""

    config: RunConfig
    data: DataStatistics
    topology: Topology
    arguments: argparse.Namespace
    command: str
    model: ModelSize | None = None
    note: str | None = None
    price: float | None = None
    """Of a rank for an hour."""
    machine: str = ""
    """The kind of it, where several are compared."""

    def request(self, num_ranks: int, ratio: float | None = None) -> PlanRequest:
        """Return the request for so many ranks; `ratio` overrides the config's share of rows on the device."""
        config, arguments = self.config, self.arguments
        topology = self.shaped(num_ranks)
        limits, host_bytes = arguments.device_memory or config.sharding.device_limits(num_ranks), arguments.host_memory
        if len(limits) not in (0, 1, num_ranks):
            raise ConfigError(
                f"--device-memory: got {len(limits)} sizes, needed one, or one for each of {num_ranks} ranks."
            )
        limits = limits or list(topology.memory_of_ranks(num_ranks))
        device_bytes = max(limits, default=topology.device_memory_bytes)
        host_bytes = topology.host_memory_bytes if host_bytes is None else host_bytes
        files = [each for each in ("config", "profile", "tables", "topology") if getattr(arguments, each) is not None]
        most_ranks = None if topology.device == "cpu" else self.topology.ranks_per_node
        workload = make_workload(
            config,
            self.data,
            num_ranks,
            ranks_per_node=topology.ranks_per_node,
            device=topology.device,
            cores_per_node=topology.cores_per_node,
            reserve_bytes=topology.reserve_within(device_bytes),
            model=self.model,
        )
        host_bytes = host_bytes and host_bytes // workload.shape.groups_per_node
        request = PlanRequest(
            workload=workload,
            rates=topology.rates_of_ranks(workload.shape.world_size),
            budget=budget(config, device_bytes, host_bytes, ratio, limits if len(set(limits)) > 1 else ()),
            types=arguments.types,
            pins=config.sharding.pin,
            replicate_rows=arguments.replicate_rows,
            most_ranks_per_node=arguments.ranks_per_node or most_ranks,
            settings=config.predicted_from(topology.device, num_ranks),
            made_from={**{name: str(getattr(arguments, name)) for name in files}, "command": self.command},
            notes=self._notes(topology, device_bytes, workload),
            on_ranks=lambda other: self.request(other, ratio),
            on_change=lambda key, value: self._changed(key, value).request(num_ranks, ratio),
            topology=topology,
            effort=arguments.effort,
        )
        return request if config.cache.enabled or not request.may_mix else all_on_devices(request)

    def _notes(self, topology: Topology, device_bytes: int | None, workload: Workload) -> list[str]:
        config = self.config
        in_file = config.cache.host == "file" and config.cache.enabled and not topology.disk_pages_per_second
        notes = (
            self.note,
            topology.cores_note,
            topology.note(workload.shape.all_ranks),
            workload.drawn and workload.drawn.note,
            topology.reserve_note(device_bytes),
            topology.precision_note(config.train.precision),
            _HOT_COLD_NOTE if config.sharding.mode == "hot_cold" else None,
            _DISK_NOTE if in_file else None,
            *host_type_notes(config.cache, workload.model.tables, predicts_gpu=topology.device == "cuda"),
        )
        return [note for note in notes if note is not None]

    def _changed(self, key: str, value: Any) -> Setup:
        """Return this with another value of a setting, or with other limits of `--device-memory`."""
        if key == "device_memory":
            return replace(self, arguments=argparse.Namespace(**{**vars(self.arguments), key: value}))
        part, _, name = key.partition(".")
        config = replace(self.config, **{part: replace(getattr(self.config, part), **{name: value})})
        if (model := self.model) is not None:
            tables = tuple(replace(each, dtype=config.model.dtype_of(each.table)) for each in model.tables)
            model = replace(model, tables=tables)
        return replace(self, config=config, model=model)

    def shaped(self, num_ranks: int) -> Topology:
        """Return the machine with so many ranks, as one of their groups sees it. A CPU's ranks are all on one node,
        unless they are simulated."""
        topology, per_node = self.topology, self.arguments.ranks_per_node
        if per_node is None:
            on_one_node = topology.device == "cpu" and not self.arguments.simulate
            per_node = num_ranks if on_one_node else min(num_ranks, topology.ranks_per_node)
        if num_ranks % per_node:
            raise ConfigError(f"--ranks {num_ranks}: needed a multiple of {per_node}, the ranks per node.")
        try:
            topology = topology.shaped(per_node, num_ranks // per_node)
        except ConfigError as error:
            raise ConfigError(f"--topology {self.arguments.topology}, {num_ranks} ranks: {error}") from error
        if self.config.sharding.groups > 1:
            seen = named("embershard.extras.groups.predicted:seen_from_a_group")
            topology = seen(topology, self.config.sharding.groups, num_ranks)
        return topology


def plan(arguments: argparse.Namespace, command: str) -> int:
    """Run `embershard plan`, which this `command` asked for; return the exit code."""
    console = wide_console()
    with console.status("reading settings and profile"):
        setups = read_setups(arguments, command)
    setup = setups[0]
    ranks, ratios = arguments.ranks or [setup.topology.world_size], arguments.ratios or [None]
    if max(ranks) > MOST_RANKS:
        raise ConfigError(f"--ranks {max(ranks)}: needed at most {MOST_RANKS}.")
    if any(ratio > 1 for ratio in arguments.ratios or ()):
        raise ConfigError(f"--ratios {max(arguments.ratios)}: needed shares of the rows, in (0, 1].")
    asked = (arguments.target, arguments.batches, arguments.global_batches, arguments.most_batch)
    if arguments.simulate or any(asked) or max(len(ranks), len(ratios), len(setups)) > 1:
        what = "simulate" if arguments.simulate else "what_if"
        compare: Callable[..., int] = named(f"embershard.extras.what_if.command:{what}")
        return compare(setups, ranks, ratios, console)
    return _one_plan(setup, ranks[0], ratios[0], console)


def _one_plan(setup: Setup, num_ranks: int, ratio: float | None, console: Console) -> int:
    arguments, request = setup.arguments, setup.request(num_ranks, ratio)
    with progress_bar(console, "pools replayed") as on_progress:
        made = plan_with_care(request, on_progress)
    assert made.prediction is not None, "a new plan has one"
    certainty = uncertainty(request.workload, made.prediction, setup.shaped(num_ranks))
    case = PlannedCase(num_ranks, ratio, made, price=setup.price, certainty=certainty)
    if arguments.explain:
        tables = [table for table in arguments.explain if table is not None]
        if len(tables) < len(arguments.explain):
            named("embershard.extras.what_if.explain_plan:show_plan_explanation")(setup, request, made, console)
        if tables:
            named("embershard.extras.what_if.explain_tables:show_explanations")(request, made, tables, console)
    else:
        has_caches = any(table.kernel == "cached" for table in made.tables)
        view.show(made, console, arguments.top, ranks_without_caches(request) if has_caches else None)
        view.show_certainty(case, console)
    draw(arguments.png, console, "plan_figure", case, setup.topology)
    if arguments.output is not None:
        made.save(arguments.output)
        words = train_words(arguments, num_ranks)
        train = "" if setup.model is not None else f" Train with it:  embershard train {words}"
        say(console, f"Written to {arguments.output}.{train}")
    return 0


def train_words(arguments: argparse.Namespace, num_ranks: int) -> str:
    """Return the words of the command that trains by the plan that was written."""
    kept = [text for text in arguments.overrides if text.partition("=")[0].strip() not in _OF_PLANNING]
    words = ["--config", str(arguments.config), *set_words(kept)]
    return shlex.join([*words, "--plan", str(arguments.output), "--nproc", str(num_ranks)])


def draw(path: Path | None, console: Console, figure: str, *given: Any) -> None:
    """Draw a figure, named by the function that makes it, of what is given, if a file was asked for."""
    if path is not None:
        save_figure(named(f"embershard.extras.what_if.picture:{figure}")(*given), path)  # it loads matplotlib
        say(console, f"Drawn to {path}.")


def read_setups(arguments: argparse.Namespace, command: str) -> list[Setup]:
    """Return what was asked for, once for each machine."""
    config, data, model, note = _read_data(arguments)
    names, prices = arguments.topology, arguments.price or [None]
    if len(prices) not in (1, len(names)):
        raise ConfigError(f"--price: got {len(prices)} prices for {len(names)} machines, needed one for each, or one.")
    prices = prices * len(names) if len(prices) == 1 else prices
    several = len(names) > 1
    return [
        Setup(
            config,
            data,
            _topology(config, name),
            argparse.Namespace(**{**vars(arguments), "topology": name}),
            command,
            model,
            note,
            price,
            name if several else "",
        )
        for name, price in zip(names, prices, strict=True)
    ]


def _read_data(arguments: argparse.Namespace) -> tuple[RunConfig, DataStatistics, ModelSize | None, str | None]:
    """Return the settings, the frequencies, and where they are assumed the model and the sentence on that."""
    if arguments.config is None:
        own, statistics, model = read_tables(arguments.tables, arguments.overrides, arguments.trust_code)
        return own, statistics, model, own.note
    config = load_config(RunConfig, arguments.config, arguments.overrides, trust_code=arguments.trust_code)
    if arguments.tables is not None:
        tables, statistics, model = read_lookups(arguments.tables, config)
        return config, statistics, model, tables.note
    found = FrequencyProfile.load(arguments.profile).statistics
    if found is None:
        raise ConfigError(
            f"{arguments.profile} has row counts only; make it with embershard profile, which also finds out what "
            "planning needs."
        )
    check_tables(config, found)
    return config, found, None, None


def _topology(config: RunConfig, name: str) -> Topology:
    topology = load_topology(name)
    if config.train.device not in ("auto", topology.device):
        raise ConfigError(
            f"train.device is {config.train.device!r}, and topology {topology.name} is of kind {topology.device!r}; "
            "choose another --topology, or --set train.device=auto."
        )
    if topology.device == "cuda" and config.data.has_ids:
        raise ConfigError(
            f"--topology {name}: got a machine with GPUs, and tables of this run take any id, which are on a "
            "CPU only so far. Plan for --topology cpu, or let ids share rows (docs/ids.md)."
        )
    return topology.at(config.train.precision)
