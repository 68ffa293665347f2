"""TorchRec's sharding types as values: all of them, as TorchRec has them."""

from __future__ import annotations

from typing import get_args

import pytest
from torchrec.distributed.embedding_types import ShardingType as TorchRecs

from embershard.errors import ConfigError
from embershard.sharding.sharding_types import ROWS_TYPES, SHARDING_TYPES, Sharding, sharding_type
from embershard.sharding.torchrec.lookups import POOLED_SHARDINGS, SEQUENCE_SHARDINGS
from embershard.sharding.torchrec.modes import rows_exchange
from tests.ranks.resharding_matrix import SHARDINGS as RESHARDED
from tests.unit.sharding.plans import SHARDED


def test_each_type_is_described_once():
    assert set(SHARDING_TYPES) == set(get_args(Sharding)) <= {each.value for each in TorchRecs}
    assert all(name == each.name for name, each in SHARDING_TYPES.items())


def test_what_is_said_of_the_types_is_what_can_be_built():
    assert {name for name, each in SHARDING_TYPES.items() if each.rows_over != "copies"} == set(POOLED_SHARDINGS)
    assert {name for name, each in SHARDING_TYPES.items() if each.has_sequences} == set(SEQUENCE_SHARDINGS)
    assert set(ROWS_TYPES) == set(rows_exchange._SHARDINGS)


def test_the_lists_of_the_tests_have_each_type_that_can_be_built():
    """Those of training and of its plans, and of checkpoints that move from one type to another."""
    assert set(SHARDED) == set(RESHARDED) == set(POOLED_SHARDINGS)


def test_a_type_that_is_like_another_on_one_node_cuts_as_it_does():
    for each in SHARDING_TYPES.values():
        if each.like:
            assert each.blocks(4, 4) == SHARDING_TYPES[each.like].blocks(4, 4), each.name
            assert each.row_blocks(4, 4) == SHARDING_TYPES[each.like].row_blocks(4, 4), each.name


def test_the_ranks_that_each_type_accepts_and_refuses():
    """On two nodes of two ranks."""
    sound = {
        "table_wise": (3,), "row_wise": (0, 1, 2, 3), "column_wise": (1, 2), "table_column_wise": (3, 2),
        "table_row_wise": (2, 3), "grid_shard": (2, 3, 0, 1), "data_parallel": (),
    }  # fmt: skip
    wrong = {
        "table_wise": (0, 1), "row_wise": (1, 0, 2, 3), "column_wise": (), "table_column_wise": (1, 2),
        "table_row_wise": (1, 2), "grid_shard": (0, 1, 1, 2), "data_parallel": (0,),
    }  # fmt: skip
    for name, each in SHARDING_TYPES.items():
        assert each.ranks_problem(sound[name], 4, 2) == ""
        assert f"ranks: got {list(wrong[name])}; {name} needs" in each.ranks_problem(wrong[name], 4, 2)


def test_an_unknown_type_is_refused():
    with pytest.raises(ConfigError, match="Unknown sharding type 'diagonal'; needed one of table_wise, row_wise"):
        sharding_type("diagonal")
