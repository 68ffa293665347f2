"""Which configurations of a sweep differ from its best one at all, by what they gave with each seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from embershard.metrics.quality_text import form_of, main_names, title_of
from embershard.sweeps.spread import Configuration, Spread, figures_of, is_higher_better

_LEVEL = 0.95


@dataclass(frozen=True)
class AgainstBest:
    """A figure of a configuration less that of the best one.

    Attributes:
        differences: one for each seed that both were trained with.
        num_others: configurations that are compared with the best.
    """

    figure: str
    differences: tuple[float, ...]
    num_others: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """Where the difference is, so that all intervals of the sweep hold in 95 of 100 cases; None of one seed."""
        level = 1 - (1 - _LEVEL) / self.num_others
        mean, half = fmean(self.differences), Spread(self.differences).half_width(level)
        return None if half is None else (mean - half, mean + half)

    @property
    def text(self) -> str:
        """The verdict and the interval.

        >>> AgainstBest("auc", (-0.02, -0.021, -0.019), num_others=1).text
        'worse (-0.0225 to -0.0175)'
        >>> AgainstBest("auc", (-0.02, 0.03, -0.019), num_others=1).text
        'no difference (-0.0740 to +0.0680)'
        >>> AgainstBest("auc", (-0.02,), num_others=1).text, AgainstBest("auc", (0.0, 0.0), num_others=1).text
        ('one seed: not known', 'equal')
        """
        if not any(self.differences) and len(self.differences) > 1:
            return "equal"
        if self.interval is None:
            return "one seed: not known"
        low, high = self.interval
        form = f"+{form_of(self.figure)}"
        return f"{'worse' if low > 0 or high < 0 else 'no difference'} ({low:{form}} to {high:{form}})"


def against_best(configurations: Sequence[Configuration], figure: str | None = None) -> tuple[str, list[str]]:
    """Return the title and the texts of a table's column: of each configuration how it compares with the best one.

    Differences are of runs with the same seeds; repeats with one seed train one model, and are its mean. Their mean has
    a confidence interval by Student's t, at a level that is divided among the comparisons (Bonferroni).

    Args:
        figure: of a model's quality; None: the first by which models are judged.
    """
    figure = figure or main_names(result.quality for each in configurations for result in each.results)[0]
    found = [_by_seed(each, figure) for each in configurations]
    means = [fmean(values.values()) for values in found if values]
    title = f"beside the best {title_of(figure)}"
    if len(means) < 2:
        return title, ["" for _ in configurations]
    best_mean = max(means) if is_higher_better(figure) else min(means)
    best = next(values for values in found if values and fmean(values.values()) == best_mean)
    texts = []
    for values in found:
        common = [seed for seed in values if seed in best]
        differences = tuple(values[seed] - best[seed] for seed in common)
        text = AgainstBest(figure, differences, len(means) - 1).text if common else "no seed in common"
        texts.append("best" if values is best else text if values else "")
    return title, texts


def _by_seed(configuration: Configuration, figure: str) -> dict[tuple[object, ...], float]:
    """Return a figure of the model of each seed."""
    found: dict[tuple[object, ...], list[float]] = {}
    for seeds, result in zip(configuration.seeds, configuration.results, strict=True):
        if (value := figures_of(result).get(figure)) is not None:
            found.setdefault(seeds, []).append(value)
    return {seeds: fmean(values) for seeds, values in found.items()}
