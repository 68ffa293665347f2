"""The page of `embershard report -o` in headless Chromium: it draws everything, and needs nothing but itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("plotly", reason="Plotly is not installed (the extra [report])")

from embershard.commands import cli
from embershard.reports.start import EmbeddingTable, Layer, ModelSummary, Start
from tests.covering import combinations, matrix
from tests.unit.planning.runs import predicted_plan, result_of
from tests.unit.reports.browser import CHROMIUM, NO_CHROMIUM, Browser, OpenPage, chromium
from tests.unit.reports.reported_runs import reports, write_run, write_sweep

pytestmark = [
    pytest.mark.extra,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM),
]
_ELEMENTS = "document.documentElement.outerHTML"
#: Element that a drawn figure has, by its title.
_DRAWN = {
    "Comparison": "<td",
    "Quality and speed, every run": 'class="point',
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
    "Where each table is": 'class="hm"',
    "Memory of each rank": 'class="point',
    "A step of each rank": 'class="point',
    "Tables": "<td",
    "Made from": "<td",
    "Notes": "<td",
    "How they were run": "<td",
    "Embedding tables": "<td",
    "Layers": "<td",
}


#: What is outside of the page or of its figure, or below a figure's end.
_CUT = """(() => {
  const found = [], page = document.documentElement;
  const inside = (inner, outer) => inner.left >= outer.left - 2 && inner.right <= outer.right + 2;
  if (page.scrollWidth > page.clientWidth) found.push(`the page: ${page.scrollWidth} pixels`);
  const whole = {left: 0, right: page.clientWidth};
  for (const each of document.querySelectorAll("h1, h2, h3, p, dl, summary, nav a, button, label, .wide, .figure"))
    if (!inside(each.getBoundingClientRect(), whole)) found.push(each.outerHTML.slice(0, 80));
  for (const figure of document.querySelectorAll(".plotly-graph-div")) {
    const around = figure.closest(".figure").getBoundingClientRect();
    const texts = [...figure.querySelectorAll(".main-svg text")].filter(each => each.textContent.trim());
    for (const text of texts) {
      const box = text.getBoundingClientRect();
      const isHigh = box.top >= around.top - 2 && box.bottom <= around.bottom + 2;
      if (!inside(box, around) || !isHigh) found.push(`${figure.id}: ${text.textContent}`);
    }
  }
  return found;
})()"""
#: Texts whose colour is less than 4.5 times as light as their ground, or less dark (WCAG 2, AA). Those in cells of heat
#: maps stand on colours of the drawing.
_PALE = """(() => {
  const parts = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => {
    const [r, g, b] = parts(colour).map(each => each / 255).map(each =>
      each <= 0.03928 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const isClear = colour => parts(colour)[3] === 0;
  const ground = each => {
    for (; each; each = each.parentElement) {
      const style = getComputedStyle(each);
      if (!isClear(style.backgroundColor)) return style.backgroundColor;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  const hasText = each => [...each.childNodes].some(node => node.nodeType === 3 && node.data.trim());
  for (const each of [...document.body.querySelectorAll("*")].filter(hasText)) {
    if (each.closest("script, style, option, .modebar-container, .heatmaplayer, .hm")) continue;
    const style = getComputedStyle(each), isDrawn = each.closest("svg") !== null;
    const [a, b] = [light(isDrawn ? style.fill : style.color), light(ground(each))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${each.textContent.slice(0, 40)}: ${ratio.toFixed(1)}`);
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, plan = tmp_path_factory.mktemp("page"), predicted_plan()
    run = write_run(folder / "<run> & more", plan, result_of(plan), reports=reports([10, 20]))
    output = folder / "page.html"
    tables = tuple(EmbeddingTable(f"t_{number}", 1000, 16, 64_000) for number in range(30))
    layers = (Layer("over_arch.0", "Linear", "1024 x 4096, 1024", 4_195_328, 16_781_312),)
    command = f"embershard train --config {'/a/long/path' * 9}/run.toml --nproc 2"
    begun = Start.now(0, command, "2 x CPU", ModelSummary(layers, tables))
    replace(begun, time="2026-01-01T00:00:00.000Z").add_to(run)  # as `reports` has it
    plan.save(folder / "plan.json")
    given = [run, write_sweep(folder / "s"), folder / "plan.json"]
    assert cli.main(["report", *map(str, given), "-o", str(output)]) == 0
    return output


@pytest.fixture(scope="module")
def opened(page: Path, browser: Browser) -> Iterator[dict[int, OpenPage]]:
    """The page in a narrow window at night, and in a wide one by day, which tests share: drawing it takes seconds."""
    with browser.page(page, width=480, is_dark=True) as narrow, browser.page(page) as wide:
        yield {480: narrow, 1280: wide}


def test_every_figure_is_drawn_without_an_error_or_a_request(opened: dict[int, OpenPage]):
    """A request would be an error: the page's own policy refuses all."""
    elements = opened[1280].evaluate(_ELEMENTS)
    assert opened[1280].console == []
    parts = re.split(r"<h3>([^<]*)</h3>", elements.replace("<h2", "<h3></h3><h2"))[1:]
    by_title = {title: part for title, part in zip(parts[::2], parts[1::2], strict=True) if title}
    assert set(by_title) == set(_DRAWN)
    assert [title for title, element in _DRAWN.items() if element not in by_title[title]] == []


@pytest.mark.parametrize(("width", "is_dark"), combinations([(480, True), (1280, False)], (480, 1280), (False, True)))
def test_nothing_is_cut_or_pale(page: Path, browser: Browser, opened: dict[int, OpenPage], width: int, is_dark: bool):
    is_open = is_dark == (width == 480)
    with nullcontext(opened[width]) if is_open else browser.page(page, width=width, is_dark=is_dark) as found:
        found.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        ground = found.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") != is_dark
        assert found.evaluate(_CUT) == []
        assert found.evaluate(_PALE) == []


@pytest.mark.matrix
def test_what_is_cut_or_pale_would_be_noticed(page: Path, browser: Browser):
    def add(style: str, where: str) -> str:
        return f"{where}.insertAdjacentHTML('beforeend', '<p style=\"{style}\">added</p>')"

    with browser.page(page, width=480, is_dark=True) as found:
        found.evaluate(add("width: 700px", "document.body"))
        assert found.evaluate(_CUT)[0].startswith("the page: ")
        found.evaluate("document.body.lastChild.remove()")
        found.evaluate("document.querySelector('.plotly-graph-div .ytick text').setAttribute('x', -500)")
        assert len(found.evaluate(_CUT)) == 1
        found.evaluate(add("color: #777", "document.body"))
        assert [each.partition(":")[0] for each in found.evaluate(_PALE)] == ["added"]


def test_panels_stand_below_each_other_on_a_narrow_screen(opened: dict[int, OpenPage]):
    script = """[...document.querySelectorAll(".plotly-graph-div")]
        .find(each => each.layout.meta.panels === 5).layout"""
    for width, least in ((480, 1), (1280, 3)):
        layout = opened[width].evaluate(f"(layout => [layout.xaxis.domain, layout.xaxis3.domain])({script})")
        assert (layout[0] == layout[1]) == (least == 1), f"{width}: {layout}"


def test_curves_obey_their_controls(opened: dict[int, OpenPage]):
    """Figures of one run: train reports at steps 10 and 20, of 256 samples and a second each."""
    loss = "document.querySelector('.curves .plotly-graph-div')"

    def choose(control: str, change: str) -> str:
        tell = f"each => {{ each.{change}; each.dispatchEvent(new Event('input')); }}"
        return f"({tell})(document.getElementById('{control}'))"

    found, x = opened[1280], f"Array.from({loss}.data[0].x)"
    assert found.evaluate(x) == [2560, 5120]
    found.evaluate(choose("over", "value = '0'"))
    assert found.evaluate(x) == [10, 20]
    assert found.evaluate(f"{loss}.layout.xaxis.title.text") == "steps trained"
    found.evaluate(choose("over", "value = '2'"))
    assert found.evaluate(x) == pytest.approx([10 / 60, 20 / 60])
    found.evaluate(choose("log", "checked = true"))
    assert found.evaluate(f"{loss}.layout.yaxis.type") == "log"
    found.evaluate(f"{loss}.given[0] = [1, 3]")
    found.evaluate(choose("smoothing", "value = '0.5'"))
    assert found.evaluate(f"Array.from({loss}.data[0].y)") == pytest.approx([1, (1 + 2 * 3) / 3])
    found.evaluate(choose("smoothing", "value = '0'"))
    assert found.evaluate(f"Array.from({loss}.data[0].y)") == [1, 3]
    assert found.console == []


def test_a_legend_hides_its_run(opened: dict[int, OpenPage]):
    found, key = opened[480], "document.querySelector('.curves .legend button')"
    name = found.evaluate(f"{key}.dataset.name")
    assert name == "<run> & more"
    found.evaluate(f"{key}.click()")
    shown = "document.querySelector('.curves .plotly-graph-div').data.map(each => [each.legendgroup, each.visible])"
    own = [visible for group, visible in found.evaluate(shown) if group == "&lt;run&gt; &amp; more"]
    assert own
    assert not any(own)
    assert found.evaluate(f"{key}.getAttribute('aria-pressed')") == "false"


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
        matrix("<script>fetch('http://elsewhere.example/x')</script>", "elsewhere.example/x"),
        ("<img src='http://elsewhere.example/x.png'>", "elsewhere.example/x.png"),
    ],
)
def test_an_error_or_a_request_would_be_noticed(page: Path, browser: Browser, tmp_path: Path, added: str, noticed: str):
    head = page.read_text().split("<script>")[0]  # with the policy
    (tmp_path / "broken.html").write_text(f"{head}</head><body>{added}")
    with browser.page(tmp_path / "broken.html") as found:
        assert noticed in " ".join(found.console)
