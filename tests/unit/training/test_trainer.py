"""The trainer on one rank, in this process: what it says, where it ends, how it resumes."""

from __future__ import annotations

import dataclasses
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from embershard.cache import CacheConfig
from embershard.data import open_source
from embershard.distributed import CheckpointConfig, Ranks, complete_checkpoints, rng_state
from embershard.distributed.checkpoint.chain import Chain
from embershard.errors import CheckpointError, FailedSaveError, InvalidCheckpointError
from embershard.frequency import FrequencyProfile
from embershard.frequency.config import ProfileConfig
from embershard.models import ModelConfig
from embershard.models.config import FACTORIZED
from embershard.pipeline.config import LookAheadConfig
from embershard.training import optimizers
from embershard.training.build import find_profile
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig, ScheduleConfig
from embershard.training.reports import EvalReport, FailedSaveReport, Report, SaveReport, TrainReport
from embershard.training.trainer import Trainer
from tests.covering import matrix
from tests.small_runs import small_data, small_model, small_run
from tests.unit.distributed.checkpoints import make_manifest_right

pytestmark = pytest.mark.slow  # whole training runs


def make_config(**changes: Any) -> RunConfig:
    parts = {
        "cache": CacheConfig(ratio=0.3, policy="lru"),
        "schedule": ScheduleConfig(warmup_steps=5),
        "train": TrainConfig(batch_size=100, log_every=1, epochs=2),
        "checkpoint": CheckpointConfig(every_steps=6, at_end=False),
    }
    return small_run(**{**parts, **changes})


def run(config: RunConfig, ranks: Ranks, folder: Path | None, start: Path | None = None) -> list[Report]:
    trainer = Trainer(config, ranks, folder)
    if start is not None:
        trainer.resume(start)
    reports = list(trainer.train())
    trainer.close()
    return reports


def losses(reports: list[Report]) -> dict[int, float]:
    return {report.step: report.loss for report in reports if isinstance(report, TrainReport)}


def test_reports_come_when_they_are_due(ranks, tmp_path):
    train = TrainConfig(batch_size=100, epochs=2, log_every=4, eval_every=3)
    checkpoint = CheckpointConfig(every_steps=6, at_end=False, asynchronous=False)
    reports = run(make_config(train=train, checkpoint=checkpoint), ranks, tmp_path)
    said = [(type(report), report.step) for report in reports]
    assert said == [
        (EvalReport, 3), (TrainReport, 4), (SaveReport, 6), (EvalReport, 6), (TrainReport, 8), (EvalReport, 9),
        (TrainReport, 12), (SaveReport, 12), (EvalReport, 12),
        (EvalReport, 15), (TrainReport, 16), (TrainReport, 18), (SaveReport, 18), (EvalReport, 18),
    ]  # fmt: skip
    last = [report for report in reports if isinstance(report, TrainReport)][-1]
    assert (last.epoch, last.samples) == (1, 1800)
    assert 0 < last.hit_rate_unique < 1  # of the last batch; that of the one before came in before the last report
    assert 0 < reports[1].hit_rate_unique < reports[1].hit_rate_lookups < 1
    assert all(report.quality["samples"] == 100 for report in reports if isinstance(report, EvalReport))


@pytest.mark.parametrize(
    ("arch", "policy"),
    [
        ("deepfm", "static"),
        *(matrix(arch, "lookahead") for arch in FACTORIZED),
        *(matrix(arch, "static") for arch in FACTORIZED if arch != "deepfm"),
    ],
)
def test_a_model_with_a_weight_per_id_trains_as_without_a_cache(ranks, arch, policy):
    """Also with a cache that keeps to its profile, whose rows leave after their batch."""
    model = ModelConfig(arch, 4)
    look_ahead, profile = LookAheadConfig(0 if policy == "static" else 8), ProfileConfig(samples=500)
    cached = make_config(
        cache=CacheConfig(ratio=0.2, policy=policy), model=model, look_ahead=look_ahead, profile=profile
    )
    resident = make_config(cache=CacheConfig(enabled=False), model=model)
    found, expected = run(cached, ranks, None), run(resident, ranks, None)
    assert losses(found) == losses(expected)
    rates = [report.hit_rate_unique for report in found if isinstance(report, TrainReport)]
    assert 0 < min(rates) < 1, "rows came and went"


