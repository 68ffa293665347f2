"""Rows that are not samples: found, named, and replaced in the same way whatever reads them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.data import BatchStream, CriteoConfig, DataConfig, ParquetConfig, StreamState, open_source
from embershard.data.block import BadRow, BadRowTally, Block, ParsedChunk
from embershard.data.sources.criteo import CriteoSource
from embershard.errors import ConfigError, DataError

BAD = {3, 4, 5, 17, 39, 40, 77}
ROWS = 90


def write_criteo(folder: Path, line: Callable[..., str], bad: set[int] = BAD) -> DataConfig:
    """Rows 0..89 with I1 = row, of which `bad` have a wrong C1; the last nine are held out."""
    lines = [line(I1=str(row), C1="zebra" if row in bad else "a") for row in range(ROWS)]
    (folder / "day_0").write_text("\n".join(lines) + "\n")
    raw = CriteoConfig(num_rows=50, dense_transform="none")
    return DataConfig("criteo", str(folder), chunk_rows=16, bad_rows=0.5, criteo=raw, num_workers=0)


def order(config: DataConfig, world_size: int, batch_size: int, split="train", state=None) -> tuple[list[int], list]:
    """Return I1 of all samples in the global order, and the bad rows."""
    streams = [
        BatchStream(
            open_source(config), batch_size=batch_size, rank=rank, world_size=world_size, split=split, epochs=1,
            config=config, state=state,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    batches = itertools.chain.from_iterable(zip(*streams, strict=True))
    found = [int(number) for batch in batches for number in batch.dense_features[:, 0]]
    return found, sorted(row.row for stream in streams for row in stream.bad_rows.rows)


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_does_not_depend_on_ranks_or_batches(criteo_line, tmp_path, shuffle):
    import dataclasses

    config = dataclasses.replace(write_criteo(tmp_path, criteo_line), shuffle=shuffle, eval_fraction=0.0)
    clean = dataclasses.replace(config, path=str(tmp_path / "clean"))
    (tmp_path / "clean").mkdir()
    write_criteo(tmp_path / "clean", criteo_line, bad=set())
    wanted, bad = order(config, world_size=1, batch_size=6)
    assert bad == sorted(row + 1 for row in BAD)
    for world_size, batch_size in ((1, 30), (2, 5), (3, 10)):
        assert order(config, world_size, batch_size) == (wanted, bad)
    # Every good row is where it is without bad rows; in place of a bad row there is a good one of the same chunk.
    for number, without in zip(wanted, order(clean, 1, 6)[0], strict=True):
        assert number == without if without not in BAD else number not in BAD and number // 16 == without // 16
    assert set(wanted) == set(range(ROWS)) - BAD


def test_a_resumed_stream_goes_on_with_the_same_samples(criteo_line, tmp_path):
    config = write_criteo(tmp_path, criteo_line)
    whole, _ = order(config, world_size=1, batch_size=10)
    rest, _ = order(config, world_size=2, batch_size=5, state=StreamState(0, 30, config.seed))
    assert rest == whole[30:]


def test_held_out_bad_rows_are_left_out(criteo_line, tmp_path):
    config = write_criteo(tmp_path, criteo_line, bad={81, 85, 86, 87, 88, 89})
    found, bad = order(config, world_size=2, batch_size=2, split="eval")
    assert found == [82, 83, 84]
    assert bad == [82, 86, 87, 88, 89, 90]


def test_training_takes_no_held_out_row(criteo_line, tmp_path):
    """Rows 80..89 are in one chunk, of which 81..89 are held out: nothing can replace row 80."""
    config = write_criteo(tmp_path, criteo_line, bad={80})
    with pytest.raises(DataError, match=r"day_0:81 C1='zebra'.*no row near it is good"):
        order(config, world_size=1, batch_size=9)


def test_the_first_bad_row_stops_where_none_is_tolerated(criteo_line, tmp_path):
    import dataclasses

    config = dataclasses.replace(write_criteo(tmp_path, criteo_line), bad_rows="stop", shuffle=False)
    with pytest.raises(DataError, match=r"day_0:4 C1='zebra': needed 1 to 8 hexadecimal"):
        order(config, world_size=1, batch_size=9)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.data())
def test_replacements_are_good_rows_of_the_same_part(is_bad, data):
    first = data.draw(st.integers(0, len(is_bad) - 1))
    stop = data.draw(st.integers(first + 1, len(is_bad)))
    among = np.array(sorted(data.draw(st.sets(st.integers(first, stop - 1), min_size=1))))
    rows = np.array(data.draw(st.permutations(among.tolist())))
    good = np.array([row for row, wrong in enumerate(is_bad) if not wrong], np.int64)
    samples = Block(good[:, None].astype(np.float32), np.zeros(len(good), np.float32), (good,), (1,))
    bad = {row: BadRow(Path("a"), row + 1, "", "x") for row, wrong in enumerate(is_bad) if wrong}
    parsed = ParsedChunk(samples, bad)
    kept = parsed.take(rows, among, replaces=False)
    assert kept.values[0].tolist() == [row for row in rows.tolist() if not is_bad[row]]
    if not any(row in among for row in good):
        with pytest.raises(DataError, match="no row near it is good"):
            parsed.take(rows, among, replaces=True)
        return
    taken = parsed.take(rows, among, replaces=True)
    assert [row.row - 1 for row in taken.bad] == [row for row in rows.tolist() if is_bad[row]]
    found = dict(zip(rows.tolist(), taken.values[0].tolist(), strict=True))
    assert all(number == row if not is_bad[row] else number in good for row, number in found.items())
    assert set(found.values()) <= set(among.tolist())
    halves = [parsed.take(part, among, replaces=True).values[0] for part in np.array_split(rows, 2)]
    assert np.concatenate(halves).tolist() == taken.values[0].tolist()


def test_a_line_is_bad_whatever_is_beside_it(criteo_line, tmp_path):
    lines = [criteo_line(I1=str(row)) for row in range(20)]
    for row, cells in {2: {"I2": "1_0"}, 3: {"I2": " 7"}, 9: {"C3": "\r"}, 19: {"label": "1.0"}}.items():
        lines[row] = criteo_line(**cells)
    config = DataConfig("criteo", str(tmp_path / "day_0"), bad_rows=0.5)

    def bad(text: list[str], first: int) -> list[int]:
        (tmp_path / "day_0").write_text("\n".join(text) + "\n", newline="")
        return [row + first for row in CriteoSource(config).parse(0).bad]

    alone = [row for number, line in enumerate(lines) for row in bad([line], number)]
    assert bad(lines, 0) == alone
    assert {2, 9} <= set(alone)


@pytest.mark.parametrize("cells", [{"I2": "free"}, {"C3": "zebra"}, {"label": "2"}, {"C3": "a\tb"}])
def test_few_bad_lines_take_few_reads(criteo_line, tmp_path, monkeypatch, cells):
    """Halves of halves were read before: about fifty times as often."""
    bad = {7, 500, 1500, 2040}
    lines = [criteo_line(I1=str(row), **(cells if row in bad else {})) for row in range(2048)]
    (tmp_path / "day_0").write_text("\n".join(lines) + "\n")
    source = CriteoSource(DataConfig("criteo", str(tmp_path / "day_0"), bad_rows=0.5))
    num_reads, parse = 0, source._parse_lines

    def counted(*arguments):
        nonlocal num_reads
        num_reads += 1
        return parse(*arguments)

    monkeypatch.setattr(source, "_parse_lines", counted)
    parsed = source.parse(0)
    assert list(parsed.bad) == sorted(bad)
    assert parsed.samples.num_samples == 2044
    assert num_reads == 2 + len(bad)


def test_parquet_rows_are_named_by_their_first_problem(tmp_path):
    table = pa.table({
        "label": pa.array([1, 0, 7, 1, 0, 1], pa.int8()),
        "age": pa.array([1.0, float("inf"), 2.0, 3.0, 1e39, 4.0], pa.float64()),
        "item": pa.array([[1], [2], [3], [2**64 - 1, 99], [4], [1, 2, 3, 4]], pa.list_(pa.uint64())),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet")
    columns = ParquetConfig(dense=("age",), sparse=("item",), num_rows=(10,), id_mapping="none", max_bag_size=3)
    config = DataConfig("parquet", str(tmp_path / "a.parquet"), eval_fraction=0.0, bad_rows=0.9, parquet=columns)
    parsed = open_source(config).parse(0)
    assert [f"{row.row} {row.column} {row.problem}" for row in parsed.bad.values()] == [
        "2 age age=inf: needed a finite number, below 3.4e38",
        '3 label label=7.0: a label must be 0 or 1; data.kind = "table" takes other numbers, by label_at_least or '
        'task = "regression"',
        "4 item item=18446744073709551615: needed a row in 0..9",
        "5 age age=1e+39: needed a finite number, below 3.4e38",
        "6 item item=4 ids: needed at most 3 (data.parquet.max_bag_size)",
    ]
    assert parsed.samples.num_samples == 1
    batch = next(
        BatchStream(open_source(config), batch_size=6, rank=0, world_size=1, split="train", epochs=1, config=config)
    )
    assert torch.equal(batch.sparse_features.values(), torch.ones(6, dtype=torch.int64))


def test_a_tally_keeps_few_and_counts_all():
    tally = BadRowTally()
    row = BadRow(Path("a"), 1, "", "x")
    tally.add(5000, (row,) * 800)
    tally.add(5000, (row,) * 800)
    taken = tally.take()
    assert (taken.num_samples, taken.num_bad, len(taken.rows)) == (10_000, 1600, 1000)
    assert (tally.num_samples, tally.num_bad, tally.rows) == (0, 0, [])


@pytest.mark.parametrize("share", [0, 1.0, -0.1, "stop it", float("nan")])
def test_a_wrong_share_is_refused(share):
    with pytest.raises(ConfigError, match=r'data.bad_rows = .*; needed "stop", or a share in \(0, 1\)'):
        DataConfig(kind="criteo", path="x", bad_rows=share)


def test_a_share_without_an_effect_is_refused():
    with pytest.raises(ConfigError, match=r"data.bad_rows = 0.1; needed .*reads no file"):
        DataConfig(bad_rows=0.1)
