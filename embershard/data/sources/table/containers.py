"""The bytes of a text file, whatever it is compressed with; and files that are none, named as what they are."""

from __future__ import annotations

import ast
import bz2
import gzip
import lzma
import re
import shlex
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import IO

import pyarrow as pa

from embershard.data.sources.input_file import InputFile
from embershard.errors import DataError

#: First bytes of each container.
_MAGIC = {
    "gzip": b"\x1f\x8b",
    "zstd": b"\x28\xb5\x2f\xfd",
    "bz2": b"BZh",
    "xz": b"\xfd7zXZ\x00",
    "zip": b"PK\x03\x04",
}
#: First bytes of files that are no text, what they are, and what to do.
_OTHERS = {
    b"version https://git-lfs": "a pointer of git-lfs, not the data: git lfs pull",
    b"<!DOCTYPE": "a web page, not data: look at it, and fetch the file itself",
    b"<html": "a web page, not data: look at it, and fetch the file itself",
    b"ARROW1": "a Feather file; write it as Parquet (pandas: read_feather, to_parquet)",
    b"ORC": "an ORC file; write it as Parquet (pandas: read_orc, to_parquet)",
    b"SQLite format 3": "a SQLite data base; write its table as CSV (sqlite3 -csv -header FILE 'select * from TABLE')",
    b"\x89HDF": "an HDF5 file; write it as Parquet (pandas: read_hdf, to_parquet)",
    b"\x80\x04\x95": "a pickle of Python; write it as Parquet (pandas: read_pickle, to_parquet)",
    b"\x93NUMPY": "an array of numpy; write it as CSV or Parquet",
    b"\xd0\xcf\x11\xe0": "a workbook of Excel; save it as CSV",
    b"Obj\x01": "an Avro file; write it as Parquet (Python: fastavro.reader, pandas.DataFrame, to_parquet)",
    b"SEQ\x06": "a sequence file of Hadoop; write its table as text or Parquet (Hive: STORED AS PARQUET)",
    b"RDX": "an R data file; write it as CSV (R: write.csv(x, row.names = FALSE))",
    b"\x1f\x9d": "a file of compress (.Z): uncompress it",
    b"7z\xbc\xaf\x27\x1c": "an archive of 7-Zip: 7z x FILE, then give the file, or the folder, in it",
    b"Rar!": "an archive of RAR: unrar x FILE, then give the file, or the folder, in it",
}
_TAR_MAGIC = 257, b"ustar"
_LEAST_RECORD, _LONGEST_RECORD = 16, 1 << 24
_LONGEST = 1 << 16
#: Programs that write the bytes in a container.
_TO_TEXT = {"gzip": "gzip -dc", "zstd": "zstd -dc", "bz2": "bzip2 -dc", "xz": "xz -dc", "zip": "unzip -p"}
#: A line above the rows that it holds for; and what puts it in front of each of them.
_GROUP = re.compile(r"\d+:")
_OF_GROUPS = (
    "import sys; k = ''; [print(k, l, sep=',', end='') for l in sys.stdin "
    "if not (l.rstrip().endswith(':') and (k := l.rstrip()[:-1]))]"
)
_LEAST_SHARE = 0.9  # of the lines
_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_CLICK = "dict(label=int(float(w[0]) > 0)"
#: What each format is called, how its lines are written, and how a line `l`, in words `w`, becomes an object of JSON.
_FORMATS = (
    (
        "libffm (label field:feature:value)",
        rf"{_NUMBER}(?:\s+\w+:\w+:{_NUMBER})+\s*",
        f"{_CLICK}, **{{'f' + f: [t.split(':')[1] for t in w[1:] if t.split(':')[0] == f] "
        "for f in {t.split(':')[0] for t in w[1:]}})",
    ),
    (
        "libsvm whose values are 1 (label index:1)",
        rf"{_NUMBER}(?:\s+\d+:1(?:\.0*)?)+\s*",
        f"{_CLICK}, features=[t.split(':')[0] for t in w[1:]])",
    ),
    (
        "libsvm (label index:value)",
        rf"{_NUMBER}(?:\s+qid:\d+)?(?:\s+\d+:{_NUMBER})+\s*(?:#.*)?",
        f"{_CLICK}, **{{i if i == 'qid' else 'f' + i: float(v) "
        "for i, v in (t.split(':') for t in w[1:] if ':' in t)})",
    ),
    (
        "text of Vowpal Wabbit (label |namespace feature:value)",
        rf"{_NUMBER}(?:\s+{_NUMBER})*(?:\s+'?[^|\s]+)?\s+(?:\|[^|\s]+(?:\s+[^|\s]+)*\s*)+|"
        rf"{_NUMBER}(?:\s+{_NUMBER})*(?:\s+'[^|\s]+)?\s+\|(?:\s+[^|\s]+){{2,}}\s*",
        f"{_CLICK}, **{{n.split()[0].split(':')[0]: n.split()[1:] for n in "
        "(p if p[:1].strip() else 'features' + p for p in l.split('|')[1:])})",
    ),
)
_BLOCK_BYTES = 1 << 22
READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, pa.ArrowException, RuntimeError)


