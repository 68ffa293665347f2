"""Metrics against hand-made formulas, on the samples of one rank and undefined cases; and predictions of a model."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.metrics.auc import compute_auc
from torchrec.metrics.ne import compute_cross_entropy, compute_ne
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.data import Batch, Target
from embershard.distributed import Ranks
from embershard.errors import DataError
from embershard.metrics.figures import ETA, main_values
from embershard.metrics.predictions import WINDOW_SAMPLES, Predicted, PredictionWindow, judge, predicted_of

CLICKS = Target()


def judged(outputs: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None) -> Any:
    return judge(CLICKS, Predicted(outputs, labels, weights))


def test_against_formulas_written_out():
    torch.manual_seed(0)
    logits, labels = torch.randn(200), (torch.rand(200) < 0.3).float()
    quality = judged(logits, labels)
    p = torch.sigmoid(logits.double())
    clicks, others = p[labels == 1], p[labels == 0]
    pairs = (clicks[:, None] > others[None, :]).double() + 0.5 * (clicks[:, None] == others[None, :]).double()
    logloss = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean().item()
    mean = labels.double().mean().item()
    background = -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean))
    assert quality["samples"] == 200
    assert quality["auc"] == pytest.approx(pairs.mean().item(), rel=1e-12)
    assert quality["logloss"] == pytest.approx(logloss, rel=1e-9)
    assert quality["ne"] == pytest.approx(logloss / background, rel=1e-9)
    assert quality["accuracy"] == pytest.approx(((p > 0.5) == (labels == 1)).double().mean().item())
    assert quality["calibration"] == pytest.approx(p.sum().item() / labels.sum().item())


def test_ties_count_half():
    assert judged(torch.zeros(10), torch.tensor([0.0, 1.0] * 5))["auc"] == pytest.approx(0.5)


def test_a_weighted_auc_does_not_depend_on_the_order_of_equal_predictions():
    """Which differs with the number of ranks. `torchrec.metrics`, which takes them as they come, is no oracle here."""
    generator = torch.Generator().manual_seed(0)
    predictions = torch.rand(300, generator=generator).round(decimals=1)
    labels, weights = (torch.rand(300, generator=generator) < 0.4).float(), torch.rand(300, generator=generator)
    found, theirs = set(), set()
    for _ in range(5):
        order = torch.randperm(300, generator=generator)
        columns = predictions[order], labels[order], weights[order]
        found.add(round(judged(torch.logit(columns[0]), *columns[1:])["auc"], 12))
        theirs.add(round(float(compute_auc(1, *([column.double()[None]] for column in columns))), 12))
    assert len(found) == 1
    assert len(theirs) > 1


def test_what_is_undefined_is_none():
    nothing = judged(torch.empty(0), torch.empty(0))
    assert (nothing["samples"], nothing["auc"], nothing["logloss"]) == (0, None, None)
    no_clicks = judged(torch.randn(5), torch.zeros(5))
    assert (no_clicks["auc"], no_clicks["ne"], no_clicks["calibration"]) == (None, None, None)
    assert no_clicks["logloss"] is not None
    assert judged(torch.randn(5), torch.ones(5))["auc"] is None


def test_a_weight_of_n_counts_as_n_samples():
    """For every figure, with ties among the predictions; a weight of 0 as no sample."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(60, generator=generator).round(decimals=1)
    labels = (torch.rand(60, generator=generator) < 0.4).float()
    weights = torch.randint(0, 4, (60,), generator=generator)
    for target in (CLICKS, Target(task="regression")):
        weighted = judge(target, Predicted(logits, labels, weights.float()))
        repeated = judge(target, Predicted(*(each.repeat_interleave(weights) for each in (logits, labels))))
        assert weighted.pop("samples") == 60
        for name, value in weighted.items():
            assert value == pytest.approx(repeated[name], abs=1e-6), name
            assert value != pytest.approx(judge(target, Predicted(logits, labels))[name], abs=1e-4)


def test_regression_by_formulas_and_several_labels():
    outputs = torch.tensor([[1.0, 0.0], [2.0, 0.0], [4.0, 0.0]])
    labels = torch.tensor([[1.0, 5.0], [3.0, 5.0], [5.0, 5.0]])
    values = judge(Target(("a", "b"), "regression"), Predicted(outputs, labels))
    assert values["rmse/a"] == pytest.approx(math.sqrt(2 / 3))
    assert values["mae/a"] == pytest.approx(2 / 3)
    assert values["r2/a"] == pytest.approx(1 - (2 / 3) / (8 / 3))
    assert (values["rmse/b"], values["r2/b"]) == (5.0, None)
    assert main_values(values) == {"rmse/a": values["rmse/a"], "rmse/b": 5.0}
    nothing = judge(Target(task="regression"), Predicted(torch.empty(0), torch.empty(0)))
    assert (nothing["samples"], nothing["rmse"], nothing["r2"]) == (0, None, None)


class TwoRanks(Ranks):
    """Stands for two ranks, of which the other one holds no samples."""

    def all_gather(self, value: torch.Tensor) -> torch.Tensor:
        return torch.stack([value, torch.zeros_like(value)])


