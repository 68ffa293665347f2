"""A run from its first step to its scores, on a CPU or on the modelled GPU: what it says and leaves behind."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from embershard.data import open_source
from embershard.distributed import Ranks, Supervision
from embershard.distributed.publish.published import published, read_files, read_publication
from embershard.sharding.torchrec.inspection import cached_embeddings
from embershard.training.config import RunConfig
from embershard.training.reports import TrainReport
from embershard.training.trained_run import Scorer, open_trained
from embershard.training.trainer import Trainer
from tests.ranks.parity import snapshot


@dataclass
class Life:
    """`losses`: of the batches and labels; `rows`: weights and states in the end, rows that were published, and scores,
    by name."""

    losses: list[float]
    rows: dict[str, Tensor]

    def different(self, other: Life) -> list[str]:
        """Names of what differs, by more than sums in another order do: on a CPU FBGEMM is told of small tables."""
        mine, others = ({"losses": torch.tensor(life.losses), **life.rows} for life in (self, other))
        common = sorted(mine.keys() & others.keys())
        return sorted(mine.keys() ^ others.keys()) + [name for name in common if not _same(mine[name], others[name])]


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return torch.equal(one, other)
    rtol = 1e-2 if one.dtype == torch.float16 else 1e-4
    return torch.allclose(one.double(), other.double(), rtol=rtol, atol=rtol / 10, equal_nan=True)


def live(config: RunConfig, ranks: Ranks, folder: Path, goes_on: bool) -> Life:
    """Train, publish, evaluate and save; if it `goes_on`, resume from the checkpoint, and score by it. Of two ranks
    only the first one is there, so their checkpoints would not be whole: they train and evaluate, and tell which rows
    were touched."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _alone(config, ranks, folder, goes_on) if ranks.world_size == 1 else _first_of_two(config, ranks)


def _alone(config: RunConfig, ranks: Ranks, folder: Path, goes_on: bool) -> Life:
    checkpoints = folder / "checkpoints"
    life = _train(Trainer(config, ranks, checkpoints, export=_export))
    for _, path in published(folder / "published", "delta"):
        for file, tensors in read_files(path, read_publication(path)).items():
            life.rows.update({f"{path.name}/{file}/{name}": tensor for name, tensor in tensors.items()})
    if not goes_on:
        return life
    longer = replace(config, train=replace(config.train, max_steps=(config.train.max_steps or 0) + 1))
    trainer = Trainer(longer, ranks, checkpoints, export=_export)
    trainer.resume(checkpoints / f"step_{config.train.max_steps}")
    resumed = _train(trainer)
    trained = open_trained(config, checkpoints, ranks, config.train.max_steps)
    scorer = Scorer(trained, open_source(config.data), ranks, Supervision())
    life.rows["scores"] = torch.cat([each.columns() for each in scorer.scores()])
    life.rows.update({f"resumed/{name}": tensor for name, tensor in resumed.rows.items()})
    return replace(life, losses=[*life.losses, *resumed.losses])


def _first_of_two(config: RunConfig, ranks: Ranks) -> Life:
    trainer = Trainer(config, ranks)
    pools = list(cached_embeddings(trainer.model))
    for pool in pools:
        pool.forget_touched()
    life = _train(trainer)
    for number, pool in enumerate(pools):
        for part in pool.take_touched():
            name = f"touched/{number}/{part.table}/{part.first_column}"
            life.rows.update({f"{name}/keys": part.keys, f"{name}/rows": part.rows})
    return life


def _train(trainer: Trainer) -> Life:
    losses: list[float] = []
    for report in trainer.train():
        if isinstance(report, TrainReport):
            losses += [report.loss, *(math.nan if each is None else each for each in report.label_losses.values())]
    rows = snapshot(trainer.model)
    trainer.close()
    return Life(losses, rows)


def _export(checkpoint: Path, dtype: str, folder: Path) -> None:
    """In place of the base's programs, which are made of a checkpoint, on a CPU."""
    folder.mkdir()
    (folder / "base").touch()
