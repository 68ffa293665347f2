"""Averages that are computed beside the steps behind them: what is trained is a delayed average's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from embershard.errors import ConfigError
from embershard.extras.groups import row_sync
from embershard.sharding.config import ShardingConfig
from embershard.training.config import RunConfig
from tests.covering import matrix
from tests.ranks import groups, late_groups
from tests.ranks.test_groups import OPTIMIZERS, SHARDINGS, check, settings
from tests.ranks.test_groups_training import config_of, train, without_a_cache
from tests.ranks.workers import RankPool

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.extra]


@pytest.mark.parametrize(
    ("sharding", "optimizer", "every", "delay", "lookahead", "worker"),
    [
        pytest.param("row_wise", "rowwise_adagrad", 3, 1, 8, None, marks=pytest.mark.smoke),
        ("table_wise", "adagrad", 2, 2, 0, None),
        *(
            matrix(sharding, optimizer, every, delay, lookahead, worker)
            for sharding in SHARDINGS
            for optimizer in OPTIMIZERS
            for every, delay, lookahead, worker in ((1, 1, 8, True), (3, 2, 0, None), (10, 4, 8, False))
        ),
    ],
)
def test_two_groups_of_two_ranks_train_what_a_delayed_average_trains(
    four_ranks: RankPool, sharding: str, optimizer: str, every: int, delay: int, lookahead: int, worker: bool | None
):
    case = settings(sharding, optimizer, lookahead)
    check(four_ranks.run(late_groups.compare, case, 2, every, delay, lookahead, worker), 1000)


@pytest.mark.parametrize(
    "changes",
    [{"cached": (0, 2)}, matrix({"fp16": (0, 1)}), matrix({"sequence": True}), matrix({"shared": True, "mean": True})],
)
def test_other_tables_take_part(two_ranks: RankPool, changes: dict[str, Any]):
    check(two_ranks.run(late_groups.compare, groups.group_case(**changes), 2, 3, 2), 100)


def test_rows_in_a_file_take_part(two_ranks: RankPool, tmp_path: Path):
    in_file = {"host_dir": str(tmp_path), "host_bytes": 70_000, "ratio": 0.12}
    case = settings("table_wise", "rowwise_adagrad", 8, **in_file)
    check(two_ranks.run(late_groups.compare, case, 2, 3, 1, 8), 1000)


def _means_alone() -> AbstractContextManager[Any]:
    """What steps added meanwhile is lost."""
    return mock.patch.object(row_sync, "moved", lambda now, before, mean: mean)


def _sums_alone() -> AbstractContextManager[Any]:
    """Numbers that no step changed are means only up to rounding, and differ between replicas."""
    return mock.patch.object(row_sync, "moved", lambda now, before, mean: now + (mean - before))


CONTROLS: dict[str, Callable[[], AbstractContextManager[Any]]] = {"means": _means_alone, "sums": _sums_alone}


def compare_broken(control: str) -> groups.Outcome:
    """With a part left out."""
    with CONTROLS[control]():
        return late_groups.compare(groups.group_case(), 2, 3, 2)


@pytest.mark.parametrize("control", list(CONTROLS))
def test_without_a_part_of_it_the_comparison_fails(two_ranks: RankPool, control: str):
    assert all(len(each.different) > 3 for each in two_ranks.run(compare_broken, control))


def equal_where_they_must_be() -> list[tuple[bool, bool]]:
    """Of each step: are replicas said to be equal, and are they?"""
    model, found = groups.build_ours(groups.group_case(), 2, 2, sync_delay=2), []

    def after(step: int) -> None:
        model.end_step(must_be_equal=step in (3, 4))  # behind steps 4 and 5; the latter is no average's
        starts = model._row_sync._gathered([rows.start for rows in watched])
        found.append((model.rows_are_equal, starts[0] == starts[1]))

    watched = [_Digest(rows) for rows in model._row_sync._rows]
    case = groups.group_case(steps=6)
    groups.look_ahead.train(groups.look_ahead.plain(model), groups.look_ahead.batches(case), after)
    return found


class _Digest:
    """Of what rows hold now."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    @property
    def start(self) -> float:
        numbers = torch.arange(self._rows.num_rows, dtype=torch.float64)
        parts = self._rows.select(torch.arange(self._rows.num_rows))
        return sum(float((part.double().view(len(part), -1).sum(1) * numbers).sum()) for part in parts)


def test_replicas_are_equal_where_a_save_asks_for_it(two_ranks: RankPool):
    for found in two_ranks.run(equal_where_they_must_be):
        assert found == [(step == 4,) * 2 for step in range(1, 7)]


