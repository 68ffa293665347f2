"""The program of each rank: `torchrun --nproc_per_node N -m embershard.launch.score.command RUN [-o FILE] [...]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import record

from embershard.data import open_source
from embershard.distributed import Ranks, Supervision, process_group
from embershard.launch.arguments import check_new_output
from embershard.launch.ranks.rank_errors import show_errors_of_rank
from embershard.launch.score.arguments import add_run, checkpoints_of, run_config
from embershard.launch.score.scores_file import ScoresFile
from embershard.launch.screen import make_table, number, plain_console, progress_bar, say, silence_libraries
from embershard.training.config import RunConfig
from embershard.training.quality.quality import quality_values
from embershard.training.trained_run import Scorer, open_trained


@record
def main(argv: Sequence[str] | None = None) -> int:
    """Score as one rank of a group, or alone; return 0."""
    parser = argparse.ArgumentParser(prog="python -m embershard.launch.score.command", description=__doc__)
    add_run(parser)
    parser.add_argument("-o", dest="output", type=Path, metavar="FILE", help="scores; without it, the quality is shown")
    arguments = parser.parse_args(argv)
    silence_libraries()
    supervision = Supervision.of_this_process()
    show_errors_of_rank(supervision)
    config = run_config(arguments)
    with process_group(config.train.device) as ranks:
        score_run(config, checkpoints_of(arguments), ranks, arguments.output, arguments.step, supervision)
    return 0


def score_run(
    config: RunConfig, checkpoints: Path, ranks: Ranks, output: Path | None, step: int | None, supervision: Supervision
) -> None:
    """Score the held-out samples of `config`: into the file `output`, or, without one, show the quality. Collective."""
    console = plain_console(quiet=not ranks.is_first)
    if output is not None:
        ranks.from_first(lambda: check_new_output(output))
    trained = open_trained(config, checkpoints, ranks, step)
    say(console, *(f"Not used: {reason}." for reason in trained.skipped))
    source = open_source(config.data, needs_labels=output is None)
    scorer = Scorer(trained, source, ranks, supervision)
    say(console, f"Scoring {scorer.num_samples:,} samples by {trained.checkpoint}.", *source.notes)
    if scorer.memory_warning:
        say(console, scorer.memory_warning)
    if output is None:
        table = make_table(f"Quality at step {trained.saved.step}", ["what"], ["value"])
        for name, value in quality_values(scorer.quality()).items():
            table.add_row(name, number(value, ",") if name == "samples" else number(value, ".6f"))
        console.print(table)
        return
    _write(scorer, output, console, ranks)


def _write(scorer: Scorer, output: Path, console: Console, ranks: Ranks) -> None:
    file = ScoresFile(output, scorer.target) if ranks.is_first else None
    num_written = 0
    try:
        with progress_bar(console, "samples") as show:
            for predicted in scorer.scores():
                if file is not None:
                    file.add(predicted)
                num_written += len(predicted.labels)
                show(num_written, scorer.num_samples)
        if file is not None:
            file.finish()
    finally:
        if file is not None:
            file.close()
    left_out = scorer.num_samples - num_written
    say(console, f"{num_written:,} scores are in {output}.")
    if left_out:
        say(console, f"{left_out:,} bad rows were left out (data.bad_rows): scores are not numbered as the rows are.")


if __name__ == "__main__":
    sys.exit(main())
