"""`train.ema`: the average of the dense weights is what the formula says, and all that uses the model has it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embershard.data import open_source
from embershard.distributed import CheckpointConfig, PublishConfig, Ranks, Supervision
from embershard.distributed.checkpoint.load import AVERAGE, load_group
from embershard.errors import ConfigError
from embershard.extras.serving import serving_model
from embershard.extras.serving.serving_replica import Replica
from embershard.extras.serving.write import export_base
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.parts.average import AveragedWeights
from embershard.training.reports import EvalReport
from embershard.training.trained_run import Scorer, open_trained
from embershard.training.trainer import Trainer
from tests.covering import matrix
from tests.unit.training.test_trainer import make_config

pytestmark = pytest.mark.slow  # whole training runs


def config_of(ema: float | None, steps: int = 6, **sections: Any) -> RunConfig:
    train = TrainConfig(batch_size=100, max_steps=steps, eval_every=3, ema=ema)
    checkpoint = CheckpointConfig(every_steps=3, keep_last=9)
    return make_config(train=train, checkpoint=checkpoint, **sections)


def trained(config: RunConfig, ranks: Ranks, folder: Path, start: int | None = None) -> tuple[list[Any], list[Any]]:
    """Train, and return the reports, and the dense weights after each step."""
    trainer, weights = Trainer(config, ranks, folder, export=partial(export_base, config)), list[dict[str, Tensor]]()
    if start is not None:
        trainer.resume(folder / f"step_{start}")
    step = trainer.step

    def noting(batch: Any) -> Any:
        found = step(batch)
        weights.append({name: each.detach().clone() for name, each in trainer.optimizers.dense_parameters.items()})
        return found

    trainer.step = noting  # type: ignore[method-assign]
    first = {name: each.detach().clone() for name, each in trainer.optimizers.dense_parameters.items()}
    reports = list(trainer.train())
    trainer.close()
    return reports, [first, *weights]


def test_it_is_the_average_of_the_formula_and_training_is_as_without(ranks: Ranks, tmp_path: Path) -> None:
    """0.2 is the decay from the first step on; 0.5 begins with less: (1 + 1) / (10 + 1), up to 0.5 in step 8."""
    _, plain = trained(config_of(None, 12), ranks, tmp_path / "without")
    assert not load_group(tmp_path / "without" / "step_12", AVERAGE)
    for ema in (0.1, 0.5):
        folder = tmp_path / str(ema)
        _, live = trained(config_of(ema, 12), ranks, folder)
        assert all(torch.equal(own[name], each[name]) for own, each in zip(live, plain, strict=True) for name in own)
        found = load_group(folder / "step_12", AVERAGE)
        assert found.keys() == live[0].keys()
        assert not any(name.startswith("tables") or "embedding_bags" in name for name in found)
        for name, average in found.items():
            expected = live[0][name].double()
            for step, weights in enumerate(live[1:], 1):
                decay = min(ema, (1 + step) / (10 + step))
                expected = decay * expected + (1 - decay) * weights[name].double()
            torch.testing.assert_close(average, expected.float(), rtol=1e-6, atol=1e-7)
            assert not torch.equal(average, live[-1][name]), "a mean, not the newest"


def test_evaluations_predictions_and_exports_have_it(ranks: Ranks, tmp_path: Path) -> None:
    config = config_of(0.9)
    reports, _ = trained(config, ranks, tmp_path / "checkpoints")
    told = [report for report in reports if isinstance(report, EvalReport)][-1]
    plain_reports, _ = trained(config_of(None), ranks, tmp_path / "plain")
    plain = [report for report in plain_reports if isinstance(report, EvalReport)][-1]
    assert told.quality["logloss"] != plain.quality["logloss"], "equal weights, scored without the average"

    def logloss(checkpoints: Path) -> float:
        scorer = Scorer(open_trained(config, checkpoints, ranks), open_source(config.data), ranks, Supervision())
        return float(scorer.evaluate().quality["logloss"])

    assert logloss(tmp_path / "checkpoints") == told.quality["logloss"]
    assert logloss(tmp_path / "plain") == plain.quality["logloss"]

    export_base(config, tmp_path / "checkpoints" / "step_6", "fp32", tmp_path / "exported")
    saved = load_group(tmp_path / "checkpoints" / "step_6", AVERAGE)
    exported = serving_model.weights_of(serving_model.load(tmp_path / "exported").dense)
    assert saved
    assert all(torch.equal(exported[name], average) for name, average in saved.items())


@pytest.mark.matrix
def test_publications_have_it(ranks: Ranks, tmp_path: Path) -> None:
    """The base before the first step, and each delta."""
    config = config_of(0.9, publish=PublishConfig(str(tmp_path / "published"), every_steps=3))
    trained(config, ranks, tmp_path / "checkpoints")
    replica = Replica(tmp_path / "published")
    replica.update()
    saved = load_group(tmp_path / "checkpoints" / "step_6", AVERAGE)
    with replica.state() as (model, _):
        published = serving_model.weights_of(model.dense)
    assert saved
    assert all(torch.equal(published[name], average) for name, average in saved.items())


@pytest.mark.parametrize("before", [0.9, matrix(None)])
def test_a_resume_goes_on_with_it(ranks: Ranks, tmp_path: Path, before: float | None) -> None:
    """Where the checkpoint has none, it begins with the weights of the checkpoint, and counts the run's steps."""
    config = config_of(0.9, 9)
    trained(config_of(before, 3), ranks, tmp_path / "resumed")
    _, live = trained(config, ranks, tmp_path / "resumed", start=3)
    found = load_group(tmp_path / "resumed" / "step_9", AVERAGE)
    if before is not None:
        trained(config, ranks, tmp_path / "whole")
        whole = load_group(tmp_path / "whole" / "step_9", AVERAGE)
        assert whole
        assert all(torch.equal(found[name], each) for name, each in whole.items())
        return
    for name, average in found.items():
        expected = load_group(tmp_path / "resumed" / "step_3", "model")[name].double()
        for step, weights in enumerate(live[1:], 4):
            decay = min(0.9, (1 + step) / (10 + step))
            expected = decay * expected + (1 - decay) * weights[name].double()
        torch.testing.assert_close(average, expected.float(), rtol=1e-6, atol=1e-7)


def test_an_error_while_it_is_served_leaves_the_weights_in_training(ranks: Ranks) -> None:
    trainer = Trainer(config_of(0.9), ranks)
    part = trainer.part(AveragedWeights)
    assert part is not None
    for weight in trainer.optimizers.dense_parameters.values():
        weight.data.add_(1.0)
    before = {name: weight.detach().clone() for name, weight in trainer.optimizers.dense_parameters.items()}

    def interrupted() -> None:
        with trainer.served():
            now = trainer.optimizers.dense_parameters
            assert not any(torch.equal(now[name], each) for name, each in before.items())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(torch.equal(trainer.optimizers.dense_parameters[name], each) for name, each in before.items())
    trainer.close()


def test_the_memory_of_it_counts() -> None:
    without, averaged = config_of(None), config_of(0.9)
    assert averaged.num_dense_states == without.num_dense_states + 1


@pytest.mark.parametrize("ema", [0.0, 1.0, -0.5, float("nan")])
def test_a_decay_that_is_none_is_refused(ema: float) -> None:
    with pytest.raises(ConfigError, match=r"train\.ema: got .*, needed more than 0 and less than 1"):
        replace(TrainConfig(), ema=ema)
