"""Simulated scaling on the screen and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from embershard.errors import naming_file
from embershard.launch.screen import make_table, say
from embershard.planning.cost.topology import Topology
from embershard.planning.simulate_scaling import MOST_SEARCHED_RANKS, SimulatedRun

_MOST_PARTS = 4


def show_simulation(runs: Sequence[SimulatedRun], topology: Topology, console: Console) -> None:
    """Print one line per number of ranks, and the reservations."""
    table = make_table(
        "Simulated training (estimate)",
        (),
        ("ranks", "batch", "samples/s", "efficiency", "step ms", "limited by", "where a step's time goes"),
    )
    for run in runs:
        table.add_row(*_row(run, runs))
    console.print(table)
    say(console, *(f"{run.num_ranks} ranks: {run.problem}" for run in runs if run.problem), *_notes(runs, topology))


def write_simulation(runs: Sequence[SimulatedRun], topology: Topology, path: Path) -> None:
    """Write the simulated runs as JSON."""
    values = {
        "what": "embershard plan --simulate: an estimate",
        "topology": topology.name,
        "source": topology.source,
        "runs": [{**dataclasses.asdict(run), "efficiency": run.efficiency(runs)} for run in runs],
    }
    with naming_file(path):
        path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _row(run: SimulatedRun, runs: Sequence[SimulatedRun]) -> list[str]:
    share = run.efficiency(runs)
    if share is None or run.parts is None:
        return [str(run.num_ranks), f"{run.global_batch_size:,}", "does not fit"]
    largest = sorted(run.parts.items(), key=lambda part: -part[1])[:_MOST_PARTS]
    return [
        str(run.num_ranks),
        f"{run.global_batch_size:,}",
        f"{run.samples_per_second:,.0f}",
        f"{share:.0%}",
        f"{run.step_seconds * 1e3:.2f}",
        run.limit,
        ", ".join(f"{name} {seconds / run.step_seconds:.0%}" for name, seconds in largest),
    ]


def _notes(runs: Sequence[SimulatedRun], topology: Topology) -> list[str]:
    notes = [topology.note(runs[-1].num_ranks)]
    if any(not run.is_searched for run in runs):
        notes.append(
            f"Beyond {MOST_SEARCHED_RANKS} ranks placements are not searched: the best of four plain ones is simulated."
        )
    notes.append("Hit rates are from the profile's counts, in the long run. docs/planning.md has the errors.")
    return [f"Note: {note}" for note in notes if note is not None]
