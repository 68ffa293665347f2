"""A resume compares all that changes data or arithmetic, shows the differences, and goes on when it is asked to."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from embershard.cache import CacheConfig
from embershard.data import CriteoConfig, DataConfig
from embershard.data.sources.input_file import FileIdentity
from embershard.distributed import CheckpointConfig, Ranks, complete_checkpoints
from embershard.errors import CheckpointError, ConfigError
from embershard.models import ModelConfig
from embershard.models.config import FACTORIZED
from embershard.settings.decoding import decode
from embershard.settings.files import apply_override, describe
from embershard.settings.resume_rules import Free, rules_of
from embershard.training.checkpoint.identity import (
    BATCH,
    ORDER,
    RULES,
    Change,
    check_keys,
    identity_of,
    labels_change,
    refusal,
)
from embershard.training.checkpoint.saved_run import _with_global_batch
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.optimizers import DenseOptimizerConfig, ScheduleConfig
from embershard.training.trained_run import open_trained
from embershard.training.trainer import Trainer
from tests.covering import keep
from tests.unit.distributed.checkpoints import make_manifest_right
from tests.unit.training.test_trainer import losses, make_config

pytestmark = pytest.mark.slow

NUM_LINES = 300


def write_clicks(path: Path, first: int = 0, num_lines: int = NUM_LINES) -> None:
    lines = []
    for number in range(first, first + num_lines):
        cells = [str(number % 2), *(str(number + i) for i in range(13)), *(f"{number * 31 + i:x}" for i in range(26))]
        lines.append("\t".join(cells) + "\n")
    path.write_text("".join(lines))


@pytest.fixture(scope="module")
def original(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """A run on two files, saved at step 4 of its first epoch."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "data").mkdir()
    write_clicks(folder / "data" / "day_0")
    write_clicks(folder / "data" / "day_1", NUM_LINES)
    config = make_config(
        data=DataConfig(
            kind="criteo", path=str(folder / "data"), criteo=CriteoConfig(num_rows=50), chunk_rows=64, num_workers=0
        ),
        cache=CacheConfig(enabled=False),
        train=TrainConfig(batch_size=60, max_steps=8, log_every=1),
        checkpoint=CheckpointConfig(every_steps=4, at_end=False),
    )
    trainer = Trainer(config, ranks, folder / "checkpoints")
    for _ in trainer.train():
        pass
    trainer.close()
    return config, complete_checkpoints(folder / "checkpoints")[0]


def in_section(section: str, **values: Any) -> Callable[[RunConfig, Path], RunConfig]:
    return lambda config, _: replace(config, **{section: replace(getattr(config, section), **values)})


def in_criteo(**values: Any) -> Callable[[RunConfig, Path], RunConfig]:
    return lambda config, _: replace(config, data=replace(config.data, criteo=replace(config.data.criteo, **values)))


def with_files(**files: int) -> Callable[[RunConfig, Path], RunConfig]:
    """Other files in place of the run's: their names, and the number of their first sample."""

    def change(config: RunConfig, folder: Path) -> RunConfig:
        for name, first in files.items():
            write_clicks(folder / name, first)
        return replace(config, data=replace(config.data, path=str(folder)))

    return change


