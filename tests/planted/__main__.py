"""Plants the faults one by one, and says which test noticed each; exit code 1 where one was not noticed."""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.planted.fault import PROJECT, Fault, known, preload, run_tests


@contextlib.contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    """The last commit, in a folder that goes."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "-C", str(PROJECT), "worktree", "add", "-q", "--detach", str(tree)], check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", str(PROJECT), "worktree", "remove", "--force", str(tree)], check=True)


def outcome(fault: Fault, tree: Path) -> str:
    """Return "caught", "missed", or "gone" where its line is not there any more."""
    with fault.planted(tree) as fits:
        if not fits:
            return "gone"
        code, _ = run_tests(tree, [fault.test])
    return "missed" if code == 0 else "caught"


def main(argv: Sequence[str]) -> int:
    """Plant faults; return the exit code."""
    parser = argparse.ArgumentParser("python -m tests.planted", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="of files whose path has this")
    faults = [fault for fault in known() if parser.parse_args(argv).only in fault.file]
    preload()
    found = Counter[str]()
    with copy_of_the_tree() as tree:
        for fault in faults:
            ended = outcome(fault, tree)
            found[ended] += 1
            print(f"{ended:<7} {fault}\n        {fault.test}", flush=True)
    print(", ".join(f"{count} {ended}" for ended, count in sorted(found.items())))
    return 1 if found["missed"] or found["gone"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
