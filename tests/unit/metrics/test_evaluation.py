"""Figures of an evaluation against loops over all pairs and against torchmetrics: groups, slices, missing labels."""

from __future__ import annotations

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_accuracy, binary_auroc
from torchmetrics.functional.regression import mean_absolute_error, mean_squared_error, r2_score
from torchmetrics.functional.retrieval import retrieval_normalized_dcg, retrieval_precision, retrieval_recall
from torchrec.metrics.ne_with_recalibration import RecalibratedNEMetricComputation

from embershard.data import DataConfig, TableConfig, TableFeature, Target, open_source
from embershard.distributed import Ranks
from embershard.errors import ConfigError, DataError
from embershard.metrics.config import MetricsConfig
from embershard.metrics.evaluation import MISSING, OTHERS, Evaluation, Evaluator, ValueNumbers, value_numbers
from embershard.metrics.figures import metric_names, metric_of, names_of, slice_rows
from embershard.metrics.predictions import Predicted, judge
from embershard.models.loss import class_logits
from tests.covering import examples
from tests.unit.metrics.columns import Columns

CPU = torch.device("cpu")
GROUPED = ("gauc", "ndcg@1", "ndcg@3", "precision@3", "recall@3")
#: prediction, label, weight, group, slice
SAMPLES = st.lists(
    st.tuples(
        st.integers(-3, 3), st.sampled_from([0.0, 1.0, math.nan]), st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        st.integers(-1, 3), st.integers(-1, 4),
    ),
    max_size=30,
)  # fmt: skip


class Alone(Ranks):
    def from_first(self, make: Any) -> Any:
        return make()


ALONE = Alone(0, 1, 0, 1, CPU)


def evaluate(predicted: Predicted, metrics: MetricsConfig, target: Target | None = None, **columns: Any) -> Evaluation:
    source: Any = Columns(**columns)
    evaluator = Evaluator(target or Target(), metrics, source, ALONE)
    return evaluator.judge_samples(
        predicted, value_numbers(source.held_out_columns(list(metrics.columns)), metrics.columns)
    )


def textbook(samples: list[tuple[float, float, float, int]], name: str) -> float | None:
    """A figure of probability, label, weight and group of samples, by the definition."""
    samples = [each for each in samples if not math.isnan(each[1])]
    total = sum(w for _, _, w, _ in samples)
    clicks = sum(w * y for _, y, w, _ in samples)
    if name in ("logloss", "ne"):
        loss = sum(-w * math.log(p if y else 1 - p) for p, y, w, _ in samples)
        if name == "logloss":
            return loss / total if total else None
        if clicks in (0, total):
            return None
        mean = clicks / total
        return loss / total / -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean))
    if name == "accuracy":
        return sum(w * ((p > 0.5) == (y > 0.5)) for p, y, w, _ in samples) / total if total else None
    if name == "calibration":
        return sum(w * p for p, _, w, _ in samples) / clicks if clicks else None
    if name == "auc":
        above = pairs = 0.0
        for p, y, w, _ in samples:
            for q, z, v, _ in samples:
                if y > z:
                    above, pairs = above + w * v * ((p > q) + 0.5 * (p == q)), pairs + w * v
        return above / pairs if pairs else None
    by_group = {g: [each for each in samples if each[3] == g] for _, _, _, g in samples if g >= 0}
    if name == "gauc":
        areas = [(textbook(own, "auc"), sum(w for _, _, w, _ in own)) for own in by_group.values()]
        weighed = [(area, weight) for area, weight in areas if area is not None]
        whole = sum(weight for _, weight in weighed)
        return sum(area * weight for area, weight in weighed) / whole if whole else None
    values = [value for own in by_group.values() if (value := at_place(own, name)) is not None]
    return sum(values) / len(values) if values else None


