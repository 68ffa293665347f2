"""Rows as bytes: a byte for each number, and a scale for each row."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.types import CommOp

from embershard.errors import ConfigError
from embershard.extras.wire_types import WireTypes
from embershard.extras.wire_types.codecs import RowCodec
from embershard.extras.wire_types.encoding import WIRE_TYPES
from embershard.sharding.config import ShardingConfig
from embershard.sharding.torchrec.sharders import check_codecs, comm_codecs

pytestmark = pytest.mark.extra

#: Of a row's largest magnitude: half a step of int8; of fp8, half a step of its largest numbers (of 448, 32).
WORST = {"int8": 0.5 / 127, "fp8": 16 / 448}


def rows(num_rows: int = 500, dim: int = 16, seed: int = 0) -> torch.Tensor:
    """Of magnitudes from 1e-6 to 1e6."""
    generator = torch.Generator().manual_seed(seed)
    of_row = 10.0 ** (12 * torch.rand(num_rows, 1, generator=generator) - 6)
    return of_row * torch.randn(num_rows, dim, generator=generator)


def passed(kind: str, given: torch.Tensor) -> torch.Tensor:
    return WIRE_TYPES[kind].decode(WIRE_TYPES[kind].encode(given))


@pytest.mark.smoke
@pytest.mark.parametrize("kind", WORST)
def test_an_error_is_at_most_half_a_step_of_its_own_row(kind):
    given = rows()
    sent = WIRE_TYPES[kind].encode(given)
    assert (sent.dtype, sent.shape) == (torch.uint8, (500, 20))
    got = WIRE_TYPES[kind].decode(sent)
    largest = given.abs().amax(dim=1, keepdim=True)
    assert ((got - given).abs() <= largest * WORST[kind] * (1 + 1e-5)).all()
    assert torch.equal(got.abs().amax(dim=1), largest[:, 0]) or torch.allclose(got.abs().amax(dim=1), largest[:, 0])
    assert not torch.equal(got, given)


def test_int8_is_what_numpy_makes_of_it():
    given = rows(dim=12)
    scales = (given.abs().amax(dim=1, keepdim=True) / 127).numpy()
    codes = np.rint(given.numpy() / scales).astype(np.int8)
    expected = np.concatenate([codes.view(np.uint8), scales.view(np.uint8)], axis=1)
    assert np.array_equal(WIRE_TYPES["int8"].encode(given).numpy(), expected)


def test_small_numbers_of_a_row_are_finer_in_fp8_than_in_int8():
    given = torch.tensor([[1.0, 0.001, -0.002, 0.0005]])
    errors = {kind: (passed(kind, given) - given).abs()[0, 1:].max().item() for kind in WORST}
    assert errors["fp8"] < errors["int8"] / 10


@pytest.mark.parametrize("kind", WORST)
def test_a_row_does_not_depend_on_the_rows_beside_it(kind):
    given = rows()
    alone = torch.cat([WIRE_TYPES[kind].encode(row.unsqueeze(0)) for row in given])
    assert torch.equal(WIRE_TYPES[kind].encode(given), alone)


@pytest.mark.parametrize("kind", WORST)
@pytest.mark.parametrize("value", [0.0, 1e-40, -1e-36])
def test_rows_of_zeros_and_of_next_to_nothing_come_out_as_zeros(kind, value):
    assert torch.equal(passed(kind, torch.full((3, 4), value)), torch.zeros(3, 4))


@pytest.mark.parametrize("kind", WORST)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_noticed_in_its_row_alone(kind, bad):
    given = rows(3, 4)
    given[1, 2] = bad
    got = passed(kind, given)
    assert not torch.isfinite(got[1]).all()
    assert torch.isfinite(got[[0, 2]]).all()


@pytest.mark.parametrize("kind", WORST)
def test_the_largest_numbers_survive(kind):
    given = torch.tensor([[3.4e38, 1.0, -3e38, 0.0]])
    assert torch.isfinite(passed(kind, given)).all()
    assert torch.allclose(passed(kind, given), given, rtol=0.04, atol=1.0)


@pytest.mark.parametrize("kind", WIRE_TYPES)
@pytest.mark.parametrize("dims", [[8, 8, 8], [4, 16, 8], [12], []])
@pytest.mark.parametrize("num_samples", [0, 5])
def test_features_beside_each_other_are_encoded_one_by_one(kind, dims, num_samples):
    wire = WIRE_TYPES[kind]
    given = rows(num_samples, sum(dims))
    sent = wire.encode_beside(given, dims)
    assert sent.shape == (num_samples, wire.sum_bytes(dims))
    assert wire.sum_bytes(dims) == sum(map(wire.row_bytes, dims))
    one_by_one = [wire.decode(wire.encode(part)) for part in given.split(dims, dim=1)] if dims else [given]
    assert torch.equal(wire.decode_beside(sent, dims), torch.cat(one_by_one, dim=1))


@pytest.mark.parametrize("kind", ["fp16", "bf16", "fp32"])
def test_other_types_are_casts(kind):
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[kind]
    given = rows().clamp(-6e4, 6e4)
    assert torch.equal(passed(kind, given), given.to(dtype).float())
    assert WIRE_TYPES[kind].row_bytes(16) == 16 * dtype.itemsize


@pytest.mark.parametrize("kind", WIRE_TYPES)
def test_torchrecs_protocol_for_rows_one_after_the_other(kind):
    codec, given = RowCodec(WIRE_TYPES[kind], 16), rows()
    sent = codec.encode(given.view(-1), codec.create_context())
    assert sent.dtype == codec.quantized_dtype
    assert sent.shape == (codec.calc_quantized_size(given.numel()),)
    assert torch.equal(codec.decode(sent), passed(kind, given).view(-1))


@pytest.mark.parametrize(("forward", "backward"), [("int8", "fp8"), ("fp8", "fp16"), ("fp32", "int8")])
def test_settings_ask_for_them(forward, backward):
    codecs = comm_codecs(ShardingConfig(forward_dtype=forward, backward_dtype=backward), torch.device("cpu"))
    assert isinstance(codecs, WireTypes)
    assert set(codecs) == {each.name for each in CommOp}


def test_bf16_beside_them_is_for_gpus_too():
    config = ShardingConfig(forward_dtype="int8", backward_dtype="bf16")
    with pytest.raises(ConfigError, match=r'sharding.backward_dtype: got "bf16", .* would round to fp16. On'):
        comm_codecs(config, torch.device("cpu"))
    assert isinstance(comm_codecs(config, torch.device("cuda", 0)), WireTypes)


@pytest.mark.parametrize(
    ("asked", "comm_ops", "device", "ranks", "says"),
    [
        ("fp8", None, "cpu", 2, "tables ['t'] it has fp8 for embeddings, which TorchRec replaces by fp16 where sums"),
        ("mx4", None, "cuda", 2, "mx4 for gradients, which TorchRec replaces by bf16 where sums are added up"),
        ("int8", None, "cuda", 2, "it has int8 for embeddings, with which TorchRec fails in the first batch"),
        ("int8", None, "cpu", 1, ""),
        ("mx4", [CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL], "cpu", 2, ""),
        ("fp16", None, "cpu", 2, ""),
    ],
)
def test_torchrec_s_types_are_checked_for_row_wise_tables(asked, comm_ops, device, ranks, says):
    """On GPUs, too. One rank sends nothing; a registry without sums sends these in fp32."""
    registry = get_qcomm_codecs_registry(QCommsConfig(CommType(asked), CommType(asked)), comm_ops, torch.device(device))
    env = SimpleNamespace(world_size=ranks)
    params = {"t": SimpleNamespace(sharding_type="row_wise"), "u": SimpleNamespace(sharding_type="data_parallel")}
    with pytest.raises(ConfigError) if says else nullcontext() as error:
        check_codecs(registry, env, SimpleNamespace(), params, device)
    assert says in str(error and error.value)


def test_an_unknown_type_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"got the type 'mx4' of rows between ranks, needed one of fp32, .*, fp8"):
        WireTypes("int8", "mx4")
