"""A run on one rank begins with a trained model: shared parts are equal bit for bit, new ones are as of the seed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embershard.cache.ids.config import IdTable
from embershard.data import open_source
from embershard.distributed import CheckpointConfig, Manifest, Ranks, Supervision
from embershard.distributed.checkpoint.best import BestEvaluation
from embershard.distributed.checkpoint.boxes import Box, Saved
from embershard.distributed.checkpoint.compact import compact
from embershard.distributed.checkpoint.load import AVERAGE, load_group
from embershard.errors import CheckpointError, ConfigError, InvalidCheckpointError
from embershard.extras.warm_start import fill, start
from embershard.extras.warm_start.part import WarmStartReport
from embershard.models.config import PretrainedTable
from embershard.settings.files import load_config
from embershard.sharding.torchrec.inspection import cached_embeddings
from embershard.training.checkpoint.resume import resume_run
from embershard.training.config import RunConfig
from embershard.training.parts.average import AveragedWeights
from embershard.training.parts.part import Part
from embershard.training.trained_run import Scorer, open_trained
from embershard.training.trainer import Trainer
from embershard.training.warm_start import WarmStart
from tests.covering import covering, keep, matrix
from tests.unit.training.warm.models import DIM, FEATURES, features, record, run_of, sparse, write_samples

pytestmark = [pytest.mark.slow, pytest.mark.extra]  # whole training runs

Tensors = dict[str, Tensor]
OVER = "model.over_arch.model.0._mlp.0._linear.weight"


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples") / "samples.parquet")


def train(config: RunConfig, ranks: Ranks, folder: Path) -> Tensors:
    """Train and save; the tensors of the end, by group and name."""
    trainer = Trainer(config, ranks, folder / "checkpoints")
    for _ in trainer.train():
        pass
    record(config, folder)
    found = tensors_of(trainer)
    trainer.close()
    return found


@dataclass(frozen=True)
class Before:
    """The run of `run_of(samples)`: its folder, which no test changes, and its tensors."""

    folder: Path
    tensors: Tensors


@pytest.fixture(scope="module")
def before(ranks: Ranks, samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Before:
    folder = tmp_path_factory.mktemp("before")
    return Before(folder, train(run_of(samples), ranks, folder))


def tensors_of(trainer: Trainer) -> Tensors:
    found: Tensors = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                add(f"{name}.{key}", each)
        else:
            shards = value.local_shards() if hasattr(value, "local_shards") else None
            found[name] = (value if shards is None else shards[0].tensor).detach().clone()

    for group, value in trainer.state.tensors().items():
        add(group, value)
    return found


def begun(config: RunConfig, ranks: Ranks, begin: WarmStart | None) -> tuple[Tensors, WarmStartReport | None, Trainer]:
    """A run before its first step: its tensors, and what it says of its start."""
    trainer = Trainer(config, ranks, None, start=begin)
    reports = [report for part in trainer.parts[:1] for report in part.begin()]
    if begin is None:
        trainer.optimizers.dense.zero_grad()
    assert not reports or isinstance(reports[0], WarmStartReport)
    return tensors_of(trainer), reports[0] if reports else None, trainer  # type: ignore[return-value]


def rows_of(table: str) -> str:
    return f"model.model.sparse_arch.embedding_bag_collection.embedding_bags.{table}.weight"


def state_of(table: str) -> str:
    return f"embedding_optimizer.{rows_of(table).removeprefix('model.')}.{table}.momentum1"


@pytest.mark.smoke
def test_an_unchanged_model(ranks, samples, before):
    old = before.tensors
    new, report, trainer = begun(run_of(samples, seed=1), ranks, WarmStart(before.folder))
    trainer.close()
    assert old.keys() == new.keys()
    assert [name for name in old if not torch.equal(old[name], new[name])] == []
    assert report.fates == {"tables_taken": 3, "layers_taken": 8}


@pytest.mark.parametrize("ema", [matrix(None), 0.5])
def test_a_model_whose_last_save_has_what_changed(ranks, samples, tmp_path, ema):
    """As it was saved, and made whole; its weights are taken, not an average, with which one of its own begins."""
    config = run_of(samples, checkpoint=CheckpointConfig(every_steps=1, keep_last=9, full_every=9))
    config = replace(config, train=replace(config.train, ema=ema))
    old = train(config, ranks, tmp_path)
    last = tmp_path / "checkpoints" / "step_4"
    assert Manifest.read(last).parent is not None
    for is_whole in (False, True):
        if is_whole:
            compact(last)
        for source in (tmp_path, last):
            new, _, trainer = begun(replace(config, train=replace(config.train, seed=1)), ranks, WarmStart(source))
            assert [name for name in old if not torch.equal(old[name], new[name])] == []
            if ema is not None:
                part = trainer.part(AveragedWeights)
                list(part.begin())
                saved = {name: old[f"model.{name}"] for name in part.weights}
                assert saved
                assert all(torch.equal(part.weights[name], each) for name, each in saved.items())
                assert not all(torch.equal(each, load_group(last, AVERAGE)[name]) for name, each in saved.items())
            trainer.close()


def test_checkpoints_that_were_not_used_are_told(ranks, samples, tmp_path):
    """A newer one that is damaged, and that of the best evaluation."""
    config = run_of(samples, checkpoint=CheckpointConfig(every_steps=1, keep_last=9))
    train(config, ranks, tmp_path)
    checkpoints = tmp_path / "checkpoints"
    BestEvaluation(1, "auc", 0.7, {"auc": 0.7}).write(checkpoints)
    (checkpoints / "step_4" / "scalars.json").write_text("{}")
    plan = str(start.plan_start(WarmStart(tmp_path), config))
    assert f"From {checkpoints / 'step_3'}" in plan
    assert f"Not used: {checkpoints / 'step_4'}: " in plan
    assert f"Not used: {checkpoints / 'step_1'} of the best evaluation: --step best takes it." in plan


def changed(samples: Path) -> dict[str, tuple[RunConfig, tuple[tuple[str, str], ...]]]:
    """What today's model may be, with its renames."""
    return {
        "renamed": (run_of(samples, features(item=None, product=40)), (("item", "product"),)),
        "a feature more": (run_of(samples, {**features(user=None), "day": sparse(7), "user": sparse(60)}), ()),
        "a dense feature more": (run_of(samples, features(stars="dense")), ()),
        "a feature less": (run_of(samples, features(user=None)), ()),
        "more rows": (run_of(samples, features(item=55)), ()),
    }


