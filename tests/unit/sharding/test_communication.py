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
    with pytest.raises(ConfigError, match=f"sharding.{name}: got 'int8', needed one of fp32, fp16, bf16"):
        ShardingConfig(**{name: "int8"})


def test_plans_count_the_bytes_that_are_sent():
    common = {"batch_size": 10, "ids_per_sample": 2, "columns": 8, "world_size": 4}
    for sharding in ("table_wise", "row_wise", "table_row_wise"):
        whole, half = (
            work.exchanged_bytes(sharding, **common, number_bytes=number_bytes).in_all
            for number_bytes in ((4, 4), (4, 2))
        )
        assert half.gradients == whole.gradients / 2
        assert (half.ids, half.embeddings) == (whole.ids, whole.embeddings)
