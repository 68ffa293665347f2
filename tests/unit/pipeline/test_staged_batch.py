"""A batch that is written to while the pipeline has it is refused, whatever its class; others train."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from embershard.errors import CacheError, DataError
from embershard.pipeline import staged_batch
from embershard.pipeline.pipelined_forward import ModelInputs, PipelinedForward
from embershard.pipeline.staged_batch import IdExchange, StagedBatch, Streams, Window

CPU = torch.device("cpu")


class Movable:
    """What the pipeline needs of a batch."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        return self

    def record_stream(self, stream: Any) -> None: ...


class Plain(Movable):
    def __init__(self, features: KeyedJaggedTensor, labels: Tensor) -> None:
        self.features, self.labels = features, labels


class Slots(Movable):
    __slots__ = ("features", "labels")

    def __init__(self, features: KeyedJaggedTensor, labels: Tensor) -> None:
        self.features, self.labels = features, labels


class Mapped(Movable, collections.UserDict):  # type: ignore[type-arg]
    def __init__(self, features: KeyedJaggedTensor, labels: Tensor) -> None:
        super().__init__(features=features, labels=labels)


class Nested(Movable):
    """A batch of parts, of which one refers back to it."""

    def __init__(self, features: KeyedJaggedTensor, labels: Tensor) -> None:
        self.parts = [Plain(features, labels)]
        self.parts[0].whole = self  # type: ignore[attr-defined]


class Untold(Movable):
    """Nothing can be read of it but by its method."""

    def __init__(self, features: KeyedJaggedTensor, labels: Tensor) -> None:
        self.sparse: Callable[[], KeyedJaggedTensor] = lambda: features


@dataclasses.dataclass
class Data(Movable):
    features: KeyedJaggedTensor
    labels: Tensor


class _Pair(NamedTuple):
    features: KeyedJaggedTensor
    labels: Tensor


class Named(Movable, _Pair): ...


class Pipelined(Pipelineable):
    def __init__(self, features: KeyedJaggedTensor, labels: Tensor) -> None:
        self.features, self.labels = features, labels

    def to(self, device: torch.device, non_blocking: bool = False) -> Pipelined:
        return self

    def record_stream(self, stream: Any) -> None: ...


class Announcing:
    """The forward of a module that reads a batch's features."""

    name, args = "bags", cast(Any, None)

    def __init__(self, features_of: Callable[[Any], KeyedJaggedTensor]) -> None:
        self.features_of, self.args, self.module = features_of, self, None

    def build_args_kwargs(self, batch: Any) -> tuple[list[Any], dict[str, Any]]:
        return [self.features_of(batch)], {}

    def start(self, batch: Any, *_: Any) -> Any:
        return self

    def install(self) -> None: ...

    def expect(self, args: list[Any], kwargs: dict[str, Any]) -> None: ...


def staged(batch: Any, *forwards: Announcing) -> StagedBatch:
    announced = [forward.features_of(batch) for forward in forwards]
    inputs = ModelInputs(nn.Module(), None)
    inputs.forwards = cast("list[PipelinedForward]", forwards)
    return StagedBatch(batch, announced, CPU, inputs, Streams(CPU), told=np.empty((1, 0)))


def parts() -> tuple[KeyedJaggedTensor, Tensor]:
    ids = torch.arange(6)
    return KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([2, 1, 3])), torch.zeros(3)


KINDS = [Plain, Slots, Mapped, Nested, Data, Named, Pipelined]


