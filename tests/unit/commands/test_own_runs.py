"""From a log of events, or from a model of one's own, to scores: by settings alone, as a user does it."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from embershard.commands import cli
from embershard.commands.data import command as data_command
from embershard.commands.profile.data_pass import PartReader, PassOptions, profile_data
from embershard.data import open_source
from embershard.data.order.stream import SampleReader
from embershard.distributed import Ranks, process_group
from embershard.errors import CheckpointError, ConfigError
from embershard.extras.hot_cold.part import find_hot_rows
from embershard.extras.serving import command as export
from embershard.extras.serving import serving_model
from embershard.settings.decoding import read_toml, tomllib
from embershard.settings.files import load_config
from embershard.training.checkpoint.resume import resume_run
from embershard.training.config import RunConfig
from embershard.training.trainer import Trainer
from tests.unit.commands.conftest import score_here, train_here
from tests.unit.data.windows import hstu_overrides, make_windows
from tests.unit.serving.test_export import WITHOUT

pytestmark = pytest.mark.slow  # whole training runs

PROJECT = Path(__file__).resolve().parents[3]
SMALL = [
    "data.synthetic.num_samples=1200", "data.synthetic.scale=0.001", "data.num_workers=0",
    "model.options.hidden=8", "model.options.dim=8", "train.batch_size=50", "train.max_steps=6", "train.device=cpu",
    "cache.ratio=0.5",
]  # fmt: skip


def held_out(config: RunConfig) -> list[dict[str, object]]:
    """The held-out samples as a program has them."""
    source = open_source(config.data)
    (block,) = SampleReader(source, "eval", config.data).blocks(source.chunks("eval").num_samples, 10**6)
    columns = dict(zip(source.schema.dense, block.dense.T.tolist(), strict=True))
    for name, values, lengths in zip(source.schema.keys, block.values, block.lengths, strict=True):
        sizes = np.broadcast_to(lengths, block.num_samples)
        columns[name] = [part.tolist() for part in np.split(values, np.cumsum(sizes)[:-1])]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def check_export(folder: Path, samples: list[dict[str, object]], *, is_rounded: bool, in_groups: bool = False) -> None:
    """The run in `folder`, exported, scores the samples as `predict` does, bit for bit, in a process that cannot import
    embershard, TorchRec or FBGEMM. `is_rounded`: it passes torch.export, and the error of int8 tables is stated.
    `in_groups`: `predict` takes samples in groups by length, and sums are in another order."""
    score_here(str(folder / "run"), "-o", str(folder / "one.parquet"), "--set", f"train.batch_size={len(samples)}")
    export.main([str(folder / "run"), "-o", str(folder / "fp32")])
    model = serving_model.load(folder / "fp32")
    samples = [{name: sample[name] for name in model.columns} for sample in samples]
    (folder / "samples.json").write_text(json.dumps(samples))
    program = [str(PROJECT / "examples" / "serve.py"), str(folder / "fp32"), str(folder / "samples.json")]
    done = subprocess.run([sys.executable, "-c", WITHOUT, *program], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    expected = pq.read_table(folder / "one.parquet")["score"].to_pylist()
    found = json.loads(done.stdout)
    assert found == (pytest.approx(expected, rel=1e-6) if in_groups else expected)
    if not is_rounded:
        return
    export.main([str(folder / "run"), "-o", str(folder / "int8"), "--dtype", "int8"])
    error = json.loads((folder / "int8" / "export.json").read_text())["error"]
    assert 0 < error["score_mean"] <= error["score_max"] < 1e-2
    if (name := "hist_category") in model.columns:
        with torch.no_grad(), pytest.raises(RuntimeError, match="have different numbers of ids in one sample"):
            model(*model.encode([{**samples[0], name: [1] * 99}]))
    inputs = model.encode(samples[:5])
    with torch.no_grad():
        program = torch.export.export(model, inputs).module()
        assert torch.equal(program(*inputs), model(*inputs))
        rounded = serving_model.load(folder / "int8")(*inputs)
    assert not torch.equal(rounded, model(*inputs)), "rounded tables must be noticed"


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_windows(tmp_path_factory.mktemp("log"), users=150, items=300, history=10)


@pytest.mark.matrix
@pytest.mark.parametrize("arch", ["din", "tbsm", "hstu"])
def test_a_log_of_events_becomes_scores(arch, windows, tmp_path, capsys):
    overrides = [f"model.arch={arch}", "train.max_steps=8", "train.device=cpu", "data.num_workers=0", "cache.ratio=0.9"]
    overrides += hstu_overrides(windows) if arch == "hstu" else []
    train_here(load_config(RunConfig, windows / "run.toml", overrides), tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["auc"] is not None
    score_here(str(tmp_path / "run"), "-o", str(tmp_path / "scores.parquet"))
    found = pq.read_table(tmp_path / "scores.parquet")
    assert found["label"].to_pylist() == pq.read_table(windows / "eval.parquet")["label"].to_pylist()

    samples = pq.read_table(windows / "eval.parquet").to_pylist()
    check_export(tmp_path, samples, is_rounded=arch == "din", in_groups=arch == "hstu")
    export.main([str(tmp_path / "run"), "-o", str(tmp_path / "tables"), "--format", "parquet"])
    names = {path.stem for path in (tmp_path / "tables" / "tables").iterdir()}
    assert names == {"t_user", "t_item", "t_category", "t_hist_behaviour"}
    lookups = json.loads((tmp_path / "tables" / "inputs.json").read_text())["lookups"]
    assert {each["feature"]: each["table"] for each in lookups}["hist_item"] == "t_item"


def test_the_settings_of_the_windows_are_whole(windows):
    values = read_toml(windows / "run.toml")
    assert values["data"]["parquet"]["num_rows"][1] == values["data"]["parquet"]["num_rows"][3]
    with pytest.raises(ConfigError, match="exists; give the name of a new folder"):
        data_command.main(["events", str(windows.parent / "log.csv"), "-o", str(windows)])


def test_an_own_model_is_trained_scored_and_resumed(tmp_path):
    for name in ("own_model.toml", "own_model.py"):
        shutil.copy(PROJECT / "examples" / name, tmp_path / name.replace("own_model", "own_copy"))
    overrides = [*SMALL, "model.build=own_copy:build"]
    config = load_config(RunConfig, tmp_path / "own_copy.toml", overrides)
    assert config.model.folder == str(tmp_path)
    assert config.model.options == {"hidden": 8, "dim": 8}
    train_here(config, tmp_path / "run")
    score_here(str(tmp_path / "run"), "-o", str(tmp_path / "scores.parquet"))
    assert len(pq.read_table(tmp_path / "scores.parquet")) == 60
    check_export(tmp_path, held_out(config), is_rounded=False)

    def resume(ranks: Ranks, changes: tuple[str, ...] = ()) -> Trainer:
        trainer = Trainer(config, ranks, tmp_path / "run" / "checkpoints")
        resume_run(trainer, allow_changes=changes)
        return trainer

    (tmp_path / "own_copy.py").write_text((tmp_path / "own_copy.py").read_text() + "\n# changed\n")
    with process_group("cpu") as ranks:
        with pytest.raises(CheckpointError, match=r"(?s)model.source .*--allow-change model.source"):
            resume(ranks)
        assert resume(ranks, ("model.source",)).steps == 6
        other = load_config(RunConfig, tmp_path / "own_copy.toml", [*overrides, "model.options.hidden=9"])
        with pytest.raises(CheckpointError, match=r"model.options .*hidden = 8.*hidden = 9"):
            resume_run(Trainer(other, ranks, tmp_path / "run" / "checkpoints"), allow_changes=("model.source",))


def test_a_dry_run_says_what_a_model_of_one_s_own_would_train(tmp_path, capsys):
    """Or where its function fails, in one line, without a settings' listing above it."""
    for name in ("own_model.toml", "own_model.py"):
        shutil.copy(PROJECT / "examples" / name, tmp_path / name.replace("own_model", "own_dry"))
    words = ["train", "--config", str(tmp_path / "own_dry.toml"), "--dry-run", "--set", "model.build=own_dry:build"]
    words += [word for text in SMALL for word in ("--set", text)]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "# own_dry:build makes a model that fits the data:" in said
    assert (
        "#   narrow: EmbeddingBagCollection, 11 tables with 14,356 rows\n#     narrow_C2: 3 x 4, mean of C2\n" in said
    )
    assert (
        "#   sequences: EmbeddingCollection, 4 tables with 12,340 rows\n#     seq_C3: 10,131 x 8, sequences of C3"
        in said
    )
    assert "#   score: Linear, 9 dense weights\n" in said
    assert tomllib.loads(said)["model"]["build"] == "own_dry:build"
    assert cli.main([*words, "--set", "model.options.dim=abc"]) == 2
    failed = capsys.readouterr()
    assert not failed.out
    (line,) = failed.err.splitlines()
    assert "failed: TypeError: " in line
    assert re.search(r"\(.*/own_dry.py, line \d+\)\.$", line)


