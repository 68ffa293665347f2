"""`data.deal`: which runs may deal their samples, what they say, and what they report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from embershard.commands import cli
from embershard.data import DataConfig, Schema, SparseFeature
from embershard.data.order.order import ChunkTable
from embershard.distributed import Ranks
from embershard.errors import ConfigError
from embershard.extras.deal.part import Dealt
from embershard.extras.deal.reader import Loads, SampleCost
from embershard.extras.deal.refused import check_run, cost_of
from embershard.models import ModelConfig
from embershard.models.hstu_config import HstuConfig
from embershard.run_result import RunResult
from embershard.settings.decoding import decode, to_toml
from embershard.settings.files import load_config
from embershard.sharding.config import ShardingConfig
from embershard.training.checkpoint.identity import RULES
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.reports import TrainReport
from embershard.training.trainer import Trainer
from tests.unit.data.targets import target_config, write_targets

pytestmark = pytest.mark.extra

SCHEMA = Schema(("age",), tuple(SparseFeature(name, 9) for name in ("user", "item", "hist_item", "hist_action")))
OF_HISTORY: dict[str, Any] = {"arch": "hstu", "target": ("item",), "history": ("hist_item", "hist_action")}
DEALT = DataConfig(deal="cost", deal_cost=("hist_item", 3, 1))


def dealt(ranks: int = 4, rows: int = 4096, schema: Schema = SCHEMA, **config: Any) -> Dealt:
    """The part of a run that is not built, on data in two chunks."""
    table = ChunkTable(np.zeros(2, np.int64), np.full(2, rows))
    run: Any = SimpleNamespace(
        config=RunConfig(**{"data": DEALT, **config}),
        ranks=SimpleNamespace(world_size=ranks, rank=1),
        source=SimpleNamespace(schema=schema, chunks=lambda split: table),
    )
    return Dealt(run)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"sharding": ShardingConfig(mode="hot_cold", hot_bytes=9)},
            'data.deal: got "cost" in the mode "hot_cold", whose batches are packed by hot rows',
        ),
        ({"data": replace(DEALT, deal_ranks=3)}, "data.deal_ranks: got 3, needed a divisor of the 4 ranks: [2, 4]"),
        ({"data": replace(DEALT, deal_ranks=-2)}, "data.deal_ranks: got -2"),
        ({"data": replace(DEALT, deal_cost=("hist", 1, 0))}, "needed a sparse feature (user, item, hist_item"),
        ({"data": replace(DEALT, deal_cost=("item", 0, 0))}, "data.deal_cost: got ['item', 0, 0]"),
        ({"data": replace(DEALT, deal_cost=("item", 5, -1))}, "two integers of 0 or more"),
        (
            {"data": replace(DEALT, deal_cost=None)},
            "with the model 'dlrm', of which nothing says what a sample costs. Name a feature",
        ),
        (
            {"data": replace(DEALT, deal_cost=None), "model": ModelConfig(build="my:model")},
            "with the model 'my:model', of which nothing says",
        ),
    ],
)
def test_what_cannot_be_dealt_is_refused(config, message):
    with pytest.raises(ConfigError) as refused:
        dealt(**config).check()
    assert message in str(refused.value)


@pytest.mark.parametrize("setting", [{"deal_ranks": 2}, {"deal_cost": ("item", 1, 0)}])
def test_a_setting_without_effect_is_refused(setting):
    with pytest.raises(ConfigError, match=r'nothing: it has no effect without data.deal = "cost"'):
        DataConfig(**setting)


def test_settings_are_read_and_may_change_on_a_resume():
    found = decode(DataConfig, {"deal": "cost", "deal_cost": ["hist_item", 7, 2], "deal_ranks": 8})
    assert (found.deal_cost, found.deal_ranks) == (("hist_item", 7, 2), 8)
    assert not any(RULES[f"data.{name}"].is_compared for name in ("deal", "deal_cost", "deal_ranks"))


def test_the_costs_are_those_of_the_history_or_as_declared():
    hstu = HstuConfig(num_layers=3, max_events=10)
    config = RunConfig(data=DataConfig(deal="cost"), model=ModelConfig(**OF_HISTORY, hstu=hstu))
    found = cost_of(config, SCHEMA)
    assert found == SampleCost("hist_item", *hstu.token_costs(2, 16), more=3)  # user, the dense features, the item
    layers = [replace(hstu, max_events=events).sample_cost(2, 16, 2, 1)[0] for events in (10, 500)]
    costs = [found.a * tokens + found.b * tokens**2 for tokens in (10 + 3, 500 + 3)]
    assert layers[1] / layers[0] == pytest.approx(costs[1] / costs[0], rel=0.02), "as a plan counts them"
    declared = replace(config, data=DEALT)
    assert cost_of(declared, SCHEMA) == SampleCost("hist_item", 3, 1)
    din = ModelConfig(arch="din", target=("item",), history=("hist_item",))
    assert cost_of(replace(config, model=din), SCHEMA) == SampleCost("hist_item", 1, 0, more=4)


def test_it_says_what_it_deals_by_and_when_it_reads_more():
    told = dealt(rows=32, train=TrainConfig(batch_size=64))
    told.check()
    first, second = told.notes()
    by = "3 T + 1 T^2, with T = ids of 'hist_item'"
    assert first == f"Samples are dealt to ranks by cost, {by}; evaluations are not dealt."
    assert "parses about 256 samples a step, 2.7 times as many as for its slices" in second
    assert "With chunks of 256 samples" in second
    grouped = dealt(rows=32, train=TrainConfig(batch_size=64), data=replace(DEALT, deal_ranks=2))
    grouped.check()
    assert ", in groups of 2 ranks;" in grouped.notes()[0]
    assert "parses about 159 samples a step, 1.7 times" in grouped.notes()[1]
    enough = dealt(rows=256, train=TrainConfig(batch_size=64))
    enough.check()
    assert len(enough.notes()) == 1
    own = dealt(model=ModelConfig(build="my:model"), train=TrainConfig(batch_size=64))
    own.check()
    assert "in-batch negatives" in own.notes()[1]


@pytest.mark.parametrize(
    ("layer", "accumulate", "is_refused"),
    [
        (nn.BatchNorm1d(3), 1, True), (nn.SyncBatchNorm(3), 1, False), (nn.SyncBatchNorm(3), 2, True),
        (nn.LayerNorm(3), 2, False),
    ],
)  # fmt: skip
def test_layers_that_see_the_samples_of_a_rank_are_refused(layer, accumulate, is_refused):
    part = dealt(train=TrainConfig(accumulate=accumulate))
    part.check()
    part.run.model = SimpleNamespace(module=nn.Sequential(nn.Linear(3, 3), layer))  # type: ignore[assignment]
    if is_refused:
        with pytest.raises(ConfigError, match=rf'got "cost" with a model that has {type(layer).__name__} \(1\)'):
            part.after_build()
    else:
        part.after_build()


#: A model of one's own, whose layer normalizes by a batch.
NORMALIZED = """
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig


