"""`embershard data validate`: one pass over all rows of a data set: which are samples, and what their columns hold."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from embershard.commands.profile.run import run_config
from embershard.data import Schema, open_source
from embershard.data.block import BadRow, ParsedChunk
from embershard.data.hashing import MISSING_ID
from embershard.data.sources.source import FileSource
from embershard.errors import ConfigError, DataError
from embershard.launch.screen import make_table, plain_console, progress_bar, say, wide_console


@dataclass
class ColumnScan:
    """What one column holds, as the model gets it: transformed numbers, or rows of its table.

    Attributes:
        count: values.
        zeros: zeros among them; of ids the missing ones, whose row is 0 where ids are rows.
        most: values of a sample at most; more than 1 in bags only.
    """

    count: int = 0
    zeros: int = 0
    least: float = np.inf
    largest: float = -np.inf
    most: int = 0

    def add(self, values: NDArray[np.generic], most: int) -> None:
        """Add the values of a chunk, of which a sample has at most `most`."""
        self.count += len(values)
        self.most = max(self.most, most)
        if len(values):
            self.zeros += int(np.count_nonzero(values == 0))
            self.least = min(self.least, float(values.min()))
            self.largest = max(self.largest, float(values.max()))


@dataclass
class DataScan:
    """What the pass found.

    Attributes:
        num_train, num_held_out: rows of both parts, bad ones included.
        bad_train: bad rows of the training part.
        reasons: rows by column and problem, without their values.
        first: the first bad row of each reason.
        damage: chunks that cannot be read, or of which no row is good.
        columns: by name; the labels' first.
    """

    num_train: int = 0
    num_held_out: int = 0
    bad_train: int = 0
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    first: dict[tuple[str, str], BadRow] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    columns: dict[str, ColumnScan] = field(default_factory=dict)

    @property
    def num_bad(self) -> int:
        return self.reasons.total()

    def add(self, parsed: ParsedChunk, is_held_out: NDArray[np.bool_], schema: Schema) -> None:
        """Add a chunk, with whether each of its rows is held out."""
        num_held_out = int(is_held_out.sum())
        train_rows = len(is_held_out) - num_held_out
        self.num_train += train_rows
        self.num_held_out += num_held_out
        bad_train = [bad for row, bad in parsed.bad.items() if not is_held_out[row]]
        self.bad_train += len(bad_train)
        for bad in parsed.bad.values():
            reason = bad.column, bad.problem.rpartition(": ")[2] if bad.column else "the whole row"
            self.reasons[reason] += 1
            self.first.setdefault(reason, bad)
        if train_rows and len(bad_train) == train_rows:
            self.damage.append(f"{bad_train[0]}; and none of the {train_rows:,} rows to train on near it is good")
        samples = parsed.samples
        labels = samples.labels.reshape(samples.num_samples, len(schema.target.labels))
        names = (*schema.target.labels, *schema.dense, *schema.keys)
        takes_ids = [feature.takes_ids for feature in schema.sparse]
        pairs = zip(samples.values, takes_ids, strict=True)
        ids = [np.where(values == MISSING_ID, 0, values) if takes else values for values, takes in pairs]
        for name, values in zip(names, (*labels.T, *samples.dense.T, *ids), strict=True):
            self.columns.setdefault(name, ColumnScan()).add(values[~np.isnan(values)], 1)  # without missing labels
        for name, lengths in zip(schema.keys, samples.lengths, strict=True):
            column = self.columns[name]
            column.most = max(column.most, int(np.max(lengths, initial=0)))


def scan_data(
    source: FileSource, num_threads: int, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> DataScan:
    """Parse all chunks in threads; `on_progress` gets the number of chunks done and of all."""
    found = DataScan()
    numbers = iter(range(source.num_physical))
    ahead: deque[tuple[int, Future[ParsedChunk]]] = deque()
    with ThreadPoolExecutor(num_threads, "embershard-data") as pool:
        for done in range(source.num_physical):
            while len(ahead) < 2 * num_threads and (number := next(numbers, None)) is not None:
                ahead.append((number, pool.submit(source.parse, number)))
            number, future = ahead.popleft()
            try:
                found.add(future.result(), source.is_held_out(number), source.schema)
            except DataError as error:
                found.damage.append(str(error))
            on_progress(done + 1, source.num_physical)
    return found


def verdict(found: DataScan, allowed: str | float) -> tuple[bool, str]:
    """Return whether `embershard train` would go on to its end, and a sentence that says so."""
    if found.damage:
        return False, f"train would stop: {found.damage[0]}."
    if not found.num_bad:
        return True, "train would read every row."
    others = found.num_bad - found.bad_train
    share, held_out = found.bad_train / max(found.num_train, 1), others / max(found.num_held_out, 1)
    if isinstance(allowed, str):
        first = min(found.first.values(), key=lambda bad: (str(bad.path), bad.row))
        enough = np.ceil(max(share, held_out) * 1e4 + 1) / 1e4
        return False, f"train would stop at {first}. To go on without such rows: --set data.bad_rows={enough:g}"
    for part, of_part in (("training", share), ("held-out", held_out)):
        if of_part > allowed:
            said = f"{of_part:.3%} of the {part} rows are bad, data.bad_rows allows {allowed:.3%}"
            return False, f"train would stop: {said}."
    return True, (
        f"train would go on: {found.bad_train:,} rows would be replaced ({share:.3%} of the training rows; "
        f"data.bad_rows allows {allowed:.3%}), and {others:,} held-out rows left out."
    )


def validate(arguments: argparse.Namespace) -> int:
    """Run `embershard data validate`; return the exit code.

    Raises:
        ConfigError: there is nothing to validate.
    """
    if arguments.data is None and arguments.config is None:
        raise ConfigError("what is to be validated? Give DATA (a file or a folder), or --config.")
    given = arguments.data, arguments.config, arguments.overrides
    config = run_config(*given, trust_code=True).data  # no model is built
    source, began = open_source(config), time.monotonic()
    if not isinstance(source, FileSource):
        raise ConfigError(f'data.kind = "{config.kind}" reads no file: there is nothing to validate.')
    console = plain_console()
    with progress_bar(console, "chunks") as on_progress:
        found = scan_data(source, arguments.workers or len(os.sched_getaffinity(0)), on_progress)
    seconds, num_rows = time.monotonic() - began, found.num_train + found.num_held_out
    say(
        console,
        f"{num_rows:,} rows in {seconds:.1f} s: {found.num_train:,} to train on, {found.num_held_out:,} held out; "
        f"{found.num_bad:,} bad.",
        *source.notes,
    )
    _show(found)
    say(console, *(f"damaged: {each}" for each in found.damage[:10]))
    goes_on, sentence = verdict(found, config.bad_rows)
    say(console, sentence)
    return 0 if goes_on else 1


def _show(found: DataScan) -> None:
    columns = make_table("columns, as the model gets them", ["column"], ["values", "zeros", "least", "largest", "most"])
    for name, column in found.columns.items():
        zeros = f"{column.zeros / column.count:.2%}" if column.count else "n/a"
        columns.add_row(
            name, f"{column.count:,}", zeros, f"{column.least:g}", f"{column.largest:g}", f"{column.most:,}"
        )
    if found.columns:
        wide_console().print(columns)
    if found.num_bad:
        reasons = make_table("bad rows", ["column", "needed", "first"], ["rows"])
        for (name, reason), rows in found.reasons.most_common(20):
            reasons.add_row(name, reason, str(found.first[name, reason]), f"{rows:,}")
        wide_console().print(reasons)
