"""`RunConfig`: what settings of different rooms must agree in."""

from __future__ import annotations

from typing import Any

import pytest

from embershard.data import DataConfig
from embershard.data.config import ParquetConfig, TableConfig, TableFeature
from embershard.errors import ConfigError
from embershard.models import ModelConfig
from embershard.models.hstu_config import HstuConfig
from embershard.training.config import RunConfig

TIMES = ("time", "past_time")
MODEL = ModelConfig("hstu", target=("item",), history=("past",), hstu=HstuConfig(times=TIMES))
SECONDS = 1 << 32


def parquet(rows: int, mapping: Any) -> DataConfig:
    columns = ParquetConfig((), ("item", "past", *TIMES), (9, 9, rows, rows), id_mapping=mapping)
    return DataConfig(kind="parquet", path="x", parquet=columns)


def table(mapping: Any) -> DataConfig:
    ids = {name: TableFeature("sparse", num_rows=9) for name in ("item", "past")}
    times = {name: TableFeature("sparse", num_rows=SECONDS, mapping=mapping) for name in TIMES}
    return DataConfig(kind="table", path="x", table=TableConfig({**ids, **times}))


@pytest.mark.parametrize("data", [parquet(SECONDS, "modulo"), parquet(SECONDS, "none"), table("modulo")])
def test_times_are_seconds(data):
    assert RunConfig(data=data, model=MODEL).model.hstu.times == TIMES


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (parquet(SECONDS, "hash"), '\'time\' has the mapping "hash" and num_rows = 4294967296; needed "none" or'),
        (parquet(SECONDS - 1, "modulo"), "num_rows = 4294967295; needed .* at least 4_294_967_296"),
        (table("text"), "'time' has the mapping \"text\""),
        (DataConfig(), 'got data.kind = "synthetic", needed "parquet" or "table"'),
    ],
)
def test_ids_that_are_no_seconds_are_refused(data, said):
    with pytest.raises(ConfigError, match=f"model.hstu.times: .*{said}"):
        RunConfig(data=data, model=MODEL)
