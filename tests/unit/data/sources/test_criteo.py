"""Criteo files: the same numbers as a slow reader gives, from any kind of file; messages about bad input."""

from __future__ import annotations

import gzip
import itertools
import math
import string

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from embershard.data import CriteoConfig, DataConfig, open_source
from embershard.data.hashing import mix64
from embershard.data.sources import text
from embershard.data.sources.criteo import parse_hex
from embershard.errors import ConfigError, DataError
from tests.covering import examples

NUM_ROWS = tuple(range(3, 2_080_003, 80_000))


def slow_mix64(z: int) -> int:
    mask = 2**64 - 1
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
    return z ^ (z >> 31)


def slow_rows(line: str, num_rows: tuple[int, ...], mapping: str) -> list[int]:
    cells = line.split("\t")[14:]
    ids = [int(cell, 16) if cell else None for cell in cells]
    if mapping == "hash":
        ids = [None if i is None else slow_mix64(i) for i in ids]
    return [0 if i is None else 1 + i % (n - 1) for i, n in zip(ids, num_rows, strict=True)]


def slow_dense(line: str, transform: str) -> list[float]:
    numbers = [float(cell or 0) for cell in line.split("\t")[1:14]]
    return [math.log1p(max(x, 0)) for x in numbers] if transform == "log1p" else numbers


def read_all(open_stream, path, *, batch_size=1000, split="train", **settings):
    """The samples of a split in file order, as (dense, rows [B, 26], labels)."""
    criteo = settings.pop("criteo", CriteoConfig(num_rows=NUM_ROWS))
    settings = {"eval_fraction": 0.0, "shuffle": False, "num_workers": 0} | settings
    config = DataConfig(kind="criteo", path=str(path), criteo=criteo, **settings)
    stream = open_stream(open_source(config), config, batch_size=batch_size, split=split)
    batches = list(stream)
    rows = torch.cat([b.sparse_features.values().view(26, -1).T for b in batches])
    assert all(b.sparse_features.lengths().unique().tolist() == [1] for b in batches)
    return torch.cat([b.dense_features for b in batches]), rows, torch.cat([b.labels for b in batches])


@pytest.mark.slow
@pytest.mark.parametrize("mapping", ["modulo", "hash"])
@pytest.mark.parametrize("transform", ["log1p", "none"])
def test_real_sample_as_a_slow_reader_sees_it(criteo_sample, criteo_text, open_stream, mapping, transform):
    criteo = CriteoConfig(num_rows=NUM_ROWS, id_mapping=mapping, dense_transform=transform)
    dense, rows, labels = read_all(open_stream, criteo_sample, criteo=criteo)
    lines = criteo_text.decode().splitlines()
    assert labels.shape == (10_000,)
    assert labels.tolist() == [float(line[0]) for line in lines]
    lines = lines[:400]
    assert rows[:400].tolist() == [slow_rows(line, NUM_ROWS, mapping) for line in lines]
    assert torch.allclose(dense[:400], torch.tensor([slow_dense(line, transform) for line in lines]))
    assert (rows < torch.tensor(NUM_ROWS)).all()
    missing = [[not cell for cell in line.split("\t")[14:]] for line in criteo_text.decode().splitlines()]
    assert torch.equal(rows == 0, torch.tensor(missing)), "row 0 is for missing cells, and for nothing else"


@pytest.mark.slow
def test_gz_plain_and_folder_are_the_same_data(criteo_text, open_stream, tmp_path):
    lines = criteo_text.splitlines(keepends=True)[:3000]
    data = b"".join(lines)
    (tmp_path / "plain.tsv").write_bytes(data)
    (tmp_path / "packed.tsv.gz").write_bytes(gzip.compress(data))
    members = b"".join(gzip.compress(data[i : i + 99_999]) for i in range(0, len(data), 99_999))
    (tmp_path / "members.tsv.gz").write_bytes(members)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "day_0").write_bytes(b"".join(lines[:1234]).rstrip(b"\n"))
    (folder / "day_1.gz").write_bytes(gzip.compress(b"".join(lines[1234:1300])))
    (folder / "day_2").write_bytes(b"".join(lines[1300:]).replace(b"\n", b"\r\n"))
    (folder / "README.txt").write_text("not data")
    (folder / "_SUCCESS").write_text("")
    paths = [tmp_path / "plain.tsv", tmp_path / "packed.tsv.gz", tmp_path / "members.tsv.gz", folder]
    results = [read_all(open_stream, path, chunk_rows=rows) for path in paths for rows in (256, 5000)]
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.slow
def test_gz_is_read_from_the_middle(criteo_text, open_stream, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "_SEGMENT_BYTES", 50_000)
    monkeypatch.setattr(text, "_INFLATE_BYTES", 3_000)
    monkeypatch.setattr(text, "_KEPT_SEGMENTS", 1)
    (tmp_path / "day_0.gz").write_bytes(gzip.compress(criteo_text))
    (tmp_path / "plain.tsv").write_bytes(criteo_text)
    settings = {"shuffle": True, "chunk_rows": 100, "shuffle_window": 1000, "num_workers": 2}
    packed = read_all(open_stream, tmp_path / "day_0.gz", **settings)
    plain = read_all(open_stream, tmp_path / "plain.tsv", **settings)
    assert all(torch.equal(a, b) for a, b in zip(packed, plain, strict=True))


