"""What `embershard plan` does for several machines, ranks or ratios, for `--target`, and for `--simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from embershard.commands.plan import view
from embershard.commands.plan.run import MOST_RANKS, Setup, draw
from embershard.errors import ConfigError
from embershard.extras.what_if.cases import cases_to, planned_case
from embershard.extras.what_if.simulate_scaling import SimulatedRun, show_simulation, simulate_scaling, write_simulation
from embershard.extras.what_if.view import Teller, show_target, show_what_if, try_all
from embershard.launch.screen import say
from embershard.planning.budget import ranks_without_caches
from embershard.planning.uncertainty import PlannedCase


def what_if(setups: Sequence[Setup], ranks: Sequence[int], ratios: Sequence[float | None], console: Console) -> int:
    """Compare plans for machines, ranks and ratios; return the exit code."""
    arguments, outcomes = setups[0].arguments, list[PlannedCase]()
    if arguments.output is not None or arguments.explain:
        raise ConfigError("-o and --explain are for one plan; give one number of --ranks and at most one of --ratios.")
    for setup in setups:
        plan_case = partial(_case, setup)
        if arguments.target is not None and arguments.ranks is None:
            tell = Teller(plan_case, console)
            per_node = setup.arguments.ranks_per_node or setup.topology.ranks_per_node
            for ratio in ratios:
                outcomes += cases_to(arguments.target, per_node, MOST_RANKS, lambda n: tell(n, ratio))  # noqa: B023
        else:
            outcomes += try_all([(each, ratio) for ratio in ratios for each in ranks], plan_case, console)
    console.print()
    for setup in setups:
        if (fewest := ranks_without_caches(setup.request(ranks[0], ratios[0]))) is not None:
            named = "" if len(setups) == 1 else f" of {setup.machine}"
            say(console, f"{fewest} {'rank' if fewest == 1 else 'ranks'}{named} would hold all rows without a cache.")
    show_what_if(outcomes, console)
    planned = [each for each in outcomes if each.plan is not None]
    if arguments.target is not None:
        found = show_target(outcomes, arguments.target, console)
        planned = planned if found is None else [found]
    if planned:
        view.show_certainty(planned[-1], console)
    draw(arguments.png, console, "what_if_figure", outcomes, setups[0].topology)
    return 0 if planned else 2


def simulate(setups: Sequence[Setup], ranks: Sequence[int], ratios: Sequence[float | None], console: Console) -> int:
    """Simulate training on these ranks of one machine; return the exit code."""
    setup, arguments = setups[0], setups[0].arguments
    if arguments.explain or len(ratios) > 1:
        raise ConfigError("--simulate takes -o FILE.json and --png, and neither --explain nor several --ratios.")

    def tell(run: SimulatedRun) -> None:
        speed = run.problem or f"{run.step_seconds * 1e3:.2f} ms a step, {run.samples_per_second:,.0f} samples/s"
        console.print(f"Simulated {run.num_ranks} ranks: {speed}", soft_wrap=True)
        console.file.flush()

    with console.status("simulating"):
        runs = simulate_scaling(
            sorted(set(ranks)),
            lambda num_ranks: (setup.request(num_ranks, ratios[0]), setup.shaped(num_ranks)),
            tell,
        )
    topology = setup.shaped(max(ranks))
    show_simulation(runs, topology, console)
    if arguments.output is not None:
        write_simulation(runs, topology, arguments.output)
        say(console, f"Written to {arguments.output}.")
    if all(run.problem for run in runs):
        return 2
    draw(arguments.png, console, "simulation_figure", runs, topology)
    return 0


def _case(setup: Setup, num_ranks: int, ratio: float | None = None) -> PlannedCase:
    request, topology = setup.request(num_ranks, ratio), setup.shaped(num_ranks)
    return planned_case(request, topology, ratio, setup.price, setup.machine)