#: The nine changes that earlier versions trained on with, and others like them: the key, and the line of the table.
SILENT = {
    "id_mapping": (in_criteo(id_mapping="hash"), "data.criteo.id_mapping", '"modulo"  "hash"'),
    "dense_transform": (in_criteo(dense_transform="none"), "data.criteo.dense_transform", '"log1p"  "none"'),
    "chunks": (in_section("data", chunk_rows=32), "data.chunk_rows", "64  32"),
    "window": (in_section("data", shuffle_window=2), "data.shuffle_window", "64  2"),
    "shuffle": (in_section("data", shuffle=False), "data.shuffle", "true  false"),
    "eval_fraction": (in_section("data", eval_fraction=0.2), "data.eval_fraction", "0.1  0.2"),
    "split": (in_section("data", split="random"), "data.split", '"tail"  "random"'),
    "seed": (in_section("data", seed=5), "data.seed", "0  5"),
    "batch": (in_section("train", batch_size=30), BATCH, "60  30"),
    "schedule": (in_section("schedule", warmup_steps=50), "schedule.warmup_steps", "5  50"),
    "learning rate": (in_section("dense_optimizer", lr=0.5), "dense_optimizer.lr", "0.001  0.5"),
    "clip_norm": (in_section("dense_optimizer", clip_norm=1.0), "dense_optimizer.clip_norm", "none  1.0"),
    "precision": (in_section("train", precision="bf16"), "train.precision", '"fp32"  "bf16"'),
    "replaced": (
        with_files(day_0=0, day_1=5000),
        "data.files",
        r"day_1: [\d,]+ bytes, sha256 \w+  day_1: [\d,]+ bytes",
    ),
    "order": (with_files(day_0=NUM_LINES, day_1=0), "data.files", r"day_0: .* bytes, sha256 \w+  day_0: .* bytes"),
    "more files": (with_files(day_0=0, day_1=NUM_LINES, day_2=0), "data.files", "no file  day_2: .* bytes"),
    "renamed": (with_files(day_1=0, day_2=NUM_LINES), "data.files", "day_0: .* bytes, sha256 .*  no file"),
}


@pytest.mark.parametrize("name", keep(["id_mapping", "batch", "replaced"], SILENT))
def test_a_change_is_refused_with_a_diff_and_allowed_on_request(ranks, original, tmp_path, name):
    config, checkpoint = original
    change, key, line = SILENT[name]
    trainer = Trainer(change(config, tmp_path), ranks, None)
    with pytest.raises(CheckpointError) as refused:
        trainer.resume(checkpoint)
    message = str(refused.value)
    pattern = re.compile("  +".join(["", re.escape(key), *line.split("  ")]) + "(, sha256 .*)?$", re.MULTILINE)
    assert pattern.search(message), message
    assert f"allow it: --allow-change {key}" in message
    assert trainer.steps == 0
    _, comparison = trainer.resume(checkpoint, allow_changes=[key])
    assert {each.key for each in comparison.changes} == {key} == {each.key for each in trainer.state.changes}
    assert comparison.notes[0].startswith(f"Changed, as allowed: {key} was ")
    assert len(losses(list(trainer.train()))) == 4
    assert trainer.steps == 8
    trainer.close()


def test_only_what_was_allowed_may_change(ranks, original):
    config, checkpoint = original
    changed = replace(config, data=replace(config.data, shuffle=False), schedule=ScheduleConfig(warmup_steps=9))
    trainer = Trainer(changed, ranks, None)
    with pytest.raises(CheckpointError, match=r"schedule\.warmup_steps") as refused:
        trainer.resume(checkpoint, allow_changes=["data.shuffle"])
    assert "data.shuffle" not in str(refused.value)
    assert "--set schedule.warmup_steps=5" in str(refused.value)
    trainer.close()


def test_the_samples_per_step_stay_on_ranks_after_other_ranks(tmp_path):
    """A run of 128 samples on one rank, saved on two: it goes on with 128 on four, and on three it cannot."""
    saved = SimpleNamespace(world_size=2, rank_batch_size=128)
    config = RunConfig(train=TrainConfig(batch_size=128))
    kept = _with_global_batch(tmp_path, config, 128, saved, ranks=4)
    assert (kept.train.batch_size, kept.train.global_batch_size) == (None, 128)
    with pytest.raises(CheckpointError, match="3 ranks cannot share them evenly"):
        _with_global_batch(tmp_path, config, 128, saved, ranks=3)
    for changed in (96, 64):  # compared, and refused: also one that makes 128 on two ranks
        other = RunConfig(train=TrainConfig(batch_size=changed))
        assert _with_global_batch(tmp_path, other, 128, saved, ranks=4) == other
    once_resumed = SimpleNamespace(world_size=4, rank_batch_size=128)  # on 4 ranks after 1: 32 samples each
    assert _with_global_batch(tmp_path, config, 128, once_resumed, ranks=4) == kept
    assert _with_global_batch(tmp_path, config, 128, once_resumed, ranks=1) == config, "the batch is the saved one"
    earlier = SimpleNamespace(world_size=2, rank_batch_size=None)
    assert _with_global_batch(tmp_path, other, 128, earlier, ranks=4).train.global_batch_size == 128