def at_place(own: list[tuple[float, float, float, int]], name: str) -> float | None:
    metric, _, text = name.partition("@")
    place, num_clicks = int(text), sum(y for _, y, _, _ in own)
    gain = hits = 0.0
    for p, y, _, _ in own:
        above, equal = sum(q > p for q, *_ in own), sum(q == p for q, *_ in own)
        for where in range(above, min(above + equal, place)):
            gain, hits = gain + y / equal / math.log2(where + 2), hits + y / equal
    best = sum(1 / math.log2(where + 2) for where in range(min(place, int(num_clicks))))
    if metric == "precision":
        return hits / place
    return (gain / best if metric == "ndcg" else hits / num_clicks) if num_clicks else None


@pytest.mark.slow
@given(SAMPLES)
@examples(40)
def test_every_figure_is_that_of_the_textbook(samples: list[tuple[int, float, float, int, int]]) -> None:
    """Of all samples and of each slice, with ties, weights of 0, groups of one class, labels that are missing."""
    logits, labels, weights, groups, slices = (
        (list(each) for each in zip(*samples, strict=True)) if samples else [[]] * 5
    )
    predicted = Predicted(torch.tensor(logits).float(), torch.tensor(labels).float(), torch.tensor(weights).float())
    names = (*names_of("binary"), *GROUPED)
    columns = {
        "user": pa.array([None if each < 0 else each for each in groups], pa.int64()),
        "country": pa.array([None if each < 0 else f"c{each}" for each in slices], pa.string()),
    }
    found = evaluate(predicted, MetricsConfig(names, "user", ("country",)), Target(weight="w"), **columns)
    rows = [(1 / (1 + math.exp(-x)), *rest) for x, *rest in samples]
    told = {"": found.quality, **found.slices["country"]}
    assert set(found.slices["country"]) == {MISSING if each < 0 else f"c{each}" for each in slices}
    for value, figures in told.items():
        own = [row[:4] for row in rows if value in ("", MISSING if row[4] < 0 else f"c{row[4]}")]
        for name in names:
            wanted = textbook(own, name)
            assert figures[name] == (None if wanted is None else pytest.approx(wanted, rel=1e-12)), (value, name)


def test_figures_are_those_of_torchmetrics() -> None:
    torch.manual_seed(3)
    logits, labels = torch.randn(400), (torch.rand(400) < 0.4).long()
    users = torch.randint(0, 30, (400,))
    found = evaluate(Predicted(logits, labels.float()), MetricsConfig(GROUPED, "user"), user=users.tolist())
    p, values = logits.sigmoid(), found.quality
    assert values["auc"] == pytest.approx(float(binary_auroc(p, labels)), abs=1e-6)
    assert values["accuracy"] == pytest.approx(float(binary_accuracy(p, labels)))
    own = [(p[users == user], labels[users == user]) for user in range(30)]
    for name, function in (("ndcg@3", retrieval_normalized_dcg), ("precision@3", retrieval_precision),
                           ("recall@3", retrieval_recall)):  # fmt: skip
        theirs = [float(function(*each, top_k=3)) for each in own if each[1].sum() or name == "precision@3"]
        assert values[name] == pytest.approx(np.mean(theirs), rel=1e-6), name
    outputs, stars = torch.randn(400), torch.randn(400)
    values = judge(Target(task="regression"), Predicted(outputs, stars))
    assert values["rmse"] == pytest.approx(float(mean_squared_error(outputs, stars, squared=False)), rel=1e-5)
    assert values["mae"] == pytest.approx(float(mean_absolute_error(outputs, stars)), rel=1e-5)
    assert values["r2"] == pytest.approx(float(r2_score(outputs, stars)), rel=1e-4)