class Normalized(nn.Module):
    def __init__(self, features):
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=300, feature_names=[name])
            for name in features
        ]
        self.tables = EmbeddingBagCollection(tables=tables, device="meta")
        self.layers = nn.Sequential(nn.BatchNorm1d(8 * len(tables)), nn.Linear(8 * len(tables), 1))

    def forward(self, dense, sparse):
        return self.layers(self.tables(sparse).values()).squeeze(-1)


def build(schema, options):
    return Normalized(schema.keys)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sharding.mode": "hot_cold", "sharding.hot_bytes": 10000}, 'got "cost" in the mode "hot_cold"'),
        ({"data.deal_ranks": 3}, "data.deal_ranks: got 3, needed a divisor of the 1 ranks"),
        ({"data.deal_cost": '["seeen", 1, 0]'}, "data.deal_cost: got ['seeen', 1, 0]"),
        ({"data.deal_cost": "none"}, "with the model 'dlrm', of which nothing says"),
        ({"model.build": "normalized:build"}, "with a model that has BatchNorm1d (model.layers.0)"),
    ],
)
def test_a_dry_run_refuses_in_the_words_of_the_run(settings, said, ranks: Ranks, tmp_path: Path, capsys, monkeypatch):
    (tmp_path / "normalized.py").write_text(NORMALIZED)
    monkeypatch.syspath_prepend(tmp_path)
    path = write_targets(tmp_path / "samples.parquet")
    (tmp_path / "run.toml").write_text(to_toml(target_config(path, "plain", model=ModelConfig())))
    given = {"data.deal": "cost", "data.deal_cost": '["seen", 1, 1]'} | settings
    overrides = [f"{name}={value}" for name, value in given.items()]
    words = [word for text in overrides for word in ("--set", text)]
    assert cli.main(["train", str(tmp_path / "run.toml"), "--dry-run", "--nproc", "1", "--trust-code", *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert not printed.out, "settings that no run may have"
    config = load_config(RunConfig, tmp_path / "run.toml", overrides, trust_code=True)
    with pytest.raises(ConfigError) as refused:
        Trainer(config, ranks)
    assert str(refused.value) in printed.err


def test_before_ranks_are_counted_their_groups_are_not_refused():
    config = RunConfig(data=replace(DEALT, deal_ranks=3, deal_cost=("C1", 1, 0)))
    check_run(config, None)
    check_run(config, 6)
    with pytest.raises(ConfigError, match=r"got 3, needed a divisor of the 4 ranks: \[2, 4\]"):
        check_run(config, 4)
    with pytest.raises(ConfigError, match=r"got 0, needed a divisor of the ranks"):
        check_run(replace(config, data=replace(config.data, deal_ranks=0)), None)


@pytest.mark.slow
@pytest.mark.smoke
def test_one_rank_trains_its_samples_in_their_order(ranks: Ranks, tmp_path: Path):
    path = write_targets(tmp_path / "samples.parquet")
    config = target_config(path, "plain", train=TrainConfig(batch_size=16, max_steps=6, log_every=3, device="cpu"))
    losses = []
    for data in (config.data, replace(config.data, deal="cost", deal_cost=("seen", 1, 1))):
        trainer = Trainer(replace(config, data=data), ranks)
        reports = [report for report in trainer.train() if isinstance(report, TrainReport)]
        losses.append([report.loss for report in reports])
        deals = data.deal == "cost"
        assert [report.deal for report in reports] == [{"dealt": 1.0, "undealt": 1.0} if deals else {}] * 2
        assert ("max_over_mean_dealt" in reports[0].values()) == deals
        assert trainer.of_parts(lambda part: part.result()).get("deal", {}) == reports[0].deal
        trainer.close()
    assert losses[0] == losses[1]


def test_the_result_shows_both_ratios():
    rows = [
        row
        for each in RunResult.__dataclass_fields__.values()
        if each.name == "deal"
        for row in each.metadata["rows"]({"dealt": 1.0064, "undealt": 2.2}, None)
    ]
    assert rows == [("slowest rank", "1.006 x mean", "by cost; 2.200 without data.deal")]


def test_ratios_are_of_the_trained_steps_and_of_all_ranks():
    part = dealt()
    part.check()
    part.before_build(None)
    part._loads.update({(0, 4): Loads(3, 4, 2), (0, 8): Loads(2, 6, 2), (1, 4): Loads(9, 9, 1)})
    others = {(2, 3): [Loads(2, 5, 2), Loads(3, 3, 2)]}  # of another group's ranks

    def all_gather(mine: torch.Tensor) -> torch.Tensor:
        return torch.stack([mine, torch.tensor(others[tuple(mine.shape)], dtype=torch.float64)])  # type: ignore[index]

    part.run.ranks.all_gather = all_gather  # type: ignore[method-assign]
    part.run.ranks.device = torch.device("cpu")  # type: ignore[misc]
    part.run.position = SimpleNamespace(epoch=0, global_sample=8)  # type: ignore[misc]
    assert part.report_entries() == {"deal": {"dealt": (3 + 3) / 4, "undealt": (5 + 6) / 4}}
    assert list(part._loads) == [(1, 4)], "it has not trained"
