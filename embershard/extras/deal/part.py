"""`Dealt`: the samples of each global batch, dealt to ranks by what they cost (`data.deal = "cost"`)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm

from embershard.data.schema import Schema
from embershard.data.sources.source import GrowingSource
from embershard.errors import ConfigError
from embershard.extras.deal.reader import Dealing, DealtReader, Loads, SampleCost
from embershard.frequency import FrequencyProfile
from embershard.training.checkpoint.identity import global_batch
from embershard.training.checkpoint.saved_run import SavedRun, SettingsComparison
from embershard.training.config import RunConfig
from embershard.training.parts.part import Part

_LEAVE = "--set data.deal=order"
#: Times its slices' parsing that a rank may do without a word.
_TOLD_ABOVE = 1.1


class Dealt(Part):
    """Each rank trains equally many samples of a global batch, so that all have about equally much to do. Evaluations
    are not dealt."""

    def check(self) -> None:
        """Find out how ranks share their slices.

        Raises:
            ConfigError: nothing says what a sample costs, or samples cannot be dealt to these ranks.
        """
        run, config = self.run, self.run.config
        if config.sharding.mode == "hot_cold":
            raise ConfigError(
                'data.deal: got "cost" in the mode "hot_cold", whose batches are packed by hot rows; needed "order" '
                f"or the mode sharded: {_LEAVE}, or --set sharding.mode=sharded --set sharding.hot_bytes=none."
            )
        world, together = run.ranks.world_size, config.data.deal_ranks
        together = world if together is None else together
        if together < 1 or world % together:
            divisors = [count for count in range(2, world + 1) if not world % count]
            raise ConfigError(
                f"data.deal_ranks: got {together}, needed a divisor of the {world} ranks"
                f"{f': {divisors}' if divisors else ', 1'}. Or leave it out: all ranks share their slices then."
            )
        cost = cost_of(config, run.source.schema)
        self._dealing = Dealing(cost, run.ranks.rank % together, together, config.train.accumulate)

    def before_build(self, profile: FrequencyProfile | None) -> None:
        self._begin()

    def after_build(self) -> None:
        """Refuse layers for which it matters which samples a rank has together.

        Raises:
            ConfigError: the model has such a layer.
        """
        refused: tuple[type, ...] = (BatchNorm1d, BatchNorm2d, BatchNorm3d)
        if self._dealing.pieces > 1:
            refused += (SyncBatchNorm,)  # else it sees all of the global batch
        for name, layer in self.run.model.named_modules():
            if isinstance(layer, refused):
                raise ConfigError(
                    f'data.deal: got "cost" with a model that has {type(layer).__name__} ({name}): it normalizes by '
                    "the samples that a rank has together, and these would be chosen by their cost. Use LayerNorm, or "
                    f"leave samples in their order: {_LEAVE}."
                )

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


def cost_of(config: RunConfig, schema: Schema) -> SampleCost:
    """Return what a sample of a run costs: as the settings say, else by the events of the model's history.

    Raises:
        ConfigError: neither says it, or the settings name no feature.
    """
    model, given = config.model, config.data.deal_cost
    if given is not None:
        feature, a, b = given
        if feature not in schema.keys or min(a, b) < 0 or max(a, b) < 1:
            raise ConfigError(
                f"data.deal_cost: got {[*given]}, needed a sparse feature ({', '.join(schema.keys)}) and two integers "
                "of 0 or more, a and b: a sample with T ids of it costs a T + b T^2."
            )
        return SampleCost(feature, a, b)
    if not model.history:
        raise ConfigError(
            f'data.deal: got "cost" with the model {model.title!r}, of which nothing says what a sample costs. Name a '
            "feature whose ids it grows with, T of them cost a T + b T^2: data.deal_cost = "
            f'["{schema.keys[0]}", 1, 0], say. Or leave samples in their order: {_LEAVE}.'
        )
    a, b = (1, 0) if model.section is None else model.section.token_costs(len(model.history), model.embedding_dim)
    beside = len(schema.sparse) - len(model.event_features) + (schema.num_dense > 0)
    return SampleCost(model.history[0], a, b, more=beside + 1)