def test_rows_of_a_shared_table_are_counted_together(windows):
    config = load_config(RunConfig, windows / "run.toml", ["data.shuffle=false", "data.num_workers=0"])
    reader = PartReader(config.data, config.model)
    profile = profile_data(config.data, PassOptions(), reader=reader)
    samples = pq.read_table(windows / "train.parquet")
    items = Counter(item + 1 for item in samples["item"].to_pylist())
    items.update(item + 1 for past in samples["hist_item"].to_pylist() for item in past)
    statistics = profile.need_statistics()
    assert statistics.tables["t_item"].num_lookups == items.total()
    trace = statistics.trace.tables["t_item"]
    first = samples.slice(0, 1).to_pylist()[0]
    of_first = trace.rows[trace.samples == 0].tolist()
    assert of_first == [first["item"] + 1, *(item + 1 for item in first["hist_item"])]
    with pytest.raises(ConfigError, match="hot rows of the model 'din': got tables of several features"):
        find_hot_rows(config, profile, 10_000)


def test_a_script_of_one_s_own_trains(monkeypatch, capsys, tmp_path):
    script = PROJECT / "examples" / "own_script.py"
    assert len(script.read_text().splitlines()) < 60
    monkeypatch.setattr(sys, "argv", [script.name, "--steps", "20", "--checkpoints", str(tmp_path / "checkpoints")])
    runpy.run_path(str(script), run_name="__main__")
    assert re.search(r"step 20: loss 0\.\d+, hit rate 0\.\d+\nstep 20: AUC 0\.\d+", capsys.readouterr().out)
    assert (tmp_path / "checkpoints" / "step_20").is_dir()


