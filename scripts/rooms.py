"""Prints the files of the package, each with its subject: the first line of its docstring."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "embershard"


def main() -> None:
    """Print every folder and its files."""
    for folder in sorted({file.parent for file in PACKAGE.rglob("*.py")}):
        files = sorted(folder.glob("*.py"))
        print(f"\n{folder.relative_to(PACKAGE.parent)}/")
        for file in files:
            subject = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n\n")[0]
            print(f"  {file.name:24} {' '.join(subject.split())}")


if __name__ == "__main__":
    main()
