"""`train.precision` and `train.deterministic`: what the process is set to, when, and that it is set back."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest import mock

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.data import Batch, Schema, open_source
from embershard.distributed import Ranks, Supervision
from embershard.errors import CheckpointError, ConfigError, SetupError
from embershard.extras.verify.command import VerifyJob
from embershard.extras.verify.equivalence import _Runs, compare_with_stock
from embershard.launch.rank import do
from embershard.models import build_model
from embershard.models.config import WITH_TOWERS, Arch
from embershard.models.table_modules import collections_of
from embershard.pipeline.config import LookAheadConfig
from embershard.settings.decoding import decode
from embershard.sharding.config import ShardingConfig
from embershard.sharding.torchrec import cached_embeddings
from embershard.training.arithmetic import arithmetic, check_process, prepare_process, rank_threads
from embershard.training.checkpoint.identity import RULES
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.reports import EvalReport, TrainReport
from embershard.training.trained_run import Scorer, open_trained
from embershard.training.trainer import Trainer
from tests.covering import keep, matrix
from tests.small_runs import small_data, small_run
from tests.unit.models.test_tables import schema_of, settings_of
from tests.unit.training.order_of_sums import Refused

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
DETERMINISTIC = TrainConfig(deterministic=True)
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def make_config(**changes: Any) -> RunConfig:
    train = {"train": TrainConfig(batch_size=50, max_steps=6), **changes}
    return small_run(data=small_data(600, eval_fraction=0.2), look_ahead=LookAheadConfig(lookahead=3), **train)


def large_run() -> RunConfig:
    """Steps of 22 GFLOP."""
    model = {"embedding_dim": 8, "dense_arch_layer_sizes": [512, 8], "over_arch_layer_sizes": [1024, 512, 1]}
    return decode(RunConfig, {"model": model, "train": {"batch_size": 4096}})


@pytest.mark.parametrize(
    ("config", "environment", "cpus", "num_ranks", "count"),
    [
        (RunConfig(), {}, 16, 1, 1),
        (large_run(), {}, 16, 1, 14),
        (large_run(), {}, 16, 4, 4),
        (large_run(), {"OMP_NUM_THREADS": "3", "EMBERSHARD_RANK_CORES": "3"}, 16, 1, 3),  # by the launcher: at most
        (RunConfig(), {"OMP_NUM_THREADS": "3", "EMBERSHARD_RANK_CORES": "3"}, 16, 1, 1),
    ],
)
def test_threads_by_the_size_of_a_step(config, environment, cpus, num_ranks, count, monkeypatch):
    for name in ("OMP_NUM_THREADS", "EMBERSHARD_RANK_CORES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cpus))
    assert rank_threads(config, Ranks(0, num_ranks, 0, num_ranks, CPU)).count == count


@pytest.mark.parametrize("cores_of_launcher", [None, "8"])
def test_the_user_s_number_of_threads_stands(cores_of_launcher, monkeypatch):
    """Also where a rank of another launcher set it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    if cores_of_launcher is not None:
        monkeypatch.setenv("EMBERSHARD_RANK_CORES", cores_of_launcher)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for config in (RunConfig(), large_run()):
        found = rank_threads(config, Ranks(0, 1, 0, 1, CPU))
        assert (found.count, found.why) == (3, "by OMP_NUM_THREADS")


def now() -> tuple[bool, bool, bool, bool]:
    """TF32 of products and of convolutions, deterministic algorithms, and whether new memory is filled."""
    memory: Any = torch.utils.deterministic
    return (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        memory.fill_uninitialized_memory,
    )


OUTSIDE = (False, True, False, True)  # as torch begins


@pytest.mark.parametrize(
    ("settings", "inside"),
    [
        (TrainConfig(), (False, False, False, True)),
        (TrainConfig(precision="tf32"), (True, True, False, True)),
        (TrainConfig(precision="bf16"), (False, False, False, True)),
        (DETERMINISTIC, (False, False, True, False)),
    ],
)
def test_the_process_computes_as_set_and_then_as_before(settings: TrainConfig, inside: tuple[bool, ...]) -> None:
    torch.backends.cudnn.allow_tf32 = True  # a restored one is not the default any more, by torch's other name
    assert now() == OUTSIDE
    with suppress(ZeroDivisionError), arithmetic(settings, CPU):
        assert now() == inside
        raise ZeroDivisionError
    assert now() == OUTSIDE


