"""Lookups that keep FBGEMM's arguments do what its forward does, batch after batch, and know a table that has grown."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor

from embershard.sharding.torchrec.slots import SlotTable, _KeptCall

DIM = 4
OPTIMIZERS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)


def trained(optimizer: EmbOptimType, is_grown: bool = True) -> list[Tensor]:
    """Outputs, then rows, states and the count of iterations, after batches of several sizes and rates."""
    arguments = {"optimizer": optimizer, "learning_rate": 0.5, "eps": 1e-3}
    table = SlotTable(DIM, [0, 1], torch.device("cpu"), PoolingMode.SUM, SparseType.FP32, arguments)
    table.resize(8)
    generator, found = torch.Generator().manual_seed(0), list[Tensor]()
    table.payload[0].data.copy_(torch.randn(9, DIM, generator=generator))
    for step, samples in enumerate((3, 5, 1, 4, 4, 2)):
        if step == 3 and is_grown:
            table.resize(16)
        if step == 4:
            table.tbe.set_learning_rate(0.25)
        slots = torch.randint(1, 9, (4 * samples,), generator=generator)
        output = table(slots, torch.arange(0, 4 * samples + 1, 2))
        found.append(output.detach().clone())
        output.backward(torch.randn(output.shape, generator=generator))
    return [*found, *(rows.detach()[:9].clone() for rows in table.payload), table.tbe.iter.clone()]


def are_equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_they_do_what_fbgemms_forward_does(optimizer: EmbOptimType) -> None:
    kept = trained(optimizer)

    def forward(self: _KeptCall, slots: Tensor, offsets: Tensor) -> Tensor:
        return self._tbe(indices=slots, offsets=offsets)  # type: ignore[no-any-return]

    with mock.patch.object(_KeptCall, "__call__", forward):
        assert are_equal(kept, trained(optimizer))


def test_arguments_from_before_a_growth_are_noticed() -> None:
    optimizer = EmbOptimType.EXACT_SGD
    assert are_equal(trained(optimizer), trained(optimizer, is_grown=False))
    with mock.patch.object(_KeptCall, "is_of", return_value=True):
        assert are_equal(trained(optimizer), trained(optimizer, is_grown=False)) is False


def test_the_first_lookup_of_a_table_alone_is_fbgemms_forward() -> None:
    arguments = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
    table = SlotTable(DIM, [0], torch.device("cpu"), PoolingMode.SUM, SparseType.FP32, arguments)
    table.resize(4)
    with mock.patch.object(type(table.tbe), "forward", autospec=True, side_effect=type(table.tbe).forward) as forward:
        for _ in range(3):
            table(torch.tensor([1, 2]), torch.tensor([0, 2]))
        table.resize(6)
        for _ in range(3):
            table(torch.tensor([1, 2]), torch.tensor([0, 2]))
    assert forward.call_count == 2
