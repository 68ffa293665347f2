"""Results of runs and sweeps as one table, for programs and for papers: JSON, CSV, LaTeX and Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from embershard.metrics.figures import Slices, more_is_better, slice_rows
from embershard.reports import latex
from embershard.reports.run_folder import RunFolder, is_sweep
from embershard.run_result import RunResult
from embershard.sweeps.spread import (
    SPEEDS,
    efficiencies,
    held_out_of,
    main_figures,
    read_configurations,
    result_rows,
    spread_of,
    spread_text,
)

FORMATS = ("json", "csv", "latex", "markdown")


class _Row(NamedTuple):
    """Runs of the same settings: one run, or a configuration of a sweep; `ended` of them, those that failed too.

    Attributes:
        folder: the name of that of the run or the sweep.
        efficiency: beside fewer ranks, for readers; "" where there are none.
    """

    folder: str
    name: str
    settings: dict[str, Any]
    results: Sequence[RunResult]
    ended: int
    efficiency: str = ""


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
            found = read_configurations(folder)
            shares = ["" if each is None else each.text for each in efficiencies(found)]
            rows += [
                _Row(folder.name, f"{prefix}{each.name}", dict(each.varied), each.results, len(each.outcomes), share)
                for each, share in zip(found, shares, strict=True)
            ]
        else:
            run = RunFolder.read(folder)
            assert run.result is not None, "it was read"
            name = folder.resolve().name
            rows.append(_Row(name, name, {}, (run.result,), 1))
    if form in ("json", "csv"):
        values = result_rows([row[1:4] for row in rows])
        return _csv(values) if form == "csv" else json.dumps(values, indent=2, allow_nan=False)
    if form == "latex":
        return _latex(rows)
    figures, cells = main_figures(result for row in rows for result in row.results), []
    scales = any(row.efficiency for row in rows)
    for row in rows:
        shown = [spread_text(row.results, name, each) for name, (_, each) in figures.items()]
        finished = f"{len(row.results)} of {row.ended}" if len(row.results) < row.ended else str(row.ended)
        cells.append([row.name, finished, *shown, *([row.efficiency] if scales else []), held_out_of(row.results)])
    more = ["efficiency"] if scales else []
    titles = ["run", "runs", *(title for title, _ in figures.values()), *more, "held out"]
    return _markdown(titles, cells)


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
    if form == "latex":
        shown = [[*map(latex.escaped, row)] for row in (["held out", *titles], *cells)]
        return latex.table(shown[0], shown[1:], 1, f"Held-out samples, at step {step:,}.")
    return _markdown(["held out", *titles], cells)


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


def _latex(rows: Sequence[_Row]) -> str:
    """Return the main figures with their units; what settings differ in, and what was held out, in columns or below."""
    results = [result for row in rows for result in row.results]
    figures = dict(sorted(main_figures(results).items(), key=lambda item: more_is_better(item[0]) is None))
    varied = dict.fromkeys(key for row in rows for key in row.settings)
    keys = [key for key in varied if len({str(row.settings.get(key)) for row in rows if row.settings}) > 1]
    named = len({row.folder for row in rows}) > 1 or not keys
    held_out = list(dict.fromkeys(text for row in rows if (text := held_out_of(row.results))))
    letters = dict(zip(held_out, "abcdefghijklmnopqrstuvwxyz", strict=False)) if len(held_out) > 1 else {}
    cells = []
    for row in rows:
        texts = [row.folder] * named + [str(row.settings.get(key, "")) for key in keys]
        finished = f"{len(row.results)} of {row.ended}" if len(row.results) < row.ended else str(row.ended)
        mark = "" if all(result.is_steady for result in row.results) else r"^{\ast}"
        own = [
            latex.figure(spread_of(row.results, name), form, mark if name in SPEEDS else "")
            for name, (_, form) in figures.items()
        ]
        judged = [letters.get(held_out_of(row.results), "")] if letters else []
        cells.append([*map(latex.escaped, texts), finished, *own, *judged])
    titles = [*(["run"] if named else []), *(rf"\texttt{{{latex.escaped(key)}}}" for key in keys), "runs"]
    titles += [latex.title_with_unit(title, form) for title, form in figures.values()] + ["held out"] * bool(letters)
    said = [r"Means over runs, with half of their 95\,\% confidence intervals."] * any(
        len(row.results) > 1 for row in rows
    )
    if not all(result.is_steady for result in results):
        said.append(r"$^{\ast}$: too short for the speed of a long run.")
    of = [f"({letters[text]}) {text}" if letters else text for text in held_out]
    said += [f"Held out: {latex.escaped(', '.join(of))}."] if of else []
    return latex.table(titles, cells, named + len(keys), " ".join(said) or "Results.")
