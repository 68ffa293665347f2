"""`embershard data inspect`: looks at the columns of files, and writes the settings of a run on them."""

from __future__ import annotations

import argparse
from collections import Counter
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embershard.data.config import TableFeature
from embershard.decoding import toml, toml_key
from embershard.errors import ConfigError, DataError
from embershard.launch.arguments import check_new_output, help_parts
from embershard.launch.data.form import add_form, columns_of_files
from embershard.launch.screen import make_table, plain_console, say, wide_console

if TYPE_CHECKING:
    from embershard.data.sources.table.survey import ColumnSurvey
    from embershard.data.sources.table.whole_columns import WholeColumns
    from embershard.launch.data.suggest import LabelSuggestion, Suggestion

INSPECT_HELP = """Look at the columns of CSV, TSV or Parquet files, and write a run's settings for them.

  embershard data inspect clicks.parquet -o run.toml
  embershard train --config run.toml
  embershard data inspect ratings.txt --columns user,item,rating,time --label rating
"""
_BATCHES_IN_FLIGHT = 3  # look_ahead.prefetch batches, and the one that trains
_LEAST_RATIO = 0.05  # the default of cache.ratio
_LEAST_BATCH, _MOST_BATCH, _STEPS_OF_AN_EPOCH = 16, 1024, 64


def add_inspect(actions: Any) -> None:
    """Add the action to `embershard data`."""
    action = actions.add_parser(
        "inspect",
        help="look at the columns of files, and write a run's settings for them",
        **help_parts(INSPECT_HELP),
    )
    action.add_argument("data", type=Path, metavar="FILE_OR_FOLDER", help="CSV, TSV or Parquet")
    action.add_argument("-o", dest="output", type=Path, metavar="FILE", help="TOML file for the settings")
    action.add_argument(
        "--label", action=_OneLabel, metavar="NAME", help="column to predict (default: the one that looks like it)"
    )
    add_form(action)
    action.set_defaults(run=inspect)


