"""`TextForm`: how the lines of text files are cut into cells."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Any

from embershard.settings.resume_rules import OfTraining

#: Between cells, in place of a separator of several characters: the separator of units, which no text has.
UNIT_SEPARATOR = "\x1f"
_MOST_SEPARATOR_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class TextForm:
    """Settings of text files; `embershard data inspect` finds and writes them.

    >>> TextForm(separator="::").plain
    {'separator': '\\x1f', 'escape': '', 'encoding': 'utf-8', 'skip_lines': 0}
    """

    separator: OfTraining[str] = ","
    """Between the cells of a line of a text file: a character, or several, as "::"."""
    columns: OfTraining[tuple[str, ...]] = ()
    """Names of the columns of text files without a header, in order; a first line that is these names is left out.
    Default: the first line names them."""
    quoted: OfTraining[bool] = True
    """Cells of text files may be in double quotes, which may hold the separator. False: a quote is text."""
    escape: OfTraining[str] = ""
    """Of text files: what makes a quote behind it text, as a backslash. Default: two quotes stand for one."""
    line_breaks: OfTraining[bool] = False
    """Quoted cells of text files may have line breaks in them."""
    skip_lines: OfTraining[int] = 0
    """Lines of text files before the header, or before the first row."""
    encoding: OfTraining[str] = "utf-8"
    """Of text files, as Python names it: "utf-16", "latin-1", "cp1252", "gb18030"."""
    null_values: OfTraining[tuple[str, ...]] = ("",)
    """Cells of text files that are missing values."""

    @property
    def is_utf8(self) -> bool:
        return codecs.lookup(self.encoding).name in ("utf-8", "ascii", "utf-8-sig")

    @property
    def is_plain(self) -> bool:
        """True if the lines of a file of this form are cut as they are."""
        one = len(self.separator.encode()) == 1
        return one and self.is_utf8 and not (self.escape or self.skip_lines or self.line_breaks)

    @property
    def plain(self) -> dict[str, Any]:
        """What differs in the settings of files that `plain_text.plain_blocks` makes of those of this form."""
        separator = self.separator if len(self.separator.encode()) == 1 else UNIT_SEPARATOR
        return {"separator": separator, "escape": "", "encoding": "utf-8", "skip_lines": 0}

    def text_needs(self) -> dict[str, tuple[bool, str]]:
        """Return what each setting has to be, as `check_fields` takes it."""
        size, marks = len(self.separator.encode()), set('"\r\n')
        return {
            "separator": (
                1 <= size <= _MOST_SEPARATOR_BYTES and not marks & set(self.separator),
                'a character, for instance "\\t", or a few, as "::"; no quote and no line break',
            ),
            "columns": (len(set(self.columns)) == len(self.columns), "every name once"),
            "escape": (
                self.escape == "" or (self.quoted and len(self.escape.encode()) == 1 and self.escape not in '"\r\n'),
                'one character, for instance "\\\\", where quoted is true; or nothing',
            ),
            "line_breaks": (self.quoted or not self.line_breaks, "false where quoted is false"),
            "skip_lines": (self.skip_lines >= 0, "0 or more"),
            "encoding": (is_encoding(self.encoding), 'the name of an encoding, for instance "latin-1" or "utf-16"'),
        }


def is_encoding(name: str) -> bool:
    """Return whether Python knows an encoding of this name."""
    try:
        "a".encode(name)
    except (LookupError, UnicodeError):
        return False
    return True
