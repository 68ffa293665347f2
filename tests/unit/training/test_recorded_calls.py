"""The dense part of a step can be a CUDA graph: recorded on a CPU with the memory of its operations, and repeated
without Python, it trains the same bits. Controls of what a graph would do wrong are noticed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from embershard.data import Batch
from embershard.distributed import CheckpointConfig, Ranks
from embershard.errors import ConfigError
from embershard.extras import dense_graph
from embershard.extras.dense_graph import Recording
from embershard.extras.verify.equivalence import compare_with_stock
from embershard.models.loss import WithLoss
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.dense_call import Computed, DenseCall
from embershard.training.parts.loss_monitor import Losses
from embershard.training.reports import EvalReport, TrainReport
from embershard.training.trainer import Trainer
from tests.covering import keep
from tests.unit.training import poisoned
from tests.unit.training.dense_models import MODELS, config_of, counted, samples_in
from tests.unit.training.poisoned import Feed, state_of
from tests.unit.training.recorded import calls_recorded, record

pytestmark = [pytest.mark.slow, pytest.mark.extra]  # whole training runs

STEPS = 12


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return samples_in(tmp_path_factory.mktemp("recorded"))


class Smaller(Feed):
    """Leaves half of some batches out, by their number."""

    def __init__(self, trainer: Trainer, halved: Collection[int]) -> None:
        super().__init__(trainer)
        self._halved = halved

    def __next__(self) -> Batch:
        batch = super().__next__()
        return batch.micro_batches(2)[0] if self._number in self._halved else batch


def trained(
    config: RunConfig,
    ranks: Ranks,
    *,
    records: bool,
    prepare: Callable[[Trainer], Any] = lambda _: None,
    after_step: Callable[[Trainer], Any] = lambda _: None,
) -> tuple[list[Any], dict[str, Tensor], list[int]]:
    """Return losses and figures of evaluations, the end, and the samples of the calls that Python computed."""
    with ExitStack() as stack:
        computed = counted(stack)
        if records:
            stack.enter_context(calls_recorded())
        trainer = Trainer(config, ranks)
        stack.callback(trainer.close)
        prepare(trainer)
        found: list[Any] = []
        for report in trainer.train():
            if isinstance(report, TrainReport):
                found.append((report.loss, dict(report.label_losses), report.quality))
                after_step(trainer)
            elif isinstance(report, EvalReport):
                found.append(report.quality)
        return found, state_of(trainer), computed


def different(
    one: tuple[list[Any], dict[str, Tensor], Any], other: tuple[list[Any], dict[str, Tensor], Any]
) -> list[str]:
    """Return what differs between two lives."""
    names = [name for name in one[1].keys() | other[1].keys() if not torch.equal(one[1][name], other[1][name])]
    return names + ["figures"] * (str(one[0]) != str(other[0]))  # as text: NaN equals NaN


def beside(config: RunConfig, ranks: Ranks, **given: Any) -> list[int]:
    """Train with calls that are recorded and with others, which must be equal; return what Python computed."""
    recorded, plain = (trained(config, ranks, records=each, **given) for each in (True, False))
    assert different(recorded, plain) == []
    assert len(plain[2]) == STEPS
    return recorded[2]


@pytest.mark.smoke
@pytest.mark.parametrize("name", keep(["dlrm, bf16", "ple"], MODELS))
def test_a_recorded_call_trains_the_same_bits(name: str, samples: Path, ranks: Ranks) -> None:
    """A batch comes first, the second has its shape and warms up, and is recorded: Python computes no other."""
    assert beside(config_of(name, samples), ranks) == [16] * 3


def test_batches_of_another_shape_are_computed_by_python(samples: Path, ranks: Ranks) -> None:
    """The shape that is recorded is the first one of two batches in a row."""
    config, halved = config_of("dlrm, adam", samples), {1, 6, 9, 10}
    assert beside(config, ranks, prepare=lambda trainer: Smaller(trainer, halved)) == [8, 16, 16, 16, 8, 8, 8]


def test_a_parameter_elsewhere_is_recorded_anew(samples: Path, ranks: Ranks) -> None:
    def move(trainer: Trainer) -> None:
        if trainer.steps == 6:
            parameter = next(iter(trainer.optimizers.dense_parameters.values()))
            parameter.data = parameter.data.clone()

    assert beside(config_of("dlrm, adam", samples), ranks, after_step=move) == [16] * 5


def test_evaluations_and_other_values_of_parameters(samples: Path, ranks: Ranks) -> None:
    """A load writes parameters where they are, as does an average that serves evaluations."""

    def load(trainer: Trainer) -> None:
        if trainer.steps == 6:
            trainer.model.load_state_dict(trainer.model.state_dict())
            with torch.no_grad():
                for parameter in trainer.optimizers.dense_parameters.values():
                    parameter.mul_(0.5)

    config = config_of("dlrm, adam", samples)
    config = replace(config, train=replace(config.train, eval_every=3, ema=0.9))
    assert beside(config, ranks, after_step=load) == [16] * 3


def test_a_resume_goes_on_with_what_is_recorded(samples: Path, ranks: Ranks, tmp_path: Path) -> None:
    config = replace(config_of("dlrm, adam", samples), checkpoint=CheckpointConfig(every_steps=8, at_end=False))
    with ExitStack() as stack:
        computed = counted(stack)
        stack.enter_context(calls_recorded())
        trainer = Trainer(config, ranks, tmp_path)
        stack.callback(trainer.close)
        ends = []
        for _ in range(2):
            for _ in trainer.train():
                pass
            ends.append(state_of(trainer))
            if len(ends) == 1:
                trainer.resume(tmp_path / "step_8")
    assert different(([], ends[0], None), ([], ends[1], None)) == []
    assert computed == [16] * 3


def test_batches_that_are_skipped(ranks: Ranks) -> None:
    config = poisoned.config_of("look-ahead")
    (of_recorded, recorded), (of_plain, plain) = (
        trained(config, ranks, records=each, prepare=lambda t: Feed(t, poisoned={2, 7}))[:2] for each in (True, False)
    )
    assert different((of_recorded, recorded, None), (of_plain, plain, None)) == []
    assert all(torch.isfinite(each).all() for each in recorded.values())
    assert all(math.isfinite(each[0]) for each in of_recorded if isinstance(each, tuple))


# -- controls: what a graph would do wrong

FORWARD, COMPUTE, EXACT, REPEAT = WithLoss.forward, DenseCall.compute, Losses.exact, Recording.repeat


class Growing:
    """A factor of the loss that Python changes."""

    def __init__(self) -> None:
        self.factor = 1.0

    def forward(self, layers: WithLoss, batch: Any) -> Any:
        loss, others = FORWARD(layers, batch)
        self.factor += 0.1
        return loss * self.factor, others


def growing(stack: ExitStack) -> None:
    own = Growing()
    stack.enter_context(mock.patch.object(WithLoss, "forward", lambda layers, batch: own.forward(layers, batch)))


def without_labels(stack: ExitStack) -> None:
    """Leave the first batch's labels where they are."""

    def repeat(recording: Any, inputs: list[Tensor]) -> Computed:
        return REPEAT(recording, [*inputs[:2], recording._inputs[2], *inputs[3:]])

    stack.enter_context(mock.patch.object(Recording, "repeat", repeat))


