"""The journal of a followed folder: what a crash leaves, and what is damaged."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from embershard.errors import DataError
from embershard.extras.following.followed import Journal, JournalFile

pytestmark = pytest.mark.extra

FILE = JournalFile("part_0.csv", 120, 7, "5f", rows=9, windows=1, first_window=7, last_window=7)
OTHER = replace(FILE, name="part_1.csv")


def test_a_line_that_was_cut_short_is_dropped(tmp_path):
    path = tmp_path / "run" / "files.jsonl"
    journal = Journal(path)
    assert journal.files == []
    journal.append(FILE)
    journal.append(OTHER)
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:cut])
        again = Journal(path)
        assert again.files == [FILE]
        again.append(OTHER)
        assert path.read_bytes() == whole


def test_a_note_is_on_the_disk_when_append_returns(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    path = tmp_path / "files.jsonl"
    Journal(path).append(FILE)
    assert synced[0] == path.stat().st_size
    assert len(synced) == 2, "the new file's name, too"


@pytest.mark.parametrize("line", ["{", "{}", '{"name": 3}', "null"])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "files.jsonl"
    Journal(path).append(FILE)
    path.write_text(f"{path.read_text()}{line}\n")
    with pytest.raises(DataError, match=r"files\.jsonl:2: got .*, needed a file that was followed"):
        Journal(path)


def test_checksums_tell_files_and_their_order_apart():
    digests = {one.digest_behind(other.digest_behind("")) for one in (FILE, OTHER) for other in (FILE, OTHER)}
    changed = (replace(FILE, num_bytes=1), replace(FILE, sha256="5e"), replace(FILE, rows=8))
    assert len(digests | {each.digest_behind("") for each in (FILE, *changed)}) == 4 + 4
    assert replace(FILE, modified_ns=1).digest_behind("") == FILE.digest_behind(""), "a copy has another time"
