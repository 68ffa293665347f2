"""Two ranks keep the same checkpoint and end in the same step, by the figures of the first one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from embershard.distributed import CheckpointConfig, complete_checkpoints
from embershard.distributed.checkpoint.best import BestEvaluation
from embershard.training.checkpoint.resume import resume_run
from embershard.training.parts.evaluations import Evaluations
from embershard.training.trainer import Trainer
from tests.ranks.planned import here, make_config
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

#: AUC by evaluation on the first rank; another one would decide otherwise.
_FIRST, _OTHER = (0.6, 0.8, 0.7, 0.7, 0.9), (0.9, 0.1, 0.95, 0.96, 0.97)


def _script(trainer: Trainer, values: tuple[float, ...]) -> None:
    evaluate = trainer.evaluate

    def scripted() -> Any:
        report = evaluate()
        auc = values[trainer.steps // 2 - 1]
        return dataclasses.replace(report, quality={**report.quality, "auc": auc})

    trainer.evaluate = scripted  # type: ignore[method-assign]


def train(folder: Path) -> list[tuple[Any, ...]]:
    """Train until two evaluations gave nothing better, and resume; return what a rank knows after each."""
    config, ranks = make_config(None, checkpoint=CheckpointConfig(keep_best=True, keep_last=1)), here()
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, eval_every=2, early_stopping=2))
    found: list[tuple[Any, ...]] = []
    for is_resumed in (False, True):
        trainer = Trainer(config, ranks, folder)
        if is_resumed:
            resume_run(trainer)
        _script(trainer, _FIRST if ranks.is_first else _OTHER)
        reports = list(trainer.train())
        trainer.close()
        best = BestEvaluation.find(folder)
        names = [path.name for path in complete_checkpoints(folder)]
        kept = trainer.part(Evaluations).kept
        found.append((trainer.steps, len(reports) > 1, best and best.step, kept == best, names))
    return found


@pytest.mark.matrix
def test_ranks_decide_alike(two_ranks: RankPool, tmp_path: Path):
    first, second = two_ranks.run(train, tmp_path)
    assert first == second
    whole, resumed = first
    assert whole == (8, True, 4, True, ["step_4", "step_8"])
    assert resumed == (8, False, 4, True, ["step_4", "step_8"])
