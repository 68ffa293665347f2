"""`embershard data inspect`: looks at files, judges their columns, and writes the settings of a run on them."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, floor, log10
from pathlib import Path

import numpy as np

from embershard.commands.data.columns import columns_of_files, survey_files
from embershard.data.block import BadRow
from embershard.data.config import DATA_FILES, TableConfig, TableFeature
from embershard.data.sources.folder import Listing
from embershard.data.sources.table.counts import SECONDS_PER_DAY
from embershard.data.sources.table.raw import is_text, is_time
from embershard.data.sources.table.survey import ColumnSurvey
from embershard.data.sources.table.text_forms import describe
from embershard.data.sources.table.whole_columns import common_schema
from embershard.data.text_form import TextForm
from embershard.errors import ConfigError, DataError, SetupError
from embershard.extras.judging.choices import choices, label_choice
from embershard.extras.judging.kinds import Judgement, judge
from embershard.extras.judging.results import results_of
from embershard.extras.judging.suggest import (
    LabelSuggestion,
    Suggestion,
    day_of,
    distinct_values,
    facts_of,
    may_be_category,
    near_miss,
    num_bad_labels,
    others_of,
    suggest_features,
    suggest_label,
)
from embershard.launch.arguments import check_new_output
from embershard.launch.screen import make_table, plain_console, say, wide_console
from embershard.lazy_names import named
from embershard.settings.decoding import toml, toml_key

_HELD_OUT, _MOST_BAD, _SHOWN = 0.1, 0.99, 3
_BATCHES_IN_FLIGHT = 3  # look_ahead.prefetch batches, and the one that trains
_LEAST_RATIO = 0.05  # the default of cache.ratio
_LEAST_BATCH, _STEPS_OF_AN_EPOCH = 16, 64
#: Rows, and the largest batch that so many train with.
_BATCHES = ((1_000_000, 256), (20_000_000, 1024), (None, 4096))
#: Up to so many rows, what is learned depends on the batch: it is that of all ranks together.
_MOST_OF_ONE_BATCH = _BATCHES[0][0]
_FEW_ROWS, _EPOCHS = 5_000_000, 40  # below, several epochs train
#: Of fewer, in the order of users, a batch has few users.
_MIXED = "chunk_rows = 100000    # are mixed with each other: files may be in the order of users"
#: With few rows.
_DEEPFM = (
    'arch = "deepfm"    # few rows: better than "dlrm" there; docs/models.md',
    "over_arch_layer_sizes = [256, 128, 1]    # narrower ones lost where numbers say much",
)
_AVERAGED = "ema = 0.99    # of the layers' weights: the mean of the last steps is better than the last one"
_LIKELIEST = 3
_IN_ORDER = 0.99  # of the steps from a time to the next one go forward
_MOST_OF_LATEST = 0.3  # of the rows, that have the latest time: more would be too many to hold out


def inspect(arguments: argparse.Namespace) -> int:
    """Run the action; return 0.

    Raises:
        DataError: a file cannot be read, or files have other columns than the first, or too many rows are bad.
        ConfigError: a column is not what an option says; or no column looks like a label, or like a category, and a
            file is to be written.
    """
    output: Path | None = arguments.output
    if output is not None:
        check_new_output(output)
    found = Inspected.of(arguments, needs_label=output is not None)
    found.show()
    found.check_bad_rows(arguments.bad_rows)
    if output is not None:
        output.write_text(found.settings(), encoding="utf-8")
        say(plain_console(), f"Settings are in {output}. Check the label, then: embershard train --config {output}")
    return 0


@dataclass(frozen=True)
class Inspected:
    """Files, and what was found of them.

    Attributes:
        data: the file or folder.
        form: of text files, and of JSON lines that are not UTF-8; None for others.
        columns: what each column holds.
        label: None where none was found, and none was needed.
        suggested: how to use each of the others.
        bad: lines that are no rows.
        num_files: at `data`.
        patterns: of the names of its files, where the user says which.
        is_parquet: of which a row group is mixed, and `data.chunk_rows` has no effect.
    """

    data: Path
    form: TableConfig | None
    columns: Mapping[str, ColumnSurvey]
    label: LabelSuggestion | None
    suggested: Sequence[Suggestion]
    bad: Sequence[BadRow]
    num_files: int
    is_parquet: bool
    patterns: tuple[str, ...]

    @staticmethod
    def of(arguments: argparse.Namespace, *, needs_label: bool) -> Inspected:
        """Look at the files that the arguments name.

        Raises:
            DataError: a file cannot be read, or files have other columns than the first.
            ConfigError: a column is not what an option says; or a label is needed, and no column looks like one.
        """
        files = columns_of_files(arguments.data, arguments)
        names = common_schema(files).names
        chosen, wanted = choices(arguments, names), label_choice(arguments.label, names)
        if wanted is not None and wanted.column in chosen:
            raise ConfigError(
                f"--label {wanted.column}: it is named by --{chosen[wanted.column].kind}, too; name it once."
            )
        if unknown := [name for name in arguments.feature if name not in names]:
            raise ConfigError(f"--feature: got {unknown[0]!r}; there are {', '.join(names)}.")
        for_survey = {name: each.for_survey for name, each in chosen.items() if each.for_survey[0]}
        files, columns, bad = survey_files(files, for_survey)
        try:
            label = suggest_label({name: each for name, each in columns.items() if name not in chosen}, wanted)
        except ConfigError:
            if needs_label or wanted is not None:
                raise
            label = None
        others = {name: each for name, each in columns.items() if label is None or name != label.column}
        results = {} if label is None else results_of(others, columns[label.column], label)
        facts = [
            facts_of(each, is_known=name in arguments.feature, result=results.get(name, ""))
            for name, each in others.items()
        ]
        suggested: list[Suggestion] = []
        taken = set() if label is None else {label.column}
        for each, judgement in zip(others.values(), judge(facts), strict=True):
            suggested.append(suggest_features(each, judgement, taken, chosen.get(each.name)))
            taken.update(suggested[-1].features)
        form = files[0].form if files[0].is_text or not files[0].form.is_utf8 else None
        of_files = len(files), files[0].kind == "parquet", tuple(arguments.files)
        return Inspected(arguments.data, form, columns, label, suggested, bad, *of_files)

    def check_bad_rows(self, allowed: float) -> None:
        """Raise `DataError` where more than the share `allowed` of the rows are bad: what was found is not what the
        files have."""
        num_rows = self.num_rows + len(self.bad)
        if self.num_bad <= allowed * num_rows:
            return
        said = [f"{len(self.bad):,} lines are no rows: {'; '.join(map(str, self.bad[:_SHOWN]))}"] if self.bad else []
        for each in self.used:
            if count := self._num_bad_of(each):
                why = others_of(self.columns[each.column]) or f"{count:,} cells are of another type, or too long"
                said.append(f"{each.column}: {why}")
        if self.label is not None and (count := num_bad_labels(self.columns[self.label.column])):
            said.append(f"{count:,} rows have no label in {self.label.column!r}")
        enough = ceil(1e3 * self.num_bad / num_rows) / 1e3
        raise DataError(
            f"{self.data}: {self.num_bad:,} of {num_rows:,} rows are bad, more than {allowed:g} of them. "
            f"{'. '.join(each.rstrip('.') for each in said)}. Say how they are to be read (--help), or leave them out: "
            f"--bad-rows {min(enough, _MOST_BAD):g}"
        )

    @property
    def num_bad(self) -> int:
        """Rows that training would refuse, at most: a row may be bad by several columns."""
        label = 0 if self.label is None else num_bad_labels(self.columns[self.label.column])
        return len(self.bad) + sum(map(self._num_bad_of, self.used)) + label

    def _num_bad_of(self, suggestion: Suggestion) -> int:
        """Return how many rows a column makes bad; of lists their values count, and not the whole cells."""
        column = self.columns[suggestion.column]
        separators = {str(each["separator"]) for each in suggestion.features.values() if "separator" in each}
        if separators:
            return sum(column.parts[each].too_long for each in separators)
        return column.num_bad

    @property
    def num_rows(self) -> int:
        return next(iter(self.columns.values())).rows

    @property
    def used(self) -> list[Suggestion]:
        return [each for each in self.suggested if each.is_used]

    def show(self) -> None:
        """Show what each column holds and is for, and what is not sure."""
        uses = {each.column: each.use for each in self.suggested}
        table = make_table(
            f"{self.num_rows:,} rows",
            ["column", "type", "use"],
            ["distinct", "missing", "most", "least", "largest", "mean", "std"],
        )
        for name, column in self.columns.items():
            numbers = column.numbers
            shown = ["", "", "", ""]
            if numbers.count and not is_text(column.inner):
                shown = [f"{each:g}" for each in (numbers.least, numbers.largest, numbers.mean, numbers.std)]
            if numbers.count and is_time(column.inner):
                shown = [day_of(each) for each in (numbers.least, numbers.largest, numbers.mean)]
                shown.append(f"{numbers.std / SECONDS_PER_DAY:.1f} days")
            counts = [distinct_values(column), f"{column.missing:,}", f"{column.most:,}"]
            table.add_row(name, column.title, uses.get(name, "label"), *counts, *shown)
        wide_console().print(table)
        say(plain_console(), *self.remarks())

    def show_uses(self) -> None:
        """Show in short what each column is taken for."""
        table = make_table(f"{self.data.name}: {self.num_rows:,} rows", ["column", "use", "since"], [])
        assert self.label is not None
        table.add_row(self.label.column, "label", self.label.why)
        for each in self.suggested:
            table.add_row(each.column, each.use, each.judgement.why)
        wide_console().print(table)
        say(plain_console(), *self.remarks())

    def remarks(self) -> list[str]:
        """Return sentences on what is odd, what is a guess, and what was left out."""
        form = "" if self.form is None else describe(self.form)
        said = [f"{self.data}: {form}."] if form else []
        if self.data.is_dir():
            said += Listing.of(self.data, self.patterns or DATA_FILES, "table").sentences()
        said += [f"{name}: {others}" for name, column in self.columns.items() if (others := others_of(column))]
        for each in self.suggested:
            if miss := near_miss(self.columns[each.column], each.judgement):
                said.append(f"{each.column}: {miss}")
            elif each.judgement.sure == "guess" and each.features:
                said.append(f"{each.column}: {each.judgement.kind} (a guess): {each.judgement.why}. {_else(each)}")
        if self.bad:
            said.append(f"{len(self.bad):,} lines are no rows (data.bad_rows). The first is {self.bad[0]}.")
        if left_out := [each.column for each in self.suggested if each.judgement.kind == "leak" and each.features]:
            said.append(
                f"{', '.join(left_out)}: left out, since columns of results are not known before the label. To use "
                f"one that is: --feature {shlex.quote(left_out[0])}"
            )
        return said

    def settings(self) -> str:
        """Return the settings of a run, as TOML.

        Raises:
            ConfigError: no column is a category.
        """
        assert self.label is not None
        self._check()
        label, columns, used, num_bad = self.label, self.columns, self.used, self.num_bad
        read = [columns[each.column] for each in used]
        defaults = TableConfig()
        form = defaults if self.form is None else self.form
        null_values = [*form.null_values]
        for column in (columns[label.column], *read):
            null_values += [word for word in column.null_cells if word not in null_values]
        lines = [
            f"# Written by embershard data inspect: {self.num_rows:,} rows. Check the label and the features. Then:",
            "#   embershard train --config FILE",
            "",
            "[data]",
            'kind = "table"',
            f"path = {toml(str(self.data.absolute()))}",
            f"eval_fraction = {_HELD_OUT:g}    # of the samples is held out, to find the best epoch and to measure",
            *self._split(),
            *([] if self.is_parquet or self.num_rows > _MOST_OF_ONE_BATCH else [_MIXED]),
            *([] if not num_bad else [_bad_rows(num_bad, self.num_rows)]),
            "",
            "[data.table]",
            f"label = {toml(label.column)}    # {label.why}",
            *_tasks(label),
        ]
        for each in (*used, *([self._of_label()] if columns[label.column].written in (".", ",") else [])):
            lines += [f"{key}.{toml_key(each.column)} = {toml(value)}" for key, value in each.written.items()]
        if self.patterns:
            lines.append(f"files = {toml(list(self.patterns))}    # of the folder")
        if self.form is not None:
            lines.append(f"separator = {toml(form.separator)}")
            of_text = replace(form, null_values=tuple(null_values))
            keys = [each.name for each in fields(TextForm) if each.name != "separator"]
            given = {key: getattr(of_text, key) for key in keys}
            lines += [f"{key} = {toml(value)}" for key, value in given.items() if value != getattr(defaults, key)]
        lines += ["", "[data.table.features]"]
        for each in self.suggested:
            lines.append(f"# {' '.join(each.column.split())}: {each.why}")  # a name may have several lines
            sign = "" if each.is_used else "# "
            lines += [f"{sign}{toml_key(name)} = {toml(settings)}" for name, settings in each.features.items()]
        return "\n".join([*lines, *model_lines(used, self.num_rows)])

    def _split(self) -> list[str]:
        """Return which tenth is held out: the latest rows where files are in the order of a time, as those of folders
        `day=2026-01-31` are; else any."""
        for each in self.used:
            times = self.columns[each.column].numbers.sample
            if each.judgement.kind == "time" and len(times) > 1 and (np.diff(times) >= 0).mean() >= _IN_ORDER:
                why = f"rows are in the order of {each.column}: the latest ones"
                if self.num_files == 1:
                    return [f'split = "tail"    # {why}']
                if (times == times.max()).mean() > _MOST_OF_LATEST:
                    continue
                return [f'split = "time"    # {why} of all files', f"split_time = {toml(each.column)}"]
        return ['split = "random"    # no column says that rows are in the order of time']

    def _of_label(self) -> Suggestion:
        assert self.label is not None
        column = self.columns[self.label.column]
        return Suggestion(column.name, {}, "", 0, Judgement("number", "sure", ""), {"decimal": column.written})

    def _check(self) -> None:
        """Raise `ConfigError` where training would find no category."""
        if any(each["kind"] == "sparse" for suggestion in self.used for each in suggestion.features.values()):
            return
        fitting = [each for each in self.suggested if may_be_category(self.columns[each.column])]
        ranked = sorted(fitting, key=_likeness, reverse=True)[:_LIKELIEST]
        likeliest = [each.column for each in ranked if _likeness(each) > 0]
        hint = f" Likeliest: --category {shlex.quote(','.join(likeliest))}" if likeliest else ""
        raise ConfigError(f"{self.data}: no column is a category, and a model needs one: text, or ids.{hint}")


def _likeness(suggestion: Suggestion) -> float:
    """Return how much a column that is no category is like one, above 0; or 0 for none."""
    judgement = suggestion.judgement
    if judgement.kind == "constant" or (judgement.kind == "drop" and judgement.sure == "sure"):
        return 0.0
    return 100.0 if judgement.kind == "drop" else np.exp(judgement.score or -10.0)


def _else(suggestion: Suggestion) -> str:
    """Return the option that makes another kind of a column."""
    judgement, column = suggestion.judgement, suggestion.column
    if judgement.other_format:
        return f"Else: --time {shlex.quote(f'{column}:{judgement.other_format}')}"
    other = "number" if judgement.kind == "category" else "category"
    return f"Else: --{other} {shlex.quote(column)}"


def _tasks(label: LabelSuggestion) -> list[str]:
    """Return the lines that say what is predicted of a label, and in comments what else could be."""
    if label.text is not None:
        return [f"label_is = {toml(label.text)}    # labels are 1 where the cell is this text, else 0"]
    if label.at_least is None:
        return []
    lines = [f"label_at_least = {label.at_least:g}    # labels are 1 from here on, else 0"]
    if label.mean is not None:
        said = "# predicts the number. To predict clicks, in place of these two lines:"
        lines = [f"label_mean = {label.mean:g}", f'task = "regression"    {said}', f"# {lines[0]}"]
    if label.classes:
        classes = f"# classes.{toml_key(label.column)} = {toml(list(label.classes))}"
        others = "label_at_least" if label.mean is None else "label_mean and task"
        lines += [f"# A probability for each number, in place of {others}:", '# task = "multiclass"', classes]
    return lines


def _bad_rows(num_bad: int, num_rows: int) -> str:
    """Return the setting that allows these bad rows, even if all of them are among those held out."""
    share = min(num_bad / (_HELD_OUT * max(num_rows, 1)), _MOST_BAD)
    digits = -floor(log10(share))
    allowed = min(ceil(share * 10**digits - 1e-9) / 10**digits, _MOST_BAD)
    return f"bad_rows = {allowed:g}    # up to {num_bad:,} of the rows are bad; all may be among those held out"


def model_lines(suggested: Sequence[Suggestion], num_rows: int) -> list[str]:
    """Return the lines of TOML that describe a model of these features, and its training on so many rows."""
    most = next(batch for rows, batch in _BATCHES if rows is None or num_rows <= rows)
    batch = _LEAST_BATCH
    while batch < most and 2 * batch * _STEPS_OF_AN_EPOCH <= num_rows:
        batch *= 2
    features = [settings for each in suggested for settings in each.features.values()]
    table_rows = sum(TableFeature(**settings).table_rows for settings in features)
    in_flight = _BATCHES_IN_FLIGHT * batch * sum(each.lookups for each in suggested)
    ratio = min(1.0, max(_LEAST_RATIO, ceil(100 * in_flight / table_rows) / 100))
    is_small = num_rows < _FEW_ROWS
    epochs = [
        f"epochs = {_EPOCHS}    # at most: few samples want several; the best epoch is kept",
        "early_stopping = 3    # ends the run after three epochs that were no better",
        _AVERAGED,
    ]
    if not is_small:
        every = max(1, round(0.1 * (1 - _HELD_OUT) * num_rows / batch))
        epochs = [
            "epochs = 1    # many samples need no second one",
            f"eval_every = {every}    # steps of one rank: a tenth",
        ]
    return [
        "",
        "[model]",
        *(_DEEPFM if is_small and _has_networks() else ()),
        "init_range = 0.01    # of the rows at first: larger ones are noise where values are rare",
        "embedding_dim = 16    # of rare and of frequent values; 8 lost where users and items are all there is",
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
        _batch_line(batch, num_rows),
        *epochs,
        "",
    ]


def _has_networks() -> bool:
    """Return whether this installation has DeepFM: else what is suggested would not train."""
    try:
        named("embershard.extras.networks:__name__")
    except SetupError:
        return False
    return True


def _batch_line(batch: int, num_rows: int) -> str:
    if num_rows > _MOST_OF_ONE_BATCH:
        return f"batch_size = {batch}    # per rank"
    return f"global_batch_size = {batch}    # of all ranks: small where samples are few, each step learns alike much"
