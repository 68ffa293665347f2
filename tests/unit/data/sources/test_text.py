"""Samples and bad rows of text files do not depend on where chunks begin and end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from embershard.data import DataConfig, open_source
from embershard.data.block import Block
from embershard.data.config import TableConfig, TableFeature
from embershard.data.sources.check import check_data
from embershard.errors import DataError, NoRowsError
from tests.covering import examples

MARK = b"\xef\xbb\xbf"
HEADER = b"label,x,u,t\n"
FEATURES = {
    "x": TableFeature("dense"),
    "u": TableFeature("sparse", num_rows=50),
    "parts": TableFeature("sparse", column="u", num_rows=20, separator="|"),
    "id": TableFeature("sparse", column="x", num_rows=9, mapping="hash"),
    "t": TableFeature("sparse", mapping="hour"),
}
LINES = [b"1,2,a,0", b'0,1,"b|c",2024-12-31', b'1,,"d",', b"", b"1,2,e"]
PIECES = [b",", b'"', b"\n", b"\r", b"\r\n", b"1", b"a", b"7.0", b"true", b"1e39", MARK, b"\xff", b"\0", b"|", b" "]


def table(path: Any, chunk_rows: int, quoted: bool, names: tuple[str, ...] = ()) -> DataConfig:
    """The settings of a file of `FEATURES`."""
    form = TableConfig(FEATURES, columns=names, quoted=quoted)
    return DataConfig(
        "table", str(path), table=form, eval_fraction=0.0, shuffle=False, chunk_rows=chunk_rows, bad_rows=0.9
    )


def contents(config: DataConfig) -> tuple[Any, ...]:
    """Every number of all samples, and the report of every bad row."""
    source: Any = open_source(config)
    chunks = [source.parse(number) for number in range(source.num_physical)]
    block = Block.join([chunk.samples for chunk in chunks])
    bad = [(str(row), row.column) for chunk in chunks for row in chunk.bad.values()]
    arrays = [block.dense, block.labels, *block.values, np.asarray(block.lengths)]
    return bad, block.num_samples, [each.tobytes() for each in arrays]


@st.composite
def bodies(draw: Any) -> bytes:
    """Lines that are samples, some with pieces of others in them."""
    lines = draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=6))
    body = b"\n".join(lines) + draw(st.sampled_from([b"", b"\n", b"\r"]))
    for piece, where in draw(st.lists(st.tuples(st.sampled_from(PIECES), st.floats(0, 1)), max_size=4)):
        place = round(where * len(body))
        body = body[:place] + piece + body[place:]
    return body


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of one example after another."""
    return tmp_path_factory.mktemp("text") / "a.csv"


@pytest.mark.slow
@examples(25)
@given(bodies(), st.booleans(), st.booleans())
@example(b'1,2,"a\n1",0\r1,2,b,0\n0,1,c,0\n', True, True)  # a swallowed line end, and a row more than there are lines
@example(b'1,2,a,"0\n"\r1,2,b,0\n', True, True)
@example(b"1,2,a,0\n" + MARK + b"0,1,b,0\n1,2,c,0\n", True, True)
@example(MARK + b"1,2,a,0\n" + MARK + b"1,2,a,0\n", False, True)
@example(b"1,2,a,0\r\n0,1,b,0\r\r\n1,2,c,0\r", True, False)
def test_chunks_change_no_sample(text_file, body, has_header, quoted):
    text_file.write_bytes(HEADER + body if has_header else body)
    names = () if has_header else ("label", "x", "u", "t")
    found = []
    for chunk_rows in (1, 2, 3, 1000):
        try:
            found.append(contents(table(text_file, chunk_rows, quoted, names)))
        except NoRowsError as error:  # of blank lines alone
            found.append(str(error))
    assert found == [found[0]] * 4


@pytest.mark.parametrize("chunk_rows", [1, 2, 1000])
def test_a_carriage_return_within_a_line_makes_it_bad(tmp_path, chunk_rows):
    """Also where a quote that opens before it makes as many rows as there are lines. CRLF ends a line."""
    path = tmp_path / "a.csv"
    path.write_bytes(HEADER + b'1,2,"a\n1",0\r1,2,b,0\n0,1,c,0\r\n0,1,d,0\r\r\n0,1,"e\rf",0\n1,1,g,0\r')
    bad, num_samples, _ = contents(table(path, chunk_rows, quoted=True))
    assert num_samples == 2
    where = [problem.removeprefix(f"{path}:")[:30] for problem, _ in bad]
    said = [number for number, (problem, _) in enumerate(bad) if "has a carriage return in it" in problem]
    assert [each.partition(" ")[0] for each in where] == ["2", "3", "5", "6"], where
    assert said == [1, 2, 3]


def test_a_mark_is_dropped_at_the_start_of_a_file_only(tmp_path, criteo_line):
    """A byte order mark: editors put it in front. Where files were joined, one is left in the first cell of a line."""
    path = tmp_path / "a.csv"
    path.write_bytes(MARK + b"1,2,a,0\n" + MARK + b"1,2,a,0\n")
    names = ("label", "x", "u", "t")
    for chunk_rows in (1, 2):
        bad, num_samples, _ = contents(table(path, chunk_rows, quoted=True, names=names))
        assert (num_samples, [problem.partition(": ")[0] for problem, _ in bad]) == (1, [f"{path}:2 label='\\ufeff1'"])
    check_data(table(path, 2, quoted=True, names=names))
    line = criteo_line().encode()
    day = tmp_path / "day_0"
    day.write_bytes(MARK + line + b"\n" + MARK + line)
    for chunk_rows in (1, 2):
        config = DataConfig("criteo", str(day), eval_fraction=0.0, chunk_rows=chunk_rows, bad_rows=0.9)
        source: Any = open_source(config)
        chunks = [source.parse(number) for number in range(source.num_physical)]
        assert sum(chunk.samples.num_samples for chunk in chunks) == 1
        assert [bad.row for chunk in chunks for bad in chunk.bad.values()] == [2]


def test_a_header_has_no_carriage_return_either(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"label,x,u,t\r\r\n1,2,a,0\r\n")
    with pytest.raises(DataError, match=r"a.csv:1 .*has a carriage return in it"):
        open_source(table(path, 1, quoted=True))
