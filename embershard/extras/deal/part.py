"""`Dealt`: the samples of each global batch, dealt to ranks by what they cost (`data.deal = "cost"`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from embershard.data.sources.source import GrowingSource
from embershard.extras.deal.reader import Dealing, DealtReader, Loads
from embershard.extras.deal.refused import check_layers, check_settings
from embershard.frequency import FrequencyProfile
from embershard.training.checkpoint.identity import global_batch
from embershard.training.checkpoint.saved_run import SavedRun, SettingsComparison
from embershard.training.parts.part import Part

#: Times its slices' parsing that a rank may do without a word.
_TOLD_ABOVE = 1.1


class Dealt(Part):
    """Each rank trains equally many samples of a global batch, so that all have about equally much to do. Evaluations
    are not dealt."""

    def check(self) -> None:
        """Find out how ranks share their slices. Raises as `check_settings`."""
        run, config = self.run, self.run.config
        cost = check_settings(config, run.source.schema, run.ranks.world_size)
        together = config.data.deal_ranks or run.ranks.world_size
        self._dealing = Dealing(cost, run.ranks.rank % together, together, config.train.accumulate)

    def before_build(self, profile: FrequencyProfile | None) -> None:
        self._begin()

    def after_build(self) -> None:
        """Raise as `check_layers`."""
        check_layers(self.run.config, self.run.model.module)

    def read_state(self, saved: SavedRun, comparison: SettingsComparison) -> None:
        self._begin()

    def _begin(self) -> None:
        self._loads: dict[tuple[int, int], Loads] = {}
        self._sums = torch.zeros(3, dtype=torch.float64)
        self.stream_options = {"reader": partial(DealtReader, dealing=self._dealing, loads=self._loads)}

    def notes(self) -> list[str]:
        return [*self._sentences()]

    def _sentences(self) -> Iterator[str]:
        run, how = self.run, self._dealing
        groups = "" if how.ranks == run.ranks.world_size else f", in groups of {how.ranks} ranks"
        yield f"Samples are dealt to ranks by cost, {how.cost}{groups}; evaluations are not dealt."
        if run.config.model.build is not None:
            yield (
                "A rank's batch has other samples together than without dealing: a loss that compares samples of a "
                "batch (in-batch negatives) is another one then."
            )
        if isinstance(run.source, GrowingSource):
            return
        whole, table = global_batch(run.config, run.ranks.world_size), run.source.chunks("train")
        rows, own = table.num_samples / len(table.rows), whole // run.ranks.world_size
        # Chunks are parsed whole: a slice reaches into one more, and those of a later batch need them again if they are
        # longer than a batch.
        parsed, as_slices = (min(whole, rows + size - 1) for size in (own * how.ranks, own))
        if parsed > _TOLD_ABOVE * as_slices:
            yield (
                f"Dealing reads more: each rank parses about {parsed:,.0f} samples a step, {parsed / as_slices:.1f} "
                f"times as many as for its slices, since a chunk of the data has about {rows:,.0f} of the {whole:,} "
                f"samples of a step. With chunks of {whole:,} samples (data.chunk_rows; of Parquet files, their row "
                "groups) it reads nothing more; with groups of fewer ranks (data.deal_ranks), less."
            )

    def report_entries(self) -> dict[str, Any]:
        new = self._take()
        self._sums += new
        return {"deal": _ratios(new)}

    def result(self) -> dict[str, Any]:
        self._sums += self._take()
        return {"deal": _ratios(self._sums)}

    def _take(self) -> Tensor:
        """Return the sums of `Loads` over the steps that were trained since the last call, float64 [3]: of the slowest
        of all ranks, and the mean rank's. Collective."""
        position = self.run.position.epoch, self.run.position.global_sample
        trained = sorted(step for step in list(self._loads) if step <= position)
        if not trained:
            return torch.zeros(3, dtype=torch.float64)
        mine = [self._loads.pop(step) for step in trained]
        of_ranks = self.run.ranks.all_gather(torch.tensor(mine, dtype=torch.float64, device=self.run.ranks.device))
        return torch.cat([of_ranks[..., :2].amax(dim=0), of_ranks[..., 2:].mean(dim=0)], dim=1).sum(dim=0).cpu()


def _ratios(sums: Tensor) -> dict[str, float]:
    dealt, undealt, mean = sums.tolist()
    return {"dealt": dealt / mean, "undealt": undealt / mean} if mean else {}
