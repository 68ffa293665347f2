"""What each rank runs: ``torchrun --nproc_per_node N -m embershard.launch.train.command --config FILE [...]``."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import shutil
import sys
import warnings
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import record

from embershard.distributed import Ranks, complete_checkpoints, process_group
from embershard.errors import EmbershardError
from embershard.launch.config import load_config
from embershard.launch.record import RunRecord, check_run_dir, lock_run_dir, make_result
from embershard.launch.train.progress import ProgressDisplay, closing_table
from embershard.sharding.plan import Plan
from embershard.training.cache_report import look_ahead_totals
from embershard.training.config import RunConfig
from embershard.training.reports import EvalReport, Report, TrainReport
from embershard.training.trainer import Trainer

CHECKPOINTS = "checkpoints"
_NEXT = {
    True: "the same run with all rows on the device (same losses; compare speed and memory)",
    False: "the same run with a cache (same losses; compare speed and memory)",
}


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `embershard train` and this module have in common."""
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the run's settings, a TOML file")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting, for instance train.batch_size=512; may be repeated",
    )
    parser.add_argument(
        "--plan",
        dest="overrides",
        action="append",
        type=_plan_override,
        default=[],
        metavar="FILE",
        help="obey a plan of embershard plan; the same as --set sharding.plan=FILE",
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder for the run's files (default: runs/NAME-TIME)"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --run-dir")


def _plan_override(path: str) -> str:
    return f"sharding.plan={json.dumps(path)}"


def default_run_dir(config: Path) -> Path:
    """``runs/<name of the config>-<time>``."""
    return Path("runs") / f"{config.stem}-{datetime.now():%Y%m%d-%H%M%S}"


def _command(arguments: argparse.Namespace) -> str:
    """The ``embershard train`` command of this run, without its choice of the cache."""
    overrides = [text for text in arguments.overrides if not text.startswith("cache.enabled")]
    words = ["train", "--config", str(arguments.config)]
    words += [word for text in overrides for word in ("--set", text)]
    return f"{_program('embershard', 'embershard.launch.cli')} {shlex.join(words)}"


def _program(name: str, module: str) -> str:
    """How the reader can start a program: by its name, or where that is not found, with this Python."""
    return name if shutil.which(name) else f"{os.path.relpath(sys.executable)} -m {module}"


@record
def main(argv: Sequence[str] | None = None) -> None:
    """Trains as one rank of a group that torchrun started, or alone."""
    parser = argparse.ArgumentParser(prog="python -m embershard.launch.train.command", description=__doc__)
    add_run_arguments(parser)
    arguments = parser.parse_args(argv)
    _quiet()
    sys.excepthook = _short_errors
    config = load_config(RunConfig, arguments.config, arguments.overrides)
    with process_group(config.train.device) as ranks:
        run_dir = ranks.from_first(lambda: arguments.run_dir or default_run_dir(arguments.config))
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        train_run(config, ranks, run_dir, resume=arguments.resume or restarted, same_run=_command(arguments))


def train_run(config: RunConfig, ranks: Ranks, run_dir: Path, *, resume: bool, same_run: str) -> dict[str, Any]:
    """One whole run on this rank; the first one shows and records it. Returns what result.json says.

    `same_run` is the command that started it, for the hint at the end.
    """
    ranks.from_first(lambda: check_run_dir(run_dir, resume=resume))
    ranks.from_first(lambda: lock_run_dir(run_dir))
    console = Console(quiet=not ranks.is_first)
    trainer = Trainer(config, ranks, run_dir / CHECKPOINTS)
    resumed_at = _resume(trainer, run_dir, console) if resume else None
    if resumed_at is not None and trainer.steps >= trainer.total_steps:
        trainer.close()
        console.print(f"{run_dir} is finished: step {trainer.steps} was its last. Nothing was changed.", soft_wrap=True)
        return {}
    _announce(trainer, console, run_dir)
    last_train, last_eval = None, None
    with _Outputs(trainer, config, run_dir, resumed_at, console) as outputs:
        for report in trainer.train():
            outputs.add(report)
            last_train = report if isinstance(report, TrainReport) else last_train
            last_eval = report if isinstance(report, EvalReport) else last_eval
        trainer.close()
        result = make_result(
            config=config,
            steps=trainer.steps,
            samples=trainer.samples,
            step_seconds=list(trainer.step_seconds),
            world_size=ranks.world_size,
            device=str(ranks.device.type),
            loss=last_train.loss if last_train else None,
            evaluation=last_eval,
            cache=trainer.cache_reader.totals(None if trainer.plan else config.cache.slot_ratio),
            look_ahead=look_ahead_totals(trainer.upcoming.stats(), ranks),
            plan=trainer.plan,
        )
        outputs.finish(result, same_run)
    return result


class _Outputs:
    """Screen and files of the first rank; on the other ranks nothing."""

    def __init__(
        self, trainer: Trainer, config: RunConfig, run_dir: Path, resumed_at: int | None, console: Console
    ) -> None:
        self._what = f"{config.model.arch} on {config.data.kind} data"
        self._console = console
        self._record = self._display = None
        if trainer.ranks.is_first:
            self._record = RunRecord(run_dir, config, resumed_at, trainer.plan)
            self._display = ProgressDisplay(console, trainer.total_steps, trainer.steps)

    def add(self, report: Report) -> None:
        if self._record is not None and self._display is not None:
            self._record.add(report)
            self._display.show(report)

    def finish(self, result: dict[str, Any], same_run: str) -> None:
        if self._record is None or self._display is None:
            return
        self._display.close()
        path, cached = self._record.finish(result), result["cache"] is not None
        self._console.print(closing_table(result, self._what))
        folder = path.parent
        for line in (
            f"Everything is in {folder}: result.json, metrics.jsonl, config.toml, checkpoints/.",
            f"See the curves:    {_program('tensorboard', 'tensorboard.main')} --logdir {folder}",
            f"Next, {_NEXT[cached]}:    {same_run} --set cache.enabled={str(not cached).lower()}",
        ):
            self._console.print(line, soft_wrap=True, highlight=False)

    def __enter__(self) -> _Outputs:
        return self

    def __exit__(self, *_: object) -> None:
        if self._record is not None and self._display is not None:
            self._display.close()
            self._record.close()


def _resume(trainer: Trainer, run_dir: Path, console: Console) -> int:
    found = trainer.ranks.from_first(lambda: complete_checkpoints(run_dir / CHECKPOINTS))
    if not found:
        console.print(f"No complete checkpoint in {run_dir / CHECKPOINTS}; starting from the beginning.")
        return 0
    trainer.resume(found[-1])
    console.print(f"Continuing from {found[-1]} at step {trainer.steps}.", soft_wrap=True, highlight=False)
    return trainer.steps


def _announce(trainer: Trainer, console: Console, run_dir: Path) -> None:
    config, ranks = trainer.config, trainer.ranks
    rows = sum(feature.num_rows for feature in trainer.source.schema.sparse)
    kind = "GPU" if ranks.device.type == "cuda" else "CPU"
    console.print(
        f"{config.model.arch}: {len(trainer.source.schema.sparse)} tables with {rows:,} rows of dim "
        f"{config.model.embedding_dim}; {ranks.world_size} ranks on {kind}; {trainer.total_steps:,} steps of "
        f"{config.train.batch_size * ranks.world_size:,} samples; run folder {run_dir}",
        soft_wrap=True,
        highlight=False,
    )
    for note in [] if trainer.plan is None else _plan_notes(trainer.plan, config, ranks.device.type):
        console.print(note, soft_wrap=True, highlight=False)


def _plan_notes(plan: Plan, config: RunConfig, device: str) -> list[str]:
    """What the reader should know of the plan that this run obeys."""
    notes = [f"Tables and caches are placed by {config.sharding.plan} ({plan.digest})."]
    size = [name for name in ("ratio", "device_bytes") if getattr(config.cache, name) is not None]
    if size and config.cache.enabled:
        notes.append(f"cache.{size[0]} was for planning: the plan's slots apply.")
    if not config.cache.enabled:
        notes.append("Without a cache: the tables that it caches are whole on the device, at the same places.")
    elif plan.prediction is None:
        notes.append("The plan has no prediction to compare this run with.")
    else:
        notes += plan.other_settings({**config.predicted_from, "train.device": device})
    return notes


def _quiet() -> None:
    """Drops what TorchRec and FBGEMM say on every start and no user can act on; errors still show."""
    warnings.filterwarnings("ignore", module=r"(torchrec|fbgemm_gpu|torch)(\.|$)")
    for name in ("torchrec", "fbgemm_gpu", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _short_errors(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Our own errors say what to do, and where they were raised helps nobody; others keep their traceback."""
    if isinstance(error, EmbershardError):  # torch puts the rank in front
        print(f"{kind.__name__}: {error}", file=sys.stderr)
    elif not isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    main()
