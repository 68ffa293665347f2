"""After a resume the caches hit as before it: checkpoints have their rows, in terms that any other cache can use."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embershard.cache import CacheConfig
from embershard.distributed import CheckpointConfig, Ranks, complete_checkpoints
from embershard.distributed.checkpoint.load import load_group
from embershard.frequency.config import ProfileConfig
from embershard.pipeline.config import LookAheadConfig
from embershard.training.checkpoint import run_state
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.reports import TrainReport
from embershard.training.trainer import Trainer
from tests.covering import matrix
from tests.small_runs import small_data
from tests.unit.training.test_trainer import make_config

pytestmark = pytest.mark.slow  # whole training runs

BEFORE, AFTER = 150, 100


def config(
    policy: str, lookahead: int = 0, profile: int | None = None, steps: int = BEFORE + AFTER, **cache: Any
) -> RunConfig:
    return make_config(
        data=small_data(50_000, scale=0.002, eval_fraction=0.0),
        cache=CacheConfig(**{"ratio": 0.05, "policy": policy, **cache}),
        look_ahead=LookAheadConfig(lookahead, 1 if lookahead else 2),
        profile=ProfileConfig(samples=profile),
        train=TrainConfig(batch_size=96, max_steps=steps, log_every=10),
        checkpoint=CheckpointConfig(every_steps=BEFORE, at_end=False),
    )


def hit_rates(trainer: Trainer) -> dict[int, float]:
    """Of distinct ids, per 10 steps, by the last of them."""
    found = {each.step: each.hit_rate_unique for each in trainer.train() if isinstance(each, TrainReport)}
    trainer.close()
    return found


def mean(rates: dict[int, float], first: int, last: int) -> float:
    found = [rate for step, rate in rates.items() if first < step <= last]
    return sum(found) / len(found)


def resumed(settings: RunConfig, ranks: Ranks, checkpoint: Path) -> dict[int, float]:
    trainer = Trainer(settings, ranks, None)
    trainer.resume(checkpoint)
    return hit_rates(trainer)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "settings",
    [matrix(config("lfu")), config("lookahead", 20), matrix(config("frequency", profile=3000))],
    ids=["lfu", "look-ahead", "frequency"],
)
def test_the_first_100_steps_hit_as_those_before(ranks, tmp_path, settings, monkeypatch):
    whole = hit_rates(Trainer(settings, ranks, tmp_path))
    (checkpoint,) = complete_checkpoints(tmp_path)
    warm = resumed(settings, ranks, checkpoint)
    assert mean(warm, BEFORE, BEFORE + AFTER) == pytest.approx(mean(whole, BEFORE - AFTER, BEFORE), abs=0.01)
    assert mean(warm, BEFORE, BEFORE + 10) > mean(whole, BEFORE, BEFORE + 10) - 0.02
    monkeypatch.setattr(run_state, "restore_contents", lambda *_: None)
    shorter = replace(settings, train=replace(settings.train, max_steps=BEFORE + 10))
    cold = resumed(shorter, ranks, checkpoint)
    assert mean(cold, BEFORE, BEFORE + 10) < mean(whole, BEFORE, BEFORE + 10) - (0.003 if settings.has_profile else 0.1)


def test_other_caches_begin_with_the_saved_rows(ranks, tmp_path, monkeypatch):
    """Smaller and larger ones, of another policy."""
    hit_rates(Trainer(config("lfu", steps=BEFORE), ranks, tmp_path))
    (checkpoint,) = complete_checkpoints(tmp_path)
    for settings in (
        config("lru", steps=BEFORE + 10, ratio=0.03),
        config("lookahead", 20, steps=BEFORE + 10, ratio=0.08),
    ):
        warm = mean(resumed(settings, ranks, checkpoint), BEFORE, BEFORE + 10)
        with monkeypatch.context() as patched:
            patched.setattr(run_state, "restore_contents", lambda *_: None)
            cold = mean(resumed(settings, ranks, checkpoint), BEFORE, BEFORE + 10)
        assert warm > cold + 0.05


def test_a_run_without_a_cache_saves_no_rows_of_one(ranks, tmp_path):
    trainer = Trainer(make_config(cache=CacheConfig(enabled=False)), ranks, tmp_path)
    for _ in trainer.train():
        pass
    trainer.close()
    assert load_group(complete_checkpoints(tmp_path)[0], "cache") == {}
