"""Which parts a run has, and in which order they act."""

from __future__ import annotations

from dataclasses import replace

from embershard.distributed import PublishConfig
from embershard.lazy_names import named
from embershard.training.config import RunConfig
from embershard.training.parts.bad_rows import BadRows
from embershard.training.parts.counts import StepMetrics
from embershard.training.parts.evaluations import Evaluations
from embershard.training.parts.loss_monitor import Losses
from embershard.training.parts.part import Part, Training
from embershard.training.parts.saves import Saves
from embershard.training.warm_start import WarmStart


def parts_of(
    run: Training,
    losses: Losses,
    metrics: StepMetrics,
    saves: Saves,
    evaluations: Evaluations,
    start: WarmStart | None = None,
) -> list[Part]:
    """Return the parts of a run; those that not every run has are imported where its settings ask for them.

    * a warm start, and then groups' averages, before all that counts on the rows and the steps that they set;
    * losses before saves: no checkpoint has what a loss that is not finite trained;
    * the average before all that uses it;
    * publications before what may take long;
    * files before windows, and windows before the batch that trains their samples;
    * saves before evaluations, in which a rank may die; but behind them where evaluations judge: the checkpoint of a
      step then has what its evaluation shows;
    * bad rows behind evaluations, which meet some. They come first in `finish`, in which the last save may be refused.
    """
    config = run.config
    parts: list[Part] = []
    if start is not None or config.model.pretrained:
        parts.append(named("embershard.extras.warm_start.part:WarmStarted")(run, start))
    if config.sharding.groups > 1:
        parts.append(named("embershard.extras.groups.part:RowAverages")(run))
    parts += [losses, metrics]
    if config.train.ema is not None:
        from embershard.training.parts.average import AveragedWeights

        parts.append(AveragedWeights(run))
    if config.data.has_ids:
        from embershard.training.parts.id_tables import IdTables

        parts.append(IdTables(run))
    if config.publish.folder is not None:
        parts.append(named("embershard.extras.publications.part:Publishing")(run))
    if config.data.follow:
        parts.append(named("embershard.extras.following.part:FollowedFolder")(run))
    if config.data.deal == "cost":
        parts.append(named("embershard.extras.deal.part:Dealt")(run))
    if config.data.is_in_time_order:
        from embershard.training.parts.windows import EvaluatedWindows

        parts.append(EvaluatedWindows(run, evaluations))
    parts += [evaluations, saves] if config.judges else [saves, evaluations]
    if config.data.bad_rows != "stop":
        parts.append(BadRows(run))
    if config.sharding.hot_bytes is not None:
        parts.append(named("embershard.extras.hot_cold.part:HotCold")(run))
    return parts


def without_parts(config: RunConfig) -> RunConfig:
    """Return the settings of the same training on the data that are there by now, of which nobody is told."""
    return replace(config, data=config.data.unfollowed(), publish=PublishConfig())
