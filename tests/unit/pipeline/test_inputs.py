"""What is found in a batch, whatever its class keeps its tensors in."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from embershard.data import Batch
from embershard.pipeline.batch_tensors import tensors_of


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
