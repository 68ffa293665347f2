"""Types in which embeddings travel between ranks: what is accepted where, and what it saves."""

from __future__ import annotations

import pytest
import torch
from torchrec.distributed.types import CommOp

from embershard.errors import ConfigError
from embershard.planning.cost import work
from embershard.sharding.config import ShardingConfig
from embershard.sharding.torchrec.sharders import comm_codecs

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_nothing_is_quantized_unless_it_is_asked_for():
    assert comm_codecs(ShardingConfig(), CPU) is None
    assert ShardingConfig().number_bytes == (4, 4)


@pytest.mark.parametrize(
    ("forward", "backward", "num_bytes"), [("fp16", "fp32", (2, 4)), ("fp32", "fp16", (4, 2)), ("fp16", "fp16", (2, 2))]
)
def test_every_exchange_of_embeddings_gets_a_codec(forward, backward, num_bytes):
    config = ShardingConfig(forward_dtype=forward, backward_dtype=backward)
    codecs = comm_codecs(config, CPU)
    assert set(codecs) == {
        CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name,
        CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name,
        CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name,
    }
    types = {"fp16": torch.float16, "fp32": torch.float32}
    for pair in codecs.values():
        assert pair.forward.quantized_dtype == types[forward]
        assert pair.backward.quantized_dtype == types[backward]
    assert config.number_bytes == num_bytes


@pytest.mark.parametrize("name", ["forward_dtype", "backward_dtype"])
def test_bf16_is_for_gpus(name):
    config = ShardingConfig(**{name: "bf16"})
    with pytest.raises(ConfigError, match=f'sharding.{name}: got "bf16", which gloo does not send'):
        comm_codecs(config, CPU)
    assert comm_codecs(config, CUDA) is not None


@pytest.mark.parametrize("name", ["forward_dtype", "backward_dtype"])
def test_an_unknown_type_is_refused_with_the_known_ones(name):
    with pytest.raises(ConfigError, match=f"sharding.{name}: got 'mx4', needed one of fp32, fp16, bf16, int8, fp8"):
        ShardingConfig(**{name: "mx4"})


def test_plans_count_the_bytes_that_are_sent():
    common = {"batch_size": 10, "ids_per_sample": 2, "columns": 8, "world_size": 4}
    for sharding in ("table_wise", "row_wise", "table_row_wise"):
        whole, half = (
            work.exchanged_bytes(sharding, **common, number_bytes=number_bytes).in_all
            for number_bytes in ((4, 4), (4, 2))
        )
        assert half.gradients == whole.gradients / 2
        assert (half.ids, half.embeddings) == (whole.ids, whole.embeddings)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_plans_count_a_byte_a_number_and_a_scale_a_row(kind):
    numbers = ShardingConfig(forward_dtype=kind).number_bytes
    for columns in (8, 32):
        common = {"batch_size": 10, "ids_per_sample": 2, "columns": columns, "world_size": 4}
        for sharding in ("table_wise", "row_wise", "table_row_wise"):
            found = work.exchanged_bytes(sharding, **common, number_bytes=numbers).in_all
            assert found.embeddings == pytest.approx(3 * 10 * (columns + 4))
            assert found.gradients == pytest.approx(3 * 10 * columns * 4)


def test_row_wise_sums_in_bytes_go_between_nodes_rank_by_rank():
    """On a ring what enters a node goes through one of its ranks; all-to-all, to each rank by itself."""
    common = {"batch_size": 10, "ids_per_sample": 2, "columns": 12, "world_size": 16, "ranks_per_node": 8}
    ring = work.exchanged_bytes("row_wise", **common)
    encoded = work.exchanged_bytes("row_wise", **common, number_bytes=(1, 1))
    assert ring.to_nodes.embeddings == 15 * 10 * 48 / 8
    assert encoded.to_nodes.embeddings == pytest.approx(8 * 10 * 16)
    assert encoded.to_nodes.gradients == pytest.approx(15 * 10 * 16 / 8)
    for sharding in ("table_wise", "table_row_wise"):
        ring, encoded = (work.exchanged_bytes(sharding, **common, number_bytes=each) for each in ((4, 4), (1, 1)))
        assert encoded.to_nodes.embeddings == pytest.approx(ring.to_nodes.embeddings / 3)