class _OneLabel(argparse.Action):
    """Stores the label, and refuses a second one, which would become a feature."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        before = getattr(namespace, self.dest)
        if before is not None:
            parser.error(
                f"got --label {before} and --label {values}; give one. For several, write label = "
                f'["{before}", "{values}"] in the TOML file, and leave {values} out of its features'
            )
        setattr(namespace, self.dest, values)


def inspect(arguments: argparse.Namespace) -> int:
    """Run the action; return 0.

    Raises:
        DataError: a file cannot be read, or files have other columns than the first.
        ConfigError: no column looks like a label, and a file is to be written.
    """
    from embershard.launch.data.suggest import suggest_features, suggest_label

    output: Path | None = arguments.output
    if output is not None:
        check_new_output(output)
    files = columns_of_files(arguments.data, arguments)
    columns, num_bad = survey_files(files)
    label = None
    if output is not None or arguments.label is not None:
        label = suggest_label(columns, arguments.label)
    suggested: list[Suggestion] = []
    taken = set() if label is None else {label.column}
    for name, column in columns.items():
        if label is None or name != label.column:
            suggested.append(suggest_features(column, taken))
            taken.update(suggested[-1].features)
    _show(columns, num_bad)
    if output is not None and label is not None:
        num_rows = next(iter(columns.values())).rows
        if not any(each["kind"] == "sparse" for suggestion in suggested for each in suggestion.features.values()):
            raise ConfigError(f"{arguments.data}: no column is a category, and a model needs one: text, or ids.")
        output.write_text(_settings(arguments.data, files[0], label, suggested, num_rows), encoding="utf-8")
        say(plain_console(), f"Settings are in {output}. Check the label, then: embershard train --config {output}")
    return 0


def survey_files(files: list[WholeColumns]) -> tuple[dict[str, ColumnSurvey], int]:
    """Return what the columns of all files hold, and the number of lines that are no rows.

    Raises:
        DataError: a file cannot be read, or has other columns than the first; or no file has a row.
    """
    from embershard.data.sources.table.survey import survey

    schema = files[0].schema()
    for file in files:
        if (other := file.schema()) != schema:
            raise DataError(
                f"{file.file.path} has the columns {', '.join(map(str, other))[:300]}; needed those of "
                f"{files[0].file.path}: {', '.join(map(str, schema))[:300]}"
            )
    bad: Counter[str] = Counter()

    def skip(row: Any) -> str:
        bad["lines"] += 1
        return "skip"

    batches = (batch for file in files for batch in file.batches(on_bad=skip))
    columns = survey(schema, batches)
    if not next(iter(columns.values())).rows:
        behind = "" if files[0].form.columns else " behind its header"
        raise DataError(f"{files[0].file.path}: no row{behind}; needed at least one")
    return columns, bad["lines"]


def _show(columns: dict[str, ColumnSurvey], num_bad: int) -> None:
    from embershard.data.sources.table.raw import is_text, is_time
    from embershard.data.sources.table.survey import SECONDS_PER_DAY
    from embershard.launch.data.suggest import day_of, distinct_values

    first = next(iter(columns.values()))
    table = make_table(
        f"{first.rows:,} rows", ["column", "type"], ["distinct", "missing", "most", "least", "largest", "mean", "std"]
    )
    for name, column in columns.items():
        numbers = column.numbers
        shown = ["", "", "", ""]
        if numbers.count and not is_text(column.inner):
            shown = [f"{each:g}" for each in (numbers.least, numbers.largest, numbers.mean, numbers.std)]
        if numbers.count and is_time(column.inner):
            shown = [day_of(each) for each in (numbers.least, numbers.largest, numbers.mean)]
            shown.append(f"{numbers.std / SECONDS_PER_DAY:.1f} days")
        table.add_row(name, column.title, distinct_values(column), f"{column.missing:,}", f"{column.most:,}", *shown)
    wide_console().print(table)
    if num_bad:
        say(plain_console(), f"{num_bad:,} lines have not as many cells as there are columns (data.bad_rows).")


def _settings(
    data: Path, form: WholeColumns, label: LabelSuggestion, suggested: list[Suggestion], num_rows: int
) -> str:
    """Return the TOML file."""
    lines = [
        f"# Written by embershard data inspect: {num_rows:,} rows. Check the label and the features. Then:",
        "#   embershard train --config FILE",
        "",
        "[data]",
        'kind = "table"',
        f"path = {toml(str(data.absolute()))}",
        "eval_fraction = 0.1    # the last tenth of every file is held out",
        "",
        "[data.table]",
        f"label = {toml(label.column)}    # {label.why}",
    ]
    if label.at_least is not None:
        threshold = f"label_at_least = {label.at_least:g}    # labels are 1 from here on, else 0"
        if label.mean is None:
            lines.append(threshold)
        else:
            lines.append(f"label_mean = {label.mean:g}")
            lines.append(
                'task = "regression"    # predicts the number. To predict clicks, in place of these two lines:'
            )
            lines.append(f"# {threshold}")
    if form.is_text:
        lines.append(f"separator = {toml(form.form.separator)}")
        given = {"columns": form.form.columns, "null_values": form.form.null_values, "quoted": form.form.quoted}
        defaults = {"columns": (), "null_values": ("",), "quoted": True}
        lines += [f"{name} = {toml(value)}" for name, value in given.items() if value != defaults[name]]
    lines += ["", "[data.table.features]"]
    for suggestion in suggested:
        lines.append(f"# {' '.join(suggestion.column.split())}: {suggestion.why}")  # a name may have several lines
        lines += [f"{toml_key(name)} = {toml(settings)}" for name, settings in suggestion.features.items()]
    return "\n".join([*lines, *_of_the_model(suggested, num_rows)])


def _of_the_model(suggested: list[Suggestion], num_rows: int) -> list[str]:
    """Return the lines of the sections of model, cache and training."""
    batch = _LEAST_BATCH
    while batch < _MOST_BATCH and 2 * batch * _STEPS_OF_AN_EPOCH <= num_rows:
        batch *= 2
    features = [settings for each in suggested for settings in each.features.values()]
    table_rows = sum(TableFeature(**settings).table_rows for settings in features)
    in_flight = _BATCHES_IN_FLIGHT * batch * sum(each.lookups for each in suggested)
    ratio = min(1.0, max(_LEAST_RATIO, ceil(100 * in_flight / table_rows) / 100))
    return [
        "",
        "[model]",
        "embedding_dim = 16",
        "",
        "[cache]",
        f"ratio = {ratio:g}    # of {table_rows:,} rows, on the device; batches in flight need up to {in_flight:,}",
        "",
        "[embedding_optimizer]",
        'kind = "rowwise_adagrad"',
        "lr = 0.02",
        "",
        "[dense_optimizer]",
        'kind = "adam"',
        "lr = 0.001",
        "",
        "[train]",
        f"batch_size = {batch}    # per rank",
        "epochs = 1",
        "",
    ]
