"""Prints the files of the package, each with its subject: the first line of its docstring. Then the lines and files of
each room: what a change costs. With a revision of git as its argument, also how many more they are than there.

    make rooms SINCE=HEAD~1
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "embershard"


def show_files() -> None:
    """Print every folder and its files."""
    for folder in sorted({file.parent for file in PACKAGE.rglob("*.py")}):
        files = sorted(folder.glob("*.py"))
        print(f"\n{folder.relative_to(PROJECT)}/")
        for file in files:
            subject = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
            print(f"  {file.name:24} {' '.join(subject.split())}")


def sizes(files: Iterable[tuple[str, int]]) -> tuple[Counter[str], Counter[str]]:
    """Return the lines and the files of each room, from paths and lines of files of the package.

    >>> sizes([("embershard/errors.py", 90), ("embershard/cache/a.py", 5), ("embershard/cache/gpu/b.py", 6)])
    (Counter({'errors.py': 90, 'cache/': 11}), Counter({'cache/': 2, 'errors.py': 1}))
    """
    lines, counts = Counter[str](), Counter[str]()
    for path, number in files:
        room = Path(path).parts[1] + "/" * (len(Path(path).parts) > 2)
        lines[room] += number
        counts[room] += 1
    return lines, counts


def files_at(revision: str) -> list[tuple[str, int]]:
    """Return the files of the package at a revision of git, with their lines."""
    empty = subprocess.run(
        ["git", "hash-object", "-t", "tree", "/dev/null"], cwd=PROJECT, capture_output=True, text=True
    )
    words = ["git", "diff", "--numstat", "--no-renames", empty.stdout.strip(), revision, "--", "embershard/**.py"]
    told = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True)
    if told.returncode:
        sys.exit(f"{revision}: git knows no such revision. Give SINCE=HEAD~1, a branch or a commit.")
    found = (line.split("\t") for line in told.stdout.splitlines())
    return [(path, int(added)) for added, _, path in found]


def show_rooms(revision: str) -> None:
    """Print the lines and files of each room, and the changes since a revision ("": none is given)."""
    files = [
        (str(file.relative_to(PROJECT)), len(file.read_text(encoding="utf-8").splitlines()))
        for file in PACKAGE.rglob("*.py")
    ]
    lines, counts = sizes(files)
    old_lines, old_counts = sizes(files_at(revision)) if revision else (lines, counts)
    print(f"\n{'room':20}{'lines':>8}{'files':>7}" + (f"   since {revision}" if revision else ""))
    for room in [*sorted(lines | old_lines, key=lambda each: -lines[each]), ""]:
        of_room = [each[room] if room else each.total() for each in (lines, counts, old_lines, old_counts)]
        changes = f"{of_room[0] - of_room[2]:+8,}{of_room[1] - of_room[3]:+5}" if revision else ""
        print(f"{room or 'all':20}{of_room[0]:8,}{of_room[1]:7}{changes}")


if __name__ == "__main__":
    show_files()
    show_rooms(sys.argv[1] if len(sys.argv) > 1 else "")
