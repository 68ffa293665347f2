"""How a text file is written: encoding, separator, quotes, escapes, lines before the header, header. By looking at its
start, middle and end; what cannot be told is asked for, not guessed.
"""

from __future__ import annotations

import codecs
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from embershard.data.block import short
from embershard.data.config import TableConfig
from embershard.data.sources.input_file import InputFile
from embershard.data.sources.table.containers import container_of, raw_blocks, refuse_features
from embershard.data.sources.table.plain_text import ends_in_returns, fold
from embershard.data.sources.table.raw import named_once, typed_name
from embershard.data.text_form import TextForm
from embershard.errors import DataError

SEPARATORS = (", ", ",", "\t", ";", "|", "::", "^", "\x01", " ")
#: The column of the names of rows, which a header does not name.
ROW_NAME = "row_name"
_PIECE_BYTES = 1 << 18
_MOST_LINES = 500  # of a piece
_LEAST_SHARE = 0.9  # of the lines, that have as many cells as most of them
_MOST_NOT_UTF8 = 0.01  # of the lines: they have bad cells, and the file is UTF-8
_MORE_ZEROS = 8  # at even, or at odd places in UTF-16
_MOST_ZEROS = 0.001  # of the bytes
_MOST_SKIPPED = 20
_WORDS = {
    ", ": "comma and a blank",
    ",": "comma",
    "\t": "tab",
    "|": "bar",
    ";": "semicolon",
    " ": "blank",
    "\x01": "Ctrl-A",
}
_NUMBER = re.compile(r"[-+]?[$€£]?(?:\d[\d.,]*|\.\d+)(?:[eE][-+]?\d+)?%?")
_TIME = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?:[ T].*)?")
#: A first line that tells Excel the separator.
_OF_EXCEL = re.compile(r'"?sep=(\\t|[^"])"?', re.IGNORECASE)
_IN_DOUBLE_QUOTES = (
    "python -c 'import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, quotechar=chr(39)))' "
    "< FILE > NEW"
)
_NO_VALUE = ("", "na", "nan", "null", "none", "n/a", "\\n", "-", "?")


@dataclass(frozen=True)
class Given:
    """What a user says of text files. None: it is to be found.

    Attributes:
        columns: names of the columns of files without a header.
        has_header: line 1, or the first one that is not skipped, is a header.
    """

    columns: tuple[str, ...] | None = None
    separator: str | None = None
    encoding: str | None = None
    quoted: bool | None = None
    escape: str | None = None
    line_breaks: bool | None = None
    skip_lines: int | None = None
    has_header: bool | None = None
    null_values: tuple[str, ...] = ("",)


@dataclass(frozen=True)
class _Cut:
    """One way to cut lines into cells: `count` cells have most of them, a share `score`."""

    form: TextForm
    counts: list[int]
    count: int
    score: float

    @property
    def rank(self) -> tuple[bool, bool, float, int]:
        """What makes it better than another one of about its score."""
        return self.counts[0] == self.count, self.form.separator != " ", round(self.score, 2), self.count


def find_form(file: InputFile, given: Given) -> TableConfig:
    """Return the settings of a text file.

    Raises:
        DataError: the file is no text, or something of it cannot be told; with the option that says it.
    """
    pieces, encoding = _pieces(file), find_encoding(file, given)
    is_given = given.encoding is not None
    texts = [_lines(piece, encoding, file.path, is_first=not n, is_given=is_given) for n, piece in enumerate(pieces)]
    lines = texts[0]
    if not any(lines):
        raise DataError(f"{file.path}: no line in it but empty ones; remove it, or fetch it again")
    of_excel = _OF_EXCEL.fullmatch(lines[0])
    if of_excel:
        texts[0] = lines[1:]
        given = replace(given, separator=given.separator or of_excel[1].replace("\\t", "\t"))
    if given.separator is None and given.columns is None:
        refuse_features(file, lines)
    cut = _best_cut(file.path, texts, given)
    skip = _num_skipped(cut, lines, 0 if of_excel is None else 1) if given.skip_lines is None else given.skip_lines
    form = replace(cut.form, skip_lines=skip, encoding=encoding, null_values=given.null_values)
    columns = given.columns or ()
    if given.columns is not None and given.skip_lines is None:
        names, rows = _header_and_rows(form, lines[skip:])
        form = replace(form, skip_lines=skip + bool(rows and _is_header(names, rows, cut.count)))
    elif given.columns is None and not given.has_header:
        columns = _judge_header(file.path, form, lines[skip:], cut.count)
        form = replace(form, skip_lines=skip + bool(columns))
    return TableConfig(**{**vars(form), "columns": columns})


