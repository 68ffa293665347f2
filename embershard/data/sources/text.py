"""Text files, plain or gzip: cut into chunks of lines that can be read in any order; sources whose lines are samples.

One pass over a file finds where its chunks start. A gzip file can only be read forward, so that pass keeps copies of
the decompressor's state every 16 MiB, and a read starts at the copy before it.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

from embershard.data.block import BadRow, Block, ParsedChunk, short
from embershard.data.config import DataConfig
from embershard.data.hashing import Ids, cell_bytes
from embershard.data.sample_bits import Flags
from embershard.data.schema import Schema
from embershard.data.sources.held_out import Share, hold_out
from embershard.data.sources.input_file import InputFile, left_out_of, list_files
from embershard.data.sources.source import FileSource, RecentlyUsed, SplitChunks
from embershard.errors import DataError, NoRowsError

if TYPE_CHECKING:
    from zlib import _Decompress


#: Where a file begins with it, it is no part of the first line; elsewhere it is part of a cell.
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CARRIAGE_RETURN = "has a carriage return in it; lines must end in a line feed: tr '\\r' '\\n' < FILE > NEW"
NEWLINE, _RETURN = 10, 13
_SCAN_BYTES = 1 << 23
_INFLATE_BYTES = 1 << 20
_SEGMENT_BYTES = 1 << 24
_KEPT_SEGMENTS = 8
_USUAL = np.isin(np.arange(256), list(b"0123456789abcdefABCDEF-.,\t\r\n"))
_FEW_PARTS = 16
T = TypeVar("T")


def scan_lines(blocks: Iterable[NDArray[np.uint8]], chunk_rows: int) -> tuple[Ids, Ids, Ids]:
    """Find the byte behind every `chunk_rows`-th row, in one pass over blocks of at least a byte. A blank line is none.

    >>> scan_lines([np.frombuffer(b"1\\n22\\n\\n333", np.uint8)], chunk_rows=2)
    (array([0, 5, 9]), array([2, 1]), array([2, 2]))

    Returns:
        Borders of the chunks in bytes [C + 1]; and rows, and lines, per chunk [C]. The last line needs no newline.
    """
    starts, before = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]  # the lines before each start
    size, num_lines, num_rows, begun, last = 0, 0, 0, 0, NEWLINE
    for block in blocks:
        ends = np.flatnonzero(block == NEWLINE)
        lengths = np.diff(ends, prepend=-1 - begun) - 1
        lines = np.arange(1, 1 + len(ends))
        begun = len(block) - 1 - int(ends[-1]) if len(ends) else begun + len(block)
        if len(ends) and lengths.min() <= 1:
            ends_in_return = np.append(last, block[:-1])[ends] == _RETURN
            is_row = (lengths > 1) | ((lengths == 1) & ~ends_in_return)
            ends, lines = ends[is_row], lines[is_row]
        borders = slice(-(num_rows + 1) % chunk_rows, None, chunk_rows)
        starts.append(ends[borders] + size + 1)
        before.append(lines[borders] + num_lines)
        num_lines, num_rows = num_lines + len(lengths), num_rows + len(ends)
        size, last = size + len(block), int(block[-1])
    num_lines += begun > 0
    num_rows += begun > (last == _RETURN)
    firsts = np.arange(0, num_rows, chunk_rows)
    borders_of_lines = np.append(np.concatenate(before)[: len(firsts)], num_lines)
    chunk_borders = np.append(np.concatenate(starts)[: len(firsts)], size)
    return chunk_borders, np.minimum(chunk_rows, num_rows - firsts), np.diff(borders_of_lines)


def without_blank_lines(data: memoryview) -> tuple[memoryview, Ids]:
    """Return the lines that are not blank, and their numbers, from 0.

    >>> lines, numbers = without_blank_lines(memoryview(b"1\\n\\r\\n2\\n"))
    >>> bytes(lines), numbers
    (b'1\\n2\\n', array([0, 2]))
    """
    text = np.frombuffer(data, np.uint8)
    borders = line_borders(text)
    sizes = np.diff(borders)
    if not (sizes <= 2).any():
        return data, np.arange(len(sizes))
    firsts = text[borders[:-1]]
    is_blank = (sizes == 1) & ((firsts == NEWLINE) | (firsts == _RETURN))
    two = np.flatnonzero((sizes == 2) & (firsts == _RETURN))
    is_blank[two] = text[borders[two] + 1] == NEWLINE
    numbers = np.flatnonzero(~is_blank)
    return (some_lines(data, borders, numbers) if is_blank.any() else data), numbers


def line_borders(text: NDArray[np.uint8]) -> Ids:
    """Return where each line begins, and the end of the last one."""
    borders = np.append(0, np.flatnonzero(text == NEWLINE) + 1)
    return borders if borders[-1] == len(text) else np.append(borders, len(text))


class PlainFile:
    """The bytes of a file."""

    def __init__(self, file: InputFile) -> None:
        self._file = file

    def blocks(self) -> Iterator[NDArray[np.uint8]]:
        for data in self._file.blocks(0, _SCAN_BYTES):
            yield np.frombuffer(data, np.uint8)

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop)."""
        return self._file.read(start, stop)


