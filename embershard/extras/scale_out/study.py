"""The section `[scale_out]` of a sweep's file: makes what a study predicts before its runs, and its results behind
them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from embershard.commands.plan import command as plan_command
from embershard.commands.profile import command as profile_command
from embershard.commands.report import command as report_command
from embershard.errors import ConfigError, SetupError
from embershard.extras.scale_out import nodes
from embershard.extras.scale_out.page import MARKDOWN, PICTURE, write_study_page
from embershard.extras.scale_out.points import POINTS, SIMULATED, absent, points_of, write_points
from embershard.extras.scale_out.tables import speed_tables
from embershard.launch.screen import save_figure, say
from embershard.planning.cost.topology import load_topology, save_topology
from embershard.reports.run_tables import table_of
from embershard.settings.decoding import decode
from embershard.settings.files import load_config
from embershard.sweeps.experiments import SEEDS, Experiment, Sweep
from embershard.sweeps.outcomes import run_folder
from embershard.sweeps.spread import read_configurations
from embershard.training.config import RunConfig

_COMMANDS = {"plan": plan_command.main, "profile": profile_command.main}
#: Settings that a profile depends on.
_OF_DATA = ("data.", "model.", "profile.")


@dataclass(frozen=True)
class ScaleOut:
    """Section `[scale_out]`.

    Attributes:
        topology: the machine of the predictions, as of `embershard plan --topology`; None: this one, which is
            calibrated for the numbers of ranks of the study.
        quick: calibrate roughly.
        simulate_to: simulate twice as many ranks, and so on, up to so many; 0: none.
        simulated_on: the machine of the simulated ranks; None: `topology`.
        link: between its nodes, as `1gbit`; None: as fast as the topology says.
        profile_steps: the first and the last step of each run that are traced, for the parts of a step; None: none.
    """

    topology: str | None = None
    quick: bool = False
    simulate_to: int = 0
    simulated_on: str | None = None
    link: str | None = None
    profile_steps: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.quick and self.topology is not None:
            raise ConfigError("scale_out.quick has no effect with scale_out.topology, which is not calibrated here.")
        if self.simulate_to < 0 or (not self.simulate_to and (self.simulated_on, self.link) != (None, None)):
            raise ConfigError(
                f"scale_out.simulate_to: got {self.simulate_to}, needed the most ranks that are simulated, for "
                "instance 4096; without it, simulated_on and link have no effect."
            )
        if self.profile_steps is not None and not 1 <= self.profile_steps[0] <= self.profile_steps[1]:
            raise ConfigError(
                f"scale_out.profile_steps: got {list(self.profile_steps)}, needed the first and the last step that are "
                "traced, for instance [20, 29]."
            )


class Study:
    """A study of scaling: a sweep whose runs may have plans of their own, and ranks on several nodes.

    Args:
        sweep: has the section.
        folder: of the sweep.
        is_dry: only say the commands.

    Raises:
        ConfigError: the section is wrong, or runs cannot be placed so.
    """

    def __init__(self, sweep: Sweep, folder: Path, console: Console, *, is_dry: bool) -> None:
        self._asked = decode(ScaleOut, dict(sweep.scale_out or {}))
        self._sweep, self._folder, self._console, self._is_dry = sweep, folder, console, is_dry
        self._said: set[str] = set()
        for experiment in sweep.experiments:
            nodes.check(experiment)

    def prepared(self) -> Sweep:
        """Return the sweep whose runs are trained by their plans, which are made now, as everything that is predicted.

        A file that is there already is not made again.
        """
        for line in self._simulated_lines():
            self._simulation(line)
        return replace(self._sweep, experiments=tuple(map(self._placed, self._sweep.experiments)))

    def finish(self) -> None:
        """Write `scaling.csv`, `scaling.png`, `scaling.md` and, where Plotly is installed, `report.html` into the
        sweep's folder."""
        from embershard.extras.scale_out.picture import scaling_figure  # it loads matplotlib

        simulations = {
            run_folder(self._folder, each.name): self._simulation(line)
            for line in self._simulated_lines()
            for each in self._sweep.experiments
            if _line(each) == _line(line)
        }
        configurations = read_configurations(self._folder)
        points, missing = points_of(configurations, simulations), absent(configurations, simulations)
        if not points:
            say(self._console, *(f"No point: {line}" for line in missing))
            return
        write_points(points, self._folder)
        for table in speed_tables(points):
            self._console.print(table_of(table))
        save_figure(scaling_figure(points), self._folder / PICTURE)
        write_study_page(points, missing, self._folder)
        page = "report.html"
        try:
            with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                report_command.main([str(self._folder), "-o", str(self._folder / page)])
        except SetupError as error:
            page = f"no page: {error}"
        say(self._console, f"Scaling: {self._folder / MARKDOWN}, {PICTURE}, {POINTS}, {page}")

    def _placed(self, experiment: Experiment) -> Experiment:
        placed, settings, program = experiment.placed, experiment.settings, experiment.program
        if "plan" in placed and placed["plan"] != "none":
            settings = (*settings, "--plan", str(self._plan(experiment)))
        if nodes.nodes_of(experiment) > 1:
            program = nodes.__name__
            settings = (*settings, *nodes.words_of(experiment))
        if (traced := self._asked.profile_steps) is not None:
            settings = (*settings, "--profile-steps", f"{traced[0]}:{traced[1]}")
        return replace(experiment, settings=settings, program=program)

    def _plan(self, experiment: Experiment) -> Path:
        num_nodes, words = nodes.nodes_of(experiment), list(experiment.settings)
        topology, per_node = self._topology(self._asked.topology), experiment.ranks // num_nodes
        if num_nodes > 1:
            topology = self._nodes(topology, nodes.link_of(experiment), per_node, num_nodes)
            words += ["--ranks-per-node", str(per_node)]
        words = [*_without(words, SEEDS), "--profile", str(self._profile(experiment)), "--topology", topology]
        words += ["--ranks", str(experiment.ranks), *shlex.split(experiment.placed["plan"])]
        return self._make("plans", ".json", "plan", words)

    def _profile(self, experiment: Experiment) -> Path:
        words = _without(experiment.settings, SEEDS, only=_OF_DATA)
        return self._make("profiles", ".npz", "profile", words)

    def _simulated_lines(self) -> Iterator[Experiment]:
        """Yield one run of each configuration that has a plan and one node, of the fewest ranks; nothing where none
        are simulated."""
        found: dict[tuple[str, ...], Experiment] = {}
        for each in self._sweep.experiments if self._asked.simulate_to else ():
            if each.placed.get("plan", "none") != "none" and nodes.nodes_of(each) == 1:
                key = _line(each)
                found[key] = min(found.get(key, each), each, key=lambda each: each.ranks)
        yield from found.values()

    def _simulation(self, experiment: Experiment) -> Path:
        asked, words = self._asked, _without(experiment.settings, SEEDS)
        ranks = [experiment.ranks]
        while 2 * ranks[-1] <= asked.simulate_to:
            ranks.append(2 * ranks[-1])
        overrides = [word for before, word in itertools.pairwise(words) if before == "--set"]
        config = load_config(RunConfig, Path(words[1]), overrides, trust_code="--trust-code" in words)
        if config.train.global_batch_size is not None:
            ranks = [each for each in ranks if config.train.global_batch_size % each == 0]
        topology = self._topology(asked.simulated_on or asked.topology)
        if asked.link is not None:
            is_named = asked.simulated_on or asked.topology
            calibrated = max(each.ranks for each in self._sweep.experiments)
            per_node = load_topology(topology).ranks_per_node if is_named else calibrated
            topology = self._nodes(topology, asked.link, per_node)
        words += ["--simulate", "--ranks", ",".join(map(str, ranks)), "--topology", topology]
        words += ["--profile", str(self._profile(experiment)), *shlex.split(experiment.placed["plan"])]
        return self._make(SIMULATED, ".json", "plan", words)

    def _topology(self, name: str | None) -> str:
        if name is not None:
            return name
        ranks = sorted({each.ranks for each in self._sweep.experiments})
        words = ["--calibrate", "--ranks", ",".join(map(str, ranks)), *(["--quick"] if self._asked.quick else [])]
        path = self._make("", ".toml", "plan", words, name="machine")
        if not self._is_dry and str(path) not in self._said:
            self._said.add(str(path))
            # Other programs while it measured spoil every prediction.
            say(self._console, f"Calibrated: {load_topology(str(path)).source}")
        return str(path)

    def _nodes(self, topology: str, link: str | None, per_node: int, num_nodes: int = 1) -> str:
        """Return the file of a machine with this link between its nodes of so many ranks; `num_nodes`: into which it is
        cut."""
        path = self._folder / "nodes" / f"{Path(topology).stem}-{num_nodes}x{per_node}-{link}.toml"
        if not self._is_dry:
            path.parent.mkdir(exist_ok=True)
            machine = load_topology(topology)
            machine = machine if num_nodes == 1 else nodes.cut(machine, num_nodes * per_node, num_nodes)
            save_topology(machine if link is None else nodes.with_link(machine, link, per_node), path)
        return str(path)

    def _make(self, kind: str, ending: str, command: str, words: Sequence[str], name: str = "") -> Path:
        """Return the file that a command writes, named by its words; run it unless the file is there."""
        name = name or hashlib.sha256(shlex.join([command, *words]).encode()).hexdigest()[:12]
        output = self._folder / kind / f"{name}{ending}"
        partial = output.parent / "partial" / output.name
        if output.exists():
            return output
        said = f"embershard {command} {shlex.join([*words, '-o', str(output)])}"
        if self._is_dry:
            if said not in self._said:
                self._said.add(said)
                say(self._console, said)
            return output
        say(self._console, said)
        partial.parent.mkdir(parents=True, exist_ok=True)
        with output.with_suffix(".txt").open("w", encoding="utf-8") as screen, contextlib.redirect_stdout(screen):
            _COMMANDS[command]([*words, "-o", str(partial)])
        if not partial.exists():
            raise ConfigError(f"{said}: wrote nothing; {output.with_suffix('.txt')} says why.")
        os.replace(partial, output)
        return output


def _line(experiment: Experiment) -> tuple[str, ...]:
    """Return what runs have in common that differ in their ranks and seeds alone."""
    return (str(sorted(experiment.placed.items())), *_without(experiment.settings, SEEDS))


def _without(words: Sequence[str], left_out: Sequence[str], only: Sequence[str] = ("",)) -> list[str]:
    """Return words of a command without the overrides of these settings, and with those alone that begin so.

    >>> _without(["--config", "a.toml", "--set", "train.seed=1", "--set", "data.seed=2"], ["train.seed"])
    ['--config', 'a.toml', '--set', 'data.seed=2']
    """
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        pair = [word, next(rest)] if word == "--set" else [word]
        key = pair[-1].partition("=")[0]
        if len(pair) == 1 or (key not in left_out and key.startswith(tuple(only))):
            found += pair
    return found
