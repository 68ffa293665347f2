"""Which table and layer takes what: pure, on the shapes of models that are not trained."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from embershard.distributed.checkpoint.boxes import Saved
from embershard.errors import ConfigError
from embershard.extras.warm_start.columns import DENSE
from embershard.extras.warm_start.matching import Matching, match, summary
from embershard.extras.warm_start.shapes import ModelShape, shape_of
from embershard.extras.warm_start.source import TrainedModel
from embershard.extras.warm_start.start import new_shape, planned
from embershard.training.config import RunConfig
from embershard.training.fit.id_rules import id_rules
from embershard.training.warm_start import WarmStart
from tests.unit.training.warm.models import DIM, features, run_of, sparse

pytestmark = pytest.mark.extra

run = partial(run_of, "samples.parquet")


class Nothing(Saved):
    """A trained model of which only names and sizes matter; with states of its optimizers."""

    def __init__(self, shape: ModelShape, has_states: bool) -> None:
        self._names = dict.fromkeys(["dense_optimizer.x"] if has_states else [], ())

    def sizes(self) -> Any:
        return self._names

    def read(self, name: str, box: Any) -> Any:
        raise AssertionError


def plan(old: RunConfig, new: RunConfig, *renames: str, without: tuple[str, ...] = (), states: bool = True) -> Matching:
    """What a run of `new` takes from one of `old`."""
    kinds = {name: getattr(old, name).kind for name in ("embedding_optimizer", "dense_optimizer")}
    shape = new_shape(old)
    model = TrainedModel("runs/old", Nothing(shape, states), shape, 9, 9, kinds if states else {}, id_rules(old))
    pairs = tuple((text.partition("=")[0], text.partition("=")[2]) for text in renames)
    start = WarmStart(Path("runs/old"), renames=pairs, without=without)
    kinds = {name: getattr(new, name).kind for name in ("embedding_optimizer", "dense_optimizer")}
    return planned(start, model, new_shape(new), kinds, id_rules(new)).matching


def fates(found: Matching) -> dict[str, str]:
    """Those that are not as they were, by name."""
    return {entry.name: entry.fate for entry in found.entries if entry.fate != "taken"}


OVER = "model.over_arch.model.0._mlp.0._linear.weight"
BOTTOM = "model.dense_arch.model._mlp.0._linear.weight"


def test_an_unchanged_model_is_taken_as_it_is() -> None:
    assert fates(plan(run(), run())) == {}
    assert {entry.kind for entry in plan(run(), run()).entries} == {"table", "layer"}


def test_renamed_new_dropped_and_grown() -> None:
    assert fates(plan(run(), run(features(item=None, product=40)), "item=product")) == {
        "t_product": "renamed",
        OVER: "widened",  # features are in another order
    }
    assert fates(plan(run(), run(features(day=7)))) == {"t_day": "new", OVER: "widened"}
    assert fates(plan(run(), run(features(shop=None)))) == {"t_shop": "dropped", OVER: "widened"}
    assert fates(plan(run(), run(features(item=41)))) == {"t_item": "grown"}
    assert fates(plan(run(), run(features(stars="dense")))) == {BOTTOM: "widened"}


def entry_of(found: Matching, name: str) -> Any:
    return next(entry for entry in found.entries if entry.name == name)


def test_columns_go_where_their_features_are() -> None:
    old, new = new_shape(run()), new_shape(run({**features(user=None), "day": sparse(7), "user": sparse(60)}))
    entry = entry_of(match(old, new, (), ()), OVER)
    (_, columns), was, now = entry.places, old.layers[OVER].labels(1), new.layers[OVER].labels(1)
    assert columns is not None
    assert was is not None
    assert now is not None
    for source, target in zip(*columns, strict=True):
        assert was.labels[source] == now.labels[target]
    assert {now.labels[place][0] for place in entry.zeros[1]} == {
        tuple(sorted(pair)) for pair in ((DENSE, "day"), ("item", "day"), ("shop", "day"), ("user", "day"))
    }
    assert len(columns[0]) == DIM + 6


def test_what_is_left_out_begins_anew() -> None:
    assert fates(plan(run(), run(), without=("item",))) == {"t_item": "new", OVER: "widened"}
    assert fates(plan(run(), run(), without=("t_item",))) == {"t_item": "new"}
    assert fates(plan(run(), run(), without=("age",))) == {BOTTOM: "widened"}
    assert set(fates(plan(run(), run(), without=("model.dense_arch",))).values()) == {"new"}


def test_layers_may_be_renamed_by_what_their_names_begin_with() -> None:
    old = shape_of({"model.top.0.weight": (2, 3), "model.top.0.bias": (2,), "model.side": (4,)})
    new = shape_of({"model.tower.0.weight": (2, 3), "model.tower.0.bias": (2,), "model.side": (4,)})
    found = match(old, new, (("top", "tower"),), ())
    assert {entry.name: (entry.was, entry.fate) for entry in found.entries} == {
        "tower.0.weight": ("top.0.weight", "renamed"),
        "tower.0.bias": ("top.0.bias", "renamed"),
        "side": ("side", "taken"),
    }


def test_several_outputs_go_by_their_names() -> None:
    both, one = {"label": ("click", "buy")}, {"label": "click"}
    found = plan(run(**one), run(**both))  # type: ignore[arg-type]
    assert fates(found) == {"model.over_arch.model.1.weight": "widened", "model.over_arch.model.1.bias": "widened"}
    assert entry_of(found, "model.over_arch.model.1.bias").places == (((0,), (0,)),)
    assert fates(plan(run(label="click"), run(label="bought"))) == {}  # the only one may have another name


def test_a_scale_with_other_numbers_is_told() -> None:
    old, new = (
        run(features(age=replace(features()["age"], scale="standardize", mean=mean, std=2.0))) for mean in (30.0, 31.0)
    )
    (note,) = plan(old, new).notes
    assert "'age' is scaled by other numbers" in note
    assert "31.0" in summary(plan(old, new), "runs/old")


def ids(num_rows: int, **settings: Any) -> Any:
    return features(item=sparse(num_rows, "ids", **settings))


def test_ids_move_with_other_rows_or_rules() -> None:
    from embershard.cache.ids.config import IdTable

    old = run(ids(240), ids={"*": IdTable(buckets=4)})
    assert fates(plan(old, old)) == {}
    assert fates(plan(old, run(ids(480), ids={"*": IdTable(buckets=4)}))) == {"t_item": "moved"}
    assert fates(plan(old, run(ids(240), ids={"*": IdTable(buckets=2)}))) == {"t_item": "moved"}


def text(num_rows: int, **settings: Any) -> Any:
    return features(item=sparse(num_rows, "text", **settings))


WIDE = {"embedding_dim": 16, "dense_arch_layer_sizes": (6, 16)}
REFUSED: dict[str, tuple[RunConfig, RunConfig, tuple[str, ...], tuple[str, ...], list[str]]] = {
    "another dim": (run(), run(model=WIDE), (), (), ["table t_item", "40 x 8", "40 x 16", "rows of 8 numbers"]),
    "fewer rows": (run(), run(features(item=30)), (), (), ["table t_item", "10 rows have no place"]),
    "text onto more rows": (run(text(40)), run(text(80)), (), (), ["t_item", "text onto 40 rows", "text onto 80"]),
    "another mapping": (run(text(40)), run(features(item=sparse(40, "hash"))), (), (), ["text onto", "hash onto"]),
    "row numbers that are hashed now": (run(), run(text(40)), (), (), ["t_item", "row numbers", "text onto 40"]),
    "rows that take ids now": (run(features(item=240)), run(ids(240)), (), (), ["row numbers", "any ids"]),
    "ids that are rows now": (run(ids(240)), run(features(item=240)), (), (), ["any ids", "row numbers"]),
    "ids of texts": (run(ids(240)), run(features(item=sparse(240, "text_ids"))), (), (), ["ids", "text_ids"]),
    "weights in the rows": (run(), run(arch="deepfm"), (), (), ["table t_item", "7 factors, 1 weights"]),
    "another hidden width": (
        run(), run(model={"over_arch_layer_sizes": (9, 1)}), (), (), [f"layer {OVER}", "0: got 9 entries, needed 6"],
    ),
    "another arch": (run(), run(arch="dlrm_dcn"), (), (), [f"layer {OVER}", "depends on model.arch"]),
    "columns nobody knows": (
        run(arch="shared_bottom", label=("a", "b")), run(features(day=7), arch="shared_bottom", label=("a", "b")),  # type: ignore[arg-type]
        (), (), ["layer model.over_arch", "what its columns stand for is not known"],
    ),
    "another scale": (
        run(), run(features(age=replace(features()["age"], scale="log1p"))), (), (), ["feature age", "none", "log1p"],
    ),
    "map of an unknown name": (run(), run(), ("itm=item",), (), ["--map itm=item", "trained model has no 'itm'"]),
    "map to an unknown name": (run(), run(), ("item=itm",), (), ["--map item=itm", "new model has no 'itm'"]),
    "map of one name to two": (
        run(), run(features(item=None, day=7, product=40)), ("item=day", "item=product"), (),
        ["'item' is mapped twice"],
    ),
    "map of two names to one": (
        run(), run(features(item=None, shop=None, product=40)), ("item=product", "shop=product"), (),
        ["two names become 'product'"],
    ),
    "map onto a name that is there": (run(), run(), ("item=shop",), (), ["the trained model has 'shop', too"]),
    "left out and unknown": (run(), run(), (), ("itm",), ["--without itm", "neither model has 'itm'"]),
    "another optimizer of the tables": (
        run(), run(kind="sgd"), (), (),
        ["optimizer embedding_optimizer", "rowwise_adagrad", "sgd", "--without optimizer"],
    ),
    "another optimizer of the layers": (run(), run(dense="sgd"), (), (), ["optimizer dense_optimizer", "adam"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    old, new, renames, without, said = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        plan(old, new, *renames, without=without)
    for part in said:
        assert part in str(error.value)


def test_all_problems_are_in_one_table() -> None:
    new = run(features(item=30, user=20), kind="sgd", model={"over_arch_layer_sizes": (9, 1)})
    with pytest.raises(ConfigError) as error:
        plan(run(), new, "itm=item")
    first, titles, *rows = str(error.value).splitlines()
    assert first == "runs/old does not fit this model, and nothing was taken:"
    assert titles.split() == ["what", "saved", "now", "problem"]
    assert [row.split("  ")[1] for row in rows][:3] == ["--map itm=item", "table t_user", "table t_item"]
    assert any(row.startswith("  optimizer embedding_optimizer") for row in rows)
    fixed = plan(run(), new, without=("item", "user", "optimizer", "model.over_arch"))
    assert fates(fixed)["t_item"] == "new"
    assert fixed.refused == []


def test_what_an_export_lacks_is_told() -> None:
    assert plan(run(), run(kind="sgd"), states=False).notes == ("It has no states of optimizers: they begin at 0.",)


def test_without_settings_tables_and_layers_go_by_name_and_size() -> None:
    sizes = {"model.ebc.embedding_bags.t_a.weight": (10, 8), "model.over.weight": (1, 8)}
    wider = {"model.ebc.embedding_bags.t_a.weight": (12, 8), "model.over.weight": (1, 9)}
    found = match(shape_of(sizes), shape_of(wider), (), ())
    assert {entry.name: entry.fate for entry in found.entries} == {"t_a": "grown", "over.weight": "refused"}
    assert "matched by name and size alone" in found.notes[0]