def _pieces(file: InputFile) -> list[bytes]:
    """Return the start of a file; of one that can be read at any place also bytes of its middle and of its end."""
    if container_of(file):
        return [next(raw_blocks(file, _PIECE_BYTES), b"")]
    size = file.num_bytes
    places = [0] if size <= _PIECE_BYTES else [0, size // 4 * 2, max(0, size - _PIECE_BYTES // 4 * 4) // 4 * 4]
    return [bytes(file.read(place, min(place + _PIECE_BYTES, size))) for place in places]


def find_encoding(file: InputFile, given: Given) -> str:
    """Return the encoding of a text file.

    Raises:
        DataError: it is not UTF-8, nor UTF-16, and none is given.
    """
    if given.encoding is not None:
        return given.encoding
    path, pieces = file.path, _pieces(file)
    head = pieces[0]
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    even, odd = head[::2].count(0), head[1::2].count(0)
    if 10 * (even + odd) > len(head) and max(even, odd) > _MORE_ZEROS * min(even, odd):
        return "utf-16-le" if odd > even else "utf-16-be"  # letters of two bytes, one of them 0
    _refuse_zeros(file, pieces)
    lines = [line for piece in pieces for line in piece.splitlines()[:-1] or [piece]]
    wrong = [line for line in lines if not _is_utf8(line)]
    if len(wrong) > max(_MOST_NOT_UTF8 * len(lines), 0):
        shown = wrong[0].decode("cp1252", "replace")
        raise DataError(
            f"{path}: {len(wrong):,} of {len(lines):,} lines are no UTF-8. Say what they are by --encoding: in cp1252, "
            f"for instance, one is {short(shown)}; other encodings are latin-1, gb18030, shift_jis"
        )
    return "utf-8"


def _refuse_zeros(file: InputFile, pieces: list[bytes]) -> None:
    """Raise `DataError` where a file of letters of one byte has bytes that are 0."""
    path, last = file.path, pieces[-1]
    if num_zeros := len(last) - len(last.rstrip(b"\0")):
        if container_of(file) or num_zeros == len(last):
            raise DataError(f"{path}: has bytes that are 0 where text should be; fetch it, or write it, again")
        end = file.num_bytes - num_zeros
        raise DataError(
            f"{path}: its last bytes are 0, from byte {end:,} on, as a machine leaves them that went down while it "
            f"wrote. Cut them off: head -c {end} {shlex.quote(str(path))} > NEW"
        )
    if sum(piece.count(0) for piece in pieces) > _MOST_ZEROS * sum(map(len, pieces)):
        place = next((at for piece in pieces if (at := piece.find(0)) >= 0), 0)
        raise DataError(
            f"{path}: is no text: it has bytes that are 0, as at byte {place:,}; needed CSV, TSV or the like"
        )


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _lines(piece: bytes, encoding: str, path: Path, *, is_first: bool, is_given: bool) -> list[str]:
    """Return the whole lines of some bytes of a file."""
    name = codecs.lookup(encoding).name
    if name == "utf-16" and not is_first:  # without the mark at the file's start
        name = "utf-16-le"
    text = piece.decode(name, "replace").removeprefix("\ufeff")
    if is_first and is_given and set(text[:1000]) & {"\ufffd", "\0"}:
        raise DataError(f"{path}: is not {encoding}; needed the encoding that it was written in: --encoding")
    if ends_in_returns(text.encode()[: 1 << 16]):
        text = text.replace("\r", "\n")
    lines = text.split("\n")
    lines = lines[:-1] if len(lines) > 1 or len(piece) >= _PIECE_BYTES else lines
    return [line.removesuffix("\r") for line in lines[not is_first :][:_MOST_LINES]]


def _best_cut(path: Path, texts: list[list[str]], given: Given) -> _Cut:
    separators = (
        [each for each in SEPARATORS if _is_usual(each, texts)] if given.separator is None else [given.separator]
    )
    cuts = [
        _best_of(texts, [replace(form, separator=each) for form in _quotings(texts, each, given)])
        for each in separators
    ]
    cuts = [cut for cut in cuts if cut.count > 1]
    if not cuts:
        asked = "no separator" if given.separator is None else f"--separator {given.separator!r}, which is not"
        raise DataError(
            f"{path}: needed a separator that is in most lines, got {asked}: {short(texts[0][0])}. Say which: "
            "--separator, for instance '\\t' or '::'"
        )
    best = max(cuts, key=lambda cut: cut.score)
    best = max((cut for cut in cuts if cut.score >= best.score - 0.005), key=lambda cut: cut.rank)
    if best.score < _LEAST_SHARE and given.separator is None:
        others = [cut for cut in cuts if cut.form.separator != best.form.separator]
        second = max(others, key=lambda cut: cut.score, default=None)
        beside = "" if second is None else f", and {second.score:.0%} have {second.count} by {_word(second)}"
        odd = [n + 1 for n, count in enumerate(best.counts) if count != best.count][:3]
        raise DataError(
            f"{path}: {best.score:.0%} of the lines have {best.count} cells by {_word(best)}{beside}; the others are, "
            f"for instance, lines {', '.join(map(str, odd))}. Say what is between cells: --separator"
        )
    return best


def _is_usual(separator: str, texts: list[list[str]]) -> bool:
    """Return whether half of the lines have it, as those have that it cuts into cells; these take time to cut."""
    lines = [line for each in texts for line in each if line]
    return 2 * sum(separator in line for line in lines) >= len(lines)


def _quotings(texts: list[list[str]], separator: str, given: Given) -> list[TextForm]:
    """Return the ways that quotes may be meant in, the usual ones first."""
    if not any('"' in line for lines in texts for line in lines):
        is_quoted = given.quoted is not False
        has_breaks = is_quoted and bool(given.line_breaks)
        return [TextForm(quoted=is_quoted, escape=given.escape or "", line_breaks=has_breaks)]
    forms = [] if given.quoted is False else [TextForm(escape=given.escape or "")]
    if forms and given.escape is None:  # a quote within a cell in quotes, that two quotes do not stand for
        odd = re.compile(rf'(?:^|{re.escape(separator)})"(?:[^"\\]|"")*\\"(?!"|$|{re.escape(separator)})')
        forms = [TextForm(escape="\\")] if any(odd.search(line) for lines in texts for line in lines) else forms
    with_breaks = [replace(form, line_breaks=True) for form in forms]
    if given.line_breaks:
        return with_breaks
    forms += with_breaks
    return forms if given.quoted else [*forms, TextForm(quoted=False)]


def _best_of(texts: list[list[str]], forms: list[TextForm]) -> _Cut:
    """Return the best way; quotes are text only where most of the lines that have some are no rows otherwise."""
    lines = [line for each in texts for line in each]
    share = sum('"' in line for line in lines) / max(1, len(lines))
    folded = [[_folded(each, form) for each in texts] if form.line_breaks else texts for form in forms]
    cuts = [
        _cut(each, form)
        for n, (each, form) in enumerate(zip(folded, forms, strict=True))
        if not n or not form.line_breaks or each != texts
    ]
    return max(cuts, key=lambda cut: cut.score + (share / 2 if cut.form.quoted else 0))


def _folded(lines: list[str], form: TextForm) -> list[str]:
    return fold("\n".join(lines).encode(), form).decode().split("\n")


def _word(cut: _Cut) -> str:
    return _WORDS.get(cut.form.separator, repr(cut.form.separator))


def _cut(texts: list[list[str]], form: TextForm) -> _Cut:
    counts: list[int] = []
    for lines in texts:
        counts += [len(cells_of(line, form)) for line in lines if line.strip()]
    mode, number = Counter(counts).most_common(1)[0] if counts else (0, 0)
    return _Cut(form, counts, mode, number / len(counts) if mode else 0.0)


def cells_of(line: str, form: TextForm) -> list[str]:
    """Return the cells of a line, whose quotes and escapes are those of the form; none where a quote stays open.

    >>> cells_of('1::"a::b"::"say ""x"" "', TextForm(separator="::"))
    ['1', 'a::b', 'say "x" ']
    """
    if not form.quoted or '"' not in line:
        return line.split(form.separator)
    found, place, (pattern, escaped) = list[str](), 0, _patterns(form.separator, form.escape)
    while (match := pattern.match(line, place)) is not None:
        quoted = match[1]
        if quoted is None and line[place : place + 1] == '"' and line.count('"', place) % 2:
            return []
        if quoted is not None:
            quoted = quoted.replace('""', '"')
            quoted = escaped.sub(r"\1", quoted) if form.escape else quoted
        found.append(match[2] if quoted is None else quoted)
        place = match.end() + len(form.separator)
        if match.end() >= len(line):
            break
    return found


@cache
def _patterns(separator: str, escape: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return what matches a cell, in quotes or not; and what matches an escaped character."""
    end, escape = rf"(?={re.escape(separator)}|$)", re.escape(escape) if escape else r"(?!)"
    cell = rf'"((?:{escape}.|""|(?!{escape})[^"])*)"{end}|(.*?){end}'
    return re.compile(cell), re.compile(rf"{escape}(.)")


def _num_skipped(cut: _Cut, lines: list[str], start: int) -> int:
    """Return how many lines are before the table: `start`, comments, titles of one cell, empty lines."""
    first = next((n for n, line in enumerate(lines) if n >= start and len(cells_of(line, cut.form)) == cut.count), 0)
    if first > _MOST_SKIPPED or cut.form.line_breaks:
        return start
    titles = lines[start:first]
    are_titles = all(line[:1] in ("#", "%", "/", "") or len(cells_of(line, cut.form)) == 1 for line in titles)
    return first if are_titles else start


def _header_and_rows(form: TextForm, lines: list[str]) -> tuple[list[str], list[list[str]]]:
    """Return the cells of the first line, and those of the others that are not blank."""
    lines = _folded(lines, form) if form.line_breaks else lines
    cells = [cells_of(line, form) for line in lines[:1] + [line for line in lines[1:] if line.strip()]]
    return cells[0], cells[1:]


def _judge_header(path: Path, form: TextForm, lines: list[str], count: int) -> tuple[str, ...]:
    """Return names of all columns where the first line names them but for one; or nothing, where it is a header.

    Raises:
        DataError: whether the first line is a header cannot be told, or it is none; or which column it does not name.
    """
    names, rows = _header_and_rows(form, lines)
    line, where = short(lines[0]), f"{path}:{form.skip_lines + 1}"
    if _is_header(names, rows, count):
        if len(names) == count:
            return ()
        if len(names) > count:
            return tuple(named_once(names[:-1]))
        firsts, lasts = ([cells[place] for cells in rows if len(cells) == count] for place in (0, -1))
        if not any(lasts):
            return tuple(named_once([*names, ""]))  # a separator at each row's end
        if not any(len(cells) == len(names) for cells in rows) and _name_rows(firsts):
            return tuple(named_once([ROW_NAME, *names]))
        row = next(cells for cells in rows if len(cells) == count)
        said = one_name_less(where, names, f"rows have {count} cells, {short(','.join(row))}")
        if any(cell.strip()[:1] == "'" for cell in row):
            said += f". Or, where cells are in single quotes: {_IN_DOUBLE_QUOTES}"
        raise DataError(said)
    words = [name for name in names if name.strip()]
    numbers = sum(map(is_value, words))
    if (numbers and len(set(words)) == len(words)) or len(set(words)) < len(words):
        has = "has values" if numbers else f"has {next(w for w in words if words.count(w) > 1)!r} twice"
        raise DataError(f"{where} {has}, as no header: {line}. Name the columns: --columns NAME,...; or --header")
    raise DataError(f"{where} may be a header, or the first row: {line}. Say which: --header, or --columns NAME,...")


def _is_header(names: list[str], rows: list[list[str]], count: int) -> bool:
    """Return whether the cells of a first line name the columns of the rows, most of which have `count` cells."""
    words = [name for name in names if name.strip()]
    if len(names) != count:
        is_near = len(names) == count - 1 or (len(names) == count + 1 and not names[-1].strip())
        return is_near and not any(map(is_value, words))
    if all(map(is_value, words)):
        return False
    if any(typed_name(name)[1] for name in words):
        return True
    columns = zip(*(cells for cells in rows if len(cells) == count), strict=True)
    changes = [_changes(name, column) for name, column in zip(names, columns, strict=False)]
    of_values = [is_change for is_change in changes if is_change is not None]
    is_first = len(set(words)) == len(words)
    return (is_first and not changes) or bool(of_values and 2 * sum(of_values) >= len(of_values))


def _name_rows(cells: list[str]) -> bool:
    """Return whether cells are names of rows, as R and pandas write them: 1, 2, 3 and so on, or from 0 on; or texts, no
    two of them alike."""
    are_texts = not any(is_value(cell) or not cell for cell in cells) and len(set(cells)) == len(cells)
    return are_texts or any(cells == [str(first + row) for row in range(len(cells))] for first in (0, 1))


def one_name_less(where: str, names: Sequence[str], why: str) -> str:
    """Say that a header has a name less than there are columns, and does not tell which one."""
    return (
        f"{where} has {len(names)} names, {short(','.join(names))}, and {why}. Which column has no name? Name all of "
        "them: --columns NAME,..."
    )


def _changes(name: str, cells: Sequence[str]) -> bool | None:
    """Return whether the cells of a column are of a type that its name is not; None: that cannot be told."""
    values = [cell.strip() for cell in cells if cell.strip().lower() not in _NO_VALUE]
    if not values or not name.strip():
        return None
    if name.strip().lower() in _NO_VALUE:
        return False
    if sum(map(is_value, values)) >= _LEAST_SHARE * len(values):
        return not is_value(name)
    if all(re.search(r"\d", value) for value in values) and not re.search(r"\d", name):  # u1, u2, ... below "user"
        return True
    return None


def is_value(cell: str) -> bool:
    """Return whether a cell is a number or a time, as no name is."""
    cell = cell.strip()
    return bool(_NUMBER.fullmatch(cell) or _TIME.fullmatch(cell)) or cell.lower() in ("true", "false")


def describe(form: TextForm) -> str:
    """Return what is special of a form, in words; "" for commas and a header.

    >>> describe(TextForm(separator=";", encoding="utf-16"))
    'between cells is a semicolon, encoding utf-16'
    """
    said = []
    if form.separator != ",":
        said.append(f"between cells is a {_WORDS.get(form.separator, repr(form.separator))}")
    if not form.quoted:
        said.append("quotes are text")
    if form.escape:
        said.append(f"{form.escape} makes quotes text")
    if form.line_breaks:
        said.append("cells have line breaks")
    if form.skip_lines:
        said.append(f"without {form.skip_lines} line{'s' * (form.skip_lines > 1)} before the header")
    if not form.is_utf8:
        said.append(f"encoding {form.encoding}")
    return ", ".join(said)
