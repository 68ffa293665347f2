"""Files that change while they are read: an error names file and place, and no process is killed."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.data import CriteoConfig, DataConfig, ParquetConfig, open_source
from embershard.data.sources import text
from embershard.data.sources.check import check_data
from embershard.data.sources.input_file import InputFile
from embershard.data.sources.source import FileSource
from embershard.errors import DataError

LINES = 2000


def plain(folder: Path, line: Callable[..., str]) -> tuple[Path, DataConfig]:
    path = folder / "day_0"
    path.write_text("".join(line(I1=str(row)) + "\n" for row in range(LINES)))
    return path, DataConfig("criteo", str(path), chunk_rows=100, criteo=CriteoConfig(num_rows=9))


def packed(folder: Path, line: Callable[..., str]) -> tuple[Path, DataConfig]:
    path, config = plain(folder, line)
    path.write_bytes(gzip.compress(path.read_bytes(), 0))  # without .gz in its name
    return path, config


def parquet(folder: Path, line: Callable[..., str]) -> tuple[Path, DataConfig]:
    path = folder / "a.parquet"
    table = pa.table({"label": [0, 1] * 500, "user": list(range(1000))})
    pq.write_table(table, path, row_group_size=100, compression="none")
    settings = ParquetConfig(sparse=("user",), num_rows=(9,))
    return path, DataConfig("parquet", str(path), parquet=settings)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(path.read_bytes())


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[::-1])
    os.utime(other, ns=(1, 1))
    other.replace(path)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\0" * 100)
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("change", [truncate, append, replace, overwrite, Path.unlink])
@pytest.mark.parametrize("make", [plain, packed, parquet])
def test_a_change_is_named(make, change, criteo_line, tmp_path, monkeypatch):
    for name, value in (("_SEGMENT_BYTES", 50_000), ("_INFLATE_BYTES", 3_000), ("_KEPT_SEGMENTS", 1)):
        monkeypatch.setattr(text, name, value)
    path, config = make(tmp_path, criteo_line)
    source = open_source(config)
    assert isinstance(source, FileSource)
    before = source.parse(1).samples
    assert before.num_samples == 100
    change(path)
    said = (
        r"No such file" if change is Path.unlink else r"changed while it was read, at byte [\d,]+: it had [\d,]+ bytes"
    )
    for chunk in (0, source.num_physical - 1):  # before the end of a truncated file, and behind it
        if make is packed and chunk == 0:
            continue  # decompressed before, and kept
        with pytest.raises(DataError, match=rf"{path.name}: {said}") as raised:
            source.parse(chunk)
        assert "\n" not in str(raised.value)


def test_what_does_not_change_is_read(criteo_line, tmp_path):
    path, config = plain(tmp_path, criteo_line)
    source = open_source(dataclasses.replace(config, criteo=CriteoConfig(num_rows=9, dense_transform="none")))
    numbers = [source.parse(chunk).samples.dense[:, 0].tolist() for chunk in range(source.num_physical)]
    assert list(itertools.chain(*numbers)) == list(range(LINES))
    assert bytes(InputFile.at(path).read(3, 9)) == path.read_bytes()[3:9]


def test_gzip_is_known_by_its_first_bytes(criteo_line, tmp_path):
    path, config = packed(tmp_path, criteo_line)
    content = gzip.decompress(path.read_bytes())
    wanted = open_source(config).parse(3).samples.values
    path.write_bytes(content)
    assert [ids.tolist() for ids in open_source(config).parse(3).samples.values] == [ids.tolist() for ids in wanted]


@pytest.mark.parametrize("check", [open_source, check_data])
def test_a_pipe_is_refused_and_not_waited_for(check, tmp_path):
    os.mkfifo(tmp_path / "day_0")
    with pytest.raises(DataError, match=r"day_0: not a regular file; needed one: samples are read in any order"):
        check(DataConfig("criteo", str(tmp_path / "day_0")))
