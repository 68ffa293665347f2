"""`BadRowCount`: the bad rows that all ranks met, and the end of a run that met too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Literal

from embershard.data import BatchStream
from embershard.data.block import BadRow, BadRowTally
from embershard.data.sources.source import Split
from embershard.distributed import Ranks
from embershard.errors import DataError
from embershard.training.quality.reports import BadRowsReport

_NAMES: dict[Split, str] = {"train": "training", "eval": "held-out"}


class BadRowCount:
    """Counts bad rows over all ranks, since the process started; those to train on and held-out ones by themselves.

    Args:
        allowed: `DataConfig.bad_rows`. It is a share of an epoch, or of what was read where that is more: a few bad
            rows at the start of the data do not stop a run.

    Attributes:
        num_bad: bad rows that were read; a row counts each time.
    """

    def __init__(self, allowed: Literal["stop"] | float, ranks: Ranks) -> None:
        self._allowed, self._ranks = allowed, ranks
        self.num_bad = 0
        self._new: list[tuple[Split, int, BadRowTally]] = []
        self._bad: Counter[Split] = Counter()
        self._read: Counter[Split] = Counter()
        self._of_epoch: Counter[Split] = Counter()

    @property
    def are_tolerated(self) -> bool:
        """True if a bad row does not stop the run by itself."""
        return self._allowed != "stop"

    def add(self, stream: BatchStream, split: Split) -> None:
        """Take the counts of what `stream` gave since it was last added."""
        self._new.append((split, stream.num_samples, stream.bad_rows.take()))

    def count(self, stream: BatchStream, step: int) -> Iterator[BadRowsReport]:
        """Add the training stream, yield the report if there is one, and `check`. Collective."""
        self.add(stream, "train")
        if (report := self.report(step)) is not None:
            yield report
        self.check()

    def report(self, step: int) -> BadRowsReport | None:
        """Return the bad rows that all ranks added since the last report, if there are any. Collective."""
        new, self._new = self._new, []
        if not self.are_tolerated:
            return None
        rows: list[BadRow] = []
        for split, epoch_samples, tally in chain.from_iterable(self._ranks.all_gather_objects(new)):
            self._of_epoch[split] = epoch_samples
            self._read[split] += tally.num_samples
            self._bad[split] += tally.num_bad
            rows += tally.rows
        before, self.num_bad = self.num_bad, self._bad.total()
        return BadRowsReport(step, self.num_bad, tuple(rows)) if self.num_bad > before else None

    def check(self) -> None:
        """Raise `DataError`, on all ranks, if there were more bad rows than `data.bad_rows` allows."""
        for split, num_bad in self._bad.items():
            of = max(self._of_epoch[split], self._read[split])
            if not isinstance(self._allowed, str) and num_bad > self._allowed * of:
                error = DataError(
                    f"{num_bad:,} bad rows in {of:,} samples ({num_bad / of:.2%}) of the {_NAMES[split]} data; "
                    f"data.bad_rows = {self._allowed:g} allows {self._allowed:.2%}. They are listed in the run's "
                    "bad_rows.jsonl; `embershard data validate` counts all"
                )
                error.is_shown_elsewhere = not self._ranks.is_first
                raise error