@pytest.mark.parametrize(
    ("optimizers", "cached"),
    [
        (("adagrad", "adagrad"), True),
        *(matrix(pair, cached) for pair in (("rowwise_adagrad", "adam"), ("sgd", "sgd")) for cached in (True, False)),
        matrix(("adagrad", "adagrad"), False),
    ],
)
def test_a_resumed_run_is_the_same_run(ranks, tmp_path, optimizers, cached):
    embedding, dense = optimizers
    config = make_config(
        cache=CacheConfig(ratio=0.3, policy="lfu", enabled=cached),
        embedding_optimizer=EmbeddingOptimizerConfig(kind=embedding, lr=0.1),
        dense_optimizer=DenseOptimizerConfig(kind=dense, lr=0.01),
    )
    whole = run(config, ranks, tmp_path / "a")
    start = complete_checkpoints(tmp_path / "a")[0]
    with mock.patch.object(Chain, "metadata", autospec=True, side_effect=Chain.metadata) as reads:
        resumed = run(config, ranks, tmp_path / "b", start)
    assert reads.call_count == 2  # for sizes, and by the reader of all tensors
    assert start.name == "step_12"
    assert losses(resumed) == {step: loss for step, loss in losses(whole).items() if step > 12}
    assert isinstance(whole[-1], EvalReport)
    assert whole[-1].quality == resumed[-1].quality


@pytest.mark.parametrize("kind", ["adam", *(matrix(kind) for kind in ("sgd", "adagrad", "adamw"))])
def test_a_resumed_run_with_fused_dense_kernels_is_the_same_run(ranks, tmp_path, monkeypatch, kind):
    """As on a GPU, with torch's fused kernels for CPUs; also from a checkpoint of a run without them, as of a CPU."""
    config = make_config(
        dense_optimizer=DenseOptimizerConfig(kind=kind, lr=0.01, clip_norm=0.5),
        schedule=ScheduleConfig(warmup_steps=5, decay="linear", decay_start=8, decay_steps=40),
    )
    plain = losses(run(config, ranks, tmp_path / "plain"))
    monkeypatch.setattr(optimizers, "_are_on_gpu", lambda parameters: True)
    whole = losses(run(config, ranks, tmp_path / "a"))
    resumed = losses(run(config, ranks, tmp_path / "b", complete_checkpoints(tmp_path / "a")[0]))
    assert resumed == {step: loss for step, loss in whole.items() if step > 12}
    moved = losses(run(config, ranks, tmp_path / "c", complete_checkpoints(tmp_path / "plain")[0]))
    assert moved == pytest.approx({step: loss for step, loss in plain.items() if step > 12}, rel=1e-5)
    assert whole != plain or kind == "sgd", "other kernels"


@pytest.mark.matrix
@pytest.mark.parametrize("lookahead", [matrix(0), 64])
def test_a_trainer_goes_back_to_a_checkpoint_in_mid_run(ranks, tmp_path, lookahead):
    """With batches ahead, whose rows are on the device."""
    config = make_config(
        cache=CacheConfig(ratio=0.3, policy="lfu"),
        look_ahead=LookAheadConfig(lookahead),
        embedding_optimizer=EmbeddingOptimizerConfig(kind="rowwise_adagrad", lr=0.1),
    )
    whole = losses(run(config, ranks, tmp_path / "a"))
    trainer = Trainer(config, ranks, tmp_path / "b")
    for _ in trainer.train():
        if complete_checkpoints(tmp_path / "b"):
            break
    for _ in range(2):
        with trainer.upcoming.next() as batch:
            trainer.step(batch)
    start = complete_checkpoints(tmp_path / "b")[0]
    trainer.resume(start)
    again = losses(trainer.train())
    trainer.close()
    assert again
    assert again == {step: loss for step, loss in whole.items() if step > int(start.name.removeprefix("step_"))}


