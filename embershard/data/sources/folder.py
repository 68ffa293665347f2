"""What of a folder is data: the files whose names fit a pattern; and what else is there, with the reason why it is not
read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from embershard.data.time_config import WITH_NAMES

#: Endings of the names of files that are being written.
UNFINISHED = (".tmp", ".partial")
#: Names of files that lie beside data, and are none, unless a pattern is "*", or begins with a letter.
_NO_DATA = re.compile(
    r"(readme|licen[cs]e|copying|notice|change(s|log)|citation)\b.*|thumbs\.db|desktop\.ini|"
    r".*\.(md|html?|pdf|toml|ya?ml|py|ipynb|png|jpe?g|crc|md5|sha\d+|bad_rows\.jsonl)",
    re.IGNORECASE,
)
_EMPTY, _IN_WORK = "0 bytes", "it is being written, by its name"
_MOST_NAMED, _MOST_BELOW = 5, 1000


def fits(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a file's name is that of data: it fits a shell pattern, in letters of any case.

    >>> fits("B.CSV", ("*.csv",)), fits("README.csv", ("*.csv",))
    (True, False)
    """
    fitting = [pattern for pattern in patterns if fnmatchcase(name.lower(), pattern.lower())]
    is_meant = any(each[:1] != "*" or each == "*" for each in fitting)
    return bool(fitting) and (is_meant or not _NO_DATA.fullmatch(name))


def one_format(*paths: Path) -> str:
    """Say how to read those of a folder's files that are as the first of two."""
    pattern = f"*{paths[0].suffix}" if paths[0].suffix not in ("", paths[1].suffix) else paths[0].name
    return (
        f"needed one format. Give the files of one: data.table.files = ['{pattern}'] (inspect, convert and train: "
        f"--files '{pattern}')"
    )


@dataclass
class Listing:
    """The files of a folder.

    Attributes:
        folder: where they are.
        patterns: of the names of data.
        setting: that has the patterns.
        files: those that are data, sorted.
        left_out: others, by their paths in the folder: why they are not read. What is known to be no data, and names
            that begin with a point, as those of other programs do, are not among them.
    """

    folder: Path
    patterns: tuple[str, ...]
    setting: str
    files: list[Path] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(folder: Path, patterns: tuple[str, ...], kind: str) -> Listing:
        """Look into a folder; of kinds with named columns, also into those in it that are called NAME=VALUE."""
        found = Listing(folder, patterns, f"data.{kind}.files")
        for path in found._below(folder, is_parted=kind in WITH_NAMES):
            if reason := found._reason(path):
                found.left_out[str(path.relative_to(folder))] = reason
            elif fits(path.name, patterns):
                found.files.append(path)
        found.files.sort()
        if any(path.stat().st_size for path in found.files):
            for path in [path for path in found.files if not path.stat().st_size]:
                found.left_out[str(path.relative_to(folder))] = _EMPTY
                found.files.remove(path)
        return found

    def _below(self, folder: Path, *, is_parted: bool) -> Iterator[Path]:
        for path in sorted(folder.iterdir()):
            if not path.is_dir():
                yield path
            elif is_parted and "=" in path.name[1:] and not path.name.startswith((".", "_")):
                yield from self._below(path, is_parted=True)
            elif not path.name.startswith((".", "_")):
                there = islice((each for each in path.rglob("*") if fits(each.name, self.patterns)), _MOST_BELOW)
                why = "folders in it belong to the data if they are called NAME=VALUE; give this one by itself"
                self.left_out.update((str(each.relative_to(self.folder)), why) for each in sorted(there))

    def _reason(self, path: Path) -> str:
        """Return why what may be data is not read; "" where it is read, or is no data."""
        name, is_hidden = path.name, path.name.startswith((".", "_"))
        if is_hidden:
            is_data = name[:1] == "_" and path.is_file() and fits(name[1:], self.patterns)
            return "names with _ or . in front are of programs" if is_data else ""
        if not path.exists():
            return "a link to nothing"
        if name.endswith(UNFINISHED):
            return _IN_WORK
        if not path.is_file():
            return "a pipe, a socket or a device"
        if fits(name, self.patterns):
            return ""
        if not _NO_DATA.fullmatch(name):
            return f"no pattern of {self.setting} fits"
        return "no data, by its name" if any(fnmatchcase(name.lower(), each) for each in self.patterns) else ""

    def sentences(self, *, grows: bool = False) -> tuple[str, ...]:
        """Return sentences for the user, a reason each, with the names of what is not read; if the folder `grows`,
        without what is yet to come."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            if not (grows and reason in (_EMPTY, _IN_WORK)):
                by_reason.setdefault(reason, []).append(name)
        return tuple(f"{self.folder}: not read: {_some(names)} ({why})." for why, names in by_reason.items())

    @property
    def problem(self) -> str:
        """What is wrong where no file is data, and what helps."""
        usual = ", ".join(self.patterns[:_MOST_NAMED]) + (", ..." if len(self.patterns) > _MOST_NAMED else "")
        there = sorted(each for each in self.folder.iterdir() if not each.name.startswith((".", "_")))
        files = [each.name for each in there if each.is_file()]
        option = " (inspect, convert and train: --files 'PATTERN')" if self.setting == "data.table.files" else ""
        folders = [each.name for each in there if each.is_dir() and "=" not in each.name]
        more = f". Of its folders only those called NAME=VALUE are read, and not {folders[0]}" if folders else ""
        return (
            f"{self.folder}: none of its {len(files)} files matches {usual} (there are: {_some(files) or 'none'}); "
            f"set {self.setting} to the names of your files{option}{more}"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