def test_the_advice_for_another_batch_is_accepted():
    advice = refusal([Change(BATCH, "128", "64")])
    values: dict[str, Any] = {"train": {"batch_size": 32}}
    for override in re.findall(r"--set (\S+?=\w+)", advice):
        apply_override(RunConfig, values, override)
    train = decode(RunConfig, values).train
    assert (train.batch_size, train.global_batch_size) == (None, 128)


def test_a_change_is_remembered_by_the_checkpoints_after_it(ranks, original, tmp_path):
    config, checkpoint = original
    trainer = Trainer(replace(config, dense_optimizer=DenseOptimizerConfig(lr=0.5)), ranks, tmp_path)
    trainer.resume(checkpoint, allow_changes=["dense_optimizer.lr"])
    for _ in trainer.train():
        pass
    trainer.resume(tmp_path / "step_8")
    assert [dataclasses.astuple(each) for each in trainer.state.changes] == [("dense_optimizer.lr", "0.001", "0.5", 4)]
    trainer.close()


def test_the_same_data_may_be_elsewhere(ranks, original, tmp_path):
    config, checkpoint = original
    trainer = Trainer(with_files(day_0=0, day_1=NUM_LINES)(config, tmp_path), ranks, None)
    _, comparison = trainer.resume(checkpoint)
    assert (comparison.changes, comparison.notes) == ((), ())
    trainer.close()


def test_a_checkpoint_of_an_earlier_version_is_not_compared_in_silence(ranks, original, tmp_path):
    """It has the model's settings and the optimizers' kinds."""
    config, checkpoint = original
    earlier = tmp_path / checkpoint.name
    earlier.mkdir()
    for file in checkpoint.iterdir():
        (earlier / file.name).write_bytes(file.read_bytes())
    scalars = json.loads((earlier / "scalars.json").read_text())
    del scalars["changes"]
    had = ("model.", "embedding_optimizer.kind", "dense_optimizer.kind")
    scalars["settings"] = {key: value for key, value in scalars["settings"].items() if key.startswith(had)}
    (earlier / "scalars.json").write_text(json.dumps(scalars))
    make_manifest_right(earlier)
    trainer = Trainer(replace(config, data=replace(config.data, shuffle=False)), ranks, None)
    _, comparison = trainer.resume(earlier)
    (note,) = comparison.notes
    assert re.search(
        r"written by an earlier version, without \d+ settings that are compared now \(cache.full_rows, ", note
    )
    assert trainer.steps == 4
    trainer.close()
    other = Trainer(replace(config, data=replace(config.data, seed=7)), ranks, None)
    with pytest.raises(CheckpointError, match=r"data\.seed +0 +7"):  # which every version has saved
        other.resume(earlier)
    other.close()


@pytest.mark.parametrize("arch", keep(["deepfm"], FACTORIZED))
def test_the_deepfm_of_earlier_versions_is_refused_by_name(ranks, original, tmp_path, arch):
    """Its checkpoints have no `model.activation`. Those of now resume."""
    config = replace(original[0], model=ModelConfig(arch, 4))
    trainer = Trainer(config, ranks, tmp_path)
    for _ in trainer.train():
        pass
    trainer.close()
    checkpoint = complete_checkpoints(tmp_path)[0]
    again = Trainer(config, ranks, None)
    assert again.resume(checkpoint)[1].changes == ()
    scalars = json.loads((checkpoint / "scalars.json").read_text())
    del scalars["settings"]["model.activation"]
    (checkpoint / "scalars.json").write_text(json.dumps(scalars))
    make_manifest_right(checkpoint)
    if arch != "deepfm":
        assert again.resume(checkpoint)[1].changes == ()
    else:
        uses = (lambda: again.resume(checkpoint), lambda: open_trained(config, tmp_path, ranks, step=4))
        for use in uses:
            with pytest.raises(CheckpointError, match=r"step_4: The \"deepfm\" of earlier versions was .* Train"):
                use()
    again.close()