class _State(NamedTuple):
    """A place to go on from: decompressed and compressed bytes before it, and the decompressor (about 50 KiB)."""

    start: int
    place: int
    inflater: _Decompress


class GzipFile:
    """The decompressed bytes of a gzip file (of one or several members), from any place on.

    `blocks` must have been read to its end before `read`.
    """

    def __init__(self, file: InputFile, kept: RecentlyUsed[tuple[GzipFile, int], bytes]) -> None:
        self._file, self._kept = file, kept
        self._states: list[_State] = []
        self._size = 0

    def blocks(self) -> Iterator[NDArray[np.uint8]]:
        """Yield all bytes, and keep states on the way."""
        for place, inflater, data in self._inflate(0, _new_inflater()):
            if not self._states or self._size - self._states[-1].start >= _SEGMENT_BYTES:
                self._states.append(_State(self._size, place, inflater))
            if data:
                self._size += len(data)
                yield np.frombuffer(data, np.uint8)

    def read(self, start: int, stop: int) -> memoryview:
        starts = [state.start for state in self._states]
        first = int(np.searchsorted(starts, start, side="right")) - 1
        last = int(np.searchsorted(starts, stop, side="left"))
        parts = [
            memoryview(self._kept.get((self, number)))[max(0, start - starts[number]) : stop - starts[number]]
            for number in range(first, last)
        ]
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def segment(self, number: int) -> bytes:
        """Return the bytes from one kept state to the next."""
        start, place, inflater = self._states[number]
        ends = [state.start for state in self._states[1:]] + [self._size]
        data = bytearray()
        for _, _, more in self._inflate(place, inflater.copy()):
            data += more
            if len(data) >= ends[number] - start:
                break
        return bytes(data[: ends[number] - start])

    def _inflate(self, place: int, inflater: _Decompress) -> Iterator[tuple[int, _Decompress, bytes]]:
        """Decompress from a state on: yield (place, state at it, bytes decompressed from there)."""
        between_members, path = False, self._file.path
        while place < self._file.num_bytes:
            for data in self._file.blocks(place, _INFLATE_BYTES):
                before = inflater.copy()
                try:
                    out = inflater.decompress(data)
                except zlib.error as error:
                    raise DataError(
                        f"{path}: not a sound gzip file ({error}, after byte {place:,}); fetch it again"
                    ) from None
                yield place, before, out
                place += len(data)
                between_members = inflater.eof
                if between_members:  # the next member begins in these data
                    place -= len(inflater.unused_data)
                    inflater = _new_inflater()
                    break
        if not between_members:
            raise DataError(f"{path}: the gzip file is truncated after byte {place:,}; fetch it again")


