"""The bytes of a text file, whatever it is compressed with; and files that are none, named as what they are."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zipfile
import zlib
from collections.abc import Iterator
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
}
_LONGEST = 32
_BLOCK_BYTES = 1 << 22
READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, pa.ArrowException, RuntimeError)


def container_of(file: InputFile) -> str:
    """Return what a file is compressed with, by its first bytes: "gzip", "zstd", "bz2", "xz" or "zip"; "" for none.

    Raises:
        DataError: the file is of a kind that is no text; with what to do.
    """
    first = bytes(file.read(0, min(_LONGEST, file.num_bytes)))
    for magic, what in _OTHERS.items():
        if first.startswith(magic):
            raise DataError(f"{file.path}: {what}")
    if file.path.suffix == ".gz":
        return "gzip"
    return next((name for name, magic in _MAGIC.items() if first.startswith(magic)), "")


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
            while data := stream.read(block_bytes):
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