def test_every_setting_has_a_rule():
    assert RULES.keys() == {setting.key for setting in describe(RunConfig())}
    entries = {rule.compared_as for rule in RULES.values()} - {None}
    assert entries == {"data.files", "data.eval_files", BATCH, ORDER}


@dataclass(frozen=True)
class NewSection:
    with_rule: Free[int | None] = None
    without: int | None = None


@dataclass(frozen=True)
class NewConfig:
    new: NewSection = field(default_factory=NewSection)


def test_a_setting_without_a_rule_is_an_error():
    with pytest.raises(TypeError, match=r"the setting new\.without has no rule of a resume"):
        rules_of(NewConfig)


def test_every_compared_setting_is_in_the_identity():
    compared = {key for key, rule in RULES.items() if rule.is_compared and rule.compared_as is None}
    for kind in ("synthetic", "criteo", "parquet", "table"):
        config = RunConfig(data=DataConfig(kind=kind))  # type: ignore[arg-type]
        found = identity_of(config, world_size=1).keys()
        always = (f"data.{kind}.", "data.time.", "model.hstu.")
        other = {key for key in compared if key.count(".") == 2 and not key.startswith(always)}
        assert found == compared - other | {"data.files", "data.eval_files", ORDER}


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("cache.ratio", "it may change without being allowed"),
        ("train.batch_size", "it is compared as train.global_batch_size"),
        ("data.path", "it is compared as data.files"),
        ("data.suffle", "Did you mean data.shuffle?"),
        ("x", "no such setting is compared. These are: cache.full_rows, "),
    ],
)
def test_a_key_that_cannot_be_allowed_is_refused(key, said):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.").replace("?", r"\?")):
        check_keys(["data.files", "data.seed", key])


@pytest.mark.parametrize("size", [1, 1 << 14, 5 << 14, 16 << 14, (16 << 14) + 5, 3_000_001])
def test_a_file_is_told_from_another_one(tmp_path, size):
    path = tmp_path / "day_0"
    path.write_bytes(bytes(size))
    before = FileIdentity.of(path)
    assert FileIdentity.of(path) == before
    sampled = {0, size - 1, size // 2} if size <= 16 << 14 else {0, size - 1, (size - (1 << 14)) // 15 + 7}
    for place in sampled:
        content = bytearray(size)
        content[place] = 1
        path.write_bytes(content)
        assert FileIdentity.of(path) != before
    path.write_bytes(bytes(size + 1))
    assert FileIdentity.of(path) != before


def test_outputs_keep_their_labels_and_one_may_be_renamed():
    def change(saved: Any, now: Any) -> bool:
        return labels_change({"data.table.label": saved}, {"data.table.label": now})

    assert not change("click", "clicked")
    assert not change(["click"], "clicked")
    assert not change(["click", "buy"], ["click", "buy"])
    assert change(["click", "buy"], ["buy", "click"])
    assert change(["click", "buy"], "click")
    assert not labels_change({}, {"data.table.label": ["a", "b"]}), "saved before there were several"


def test_a_setting_that_is_a_table_is_set_back_in_the_file():
    """--set takes one value of it at a time, and would refuse the whole."""
    for key, saved, now in (
        ("model.options", "{hidden = 8}", "{hidden = 9}"),
        ("data.table.classes", "{a = [1]}", "{}"),
    ):
        said = refusal([Change(key, saved, now)])
        assert f"Set back what should not change ({key} in the file)" in said
        assert "--set" not in said


def test_the_way_back_can_be_pasted():
    said = refusal([Change("data.table.label", '["click", "buy"]', '["buy", "click"]')])
    assert """(--set 'data.table.label=["click", "buy"]')""" in said