class TextFiles:
    """Chunks of lines of several files.

    Args:
        files: plain ones, or gzip.
        chunk_rows: lines per chunk; a file's last chunk may have fewer.
        num_workers: threads that scan files at the same time.
        has_header: the first line of every file, or of those for which it is true, is a header, which no chunk has.
        paths: of the files, for messages, where `files` are copies.
        may_lack_rows: some of the files may have no line.

    Attributes:
        file: int64 [C], each chunk's file.
        rows: int64 [C], its lines that are not blank.
        first_line: int64 [C], the number of its first line in the file, from 0; a header counts.
        headers: each file's header, its newline included; b"" where there is none.

    Raises:
        DataError: a file, or every file, has no line (but a header); or one is damaged.
    """

    def __init__(
        self,
        files: list[InputFile],
        chunk_rows: int,
        num_workers: int,
        *,
        has_header: bool | Sequence[bool] = False,
        paths: Sequence[Path] = (),
        may_lack_rows: bool = False,
    ) -> None:
        kept: RecentlyUsed[tuple[GzipFile, int], bytes]
        kept = RecentlyUsed(lambda place: place[0].segment(place[1]), _KEPT_SEGMENTS)
        self._paths = list(paths) or [file.path for file in files]
        self._files = [GzipFile(file, kept) if file.is_gzip() else PlainFile(file) for file in files]
        found = [bytearray() for _ in files]
        headers = [has_header] * len(files) if isinstance(has_header, bool) else list(has_header)

        def scan(number: int) -> tuple[Ids, Ids, Ids]:
            blocks = self._files[number].blocks()
            blocks = _cut_header(blocks, found[number]) if headers[number] else blocks
            borders, rows, lines = scan_lines(blocks, chunk_rows)
            return borders + len(found[number]), rows, lines

        with ThreadPoolExecutor(max(1, num_workers), "embershard-scan") as pool:
            scanned = list(pool.map(scan, range(len(files))))
        lacking = [path for path, (_, rows, _) in zip(self._paths, scanned, strict=True) if not len(rows)]
        if lacking and not (may_lack_rows and len(lacking) < len(files)):
            header = next(bytes(found[n]) for n, (_, rows, _) in enumerate(scanned) if not len(rows))
            if b"\r" in header.rstrip(b"\r\n"):
                raise DataError(f"{lacking[0]}:1 {CARRIAGE_RETURN}")
            what = "no line behind its header" if any(headers) else "no line in it"
            raise NoRowsError(f"{lacking[0]}: {what}; remove it, or fetch it again")
        self.headers = [bytes(header) for header in found]
        self._borders = np.concatenate([np.stack([b[:-1], b[1:]], axis=1) for b, _, _ in scanned])
        self.rows, self._lines = (np.concatenate([counts[which] for counts in scanned]) for which in (1, 2))
        self.file = np.repeat(np.arange(len(files)), [len(rows) for _, rows, _ in scanned])
        self.first_line = np.concatenate(
            [np.cumsum(scanned[n][2]) - scanned[n][2] + has for n, has in enumerate(headers)]
        )

    def read(self, chunk: int) -> tuple[memoryview, Ids]:
        """Return the lines of a chunk that are not blank, with their ends; and their numbers in the file, from 0."""
        start, stop = self._borders[chunk].tolist()
        lines = self._files[self.file[chunk]].read(start, stop)
        is_marked = start == 0 and stop > len(BYTE_ORDER_MARK) and lines[: len(BYTE_ORDER_MARK)] == BYTE_ORDER_MARK
        lines = lines[len(BYTE_ORDER_MARK) :] if is_marked else lines
        numbers = np.arange(self.rows[chunk])
        if self._lines[chunk] != self.rows[chunk]:
            lines, numbers = without_blank_lines(lines)
        return lines, numbers + self.first_line[chunk]

    def path(self, chunk: int) -> Path:
        return self._paths[self.file[chunk]]


def _cut_header(blocks: Iterable[NDArray[np.uint8]], header: bytearray) -> Iterator[NDArray[np.uint8]]:
    """Put the first line into `header`, and yield what is behind it."""
    for block in blocks:
        if not header.endswith(b"\n"):
            ends = np.flatnonzero(block == NEWLINE)
            end = int(ends[0]) + 1 if len(ends) else len(block)
            header += block[:end].tobytes()
            block = block[end:]
        if len(block):
            yield block


def _new_inflater() -> _Decompress:
    return zlib.decompressobj(wbits=31)


