"""A type of host rows that changes nothing is told, before a training and in a plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embershard.cache import CacheConfig
from embershard.cache.homes import small_sizes as sizes
from embershard.frequency.config import ProfileConfig
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.fit.host_types import host_type_notes
from embershard.training.fit.model_size import table_rows, table_sizes
from tests.small_runs import small_data, small_run
from tests.unit.commands.conftest import train_here

NOTE = 'cache.host_dtype = "int8" rounds no row'


def make_config(scale: float = 0.0001, **cache: Any) -> RunConfig:
    """26 tables; at a scale of 0.0001 none has more than 4,096 rows."""
    return small_run(
        data=small_data(400, scale),
        cache=CacheConfig(**{"ratio": 0.3, "host_dtype": "int8", **cache}),
        profile=ProfileConfig(samples=300),
        train=TrainConfig(batch_size=50, max_steps=2),
    )


@pytest.mark.parametrize(
    ("config", "is_told"),
    [
        (make_config(), True),
        (make_config(full_rows=0.5), True),
        (make_config(host_dtype="fp16", host_dtypes={"t_C3": "int8"}), True),
        (make_config(full_rows=0.0), False),
        (make_config(host_dtype="fp16"), False),
        (make_config(host_dtype="fp32"), False),
        (make_config(scale=0.01), False),
        (make_config(scale=0.01, host_dtype="fp32", host_dtypes={"t_C6": "int8"}), True),
    ],
)
def test_int8_that_rounds_no_row_is_told(config: RunConfig, is_told: bool) -> None:
    rows = table_rows(config)
    assert max(rows.values()) > sizes.SMALL_TABLE_ROWS or config.data.synthetic.scale < 0.01
    notes = host_type_notes(config.cache, table_sizes(config, rows))
    assert any(note.startswith(NOTE) for note in notes) is is_told


@pytest.mark.slow
def test_a_training_says_it_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, config in enumerate((make_config(), make_config(full_rows=0.0))):
        train_here(config, tmp_path / str(number))
        assert " ".join(capsys.readouterr().out.split()).count(NOTE) == 1 - number


def test_full_rows_take_more_memory_than_rows_of_fp32() -> None:
    """As the note says."""
    config = make_config()
    small, whole = (
        table_sizes(each, {"t_C3": 900})[0]
        for each in (config, replace(config, cache=CacheConfig(ratio=0.3)))
    )  # fmt: skip
    assert 900 * small.host_weight_bytes() + small.full_bytes(900, small.dim) > 900 * whole.host_weight_bytes()
