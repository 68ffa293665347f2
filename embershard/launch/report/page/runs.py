"""The runs of a page, by name: a summary, and the settings in which they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from embershard.errors import ConfigError
from embershard.launch.quality_text import form_of, main_names, title_of
from embershard.launch.report.page.section import Section, Table
from embershard.launch.report.run_folder import RunFolder
from embershard.launch.screen import number
from embershard.units import size


@dataclass(frozen=True)
class Run:
    """A run under the name that the page has for it.

    Attributes:
        number: its place on the page, which gives its colour.
    """

    name: str
    number: int
    folder: RunFolder

    @property
    def result(self) -> Mapping[str, Any]:
        """Contents of result.json; empty where the run has not ended."""
        return self.folder.result

    @property
    def cache(self) -> Mapping[str, Any]:
        """What the caches did; empty in a run without caches, or that has not ended."""
        return self.result.get("cache") or {}

    @property
    def parts(self) -> int:
        """Steps of ranks: what totals of all ranks are divided by for means per rank and step."""
        return max(1, self.result.get("measured_steps", 0) * self.result.get("world_size", 1))


def summary(runs: Sequence[Run]) -> Section:
    """Return the section of all runs' results."""
    names = [*main_names(run.result for run in runs), *(["ne"] if any("ne" in run.result for run in runs) else [])]
    header = ["run", "ranks", "steps", "samples", "samples/s", "step ms, median", "95 %", "loss"]
    header += [*map(title_of, names), "hits", "device", "host", "sent"]
    note = (
        "loss: of training, mean since the last report; AUC, NE and RMSE: of the held-out samples; hits: share of "
        "lookups; device and host: bytes of the caches on all ranks; sent: to other ranks, by a rank in a step."
    )
    going = [run.name for run in runs if not run.result]
    text = [f"Not ended, so without a result: {', '.join(going)}."] if going else []
    return Section("Runs", [Table("Results", header, [_summary_row(run, names) for run in runs], note)], text)


def _summary_row(run: Run, names: Sequence[str]) -> tuple[str, ...]:
    result, cache = run.result, run.cache
    if not result:
        reports = run.folder.reports("train")
        return (run.name, "", str(reports[-1]["step"]) if reports else "0", *[""] * (9 + len(names)))
    sent = sum(value for kind, value in result["sent_bytes"].items() if kind not in ("ranks", "other"))
    return (
        run.name,
        str(result["world_size"]),
        f"{result['steps']:,}",
        f"{result['samples']:,}",
        number(result["samples_per_second"], ",.0f"),
        number(result["step_ms"]["p50"], ".2f"),
        number(result["step_ms"]["p95"], ".2f"),
        number(result["loss"], ".5f"),
        *(number(result.get(name), form_of(name)) for name in names),
        number(cache.get("hit_rate_lookups"), ".2%") if cache else "no cache",
        size(cache["device_bytes"]) if cache else "",
        size(cache["host_bytes"]) if cache else "",
        size(sent / run.parts) if sent else "0",
    )


def differences(runs: Sequence[Run]) -> Section:
    """Return the section of the settings that are not the same in all runs."""
    found, text = [], []
    for run in runs:
        try:
            found.append((run, {"ranks": run.result.get("world_size", "not known"), **run.folder.settings()}))
        except ConfigError as error:
            text.append(f"Left out: {error}")
    keys = dict.fromkeys(key for _, settings in found for key in settings)
    rows = []
    for key in keys:
        values = [str(settings.get(key, "none")) for _, settings in found]
        if len(set(values)) > 1:
            rows.append((key, *values))
    if not rows:
        text.append("No setting differs.")
    table = Table("Settings that differ", ("setting", *(run.name for run, _ in found)), rows)
    return Section("Settings", [table] if rows else [], text)