def test_recalibrated_ne_is_torchrecs() -> None:
    torch.manual_seed(4)
    logits, labels, weights = torch.randn(300), (torch.rand(300) < 0.1).float(), torch.rand(300)
    metrics = MetricsConfig(("recalibrated_ne",), recalibration=0.1)
    found = evaluate(Predicted(logits, labels, weights), metrics, Target(weight="w"))
    theirs = RecalibratedNEMetricComputation(
        my_rank=0, batch_size=300, n_tasks=1, window_size=300, recalibration_coefficient=0.1
    )
    columns = (each.double()[None] for each in (logits.double().sigmoid(), labels, weights))
    theirs.update(**dict(zip(("predictions", "labels", "weights"), columns, strict=True)))
    ne = next(float(each.value) for each in theirs._compute() if each.name.name == "NE")
    values = found.quality
    assert values["recalibrated_ne"] == pytest.approx(ne, rel=1e-9)
    assert values["recalibrated_ne"] != pytest.approx(values["ne"], rel=0.01)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 3.0])), max_size=20), st.integers(0, 99))
@examples(40)
def test_figures_of_classes_are_those_of_the_textbook(samples: list[tuple[int, float]], seed: int) -> None:
    """Of samples of which some have not the label (class 3); beside the figures of each class."""
    classes = np.array([each for each, _ in samples], int)
    weights = torch.tensor([weight for _, weight in samples], dtype=torch.float32)
    target = Target(("stars",), "multiclass", weight="w", may_be_missing=True).with_classes({"stars": (1, 2, 3)})
    raw = torch.randn(len(samples), 3, generator=torch.Generator().manual_seed(seed))
    labels = torch.full((len(samples), 3), math.nan)
    there = classes < 3
    labels[torch.from_numpy(there)] = torch.eye(3)[classes[there]]
    values = judge(target, Predicted(class_logits(target, raw), labels, weights))
    own = list(zip(raw.double().softmax(dim=1).numpy()[there], classes[there], weights.numpy()[there], strict=True))
    total = sum(weight for *_, weight in own)
    names = {f"{name}/stars" for name in ("logloss", "accuracy")}
    assert set(metric_names(target)) == {name for name in values if metric_of(name) != "samples"} >= names
    assert values.get("samples/stars", values["samples"]) == there.sum()
    if not total:
        assert {values[name] for name in names} == {None}
        return
    loss = sum(-weight * math.log(shares[each]) for shares, each, weight in own)
    assert values["logloss/stars"] == pytest.approx(loss / total, rel=1e-5)
    right = sum(weight * (max(shares) == shares[each]) for shares, each, weight in own)
    assert values["accuracy/stars"] == pytest.approx(right / total)
    of_second = sum(-w * math.log(shares[1] if each == 1 else 1 - shares[1]) for shares, each, w in own)
    assert values["logloss/stars=2"] == pytest.approx(of_second / total, rel=1e-5)


def test_a_slice_tells_how_many_samples_have_a_label() -> None:
    labels = torch.tensor([[1, math.nan], [0, 1], [1, 0], [0, 1], [1, 1]])
    target = Target(("click", "buy"), may_be_missing=True)
    predicted = Predicted(torch.randn(5, 2), labels)
    metrics = MetricsConfig(names=("auc",), slices=("country",))
    found = evaluate(predicted, metrics, target, country=["DE", "DE", "DE", "FR", "FR"]).slices["country"]
    assert (found["DE"]["samples"], found["DE"]["samples/buy"], found["FR"]["samples"]) == (3, 2, 2)
    assert found["FR"]["samples/buy"] == 2, "all have it"
    assert "samples/click" not in found["DE"]
    titles, rows = slice_rows(found)
    assert titles == ["label", "samples", "AUC"]
    assert [row[:3] for row in rows] == [
        ["DE", "click", "3"],
        ["DE", "buy", "2"],
        ["FR", "click", "2"],
        ["FR", "buy", "2"],
    ]


