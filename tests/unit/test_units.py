"""Sizes are printed in one system of units."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import embershard
from embershard.units import parse_bytes, size

_PACKAGE = Path(embershard.__file__).parent
_DECIMAL = re.compile(r"\b[0-9}]? ?[kKMGT]B\b")
#: What users may give: vendors' units are read, too.
_READ = {"units.py"}


@given(st.integers(0, 1 << 50))
def test_a_printed_size_reads_back(count: int) -> None:
    assert abs(parse_bytes(size(count)) - count) <= 0.005 * max(1, count)


def _messages(file: Path) -> set[str]:
    """Return the texts of a file's code that are no docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {text for text in texts - docstrings if _DECIMAL.search(text)}


@pytest.mark.slow
def test_no_message_has_decimal_units(tmp_path: Path) -> None:
    files = [file for file in _PACKAGE.rglob("*.py") if file.name not in _READ]
    assert len(files) > 150
    assert {str(file): found for file in files if (found := _messages(file))} == {}
    (tmp_path / "wrong.py").write_text('"""In GB."""\nfree = 3\nprint(f"{free / 1e9:.1f} GB are free")\n')
    assert len(_messages(tmp_path / "wrong.py")) == 1
