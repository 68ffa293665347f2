"""Tables for LaTeX, with or without booktabs: whole `table` environments, to be put in by `\\input`."""

from __future__ import annotations

from collections.abc import Sequence

from embershard.sweeps.spread import Spread

_ESCAPED = {each: f"\\{each}" for each in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{each: rf"\text{name}{{}}" for each, name in (("|", "bar"), ("<", "less"), (">", "greater"))},
    "±": r"$\pm$",
}
#: Lines of a table for documents without the package booktabs, whose own are finer.
_RULES = [rf"\providecommand{{\{each}rule}}{{\hline}}" for each in ("top", "mid", "bottom")]


def escaped(text: str) -> str:
    """Return a text as LaTeX shows it.

    >>> print(escaped("cache.host_bytes: 5 %"))
    cache.host\\_bytes: 5 \\%
    """
    return "".join(_ESCAPED.get(each, each) for each in text)


def title_with_unit(title: str, form: str) -> str:
    """Return the title of a column of figures, with its unit, escaped.

    >>> print(title_with_unit("hits", ".2%"), title_with_unit("step ms, median", ".2f"))
    hits (\\%) median step (ms)
    """
    own = {"samples/s": "throughput (samples/s)", "step ms, median": "median step (ms)"}
    return escaped(own.get(title, f"{title} (%)" if form.endswith("%") else title))


def figure(spread: Spread | None, form: str, mark: str = "") -> str:
    """Return a mean and half of its 95 % interval, in the unit of its column; empty without a value.

    >>> print(figure(Spread((0.25, 0.75)), ".1%"), figure(Spread((1234.5,)), ",.1f"))
    $50.0 \\pm 317.7$ $1{,}234.5$
    """
    if spread is None:
        return ""
    scale, form = (100, f"{form[:-1]}f") if form.endswith("%") else (1, form)
    shown = f"{spread.mean * scale:{form}}"
    if spread.deviation:
        shown += rf" \pm {(spread.interval or 0.0) * scale:{form}}"
    return f"${shown.replace(',', '{,}')}{mark}$"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], num_texts: int, caption: str) -> str:
    """Return a table of cells that are LaTeX already: `num_texts` columns of texts on its left, then figures."""
    lines = [" & ".join(cells) + r" \\" for cells in (titles, *rows)]
    columns = "l" * num_texts + "r" * (len(titles) - num_texts)
    return "\n".join(
        [
            *_RULES,
            r"\begin{table}",
            r"\centering\small",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )
