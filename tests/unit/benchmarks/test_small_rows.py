"""The comparison of types of host rows: each trains what it says, and differences are of equal seeds."""

from __future__ import annotations

import argparse

import pytest

from benchmarks import small_rows, small_rows_step
from benchmarks.common import single_process
from embershard.data import DataConfig, SyntheticConfig
from embershard.distributed import process_group
from embershard.training.config import RunConfig, TrainConfig
from tests.small_runs import small_model, small_run


def make_run() -> RunConfig:
    data = DataConfig(synthetic=SyntheticConfig(num_samples=600, scale=0.0001), num_workers=0, eval_fraction=0.3)
    return small_run(data=data, model=small_model(), train=TrainConfig(batch_size=50, max_steps=4))


def test_types_become_settings() -> None:
    run = small_rows.with_type(make_run(), "int8:0.03", seed=5)
    assert (run.cache.host_dtype, run.cache.full_rows, run.train.seed, run.data.seed) == ("int8", 0.03, 5, 5)
    assert run.has_profile == small_rows.with_type(make_run(), "fp32", seed=5).has_profile is True


def test_the_interval_is_students() -> None:
    found = small_rows.interval([0.001, 0.003])
    assert found["mean_difference"] == pytest.approx(0.002)
    assert found["interval_95"] == pytest.approx(12.706 * 0.001, rel=1e-3)


@pytest.mark.slow
def test_differences_are_of_the_same_seed() -> None:
    options = argparse.Namespace(types=["fp32", "fp16"], first_seed=1, seeds=1)
    with process_group("cpu") as ranks:
        found = small_rows.measure(make_run(), ranks, options)
    assert found["fp32"]["mean_difference"] == 0
    fp32, fp16 = (found[kind]["runs"][0]["host_bytes"] for kind in ("fp32", "fp16"))
    assert fp16 < fp32


@pytest.mark.matrix
@pytest.mark.slow
def test_types_are_timed_on_the_same_batches() -> None:
    options = argparse.Namespace(
        dims=[8], ratio=0.05, full_rows=0.01, batch_size=64, scale=0.002, profile_batches=4, warmup_batches=2, batches=3
    )
    with single_process() as device:
        found = small_rows_step.measure(options, device)["dim_8"]
    assert found["rows_per_batch"]["fills"] > 0
    for part in ("whole_step", "embeddings_alone"):
        assert found[part].keys() == {
            *(f"{kind}_{unit}" for kind in ("fp32", "fp16", "int8") for unit in ("ms", "processor_ms")),
            *(f"{kind}_over_fp32{unit}" for kind in ("fp16", "int8") for unit in ("", "_processor")),
        }