@pytest.mark.matrix
def test_a_checkpoint_without_optimizer_states_would_be_noticed(ranks, tmp_path, monkeypatch):
    config = make_config(embedding_optimizer=EmbeddingOptimizerConfig(kind="adagrad", lr=0.1))
    whole = run(config, ranks, tmp_path)
    forgetful = Trainer(config, ranks, None)
    fused = forgetful.model.fused_optimizer
    monkeypatch.setattr(type(fused), "load_state_dict", lambda self, state: None)
    monkeypatch.setattr("embershard.training.checkpoint.run_state.load_tensors", _leave_out_embedding_optimizer)
    forgetful.resume(complete_checkpoints(tmp_path)[0])
    resumed = losses(list(forgetful.train()))
    assert resumed[18] != losses(whole)[18]


def _leave_out_embedding_optimizer(checkpoint: Path, tensors: dict[str, Any]) -> None:
    from embershard.distributed import load_tensors

    tensors = dict(tensors)
    tensors.pop("embedding_optimizer")
    load_tensors(checkpoint, tensors)


def test_other_tables_are_refused_by_name(ranks, tmp_path):
    run(make_config(), ranks, tmp_path)
    other = make_config(data=small_data(scale=0.001))
    trainer = Trainer(other, ranks, None)
    with pytest.raises(CheckpointError, match=r"feature '\w+' has \d+ rows x 4 in it, \d+ rows x 4 in this run"):
        trainer.resume(complete_checkpoints(tmp_path)[0])


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda scalars: {name: value for name, value in scalars.items() if name != key}


def _with(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda scalars: {**scalars, key: value}


CPU_STATE = rng_state(torch.device("cpu"))
DAMAGE: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    *(
        (_without(key), f"{key}: is missing, needed")
        for key in ("step", "samples", "stream", "tables", "settings", "world_size", "rng")
    ),
    (lambda scalars: [scalars], "it holds a list, needed an object"),
    (lambda scalars: None, "it holds a NoneType, needed an object"),
    (_with("step", "12"), "step: got '12', needed integer"),
    (_with("step", True), "step: got True, needed integer"),
    (_with("step", -1), "step: got -1, needed at least 0"),
    (_with("step", 5), "step: got 5, needed that of step_6"),
    (_with("step", 10**12), r"step: got 1000000000000, needed at most 600 \(samples\)"),
    (_with("samples", -1), "samples: got -1, needed at least 0"),
    (_with("samples", 10**30), r"samples: got 10{30}, needed an integer of 64 bits, below 2\^63"),
    (_with("samples", 1200.0), "samples: got 1200.0, needed integer"),
    (_with("stream", [0, 0, 0]), r"stream: got \[0, 0, 0\], needed section"),
    (_with("stream", {"epoch": 0, "seed": 0}), "stream.global_sample: got 'nothing', needed integer"),
    (_with("stream", {"epoch": None, "global_sample": 0, "seed": 0}), "stream.epoch: got None, needed integer"),
    (_with("stream", {"epoch": 0, "global_sample": -5, "seed": 0}), "stream.global_sample: got -5, needed at least 0"),
    (_with("stream", {"epoch": 10**12, "global_sample": 0, "seed": 0}), "stream.epoch: got 10{12}, needed at"),
    (_with("tables", "all"), "tables: got 'all', needed section"),
    (_with("tables", {"cat_0": 7}), r"tables.cat_0: got 7, needed \[integer, integer\]"),
    (_with("tables", {"cat_0": [7]}), r"tables.cat_0: got \[7\], needed \[integer, integer\]"),
    (_with("settings", None), "settings: got None, needed section"),
    (_with("world_size", 0), "world_size: got 0, needed at least 1"),
    (_with("world_size", 2), r"rng: got '1 ranks', needed 2 \(world_size\)"),
    (_with("rng", []), r"rng: got '0 ranks', needed 1 \(world_size\)"),
    (_with("rng", {"cpu": ""}), r"rng: got {'cpu': ''}, needed \[section, ...\]"),
    (_with("rng", [CPU_STATE["cpu"]]), r"rng\[0\]: got '.{70,80}, needed section"),
    (_with("rng", [{"cuda": ""}]), r"rng\[0\]: got \['cuda'\], needed a state for 'cpu'"),
    (_with("rng", [{"cpu": 5}]), r"rng\[0\].cpu: got 5, needed text"),
    (_with("rng", [{"cpu": "AAAA"}]), r"rng\[0\].cpu: got 'AAAA', needed a generator's state in base64"),
    (_with("rng", [{"cpu": "A" * len(CPU_STATE["cpu"])}]), r"rng\[0\].cpu: got 'A+, needed a generator's state"),
    (_with("rng", [{**CPU_STATE, "cuda": "*"}]), r"rng\[0\].cuda: got '\*', needed a generator's state"),
]


