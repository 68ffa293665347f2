"""Sphinx's settings. `make docs` makes a site of the Markdown pages as they are, and of the package's docstrings.

The source folder is the project's, so that links between README.md, docs/ and files of the code lead where they lead in
the repository. The navigation has the pages in the order of docs/README.md, and a page per file of docs/api/.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import typing
from pathlib import Path
from types import ModuleType

from sphinx.application import Sphinx

import embershard

PROJECT = Path(__file__).resolve().parent.parent
API = sorted(path.stem for path in (PROJECT / "docs" / "api").glob("*.rst"))

project = "embershard"
release = embershard.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinxcontrib.mermaid",
]
root_doc = "README"
include_patterns = ["*.md", "docs/**", "benchmarks/README.md", "tests/README.md"]
exclude_patterns = [".*", "build", "dist", "runs", "embershard", "examples", "scripts"]

myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

default_role = "code"  # single backticks in docstrings
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"embershard {release}"
html_copy_source = False


def contents(caption: str, pages: list[str]) -> str:
    """Return a hidden table of contents, in MyST's words: the navigation shows it."""
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Append what the navigation shows below this page."""
    if page == "README":
        table = (PROJECT / "docs" / "README.md").read_text(encoding="utf-8")
        listed = re.findall(r"^\| \[[^]]+\]\(([^)]+)\.md\)", table, re.MULTILINE)
        source[0] += contents("Documentation", ["/docs/README", *(f"/docs/{name}" for name in listed)])
        source[0] += contents("API", [f"/docs/api/{name}" for name in API])
    elif below := {"docs/decisions/README": "docs/decisions", "docs/LOG": "docs/log"}.get(page):
        pages = sorted((PROJECT / below).glob("[a-z]*.md"))
        source[0] += contents("Pages", [f"/{below}/{path.stem}" for path in pages])


def prepare(modules: list[ModuleType]) -> None:
    """Import what the modules import on first use, then take rules of resumes out of the types of settings."""
    for module in modules:
        vars(module).update({name: getattr(module, name) for name in getattr(module, "__all__", [])})
    values = {id(value): value for module in modules for value in vars(module).values()}
    for value in values.values():
        if isinstance(value, type) and dataclasses.is_dataclass(value):
            hints = typing.get_type_hints(value)
            value.__annotations__ = {name: hints[name] for name in value.__annotations__}
            value.__init__.__annotations__ = {**hints, "return": None}


def is_elsewhere(app: Sphinx, what: str, name: str, value: object, skip: bool, options: object) -> bool | None:
    """Leave what `embershard` exports to its own page."""
    is_of_a_room = what == "module" and app.env.docname != "docs/api/embershard"
    return True if is_of_a_room and name in embershard.__all__ else None


def keep_colons(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Begin an attribute's docstring with an empty comment: Napoleon takes words before a first colon for its type."""
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]


def leave_factories_out(
    app: Sphinx, what: str, name: str, value: object, options: object, signature: str | None, returns: str | None
) -> tuple[str, None] | None:
    """Show no signature with `<factory>`, which is no Python: those are of settings, whose attributes say the same."""
    return ("", None) if "<factory>" in (signature or "") else None


def begin_at_the_readme(app: Sphinx, error: Exception | None) -> None:
    """Write the page that a server shows for the folder."""
    (Path(app.outdir) / "index.html").write_text('<meta http-equiv="refresh" content="0; url=README.html">\n')


def setup(app: Sphinx) -> None:
    """Take part in Sphinx's work."""
    names = ["embershard" if name == "embershard" else f"embershard.{name}" for name in API]
    prepare([importlib.import_module(name) for name in names])
    app.connect("source-read", add_contents)
    app.connect("autodoc-skip-member", is_elsewhere)
    app.connect("autodoc-process-docstring", keep_colons, priority=100)
    app.connect("autodoc-process-signature", leave_factories_out)
    app.connect("build-finished", begin_at_the_readme)