def test_slices_with_few_samples_are_one() -> None:
    column = ValueNumbers(np.array([2, 0, 0, 1, 2, 2, -1]), ["a", "b", "c"])
    assert [(name, rows.tolist()) for name, rows in column.slices(2)] == [
        ("c", [0, 4, 5]),
        ("a", [1, 2]),
        (OTHERS, [3, 6]),
    ]
    assert [name for name, _ in column.slices(4)] == ["c", "a", MISSING, "b"]
    assert not list(ValueNumbers(np.empty(0, np.int64), []).slices(3))


def test_values_are_told_apart_as_texts_over_all_chunks() -> None:
    tables = [pa.table({"a": pa.array([3, None, 4])}), pa.table({"a": pa.array(["4", "x", "3"])})]
    found = value_numbers(tables, ["a"])["a"]
    texts = [None if number < 0 else found.values[number] for number in found.numbers]
    assert texts == ["3", None, "4", "4", "x", "3"]
    with pytest.raises(ConfigError, match="column 'a' is of type list"):
        value_numbers([pa.table({"a": [[1], [2, 3]]})], ["a"])


def test_what_the_data_do_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"metrics.group, metrics.slices: a.csv: no column 'usr'. Or leave them out"):
        Evaluator(Target(), MetricsConfig(group="usr"), Columns(user=[1]), ALONE)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="column 'user' is of type list"):
        Evaluator(Target(), MetricsConfig(group="user"), Columns(user=[[1]]), ALONE)  # type: ignore[arg-type]
    nothing: Any = object()
    with pytest.raises(ConfigError, match='needed data of kind "table" or "parquet"'):
        Evaluator(Target(), MetricsConfig(group="user"), nothing, ALONE)
    with pytest.raises(DataError, match="read for 1 held-out samples, and there are 2 predictions"):
        evaluate(Predicted(torch.zeros(2), torch.zeros(2)), MetricsConfig(group="user"), user=[1])


def columns_in(folder: Path, form: str, cells: list[str | None]) -> ValueNumbers:
    """The values of a column of texts, as an evaluation has them, from a file of this form."""
    labels, numbers = [0] * len(cells), [*range(len(cells))]
    if form == "csv":
        lines = [f"0,{n},{'' if cell is None else cell}" for n, cell in enumerate(cells)]
        (folder / "a.csv").write_text("\n".join(["label,number,user", *lines]) + "\n")
    else:
        kind = pa.string() if form == "dictionary" else pa.type_for_alias(form)
        users = pa.array(cells, kind)
        users = users.dictionary_encode() if form == "dictionary" else users
        pq.write_table(pa.table({"label": labels, "number": numbers, "user": users}), folder / "a.parquet")
    table = TableConfig({"item": TableFeature("sparse", column="number", mapping="none", num_rows=99)}, files=("*",))
    source: Any = open_source(DataConfig("table", str(folder), table=table, eval_fraction=1.0, num_workers=0))
    return value_numbers(source.held_out_columns(["user"]), ["user"])["user"]


@pytest.mark.slow
@given(cells=st.lists(st.sampled_from(["", None, "DE", "7", "7.0", "True", "true", "é"]), min_size=1, max_size=12))
@settings(max_examples=15, deadline=None)
def test_a_value_is_the_same_whatever_the_file_and_an_empty_text_is_none(cells):
    found = []
    for form in ("csv", "string", "large_string", "binary", "dictionary"):
        with TemporaryDirectory() as folder:
            column = columns_in(Path(folder), form, cells)
        found.append([MISSING if number < 0 else column.values[number] for number in column.numbers])
    same = {"": MISSING, None: MISSING, "7.0": "7", "True": "true"}
    assert found == [[same.get(cell, cell) for cell in cells]] * 5


def test_numbers_are_the_same_values_as_their_texts_and_not_a_number_is_none():
    kinds = {"float": [7.0, math.nan, None], "text": ["7.0", "", None], "int": [7, None, None]}
    for cells in kinds.values():
        [column] = value_numbers([pa.table({"n": pa.array(cells)})], ["n"]).values()
        assert (column.numbers.tolist(), column.values) == ([0, -1, -1], ["7"])