@pytest.mark.parametrize("name", keep(["renamed", "a feature more", "more rows"], changed(Path())))
def test_shared_parts_are_equal_and_new_ones_as_of_the_seed(ranks, samples, before, name):
    old = before.tensors
    config, renames = changed(samples)[name]
    config = replace(config, train=replace(config.train, seed=5))
    new, _, trainer = begun(config, ranks, WarmStart(before.folder, renames=renames))
    trainer.close()
    cold, _, trainer = begun(config, ranks, None)
    trainer.close()
    source = dict(renames)
    for feature in [each for each in FEATURES if FEATURES[each] != "dense"]:
        table = f"t_{source.get(feature, feature)}"
        if rows_of(table) not in new:
            continue
        rows = FEATURES[feature]
        assert torch.equal(new[rows_of(table)][:rows], old[rows_of(f"t_{feature}")])
        assert torch.equal(new[rows_of(table)][rows:], cold[rows_of(table)][rows:])
        assert torch.equal(new[state_of(table)][:rows], old[state_of(f"t_{feature}")])
        assert not new[state_of(table)][rows:].any()
    same = [key for key in old if ".embedding_bags." not in key and key in new and old[key].shape == new[key].shape]
    same = [key for key in same if OVER not in key]
    assert len(same) > 20
    assert [key for key in same if not torch.equal(new[key], old[key])] == []
    if name == "a feature more":
        assert torch.equal(new[rows_of("t_day")], cold[rows_of("t_day")])
        other, _, trainer = begun(replace(config, train=replace(config.train, seed=6)), ranks, None)
        trainer.close()
        assert not torch.equal(new[rows_of("t_day")], other[rows_of("t_day")])


