"""The benchmark of groups' quality trains what it names."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from benchmarks import group_quality
from benchmarks.group_quality import Setting
from tests.ranks import groups
from tests.ranks.planned import here
from tests.ranks.test_groups_training import config_of
from tests.ranks.workers import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.extra]


def measured() -> dict[str, Any]:
    """On this rank: one seed of a small run."""
    config = config_of(num_groups=1, steps=8)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, eval_every=None))
    options = argparse.Namespace(groups=2, sync_every=[1, 4], scales=[1.0, 0.5], types=["fp32", "fp16"], seeds=1)
    with groups.envs_are_kept():
        return group_quality.measure(config, here(), options)["runs"]


def test_every_setting_is_trained_beside_one_group(two_ranks: RankPool) -> None:
    found, of_other_rank = two_ranks.run(measured)
    assert list(found) == [
        "one group, c 1", "one group, c 2", "one group, c 0.5",
        *(
            f"2 groups, every {every}, c {scale}{dtype}"
            for every in (1, 4) for scale in (1, 0.5) for dtype in ("", ", averages in fp16")
        ),
    ]  # fmt: skip
    quality = {name: each["runs"][0]["auc"] for name, each in found.items()}
    assert quality == {name: each["runs"][0]["auc"] for name, each in of_other_rank.items()}
    assert len({each["runs"][0]["ne"] for each in found.values()}) == len(found), "no setting is without effect"
    base = quality["one group, c 1"]
    for name, each in found.items():
        assert each["runs"][0]["steps"] == 8
        assert each["auc"]["mean_difference"] == quality[name] - base
        unscaled = quality[name.rpartition(" c ")[0] + " c 1"]
        assert each["over c = 1"]["auc"]["mean_difference"] == quality[name] - unscaled


def test_a_scale_of_one_group_is_a_learning_rate() -> None:
    config = config_of(num_groups=1)
    scaled = Setting(scale=0.25).of_run(config, seed=3)
    assert scaled.embedding_optimizer.lr == 2 * config.embedding_optimizer.lr
    assert scaled.sharding == config.sharding
    assert (scaled.train.seed, scaled.data.seed) == (3, 3)
    several = Setting(2, 16, 0.25).of_run(config, seed=3)
    assert several.embedding_optimizer == config.embedding_optimizer, "groups scale it themselves"
    assert (several.sharding.groups, several.sharding.sync_every, several.sharding.moment_scale) == (2, 16, 0.25)
    assert Setting(2, 16).of_run(config, seed=3).sharding.moment_scale is None
