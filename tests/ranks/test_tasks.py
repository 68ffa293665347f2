"""Models for several labels, some of which are missing, and models with a weight per id: cached equals stock TorchRec,
bit for bit, also planned and resumed; and a step has one loss on any number of ranks, however the missing labels are
spread over them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embershard.models import ModelConfig
from embershard.training.config import RunConfig
from tests.covering import matrix
from tests.ranks import own_models
from tests.ranks.planned_by_commands import expect_planned_equals_stock
from tests.ranks.rounding import loss_rounding
from tests.ranks.workers import RankPool
from tests.unit.data.targets import target_config, write_targets

pytestmark = pytest.mark.ranks

LAYERS = {"dense_arch_layer_sizes": (8,), "over_arch_layer_sizes": (6, 1)}
TOWERS = {**LAYERS, "expert_layer_sizes": (8, 6)}
#: Each architecture, over each interaction, with each weighting of losses; and a funnel.
MODELS: dict[str, dict[str, Any]] = {
    "shared_bottom": {**TOWERS, "funnel": ("click", "bought")},
    "mmoe": {**TOWERS, "interaction": "dlrm_dcn", "num_experts": 3},
    "ple": {**TOWERS, "label_weighting": "uncertainty", "dropout": 0.2},
    "dlrm": LAYERS,
    "fm": {},
    "deepfm": {"label_weighting": "uncertainty", "dropout": 0.2},
    "wide_deep": {"over_arch_layer_sizes": (6, 1)},
}


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_targets(tmp_path_factory.mktemp("tasks") / "samples.parquet")


def tasks_config(samples: Path, arch: Any, **changes: Any) -> RunConfig:
    return target_config(samples, "tasks", model=ModelConfig(arch, 8, **MODELS[arch]), **changes)


@pytest.mark.parametrize(
    ("arch", "target"),
    [
        ("mmoe", "tasks"),
        ("wide_deep", "plain"),
        matrix("fm", "plain"),
        *(matrix(arch, "tasks") for arch in MODELS if arch not in ("mmoe", "dlrm")),
        matrix("deepfm", "weighted"),
    ],
)
def test_cached_equals_stock(arch: Any, target: str, samples: Path, one_rank: RankPool, two_ranks: RankPool):
    several = MODELS[arch] if target == "tasks" else {}
    config = target_config(samples, target, model=ModelConfig(arch, 8, **several))
    for pool in (one_rank, two_ranks):
        verdicts = pool.run(own_models.verdict, config)
        assert all(verdict.is_equal and verdict.caches[0].evictions > 20 for verdict in verdicts), verdicts


@pytest.mark.matrix
@pytest.mark.parametrize(("arch", "on_one"), [("dlrm", False), *(matrix(arch, True) for arch in ("dlrm", "ple", "fm"))])
def test_classes(arch: str, on_one: bool, samples: Path, one_rank: RankPool, two_ranks: RankPool, tmp_path: Path):
    """A label with classes beside others: cached equals stock, and a step has one loss on one rank and on two."""
    learns = arch == "ple"
    config = target_config(samples, "classes", model=ModelConfig(arch, 8, **MODELS[arch]))  # type: ignore[arg-type]
    if learns:
        table = replace(config.data.table, label_weights=())
        config = replace(config, data=replace(config.data, table=table))
    for pool in (one_rank, two_ranks)[not on_one :]:
        verdicts = pool.run(own_models.verdict, config)
        assert all(verdict.is_equal and verdict.caches[0].evictions > 20 for verdict in verdicts), verdicts
    assert two_ranks.run(own_models.resumed_equals_whole, longer(config), tmp_path / "checkpoints") == [[], []]
    if not learns:  # whose dropout differs
        config = replace(config, data=replace(config.data, shuffle=False, chunk_rows=16))
        ((alone, _),) = one_rank.run(own_models.trained, replace(config, train=replace(config.train, batch_size=32)))
        together, _ = two_ranks.run(own_models.trained, config)[0]
        assert together == pytest.approx(alone, rel=loss_rounding(len(alone), 32))


def longer(config: RunConfig) -> RunConfig:
    return replace(config, train=replace(config.train, max_steps=own_models.STEPS))


@pytest.mark.parametrize("arch", [matrix("mmoe"), "deepfm", matrix("fm"), matrix("wide_deep")])
def test_a_plan_is_obeyed(arch: str, samples: Path, two_ranks: RankPool, tmp_path: Path):
    """Profiled and planned by the commands."""
    expect_planned_equals_stock(two_ranks, tasks_config(samples, arch), tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("arch", ["ple", "deepfm", "fm", "wide_deep"])
def test_a_resume_goes_on_as_the_whole_run(arch: str, samples: Path, two_ranks: RankPool, tmp_path: Path):
    """With the learned weights of the losses, and dropout's masks."""
    config = longer(tasks_config(samples, arch))
    assert two_ranks.run(own_models.resumed_equals_whole, config, tmp_path / "checkpoints") == [[], []]


def test_a_step_has_one_loss_on_any_number_of_ranks(samples: Path, one_rank: RankPool, two_ranks: RankPool):
    """In the first batch one rank has all ratings, and the other none; a loss divided by what each rank has would be
    another one."""
    config = tasks_config(samples, "mmoe")
    config = replace(config, data=replace(config.data, shuffle=False, chunk_rows=16))
    whole = replace(config, train=replace(config.train, batch_size=32))
    ((alone, _),) = one_rank.run(own_models.trained, whole)
    ((counts, own), *_) = one_rank.run(own_models.label_losses, whole)
    found = two_ranks.run(own_models.label_losses, config)
    assert sorted(each[2] for each, _ in found) == [0, 16]
    assert counts == [sum(each) for each in zip(*(each for each, _ in found), strict=True)]
    bound = loss_rounding(len(alone), 32)
    together, _ = two_ranks.run(own_models.trained, config)[0]
    assert together == pytest.approx(alone, rel=bound)
    for step, of_ranks in zip(own, found[0][1], strict=True):
        assert of_ranks == pytest.approx(step, rel=bound)
    assert found[0][1] == found[1][1]
    masked = replace(whole.data.table, label_masks=("", "", ""))
    ((other, _),) = one_rank.run(own_models.trained, replace(whole, data=replace(whole.data, table=masked)))
    assert other == pytest.approx(alone, rel=bound), "bought is empty without a click anyway"
    everywhere = replace(masked, label=("click", "buy", "stars"), missing_labels="bad_row")
    ((other, _),) = one_rank.run(own_models.trained, replace(whole, data=replace(whole.data, table=everywhere)))
    assert other != pytest.approx(alone, rel=1e-2), "the control"