def test_tail_of_every_file_is_held_out(criteo_line, open_stream, tmp_path):
    for day, count in ((0, 50), (1, 7), (2, 1)):
        lines = [criteo_line(I1=str(day * 100 + i)) + "\n" for i in range(count)]
        (tmp_path / f"day_{day}").write_text("".join(lines))
    raw = {"criteo": CriteoConfig(dense_transform="none"), "eval_fraction": 0.2, "chunk_rows": 8}
    train = read_all(open_stream, tmp_path, batch_size=1, **raw)[0][:, 0]
    held_out = read_all(open_stream, tmp_path, batch_size=4, split="eval", **raw)[0][:, 0]
    assert train.tolist() == [*range(40), *range(100, 106), 200]
    assert held_out.tolist() == [*range(40, 50), 106]
    other = tmp_path / "day_1"
    raw["eval_path"] = str(other)
    assert len(read_all(open_stream, tmp_path, batch_size=1, **raw)[0]) == 58
    held_out = read_all(open_stream, tmp_path, batch_size=4, split="eval", **raw)[0][:, 0]
    assert held_out.tolist() == list(range(100, 107))


def test_missing_and_negative_cells(criteo_line, open_stream, tmp_path):
    path = tmp_path / "day_0"
    path.write_text(criteo_line(I1="", I2="-2", I3="7", C1="", C2="0", C3="F", C26="") + "\n" + criteo_line())
    dense, rows, labels = read_all(open_stream, path, batch_size=2)
    assert dense[0, :3].tolist() == pytest.approx([0, 0, math.log1p(7)])
    assert rows[0, [0, 1, 2, 25]].tolist() == [0, 1, 16, 0]
    assert labels.tolist() == [1, 1]


cells = st.lists(st.text("0123456789abcdefABCDEF", max_size=8), min_size=1, max_size=40)


def hex_values(cells):
    return parse_hex(np.frombuffer("".join(cells).encode(), np.uint8), np.array([len(c.encode()) for c in cells]))


@given(st.one_of(cells, st.lists(st.sampled_from(["", "0123abCD", "ffffffff"]), min_size=1)))
def test_hex_is_what_int_says(cells):
    assert hex_values(cells).tolist() == [int(cell or "0", 16) for cell in cells]


@given(cells, st.integers(0, 40), st.text(string.printable + "é", max_size=12))
def test_one_bad_cell_is_refused(cells, place, cell):
    cells.insert(place, cell)
    if len(cell) <= 8 and set(cell) <= set("0123456789abcdefABCDEF"):
        hex_values(cells)
        return
    with pytest.raises(ValueError, match=r"."):
        hex_values(cells)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_hash_is_the_declared_one(words):
    assert mix64(np.array(words, np.uint64)).tolist() == [slow_mix64(word) for word in words]


@given(st.lists(st.sampled_from([b"", b"\r", b"a", b"a\r", b"bc", b"bcd\r"]), max_size=30), st.data())
@examples(60)
def test_chunks_of_lines_are_cut_at_newlines(pieces, data):
    content = b"\n".join(pieces)
    blocks, start = [], 0
    while start < len(content):
        size = data.draw(st.integers(1, 20))
        blocks.append(np.frombuffer(content[start : start + size], np.uint8))
        start += size
    borders, rows, lines = text.scan_lines(blocks, chunk_rows := data.draw(st.integers(1, 7)))
    chunks = [content[a:b] for a, b in itertools.pairwise(borders)]
    assert b"".join(chunks) == (content if len(rows) else b"")
    assert lines.tolist() == [len(chunk.splitlines()) for chunk in chunks]
    found = [bytes(text.without_blank_lines(memoryview(chunk))[0]).splitlines() for chunk in chunks]
    wanted = [line for line in content.split(b"\n") if line.removesuffix(b"\r")]
    assert [len(each) for each in found] == rows.tolist()
    assert [line for each in found for line in each] == [line.removesuffix(b"\r") for line in wanted]
    assert all(count == chunk_rows for count in rows[:-1])


