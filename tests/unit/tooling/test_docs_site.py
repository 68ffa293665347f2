"""The site that `make docs` makes: every page and every public module is in it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


def public_modules(project: Path) -> set[str]:
    """Return the modules whose names users import: packages of the first floor that list them, and the exceptions."""
    found = {"embershard.errors"}
    for file in (project / "embershard" / "__init__.py", *(project / "embershard").glob("*/__init__.py")):
        names = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name))
        if any(name.id == "__all__" for name in names):
            found.add(".".join(file.parent.relative_to(project).parts))
    return found


def test_every_public_module_has_a_page(project_dir: Path):
    pages = {}
    for page in (project_dir / "docs" / "api").iterdir():
        title, line, _, directive, *_ = page.read_text().splitlines()
        assert (line, directive) == ("=" * len(title), f".. automodule:: {title}"), page
        assert page.name == f"{title.rpartition('.')[2]}.rst"
        pages[title] = page
    assert set(pages) == public_modules(project_dir)


def test_the_table_of_the_documentation_lists_every_page(project_dir: Path):
    """The site's navigation has what is listed there."""
    table = (project_dir / "docs" / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    rows = re.findall(r"^\| \[([^]]+)\]\(([^)]+)\) \|", table, re.MULTILINE)
    listed = [(project_dir / "docs" / target).resolve() for _, target in rows]
    pages = {*project_dir.glob("*.md"), *(project_dir / "docs").glob("*.md")}
    pages |= {project_dir / folder / "README.md" for folder in ("benchmarks", "docs/decisions", "tests")}
    front = {project_dir / "README.md", project_dir / "docs" / "README.md"}
    assert sorted(listed) == sorted(path.resolve() for path in pages - front)


@pytest.mark.matrix
@pytest.mark.slow
def test_the_site_is_made_without_a_warning(project_dir: Path, tmp_path: Path):
    """A link or an anchor that leads nowhere is one, and so is a docstring that is no text of Sphinx's."""
    packages = project_dir / "build" / "docs-packages"
    if not packages.is_dir():
        pytest.skip("Sphinx is not installed; make docs installs it into build/docs-packages")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{packages}:{project_dir}"}
    ran = subprocess.run(command, cwd=project_dir, env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "README.html" in (tmp_path / "index.html").read_text()
    assert "slots on the device" in (tmp_path / "docs" / "api" / "embershard.html").read_text().lower()
    assert 'class="mermaid"' in (tmp_path / "docs" / "architecture.html").read_text()
    assert "lookaheadpipeline" in (tmp_path / "searchindex.js").read_text().lower()
