"""`BadRows`: counts rows that are no samples, and ends a run that has too many."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from embershard.data import BatchStream
from embershard.data.block import BadRow, BadRowTally
from embershard.data.sources.source import Split
from embershard.errors import DataError
from embershard.training.parts.part import Part, Training
from embershard.training.reports import BadRowsReport

_MOST_KNOWN = 100_000
_NAMES: dict[Split, str] = {"train": "training", "eval": "held-out"}


class BadRows(Part):
    """Counts bad rows that are tolerated (`data.bad_rows`), over all ranks, since the process started; those to train
    on and held-out ones by themselves. Too many end the run: their share is of an epoch, or of what was read where that
    is more, so a few bad rows at the start of the data do not stop it.

    Attributes:
        num_bad: bad rows that were met. A row counts once, in whatever many epochs; each time beyond the first
            100,000, and where very many are met between two reports.
    """

    def __init__(self, run: Training) -> None:
        super().__init__(run)
        self.num_bad = 0
        self._new: list[tuple[Split, int, BadRowTally]] = []
        self._known: set[tuple[Path, int]] = set()
        self._bad: Counter[Split] = Counter()
        self._read: Counter[Split] = Counter()
        self._of_epoch: Counter[Split] = Counter()

    def after_step(self) -> Iterable[BadRowsReport]:
        return self._count() if self.run.is_report_due else ()

    def finish(self) -> Iterable[BadRowsReport]:
        """Count those of the last evaluation, too."""
        return self._count()

    def result(self) -> dict[str, Any]:
        return {"bad_rows": self.num_bad}

    def add(self, stream: BatchStream, split: Split) -> None:
        """Note what a stream has met since the last call."""
        self._new.append((split, stream.num_samples, stream.bad_rows.take()))

    def _count(self) -> Iterator[BadRowsReport]:
        """Yield a report of the bad rows that all ranks met since the last one, if there are any. Collective.

        Raises:
            DataError: on all ranks, if there were more than `data.bad_rows` allows.
        """
        self.add(self.run.stream, "train")
        new, self._new = self._new, []
        rows: list[BadRow] = []
        num_new = 0
        for split, epoch_samples, tally in chain.from_iterable(self.run.ranks.all_gather_objects(new)):
            self._of_epoch[split] = epoch_samples
            self._read[split] += tally.num_samples
            self._bad[split] += tally.num_bad
            fresh = self._not_known(tally.rows)
            num_new += tally.num_bad - len(tally.rows) + len(fresh)
            rows += fresh
        if num_new:
            self.num_bad += num_new
            yield BadRowsReport(self.run.steps, self.num_bad, tuple(rows))
        with self.run.input_failure.noting():
            self._check()

    def _not_known(self, rows: Sequence[BadRow]) -> list[BadRow]:
        """Return those of the rows that were not met before, and know them from now on."""
        fresh = {(row.path, row.row): row for row in rows if (row.path, row.row) not in self._known}
        self._known.update(islice(fresh, max(0, _MOST_KNOWN - len(self._known))))
        return list(fresh.values())

    def _check(self) -> None:
        allowed = self.run.config.data.bad_rows
        for split, num_bad in self._bad.items():
            of = max(self._of_epoch[split], self._read[split])
            if not isinstance(allowed, str) and num_bad > allowed * of:
                error = DataError(
                    f"{num_bad:,} bad rows in {of:,} samples ({num_bad / of:.2%}) of the {_NAMES[split]} data; "
                    f"data.bad_rows = {allowed:g} allows {allowed:.2%}. They are listed in the run's "
                    "bad_rows.jsonl; `embershard data validate` counts all. Correct them, or go on from the newest "
                    f"checkpoint: --resume --set data.bad_rows={math.ceil(1e4 * num_bad / of) / 1e4:g}"
                )
                error.is_shown_elsewhere = not self.run.ranks.is_first
                raise error