BAD_CELLS = [
    ({"label": "2"}, r"day_0:12 label='2': a label must be 0 or 1"),
    ({"label": ""}, r"day_0:12 label='': a label must be 0 or 1"),
    ({"label": "nan"}, r"day_0:12 label='nan': a label must be 0 or 1"),
    ({"I3": "x"}, r"day_0:12 I3='x': needed a number"),
    ({"I3": "nan"}, r"day_0:12 I3='nan': needed a number"),
    ({"I3": "inf"}, r"day_0:12 I3='inf': needed a number"),
    ({"C2": "68fd1e6g"}, r"day_0:12 C2='68fd1e6g': needed 1 to 8 hexadecimal digits"),
    ({"C2": "-1"}, r"day_0:12 C2='-1': needed 1 to 8 hexadecimal digits"),
    ({"C26": "068fd1e64"}, r"day_0:12 C26='068fd1e64': needed 1 to 8 hexadecimal digits"),
    ({"C26": "é"}, r"day_0:12 C26='é': needed 1 to 8 hexadecimal digits"),
    ({"C26": "1\t2"}, r"day_0:12 has 41 tab-separated columns; needed 40: label, 13 integers"),
    ({"C26": "1\r2"}, r"day_0:12 C26='1\\r2': needed 1 to 8 hexadecimal digits"),
    ({"I3": "1e39"}, r"day_0:12 I3='1e39': needed a number below 3.4e38"),
]


@pytest.mark.parametrize(("cells", "message"), BAD_CELLS)
def test_bad_cells_are_named(criteo_line, open_stream, tmp_path, cells, message):
    lines = [criteo_line()] * 30
    lines[11] = criteo_line(**cells)
    (tmp_path / "day_0").write_text("\n".join(lines), newline="")
    with pytest.raises(DataError, match=message):
        read_all(open_stream, tmp_path, batch_size=8, chunk_rows=8, num_workers=2)


def test_a_blank_line_is_no_row_and_a_wrong_encoding_is_named(criteo_line, open_stream, tmp_path):
    path = tmp_path / "day_0"
    path.write_text(criteo_line() + "\n\n" + criteo_line())
    assert len(read_all(open_stream, path, batch_size=1)[2]) == 2
    path.write_text(criteo_line() + "\n\nx\n" + criteo_line())
    with pytest.raises(DataError, match=r"day_0:3 has 1 tab-separated columns"):
        read_all(open_stream, path, batch_size=1)
    path.write_bytes(criteo_line(I1="@").replace("@", "\xff").encode("latin-1"))
    with pytest.raises(DataError, match=r"day_0:1 I1='\\\\xff': needed a number"):
        read_all(open_stream, path, batch_size=1)


def test_bad_files_are_named(criteo_text, tmp_path):
    def problem(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError) as caught:
            open_source(DataConfig(kind="criteo", path=str(tmp_path / name)))
        return str(caught.value)

    packed = gzip.compress(criteo_text[:100_000])
    assert "day_0: the file is empty (0 bytes)" in problem("day_0", b"")
    assert "day_1.gz: no line in it" in problem("day_1.gz", gzip.compress(b""))
    assert "day_2.gz: the gzip file is truncated" in problem("day_2.gz", packed[:-100])
    assert "day_3.gz: not a sound gzip file" in problem("day_3.gz", packed[:5000] + b"\0" * 99 + packed[5099:])
    assert "day_4.gz: not a sound gzip file" in problem("day_4.gz", criteo_text[:1000])
    with pytest.raises(DataError, match=r"no such file or folder"):
        open_source(DataConfig(kind="criteo", path=str(tmp_path / "absent")))
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.md").write_text("x")
    with pytest.raises(DataError, match=r"none of its 1 files matches day_\*.*notes.md.*set data.criteo.files"):
        open_source(DataConfig(kind="criteo", path=str(other)))


def test_wrong_settings_are_named():
    with pytest.raises(ConfigError, match=r"data.criteo.num_rows = \(5, 6\); needed one number or 26"):
        CriteoConfig(num_rows=[5, 6])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"needs data.path"):
        open_source(DataConfig(kind="criteo"))
    with pytest.raises(ConfigError, match=r"data.path"):
        DataConfig(kind="synthetic", path="somewhere")
    with pytest.raises(ConfigError, match=r"data.eval_fraction"):
        DataConfig(eval_fraction=1.1)