def test_a_rename_that_is_not_told_begins_anew(ranks, samples, before):
    old = before.tensors
    config, _ = changed(samples)["renamed"]
    new, report, trainer = begun(config, ranks, WarmStart(before.folder))
    trainer.close()
    assert not torch.equal(new[rows_of("t_product")], old[rows_of("t_item")])
    assert (report.fates["tables_new"], report.fates["tables_dropped"]) == (1, 1)


@pytest.mark.parametrize("arch", ["dlrm_dcn", matrix("dlrm"), matrix("wide_deep")])
def test_a_new_feature_in_the_middle_changes_no_output(ranks, samples, tmp_path, arch):
    """Of DLRM-DCNv2: what layers read of it is multiplied by 0, until it has trained."""
    train(run_of(samples, arch=arch), ranks, tmp_path)
    more = {**features(item=None, shop=None), "day": sparse(7), "item": sparse(40), "shop": sparse(30)}
    outputs = {}
    for name, of_features in (("same", features()), ("more", more)):
        _, _, trainer = begun(run_of(samples, of_features, arch=arch, seed=4), ranks, WarmStart(tmp_path))
        outputs[name] = outputs_of(trainer)
        trainer.close()
    spread = outputs["same"].std()
    assert spread > 0
    difference = (outputs["same"] - outputs["more"]).abs().max()
    if arch == "dlrm_dcn":
        assert torch.equal(outputs["same"], outputs["more"])
    elif arch == "dlrm":
        assert difference < 1e-6 * spread + 1e-6
    else:  # a first-order weight of each new id is added, as of the seed
        assert difference > 0


def outputs_of(trainer: Trainer) -> Tensor:
    with torch.no_grad():
        return trainer.model(next(iter(trainer.stream)))[1][1].clone()


def fill_shifted(target: Any, saved: Saved, name: str, box: Box) -> None:
    """In place of `fill`: all rows but the first are those before them."""
    for _, values in fill.parts_of(target):
        values[1:].copy_(saved.whole(name)[: len(values) - 1])


CONTROLS: dict[str, tuple[Any, str, Any]] = {
    "a box that is shifted by a row": (fill, "fill", fill_shifted),
    "states that are forgotten": (fill, "row_states", lambda *_: {}),
    "layers that are forgotten": (start, "fill_layers", lambda *_, **__: None),
}


@pytest.mark.parametrize("name", keep(["states that are forgotten"], CONTROLS))
def test_the_comparison_finds_what_is_wrong(ranks, samples, before, monkeypatch, name):
    old = before.tensors
    monkeypatch.setattr(*CONTROLS[name])
    new, _, trainer = begun(run_of(samples, seed=1), ranks, WarmStart(before.folder))
    trainer.close()
    assert [key for key in old if not torch.equal(old[key], new[key])] != []


def test_without_the_optimizer(ranks, samples, before):
    old = before.tensors
    config = run_of(samples, kind="sgd", dense="sgd")
    new, _, trainer = begun(config, ranks, WarmStart(before.folder, without=("optimizer",)))
    list(trainer.train())
    trainer.close()
    assert [key for key in new if key.startswith("model.") and not torch.equal(old[key], new[key])] == []
    with pytest.raises(ConfigError, match="--without optimizer"):
        Trainer(config, ranks, None, start=WarmStart(before.folder))


def test_new_layers_begin_as_of_the_seed_though_their_optimizer_decays(ranks, samples, tmp_path):
    """TorchRec makes states by a step, which would decay parameters that nothing overwrites."""
    old = train(run_of(samples, dense="adamw"), ranks, tmp_path)
    config = run_of(samples, dense="adamw", seed=5)
    anew = "model.over_arch.model.1"
    new, _, trainer = begun(config, ranks, WarmStart(tmp_path, without=(anew,)))
    trainer.close()
    cold, _, trainer = begun(config, ranks, None)
    trainer.close()
    key = f"model.{anew}.weight"
    assert torch.equal(new[key], cold[key])
    assert not torch.equal(new[key], old[key])
    assert int(new[f"dense_optimizer.{anew}.weight.step"]) == 0
    assert int(new[f"dense_optimizer.{OVER}.step"]) == 4


