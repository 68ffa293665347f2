"""`embershard data convert`: rows keep their order and values through joins and parts, in memory that is bounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.commands import cli
from embershard.data.sources.table import whole_columns

pytestmark = pytest.mark.extra

#: Counts what it lends; it must outlive the arrays that it lent to.
COUNTED = pa.proxy_memory_pool(pa.default_memory_pool())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def convert(*arguments: str) -> pa.Table:
    Path("out.parquet").unlink(missing_ok=True)
    assert cli.main(["data", "convert", *arguments, "-o", "out.parquet"]) == 0
    return pq.read_table("out.parquet")


@pytest.mark.smoke
def test_a_join_keeps_the_order_of_the_rows(monkeypatch):
    monkeypatch.setattr(whole_columns, "_BATCH_ROWS", 64)
    draw = np.random.default_rng(0)
    keys, users = draw.integers(0, 300, 1000), draw.permutation(250)  # ids from 250 on have no partner
    pq.write_table(pa.table({"n": np.arange(1000), "user": keys}), "rows.parquet")
    city = pa.array([f"c{user}" for user in users]).dictionary_encode()  # as pandas writes categories
    pq.write_table(pa.table({"user": users, "age": users * 2, "city": city}), "users.parquet")
    found = convert("rows.parquet", "--join", "users.parquet")
    expected = [None if key >= 250 else (2 * int(key), f"c{key}") for key in keys]
    pairs = zip(found["age"].to_pylist(), found["city"].to_pylist(), strict=True)
    assert found["n"].to_pylist() == list(range(1000))
    assert [None if age is None else (age, city) for age, city in pairs] == expected
    assert found.sort_by("user")["n"].to_pylist() != list(range(1000)), "an order by key would have been seen"


def test_a_join_compares_values_as_texts():
    """Ids as numbers in one file and with missing ones, as pandas writes them, in the other."""
    pq.write_table(pa.table({"click": [1, 0, 1], "user": [7.0, None, 8.0]}), "rows.parquet")
    Path("users.csv").write_text("user,age\n8,80\n7,70\n,60\n")
    assert convert("rows.parquet", "--join", "users.csv")["age"].to_pylist() == [70, None, 80]


def test_a_join_may_be_larger_than_the_memory_that_it_takes(monkeypatch):
    monkeypatch.setattr(whole_columns, "_BATCH_ROWS", 64)
    count, size = 3000, 4000
    text = pa.array([f"{n:08}" * (size // 8) for n in range(count)])
    pq.write_table(pa.table({"user": np.arange(count)[::-1], "text": text}), "users.parquet", row_group_size=100)
    pq.write_table(pa.table({"n": np.arange(500), "user": np.arange(500) * 6}), "rows.parquet")
    usual = pa.default_memory_pool()
    pa.set_memory_pool(COUNTED)
    try:
        found = convert("rows.parquet", "--join", "users.parquet", "--rows", "100")
    finally:
        pa.set_memory_pool(usual)
    assert found["text"].to_pylist() == [f"{count - 1 - 6 * n:08}" * (size // 8) for n in range(500)]
    assert COUNTED.max_memory() < count * size / 3


def test_parts_of_integers_and_of_numbers_become_numbers():
    """The negative control: by the type of the first part, 3.5 would be 3 or an error."""
    Path("parts").mkdir()
    pq.write_table(pa.table({"user": ["a"], "price": pa.array([3], pa.int64())}), "parts/a.parquet")
    pq.write_table(pa.table({"price": [3.5], "user": ["b"], "more": ["x"]}), "parts/b.parquet")
    pq.write_table(
        pa.table({"price": pa.array([], pa.float64()), "user": pa.array([], pa.string())}), "parts/c.parquet"
    )
    found = convert("parts")
    assert found.to_pylist() == [{"user": "a", "price": 3.0, "more": None}, {"user": "b", "price": 3.5, "more": "x"}]


def test_integers_that_no_number_has_are_named(capsys):
    Path("parts").mkdir()
    pq.write_table(pa.table({"user": ["a"], "price": [2**53 + 1]}), "parts/a.parquet")
    pq.write_table(pa.table({"user": ["b"], "price": [3.5]}), "parts/b.parquet")
    assert cli.main(["data", "convert", "parts", "-o", "out.parquet"]) == 2
    assert "column 'price' is int64 and, in other files, double, which has not all" in capsys.readouterr().err
    assert not Path("out.parquet").exists()


@pytest.mark.smoke
@pytest.mark.parametrize("written", ['{{"click": {}, "id": {}}}\n', "{},{}\n"])
def test_long_ids_stay_exact(written):
    ids = [2**63 - 1 - n for n in range(300)]
    header = "" if written.startswith("{{") else "click,id\n"
    name = "a.csv" if header else "a.jsonl"
    Path(name).write_text(header + "".join(written.format(n % 2, each) for n, each in enumerate(ids)))
    assert convert(name)["id"].to_pylist() == ids


def test_bytes_that_are_no_utf8_are_bad_cells(capsys):
    lines = [b"click,city", *(b"%d,Paris" % (n % 2) for n in range(300)), b"1,K\xf6ln", b"0,Rome"]
    Path("a.csv").write_bytes(b"\n".join(lines) + b"\n")
    assert cli.main(["data", "convert", "a.csv", "-o", "out.parquet"]) == 2
    said = capsys.readouterr().err
    assert "a.csv:302 city='K\\\\xf6ln': needed UTF-8, or the encoding that it is: --encoding" in said
    assert "--bad-rows 0.0034" in said
    assert convert("a.csv", "--bad-rows", "0.01").num_rows == 301
    assert convert("a.csv", "--encoding", "latin-1")["city"].to_pylist()[-2:] == ["Köln", "Rome"]