def written_by_python(stack: ExitStack) -> None:
    """Give the parameters their gradients inside of what is recorded: Python drops them before each step."""

    def compute(call: DenseCall, rows: Tensor, batch: Batch) -> Computed:
        found = COMPUTE(call, rows, batch)
        for parameter, gradient in zip(call._parameters, found.gradients[1:], strict=True):
            parameter.grad = gradient
        return found

    stack.enter_context(mock.patch.object(DenseCall, "compute", compute))
    stack.enter_context(mock.patch.object(DenseCall, "write"))


def with_old_casts(stack: ExitStack) -> None:
    """Keep the casts of parameters that the warm-up made."""
    stack.enter_context(mock.patch.object(dense_graph, "clear_autocast_cache"))


FAULTS = {
    "a factor that Python changes": (growing, "dlrm"),
    "an input that is not copied": (without_labels, "dlrm"),
    "gradients that Python drops": (written_by_python, "dlrm"),
    "casts from before": (with_old_casts, "dlrm, bf16"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_fails_with(fault: str, samples: Path, ranks: Ranks) -> None:
    break_it, name = FAULTS[fault]
    lives = []
    for records in (True, False):
        with ExitStack() as stack:
            break_it(stack)
            lives.append(trained(config_of(name, samples), ranks, records=records))
    assert any(each.startswith("model") for each in different(*lives)), "a graph with this fault would train the same"


def test_a_read_of_the_device_is_refused(samples: Path, ranks: Ranks) -> None:
    def reading(losses: Losses, loss: Tensor, predicted: Any) -> tuple[Tensor, Tensor]:
        exact, sums = EXACT(losses, loss, predicted)
        return exact * (1.0 if loss.item() < 100 else 0.0), sums

    with (
        mock.patch.object(Losses, "exact", reading),
        pytest.raises(RuntimeError, match="_local_scalar_dense cannot be captured"),
    ):
        trained(config_of("dlrm", samples), ranks, records=True)


# -- the setting


@pytest.mark.parametrize(
    ("changes", "device", "message"),
    [
        ({}, "cpu", r"train\.cuda_graph: got true on a CPU, needed a GPU\."),
        ({"accumulate": 2}, "cuda", r"train\.cuda_graph: got true, which .* train\.accumulate: "),
        ({"precision": "fp64"}, "cuda", r"train\.cuda_graph: got true, which .* model\.model has hooks"),
    ],
)
def test_a_graph_that_there_cannot_be_is_refused(
    changes: dict[str, Any], device: str, message: str, samples: Path, ranks: Ranks
) -> None:
    """On what would be a GPU, before anything trains."""
    config = replace(
        config_of("dlrm", samples), train=TrainConfig(cuda_graph=True, batch_size=16, device="cpu", **changes)
    )
    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(mock.patch("embershard.training.trainer.check_process"))
            stack.enter_context(mock.patch("embershard.training.trainer.arithmetic"))
        with pytest.raises(ConfigError, match=message):
            Trainer(config, ranks)


def test_a_capture_warms_up_and_is_captured_beside_the_trainings_stream() -> None:
    """The order of calls of CUDA; what they do, only a GPU shows (`tests/gpu`)."""
    called = mock.MagicMock()
    names = ("Stream", "current_stream", "stream", "CUDAGraph", "graph")
    with mock.patch.multiple(torch.cuda, **{name: getattr(called, name) for name in names}):
        found, replay = dense_graph.capture(called.compute)
    side, graph = called.Stream.return_value, called.CUDAGraph.return_value
    made = [str(each).replace("()", "") for each in called.mock_calls if "compute" in str(each) or "__" in str(each)]
    inside = ["call.stream.__enter__", *["call.compute"] * 3, "call.stream.__exit__(None, None, None)"]
    assert made == [*inside, "call.graph.__enter__", "call.compute", "call.graph.__exit__(None, None, None)"]
    called.graph.assert_called_once_with(graph, stream=side, capture_error_mode="thread_local")
    side.wait_stream.assert_called_once_with(called.current_stream.return_value)
    called.current_stream.return_value.wait_stream.assert_called_once_with(side)
    assert (found, replay) == (called.compute.return_value, graph.replay)


def test_the_setting_asks_for_a_capture(samples: Path, ranks: Ranks) -> None:
    """With torch's graphs in place of CUDA's: a call is captured once, behind its warm-up, by a stream beside."""
    said = list[str]()

    def captured(compute: Callable[[], Computed]) -> Any:
        said.append("captured")
        return record(compute)

    config = config_of("dlrm", samples)
    config = replace(config, train=replace(config.train, cuda_graph=True))
    with (
        mock.patch("embershard.training.trainer.check_process"),
        mock.patch("embershard.training.arithmetic.check_process"),
        mock.patch.object(dense_graph, "capture", captured),
    ):
        found = trained(config, ranks, records=False)
        assert said == ["captured"]
        verdict = compare_with_stock(config, ranks, STEPS)  # whose other run has none
    assert different(found, trained(config_of("dlrm", samples), ranks, records=False)) == []
    assert verdict.is_equal, verdict
    assert len(said) == 1 + len(verdict.caches)