def with_ids(rows: int, **rules: Any) -> dict[str, Any]:
    return {"of_features": features(item=sparse(rows, "ids")), "ids": {"*": IdTable(**{"buckets": 2, **rules})}}


def vectors_of_ids(new: Tensors) -> dict[int, tuple[tuple[float, ...], float]]:
    """Of each id with a row: its vector and its state."""
    from embershard.cache.ids.id_map import unmixed

    key = rows_of("t_item")
    records = new[key.replace("weight", "ids")]
    live = (records[:, 1] >= 0).nonzero().flatten()
    vectors, states = new[key][live], new[state_of("t_item")][live]
    found = unmixed(records[live, 0].numpy()).tolist()
    return {own: (tuple(row.tolist()), float(state)) for own, row, state in zip(found, vectors, states, strict=True)}


@pytest.mark.parametrize("change", [matrix({"rows": 240}), {"rows": 480}, matrix({"rows": 240, "buckets": 4})], ids=str)
def test_ids_keep_their_vectors(ranks, samples, tmp_path, change):
    old = train(run_of(samples, **with_ids(240)), ranks, tmp_path)
    new, report, trainer = begun(run_of(samples, seed=2, **with_ids(**change)), ranks, WarmStart(tmp_path))
    before, after = vectors_of_ids(old), vectors_of_ids(new)
    assert len(before) > 30
    assert before == after
    assert report.ids == {"t_item": (len(before), 0)}
    moved = old[rows_of("t_item")].shape != new[rows_of("t_item")].shape or "buckets" in change
    assert moved != torch.equal(old[rows_of("t_item")], new[rows_of("t_item")])
    list(trainer.train())
    trainer.close()


def test_ids_without_a_place_are_counted_and_the_most_used_ones_stay(ranks, samples, tmp_path):
    old = train(run_of(samples, **with_ids(240)), ranks, tmp_path)
    new, report, trainer = begun(run_of(samples, **with_ids(32)), ranks, WarmStart(tmp_path))
    trainer.close()
    before, after = vectors_of_ids(old), vectors_of_ids(new)
    assert after.items() <= before.items()
    assert report.ids == {"t_item": (len(after), len(before) - len(after))}
    assert 0 < len(after) <= 2 * (16 - 1 - 2)


def test_a_new_table_of_ids_counts_batches_as_the_others_do(ranks, samples, tmp_path):
    rules = {"*": IdTable(buckets=2)}
    train(run_of(samples, features(item=sparse(240, "ids")), ids=rules), ranks, tmp_path)
    of_both = features(item=sparse(240, "ids"), user=sparse(240, "ids"))
    path = npz(tmp_path / "users.npz", user=np.array([3, 9, 21]), embedding=VECTORS[:3])
    for model in ({}, {"pretrained": {"user": PretrainedTable(str(path), values="user")}}):
        both = run_of(samples, of_both, ids=rules, model=model)
        new, report, trainer = begun(both, ranks, WarmStart(tmp_path, without=("user",)))
        clocks = [new[rows_of(name).replace("weight", "ids")][::120, 0].tolist() for name in ("t_item", "t_user")]
        assert clocks == [[4, 4], [4, 4]]
        assert report.ids.get("t_user") == ((3, 0) if model else None)
        list(trainer.train())
        trainer.close()


def test_from_an_export(ranks, samples, tmp_path):
    from embershard.extras.serving.write import ExportRequest, _write
    from embershard.training.trained_run import open_trained

    for name, settings in (("rows", {}), ("ids", with_ids(240))):
        config, folder = run_of(samples, **settings), tmp_path / name
        old = train(config, ranks, folder)
        request = ExportRequest(config, folder / "checkpoints", None, is_module=True, dtype="fp32", num_samples=0)
        _write(request, open_trained(config, request.checkpoints, ranks), folder / "export")
        new, report, trainer = begun(replace(config, train=replace(config.train, seed=8)), ranks,
                                     WarmStart(folder / "export"))  # fmt: skip
        list(trainer.train())
        trainer.close()
        different = {key for key in new if key.startswith("model.") and not torch.equal(old[key], new[key])}
        if name == "rows":
            assert different == set()
        else:
            assert different <= {rows_of("t_item"), rows_of("t_item").replace("weight", "ids")}
            before, after = vectors_of_ids(old), vectors_of_ids(new)
            assert {own: vector for own, (vector, _) in before.items()} == {
                own: vector for own, (vector, _) in after.items()
            }
            assert report.ids == {"t_item": (len(before), 0)}


