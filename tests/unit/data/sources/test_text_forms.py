"""How a text file is written is found out, or asked for; what is found is what the file's writer meant."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest

from embershard.data.sources.input_file import InputFile
from embershard.data.sources.table.containers import raw_blocks
from embershard.data.sources.table.plain_text import first_bytes, fold, plain_blocks
from embershard.data.sources.table.text_forms import Given, cells_of, find_form
from embershard.data.sources.table.whole_columns import WholeColumns
from embershard.data.text_form import TextForm
from embershard.errors import DataError

ROWS = [(n % 2, f"u{n % 7}", n / 4, f"t{n % 3}|t{n % 5}") for n in range(60)]
HEADER = "click,user,price,tags"
LINES = [",".join(map(str, row)) for row in ROWS]


def text_of(lines: list[str], separator: str = ",") -> bytes:
    return "".join(f"{line}\n" for line in lines).replace(",", separator).encode()


def form_of(path: Path, data: bytes, **given: object) -> dict[str, object]:
    """Return what differs from the defaults in the form that is found."""
    path.write_bytes(data)
    form = find_form(InputFile.at(path), Given(**given))
    return {name: value for name in vars(TextForm()) if (value := getattr(form, name)) != getattr(TextForm(), name)}


@pytest.mark.parametrize("separator", [", ", ",", "\t", ";", "|", "::", "^", "\x01", " "])
def test_separators(tmp_path, separator):
    lines = [line.rpartition(",")[0] for line in [HEADER, *LINES]]
    found = form_of(tmp_path / "a.txt", text_of(lines, separator))
    assert found == ({} if separator == "," else {"separator": separator})


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["# clicks", "", HEADER, *LINES], {"skip_lines": 2}),
        (["A title with nothing in it", HEADER, *LINES], {"skip_lines": 1}),
        (["click;price;t", *(f"{n % 2};{n},{n % 10}0;x" for n in range(60))], {"separator": ";"}),  # decimal commas
        (["click,tags", *(f"{n % 2},a|b|c|d" for n in range(60))], {}),  # as many bars in each row
        (["click,user", *(f'{n % 2},"u, v"' for n in range(60))], {}),
        (["click,user", *(f'{n % 2},5" pipe' for n in range(60))], {}),
        (["click,user", *(f'{n % 2},"x{n}"' for n in range(60)), '1,"open'], {}),  # one line is no row
        (["click,user", *(f'{n % 2},"say \\"x\\" {n}"' for n in range(60))], {"escape": "\\"}),
        (["click,user", *(f'{n % 2},"C:\\{n}\\"' for n in range(60))], {}),  # a backslash is one
        (["click,user", *(f'{n % 2},"good\nor {n}"' for n in range(60))], {"line_breaks": True}),
        (["click,user", *(f'{n % 2},"open {n}' for n in range(60))], {"quoted": False}),
        (['"x","click"', *(f'"{n}",{n},{n % 2}' for n in range(60))], {"columns": ("row_name", "x", "click")}),
        (["user:token,click:float", *(f"{n},{n % 2}" for n in range(60))], {}),
    ],
)
def test_what_is_special_of_a_file(tmp_path, lines, found):
    if "columns" in found:
        found = found | {"skip_lines": 1}
    assert form_of(tmp_path / "a.csv", "".join(f"{line}\n" for line in lines).encode()) == found


@pytest.mark.parametrize(
    ("data", "given", "said"),
    [
        (text_of(LINES), {}, r"a.csv:1 has values, as no header: '0,u0,0.0,t0|t0'. Name the columns: --columns NAME"),
        (
            b"user,city\nann,rome\nbob,oslo\n",
            {},
            r"a.csv:1 may be a header, or the first row: .* --header, or --columns",
        ),
        (b"one\ntwo\n", {}, r"needed a separator that is in most lines, got no separator: 'one'. Say .*--separator"),
        (text_of([HEADER, *LINES]), {"separator": ";"}, r"got --separator ';', which is not: 'click,user.*--separator"),
        (b"a,b;c\n1;2,3\n4;5\n6,7\n8;9;1\n" * 9, {}, r"% of the lines have 2 cells by .*; the others .*--separator"),
        ("click,ort\n0,Köln\n".encode("latin-1") * 9, {}, r"8 of 17 lines are no UTF-8. Say .* --encoding.*'0,Köln'"),
        ("a,b\n".encode("utf-16"), {"encoding": "utf-32"}, r"no utf-32|is not utf-32"),
        (b"\n\n", {}, r"a.csv: no line in it but empty ones"),
    ],
)
def test_what_cannot_be_told_is_asked_for(tmp_path, data, given, said):
    with pytest.raises(DataError, match=said) as raised:
        form_of(tmp_path / "a.csv", data, **given)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_encodings_that_files_show(tmp_path, encoding):
    data = text_of([HEADER, *LINES]).decode().encode(encoding)
    found = form_of(tmp_path / "a.csv", data)
    assert found == ({} if encoding == "utf-8-sig" else {"encoding": encoding})
    file = InputFile.at(tmp_path / "a.csv")
    assert first_bytes(file, TextForm(**found), 1 << 20) == text_of([HEADER, *LINES])


def zipped(path: Path, *names: str) -> bytes:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, text_of([HEADER, *LINES]))
    return path.read_bytes()


@pytest.mark.parametrize("kind", ["gz", "two gz", "zst", "bz2", "xz", "zip"])
def test_containers_are_told_by_their_bytes(tmp_path, kind):
    text, path = text_of([HEADER, *LINES]), tmp_path / "a.csv"
    half = text.find(b"\n", 300) + 1
    compressed = {
        "gz": lambda: gzip.compress(text),
        "two gz": lambda: gzip.compress(text[:half]) + gzip.compress(text[half:]),
        "zst": lambda: pa.compress(text, "zstd", asbytes=True),
        "bz2": lambda: bz2.compress(text),
        "xz": lambda: lzma.compress(text),
        "zip": lambda: zipped(path, "b.csv"),
    }[kind]()
    path.write_bytes(compressed)
    assert b"".join(raw_blocks(InputFile.at(path))) == text
    assert form_of(path, compressed) == {}
    path.write_bytes(compressed[:-9])
    with pytest.raises(DataError, match=r"a.csv: not a sound \w+ file \(.*\); fetch it again"):
        list(raw_blocks(InputFile.at(path)))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1501\nsize 668\n",
            "a pointer of git-lfs.*git lfs pull",
        ),
        (b"<!DOCTYPE html>\n<html>", "a web page, not data"),
        (b"ARROW1\x00\x00", "a Feather file; write it as Parquet"),
    ],
)
def test_what_is_no_text_is_named(tmp_path, data, said):
    with pytest.raises(DataError, match=f"a.csv: {said}"):
        form_of(tmp_path / "a.csv", data)


def test_a_zip_file_of_several_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"a zip file of 2 files \(a.csv, b.csv\); needed one. Unzip it"):
        form_of(tmp_path / "x.csv", zipped(tmp_path / "a.zip", "a.csv", "b.csv"))


def blocks(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_plain_text_does_not_depend_on_blocks(tmp_path, monkeypatch, size):
    """Cells with line breaks, escapes, separators of two characters, letters of two bytes, however bytes come."""
    form = TextForm(separator="::", escape="\\", line_breaks=True, encoding="utf-16", skip_lines=1)
    rows = [["1", "a::b", 'say "x"', "two\nlines", "back\\slash"], ["2", "", 'Köln "', "\n", "ü\r\nv"]]
    quoted = [[cell.replace("\\", "\\\\").replace('"', '\\"') for cell in row] for row in rows]
    text = "a title\n" + "".join("::".join(f'"{cell}"' for cell in row) + "\n" for row in quoted)
    (tmp_path / "a.csv").write_bytes(text.encode("utf-16"))
    file = InputFile.at(tmp_path / "a.csv")
    monkeypatch.setattr(
        "embershard.data.sources.table.plain_text.raw_blocks", lambda file: iter(blocks(text.encode("utf-16"), size))
    )
    plain = b"".join(plain_blocks(file, form)).decode()
    found = [cells_of(line, TextForm(separator="\x1f")) for line in plain.split("\n")[:-1]]
    assert [[cell.replace("\x1e", "\n").replace("\x1d", "\r") for cell in row] for row in found] == rows


def test_an_open_quote_spoils_its_line_only():
    """The negative control: a parser that lets quotes run takes all lines behind it for one cell."""
    lines = [b'1,"open', *(b'%d,"x\ny"' % n for n in range(99))]
    assert fold(b"\n".join(lines) + b"\n", TextForm(line_breaks=True)).count(b"\n") == 100


def unnamed(header: str, line: str, count: int = 400) -> bytes:
    return (header + "\n" + "".join(line.format(n=n, even=n % 2, few=n % 9) + "\n" for n in range(1, count))).encode()


@pytest.mark.parametrize(
    ("line", "first"),
    [('"{n}",{even},{few}', "row_name"), ("lane {n},{even},{few}", "row_name"), ("{even},{few},", "bought")],
)
def test_rows_have_a_cell_more_than_the_header(tmp_path, line, first):
    """Names of rows, as R writes them, stand before the others; a separator at each row's end is no reason to."""
    found = form_of(tmp_path / "a.csv", unnamed("bought,shop", line))
    columns = ("row_name", "bought", "shop") if first == "row_name" else ("bought", "shop", "Unnamed: 2")
    assert found == {"columns": columns, "skip_lines": 1}


