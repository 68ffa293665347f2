"""Text of any form as plain text: UTF-8, a row to a line, one character between the cells.

Chunks of plain text can be read in any order, and a bad row is a bad line. Text of another form (compressed by other
than gzip, in another encoding, with line breaks in cells) is rewritten, line by line: for one pass as it is read, for
training once, to a file of its own.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from embershard.data.sources.input_file import InputFile
from embershard.data.sources.table.containers import container_of, raw_blocks
from embershard.data.text_form import TextForm
from embershard.errors import ConfigError, DataError, NoRowsError, naming_file, os_problem
from embershard.whole_file import whole_file

#: Stand in plain text for the line feeds and carriage returns in cells, where `line_breaks` is true.
FEED, RETURN = b"\x1e", b"\x1d"
_HEAD_BYTES = 1 << 18
_MOST_CELL_BYTES = 1 << 20  # of a cell with line breaks
_VERSION = 1  # of what the copies are


def plain_blocks(file: InputFile, form: TextForm) -> Iterator[bytes]:
    """Yield the plain text of a file, whole lines at a time, without a byte order mark.

    Raises:
        DataError: the file is damaged, has changed, or is not of the form's encoding.
    """
    lines = _whole_lines(_as_utf8(file, form), form)
    rewrite = _rewriting(form)
    skip = form.skip_lines
    for block in lines:
        while skip and block:
            block, skip = block[block.find(b"\n") + 1 or len(block) :], skip - 1
        if block:
            yield rewrite(block)


def first_bytes(file: InputFile, form: TextForm, count: int) -> bytes:
    """Return the first `count` bytes of a file's plain text."""
    data = b""
    for block in plain_blocks(file, form):
        data += block
        if len(data) >= count:
            break
    return data[:count]


def ends_in_returns(head: bytes) -> bool:
    """Return whether lines end in carriage returns alone, by the first bytes of a file."""
    return b"\n" not in head and b"\r" in head.rstrip(b"\r\n")


def plain_file(file: InputFile, form: TextForm) -> InputFile:
    """Return a file with the plain text of `file`: itself or, where that has another form, a copy.

    The copy is made when it is first asked for, by one process: others wait. It gets its name when it is whole, and is
    that of the file's path, size, time and form, so it is never stale. See `copies_folder`.

    Raises:
        DataError: as `plain_blocks`; or `data.table.skip_lines` leaves nothing.
        ConfigError: the copy cannot be written.
    """
    if form.is_plain and container_of(file) in ("", "gzip"):
        head = next(raw_blocks(file, _HEAD_BYTES), b"")
        if not ends_in_returns(head):
            return file
    fields = [form.separator, form.quoted, form.escape, form.line_breaks, form.skip_lines, form.encoding]
    facts = [_VERSION, str(file.path.absolute()), file.num_bytes, file.modified_ns, *fields]
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
    copy = copies_folder() / name / f"{file.path.name}.txt"
    try:
        with naming_file(copy):
            copy.parent.mkdir(parents=True, exist_ok=True)
            with (copy.parent / "lock").open("w") as lock:
                _wait_for(lock.fileno())
                if not copy.exists():
                    (copy.parent / "source.json").write_text(json.dumps(facts), encoding="utf-8")
                    with whole_file(copy) as partial, partial.open("wb") as written:
                        for block in plain_blocks(file, form):
                            written.write(block)
    except OSError as error:
        if error.filename == str(file.path):
            raise
        raise ConfigError(
            f"{file.path} is read from a copy as plain text, which cannot be written: {os_problem(error)} The folder "
            f"of such copies is {copies_folder()}; set EMBERSHARD_COPIES to one on a disk with room."
        ) from error
    if form.skip_lines and not copy.stat().st_size:
        raise NoRowsError(f"{file.path}: no line behind the {form.skip_lines} that data.table.skip_lines leaves out")
    return InputFile.at(copy)