def sent_by_averages(delay: int) -> tuple[float, float]:
    """Bytes that this rank sent in the averages of a training, and in all else."""
    from embershard.distributed.traffic import count_sent_bytes, sent_bytes

    count_sent_bytes()
    case = groups.group_case(steps=7)
    model = groups.build_ours(case, 2, 3, sync_delay=delay)
    before = sent_bytes()
    groups.train_ours(model, case)
    model.sync()
    sent = sent_bytes() - before
    return sent.sync, sent.in_training - sent.sync + sent.other


def test_what_a_thread_sends_is_the_averages_own(two_ranks: RankPool):
    late, at_once = (two_ranks.run(sent_by_averages, delay) for delay in (2, 0))
    assert late == at_once
    assert all(sync > 10_000 for sync, _ in late)


def interrupted() -> list[str]:
    """Messages of a forward and of an average behind one whose means did not come."""
    model, found = groups.build_ours(groups.group_case(), 2, 2, sync_delay=1), []
    case = groups.group_case(steps=3)
    with mock.patch.object(row_sync, "mean_over", side_effect=ValueError("a link is down")):
        found.append(groups.look_ahead.message_of(lambda: groups.train_ours(model, case)))
    for action in (lambda: groups.train_ours(model, groups.group_case(steps=1)), model.sync):
        found.append(groups.look_ahead.message_of(action))
    model.close()
    return found


def closed_early() -> int:
    """Rows of the next average, behind a model that forgot one that failed; its rows were equal."""
    case, model = groups.group_case(steps=2), groups.build_ours(groups.group_case(), 2, 2, sync_delay=2)
    with mock.patch.object(row_sync, "mean_over", side_effect=ValueError("a link is down")):
        groups.train_ours(model, case)
        model.begin_behind(2)  # as after a load
    model.sync()
    return model.sync_counts.rows


def test_an_average_that_failed_is_forgotten_with_its_rows(two_ranks: RankPool):
    first, second = two_ranks.run(closed_early)
    assert first == second > 100  # those of the average that was dropped: they are counted when it begins


def test_means_that_do_not_come_are_not_forgotten(two_ranks: RankPool):
    for first, *others in two_ranks.run(interrupted):
        assert "a link is down" in first
        assert all("rows of the groups may differ" in message for message in others), others


@pytest.mark.parametrize(("every", "delay"), [(2, 3), (0, 0), (2, -1)])
def test_a_delay_that_is_longer_than_the_time_between_averages_is_refused(two_ranks: RankPool, every: int, delay: int):
    for message in two_ranks.run(message_of_delay, every, delay):
        assert f"got sync_every={every}, sync_delay={delay}" in message


def message_of_delay(every: int, delay: int) -> str:
    """What a model says that is built with them."""
    try:
        groups.build_ours(groups.group_case(), 2, every, sync_delay=delay)
    except ConfigError as error:
        return str(error)
    return ""


# -- runs of `embershard train`


def late_run(**changes: Any) -> RunConfig:
    """Averages behind every second step, which the one behind it is trained beside."""
    return config_of(sharding=ShardingConfig(groups=2, sync_every=2, sync_delay=1), **changes)


def test_a_run_trains_what_it_trains_without_a_cache(two_ranks: RankPool, tmp_path: Path):
    cached = two_ranks.run(train, late_run(), tmp_path / "cached")
    whole = two_ranks.run(train, without_a_cache(late_run()), tmp_path / "whole")
    at_once = two_ranks.run(train, config_of(sync_every=2), tmp_path / "at_once")
    for ours, plain, other in zip(cached, whole, at_once, strict=True):
        assert groups.differences(ours.weights, plain.weights) == []
        assert ours.losses == plain.losses != other.losses
        assert ours.saved == ours.evaluated == [6, 10]  # behind averages without a delay: 4 and 8 had none
        assert ours.evictions > 100


def test_a_run_goes_on_as_it_would_have(two_ranks: RankPool, tmp_path: Path):
    whole = two_ranks.run(train, late_run(), tmp_path / "whole")
    rest = two_ranks.run(train, late_run(), tmp_path / "rest", tmp_path / "whole" / "step_6")
    for ours, expected in zip(rest, whole, strict=True):
        assert groups.differences(ours.weights, expected.weights) == []
        assert ours.losses == expected.losses[6:]


def test_a_signal_ends_a_run_behind_an_average_without_a_delay(two_ranks: RankPool, tmp_path: Path):
    found = two_ranks.run(train, late_run(), tmp_path, None, 3)
    assert [(len(each.losses), each.saved) for each in found] == [(4, [4])] * 2
