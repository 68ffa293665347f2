"""What `embershard plan` does for several machines, ranks, ratios or batches, for `--target`, and for `--simulate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from embershard.commands.plan import view
from embershard.commands.plan.run import Setup, draw
from embershard.errors import ConfigError
from embershard.extras.what_if.cases import ComparedCase
from embershard.extras.what_if.grid import Series, UnplannedCase, plans_all, search, series_of
from embershard.extras.what_if.half_rows import half_rows_sentence
from embershard.extras.what_if.simulate_scaling import SimulatedRun, show_simulation, simulate_scaling, write_simulation
from embershard.extras.what_if.view import Teller, show_budget, show_left_out, show_target, show_training, show_what_if
from embershard.launch.screen import say
from embershard.planning.budget import ranks_without_caches
from embershard.planning.cost.topology import Topology
from embershard.planning.request import PlanRequest


def what_if(setups: Sequence[Setup], ranks: Sequence[int], ratios: Sequence[float | None], console: Console) -> int:
    """Compare plans for machines, ranks, ratios and batches; return the exit code."""
    arguments = setups[0].arguments
    target = arguments.target
    if arguments.output is not None or arguments.explain:
        raise ConfigError(
            "-o and --explain are for one plan; give one number of --ranks, at most one of --ratios, and its batch as "
            "--set train.batch_size=N."
        )
    if target is not None and target.is_money and arguments.price is None:
        raise ConfigError(f"--target {target.amount:g}/h needs --price: what a rank costs for an hour.")
    series, left_out = series_of(setups, ranks, ratios)
    num_cases = sum(len(each.numbers) for each in series) if plans_all(arguments) else None
    found = search(series, Teller(console, num_cases))
    outcomes, left_out = found.planned, left_out + found.left_out
    if not outcomes:
        raise ConfigError(f"--target {target.amount:g}/h: no number of ranks costs so little. Give more.")
    console.print()
    _say_without_caches(series, console)
    show_what_if(outcomes, console)
    show_left_out(len(outcomes), left_out, console)
    planned = [each for each in outcomes if each.plan is not None]
    if target is not None:
        chosen = (show_budget if target.is_money else show_target)(outcomes, target.amount, console)
        if chosen is not None:
            show_training(chosen, setups[0], console)
            planned = [chosen]
    if planned:
        shown = planned[-1]
        view.show_certainty(shown, console)
        say(console, *filter(None, [_half_rows(series, shown)]))
    draw(arguments.png, console, "what_if_figure", outcomes, setups[0].topology)
    return 0 if planned else 2


def _half_rows(series: Sequence[Series], case: ComparedCase) -> str:
    """Return what rows in fp16 would buy a case; empty: nothing."""
    alike = (case.machine, case.ratio, case.batch)
    of_case = next(each for each in series if (each.setup.machine, each.ratio, each.batch) == alike)
    assert case.plan is not None, "it is shown"
    return half_rows_sentence(of_case.setup, of_case.setup.request(case.num_ranks, case.ratio), case.plan)


def _say_without_caches(series: Sequence[Series], console: Console) -> None:
    """Say for each machine how many ranks would hold all rows, with the first of its batches."""
    said = set[str]()
    for each in series:
        if each.setup.machine not in said:
            fewest = ranks_without_caches(each.setup.request(each.numbers[0], each.ratio))
            if fewest is not None:
                named = UnplannedCase(each, fewest).without_plan.name
                say(console, f"{named}{',' if each.batch is not None else ''} would hold all rows without a cache.")
        said.add(each.setup.machine)


def simulate(setups: Sequence[Setup], ranks: Sequence[int], ratios: Sequence[float | None], console: Console) -> int:
    """Simulate training on these ranks of one machine; return the exit code."""
    setup, arguments = setups[0], setups[0].arguments
    if arguments.explain or len(ratios) > 1:
        raise ConfigError("--simulate takes -o FILE.json and --png, and neither --explain nor several --ratios.")

    def tell(run: SimulatedRun) -> None:
        speed = run.problem or f"{run.step_seconds * 1e3:.2f} ms a step, {run.samples_per_second:,.0f} samples/s"
        groups = f" in {run.groups} groups" if run.groups > 1 else ""
        console.print(f"Simulated {run.num_ranks} ranks{groups}: {speed}", soft_wrap=True)
        console.file.flush()

    def request(case: tuple[int, Setup]) -> tuple[PlanRequest, Topology]:
        return case[1].request(case[0], ratios[0]), case[1].shaped(case[0])

    with console.status("simulating"):
        cases = [(number, each) for number in sorted(set(ranks)) for each in _in_groups(setup, number)]
        runs = simulate_scaling(cases, request, tell)
    topology = setup.shaped(max(ranks))
    show_simulation(runs, topology, console)
    if arguments.output is not None:
        write_simulation(runs, topology, arguments.output)
        say(console, f"Written to {arguments.output}.")
    if all(run.problem for run in runs):
        return 2
    draw(arguments.png, console, "simulation_figure", runs, topology)
    return 0


def _in_groups(setup: Setup, num_ranks: int) -> list[Setup]:
    """Return what is simulated of so many ranks: one group of all, and where groups are set, one for each node."""
    sharding = setup.config.sharding
    if sharding.groups == 1:
        return [setup]
    alone = replace(sharding, groups=1, sync_every=1, sync_delay=0, sync_dtype="fp32", moment_scale=None)
    found = [replace(setup, config=replace(setup.config, sharding=alone))]
    if (nodes := found[0].shaped(num_ranks).num_nodes) > 1:
        in_nodes = replace(sharding, groups=nodes)
        found.append(replace(setup, config=replace(setup.config, sharding=in_nodes)))
    return found