@pytest.mark.parametrize(
    ("line", "more"),
    [
        ("{even},'Ulm, {few}'", "python -c"),
        ("{even},{few},7", "--columns NAME,...$"),
        ("{n}7,{even},{few}", "--columns NAME,...$"),
        ("lane {few},{even},{n}", "--columns NAME,...$"),
        ("2026-01-0{few},{even},{n}", "--columns NAME,...$"),
    ],
)
def test_a_cell_more_that_is_no_name_of_a_row_is_asked_for(tmp_path, line, more):
    with pytest.raises(DataError, match=rf"a.csv:1 has 2 names, 'bought,shop', and rows have 3 cells, .*{more}"):
        form_of(tmp_path / "a.csv", unnamed("bought,shop", line))
    found = form_of(tmp_path / "a.csv", unnamed("bought,shop", line), columns=("a", "b", "c"))
    assert found == {"columns": ("a", "b", "c"), "skip_lines": 1}


def test_a_row_with_as_many_cells_as_the_header_is_asked_for(tmp_path):
    data = unnamed("bought,shop", "lane {n},{even},{few}").replace(b"lane 9,", b"")
    with pytest.raises(DataError, match="Which column has no name"):
        form_of(tmp_path / "a.csv", data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "why"),
    [(b"1,7\n", "but not all: '1,7'"), (b"lane 5,1,7\n", "does not tell rows apart"), (b"9,1,7\n", "does not tell")],
)
def test_a_later_row_says_that_first_cells_are_no_names_of_rows(tmp_path, row, why):
    """Far behind what `find_form` looks at; all rows are read before anything is written."""
    for line in (("lane {n},{even},{few}", "{n},{even},{few}")[row[:1] == b"9"],):
        data = unnamed("bought,shop", line, 40_000)
        place = data.find(b"\n", len(data) // 3) + 1
        path = tmp_path / "a.csv"
        path.write_bytes(data)
        assert sum(batch.num_rows for batch in WholeColumns.at(path, Given()).batches()) == 39_999
        path.write_bytes(data[:place] + row + data[place:])
        with pytest.raises(DataError, match=f"a.csv:1 has 2 names.*{why}.*--columns NAME"):
            list(WholeColumns.at(path, Given()).batches(on_bad=lambda bad: None))


@pytest.mark.parametrize(("mark", "separator"), [("sep=;", ";"), ('"sep=,"', ","), ("SEP=\\t", "\t"), ("sep=|", "|")])
@pytest.mark.parametrize("width", [2, 4])
def test_the_first_line_of_excel_names_the_separator(tmp_path, mark, separator, width):
    lines = [",".join(line.split(",")[:width]) for line in [HEADER.replace("tags", "when"), *LINES]]
    data = f"{mark}\r\n".encode() + text_of([line.replace("|", "/") for line in lines], separator)
    found = form_of(tmp_path / "a.csv", data)
    assert found == {"skip_lines": 1} | ({} if separator == "," else {"separator": separator})
    assert form_of(tmp_path / "a.csv", data, has_header=True) == found


def test_a_name_that_is_twice_in_a_header_gets_a_number(tmp_path):
    path = tmp_path / "a.csv"
    data = unnamed("bought,shop,shop,", "{even},{few},{n},x")
    assert form_of(path, data) == {}
    assert WholeColumns.at(path, Given()).schema.names == ["bought", "shop", "shop_2", "Unnamed: 3"]
    assert form_of(path, data, columns=("a", "b", "c", "d")) == {"columns": ("a", "b", "c", "d"), "skip_lines": 1}


def test_a_first_row_without_values_is_no_header(tmp_path):
    """Missing cells are no names, though the columns below are numbers."""
    data = unnamed("NA,NA,-", "{even},{few},{n}")
    with pytest.raises(DataError, match="--columns"):
        form_of(tmp_path / "a.csv", data)
    assert "skip_lines" not in form_of(tmp_path / "a.csv", data, columns=("a", "b", "c"))