@dataclass(frozen=True)
class LineFormat:
    """How a line is made up.

    Attributes:
        separator: between cells, and its word in messages.
        columns: names, in order.
        numbers: columns that are numbers, the label among them; the others are bytes.
        contents: the columns in words, for messages.
        has_header: the first line of every file names the columns.
    """

    separator: tuple[str, str]
    columns: tuple[str, ...]
    numbers: tuple[str, ...]
    contents: str
    has_header: bool = False

    def read(self, lines: memoryview) -> pa.Table:
        """Return the columns of whole lines, each in one chunk: numbers as float32, the others as bytes.

        Raises:
            pa.ArrowException: a line has not as many cells as there are columns, or a number is none.
        """
        types = dict.fromkeys(self.columns, pa.binary()) | dict.fromkeys(self.numbers, pa.float32())
        is_marked = lines[: len(BYTE_ORDER_MARK)] == BYTE_ORDER_MARK
        data = BYTE_ORDER_MARK + bytes(lines) if is_marked else lines  # Arrow drops the first one
        table = csv.read_csv(
            pa.py_buffer(data),
            csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=self.columns),
            csv.ParseOptions(
                delimiter=self.separator[0], quote_char=False, double_quote=False, ignore_empty_lines=False
            ),
            csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=False),
        )
        return table.combine_chunks()

    def check_header(self, path: Path, line: bytes) -> None:
        """Raise `DataError` if a file's first line does not name the columns."""
        found, needed = line.decode("utf-8", "backslashreplace").rstrip("\r\n"), self.separator[0].join(self.columns)
        if found != needed:
            raise DataError(f"{path}:1 the header is {short(found)}; needed {needed}")


class LineSource(FileSource):
    """Base of sources whose samples are lines, with one id for every sparse feature."""

    def __init__(self, config: DataConfig, schema: Schema, form: LineFormat, share: Share) -> None:
        (files, ends), self._left_out = list_files(config), left_out_of(config)
        self._form, (self._label,) = form, schema.target.labels
        self._text = TextFiles(files, config.chunk_rows, config.num_workers, has_header=form.has_header)
        for file, header in zip(files, self._text.headers, strict=True):
            if form.has_header:
                form.check_header(file.path, header)
        held_out = hold_out(config, int(self._text.rows.sum()), share)
        split = SplitChunks(self._text.file, self._text.rows, ends, held_out)
        num_kept = 4 + 2 * config.num_workers
        super().__init__(schema, split, num_kept, tolerates_bad_rows=config.bad_rows != "stop")

    @property
    def notes(self) -> tuple[str, ...]:
        return (*super().notes, *self._left_out)

    @abstractmethod
    def parse_cells(self, table: pa.Table) -> tuple[NDArray[np.float32], Sequence[Ids]]:
        """Return dense values [n, D] and the rows [n] of each sparse feature.

        Raises:
            ValueError: a cell is not what its column needs.
        """

    @abstractmethod
    def cell_problem(self, name: str, cell: str) -> str | None:
        """Say what a cell of a line that cannot be parsed would have to be; None if it is right."""

    def parse(self, number: int, most_bad: int | None = None) -> ParsedChunk:
        """Return samples and bad lines of a chunk.

        A line is bad exactly if it cannot be parsed, whatever lines are beside it.
        """
        data, numbers = self._text.read(number)
        found, failed = parse_lines(data, self._parse_lines, most_bad, self._doubtful)
        bad: dict[int, BadRow] = {}
        for line, (text, error) in sorted(failed.items()):
            column, problem = self._explain(text, error)
            bad[line] = BadRow(self._text.path(number), int(numbers[line]) + 1, column, problem)
        lines, blocks = zip(*(found or [(np.arange(0), self._no_samples())]), strict=True)
        samples, order = Block.join(blocks), np.argsort(np.concatenate(lines))
        return ParsedChunk(samples if len(blocks) == 1 else samples.take(order), bad)

    def _parse_lines(self, lines: memoryview, num_rows: int) -> Block:
        """Return the samples of some whole lines; raise if one of them is none."""
        table = self._form.read(lines)
        labels = table.column(self._label).to_numpy()
        if table.num_rows != num_rows or not np.isin(labels, (0, 1)).all():
            raise ValueError(f"{table.num_rows} rows; a label must be 0 or 1")
        dense, rows = self.parse_cells(table)
        return Block(dense, labels, tuple(rows), (1,) * len(rows))

    def _doubtful(self, text: NDArray[np.uint8], borders: Ids) -> Flags:
        """Return which lines [L] have too few or many cells, a byte that few cells have, or a label that is none."""
        names, separator = self._form.columns, ord(self._form.separator[0])
        separators = np.flatnonzero(text == separator)
        before = np.searchsorted(separators, borders)
        found: Flags = np.diff(before) != len(names) - 1
        found[np.searchsorted(borders, np.flatnonzero(~_USUAL[text]), "right") - 1] = True
        place = names.index(self._label)
        ends = separators[before[:-1][~found] + place]
        found[~found] = (text[ends - 1] & 0xFE) != ord("0")
        return found

    def _no_samples(self) -> Block:
        num_sparse = len(self.schema.sparse)
        dense = np.empty((0, self.schema.num_dense), np.float32)
        return Block(dense, np.empty(0, np.float32), (np.empty(0, np.int64),) * num_sparse, (1,) * num_sparse)

    def _explain(self, line: bytes, error: Exception) -> tuple[str, str]:
        """Return the column that is wrong in a line that could not be parsed ("": the whole line), and the problem."""
        form, text = self._form, line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "backslashreplace")
        separator, word = form.separator
        cells = text.split(separator)
        if len(cells) != len(form.columns):
            return "", f"has {len(cells)} {word}-separated columns; needed {len(form.columns)}: {form.contents}"
        for name, cell in zip(form.columns, cells, strict=True):
            problem = _label_problem(cell) if name == self._label else self.cell_problem(name, cell)
            if problem is not None:
                return name, f"{name}={short(cell)}: {problem}"
        return "", f"cannot be parsed: {' '.join(str(error).split())}"


