"""Which figures a run asks for, and which combinations are refused before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from embershard.data import DataConfig
from embershard.data.config import TableConfig
from embershard.errors import ConfigError
from embershard.metrics.config import MetricsConfig
from embershard.metrics.figures import Judge, Target, metric_names
from embershard.training.config import RunConfig, TrainConfig
from tests.unit.data.targets import FEATURES

NUMBERS = TableConfig(FEATURES, label="stars", task="regression")
CLICKS = TableConfig(FEATURES, label="click")


def run(table: TableConfig, **settings: Any) -> RunConfig:
    return RunConfig(DataConfig("table", "x", table=table), metrics=MetricsConfig(**settings))


def test_default_names_follow_from_task_and_group() -> None:
    assert MetricsConfig().more("binary") == ()
    assert MetricsConfig(group="user").more("binary") == ("gauc",)
    assert MetricsConfig(slices=("a",)).of_task("regression") == ("rmse", "mae")
    chosen = MetricsConfig(["ndcg@10", "auc"], "user")  # type: ignore[arg-type]  # as TOML has it
    assert (chosen.of_task("binary"), chosen.more("binary")) == (("ndcg@10", "auc"), ("ndcg@10",))
    assert metric_names(Target(("click", "buy")), lambda task: ["gauc"])[-1] == "gauc/buy"
    assert MetricsConfig(group="a", slices=("a", "b")).columns == ("a", "b")


def test_an_evaluation_may_be_judged_by_a_chosen_figure() -> None:
    judge = Judge.of("ndcg@10", Target(("click", "buy")), lambda task: ["ndcg@10"])
    assert judge.value({"ndcg@10/click": 0.5, "ndcg@10/buy": 0.7, "ndcg@1/buy": 0.0}) == pytest.approx(0.6)
    assert judge.is_better(0.7, than=0.6)
    with pytest.raises(ConfigError, match=r"train.metric: got 'gauc', needed one of auc, ne"):
        Judge.of("gauc", Target())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"names": ["auc", "auc"]}, "each once"),
        ({"slices": [""]}, "needed names, each once"),
        ({"names": ["acc"]}, "got 'acc', needed some of auc, rmse"),
        ({"names": ["ndcg"], "group": "u"}, "got 'ndcg', needed some of .*ndcg@10"),
        ({"names": ["ndcg@0"], "group": "u"}, "got 'ndcg@0'"),
        ({"names": ["ndcg@x"], "group": "u"}, "got 'ndcg@x'"),
        ({"names": ["ndcg@01"], "group": "u"}, "got 'ndcg@01'"),
        ({"names": ["gauc@3"], "group": "u"}, "got 'gauc@3'"),
        ({"names": ["auc@3"]}, "got 'auc@3'"),
        ({"names": ["recall@3"]}, 'recall@3 is a mean over groups .* metrics.group = "user_id"'),
        ({"group": ""}, "needed the name of a column"),
        ({"most_slices": 0, "slices": ["a"]}, "needed at least 1"),
        ({"most_slices": 5}, "no effect without metrics.slices"),
        ({"names": ["recalibrated_ne"]}, "need each other"),
        ({"recalibration": 0.1}, "need each other"),
        ({"names": ["recalibrated_ne"], "recalibration": 0.0}, "got 0.0, needed a number above 0"),
        ({"names": ["recalibrated_ne"], "recalibration": float("nan")}, "needed a number above 0"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MetricsConfig(**settings)


def test_a_run_refuses_what_its_labels_or_data_do_not_have() -> None:
    with pytest.raises(
        ConfigError, match=r"got 'rmse' for labels of a binary task, needed auc, ne.* task = .regression"
    ):
        run(CLICKS, names=["rmse"])
    for name, more in (("auc", {}), ("gauc", {"group": "user"}), ("recalibrated_ne", {"recalibration": 0.1})):
        with pytest.raises(ConfigError, match=f"got '{name}' for labels of a regression task, needed rmse, mae, r2"):
            run(NUMBERS, names=[name], **more)
    with pytest.raises(
        ConfigError, match=r"metrics.group has no effect .* labels that are numbers have no such figure"
    ):
        run(NUMBERS, group="user")
    with pytest.raises(ConfigError, match=r'metrics.group has no effect .* add "gauc"'):
        run(CLICKS, group="user", names=["auc"])
    assert run(NUMBERS, slices=["user"]).metrics.columns == ("user",)
    for settings in ({"group": "C1"}, {"slices": ["C1"]}):
        with pytest.raises(
            ConfigError, match=r'got data.kind = "synthetic", needed "table" or "parquet".*Leave it out'
        ):
            RunConfig(metrics=MetricsConfig(**settings))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"metrics has no effect: nothing is held out \(data.eval_fraction is 0"):
        RunConfig(DataConfig(eval_fraction=0.0), metrics=MetricsConfig(("auc",)))
    judged = TrainConfig(metric="gauc", early_stopping=2)
    data = DataConfig("table", "x", table=CLICKS)
    assert RunConfig(data, train=judged, metrics=MetricsConfig(group="user")).judges
    with pytest.raises(ConfigError, match=r"train.metric: got 'gauc'"):
        RunConfig(data, train=judged)


def test_a_column_that_is_missing_is_named_before_the_training(tmp_path: Path) -> None:
    from embershard.data.sources.check import check_data
    from tests.unit.data.targets import write_targets

    data = DataConfig("table", str(write_targets(tmp_path / "a.parquet")), table=CLICKS)
    check_data(data, ("user", "item"))
    for column, message in (("usr", "no column 'usr'; did you mean 'user'"), ("tags", "'tags' is of type list")):
        with pytest.raises(ConfigError, match=f"metrics.group, metrics.slices: .*{message}"):
            check_data(data, (column,))
    (tmp_path / "a.csv").write_text("click,user\n1,2\n")
    text = DataConfig("table", str(tmp_path / "a.csv"), table=TableConfig({"user": FEATURES["user"]}, label="click"))
    check_data(text, ("user",))
    with pytest.raises(ConfigError, match="no column 'usr'"):
        check_data(text, ("usr",))