@pytest.mark.parametrize("written", ["ids", "labels"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_is_refilled_is_refused(kind: Any, written: str) -> None:
    features, labels = parts()
    batch = staged(kind(features, labels))
    (features.values() if written == "ids" else labels).add_(1)
    with pytest.raises(DataError, match="written to in place"):
        batch.begin()


def test_ids_that_only_the_model_can_read_are_watched() -> None:
    features, labels = parts()
    batch = staged(Untold(features, labels), Announcing(lambda batch: batch.sparse()))
    features.values().add_(1)
    with pytest.raises(DataError, match="written to in place"):
        batch.begin()


@pytest.mark.parametrize("kind", [*KINDS, Untold])
def test_a_batch_that_nobody_writes_to_trains(kind: Any) -> None:
    """Also where it refers to a model, whose weights change with every step."""
    features, labels = parts()
    whole = kind(features, labels)
    model = nn.Linear(1, 1)
    if hasattr(whole, "__dict__"):
        whole.model = model
    batch = staged(whole, Announcing(lambda batch: features))
    with torch.no_grad():
        model.weight.add_(1.0)
    assert batch.begin() is whole


class Sized:
    """A staged batch of so many ids, each of which takes 20 bytes."""

    def __init__(self, num_ids: int) -> None:
        self.num_ids, self.known_bytes = num_ids, 20 * num_ids

    def receive(self) -> None: ...

    def know(self, others: Sequence[Any] = ()) -> None: ...


@pytest.mark.parametrize("every", [1, 2, 7, 8, 9])
def test_batches_of_changing_sizes_are_weighed_as_they_are(every: int) -> None:
    window, sizes = Window(), [1 if number % every == 0 else 1000 for number in range(64)]
    for size in sizes:
        window.add(cast(Any, Sized(size)))
        window.arrive()
        window.know()
    assert window.known_bytes == pytest.approx(20 * sum(sizes), rel=0.07)
    while len(window):
        window.take_first()
    assert window.known_bytes == 0


class Told:
    """A staged batch that notes when it becomes known; `fails` before that, once."""

    num_ids = known_bytes = 10

    def __init__(self) -> None:
        self.times_known, self.fails, self.step = 0, False, 0

    def receive(self) -> None: ...

    def know(self, others: Sequence[Any] = ()) -> None:
        for each in (self, *others):
            if each.fails:
                each.fails = False
                raise KeyboardInterrupt
            each.times_known += 1

    def forget(self, pools: Any) -> None: ...


def window_of(count: int, **sizes: int) -> tuple[Window, list[Any]]:
    window, batches = Window(**sizes), [Told() for _ in range(count)]
    for each in batches:
        window.add(cast(Any, each))
        window.arrive()
    return window, batches


def test_an_interrupted_stage_goes_on_in_order() -> None:
    window, batches = window_of(6)
    batches[4].fails = True
    with pytest.raises(KeyboardInterrupt):
        window.know()
    assert (window.num_known, window.num_unknown, window.known_bytes) == (4, 2, 40)
    window.know()
    assert (window.num_known, window.num_unknown, window.known_bytes) == (6, 0, 60)
    assert [each.times_known for each in batches] == [1] * 6


def test_a_batch_is_not_made_resident_before_all_of_its_step_are_known() -> None:
    """Its ids would get rows alone."""
    window, batches = window_of(5, micro_batches=2)
    window.know()
    assert window.coming(1, 8) == batches[1:4]
    window.know(is_over=True)
    assert window.coming(1, 8) == batches[1:]


def test_what_was_forgotten_becomes_known_again() -> None:
    window, batches = window_of(5)
    window.know()
    window.forget([])
    assert (window.num_known, window.num_unknown) == (0, 5)
    window.take_first()  # it is only evaluated
    window.know()
    assert [each.times_known for each in batches] == [1, 2, 2, 2, 2]


@pytest.mark.parametrize("was_taken", [False, True])
def test_a_batch_that_did_not_begin_is_the_next_one_again_and_there_once(was_taken: bool) -> None:
    """Its step was interrupted before it left the window, or after."""
    window, staged = Window(), [cast(Any, Sized(size)) for size in (10, 20)]
    for each in staged:
        window.add(each)
        window.arrive()
    window.know()
    known_bytes = window.known_bytes
    if was_taken:
        window.take_first()
    window.put_back(staged[0])
    assert window.coming(0, 3) == staged
    assert window.known_bytes == known_bytes


def test_an_exchange_that_did_not_end_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that had begun no collective is."""
    begun = int  # always 0
    monkeypatch.setattr(staged_batch, "collectives_begun", lambda: begun())
    exchange = IdExchange()
    with pytest.raises(MemoryError), exchange:
        raise MemoryError
    begun = iter(range(99)).__next__
    with exchange:
        pass
    with pytest.raises(KeyboardInterrupt), exchange:
        raise KeyboardInterrupt
    with pytest.raises(CacheError, match=r"did not end on this rank \(KeyboardInterrupt\)"), exchange:
        pytest.fail("begun again")
