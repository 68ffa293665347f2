"""`Journal`: the files of a folder that is followed, in the order in which they train, noted before they do."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from embershard.errors import DataError, naming_file
from embershard.settings.decoding import decode
from embershard.whole_file import sync_folder, whole_file


@dataclass(frozen=True)
class JournalFile:
    """A file as it was when it was taken: a line of the journal.

    Attributes:
        name: in the folder.
        num_bytes: its size.
        modified_ns: its time of modification.
        sha256: of blocks of it, as `FileIdentity` has it.
        rows: its samples.
        windows: of time that it has rows of.
        first_window, last_window: the numbers of the first and the last of them; of a file without rows, of the last
            one before it. A late row counts in the newest window so far.
        bad: its rows that are no samples, where such are replaced.
    """

    name: str
    num_bytes: int
    modified_ns: int
    sha256: str
    rows: int
    windows: int
    first_window: int
    last_window: int
    bad: int = 0

    def digest_behind(self, digest: str) -> str:
        """Return a checksum of this file behind others, of which `digest` is that."""
        text = json.dumps([digest, self.name, self.num_bytes, self.sha256, self.rows])
        return hashlib.sha256(text.encode()).hexdigest()


class Journal:
    """A file with a line per followed file. One process appends to it, and cuts it where nothing has trained.

    A line that a crash cut short is dropped: nothing of its file has trained.

    Attributes:
        files: so far.

    Raises:
        DataError: a line is damaged.

    >>> journal = Journal(Path("files.jsonl"))
    >>> journal.append(JournalFile("part_0.csv", 120, 0, "5f", rows=9, windows=1, first_window=7, last_window=7))
    >>> [file.name for file in Journal(Path("files.jsonl")).files]
    ['part_0.csv']
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.files: list[JournalFile] = []
        with naming_file(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            whole, _, rest = (path.read_bytes() if path.exists() else b"").rpartition(b"\n")
            if rest:
                os.truncate(path, path.stat().st_size - len(rest))
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                self.files.append(decode(JournalFile, json.loads(line), DataError))
            except ValueError as error:
                raise DataError(
                    f"{path}:{number}: got {str(error)[:200]}, needed a file that was followed. Restore the journal, "
                    "or start a new run with another --run-dir"
                ) from error

    def append(self, file: JournalFile) -> None:
        """Note a file. When this returns, the note is on the disk."""
        is_new = not self._path.exists()
        with naming_file(self._path):
            with self._path.open("ab") as journal:
                journal.write(_line(file))
                journal.flush()
                os.fsync(journal.fileno())
            if is_new:
                sync_folder(self._path.parent)
        self.files.append(file)

    def cut(self, num_files: int) -> None:
        """Forget all files but the first ones: nothing of the others has trained."""
        self.files = self.files[:num_files]
        with whole_file(self._path) as partial:
            partial.write_bytes(b"".join(map(_line, self.files)))
        sync_folder(self._path.parent)


def _line(file: JournalFile) -> bytes:
    return json.dumps(asdict(file)).encode() + b"\n"
