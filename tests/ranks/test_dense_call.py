"""The dense part of a step as one call trains the bits of stock TorchRec, whose layers DDP wraps, on any number of
ranks: of every architecture that it takes, also where caches grow, and a run evaluates and resumes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from embershard.cache import CacheConfig
from embershard.sharding.torchrec import cache_stats
from embershard.training import dense_call
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.dense_call import DenseCall
from embershard.training.optimizers import DenseOptimizerConfig
from embershard.training.reports import EvalReport, TrainReport
from embershard.training.trainer import Trainer
from tests.covering import matrix
from tests.ranks import own_models
from tests.ranks.parity import differences, snapshot
from tests.ranks.planned import here, make_config
from tests.ranks.workers import RankPool
from tests.unit.training.dense_models import config_of, counted, samples_in

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return samples_in(tmp_path_factory.mktemp("dense_call"))


def beside_stock(config: RunConfig) -> tuple[bool, str, int, int]:
    """Is it equal, and the verdict; how many batches the call computed, and how many trainings there were."""
    with ExitStack() as stack:
        computed = counted(stack)
        verdict = own_models.verdict(config)
    return verdict.is_equal, str(verdict), len(computed), len(verdict.caches)


OF_MODELS = [
    ("dlrm", 4), ("dlrm, bf16", 2), ("ple", 2), ("deepfm", 4), ("fm", 1), matrix("dlrm", 2), matrix("dlrm", 1),
    *(matrix("dlrm, adam", ranks) for ranks in (1, 2, 4)), *(matrix("dlrm, bf16", ranks) for ranks in (1, 4)),
    *(matrix(name, ranks) for name in ("dcn", "shared_bottom", "mmoe", "wide_deep") for ranks in (1, 2, 4)),
    *(matrix(name, ranks) for name, ranks in (("ple", 1), ("ple", 4), ("deepfm", 2), ("fm", 2), ("fm", 4))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks"), OF_MODELS)
def test_the_bits_are_stocks(name: str, ranks: int, samples: Path, request: pytest.FixtureRequest) -> None:
    """DDP finds its buckets in three steps of several ranks; all later ones are calls."""
    pool: RankPool = request.getfixturevalue({1: "one_rank", 2: "two_ranks", 4: "four_ranks"}[ranks])
    config = config_of(name, samples)
    steps = config.train.max_steps or 0
    for is_equal, verdict, computed, trainings in pool.run(beside_stock, config):
        assert is_equal, verdict
        assert computed == trainings * (steps - (0 if ranks == 1 else 3))


def life(config: RunConfig, goes_on: Path | None = None) -> tuple[list[Any], dict[str, torch.Tensor], list[int]]:
    """Train, of a resumed run its second half; return the reports' figures, the end, and the batches of calls."""
    with ExitStack() as stack:
        computed = counted(stack)
        trainer = Trainer(config, here(), goes_on)
        stack.callback(trainer.close)
        figures: list[Any] = []
        for report in trainer.train():
            if isinstance(report, TrainReport):
                figures.append((report.loss, dict(report.label_losses), report.sent_bytes.dense_all_reduce))
            elif isinstance(report, EvalReport):
                figures.append(report.quality)
        grown = sum(table.evictions for table in cache_stats(trainer.model))
        return [*figures, grown], snapshot(trainer.model), computed


def with_and_without(config: RunConfig) -> tuple[bool, list[str], list[int], list[int]]:
    """Are the figures equal, which tensors differ, and the batches of calls, of a run and of one without the call."""
    figures, state, computed = life(config)
    with mock.patch.object(dense_call, "why_not", return_value="It is switched off."):
        others, other, none = life(config)
    return figures == others, differences(state, other), computed, none


def busy(**train: Any) -> RunConfig:
    """A cache that grows, two epochs, evaluations in between."""
    given = {"batch_size": 18, "epochs": 2, "eval_every": 4, "log_every": 1, "device": "cpu", **train}
    return make_config(
        None, cache=CacheConfig(ratio=0.02), train=TrainConfig(**given), dense_optimizer=DenseOptimizerConfig(lr=0.01)
    )


@pytest.mark.filterwarnings("ignore::embershard.cache.CacheGrowthWarning")
@pytest.mark.parametrize("ranks", [matrix(1), 2, matrix(4)])
def test_growth_and_evaluations(ranks: int, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue({1: "one_rank", 2: "two_ranks", 4: "four_ranks"}[ranks])
    for is_equal, different, computed, none in pool.run(with_and_without, busy()):
        assert is_equal
        assert different == []
        assert len(computed) > 20
        assert none == []


def test_a_resume_goes_on_as_the_whole_run(two_ranks: RankPool, samples: Path, tmp_path: Path) -> None:
    config = config_of("dlrm, adam", samples)
    config = replace(config, train=replace(config.train, max_steps=own_models.STEPS))
    assert two_ranks.run(own_models.resumed_equals_whole, config, tmp_path / "checkpoints") == [[], []]


# -- controls


def not_divided(self: DenseCall, gradients: tuple[torch.Tensor, ...]) -> None:
    """Give the parameters the ranks' gradients of a loss that is not divided by their number."""
    WRITE(self, tuple(gradient * self._num_ranks for gradient in gradients))


def in_parameters_order(parameters: list[torch.nn.Parameter]) -> list[Any]:
    """Return one bucket with the gradients in the order of the parameters."""
    flat = torch.cat([each.detach().flatten() for each in parameters])
    parts = flat.split([each.numel() for each in parameters])
    views = [part.view_as(each) for part, each in zip(parts, parameters, strict=True)]
    return [dense_call._Bucket(flat, list(range(len(views))), views)]


WRITE = DenseCall.write
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "not divided": (DenseCall, "write", not_divided),
    "in the order of parameters": (dense_call, "_buckets_of", in_parameters_order),
}


def with_a_fault(name: str, config: RunConfig) -> list[str]:
    """Which tensors differ from those of a run without the call."""
    owner, attribute, fault = FAULTS[name]
    with mock.patch.object(owner, attribute, fault):
        _, state, computed = life(config)
    assert computed
    with mock.patch.object(dense_call, "why_not", return_value="It is switched off."):
        return differences(state, life(config)[1])


def test_gradients_that_are_not_divided_are_noticed(two_ranks: RankPool, samples: Path) -> None:
    assert all(two_ranks.run(with_a_fault, "not divided", config_of("dlrm", samples)))


def test_the_order_of_gradients_decides_about_bits_on_four_ranks(
    two_ranks: RankPool, four_ranks: RankPool, samples: Path
) -> None:
    config = config_of("dlrm", samples)
    # So many sums that some differ, with whatever instructions a processor has.
    config = replace(config, model=replace(config.model, over_arch_layer_sizes=(96, 64, 1)))
    assert two_ranks.run(with_a_fault, "in the order of parameters", config) == [[], []]
    assert all(four_ranks.run(with_a_fault, "in the order of parameters", config))