def test_steps_are_kept_where_it_is_asked_for(ranks, samples, tmp_path):
    from embershard.training.optimizers import ScheduleConfig

    schedule = ScheduleConfig(warmup_steps=100)
    train(run_of(samples, schedule=schedule), ranks, tmp_path)
    factors = {}
    for keeps in (False, True):
        _, _, trainer = begun(run_of(samples, schedule=schedule), ranks, WarmStart(tmp_path, keep_steps=keeps))
        trainer.optimizers.begin_step(0)
        factors[keeps] = trainer.optimizers.factor
        trainer.close()
    assert factors == {False: 1 / 100, True: 5 / 100}


def test_a_resume_goes_on_with_the_steps_of_the_start(ranks, samples, tmp_path, before):
    """And takes nothing anew: the start is not looked at again."""
    old, new = before.folder, tmp_path / "new"
    trainer = Trainer(run_of(samples), ranks, new / "checkpoints", start=WarmStart(old, keep_steps=True))
    list(trainer.train())
    trainer.close()
    trainer = Trainer(run_of(samples, steps=6), ranks, new / "checkpoints", start=WarmStart(tmp_path / "gone"))
    trainer.resume(new / "checkpoints" / "step_4")
    assert (trainer.optimizers.steps_before, trainer.steps) == (4, 4)
    assert list(trainer.parts[0].begin()) == []
    trainer.close()


def test_ranks_that_are_started_again_before_a_save_begin_with_it_again(ranks, samples, tmp_path, before):
    old = before.tensors
    trainer = Trainer(run_of(samples, seed=1), ranks, tmp_path / "new", start=WarmStart(before.folder))
    assert resume_run(trainer).checkpoint is None
    assert len(list(trainer.parts[0].begin())) == 1
    new = tensors_of(trainer)
    trainer.close()
    assert [name for name in old if not torch.equal(old[name], new[name])] == []


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def pretrained(path: Path, **settings: Any) -> dict[str, Any]:
    return {"model": {"pretrained": {"item": PretrainedTable(str(path), **settings)}}}


VECTORS = np.arange(5 * DIM, dtype=np.float32).reshape(5, DIM) / 7


