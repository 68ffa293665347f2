"""The page of `embershard report -o` as a file: it loads nothing, has colours for the dark, and narrow screens move its
wide tables. tests/unit/reports/test_report_browser.py opens it."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="Plotly is not installed (the extra [report])")

from embershard.commands import cli
from tests.unit.planning.runs import predicted_plan, result_of
from tests.unit.reports.reported_runs import reports, write_run, write_sweep

#: Attributes whose value a browser may load, and elements that load something by themselves.
_LOADED = {"src", "href", "srcset", "poster", "data", "action", "formaction", "background", "ping", "manifest"}
_LOADING = {"link", "base", "iframe", "frame", "object", "embed", "form", "audio", "video", "source", "track", "portal"}


class Page(HTMLParser):
    """What a page may load, its styles, its policy, and the elements around each of its figures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.styles = self.policy = ""
        self.figures: list[list[dict[str, str | None]]] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.loaded += [f"<{tag}>"] if tag in _LOADING else []
        self.loaded += [value or "" for name, value in attrs if name in _LOADED]
        self.styles += found.get("style") or ""
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"] or ""
        if tag == "div" and "plotly-graph-div" in (found.get("class") or ""):
            self.figures.append([each for _, each in self._open])
        if tag not in ("meta", "br", "img", "hr"):
            self._open.append((tag, found))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1][0] == "style":
            self.styles += data

    def requests(self) -> list[str]:
        """Return what it would load from elsewhere."""
        return [
            *(each for each in self.loaded if not each.startswith(("#", "data:"))),
            *re.findall(r"@import|url\((?!data:)[^)]*\)", self.styles),
        ]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder, plan = tmp_path_factory.mktemp("page"), predicted_plan()
    run = write_run(folder / "run", plan, result_of(plan), reports=reports([10, 20]))
    output = folder / "page.html"
    assert cli.main(["report", str(run), str(write_sweep(folder / "s")), "-o", str(output)]) == 0
    return Path(output).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_page_loads_nothing(text: str) -> None:
    page = Page(text)
    assert page.requests() == []
    assert len(page.figures) >= 10, "the parser saw the page"
    policy = dict(rule.strip().split(" ", 1) for rule in page.policy.split(";"))
    assert policy.pop("default-src") == "'none'"
    assert set(" ".join(policy.values()).split()) == {"'unsafe-inline'", "data:", "blob:"}, (
        "no host, not even for scripts"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "added",
    [
        '<script src="https://cdn.example/plotly.js"></script>',
        '<link rel="stylesheet" href="page.css">',
        "<img src=//elsewhere.example/x.png>",
        "<style>@import 'fonts.css';</style>",
        "<style>body { background: url(paper.png); }</style>",
        '<p style="background: url(https://elsewhere.example/x.png)">x</p>',
    ],
)
def test_a_request_would_be_noticed(text: str, added: str) -> None:
    assert Page(text.replace("</body>", f"{added}</body>")).requests() != []


@pytest.mark.slow
def test_every_colour_has_one_for_the_dark(text: str) -> None:
    light, media, dark = Page(text).styles.partition("@media (prefers-color-scheme: dark)")
    assert media
    palettes = [re.search(r":root {([^}]*)}", part) for part in (light, dark)]
    names = [set(re.findall(r"(--\w+):", found[1])) for found in palettes if found]
    assert len(names) == 2
    assert names[0] == names[1] == set(re.findall(r"var\((--\w+)\)", light))
    rules = re.sub(r":root {[^}]*}", "", light + dark)
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b|\brgb|\b(?:white|black)\b(?!-)", rules) == []


@pytest.mark.slow
def test_a_narrow_screen_moves_wide_tables_and_not_the_page(text: str) -> None:
    page = Page(text)
    assert ".wide { overflow-x: auto; }" in page.styles
    assert text.count("<table>") == text.count('<div class="wide"><table>')