def test_a_checkpoint_with_damaged_scalars_is_refused_by_name(ranks, tmp_path):
    """Before anything of it is loaded: the trainer goes on as if it had not been asked to resume."""
    train = TrainConfig(batch_size=100, max_steps=6, log_every=1)
    whole = losses(run(make_config(train=train), ranks, tmp_path))
    (checkpoint,) = complete_checkpoints(tmp_path)
    path = checkpoint / "scalars.json"
    sound = json.loads(path.read_text())
    trainer = Trainer(make_config(train=train), ranks, None)
    reports = trainer.train()
    first = [next(reports) for _ in range(2)]
    for damage, said in DAMAGE:
        path.write_text(json.dumps(damage(dict(sound))))
        make_manifest_right(checkpoint)
        with pytest.raises(InvalidCheckpointError, match=rf"step_6: scalars\.json: {said}"):
            trainer.resume(checkpoint)
    for text in ("", "{", "[" * 100_000, "\x00", "9" * 5000):
        path.write_text(text)
        make_manifest_right(checkpoint)
        with pytest.raises(InvalidCheckpointError, match=r"step_6: scalars\.json: cannot be read"):
            trainer.resume(checkpoint)
    for key, value in (("global_sample", 10**12), ("global_sample", 901), ("global_sample", 0)):
        path.write_text(json.dumps({**sound, "stream": {**sound["stream"], key: value}}))
        make_manifest_right(checkpoint)
        with pytest.raises(CheckpointError, match=rf"at sample {value} of epoch 0, .* data have 900 samples"):
            trainer.resume(checkpoint)
    assert losses([*first, *reports]) == whole
    trainer.close()


def test_max_steps_ends_a_run_within_an_epoch(ranks):
    reports = run(make_config(train=TrainConfig(batch_size=100, max_steps=3, log_every=10)), ranks, None)
    assert [(type(report), report.step) for report in reports] == [(TrainReport, 3), (EvalReport, 3)]


def test_nothing_held_out_is_nothing_evaluated(ranks):
    data = small_data(300, eval_fraction=0.0)
    reports = run(make_config(data=data, train=TrainConfig(batch_size=100, log_every=10)), ranks, None)
    assert [type(report) for report in reports] == [TrainReport]


def test_saving_needs_a_folder(ranks):
    with pytest.raises(CheckpointError, match="no folder"):
        Trainer(make_config(), ranks, None).save()


def _without_space(*_: Any, **__: Any) -> None:
    raise FailedSaveError("no space")