@pytest.mark.smoke
@pytest.mark.parametrize(("mapping", "kind"), covering(("none", "text", "ids"), ("npz", "parquet")))
def test_rows_of_a_file(ranks, samples, tmp_path, kind, mapping):
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = np.array([3, 9, 20, 21, 38])
    path = tmp_path / f"items.{kind}"
    if kind == "npz":
        npz(path, item_id=values, embedding=VECTORS)
    else:
        lists = pa.array(VECTORS.tolist(), pa.list_(pa.float32()))
        pq.write_table(pa.table({"item_id": values, "embedding": lists}), path)
    rows = 40 if mapping == "none" else 240
    of_features = features(item=sparse(rows, mapping))
    config = run_of(samples, of_features, **pretrained(path, values="item_id"))
    new, report, trainer = begun(config, ranks, None)
    batch = next(iter(trainer.stream))
    trainer.close()
    cold, _, trainer = begun(run_of(samples, of_features), ranks, None)
    trainer.close()
    assert report.vectors == {"t_item": 5}
    changed_rows = (new[rows_of("t_item")] != cold[rows_of("t_item")]).any(dim=1).nonzero().flatten()
    if mapping == "ids":
        assert {own: vector for own, (vector, _) in vectors_of_ids(new).items()} == {
            own: tuple(vector) for own, vector in zip(values.tolist(), VECTORS.tolist(), strict=True)
        }
        return
    assert len(changed_rows) == 5
    raw = pq.read_table(samples).column("item").to_numpy()
    by_value = dict(zip(values.tolist(), VECTORS, strict=True))
    found = 0
    if mapping == "none":
        assert torch.equal(new[rows_of("t_item")][values], torch.from_numpy(VECTORS))
    for vector in by_value.values():
        found += int((new[rows_of("t_item")] == torch.from_numpy(vector)).all(dim=1).sum())
    assert found == 5
    assert len(raw)
    assert batch is not None


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no such column": (
        {"id": [1], "embedding": VECTORS[:1]},
        {"values": "item"},
        "has no 'item'; it has id, embedding",
    ),
    "another length": ({"item": [1], "embedding": VECTORS[:1, :4]}, {"values": "item"}, r"\[1, 8\]"),
    "a value twice": (
        {"item": [1, 2, 1], "embedding": VECTORS[:3]},
        {"values": "item"},
        "row 1: item = '1' comes again",
    ),
    "no finite number": ({"item": [1], "embedding": VECTORS[:1] * np.nan}, {"values": "item"}, "row 1: embedding"),
    "a row that is none": ({"row": [40], "embedding": VECTORS[:1]}, {"rows": "row"}, r"row 1: row = 40.*0\.\.39"),
    "a value that is no row": ({"item": [-1], "embedding": VECTORS[:1]}, {"values": "item"}, "needed a row in 0..39"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_refused(ranks, samples, tmp_path, name):
    arrays, settings, said = REFUSED[name]
    path = npz(tmp_path / "items.npz", **{key: np.array(value) for key, value in arrays.items()})
    with pytest.raises(ValueError, match=said):
        Trainer(run_of(samples, **pretrained(path, **settings)), ranks, None)


def test_what_the_trained_model_has_is_not_read_from_a_file(ranks, samples, tmp_path, before):
    old = before.tensors
    config = run_of(samples, **pretrained(tmp_path / "gone.npz", rows="row"))
    new, report, trainer = begun(config, ranks, WarmStart(before.folder))
    trainer.close()
    assert torch.equal(old[rows_of("t_item")], new[rows_of("t_item")])
    assert report.vectors == {}


@pytest.mark.smoke
@pytest.mark.parametrize("sections", [{}, {"mapping": "ids"}], ids=["rows", "ids"])
def test_frozen_tables_stay_as_they_are(ranks, samples, tmp_path, sections):
    from embershard.pipeline.config import LookAheadConfig

    of_features = features(item=sparse(240, "ids")) if sections else features()
    rules = {"ids": {"*": IdTable(buckets=2)}} if sections else {}
    path = npz(tmp_path / "items.npz", item_id=np.arange(40), embedding=np.resize(VECTORS, (40, DIM)))
    own = pretrained(path, values="item_id")["model"]
    for ahead, pieces in ((0, 1), (4, 1), (4, 3)):
        parts = {"model": {**own, "frozen": ("item",)}, "look_ahead": LookAheadConfig(ahead, 1), **rules}
        config = run_of(samples, of_features, steps=8, **parts)
        config = replace(config, train=replace(config.train, accumulate=pieces))
        before, _, trainer = begun(config, ranks, None)
        list(trainer.train())
        after = tensors_of(trainer)
        frozen = next(pool for pool in cached_embeddings(trainer.model) if pool.cache.tables == ["t_item"])
        assert all(stats.write_backs == 0 and stats.fills > 0 for stats in frozen.stats())
        trainer.close()
        assert torch.equal(before[rows_of("t_item")], after[rows_of("t_item")])
        assert torch.equal(before[state_of("t_item")], after[state_of("t_item")])
        assert not torch.equal(before[rows_of("t_user")], after[rows_of("t_user")])


@pytest.mark.smoke
def test_a_model_with_frozen_tables_scores_as_it_did(ranks, samples, tmp_path):
    config = run_of(samples, model={"frozen": ("item",)})
    config = replace(config, data=replace(config.data, eval_fraction=0.2))
    trainer = Trainer(config, ranks, tmp_path)
    list(trainer.train())
    evaluated = trainer.evaluate()
    trainer.close()
    assert evaluated is not None
    scorer = Scorer(open_trained(config, tmp_path, ranks), open_source(config.data), ranks, Supervision())
    assert scorer.evaluate().quality == evaluated.quality


class PutBack(Part):
    """Puts the rows and states of a table back after each step."""

    def after_step(self) -> Any:
        tensors = self.run.state.tensors()
        rows = tensors["model"][rows_of("t_item").removeprefix("model.")]
        states = tensors["embedding_optimizer"][rows_of("t_item").removeprefix("model.")]
        values = [rows, *states.values()]
        if not hasattr(self, "first"):
            cold, _, trainer = begun(self.run.config, self.run.ranks, None)
            trainer.close()
            self.first = [cold[rows_of("t_item")], torch.zeros(40)]
        for value, before in zip(values, self.first, strict=True):
            value.local_shards()[0].tensor.copy_(before)
        self.run.model.load_state_dict(tensors["model"])
        self.run.model.fused_optimizer.load_state_dict({"state": tensors["embedding_optimizer"]})
        return ()


@pytest.mark.smoke
def test_the_others_train_as_beside_a_table_whose_rows_are_put_back(ranks, samples):
    """Bit for bit, for all other tables and layers."""
    found = []
    for model in ({"frozen": ("item",)}, {}):
        trainer = Trainer(run_of(samples, steps=6, model=model), ranks, None)
        trainer.parts += [] if model else [PutBack(trainer)]
        list(trainer.train())
        found.append(tensors_of(trainer))
        trainer.close()
    assert found[0].keys() == found[1].keys()
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []


@pytest.mark.smoke
def test_frozen_tables_that_are_not_there(ranks, samples):
    from embershard.sharding.config import ShardingConfig

    with pytest.raises(ConfigError, match=r"model.frozen: got 'itm', needed a table"):
        Trainer(run_of(samples, model={"frozen": ("itm",)}), ranks, None)
    sharding = ShardingConfig(mode="data_parallel")
    with pytest.raises(ConfigError, match=r"model.frozen: got sharding.mode"):
        Trainer(run_of(samples, model={"frozen": ("item",)}, sharding=sharding), ranks, None)


def test_sources_that_cannot_be_used(ranks, samples, tmp_path, before):
    shutil.copytree(before.folder, tmp_path, dirs_exist_ok=True)

    def refused(error: type[Exception], said: str, begin: WarmStart) -> None:
        with pytest.raises(error, match=said):
            Trainer(run_of(samples), ranks, None, start=begin)

    refused(CheckpointError, "no complete checkpoint and no export", WarmStart(tmp_path / "gone"))
    refused(CheckpointError, "no checkpoint of step 3; there is step_4", WarmStart(tmp_path, step=3))
    refused(CheckpointError, "--step best: .* did not judge", WarmStart(tmp_path, step="best"))
    refused(ConfigError, "--step has no effect", WarmStart(tmp_path / "checkpoints" / "step_4", step=4))
    piece = next((tmp_path / "checkpoints" / "step_4").glob("*.distcp"))
    piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    refused(InvalidCheckpointError, "No checkpoint in .* is valid", WarmStart(tmp_path))


def test_a_model_of_one_s_own_goes_by_names_and_sizes(ranks, tmp_path):
    """The old one is not built: nothing of a run's folder is imported."""
    small = ["data.synthetic.num_samples=400", "data.synthetic.scale=0.001", "data.num_workers=0", "cache.ratio=0.5"]
    small += ["model.options.dim=8", "train.batch_size=50", "train.max_steps=4", "train.device=cpu"]
    file = Path(__file__).resolve().parents[4] / "examples" / "own_model.toml"
    config, other = (
        load_config(RunConfig, file, [*small, f"model.options.hidden={hidden}", f"train.seed={hidden}"])
        for hidden in (8, 12)
    )
    old = train(config, ranks, tmp_path)
    new, _, trainer = begun(replace(config, train=replace(config.train, seed=3)), ranks, WarmStart(tmp_path))
    trainer.close()
    assert [name for name in old if not torch.equal(old[name], new[name])] == []
    with pytest.raises(ConfigError, match="what its columns stand for is not known"):
        Trainer(other, ranks, None, start=WarmStart(tmp_path))