@pytest.mark.matrix
def test_attention_to_the_history_is_worth_it(tmp_path):
    """After the same steps from the same seed, on generated sessions; docs/log/data_and_models.md has larger ones."""
    data_command.main(["sessions", "-o", str(tmp_path / "log.csv"), "--users", "800", "--items", "400"])
    data_command.main(["events", str(tmp_path / "log.csv"), "-o", str(tmp_path / "windows"), "--history", "15"])
    common = [
        "train.max_steps=300", "train.epochs=3", "train.device=cpu", "train.seed=1", "data.seed=1",
        "data.num_workers=0", "cache.enabled=false", "embedding_optimizer.lr=0.05", "dense_optimizer.lr=0.003",
        "checkpoint.at_end=false",
    ]  # fmt: skip
    auc = {}
    for arch in ("dlrm", "din", "tbsm"):
        own = ["model.target=[]", "model.history=[]"] if arch == "dlrm" else []
        train_here(
            load_config(RunConfig, tmp_path / "windows" / "run.toml", [*common, f"model.arch={arch}", *own]),
            tmp_path / arch,
        )
        auc[arch] = json.loads((tmp_path / arch / "result.json").read_text())["auc"]
    assert auc["din"] > auc["dlrm"] + 0.01, auc
    assert auc["tbsm"] > auc["dlrm"] + 0.005, auc
