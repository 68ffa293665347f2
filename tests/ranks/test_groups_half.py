"""Averages in fp16: bit for bit those of a hook of TorchRec's that rounds by hand, and half of the bytes of weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest
import torch

from embershard.errors import ConfigError
from embershard.extras.verify.equivalence import compare_with_stock
from embershard.sharding.config import ShardingConfig
from tests.covering import matrix
from tests.ranks import groups, half_groups
from tests.ranks.groups import group_case
from tests.ranks.planned import here
from tests.ranks.test_groups import OPTIMIZERS, SHARDINGS, check, settings
from tests.ranks.test_groups_training import config_of, train, without_a_cache
from tests.ranks.workers import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.extra]


@pytest.mark.parametrize(
    ("sharding", "optimizer", "every", "delay", "lookahead"),
    [
        pytest.param("row_wise", "adagrad", 3, 0, 8, marks=pytest.mark.smoke),
        ("table_wise", "rowwise_adagrad", 1, 0, 0),
        ("table_wise", "sgd", 3, 2, 8),
        *(
            matrix(sharding, optimizer, every, delay, ahead)
            for sharding in SHARDINGS
            for optimizer in OPTIMIZERS
            for every, delay, ahead in ((1, 0, 8), (3, 0, 0), (3, 2, 0), (10, 0, 8))
        ),
    ],
)
def test_bits_are_those_of_a_hook_that_rounds_by_hand(
    four_ranks: RankPool, sharding: str, optimizer: str, every: int, delay: int, lookahead: int
):
    case = settings(sharding, optimizer, lookahead)
    check(four_ranks.run(half_groups.compare, case, every, delay, lookahead), 1000)


@pytest.mark.parametrize("fault", get_args(half_groups.Fault)[1:])
def test_a_hook_that_rounds_otherwise_has_other_bits(two_ranks: RankPool, fault: half_groups.Fault):
    found = two_ranks.run(half_groups.compare, group_case(optimizer="adagrad"), 3, 0, 0, fault)
    assert all(len(each.different) > 3 for each in found)


@pytest.mark.parametrize(
    "changes", [{"cached": (0, 2)}, matrix({"shared": True, "mean": True}), matrix({"sequence": True})]
)
def test_other_tables_take_part(two_ranks: RankPool, changes: dict[str, object]):
    check(two_ranks.run(half_groups.compare, group_case(**changes), 3), 100)


def test_tables_of_fp16_weights_are_averaged_as_ever(two_ranks: RankPool):
    case = group_case(fp16=(0, 1, 2, 3))
    whole, half = (two_ranks.run(half_groups.replicas, case, 3, dtype) for dtype in ("fp32", "fp16"))
    for (expected, counts, sent), (found, half_counts, half_sent) in zip(whole, half, strict=True):
        assert groups.differences(expected, found) == []
        assert (counts, sent) == (half_counts, half_sent)


@pytest.mark.parametrize(
    ("optimizer", "whole", "half"), [("sgd", 128, 64), ("rowwise_adagrad", 132, 68), ("adagrad", 256, 192)]
)
def test_replicas_are_equal_and_weights_take_half_of_the_bytes(
    two_ranks: RankPool, optimizer: str, whole: int, half: int
):
    """Of rows of 32 columns; numbers of rows are as many as ever, and so are states."""
    case = group_case(optimizer=optimizer, dims=(32,) * 4)
    first, second = two_ranks.run(half_groups.replicas, case, 3, "fp16")
    assert groups.differences(first[0], second[0]) == []
    in_full, _ = two_ranks.run(half_groups.replicas, case, 3, "fp32")
    assert groups.differences(first[0], in_full[0]), "rounding changes what is trained"
    (_, counts, sent), (_, counts_in_full, sent_in_full) = first, in_full
    assert counts.rows == pytest.approx(counts_in_full.rows, rel=0.01)
    assert counts.row_bytes / counts.rows == half
    assert counts_in_full.row_bytes / counts_in_full.rows == whole
    for each, num_bytes in ((counts, sent), (counts_in_full, sent_in_full)):
        assert each.row_bytes <= num_bytes <= 1.05 * each.row_bytes + 2 * each.key_bytes


@pytest.mark.parametrize("optimizer", ["adagrad", "rowwise_adagrad"])
def test_states_keep_what_fp16_cannot_hold(two_ranks: RankPool, optimizer: str):
    """From 1e-12 to 1e12, equal on both replicas; as fp16 they would be 0 and infinite."""
    for (weights, *states), (new_weights, *new_states), halved in two_ranks.run(
        half_groups.states_and_weights, optimizer
    ):
        assert len(states) == len(new_states) == len(halved) > 0
        for before, after, lost in zip(states, new_states, halved, strict=True):
            assert torch.equal(before, after)
            assert (lost == 0).any()
            assert lost.isinf().any()
        assert new_weights[0].isinf().all(), "a check of rows sees it"
        assert new_weights[1].isnan().all()
        assert (new_weights[2] == 0).all()
        assert torch.equal(new_weights[3:], weights[3:].half().float())


def test_an_unknown_type_is_refused(two_ranks: RankPool):
    with pytest.raises(Exception, match="got sync_dtype='bf16', needed one of fp32, fp16"):
        two_ranks.run(half_groups.replicas, group_case(), 3, "bf16")


def in_halves(lookahead: int = 8):
    config = config_of(lookahead=lookahead)
    return dataclasses.replace(config, sharding=dataclasses.replace(config.sharding, sync_dtype="fp16"))


def test_a_run_trains_what_it_trains_without_a_cache(two_ranks: RankPool, tmp_path: Path):
    config = in_halves()
    cached = two_ranks.run(train, config, tmp_path / "cached")
    whole = two_ranks.run(train, without_a_cache(config), tmp_path / "whole")
    plain = two_ranks.run(train, config_of(), tmp_path / "plain")
    for ours, theirs, in_full in zip(cached, whole, plain, strict=True):
        assert groups.differences(ours.weights, theirs.weights) == []
        assert ours.losses == theirs.losses != in_full.losses
    assert sum(each.evictions for each in cached) > 100


def verified() -> bool:
    """By the command's comparison, on this rank."""
    with groups.envs_are_kept():
        return compare_with_stock(in_halves(), here(), 6).is_equal


def test_verify_compares_with_stock_tables_in_such_groups(two_ranks: RankPool):
    assert all(two_ranks.run(verified))


def test_it_has_no_effect_with_one_group():
    with pytest.raises(ConfigError, match=r"sharding.sync_dtype has no effect with one group"):
        ShardingConfig(sync_dtype="fp16")
    with pytest.raises(ConfigError, match=r"sharding.sync_dtype: got 'int8', needed one of fp32, fp16"):
        ShardingConfig(groups=2, sync_dtype="int8")
