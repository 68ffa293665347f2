"""The points of a study as tables: speed, efficiency, bytes, memory, parts of a step, measured beside predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from embershard.extras.scale_out.points import HELD, Point
from embershard.metrics.figures import form_of, main_names, title_of
from embershard.units import ShownTable, number, size

_LEFT = ("configuration",)
_Column = tuple[str, Callable[[Point], str]]
_Bytes = Callable[[Point], "int | float | None"]


def speed_tables(points: Sequence[Point]) -> list[ShownTable]:
    """Return speed and efficiency that were measured, and the simulated ones, if there are any."""
    measured, simulated = _by_source(points)
    speed: list[_Column] = [
        ("runs", lambda each: str(each.runs)),
        ("samples/s", lambda each: f"{each.samples_per_second:,.0f}"),
        ("from", lambda each: number(each.low, ",.0f")),
        ("to", lambda each: number(each.high, ",.0f")),
    ]
    more: list[_Column] = [
        ("planned", lambda each: number(each.predicted_per_second, ",.0f")),
        ("ideal", lambda each: f"{each.ideal_per_second:,.0f}"),
        ("step ms", lambda each: number(each.step_ms, ".2f")),
        ("planned ms", lambda each: number(each.predicted_step_ms, ".2f")),
        ("error", lambda each: number(each.error, "+.1%")),
    ]
    caption = (
        "of all ranks; from, to: the mean's 95 % confidence interval over the runs; planned: by the plan of the runs; "
        "ideal: as fast for each rank as on the fewest; error: the planned step over the measured one, less 1"
    )
    found = [_table("Samples per second, measured", measured, [*speed, *more], caption), _efficiency(measured)]
    if simulated:
        share: list[_Column] = [
            ("efficiency", lambda each: f"{each.efficiency:.1%}"),
            ("step ms", lambda each: number(each.predicted_step_ms, ".2f")),
        ]
        caption = "of all ranks; from, to: by the constants of the machine"
        title = "Samples per second, SIMULATED: nothing here was measured"
        found.append(_table(title, simulated, [*speed[1:], *share], caption))
    return found


def _efficiency(measured: Sequence[Point]) -> ShownTable:
    columns: list[_Column] = [
        ("held", lambda each: HELD[each.scaling]),
        ("samples/rank", lambda each: f"{each.batch_size // each.ranks:,}"),
        ("global batch", lambda each: f"{each.batch_size:,}"),
        ("runs", lambda each: str(each.runs)),
        ("efficiency", lambda each: f"{each.efficiency:.1%}"),
        ("from", lambda each: number(each.efficiency_low, ".1%")),
        ("to", lambda each: number(each.efficiency_high, ".1%")),
        ("planned", lambda each: number(each.predicted_efficiency, ".1%")),
        ("beside ranks", lambda each: str(each.base_ranks)),
    ]
    caption = (
        "samples/s of a rank, over those on the fewest ranks, which have 100 % by definition; from, to: 95 % "
        "confidence interval of the ratio of the two means (Welch), where both have several runs; planned: "
        "of the plans' speeds"
    )
    return _table("Efficiency, measured", measured, columns, caption)


def more_tables(points: Sequence[Point]) -> Iterator[ShownTable]:
    """Yield bytes between ranks, memory, parts of a step, hits and quality, as far as anything is known of them."""
    measured, simulated = _by_source(points)
    kinds = _names([each.sent_bytes for each in measured])
    if kinds:
        columns = _pair("in training", _in_training("sent_bytes"), _in_training("predicted_sent_bytes"))
        for kind in kinds:
            columns += _pair(kind.replace("_", " "), _of(kind, "sent_bytes"), _of(kind, "predicted_sent_bytes"))
        caption = "means of ranks and runs; in training: all but other"
        yield _table("Sent by a rank in a step, by kind", measured, columns, caption)
    yield _memory(measured)
    yield from _parts(
        "Parts of a step, measured, ms",
        measured,
        "parts_ms",
        "stages of the thread that trains in the "
        "traced steps, means over ranks and runs, without those of stages inside",
    )
    yield from _parts(
        "Parts of a step, planned, ms",
        measured,
        "predicted_parts_ms",
        "of the slowest rank, if nothing ran at the same time: parts may add up to more than the step",
    )
    yield from _parts(
        "Parts of a step, SIMULATED, ms",
        simulated,
        "predicted_parts_ms",
        "what a rank does or waits for, means over ranks; they add up to the step",
    )
    judged = main_names([each.quality for each in measured if each.quality], "sweeps")
    quality = [(title_of(name), _quality(name)) for name in judged]
    hits: list[_Column] = [
        ("hits", lambda each: number(each.hit_rate, ".2%")),
        ("planned", lambda each: number(each.predicted_hit_rate, ".2%")),
    ]
    yield _table("Hits of lookups, and quality of held-out samples", measured, [*hits, *quality], "")


def _memory(measured: Sequence[Point]) -> ShownTable:
    columns = [
        *_pair("caches", lambda each: each.cache_bytes, lambda each: each.predicted_cache_bytes),
        *_pair("rows on the host", lambda each: each.host_bytes, lambda each: each.predicted_host_bytes),
        *_pair("device, peak", lambda each: each.peak_device_bytes, lambda each: each.predicted_device_bytes),
        *_pair("process, peak", lambda each: each.peak_process_bytes, lambda each: each.predicted_process_bytes),
        ("before the model", lambda each: _size(each.process_bytes_before)),
    ]
    caption = (
        "of the fullest rank. Device, peak: tensors of a rank on its GPU; on a CPU there is none, and what plans call "
        "device memory is in the process. Process, planned: what it had before its model was built, and what the plan "
        "adds to it. Memory of a process has pages that ranks share, and what allocators keep"
    )
    return _table("Memory of a rank", measured, columns, caption)


def _parts(title: str, points: Sequence[Point], field: str, caption: str) -> Iterator[ShownTable]:
    names = _names([getattr(each, field) for each in points])
    own = [each for each in points if getattr(each, field)]
    if own:
        columns: list[_Column] = [(name.replace("_", " "), _part(field, name)) for name in names]
        yield _table(title, own, columns, caption)


def _part(field: str, name: str) -> Callable[[Point], str]:
    return lambda each: number(getattr(each, field).get(name), ".2f")


def _quality(name: str) -> Callable[[Point], str]:
    return lambda each: number(each.quality.get(name), form_of(name))


def _of(kind: str, field: str) -> _Bytes:
    def found(each: Point) -> float | None:
        value: float | None = getattr(each, field).get(kind)
        return value

    return found


def _in_training(field: str) -> _Bytes:
    def found(each: Point) -> float | None:
        known = [count for kind, count in getattr(each, field).items() if kind != "other"]
        return sum(known) if known else None

    return found


def _pair(title: str, measured: _Bytes, predicted: _Bytes) -> list[_Column]:
    return [(title, lambda each: _size(measured(each))), ("planned", lambda each: _size(predicted(each)))]


def _size(count: float | None) -> str:
    return "n/a" if count is None else size(count)


def _names(values: Sequence[object]) -> list[str]:
    """Return the names of numbers some of which are not 0."""
    pairs = [pair for each in values if isinstance(each, dict) for pair in each.items()]
    return [*dict.fromkeys(name for name, value in pairs if value)]


def _by_source(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    return [each for each in points if each.source == "measured"], [
        each for each in points if each.source != "measured"
    ]


def _table(title: str, points: Sequence[Point], columns: Sequence[_Column], caption: str) -> ShownTable:
    rows = [(each.line, f"{each.ranks:,}", *(text(each) for _, text in columns)) for each in points]
    return ShownTable(title, _LEFT, ("ranks", *(name for name, _ in columns)), rows, caption)