@pytest.mark.slow
def test_training_and_scoring_compute_as_set(ranks: Ranks) -> None:
    """From the first step of a trainer to its end, and in every forward of an evaluation."""
    before, seen = now(), []
    config = make_config(train=TrainConfig(batch_size=50, max_steps=2, precision="tf32", deterministic=True))
    trainer = Trainer(config, ranks)
    trainer.model.register_forward_pre_hook(lambda *_: seen.append(now()))
    list(trainer.train())
    assert set(seen) == {(True, True, True, False)}
    assert len(seen) > 2  # steps, and batches of the evaluation
    trainer.close()
    assert now() == before


def test_fp16_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r'got "fp16".* rows are trained inside of the backward.*"bf16" is as'):
        decode(RunConfig, {"train": {"precision": "fp16"}})


def test_every_value_of_the_precision_can_be_set() -> None:
    values = get_args(get_type_hints(TrainConfig)["precision"])
    assert {TrainConfig(precision=value).precision for value in values} == {"fp32", "tf32", "bf16", "fp64"}


def test_a_gpu_needs_a_workspace_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    check_process(DETERMINISTIC, CPU)
    check_process(TrainConfig(), GPU)
    with pytest.raises(ConfigError, match=r"not set.*needed :4096:8 or :16:8 .* export CUBLAS_WORKSPACE_CONFIG="):
        check_process(DETERMINISTIC, GPU)
    prepare_process(TrainConfig())
    assert WORKSPACE not in os.environ
    prepare_process(DETERMINISTIC)
    check_process(DETERMINISTIC, GPU)
    os.environ[WORKSPACE] = ":4096:2:16:8"  # torch's own, which its products share
    prepare_process(DETERMINISTIC)
    with pytest.raises(ConfigError, match="got CUBLAS_WORKSPACE_CONFIG=:4096:2:16:8"):
        check_process(DETERMINISTIC, GPU)


