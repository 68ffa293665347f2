"""A run that an earlier version trained is begun with, and scores, as it was: what its files lack is no reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from embershard.distributed import Ranks
from embershard.settings.decoding import read_toml, to_toml
from embershard.settings.files import load_config
from embershard.training.config import RunConfig
from embershard.training.trained_run import open_trained
from embershard.training.warm_start import WarmStart
from tests.unit.distributed.checkpoints import make_manifest_right
from tests.unit.training.warm.models import run_of, write_samples
from tests.unit.training.warm.test_warm_starts import begun, train

pytestmark = [pytest.mark.slow, pytest.mark.extra]  # a whole training run

#: The sections, settings of the model and entries of a checkpoint of 2026-11-22.
_SECTIONS = ("data", "model", "embedding_optimizer", "dense_optimizer", "train")
_OF_MODEL = ("arch", "embedding_dim", "dense_arch_layer_sizes", "over_arch_layer_sizes")
_COMPARED = ("model.arch", "model.embedding_dim", "embedding_optimizer.", "data.kind", "data.table.features")
_ENTRIES = ("step", "samples", "stream", "tables", "settings", "rng", "world_size")


def test_a_run_without_what_came_later(ranks: Ranks, tmp_path: Path) -> None:
    samples = write_samples(tmp_path / "samples.parquet")
    old = train(run_of(samples), ranks, tmp_path)
    checkpoint, file = tmp_path / "checkpoints" / "step_4", tmp_path / "config.toml"
    scalars = json.loads((checkpoint / "scalars.json").read_text())
    scalars = {name: scalars[name] for name in _ENTRIES}
    scalars["settings"] = {key: value for key, value in scalars["settings"].items() if key.startswith(_COMPARED)}
    (checkpoint / "scalars.json").write_text(json.dumps(scalars))
    make_manifest_right(checkpoint)
    settings = {section: values for section, values in read_toml(file).items() if section in _SECTIONS}
    settings["model"] = {key: settings["model"][key] for key in _OF_MODEL}
    file.write_text(to_toml(settings))

    new, report, trainer = begun(run_of(samples, seed=1), ranks, WarmStart(tmp_path))
    trainer.close()
    assert [name for name in old if not torch.equal(old[name], new[name])] == []
    assert report is not None
    assert report.fates == {"tables_taken": 3, "layers_taken": 8}
    assert open_trained(load_config(RunConfig, file), checkpoint.parent, ranks).saved.step == 4
