"""Features whose tables take any id: values become 64-bit ids, in every format, and generated ids come and go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.data import DataConfig, SyntheticConfig, open_source, schema_of
from embershard.data.config import TableConfig, TableFeature
from embershard.data.hashing import MISSING_ID, RESERVED_ID, make_key
from embershard.data.sources.kinds import serving_inputs
from embershard.data.sources.synthetic import SyntheticSource
from embershard.errors import ConfigError, DataError

IDS = TableFeature("sparse", num_rows=240, mapping="ids")
TEXTS = TableFeature("sparse", num_rows=240, mapping="text_ids")


def config_of(path: Path, **features: TableFeature) -> DataConfig:
    return DataConfig("table", str(path), eval_fraction=0.0, table=TableConfig(features))


def values(path: Path, feature: TableFeature) -> tuple[list[int], list[int]]:
    """All ids of the feature "x", and the sizes of its bags."""
    source = open_source(config_of(path, x=feature))
    block = source.parse(0).samples
    lengths = block.lengths
    return block.values[0].tolist(), [lengths[0]] if isinstance(lengths, tuple) else lengths[0].tolist()


def parquet(folder: Path, column: pa.Array) -> Path:
    path = folder / "a.parquet"
    pq.write_table(pa.table({"label": [0] * len(column), "x": column}), path)
    return path


def csv(folder: Path, *cells: str) -> Path:
    path = folder / "a.csv"
    path.write_text("label,x\n" + "".join(f"0,{cell}\n" for cell in cells))
    return path


def text_id(text: str) -> int:
    data = text.encode()
    words = [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]
    return int(np.array([make_key(len(data), *words)], np.uint64).view(np.int64)[0])


def test_integers_are_ids_as_they_are(tmp_path):
    ids = [7, -5, 2**63 - 1, -(2**63) + 2, 0]
    expected = [*ids, MISSING_ID]
    assert values(parquet(tmp_path, pa.array([*ids, None])), IDS)[0] == expected
    assert values(csv(tmp_path, *map(str, ids), ""), IDS)[0] == expected
    unsigned = pa.array([2**64 - 5, 7], pa.uint64())
    assert values(parquet(tmp_path, unsigned), IDS)[0] == [-5, 7], "the same bits"


def test_texts_are_ids_by_their_hash(tmp_path):
    expected = [text_id("Oslo"), text_id("7"), MISSING_ID, text_id("a text of many bytes")]
    texts = ["Oslo", "7", "", "a text of many bytes"]
    assert values(parquet(tmp_path, pa.array(texts)), TEXTS)[0] == expected
    assert values(csv(tmp_path, *texts), TEXTS)[0] == expected
    assert values(parquet(tmp_path, pa.array([7, None])), TEXTS)[0] == [text_id("7"), MISSING_ID]


def test_bags_of_ids(tmp_path):
    path = parquet(tmp_path, pa.array([[10**18, -1], [], None, [3, None]]))
    assert values(path, IDS) == ([10**18, -1, MISSING_ID, 3, MISSING_ID], [2, 0, 1, 2])


def test_the_reserved_id_is_a_bad_row(tmp_path):
    for path in (parquet(tmp_path, pa.array([1, RESERVED_ID])), csv(tmp_path, "1", str(RESERVED_ID))):
        row = 2 if path.suffix == ".parquet" else 3
        source = open_source(config_of(path, x=IDS))
        with pytest.raises(DataError, match=rf"{path.name}:{row} x=-9223372036854775808: needed another integer"):
            source.read("train", 0, np.arange(2))
    source = open_source(config_of(parquet(tmp_path, pa.array([2**63], pa.uint64())), x=IDS))
    with pytest.raises(DataError, match=r"x=9223372036854775808: needed another"):
        source.read("train", 0, np.arange(1))


def test_schema_and_serving_inputs_say_so(tmp_path):
    config = config_of(tmp_path, x=IDS, y=TEXTS, z=TableFeature("sparse", num_rows=5))
    assert [(each.name, each.num_rows, each.takes_ids) for each in schema_of(config).sparse] == [
        ("x", 240, True), ("y", 240, True), ("z", 5, False)
    ]  # fmt: skip
    assert [each["mapping"] for each in serving_inputs(config)["sparse"]] == ["ids", "text_ids", "text"]
    assert config.has_ids
    assert not DataConfig().has_ids
    with pytest.raises(ConfigError, match=r"shares a table with 'x', whose mapping is 'ids'"):
        TableConfig({"x": IDS, "y": TableFeature("sparse", num_rows=240, mapping="text_ids", table="x")})
    with pytest.raises(ConfigError, match=r"num_rows is not set"):
        TableConfig({"x": TableFeature("sparse", mapping="ids")})


def generated(**settings: object) -> SyntheticSource:
    synthetic = SyntheticConfig(num_samples=20_000, scale=0.001, **settings)  # type: ignore[arg-type]
    return SyntheticSource(DataConfig(synthetic=synthetic))


def test_generated_ids_stand_for_rows():
    rows, ids = generated(), generated(id_rows=480)
    places = [number for number, feature in enumerate(ids.schema.sparse) if feature.takes_ids]
    assert places == [2, 3, 11, 15, 20]
    assert {ids.schema.sparse[place].num_rows for place in places} == {480}
    samples = np.arange(2000)
    for number, (row, id_) in enumerate(zip(rows.samples(samples).values, ids.samples(samples).values, strict=True)):
        if number in places:
            assert len(set(zip(row.tolist(), id_.tolist(), strict=True))) == len(set(row.tolist())) == len(set(id_))
            assert id_.min() < -(2**60) < 2**60 < id_.max()
        else:
            assert np.array_equal(row, id_)


def test_generated_ids_are_replaced_as_often_as_settings_say():
    steady, moving = generated(id_rows=480), generated(id_rows=480, id_turnover=4.0)
    rows = np.arange(1, 1001)
    tables = [source.tables[2] for source in (steady, moving)]
    moments = np.linspace(0, 20_000, 41).astype(np.int64)
    of_steady, of_moving = (
        np.stack([table.ids_of_rows(rows, np.full(1000, moment)) for moment in moments]) for table in tables
    )
    assert (of_steady == of_steady[0]).all()
    assert [len(set(column)) for column in of_moving.T] == [5] * 1000, "the first one, and four more"
    assert len(np.unique(of_moving)) == 5000
    assert (of_moving[1:] != of_moving[:-1]).mean(axis=1) == pytest.approx(0.1, abs=0.05), "a few at a time"


def test_bags_of_generated_ids():
    source = generated(id_rows=480, bag_sizes=(3,))
    bags = source.samples(np.arange(1000)).values[2].reshape(-1, 3)
    assert len(np.unique(bags, axis=0)) == len(np.unique(bags[:, 0]))
    assert bags.min() < 0 < bags.max()


def test_a_turnover_needs_ids():
    with pytest.raises(ConfigError, match=r"synthetic.id_turnover = 2.0; needed 0 without synthetic.id_rows"):
        SyntheticConfig(id_turnover=2.0)
