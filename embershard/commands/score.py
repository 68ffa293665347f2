"""`embershard predict` and `embershard eval`: what a trained model says of samples, and how good it is."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from embershard.data.config import DataConfig
from embershard.data.sources.check import check_data
from embershard.errors import ConfigError, DataError, naming_file
from embershard.launch import launcher
from embershard.launch.arguments import (
    add_overrides,
    add_trust,
    check_new_output,
    make_parser,
    positive,
    refuse_starters,
    step_or_last,
    text_override,
)
from embershard.launch.rank import PROGRAM, Job, is_rank, run_rank
from embershard.launch.screen import make_table, plain_console, progress_bar, say
from embershard.settings.files import CHECKPOINTS, RUN_CONFIG, apply_override, load_config
from embershard.training.config import RunConfig
from embershard.units import number

if TYPE_CHECKING:  # they load torch, and --help must answer at once: functions import what they need
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from rich.console import Console

    from embershard.data import Source, Target
    from embershard.distributed import Ranks, Supervision
    from embershard.metrics.evaluation import Evaluation
    from embershard.metrics.predictions import Predicted
    from embershard.training.trained_run import Scorer

_PREDICT_HELP = """Score samples with a trained model, of the best evaluation if the run kept it, to a Parquet file.

A row of the file is a sample, in the order of the samples: logit and score (the probability), both float32, and label
where the data have labels. Columns of the data go along with --keep. See docs/serving.md.

  embershard predict runs/mine --data new.parquet -o scores.parquet
  embershard predict runs/mine --data new.parquet --keep user_id,item_id -o scores.parquet
  embershard predict runs/mine -o held_out.parquet --nproc 2
"""
_EVAL_HELP = """Measure a trained model, of the best evaluation if the run kept it, on the samples that the run holds
out, or on others. What it prints for the former is what training printed at that step.

  embershard eval runs/mine
  embershard eval runs/mine --data new.parquet
  embershard eval runs/mine --set metrics.group=user_id --set 'metrics.slices=["country"]' --format csv