def copies_folder() -> Path:
    """Return the folder of plain copies: `EMBERSHARD_COPIES`, else embershard/copies in the user's folder of caches."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("EMBERSHARD_COPIES") or Path(caches) / "embershard" / "copies")


def _wait_for(handle: int) -> None:
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_EX)  # the system lets go of it when the process ends, however it ends


def _as_utf8(file: InputFile, form: TextForm) -> Iterator[bytes]:
    blocks, is_first, has_returns = raw_blocks(file), True, False
    decoder = None if form.is_utf8 else codecs.getincrementaldecoder(form.encoding)()
    num_bytes = 0
    for block in blocks:
        if is_first and block.startswith(codecs.BOM_UTF8):  # UTF-8, whatever the run's first files were
            decoder = None
        if decoder is not None:
            try:
                text = decoder.decode(block)
            except UnicodeError as error:
                at = num_bytes + getattr(error, "start", 0)
                raise DataError(
                    f"{file.path}: byte {at:,} is no {form.encoding} ({getattr(error, 'reason', error)}); needed the "
                    "encoding that the file was written in: data.table.encoding (inspect, convert and train: "
                    "--encoding), for instance latin-1, which takes every byte"
                ) from None
            num_bytes += len(block)
            block = text.encode()
        if is_first:
            block = block.removeprefix(codecs.BOM_UTF8)
            is_first, has_returns = False, ends_in_returns(block)
        yield block.replace(b"\r", b"\n") if has_returns else block


def _whole_lines(blocks: Iterator[bytes], form: TextForm) -> Iterator[bytes]:
    """Yield the same bytes, cut behind line ends; `FEED` and `RETURN` are for line breaks in cells."""
    rest = b""
    for block in blocks:
        data = rest + block
        end = data.rfind(b"\n") + 1
        if form.line_breaks:
            data = fold(data[:end], form) + data[end:]
            end = _end_of_closed(data, form)
        yield data[:end]
        rest = data[end:]
    if rest:
        yield fold(rest, form) if form.line_breaks else rest


def fold(text: bytes, form: TextForm) -> bytes:
    """Return text with `FEED` and `RETURN` for the line breaks in quoted cells.

    A quote opens a cell at its start only, and closes it before a separator or a line's end only: a quote that stays
    open spoils its own line, and not those behind it.

    >>> fold(b'1,"good\\nor bad"\\n2,"open\\n3,"x"\\n', TextForm())
    b'1,"good\\x1eor bad"\\n2,"open\\n3,"x"\\n'
    """
    return _quoted_cells(form).sub(
        lambda found: found[0].replace(b"\n", FEED).replace(b"\r", RETURN) if b"\n" in found[0] else found[0], text
    )


def _quoted_cells(form: TextForm, *, breaks: bool = True) -> re.Pattern[bytes]:
    """Return what matches a cell in quotes; with `breaks`, also one that has line breaks in it."""
    separator, ends = re.escape(form.separator.encode()), b"" if breaks else rb"\n"
    other, pair = b'[^"' + ends + b"]*", b'""'
    if form.escape:
        escape = re.escape(form.escape.encode())
        other, pair = b'[^"' + escape + ends + b"]*", b'(?:""|' + escape + (rb"[\s\S])" if breaks else rb".)")
    cell = b'"' + other + b"(?:" + pair + other + b')*"'
    return re.compile(rb"((?:(?<=" + separator + rb")|(?<=\n)|\A)" + cell + rb"(?=" + separator + rb"|\r?\n|\Z))")


def _end_of_closed(data: bytes, form: TextForm) -> int:
    """Return the end of the last line before which no quoted cell is open that may end behind `data`."""
    end = data.rfind(b"\n") + 1
    start = max(0, data.rfind(b"\n", 0, max(0, end - _MOST_CELL_BYTES)) + 1)
    opens = re.compile(rb"(?:(?<=" + re.escape(form.separator.encode()) + rb')|(?<=\n)|\A)"')
    closed = _quoted_cells(form)
    place = start
    while (found := opens.search(data, place, end)) is not None:
        whole = closed.match(data, found.start(), end)
        if whole is None:
            return data.rfind(b"\n", 0, found.start()) + 1
        place = whole.end()
    return end


def _rewriting(form: TextForm) -> Callable[[bytes], bytes]:
    """Return what makes plain lines of a form's lines."""
    separator, plain = form.separator.encode(), form.plain["separator"].encode()
    escape = form.escape.encode()
    escaped, quoted = (
        re.compile(re.escape(escape) + rb'(["' + re.escape(escape) + rb"])"),
        _quoted_cells(form, breaks=False),
    )

    def rewrite(lines: bytes) -> bytes:
        if separator != plain and form.quoted and b'"' in lines:
            parts = quoted.split(lines)  # every other one is a cell in quotes
            parts[::2] = [part.replace(separator, plain) for part in parts[::2]]
            lines = b"".join(parts)
        elif separator != plain:
            lines = lines.replace(separator, plain)
        return escaped.sub(lambda found: b'""' if found[1] == b'"' else escape, lines) if escape else lines

    return rewrite
