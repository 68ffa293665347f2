"""What two ranks trained, with tables split in every way: scored by one rank and by two, and exported."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from embershard.commands.score import ScoreJob
from embershard.data import Target, open_source
from embershard.distributed import CheckpointConfig, Supervision
from embershard.extras.serving import serving_model
from embershard.extras.serving.write import ExportRequest, write_export
from embershard.metrics.config import MetricsConfig
from embershard.metrics.evaluation import Evaluator
from embershard.metrics.own_metric import Floats
from embershard.metrics.predictions import Predicted, PredictionBuffer
from embershard.settings.decoding import flat
from embershard.training.config import RunConfig
from embershard.training.trained_run import Scorer, open_trained
from embershard.training.trainer import Trainer
from tests.covering import keep, matrix
from tests.ranks.planned import here, make_config, mixed_plan
from tests.unit.data.targets import target_config, write_targets
from tests.unit.metrics.columns import Columns

pytestmark = pytest.mark.ranks


def train(config: RunConfig, checkpoints: Path) -> None:
    """Train, and save at the end."""
    trainer = Trainer(config, here(), checkpoints)
    for _ in trainer.train():
        pass
    trainer.close()


def mean_of_scores(scores: Floats, labels: Floats, weights: Floats) -> float:
    """A figure of one's own, of all samples."""
    return float((weights * scores).sum() / weights.sum())


def distance(scores: Floats, labels: Floats, weights: Floats) -> Floats:
    """A figure of one's own, of each sample."""
    return -np.abs(scores - labels)


def judge_scores() -> dict[str, Any]:
    """Return what made-up scores say, of which this rank has those of its batches of 16."""
    ranks, generator = here(), torch.Generator().manual_seed(0)
    outputs = torch.randn(357, 2, generator=generator).round(decimals=1)
    labels, weights = (torch.rand(357, 2, generator=generator) < 0.3).float(), torch.rand(357, generator=generator)
    target = Target(("click", "buy"), weight="weight")
    buffer = PredictionBuffer(target)
    for start in range(0, 357, 16 * ranks.world_size):
        own = slice(start + 16 * ranks.rank, start + 16 * (ranks.rank + 1))
        buffer.add(Predicted(outputs[own], labels[own], weights[own]))
    source: Any = Columns(user=[f"u{n % 23}" for n in range(357)], country=[f"c{n % 5}" for n in range(357)])
    own = tuple(f"{__name__}:{function.__name__}" for function in (mean_of_scores, distance))
    metrics = MetricsConfig(("auc", "ne", "gauc", "ndcg@3", *own), group="user", slices=("country",))
    return dataclasses.asdict(Evaluator(target, metrics, source, ranks).judge(buffer, source))


def evaluate(config: RunConfig, checkpoints: Path) -> dict[str, Any]:
    """Return the evaluation of the newest checkpoint."""
    ranks = here()
    trained = open_trained(config, checkpoints, ranks, "last")
    found = Scorer(trained, open_source(config.data), ranks, Supervision()).evaluate()
    return dataclasses.asdict(found)


def score(config: RunConfig, checkpoints: Path, output: Path) -> None:
    """Write the scores of the held-out samples."""
    ScoreJob(config, None, False, checkpoints, None, output).run(here(), Supervision())


_BATCH = 20


@pytest.mark.parametrize("ema", keep([0.9], [None, 0.9]))
def test_any_number_of_ranks_scores_as_the_export_does(one_rank, two_ranks, tmp_path, ema):
    """Also where all of them use an average of the dense weights."""
    mixed_plan(["row_wise", "column_wise", "table_wise"], 2, 2).save(tmp_path / "plan.json")
    config = make_config(tmp_path / "plan.json", checkpoint=CheckpointConfig(at_end=True))
    config = replace(config, train=replace(config.train, ema=ema))
    checkpoints = tmp_path / "run" / "checkpoints"
    two_ranks.run(train, config, checkpoints)
    for pool, name in ((one_rank, "one"), (two_ranks, "two")):
        pool.run(score, config, checkpoints, tmp_path / name)
    one, two = (pq.read_table(tmp_path / name) for name in ("one", "two"))
    assert len(one) == 120
    assert one.equals(two), "the same batches of 20, one id per bag: the same bits"

    list(write_export(ExportRequest(config, checkpoints, None, True, "fp32", 0), tmp_path / "exported"))
    model = serving_model.load(tmp_path / "exported")
    source = open_source(config.data)
    logits = []
    for chunk in range(len(source.chunks("eval").rows)):
        block = source.read("eval", chunk, torch.arange(int(source.chunks("eval").rows[chunk])).numpy())
        batch = block.to_batch(source.schema)
        ids = [batch.sparse_features[key].values() for key in source.schema.keys]
        for start in range(0, block.num_samples, _BATCH):
            stop = min(start + _BATCH, block.num_samples)
            with torch.no_grad():
                part = [each[start:stop] for each in ids]
                offsets = [torch.arange(stop - start + 1) for _ in ids]
                logits.append(model(batch.dense_features[start:stop], part, offsets))
    assert torch.cat(logits).tolist() == one["logit"].to_pylist()


@pytest.mark.parametrize(
    "pool_names", [("one_rank", "two_ranks"), matrix(("one_rank", "two_ranks", "four_ranks"))], ids=len
)
def test_figures_are_the_same_on_any_number_of_ranks(one_rank, pool_names, request, tmp_path):
    """Of two labels, of users and of slices: of equal scores, the same bits; a model's scores are rounded otherwise on
    other ranks. 357 and 120 samples in batches of 16: some ranks have a short one at the end, or none."""
    pools = [request.getfixturevalue(name) for name in pool_names]
    (first,), *others = (pool.run(judge_scores) for pool in pools)
    assert {"gauc/buy", "ndcg@3/buy", f"{__name__}:distance/click"} <= first["quality"].keys()
    assert [each == first for pool in others for each in pool] == [True] * (2 if len(pools) == 2 else 6)

    config = target_config(write_targets(tmp_path / "samples.parquet"), "several")
    names = ("auc", "logloss", "gauc", "ndcg@2", "recall@2")
    metrics = MetricsConfig(names, group="user", slices=("item",), most_slices=3)
    config = replace(config, metrics=metrics, checkpoint=CheckpointConfig(at_end=True))
    one_rank.run(train, config, tmp_path / "checkpoints")
    (alone,), *others = (pool.run(evaluate, config, tmp_path / "checkpoints") for pool in pools)
    assert len(alone["slices"]["item"]) == 4, "three values, and the others"
    wanted = {name: value for name, value in flat({**alone, "curves": {}}).items() if value is not None}
    assert len(wanted) > 40
    for each in (each for pool in others for each in pool):
        assert {name: flat(each)[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)
