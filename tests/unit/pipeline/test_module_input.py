"""A forward trains what was announced: ids, lengths and weights; and what was cut off while it arrived goes on."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.errors import CacheError
from embershard.pipeline.module_input import Announced, ModuleInput
from embershard.sharding.torchrec.modes import routes

PARTS = ["ids", "lengths", "weights"]


def tensors() -> dict[str, Tensor]:
    return {"ids": torch.arange(4), "lengths": torch.tensor([1, 3]), "weights": torch.ones(4)}


def features(parts: dict[str, Tensor]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], parts["ids"], parts.get("weights"), lengths=parts["lengths"])


def test_the_same_contents_elsewhere_are_what_was_announced() -> None:
    given = features(tensors())
    announced = Announced(given)
    announced.check(given)
    announced.check(features(tensors()))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_was_written_to_is_refused(part: str) -> None:
    parts = tensors()
    given = features(parts)
    announced = Announced(given)
    parts[part].add_(1)
    with pytest.raises(CacheError, match="written to in place after it was announced"):
        announced.check(given)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_with_other_contents_is_refused(part: str) -> None:
    announced, others = Announced(features(tensors())), tensors()
    others[part] = others[part].flip(0) if part == "lengths" else others[part] + 1
    with pytest.raises(CacheError, match=f"with other {part}"):
        announced.check(features(others))


def test_features_without_the_weights_are_refused() -> None:
    announced, others = Announced(features(tensors())), tensors()
    del others["weights"]
    with pytest.raises(CacheError, match="weights in one of the two"):
        announced.check(features(others))


def test_ids_whose_arrival_was_cut_off_arrive_at_the_next_try() -> None:
    given = features(tensors())
    sent = mock.Mock(**{"wait.side_effect": [[given]]})  # once: a second wait would raise
    module = mock.Mock(
        **{"preprocess_input.return_value": ([given], {}), "input_dist.return_value.wait.return_value": sent}
    )
    batch = ModuleInput(routes.TorchRecExchange(module, None, [given], {}))
    batch.send()
    with mock.patch.object(routes, "narrowed", side_effect=[MemoryError("no room"), [given]]) as narrowed:
        with pytest.raises(MemoryError, match="no room"):
            batch.receive()
        batch.receive()
        batch.receive()
    assert narrowed.call_count == 2
    assert batch.num_ids == 4