def test_ranks_prepare_before_cuda_starts(project_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `verify`, whatever the settings say: the process group takes the GPU."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv(WORKSPACE, "")
    monkeypatch.delenv(WORKSPACE)
    found: list[str | None] = []

    def group(*where: Any, **how: Any) -> Any:
        found.append(os.environ.get(WORKSPACE))
        raise SetupError("no group")

    monkeypatch.setattr("embershard.distributed.process_group", group)
    example = argparse.Namespace(
        config=project_dir / "examples" / "quickstart.toml", overrides=[], trust_code=False, steps=1
    )
    for job in (VerifyJob(make_config(), None, False, 1), VerifyJob.of(example)):
        with pytest.raises(SetupError, match="no group"):
            do(lambda job=job: job)
    assert found == [None, ":4096:8"]


@pytest.mark.slow
def test_verify_always_compares_in_that_mode(ranks: Ranks) -> None:
    config, seen = make_config(), []
    step = Trainer.step

    def noted(trainer: Trainer, batch: Any) -> Any:
        tables = [pool.slots.tbe for pool in cached_embeddings(trainer.model)]
        seen.append((torch.are_deterministic_algorithms_enabled(), {table.stochastic_rounding for table in tables}))
        return step(trainer, batch)

    with mock.patch.object(Trainer, "step", noted), mock.patch.object(_Runs, "_halve", return_value=False):
        assert compare_with_stock(config, ranks, 1).is_equal
    assert {is_on for is_on, _ in seen} == {True}
    assert set().union(*(rounding for _, rounding in seen)) == {False}


@pytest.mark.slow
def test_on_a_cpu_it_changes_no_bit(ranks: Ranks) -> None:
    losses = []
    for deterministic in (False, True):
        trainer = Trainer(make_config(train=TrainConfig(batch_size=50, deterministic=deterministic)), ranks)
        losses.append([])
        for _ in range(6):
            with trainer.upcoming.next() as batch:
                trainer.step(batch)
            losses[-1].append(trainer.losses.monitor.mean())
        trainer.close()
    assert losses[0] == losses[1]


def model_of(arch: Arch) -> tuple[Any, Schema]:
    schema = schema_of(arch)
    model = build_model(settings_of(arch), schema, CPU)
    for _, collection in collections_of(model):
        for table in collection.to_empty(device="cpu").parameters():
            torch.nn.init.normal_(table)
    return model, schema


def batch_of(schema: Schema, count: int = 4) -> Batch:
    names = [feature.name for feature in schema.sparse]
    lengths = torch.ones(len(names) * count, dtype=torch.int64)
    features = KeyedJaggedTensor(names, torch.zeros(len(lengths), dtype=torch.int64), lengths=lengths)
    shape = (count, len(schema.target.labels)) if len(schema.target.labels) > 1 else (count,)
    return Batch(torch.rand(count, len(schema.dense)), features, torch.randint(2, shape).float())


@pytest.mark.parametrize("arch", get_args(Arch))
def test_no_layer_of_a_model_would_be_refused_on_a_gpu(arch: Arch) -> None:
    model, schema = model_of(arch)
    with Refused() as refused:
        model(batch_of(schema))[0].backward()
    assert refused.num_seen > 20
    assert refused.found == set()
    assert arch not in WITH_TOWERS or len(schema.target.labels) == 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", keep({"hot_cold"}, ["sharded", "hot_cold", "rows"]))
def test_no_operation_of_a_run_would_be_refused_on_a_gpu(ranks: Ranks, mode: Any) -> None:
    hot = {"mode": mode, "hot_bytes": 4096} if mode == "hot_cold" else {}
    config = make_config(sharding=ShardingConfig(exchange="rows" if mode == "rows" else "pooled", **hot))
    trainer = Trainer(config, ranks)
    with Refused() as refused:
        list(trainer.train())
    trainer.close()
    assert refused.num_seen > 200
    assert refused.found == set()


def test_what_would_be_refused_is_found() -> None:
    numbers = torch.rand(5)
    with Refused() as refused:
        numbers.cumsum(0)
        numbers.kthvalue(2)
        numbers.median(0)
        torch.bincount(torch.arange(5), weights=numbers)
        torch.arange(5).cumsum(0)
        torch.bincount(torch.arange(5))
    assert refused.found == {"aten::cumsum", "aten::kthvalue", "aten::median", "aten::bincount"}


def test_a_resume_compares_it() -> None:
    assert {RULES[f"train.{name}"].is_compared for name in ("precision", "deterministic")} == {True}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["tf32", matrix("bf16")])
def test_a_run_is_resumed_scored_and_verified_in_its_precision(ranks: Ranks, tmp_path: Path, precision: Any) -> None:
    """On a CPU "tf32" is fp32, bit for bit, and "bf16" is not."""
    short = TrainConfig(batch_size=50, max_steps=4, precision=precision)
    config, losses = make_config(train=short), {}
    for name, settings in (("own", short), ("fp32", replace(short, precision="fp32"))):
        trainer = Trainer(replace(config, train=settings), ranks, tmp_path / name)
        reports = list(trainer.train())
        trainer.close()
        losses[name] = [report.loss for report in reports if isinstance(report, TrainReport)]
    (evaluated,) = (report.quality for report in reports if isinstance(report, EvalReport))
    assert (losses["own"] == losses["fp32"]) == (precision == "tf32")

    scored = {}
    for name in ("own", "fp32"):
        used = replace(config, train=replace(short, precision="fp32" if name == "fp32" else precision))
        trained = open_trained(used, tmp_path / "fp32", ranks)
        scored[name] = Scorer(trained, open_source(config.data), ranks, Supervision()).evaluate().quality
    assert scored["fp32"] == evaluated
    assert (scored["own"] == evaluated) == (precision == "tf32")

    resumed = Trainer(replace(config, train=replace(short, max_steps=6)), ranks, None)
    with pytest.raises(CheckpointError, match=r"train\.precision +\"fp32\""):
        resumed.resume(tmp_path / "fp32" / "step_4")
    resumed.resume(tmp_path / "own" / "step_4")
    list(resumed.train())
    resumed.close()
    assert resumed.steps == 6
    with mock.patch.object(_Runs, "_halve", return_value=False):
        assert compare_with_stock(config, ranks, 2).is_equal
