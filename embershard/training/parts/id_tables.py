"""`IdTables`: what became of the ids of tables that take any, between two reports and in a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

from embershard.cache.ids.id_map import IdCounts
from embershard.run_result import IdTotals
from embershard.sharding.torchrec.ids.id_tables import id_counts
from embershard.training.checkpoint.saved_run import SavedRun, SettingsComparison
from embershard.training.parts.part import Part


class IdTables(Part):
    """Counts what all ranks did with ids, by table."""

    _last: Mapping[str, IdCounts]  # of the last report, or of the beginning

    def after_build(self) -> None:
        self._last = self._counts()

    def read_state(self, saved: SavedRun, comparison: SettingsComparison) -> None:
        self._last = self._counts()

    def report_entries(self) -> dict[str, Any]:
        last, self._last = self._last, self._counts()
        return {"ids": {table: _since(last[table], counts) for table, counts in self._last.items()}}

    def result(self) -> dict[str, Any]:
        """Return what happened since the model was built, or a state was loaded."""
        return {"ids": {table: _since(IdCounts(), counts) for table, counts in self._counts().items()}}

    def _counts(self) -> dict[str, IdCounts]:
        mine = {table: astuple(counts) for table, counts in id_counts(self.run.model).items()}
        by_table: dict[str, list[tuple[int, ...]]] = {}
        for of_rank in self.run.ranks.all_gather_objects(mine):
            for table, counts in of_rank.items():
                by_table.setdefault(table, []).append(counts)
        return {table: IdCounts(*map(sum, zip(*by_table[table], strict=True))) for table in sorted(by_table)}


def _since(last: IdCounts, counts: IdCounts) -> IdTotals:
    evicted = counts.evicted - last.evicted
    return IdTotals(
        live=counts.live,
        admitted=counts.admitted - last.admitted,
        evicted=evicted,
        refused=counts.refused - last.refused,
        evicted_age=(counts.evicted_age - last.evicted_age) / evicted if evicted else None,
    )
