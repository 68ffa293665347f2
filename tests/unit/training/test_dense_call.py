"""The dense part of a step as one call, on one rank: which models it takes, and what a program's hooks see of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from embershard.cache import CacheConfig
from embershard.distributed import Ranks
from embershard.models import ModelConfig
from embershard.training import dense_call
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.dense_call import DenseCall, why_not
from embershard.training.trainer import Trainer
from tests.ranks import own_models
from tests.small_runs import small_model, small_run
from tests.unit.training.poisoned import state_of

pytestmark = pytest.mark.slow  # whole training runs

TRAIN = TrainConfig(batch_size=50, max_steps=4, log_every=1, device="cpu")


def config_of(**changes: Any) -> RunConfig:
    return small_run(**{"train": TRAIN, **changes})


def trained(config: RunConfig, ranks: Ranks, prepare: Callable[[Trainer], Any] = lambda _: None) -> tuple[Any, int]:
    """Return the state that a run ends with, and how many of its batches were calls."""
    compute, count = DenseCall.compute, 0

    def counted(self: DenseCall, rows: torch.Tensor, batch: Any) -> Any:
        nonlocal count
        count += 1
        return compute(self, rows, batch)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(DenseCall, "compute", counted))
        trainer = Trainer(config, ranks)
        stack.callback(trainer.close)
        prepare(trainer)
        for _ in trainer.train():
            pass
        return state_of(trainer), count


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def hooked(trainer: Trainer) -> None:
    trainer.model.module.model.over_arch.register_forward_hook(lambda *_: None)


def frozen(trainer: Trainer) -> None:
    trainer.model.module.model.dense_arch.requires_grad_(False)


CASES: dict[str, tuple[RunConfig, Callable[[Trainer], Any], str]] = {
    "a DLRM": (config_of(), lambda _: None, ""),
    "DeepFM": (config_of(model=ModelConfig("deepfm", 4, over_arch_layer_sizes=(6, 1))), lambda _: None, ""),
    "stock": (config_of(cache=CacheConfig(enabled=False)), lambda _: None, "cache.enabled is false: "),
    "pieces": (config_of(train=replace(TRAIN, accumulate=2)), lambda _: None, "train.accumulate: "),
    "dropout": (config_of(model=replace(small_model(), dropout=0.1)), lambda _: None, "model.model.over_arch"),
    "fp64": (config_of(train=replace(TRAIN, precision="fp64")), lambda _: None, "model.model has hooks"),
    "one's own": (own_models.own_config(), lambda _: None, "The model is one's own, "),
    "a hook": (config_of(), hooked, "model.model.over_arch has hooks"),
    "a frozen layer": (config_of(), frozen, "The dense optimizer trains tables, too, or "),
}


@pytest.mark.parametrize("name", CASES)
def test_a_reason_in_words_says_what_is_no_call(name: str, ranks: Ranks) -> None:
    """Such a run trains nevertheless, and without the call."""
    config, prepare, reason = CASES[name]
    reasons = list[str]()

    def noted(*given: Any) -> str:
        reasons.append(why_not(*given))
        return reasons[-1]

    with mock.patch.object(dense_call, "why_not", noted):
        _, count = trained(replace(config, train=replace(config.train, max_steps=4)), ranks, prepare)
    assert count == (0 if reason else 4)
    assert all(each.startswith(reason) and bool(each) == bool(reason) for each in reasons), reasons
    assert len(reasons) == (config.train.accumulate == 1), "it is asked for once"


def test_hooks_on_the_model_see_each_batch_once(ranks: Ranks) -> None:
    """Those on its wrapper, and of programs that hook layers while it trains."""
    seen = list[str]()

    def note(name: str) -> None:
        seen.extend([name] * torch.is_grad_enabled())  # evaluations are none of them

    def hook(trainer: Trainer) -> None:
        trainer.model.register_forward_hook(lambda *_: note("model"))
        layers = trainer.model.module
        step = trainer.step

        def after_the_first(batch: Any) -> Any:
            found = step(batch)
            if trainer.steps == 1:
                layers.model.inter_arch.register_forward_hook(lambda *_: note("interaction"))
            return found

        trainer.step = after_the_first  # type: ignore[method-assign]

    state, count = trained(config_of(), ranks, hook)
    assert count == 4
    assert seen == ["model", *["interaction", "model"] * 3]
    assert same(state, trained(config_of(), ranks)[0])


@pytest.mark.parametrize("frozen", ["some", "all"])
def test_frozen_tables_stay_and_the_rest_trains(frozen: str, ranks: Ranks) -> None:
    names = [f"C{number}" for number in range(1, 27)]
    config = config_of(model=replace(small_model(), frozen=tuple(names if frozen == "all" else names[:3])))
    state, count = trained(config, ranks)
    assert count == 4
    with mock.patch.object(dense_call, "why_not", return_value="It is switched off."):
        other, none = trained(config, ranks)
    assert none == 0
    assert same(state, other)
    assert not same(state, trained(config_of(), ranks)[0]), "the control: all tables are trained"


def test_nothing_of_it_stays_on_the_model(ranks: Ranks) -> None:
    """A program that forwards the model itself, with gradients or without, has DDP."""
    trainer = Trainer(config_of(look_ahead=replace(config_of().look_ahead, lookahead=0)), ranks)
    with trainer.upcoming.next() as batch:
        trainer.step(batch)
        with mock.patch.object(DenseCall, "compute", side_effect=AssertionError("not in the trainer")):
            loss, _ = trainer.model(batch)
            loss.backward()
    assert all(each.grad is not None for each in trainer.optimizers.dense_parameters.values())
    trainer.close()
