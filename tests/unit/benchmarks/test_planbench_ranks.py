"""Tasks of `planbench_ranks`, and its summary."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq
import pytest

from benchmarks.planbench import RIVALS
from benchmarks.planbench_ranks import OURS, TORCHREC, places, profiled, summary, told_apart, write_task
from embershard.settings.decoding import decode
from embershard.training.config import RunConfig
from embershard.training.fit.model_size import tables_of_run


def plan(name: str, predicted: float, wall: float, cpu: float, place: int = 0) -> dict[str, Any]:
    measured = {"wall": wall, "scaled": wall, "cpu": cpu}
    times = {f"{kind}_ms": each for kind, each in measured.items()}
    return {
        "plan": name,
        "predicted_ms": predicted,
        **times,
        **{f"{k}_over_ours": v / 20.0 for k, v in measured.items()},
        **{f"{k}_place": place for k in measured},
    }


@pytest.mark.slow
def test_a_task_has_data_and_a_model_of_its_tables(tmp_path):
    values = write_task(3, 2, tmp_path, lookups=20_000)
    config = decode(RunConfig, values)
    tables, statistics = tables_of_run(config), profiled(config)
    assert 8 <= len(tables) <= 16
    assert [table.dim for table in tables] == values["model"]["options"]["dims"]
    samples = pq.read_metadata(tmp_path / "samples.parquet").num_rows
    assert statistics.num_samples == samples
    assert 15_000 < sum(table.num_lookups for table in statistics.tables.values()) <= 20_000
    assert write_task(3, 2, tmp_path, lookups=20_000) == values


def test_orders_are_told_over_all_plans_and_within_tasks():
    """In the second task two of three plans are not in the order of the prediction, by wall time alone."""
    rival = next(iter(RIVALS))
    first = [plan(OURS, 20, 20, 20), plan(TORCHREC, 21, 22, 22), plan(rival, 30, 26, 26)]
    second = [plan(OURS, 50, 20, 20), plan(TORCHREC, 60, 18, 24), plan(rival, 80, 25, 30, place=2)]
    apart, noise = ({"told_apart": dict.fromkeys(("wall", "scaled", "cpu"), is_apart)} for is_apart in (True, False))
    lone = {"plans": [plan(OURS, 40, 20, 20)], **noise}
    found = summary([{"plans": first, **noise}, {"plans": second, **apart}, lone])
    assert found["wall"]["spearman_of_tasks"] == [1.0, 0.5]
    assert found["wall"]["spearman_mean_of_tasks"] == 0.75
    assert found["wall"]["spearman_mean_of_tasks_told_apart"] == 0.5
    assert found["wall"]["tasks_told_apart"] == 1
    assert found["wall"]["spearman_of_their_places"] == 0.866  # the most that two in one place leave
    assert found["cpu"]["spearman_of_tasks"] == [1.0, 1.0]
    assert found["wall"]["torchrec_over_ours"] == {"tasks": 2, "median": 1.0, "all": [1.1, 0.9]}
    assert found["cpu"]["best_rival_over_ours"]["all"] == [1.3, 1.5]
    pairs = found["wall"]["pairs_told_right"]
    assert pairs["predicted 5 to 10 % apart"] == [1, 1]  # ours and TorchRec's in the first task
    assert pairs["predicted 10 to 30 % apart"] == [0, 1]
    assert sum(right for right, _ in pairs.values()) == 5
    assert found["wall"]["spearman_all_plans"] == pytest.approx(0.0, abs=0.4)


def test_plans_are_told_apart_by_more_than_the_noise():
    noise = [0.9, 1.1, 1.0, 0.95, 1.05, 1.02, 0.98, 1.01]
    assert told_apart([[1.05 * each for each in noise], noise, [1.2 * each for each in noise]])
    assert not told_apart([noise, [*noise[1:], 0.9]])
    assert not told_apart([noise])


@pytest.mark.slow
def test_plans_that_noise_does_not_tell_apart_are_in_one_place():
    noise = [0.9, 1.1, 1.0, 0.95, 1.05, 1.02, 0.98, 1.01]
    slower, as_fast = [1.05 * each for each in noise], [*noise[1:], 0.9]
    assert places([[1.2 * each for each in noise], noise, slower, as_fast]) == [3, 0, 2, 0]
    assert places([noise, noise]) == [0, 0]