def parse_lines(
    data: memoryview,
    parse: Callable[[memoryview, int], T],
    most_bad: int | None = None,
    doubtful: Callable[[NDArray[np.uint8], Ids], Flags] | None = None,
) -> tuple[list[tuple[Ids, T]], dict[int, tuple[bytes, Exception]]]:
    """Parse lines by a function of some whole lines and their number, which raises if one of them is bad.

    Halves of the lines are parsed, and halves of those, until bad lines stand alone.

    >>> parse_lines(memoryview(b"1\\n2\\nx\\n4\\n"), lambda lines, count: sum(map(int, bytes(lines).split())))[0]
    [(array([0, 1]), 3), (array([3]), 4)]

    Args:
        most_bad: stop once the first so many bad lines are found; None: parse all.
        doubtful: says which lines [L] are likely bad, from their bytes and borders [L + 1]. Only the speed depends on
            it: the others are parsed at once.

    Returns:
        The numbers of lines with what `parse` returned for them; and each bad line by its number, with its exception.
    """
    text = np.frombuffer(data, np.uint8)
    borders = line_borders(text)
    good: list[tuple[Ids, T]] = []
    bad: dict[int, tuple[bytes, Exception]] = {}
    parts = [np.arange(len(borders) - 1)] if len(borders) > 1 else []
    while parts and (most_bad is None or len(bad) < most_bad):
        part = parts.pop()
        lines = some_lines(data, borders, part)
        try:
            good.append((part, parse(lines, len(part))))
        except (pa.ArrowException, ValueError, OverflowError) as error:
            if len(part) == 1:
                bad[int(part[0])] = bytes(lines), error
            elif doubtful is not None and most_bad is None:
                likely, doubtful = np.flatnonzero(doubtful(text, borders)), None
                parts = [np.delete(part, likely), *np.array_split(likely, _FEW_PARTS)]
                parts = [each for each in parts if len(each)]
            else:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]  # the first half is next
    return good, bad


def some_lines(data: memoryview, borders: Ids, lines: Ids) -> memoryview:
    """Return the bytes of the lines number `lines`, rising, of those that are cut at `borders`."""
    if not len(lines):
        return data[:0]
    breaks = np.flatnonzero(np.diff(lines) > 1)
    starts, stops = borders[lines[np.append(0, breaks + 1)]], borders[lines[np.append(breaks, -1)] + 1]
    parts = [data[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def joined_cells(table: pa.Table, names: Sequence[str]) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return the bytes of all cells of some columns of bytes, column after column, and each cell's length [F * n]."""
    texts, lengths = zip(*(cell_bytes(table.column(name).chunk(0)) for name in names), strict=True)
    return np.concatenate(texts), np.concatenate(lengths)


def _label_problem(cell: str) -> str | None:
    try:
        is_label = float(cell) in (0, 1)
    except ValueError:
        is_label = False
    return None if is_label else "a label must be 0 or 1"
