"""Results of runs and sweeps as one table, for programs and for papers: JSON, CSV, LaTeX and Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from embershard.metrics.figures import Slices, slice_rows
from embershard.reports.run_folder import RunFolder, is_sweep
from embershard.run_result import RunResult
from embershard.sweeps.spread import held_out_of, main_figures, read_configurations, result_rows, spread_text

FORMATS = ("json", "csv", "latex", "markdown")
_LATEX = {each: f"\\{each}" for each in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{each: rf"\text{name}{{}}" for each, name in (("|", "bar"), ("<", "less"), (">", "greater"))},
    "±": r"$\pm$",
}
#: Lines of a table for documents without the package booktabs, whose own are finer.
_RULES = [rf"\providecommand{{\{each}rule}}{{\hline}}" for each in ("top", "mid", "bottom")]


class _Row(NamedTuple):
    """Runs of the same settings: one run, or a configuration of a sweep; `ended` of them, those that failed too."""

    name: str
    settings: dict[str, Any]
    results: Sequence[RunResult]
    ended: int


def results_text(folders: Sequence[Path], form: str) -> str:
    """Return the results of runs and sweeps as text in one of `FORMATS`.

    JSON and CSV have every figure in full, as `result_rows` names them. LaTeX and Markdown have the main ones, rounded,
    for readers.

    Raises:
        ConfigError: a folder is neither that of a run nor of a sweep, or cannot be read.
    """
    rows: list[_Row] = []
    for folder in folders:
        if is_sweep(folder):
            prefix = f"{folder.name}: " if len(folders) > 1 else ""
            rows += [
                _Row(f"{prefix}{each.name}", dict(each.varied), each.results, len(each.outcomes))
                for each in read_configurations(folder)
            ]
        else:
            run = RunFolder.read(folder)
            assert run.result is not None, "it was read"
            rows.append(_Row(folder.resolve().name, {}, (run.result,), 1))
    if form in ("json", "csv"):
        values = result_rows([row[:3] for row in rows])
        return _csv(values) if form == "csv" else json.dumps(values, indent=2, allow_nan=False)
    figures, cells = main_figures(result for row in rows for result in row.results), []
    for row in rows:
        shown = [spread_text(row.results, name, each) for name, (_, each) in figures.items()]
        finished = f"{len(row.results)} of {row.ended}" if len(row.results) < row.ended else str(row.ended)
        cells.append([row.name, finished, *shown, held_out_of(row.results)])
    titles = ["run", "runs", *(title for title, _ in figures.values()), "held out"]
    return (_latex if form == "latex" else _markdown)(titles, cells)


def evaluation_text(step: int, quality: Mapping[str, Any], slices: Slices, form: str) -> str:
    """Return an evaluation as text in one of `FORMATS`: JSON as a line of metrics.jsonl has it, else a row for all
    samples and one for each slice.

    Args:
        quality: figures by name, and "samples".
    """
    if form == "json":
        return json.dumps({"step": step, **quality, "slices": slices}, indent=2, allow_nan=False)
    named = [("", "", quality), *((column, value, of) for column in slices for value, of in slices[column].items())]
    if form == "csv":
        return _csv([{"column": column, "value": value, **of} for column, value, of in named])
    titles, cells = slice_rows({f"{column} = {value}" if column else "all": of for column, value, of in named})
    return (_latex if form == "latex" else _markdown)(["held out", *titles], cells)


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    names = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def _markdown(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *cells]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _latex(titles: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    def line(texts: Sequence[str]) -> str:
        return " & ".join("".join(_LATEX.get(each, each) for each in text) for text in texts) + r" \\"

    body = [line(titles), r"\midrule", *map(line, cells), r"\bottomrule", r"\end{tabular}"]
    head = (
        r"% \usepackage{booktabs} is optional; +-: half of the mean's 95 % confidence interval; sd: standard deviation"
    )
    return "\n".join([head, *_RULES, rf"\begin{{tabular}}{{l{'r' * (len(titles) - 1)}}}", r"\toprule", *body])
