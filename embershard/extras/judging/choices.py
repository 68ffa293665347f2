"""What the user says of columns: the options of `embershard data inspect`, which win over every rule."""

from __future__ import annotations

import argparse
import codecs
import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from embershard.data.config_fields import NEEDED_FORMAT, is_time_format
from embershard.data.sources.table.cells import are_digits
from embershard.data.sources.table.raw import typed_name
from embershard.errors import ConfigError

ChosenKind = Literal["category", "number", "drop", "list", "time"]
_KINDS: tuple[ChosenKind, ...] = ("category", "number", "drop", "list", "time")
_WITH_DETAIL = {"list": "the text between the values", "time": "how its times are written"}


@dataclass(frozen=True)
class ColumnChoice:
    """What the user says that a column is.

    Attributes:
        detail: of a list the separator, of a time the format; "" where the file shows it.
    """

    kind: ChosenKind
    detail: str = ""

    @property
    def for_survey(self) -> tuple[str, str]:
        """`wanted` and `form` of `ColumnSurvey`."""
        if self.kind in ("category", "drop") or (self.kind == "time" and self.detail and are_digits(self.detail)):
            return "", ""
        return ("", "") if self.kind == "list" and not self.detail else (self.kind, self.detail)


@dataclass(frozen=True)
class LabelChoice:
    """The column of labels that the user names: a label is 1 where the cell is `text`, or a number of `at_least`."""

    column: str
    text: str | None = None
    at_least: float | None = None


def choices(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, ColumnChoice]:
    """Return the choices by column.

    Args:
        names: of the columns.

    Raises:
        ConfigError: a column is unknown, or named by two options; or a detail is wrong.
    """
    named: dict[str, ColumnChoice] = {}
    by_pattern: dict[str, ColumnChoice] = {}
    for kind in _KINDS:
        for text in getattr(arguments, kind):
            columns, detail = _with_detail(f"--{kind}", text, names) if kind in _WITH_DETAIL else (text, "")
            for word in columns.split(",") if columns not in names else [columns]:
                found = _columns_of(f"--{kind}", word.strip(), names)
                into = named if found == [word.strip()] or len(found) == 1 else by_pattern
                for name in found:
                    if name in into:
                        other = f"--{into[name].kind}"
                        raise ConfigError(f"--{kind} {text}: {name!r} is named by {other}, too; name it once.")
                    into[name] = ColumnChoice(kind, detail)
    return {**by_pattern, **named}


def label_choice(text: str | None, names: Sequence[str]) -> LabelChoice | None:
    """Return what `--label` says: a column, alone or with `=TEXT` or `>=NUMBER` behind it.

    >>> label_choice("rating>=4", ["user", "rating"])
    LabelChoice(column='rating', text=None, at_least=4.0)

    Raises:
        ConfigError: there is no such column, or no number.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(.+?)\s*(>=|=)\s*(.+)", text)
    if text in names or not found:
        (column,) = _columns_of("--label", text, names, most=1)
        return LabelChoice(column)
    (column,) = _columns_of("--label", found[1], names, most=1)
    if found[2] == "=":
        return LabelChoice(column, text=found[3])
    with suppress(ValueError):
        return LabelChoice(column, at_least=float(found[3]))
    raise ConfigError(f"--label {text}: needed a number behind >=, for instance {column}>=4")


def _with_detail(option: str, text: str, names: Sequence[str]) -> tuple[str, str]:
    """Return the columns and the detail of `COLUMNS:DETAIL`; names of columns may have colons, too."""
    places = [at for at, letter in enumerate(text) if letter == ":"]
    for at in [len(text), *places]:
        columns, detail = text[:at], text[at + 1 :]
        if columns in names or all(list(_matches(word.strip(), names)) for word in columns.split(",")):
            break
    else:
        at = places[0] if places else len(text)
        columns, detail = text[:at], text[at + 1 :]
    if "\\" in detail:
        detail = codecs.decode(detail, "unicode_escape")
    if option == "--time" and detail and not is_time_format(detail):
        raise ConfigError(f"{option} {text}: got {detail!r} for {_WITH_DETAIL['time']}; needed {NEEDED_FORMAT}.")
    return columns, detail


def _matches(word: str, names: Sequence[str]) -> Iterator[str]:
    if word in names:
        yield word
        return
    for name in names:
        if typed_name(name)[0] == word or (set(word) & set("*?[") and fnmatchcase(name, word)):
            yield name


def _columns_of(option: str, word: str, names: Sequence[str], most: int | None = None) -> list[str]:
    found = list(_matches(word, names))
    if found and (most is None or len(found) <= most):
        return found
    if found:
        raise ConfigError(f"{option} {word}: got {', '.join(found)}; needed one column.")
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {', '.join(names[:40])}."
    one = "" if most is None or "," not in word else (
        " Give one here; for several, write label = [...] in the TOML file and leave them out of the features."
    )  # fmt: skip
    raise ConfigError(f"{option}: no column {word!r}; {hint}{one}")