"""
#: Settings that have an effect on scores or on how they are computed. The others belong to the training.
_SETTINGS = ("data.", "cache.", "model.", "metrics.", "train.batch_size", "train.global_batch_size", "train.device")
#: Scores of a row group.
_GROUP_ROWS = 1 << 17


@dataclass(frozen=True)
class ScoreJob(Job):
    """Scoring by a trained model.

    Attributes:
        checkpoints: folder of the run's checkpoints.
        step: of the checkpoint, as for `open_trained`.
        output: file for the scores; None: the quality is shown.
        keep: columns of the data that the file gets, too.
        form: in which the quality is printed, of `reports.results.FORMATS`; None: as tables.
        stdout_is_taken: what is said goes to the standard error: the standard output is for a program.
    """

    checkpoints: Path
    step: int | Literal["last"] | None
    output: Path | None
    keep: tuple[str, ...] = ()
    form: str | None = None
    stdout_is_taken: bool = False

    @staticmethod
    def of(arguments: argparse.Namespace) -> ScoreJob:
        """Read the settings of the run that the arguments name. Raises as `run_config` and `check_kept`."""
        run_dir, output = arguments.run_dir, getattr(arguments, "output", None)
        checkpoints = run_dir / CHECKPOINTS
        config, keep = run_config(arguments), tuple(getattr(arguments, "keep", ()))
        check_kept(config.data, keep)
        form = getattr(arguments, "format", None)
        places = config, run_dir, arguments.trust_code, checkpoints, arguments.step, output
        return ScoreJob(*places, keep, form, stdout_is_taken=form is not None)

    def run(self, ranks: Ranks, supervision: Supervision) -> int:
        """Score the held-out samples: into the file, or, without one, show the quality. Return 0. Collective."""
        console, output = plain_console(quiet=not ranks.is_first, stderr=self.stdout_is_taken), self.output
        with console.status("reading the checkpoint"):
            from embershard.data import open_source
            from embershard.data.sources.source import ColumnSource
            from embershard.training.trained_run import Scorer, open_trained

            if output is not None:
                ranks.from_first(lambda: check_new_output(output))
            trained = open_trained(self.config, self.checkpoints, ranks, self.step)
        say(console, *(f"Not used: {reason}." for reason in trained.skipped))
        source = open_source(self.config.data, needs_labels=output is None, share=ranks.from_first)
        kept = source.held_out_columns(list(self.keep)) if self.keep and isinstance(source, ColumnSource) else None
        scorer = Scorer(trained, source, ranks, supervision)
        say(console, f"Scoring {scorer.num_samples:,} samples by {trained.title}.", *source.notes)
        if scorer.memory_warning:
            say(console, scorer.memory_warning)
        if output is None:
            self._show(scorer.evaluate(), trained.saved.step, console)
        else:
            name = "" if self.stdout_is_taken else str(output)
            _write(ScoresFile(output, scorer.target, kept) if ranks.is_first else None, scorer, console, name)
        say(console, *beyond_tables(source, ranks))
        return 0

    def _show(self, found: Evaluation, step: int, console: Console) -> None:
        from embershard.metrics.figures import slice_tables
        from embershard.reports.results import evaluation_text
        from embershard.reports.run_tables import table_of

        quality = found.quality
        if self.form is not None:
            if not console.quiet:
                print(evaluation_text(step, quality, found.slices, self.form))
            return
        table = make_table(f"Quality at step {step}", ["what"], ["value"])
        for name, value in quality.items():
            table.add_row(name, number(value, ",") if name == "samples" else number(value, ".6f"))
        for each in (table, *map(table_of, slice_tables(found.slices))):
            console.print(each)


def predict(argv: Sequence[str]) -> int:
    """Run `embershard predict`; return the exit code."""
    return _score("predict", argv)


def evaluate(argv: Sequence[str]) -> int:
    """Run `embershard eval`; return the exit code."""
    return _score("eval", argv)


def score_held_out(run_dir: Path, output: Path, keep: Sequence[str] = (), *, trust_code: bool = False) -> None:
    """Score what a run holds out, into a file; say nothing on the standard output.

    Raises:
        ConfigError: it cannot be scored; the reason was printed.
    """
    words = [str(run_dir), "-o", str(output), *(["--keep", ",".join(keep)] if keep else [])]
    arguments = _parser("predict", starts_ranks=True).parse_args([*words, *(["--trust-code"] if trust_code else [])])
    job = dataclasses.replace(ScoreJob.of(arguments), stdout_is_taken=True)
    check_data(job.config.data, kept=job.keep, needs_labels=False)
    if _start(arguments, job):
        raise ConfigError(f"{run_dir} could not be scored; its messages stand above.")


def _score(command: str, argv: Sequence[str]) -> int:
    """Start the ranks, or be one of those that torchrun started."""
    if is_rank():
        return run_rank(lambda: rank_job(command, argv))
    arguments = _parser(command, starts_ranks=True).parse_args(argv)
    if command == "predict":
        check_new_output(arguments.output)
        if arguments.output.suffix in (".csv", ".tsv", ".json", ".jsonl", ".txt"):
            parquet = arguments.output.with_suffix(".parquet")
            raise ConfigError(f"-o {arguments.output}: scores are written as Parquet. Give -o {parquet}")
    job = ScoreJob.of(arguments)
    is_measured = command == "eval"
    columns = job.config.metrics.columns if is_measured else ()
    check_data(job.config.data, columns, job.keep, needs_labels=is_measured)
    return _start(arguments, job)


def _start(arguments: argparse.Namespace, job: ScoreJob) -> int:
    job.config.train.rank_batch_size(arguments.nproc)  # raises before any rank starts
    return launcher.start_ranks(
        arguments.nproc,
        PROGRAM,
        job=job,
        hang_seconds=arguments.hang_seconds or None,
        stacks=arguments.run_dir / "stacks.txt",
    )


def rank_job(command: str, argv: Sequence[str]) -> ScoreJob:
    """Return the job of a rank that torchrun started with these arguments."""
    return ScoreJob.of(_parser(command, starts_ranks=False).parse_args(argv))


def _parser(command: str, *, starts_ranks: bool) -> argparse.ArgumentParser:
    parser = make_parser(command, _PREDICT_HELP if command == "predict" else _EVAL_HELP)
    add_run(parser)
    if starts_ranks:
        text = "number of ranks (default: %(default)s)"
        parser.add_argument("--nproc", type=positive, default=1, metavar="N", help=text)
        launcher.add_hang_seconds(parser)
    else:
        refuse_starters(parser, "--nproc", "--hang-seconds")
    if command == "eval":
        from embershard.reports.results import FORMATS

        parser.add_argument("--format", choices=FORMATS, help="print the figures, those of slices too, in this format")
    else:
        text = "Parquet file for the scores"
        parser.add_argument("-o", dest="output", type=Path, required=True, metavar="FILE", help=text)
        text = "columns of the data that the file gets, too, for instance user_id,item_id"
        parser.add_argument("--keep", type=lambda names: names.split(","), default=[], metavar="NAME,...", help=text)
    return parser


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add `RUN`, `--step`, `--data PATH`, `--trust-code` and `--set KEY=VALUE`, which become the list `overrides`."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--step",
        type=step_or_last,
        metavar="N|last",
        help="use the checkpoint of this step, or the newest valid one (default: that of the best evaluation, where "
        "the run kept it, else the newest)",
    )
    text = "a file or folder, all of it (default: what the run's settings hold out)"
    parser.add_argument("--data", metavar="PATH", help=text)
    add_trust(parser)
    add_overrides(parser, "override a setting of the run's data, cache or batch; may be repeated")


def run_config(arguments: argparse.Namespace, *, needs_samples: bool = True) -> RunConfig:
    """Return the settings of the run, with the data that were asked for as its held-out part.

    Args:
        needs_samples: False: it may hold nothing out.

    Raises:
        ConfigError: there is no run, a setting has no effect here, or nothing is held out.
    """
    file = arguments.run_dir / RUN_CONFIG
    if not file.is_file():
        samples = f" Samples go behind --data: --data {arguments.run_dir}" if arguments.run_dir.is_file() else ""
        raise ConfigError(
            f"{arguments.run_dir} has no {RUN_CONFIG}; give the folder of a run of embershard train.{samples}"
        )
    for override in arguments.overrides:
        apply_override(RunConfig, {}, override)  # raises where there is no such setting
        if not override.startswith(_SETTINGS):
            key = override.partition("=")[0]
            raise ConfigError(f"--set {key} has no effect here: the model is trained. Leave it out.")
    overrides = list(arguments.overrides)
    if arguments.data is not None:
        overrides.append(text_override("data.path", arguments.data))
    none = ("train.eval_every", "train.early_stopping", "train.metric", "checkpoint.keep_best")
    overrides = [*(f"{key}=none" for key in none), *overrides]
    if any(override.startswith("train.batch_size=") for override in overrides):
        overrides.append("train.global_batch_size=none")  # the run has one of the two
    config = load_config(RunConfig, file, overrides, trust_code=arguments.trust_code, run_dir=arguments.run_dir)
    if arguments.data is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval_path=None, eval_fraction=1.0))
    if needs_samples and not config.holds_out:
        raise ConfigError(f"The run holds nothing out ({config.data.why_nothing}). Give the samples: --data PATH.")
    return config


def check_kept(data: DataConfig, names: Sequence[str]) -> None:
    """Raise `ConfigError` where the data have no columns with names, or scores have a column with one of these."""
    if names and not data.has_names:
        raise ConfigError(
            f'{", ".join(names)}: needed data of kind "table" or "parquet", whose columns have names, to stand beside '
            "scores. Leave it out."
        )
    has_weights = data.kind == "table" and data.table.weight not in (None, "weight")
    for name in names:
        if name.partition("/")[0] in ("logit", "score", "label") or (name == "weight" and has_weights):
            raise ConfigError(f"{name}: scores have a column of that name already. Leave it out, or rename it.")


def beyond_tables(source: Source, ranks: Ranks) -> list[str]:
    """Return sentences on the columns some of whose scored ids are beyond their table. Collective."""
    from embershard.data.sources.table.source import TableSource

    counts = Counter[str]()
    for each in ranks.all_gather_objects(source.beyond_tables() if isinstance(source, TableSource) else Counter()):
        counts.update(each)
    return [
        f'{column}: {count:,} ids are beyond its table, and were scored by rows of other ids (mapping "modulo"). If '
        'the run did not train with such ids, their scores mean nothing. The mapping "hash" takes any id.'
        for column, count in counts.items()
    ]


def _write(file: ScoresFile | None, scorer: Scorer, console: Console, name: str) -> None:
    """Write all scores; say where they are, if the file has a `name` for people."""
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
    if name:
        say(console, f"{num_written:,} scores are in {name}.")
    if left_out:
        say(console, f"{left_out:,} bad rows were left out (data.bad_rows): scores are not numbered as the rows are.")


class ScoresFile:
    """Columns `logit` and `score` (the probability), both float32, and `label`, float32, where the first samples have
    labels. With task "regression" there is no `logit`, and `score` is the predicted number; of several labels, names
    are as `score/click`. `weight`, float32, is that of the samples, where they have one. Columns of the data that are
    kept stand before these. The file gets its name when it is complete.

    >>> import torch, pyarrow.parquet
    >>> from embershard.data import Target
    >>> from embershard.metrics.predictions import Predicted
    >>> file = ScoresFile(Path("scores.parquet"), Target())
    >>> file.add(Predicted(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.0])))
    >>> file.finish()
    >>> pyarrow.parquet.read_table("scores.parquet").column_names
    ['logit', 'score', 'label']
    """

    def __init__(self, path: Path, target: Target, kept: Iterator[pa.Table] | None = None) -> None:
        self._path, self._partial = path, path.with_name(path.name + ".partial")
        self._target, self._kept = target, kept
        self._kept_rest: list[pa.Table] = []
        self._waiting: list[Predicted] = []
        self._num_waiting = 0
        self._writer: pq.ParquetWriter | None = None

    def add(self, predicted: Predicted) -> None:
        """Add what the model says of the next samples; a label NaN is none."""
        self._waiting.append(predicted)
        self._num_waiting += len(predicted.labels)
        if self._num_waiting >= _GROUP_ROWS:
            self._write()

    def finish(self) -> None:
        """Write the rest, and give the file its name."""
        if self._waiting:
            self._write()
        with naming_file(self._path):
            if self._writer is not None:
                self._writer.close()
            self._partial.rename(self._path)

    def close(self) -> None:
        """Remove an unfinished file; of a finished one, nothing."""
        if self._writer is not None:
            self._writer.close()
        self._partial.unlink(missing_ok=True)

    def _write(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = self._columns()
        if self._writer is not None:
            columns = {name: values for name, values in columns.items() if name in self._writer.schema.names}
        else:
            known = {name for name in columns if name.startswith(("label", "weight"))}
            is_empty = {name for name in known if columns[name].isnan().all()}
            columns = {name: values for name, values in columns.items() if name not in is_empty}
        arrays = {name: pa.array(values.numpy(), pa.float32()) for name, values in columns.items()}
        table = pa.table({**self._take_kept(self._num_waiting), **arrays})
        with naming_file(self._partial):
            if self._writer is None:
                self._writer = pq.ParquetWriter(self._partial, table.schema, write_page_checksum=True)
            self._writer.write_table(table)
        self._waiting, self._num_waiting = [], 0

    def _take_kept(self, count: int) -> dict[str, pa.ChunkedArray]:
        """Return the next `count` samples' columns that are kept, by name."""
        import pyarrow as pa

        if self._kept is None:
            return {}
        while sum(len(table) for table in self._kept_rest) < count:
            self._kept_rest.append(next(self._kept))
        try:
            rest = pa.concat_tables(self._kept_rest, promote_options="permissive")
            if self._writer is not None:
                rest = rest.cast(pa.schema([self._writer.schema.field(name) for name in rest.column_names]))
        except pa.ArrowException as error:
            raise DataError(
                f"--keep: {error}: the files differ in the types of these columns; leave them out"
            ) from None
        self._kept_rest = [rest.slice(count)]
        return dict(zip(rest.column_names, rest.slice(0, count).columns, strict=True))

    def _columns(self) -> dict[str, torch.Tensor]:
        import torch

        names = self._target.labels
        found: dict[str, torch.Tensor] = {}
        outputs = torch.cat([each.outputs for each in self._waiting]).reshape(-1, len(names))
        labels = torch.cat([each.labels for each in self._waiting]).reshape(-1, len(names))
        for name, task, output, label in zip(names, self._target.tasks, outputs.T, labels.T, strict=True):
            of = "" if len(names) == 1 else f"/{name}"
            if task == "binary":
                found[f"logit{of}"] = output
            found[f"score{of}"] = torch.sigmoid(output) if task == "binary" else output
            found[f"label{of}"] = label
        weights = [each.weights for each in self._waiting if each.weights is not None]
        return {**found, "weight": torch.cat(weights)} if weights else found
