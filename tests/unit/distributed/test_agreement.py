"""One rank, no process group: nothing is communicated, and the same code decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM_DCN
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from embershard.distributed import empty_like, longest, shortest
from embershard.distributed.agreement import Agreement, Supply
from embershard.errors import DataError


class Counted:
    """An iterator of 0, 1, 2, ... that counts how often it is asked, and raises an error in the end if given one."""

    def __init__(self, length: int, error: Exception | None = None) -> None:
        self.length, self.error, self.asked = length, error, 0

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> int:
        self.asked += 1
        if self.asked > self.length:
            raise self.error or StopIteration
        return self.asked - 1


def no_stand_in(_: Any) -> Any:
    raise AssertionError("one rank never needs a stand-in")


@pytest.mark.parametrize("state", list(Supply))
def test_one_rank_agrees_with_itself(state: Supply) -> None:
    agreement = Agreement("cpu")
    for _ in range(2):
        agreement.start(int(state))
        assert agreement.result() is state
    if state is Supply.FAILED:
        assert "input of rank 0 failed" in str(agreement.failure())


def test_rounds_do_not_overlap() -> None:
    agreement = Agreement("cpu")
    with pytest.raises(AssertionError, match="start"):
        agreement.result()
    agreement.start(Supply.READY)
    with pytest.raises(AssertionError, match="result"):
        agreement.start(Supply.READY)


@pytest.mark.parametrize("length", [0, 1, 5])
def test_one_rank_gets_all_its_batches(length: int) -> None:
    assert list(shortest(range(length), "cpu")) == list(range(length))
    assert list(longest(range(length), no_stand_in, "cpu")) == [(i, True) for i in range(length)]


def test_no_batch_is_taken_before_it_is_asked_for() -> None:
    batches = Counted(5)
    for batch in shortest(batches, "cpu"):
        assert batches.asked == batch + 1
    batches = Counted(5)
    for batch, _ in longest(batches, no_stand_in, "cpu"):
        assert batches.asked == batch + 1
    assert batches.asked == 6


@pytest.mark.parametrize("length", [0, 3])
def test_an_error_is_the_iterators_own(length: int) -> None:
    error = OSError("the disk is gone")
    found: list[Any] = []
    with pytest.raises(OSError) as caught:
        found.extend(found.append(batch) or () for batch in shortest(Counted(length, error), "cpu"))
    assert caught.value is error
    with pytest.raises(OSError) as caught:
        list(longest(Counted(length, error), no_stand_in, "cpu"))
    assert caught.value is error


def test_an_error_comes_after_the_batches_before_it() -> None:
    batches: Iterator[int] = shortest(Counted(3, OSError("the disk is gone")), "cpu")
    assert [next(batches) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="disk"):
        next(batches)


def test_what_cannot_be_iterated_is_an_error_of_the_input() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        next(shortest(5, "cpu"))  # type: ignore[arg-type]


def features(batch_size: int, weighted: bool = False) -> KeyedJaggedTensor:
    lengths = torch.arange(2 * batch_size, dtype=torch.int32) % 3
    ids = torch.arange(int(lengths.sum()))
    weights = torch.rand(ids.numel()) if weighted else None
    return KeyedJaggedTensor(["a", "b"], ids, lengths=lengths, weights=weights)


class Pair(NamedTuple):
    features: KeyedJaggedTensor
    labels: Tensor


@pytest.mark.parametrize("batch_size", [0, 1, 4])
def test_a_stand_in_is_one_sample_of_zeros_without_ids(batch_size: int) -> None:
    batch = Batch(torch.rand(batch_size, 3), features(batch_size), torch.ones(batch_size, dtype=torch.bool))
    stand_in = empty_like(batch)
    assert type(stand_in) is Batch
    assert torch.equal(stand_in.dense_features, torch.zeros(1, 3))
    assert torch.equal(stand_in.labels, torch.zeros(1, dtype=torch.bool))
    sparse, expected = stand_in.sparse_features, batch.sparse_features
    assert sparse.keys() == ["a", "b"]
    assert sparse.stride() == 1
    assert torch.equal(sparse.lengths(), torch.zeros(2, dtype=torch.int32))
    assert sparse.values().numel() == 0
    assert sparse.values().dtype == expected.values().dtype
    assert sparse.weights_or_none() is None


def test_a_stand_in_of_weighted_features_is_weighted() -> None:
    weights = empty_like(features(4, weighted=True)).weights()
    assert weights.numel() == 0
    assert weights.dtype == torch.float32


def test_a_stand_in_is_built_like_the_batch() -> None:
    batch = {"pair": Pair(features(2), torch.ones(2)), "rest": [(torch.ones(2, 5), None), "train", torch.tensor(3.0)]}
    stand_in = empty_like(batch)
    assert type(stand_in["pair"]) is Pair
    assert stand_in["pair"].labels.shape == (1,)
    ((numbers, nothing), text, scalar) = stand_in["rest"]
    assert torch.equal(numbers, torch.zeros(1, 5))
    assert (nothing, text, scalar.item()) == (None, "train", 0.0)


def test_a_stand_in_of_something_else_is_refused() -> None:
    with pytest.raises(DataError, match=r"got a JaggedTensor .* pass it as `empty`"):
        empty_like((torch.ones(2), JaggedTensor(torch.ones(2), lengths=torch.ones(2, dtype=torch.int32))))
    with pytest.raises(DataError, match="this rank had none at all"):
        empty_like(None)
    ragged = KeyedJaggedTensor(
        ["a", "b"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int32), stride_per_key_per_rank=[[1], [2]]
    )
    with pytest.raises(DataError, match="another number of samples per feature"):
        empty_like(ragged)


def test_why_a_stand_in_has_a_sample() -> None:
    tables = [EmbeddingBagConfig(name=f"t_{k}", embedding_dim=8, num_embeddings=9, feature_names=[k]) for k in "ab"]
    model = DLRM_DCN(EmbeddingBagCollection(tables), 3, [8], [4, 1], dcn_num_layers=1, dcn_low_rank_dim=2)
    with pytest.raises((IndexError, RuntimeError)):  # the first is the unsharded collection's, before TorchRec 1.9
        model(torch.rand(0, 3), features(0))
    with pytest.raises(RuntimeError, match="0 elements"):
        model.inter_arch(torch.rand(0, 8), torch.rand(0, 2, 8))
    assert model(empty_like(torch.rand(0, 3)), empty_like(features(0))).shape == (1, 1)
