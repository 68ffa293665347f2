"""`BadRowCount`: the bad rows that all ranks met, and the end of a run that met too many."""

from __future__ import annotations

from typing import Literal

from embershard.data import BatchStream
from embershard.data.bad_rows import BadRowTally
from embershard.distributed import Ranks
from embershard.errors import DataError
from embershard.training.reports import BadRowsReport


class BadRowCount:
    """Counts bad rows over all ranks, since the process started.

    Args:
        allowed: `DataConfig.bad_rows`.
        epoch_samples: training samples of an epoch. Until as many are read, `allowed` is a share of them: a few bad
            rows at the start of the data do not stop a run.

    Attributes:
        num_bad: bad rows that were read; a row counts each time.
    """

    def __init__(self, allowed: Literal["stop"] | float, epoch_samples: int, ranks: Ranks) -> None:
        self._allowed, self._epoch_samples, self._ranks = allowed, epoch_samples, ranks
        self.num_bad = self._num_samples = 0
        self._new: list[BadRowTally] = []

    @property
    def are_tolerated(self) -> bool:
        """True if a bad row does not stop the run by itself."""
        return self._allowed != "stop"

    def add(self, stream: BatchStream) -> None:
        """Take the counts of what `stream` gave since it was last added."""
        self._new.append(stream.bad_rows.take())

    def report(self, step: int) -> BadRowsReport | None:
        """Return the bad rows that all ranks added since the last report, if there are any. Collective."""
        new_tallies, self._new = self._new, []
        if not self.are_tolerated:
            return None
        tallies = [tally for of_rank in self._ranks.all_gather_objects(new_tallies) for tally in of_rank]
        self._num_samples += sum(tally.num_samples for tally in tallies)
        new = sum(tally.num_bad for tally in tallies)
        self.num_bad += new
        return BadRowsReport(step, self.num_bad, tuple(row for tally in tallies for row in tally.rows)) if new else None

    def check(self) -> None:
        """Raise `DataError`, on all ranks, if there were more bad rows than `data.bad_rows` allows."""
        if isinstance(self._allowed, str):
            return
        of = max(self._epoch_samples, self._num_samples)
        if self.num_bad > self._allowed * of:
            error = DataError(
                f"{self.num_bad:,} bad rows in {of:,} samples ({self.num_bad / of:.2%}); data.bad_rows = "
                f"{self._allowed:g} allows {self._allowed:.2%}. They are listed in the run's bad_rows.jsonl; "
                "`embershard data validate` counts all"
            )
            error.is_shown_elsewhere = not self._ranks.is_first
            raise error