RANKS = TwoRanks(0, 2, 0, 2, torch.device("cpu"))


def numbered(start: int, count: int) -> Predicted:
    """Predictions that tell which samples they are of."""
    return Predicted(torch.arange(start, start + count).float(), torch.arange(count).remainder(2).float())


def chosen(window: PredictionWindow) -> list[int]:
    return [int(number) for number in torch.cat(window._parts)[:, 0]]


def test_a_report_of_small_batches_has_the_newest_samples():
    window = PredictionWindow(CLICKS, world_size=2)
    assert window.quality(RANKS)["samples"] == 0
    for start in range(0, 3000, 100):
        window.add(numbered(start, 100))
        window.add(Predicted(torch.empty(0), torch.empty(0)))
    assert chosen(window) == list(range(3000 - 2000, 3000))
    assert window.quality(RANKS)["samples"] == 2000


@pytest.mark.parametrize("size", [129, 1000, 65_536])
def test_a_report_of_large_batches_has_a_few_samples_of_many(size: int):
    window = PredictionWindow(CLICKS, world_size=2)
    for start in range(0, 40 * size, size):
        window.add(numbered(start, size))
    found = chosen(window)
    assert len(found) <= WINDOW_SAMPLES // 2
    assert {number // size for number in found} >= set(range(40 - 16, 40))


@pytest.mark.slow
def test_all_samples_of_a_batch_have_the_same_chance():
    window, taken = PredictionWindow(CLICKS, world_size=16), Counter[int]()
    for _ in range(3 * 2**10):
        window.add(numbered(0, 100))  # every seventh
        taken.update(window._parts[-1][:, 0].int().tolist())
    assert set(taken) == set(range(100))
    assert min(taken.values()) > 0.99 * max(taken.values())


def test_any_number_of_ranks_chooses_the_same_samples():
    whole, parts = PredictionWindow(CLICKS, 1), [PredictionWindow(CLICKS, 4) for _ in range(4)]
    for start in range(0, 20 * 4096, 4096):
        whole.add(numbered(start, 4096))
        for rank, part in enumerate(parts):
            part.add(numbered(start + 1024 * rank, 1024))
    assert sorted(chosen(whole)) == sorted(number for part in parts for number in chosen(part))


class Counted(TorchDispatchMode):
    """Counts operations of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.name()] += 1
        return func(*args, **(kwargs or {}))


#: Between a tensor and an array: no kernels.
FREE = ("aten::detach", "aten::lift_fresh")


def test_operations_of_a_report() -> None:
    """It stands between two steps: what it does is counted, and more than what is counted here has a reason."""
    window = PredictionWindow(CLICKS, world_size=2)
    for start in range(20):
        window.add(numbered(start, 4096))
    window.quality(RANKS)
    with Counted() as counted:
        window.quality(RANKS)
    work = {name: count for name, count in counted.names.items() if name not in FREE}
    assert sum(work.values()) == 21, work
    assert work["aten::sum"] == 7, "entropies, positive samples and all; right ones and all; predicted, and positive"


def test_entropies_are_those_of_torchrec() -> None:
    """Bit for bit: figures of before stay comparable."""
    generator = torch.Generator().manual_seed(0)
    for scale in (0.1, 3.0, 40.0):
        for size in (3, 1000, 4096):
            logits = (torch.randn(size, generator=generator) * scale).double()
            labels, weights = (torch.rand(size, generator=generator).round(), torch.rand(size, generator=generator))
            labels[:2] = torch.tensor([0.0, 1.0])
            y, w, p = labels.double(), weights.double(), torch.sigmoid(logits)
            bits = compute_cross_entropy(y, p.clone(), w, ETA).sum()
            theirs = compute_ne(bits, w.sum(), (w * y).sum(), w.sum() - (w * y).sum(), ETA)
            found = judge(CLICKS, Predicted(logits, labels, weights))
            assert found["ne"] == float(theirs)
            assert found["logloss"] == float(bits * math.log(2) / w.sum())


CPU = torch.device("cpu")


class Constant(nn.Module):
    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        assert not self.training
        loss = batch.labels.sum()
        return loss, (loss, torch.zeros_like(batch.labels), batch.labels)


def batches(*, fail: bool) -> Iterator[Batch]:
    for _ in range(3):
        yield Batch(torch.zeros(2, 1), KeyedJaggedTensor([], torch.zeros(0), lengths=torch.zeros(0)), torch.zeros(2))
    if fail:
        raise DataError("line 7 is bad")


def test_after_all_batches() -> None:
    model = Constant()
    list(predicted_of(model, batches(fail=False), CPU, contextlib.nullcontext))
    assert model.training


def test_after_an_input_that_fails() -> None:
    model = Constant()
    with pytest.raises(DataError, match="line 7"):
        list(predicted_of(model, batches(fail=True), CPU, contextlib.nullcontext))
    assert model.training


def test_after_a_caller_that_wants_no_more() -> None:
    model = Constant()
    found = predicted_of(model, batches(fail=False), CPU, contextlib.nullcontext)
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert model.training