def container_of(file: InputFile) -> str:
    """Return what a file is compressed with, by its first bytes: "gzip", "zstd", "bz2", "xz" or "zip"; "" for none.

    Raises:
        DataError: the file is of a kind that is no text; with what to do.
    """
    first = bytes(file.read(0, min(_LONGEST, file.num_bytes)))
    _refuse_others(file, first)
    if file.path.suffix.lower() == ".gz":
        return "gzip"
    return next((name for name, magic in _MAGIC.items() if first.startswith(magic)), "")


def _refuse_others(file: InputFile, first: bytes) -> None:
    """Raise `DataError` where the first bytes of a file, or of what is compressed in it, are those of another kind."""
    what = next((what for magic, what in _OTHERS.items() if first.startswith(magic)), "")
    if first[_TAR_MAGIC[0] :].startswith(_TAR_MAGIC[1]):
        unpack = f"tar -xf {shlex.quote(str(file.path))}"
        what = f"an archive of tar: {unpack}, then give the file, or the folder, that was in it"
    elif _are_records(first):
        what = "TFRecords; write them as Parquet (Python: tf.data.TFRecordDataset, tf.io.parse_example, to_parquet)"
    if what:
        raise DataError(f"{file.path}: {what}")


def _are_records(first: bytes) -> bool:
    """Return whether bytes are TFRecords: each has 8 bytes of length, 4 of a checksum, its data and 4 of a checksum.
    The data of an example begin with a line feed: field 1 of a protobuf."""
    length = int.from_bytes(first[:8], "little")
    if len(first) < _LEAST_RECORD or not 0 < length < _LONGEST_RECORD:
        return False
    next_length = first[16 + length : 24 + length]
    return first[12:13] == b"\n" or 0 < int.from_bytes(next_length, "little") < _LONGEST_RECORD


def raw_blocks(file: InputFile, block_bytes: int = _BLOCK_BYTES) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file.

    Raises:
        DataError: it is damaged, has changed, or is a zip file of several files.
    """
    container = container_of(file)
    if not container:
        yield from file.blocks(0, block_bytes)
        return
    try:
        with _opened(file, container) as stream:
            is_first = True
            while data := stream.read(block_bytes):
                if is_first:
                    _refuse_others(file, data[:_LONGEST])
                is_first = False
                yield data
    except READ_ERRORS as error:
        file.check(0)
        what = " ".join(str(error).split())
        raise DataError(f"{file.path}: not a sound {container} file ({what}); fetch it again") from None
    file.check(file.num_bytes)


def _opened(file: InputFile, container: str) -> IO[bytes] | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile:
    if container == "gzip":
        return gzip.open(file.path)
    if container == "bz2":
        return bz2.open(file.path)
    if container == "xz":
        return lzma.open(file.path)
    if container == "zstd":
        return pa.input_stream(str(file.path), compression="zstd")  # type: ignore[no-any-return]
    with zipfile.ZipFile(file.path) as opened:
        members = [each for each in opened.infolist() if not (each.is_dir() or each.filename.startswith("__MACOSX"))]
        names = [each.filename for each in members]
        if "[Content_Types].xml" in names:
            raise DataError(f"{file.path}: a workbook of Excel; save it as CSV")
        if len(members) != 1:
            raise DataError(
                f"{file.path}: a zip file of {len(members)} files ({', '.join(names[:5])}); needed one. Unzip it, and "
                "give one of them, or a folder of those that belong together"
            )
        if members[0].flag_bits & 1:
            raise DataError(f"{file.path}: the zip file has a password; unzip it")
        return opened.open(members[0])


def refuse_features(file: InputFile, lines: Sequence[str]) -> None:
    """Raise `DataError` where lines are of a format that is no table; with a line of Python that makes one of them."""
    lines = [line for line in lines if line.strip()]
    for name, pattern, made in _FORMATS:
        is_line = re.compile(pattern)
        if sum(is_line.fullmatch(line) is not None for line in lines) >= _LEAST_SHARE * len(lines):
            script = f"import json, sys; [print(json.dumps({made})) for l in sys.stdin for w in [l.split()] if w]"
            raise DataError(
                f"{file.path}: is {name}; write it as JSON lines: {command_over(file, _python(script), 'NEW.jsonl')}"
            )
    if lines and _GROUP.fullmatch(lines[0]) and not all(map(_GROUP.fullmatch, lines)):
        raise DataError(
            f"{file.path}: its rows stand below lines as {lines[0]!r}, as in the Netflix Prize; put these in front of "
            f"each row: {command_over(file, _python(_OF_GROUPS), 'NEW.csv')}"
        )


def refuse_python(file: InputFile, line: str) -> None:
    """Raise `DataError` where a line that is no JSON is a dict as Python writes it; with what makes JSON of it."""
    try:
        is_dict = isinstance(ast.literal_eval(line.strip()), dict)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return
    if is_dict:
        script = "import ast, json, sys; [print(json.dumps(ast.literal_eval(l))) for l in sys.stdin if l.strip()]"
        made = command_over(file, _python(script), "NEW.jsonl")
        raise DataError(f"{file.path}: is dicts as Python writes them, and no JSON; write it as JSON lines: {made}")


def _python(script: str) -> str:
    return f'python -c "{script}"'


def command_over(file: InputFile, program: str, output: str) -> str:
    """Return the line that runs a program over the text of a file."""
    shown, container = shlex.quote(str(file.path)), container_of(file)
    return f"{_TO_TEXT[container]} {shown} | {program} > {output}" if container else f"{program} < {shown} > {output}"