@pytest.mark.matrix
def test_training_goes_on_after_a_failed_save_if_asked(ranks, tmp_path, monkeypatch):
    saving = {"every_steps": 6, "on_failed_save": "continue", "at_end": False}
    config = make_config(checkpoint=CheckpointConfig(**saving))
    whole = run(config, ranks, tmp_path / "a")
    monkeypatch.setattr("embershard.training.checkpoint.run_state.save_checkpoint", _without_space)
    reports: list[Report] = []
    with pytest.raises(FailedSaveError, match="no space"):  # at the end
        reports.extend(Trainer(config, ranks, tmp_path / "b").train())
    assert losses(reports) == losses(whole)
    failed = [report for report in reports if isinstance(report, FailedSaveReport)]
    assert [(report.step, report.reason) for report in failed] == [(6, "no space"), (12, "no space")]
    assert reports[-1].step == 18
    assert isinstance(reports[-1], EvalReport)
    stopping = make_config(checkpoint=CheckpointConfig(**{**saving, "on_failed_save": "stop"}))
    with pytest.raises(FailedSaveError, match="no space"):
        run(stopping, ranks, tmp_path / "b")


def test_a_disk_without_space_is_found_before_the_model_is_built(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr("embershard.training.trainer.build_sharded_model", None)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100_000))
    with pytest.raises(CheckpointError, match=r"97\.66 KiB are free \(3 checkpoints"):
        Trainer(make_config(), ranks, tmp_path)


def test_the_expected_size_is_that_of_a_checkpoint(ranks, tmp_path, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(
        "embershard.training.fit.machine_limits.check_disk", lambda folder, size, *_, **__: asked.append(size)
    )
    big = make_config(
        data=small_data(scale=0.01),
        model=small_model(16),
        embedding_optimizer=EmbeddingOptimizerConfig(kind="adagrad"),
        train=TrainConfig(batch_size=100, max_steps=6, log_every=6),
    )
    run(big, ranks, tmp_path)
    written = sum(path.stat().st_size for path in (tmp_path / "step_6").iterdir())
    assert 0.95 * asked[0] < written < 1.02 * asked[0]  # the caches are not full yet


def test_a_profile_is_counted_where_the_policy_needs_one(tmp_path):
    source = open_source(make_config().data)

    def found(profile: ProfileConfig, **cache: Any) -> FrequencyProfile | None:
        return find_profile(make_config(profile=profile, cache=CacheConfig(ratio=0.3, **cache)), source)

    counted = found(ProfileConfig(samples=500), policy="frequency")
    assert {int(counts.sum()) for counts in counted.counts.values()} == {500}
    counted.save(tmp_path / "p.npz")
    read = found(ProfileConfig(path=str(tmp_path / "p.npz")))
    assert all(torch.equal(read.counts[name], counts) for name, counts in counted.counts.items())
    assert found(ProfileConfig(), policy="lru") is None
    assert found(ProfileConfig(), policy="frequency", enabled=False) is None


def test_a_counted_profile_is_gone_once_the_model_is_built(ranks, monkeypatch):
    found = []

    def find(*arguments: Any) -> FrequencyProfile | None:
        profile = find_profile(*arguments)
        assert profile is not None
        found.append(weakref.ref(profile))
        return profile

    monkeypatch.setattr("embershard.training.trainer.find_profile", find)
    cache = CacheConfig(ratio=0.3, policy="frequency")
    trainer = Trainer(make_config(cache=cache, profile=ProfileConfig(samples=500)), ranks, None)
    gc.collect()
    assert [profile() for profile in found] == [None]
    trainer.close()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"table_dtype": "fp16"}}, r'model\.table_dtype +"fp32" +"fp16"'),
        matrix({"dense_optimizer": {"kind": "sgd"}}, r'dense_optimizer\.kind +"adam" +"sgd"'),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(ranks, tmp_path, changes, named):
    """Such tensors would load silently: rounded weights, or an optimizer's state dropped."""
    config = make_config(dense_optimizer=DenseOptimizerConfig(kind="adam"))
    run(config, ranks, tmp_path)
    other = {key: dataclasses.replace(getattr(config, key), **values) for key, values in changes.items()}
    with pytest.raises(CheckpointError, match=named):
        run(dataclasses.replace(config, **other), ranks, None, complete_checkpoints(tmp_path)[0])
