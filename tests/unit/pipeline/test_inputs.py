"""What is found in a batch, and moved away and back, whatever its class keeps its tensors in."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from embershard.data import Batch
from embershard.pipeline.batch_tensors import HostCopy, tensors_of


class _Streamable(Multistreamable):
    def record_stream(self, stream: Any) -> None: ...


@dataclasses.dataclass
class Plain:
    first: Tensor
    second: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    first: Tensor
    second: Any = None


@dataclasses.dataclass(slots=True)
class SlottedFurther(Slotted):
    third: Any = None


@dataclasses.dataclass(slots=True)
class SlottedStreamable(_Streamable):
    first: Tensor
    second: Any = None


class Streamable(_Streamable):
    def __init__(self, first: Tensor, second: Any = None) -> None:
        self.first, self.second = first, second


class _Slots(_Streamable):
    __slots__ = ("__private", "absent")

    def __init__(self, private: Any) -> None:
        self.__private = private


class StreamableSlots(_Slots):
    __slots__ = "first"

    def __init__(self, first: Tensor, second: Any = None) -> None:
        super().__init__(second)
        self.first = first


@pytest.mark.parametrize("kind", [Plain, Slotted, SlottedFurther, SlottedStreamable, Streamable, StreamableSlots])
def test_every_tensor_of_a_batch_is_found(kind):
    features = KeyedJaggedTensor(keys=["f"], values=torch.arange(3), lengths=torch.tensor([1, 2]))
    inner = Slotted(torch.zeros(1), (torch.ones(2), {"more": torch.ones(3)}))
    found = list(tensors_of(kind(torch.arange(5.0), [inner, features, "text", Plain])))
    assert {len(each) for each in found} == {5, 1, 2, 3}
    assert any(each is features.values() for each in found)
    assert len({id(each) for each in found}) == len(found) == 6


def test_what_a_dataclass_got_besides_its_fields_is_found():
    batch = Plain(torch.zeros(1))
    batch.later = torch.zeros(2)  # type: ignore[attr-defined]
    assert {len(each) for each in tensors_of(batch)} == {1, 2}


def test_a_batch_is_not_copied_only_where_all_of_it_is_on_the_device():
    features = KeyedJaggedTensor(["a"], torch.tensor([1]), lengths=torch.tensor([1]))
    batch = Batch(torch.zeros(1, 2), features, torch.zeros(1), weights=torch.ones(1))
    assert batch.to(torch.device("cpu")) is batch
    mixed = Batch(torch.zeros(1, 2), features, torch.zeros(1), weights=torch.ones(1, device="meta"))
    moved = mixed.to(torch.device("meta"))
    assert moved is not mixed
    assert moved.dense_features.is_meta
    with pytest.raises(NotImplementedError):  # the weights have no data to copy, and they are not left where they are
        mixed.to(torch.device("cpu"))


CPU = torch.device("cpu")


class Pair(NamedTuple):
    first: Tensor
    second: Any


@pytest.mark.parametrize(
    "kind", [Plain, Slotted, SlottedFurther, SlottedStreamable, Streamable, StreamableSlots, Pair, lambda *it: list(it)]
)
def test_a_batch_comes_back_as_it_was(kind):
    features = KeyedJaggedTensor(["f", "g"], torch.arange(3), lengths=torch.tensor([1, 2]), weights=torch.rand(3))
    features.offset_per_key()  # is kept in it
    inner = Slotted(torch.zeros(1), (torch.ones(2), {"more": torch.ones(3)}))
    batch = kind(torch.arange(5.0), [inner, features, "text"])
    before = [(id(each), each.clone()) for each in tensors_of(batch)]
    away = HostCopy(batch, CPU)
    assert not {id(each) for each in tensors_of(away._value)} & {number for number, _ in before}
    for tensor in tensors_of(batch):
        tensor.fill_(9)  # as if its memory was another one's by now
    back = away.restore()
    assert type(back) is type(batch)
    found = tensors_of(back)
    assert [torch.equal(each, then) for each, (_, then) in zip(found, before, strict=True)] == [True] * len(before)
    assert [id(each) for each in tensors_of(batch)] == [number for number, _ in before], "the batch has its own still"


def test_views_of_one_memory_come_back_as_such_and_are_moved_once():
    memory = torch.arange(100, dtype=torch.int64)
    views = [memory[20:30], memory[25:40].view(3, 5).t(), memory[20:30]]
    away = HostCopy([*views, views[0]], CPU)
    assert away.num_bytes == 20 * 8
    back = away.restore()
    assert [torch.equal(one, other) for one, other in zip(back, [*views, views[0]], strict=True)] == [True] * 4
    assert len({each.untyped_storage().data_ptr() for each in back}) == 1
    assert back[3] is back[0]


def test_what_others_have_too_and_what_is_elsewhere_stays():
    """A tensor that two batches share is copied, and the other batch's is not touched; one of another device stays."""
    shared, elsewhere, model = torch.arange(4), torch.zeros(2, device="meta"), torch.nn.Linear(1, 1)
    one = Plain(shared, [elsewhere, model, torch.zeros(1, requires_grad=True), torch.empty(0)])
    other, away = Plain(shared), HostCopy(one, CPU)
    assert one.first is other.first is shared
    back = away.restore()
    assert back.first is not shared
    assert [back.second[number] is one.second[number] for number in range(4)] == [True] * 4


def test_maps_of_other_classes_come_back_too():
    batch = collections.defaultdict(list, {"ids": torch.arange(3)})
    away = HostCopy(batch, CPU)
    batch["ids"].fill_(9)
    assert (type(away.restore()), away.restore()["ids"].tolist()) == (collections.defaultdict, [0, 1, 2])


def test_a_batch_that_refers_to_itself_comes_back_so():
    batch = Plain(torch.arange(3))
    batch.second = [batch, {"whole": batch}]
    back = HostCopy(batch, CPU).restore()
    assert back is not batch
    assert back.second[0] is back.second[1]["whole"] is back
