"""The page of `embershard report -o` in headless Chromium: it draws everything, and needs nothing but itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="Plotly is not installed (the extra [report])")

from embershard.commands import cli
from tests.unit.planning.runs import predicted_plan, result_of
from tests.unit.reports.browser import CHROMIUM, NO_CHROMIUM, Browser, chromium
from tests.unit.reports.reported_runs import reports, write_run, write_sweep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM),
]
_ELEMENTS = "document.documentElement.outerHTML"
#: Element that a drawn figure has, by its title.
_DRAWN = {
    "Comparison": "<td",
    "Throughput, every run": 'class="point',
    "Scaling": 'class="js-line"',
    "Runs that did not finish": "<td",
    "Results": "<td",
    "As each run's closing table has it": "<td",
    "Settings that differ": "<td",
    "Loss": 'class="js-line"',
    "AUC": 'class="js-line"',
    "Throughput": 'class="js-line"',
    "Hit rate": 'class="js-line"',
    "Rows moved": 'class="js-line"',
    "Bytes between ranks": 'class="js-line"',
    "Hit rate per table and rank": 'class="hm"',
    "Memory per tier and rank": 'class="point',
    "Step time": 'class="point',
    "Promises": "<td",
    "Main settings": "<td",
    "Predicted over measured": 'class="point',
    "Hit rates of tables": 'class="point',
    "Predicted parts of a step": 'class="point',
    "Predicted memory": "<td",
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, plan = tmp_path_factory.mktemp("page"), predicted_plan()
    run = write_run(folder / "<run> & more", plan, result_of(plan), reports=reports([10, 20]))
    output = folder / "page.html"
    assert cli.main(["report", str(run), str(write_sweep(folder / "s")), "-o", str(output)]) == 0
    return output


def test_every_figure_is_drawn_without_an_error_or_a_request(page: Path, browser: Browser):
    """A request would be an error: the page's own policy refuses all."""
    with browser.page(page) as found:
        elements = found.evaluate(_ELEMENTS)
        assert found.console == []
    parts = re.split(r"<h3>([^<]*)</h3>", elements.replace("<h2", "<h3></h3><h2"))[1:]
    by_title = {title: part for title, part in zip(parts[::2], parts[1::2], strict=True) if title}
    assert set(by_title) == set(_DRAWN)
    assert [title for title, element in _DRAWN.items() if element not in by_title[title]] == []


@pytest.mark.matrix
def test_labels_of_an_axis_differ(tmp_path: Path, browser: Browser):
    """Of hit rates between 94.6 % and 94.9 %, all of which round to 95 %."""
    plan = predicted_plan()
    lines = reports([10, 20, 30])
    for line, rate in zip(lines, (0.9490, 0.9462, 0.9467), strict=False):
        line |= {"hit_rate_lookups": rate, "hit_rate_unique": rate - 0.2}
    run = write_run(tmp_path / "run", None, result_of(plan), reports=lines)
    assert cli.main(["report", str(run), "-o", str(tmp_path / "page.html")]) == 0
    with browser.page(tmp_path / "page.html") as found:
        elements = found.evaluate(_ELEMENTS)
    figure = elements.split("<h3>Hit rate</h3>")[1].split("<h3>")[0]
    for axis in ("ytick", "y2tick"):
        labels = re.findall(rf'class="{axis}"><text[^>]*>([^<]*)</text>', figure)
        assert len(labels) >= 3
        assert len(set(labels)) == len(labels), labels


@pytest.mark.parametrize(
    ("added", "noticed"),
    [
        ("<script>throw new Error('broken')</script>", "Uncaught Error: broken"),
        ("<script>fetch('http://elsewhere.example/x')</script>", "elsewhere.example/x"),
        ("<img src='http://elsewhere.example/x.png'>", "elsewhere.example/x.png"),
    ],
)
def test_an_error_or_a_request_would_be_noticed(page: Path, browser: Browser, tmp_path: Path, added: str, noticed: str):
    head = page.read_text().split("<script>")[0]  # with the policy
    (tmp_path / "broken.html").write_text(f"{head}</head><body>{added}")
    with browser.page(tmp_path / "broken.html") as found:
        assert noticed in " ".join(found.console)
