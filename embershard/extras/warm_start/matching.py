"""`match`: which table and layer of a new model takes what from which one of a trained model; pure, on shapes alone.
What it takes, as tables for a reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from embershard.extras.warm_start.columns import Label, LabelledDim, renamed
from embershard.extras.warm_start.shapes import LayerShape, ModelShape, TableShape
from embershard.training.warm_start import OF_COMMAND, Words

Fate = Literal["taken", "renamed", "grown", "moved", "widened", "new", "dropped", "refused"]
#: Entries of a dimension: those of the saved tensor, and those of the new one that get them.
Places = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Entry:
    """What becomes of a table or a layer.

    Attributes:
        name: in the new model; of one that is dropped, in the trained one.
        fate: "taken": equal names and sizes; "renamed"; "grown": with more rows; "moved": its ids may get other rows;
            "widened": other columns or rows, by their labels; "new": as of the seed; "dropped": only the trained model
            has it; "refused": it cannot be taken, and nothing may begin.
        was: its name in the trained model.
        saved, now: its size in both.
        why: what a reader should know; of one that is refused, the problem and the fix.
        places: of each dimension of a layer, which entries are taken; None: all, in their order.
        zeros: of each dimension, entries of a new layer that become 0.
    """

    kind: Literal["table", "layer", "feature", "option", "optimizer"]
    name: str
    fate: Fate
    was: str = ""
    saved: str = ""
    now: str = ""
    why: str = ""
    places: tuple[Places | None, ...] = ()
    zeros: tuple[tuple[int, ...], ...] = ()

    @property
    def is_taken(self) -> bool:
        """Something is copied."""
        return self.fate in ("taken", "renamed", "grown", "moved", "widened")


@dataclass(frozen=True)
class Matching:
    """What becomes of every table and layer.

    Attributes:
        notes: what the reader should know besides, as sentences.
    """

    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()

    @property
    def refused(self) -> list[Entry]:
        """Those that cannot be taken."""
        return [entry for entry in self.entries if entry.fate == "refused"]

    def of(self, kind: str) -> Iterator[Entry]:
        """Yield those of tables, or of layers, that take something."""
        return (entry for entry in self.entries if entry.kind == kind and entry.is_taken)


def match(
    old: ModelShape,
    new: ModelShape,
    renames: Iterable[tuple[str, str]],
    left_out: Collection[str],
    words: Words = OF_COMMAND,
) -> Matching:
    """Return what each table and layer of `new` takes from `old`; problems are entries, too.

    Args:
        renames: old and new names, of features, tables, layers, or what names of layers begin with.
        left_out: such names of the new model, which begins anew with them, or of the old one.
        words: of the user, for what problems advise.

    >>> tables = {"t_a": TableShape("t_a", 10, 8, "model.ebc.embedding_bags.t_a.weight")}
    >>> [(entry.name, entry.fate) for entry in match(ModelShape(tables, {}), ModelShape(tables, {}), (), ()).entries]
    [('t_a', 'taken')]
    """
    names = _Names(old, new, tuple(renames), tuple(left_out), words)
    entries = [*names.problems, *_dense_features(old, new, names), *_tables(old, new, names)]
    entries += _layers(old, new, names)
    return Matching(tuple(entries), tuple(_notes(old, new, names)))


class _Names:
    """Which name of the old model is which of the new one.

    Attributes:
        problems: renames and names left out that mean nothing, or two things.
    """

    def __init__(
        self,
        old: ModelShape,
        new: ModelShape,
        renames: tuple[tuple[str, str], ...],
        left_out: tuple[str, ...],
        words: Words,
    ) -> None:
        self._new_name = dict(renames)
        self._left_out = set(left_out)
        self._words = words
        self.problems = [*_map_problems(old, new, renames, words), *_left_out_problems(old, new, left_out, words)]
        for old_name, new_name in renames:  # tables that are named after features
            if old_name in old.features and f"t_{old_name}" in old.tables and f"t_{new_name}" in new.tables:
                self._new_name.setdefault(f"t_{old_name}", f"t_{new_name}")

    def anew(self, name: str) -> str:
        """Return how a table, a feature or a layer begins anew, as the end of a message."""
        return f"{self._words.without.format(name)} begins it anew"

    def is_left_out(self, name: str) -> bool:
        """Return True for a table, a feature or a layer that begins anew."""
        return any(name == each or name.startswith(f"{each}.") for each in self._left_out)

    def feature(self, old_name: str) -> str:
        """Return a feature's new name; "" of one that is left out: no name is equal to it."""
        name = self._new_name.get(old_name, old_name)
        return "" if {name, old_name} & self._left_out else name

    def table(self, old: TableShape) -> str:
        """Return a table's new name."""
        return self._new_name.get(old.name, old.name)

    def leaves_table_out(self, table: TableShape) -> bool:
        """Return True for a table that is left out, or all of whose features are."""
        return self.is_left_out(table.name) or (
            bool(table.features) and all(self.is_left_out(each) for each in table.features)
        )

    def layer(self, old_name: str) -> str:
        """Return a layer's new name: the longest one that was renamed decides."""
        parts = old_name.split(".")
        for number in range(len(parts), 0, -1):
            if (new := self._new_name.get(".".join(parts[:number]))) is not None:
                return ".".join([new, *parts[number:]])
        return old_name


def _known(shape: ModelShape, name: str) -> bool:
    is_layer = any(each == name or each.startswith(f"{name}.") for each in shape.layers)
    return name in shape.features or name in shape.tables or is_layer


def _map_problems(
    old: ModelShape, new: ModelShape, renames: tuple[tuple[str, str], ...], words: Words
) -> Iterator[Entry]:
    sources, targets = [was for was, _ in renames], [name for _, name in renames]
    for was, name in renames:
        problem = ""
        if not _known(old, was):
            problem = f"the trained model has no {was!r}. It has {_some(old)}"
        elif not _known(new, name):
            problem = f"the new model has no {name!r}. It has {_some(new)}"
        elif sources.count(was) > 1:
            problem = f"{was!r} is mapped twice. Map it once"
        elif targets.count(name) > 1:
            problem = f"two names become {name!r}. Map one of them"
        elif name in {*old.tables, *old.features} and name not in sources:
            problem = f"the trained model has {name!r}, too. Map that to another name, or do not map {was!r}"
        if problem:
            yield Entry("option", words.renames.format(was, name), "refused", why=problem)


def _left_out_problems(old: ModelShape, new: ModelShape, left_out: tuple[str, ...], words: Words) -> Iterator[Entry]:
    for name in left_out:
        if not _known(old, name) and not _known(new, name):
            problem = f"neither model has {name!r}. The new one has {_some(new)}"
            yield Entry("option", words.without.format(name), "refused", why=problem)


def _some(shape: ModelShape) -> str:
    names = [*shape.tables, *shape.features] or list(shape.layers)
    return ", ".join(sorted(names)[:6]) + (", ..." if len(names) > 6 else "")


def _dense_features(old: ModelShape, new: ModelShape, names: _Names) -> Iterator[Entry]:
    """Yield dense features whose values are scaled in another way: the same weights would see other numbers."""
    for was, scale in old.dense.items():
        name = names.feature(was)
        if name in new.dense and new.dense[name] != scale:
            problem = f"its values are scaled in another way. Set the scale back, or {names.anew(name)}"
            yield Entry("feature", name, "refused", was, scale, new.dense[name], problem)


def _tables(old: ModelShape, new: ModelShape, names: _Names) -> Iterator[Entry]:
    sources: dict[str, list[TableShape]] = {}
    for table in old.tables.values():
        sources.setdefault(names.table(table), []).append(table)
    for name, table in new.tables.items():
        found = sources.pop(name, [])
        if names.leaves_table_out(table) or all(names.is_left_out(each.name) for each in found):
            yield Entry("table", name, "new", now=table.size)
            continue
        was = found[0]
        problem = "two tables become this one. Map one of them"
        if len(found) == 1:
            problem = _table_problem(was, table, names.anew(name))
        fate: Fate = "refused" if problem else _table_fate(was, table)
        why = problem or (
            "" if was.meaning and table.meaning else "whether values have the rows of before is not known"
        )
        yield Entry("table", name, fate, was.name, was.size, table.size, why)
    for found in sources.values():
        yield from (Entry("table", each.name, "dropped", each.name, each.size) for each in found)


def _table_fate(was: TableShape, table: TableShape) -> Fate:
    if table.num_rows != was.num_rows:
        return "moved" if table.has_ids else "grown"
    return "taken" if was.name == table.name else "renamed"


def _table_problem(was: TableShape, table: TableShape, anew: str) -> str:
    if was.dim != table.dim:
        return f"rows of {was.dim} numbers do not fit rows of {table.dim}. Keep the dim, or {anew}"
    if was.layout != table.layout:
        before, now = was.layout or f"{was.dim} factors", table.layout or f"{table.dim} factors"
        return f"its rows were {before}, and are {now} now: their numbers mean something else. {anew}"
    if was.has_ids != table.has_ids:
        before, now = ("any ids" if each.has_ids else "row numbers" for each in (was, table))
        return f"it took {before}, and takes {now} now: nobody knows which row an id had. {anew}"
    if was.meaning is not None and table.meaning is not None and was.meaning != table.meaning:
        return f"values became rows by {was.meaning}, and do by {table.meaning} now. Set the mapping back, or {anew}"
    if table.num_rows < was.num_rows and not table.has_ids:
        return f"{was.num_rows - table.num_rows:,} rows have no place. Give it {was.num_rows:,} rows, or {anew}"
    if table.num_rows > was.num_rows and not table.may_grow:
        return f"with more rows, values get others than before. Give it {was.num_rows:,} rows, or {anew}"
    return ""


def _layers(old: ModelShape, new: ModelShape, names: _Names) -> Iterator[Entry]:
    source = {names.layer(name): layer for name, layer in old.layers.items()}
    for name, layer in new.layers.items():
        was = None if names.is_left_out(name) else source.pop(name, None)
        if was is None or names.is_left_out(was.name):
            yield Entry("layer", name, "new", now=_size(layer))
            continue
        yield _layer(was, layer, names, same_arch=not (old.arch and new.arch) or old.arch == new.arch)
    for name, was in source.items():
        if name not in new.layers:
            yield Entry("layer", was.name, "dropped", was.name, _size(was))


def _layer(was: LayerShape, layer: LayerShape, names: _Names, *, same_arch: bool) -> Entry:
    sizes = was.name, _size(was), _size(layer)
    problem, places, zeros = "", list[Places | None](), list[tuple[int, ...]]()
    if len(was.size) != len(layer.size):
        problem = "it has another number of dimensions"
    elif not same_arch and (was.dims or layer.dims):
        problem = "what its columns stand for depends on model.arch, which is another one now"
    for dim in range(0 if problem else len(layer.size)):
        before, now = was.labels(dim), layer.labels(dim)
        if before is not None and now is not None:
            found, zero = _places(before, now, names.feature)
        elif was.size[dim] == layer.size[dim]:
            found, zero = None, ()
        else:
            why = "" if layer.dims else ": what its columns stand for is not known"
            problem = problem or f"dimension {dim}: got {layer.size[dim]} entries, needed {was.size[dim]}{why}"
            continue
        places.append(found)
        zeros.append(zero)
    if problem:
        why = f"{problem}. Set the model's sizes back, or {names.anew(layer.name)}"
        return Entry("layer", layer.name, "refused", *sizes, why)
    is_same = all(each is None for each in places)
    fate: Fate = "widened" if not is_same else "taken" if was.name == layer.name else "renamed"
    return Entry("layer", layer.name, fate, *sizes, places=tuple(places), zeros=tuple(zeros))


def _places(
    before: LabelledDim, now: LabelledDim, new_name: Callable[[str], str]
) -> tuple[Places | None, tuple[int, ...]]:
    """Return which entries of a dimension are taken to which places, None for all in their order; and those of a new
    input, which are 0: the layer then gives what it gave before."""
    place = _place_of(before, new_name, is_only=len(before.labels) == len(now.labels) == 1)
    pairs = [(place(label), number) for number, label in enumerate(now.labels) if place(label) is not None]
    if pairs == [(number, number) for number in range(len(before.labels))] and len(pairs) == len(now.labels):
        return None, ()
    taken = {number for _, number in pairs}
    rest = tuple(number for number in range(len(now.labels)) if number not in taken)
    sources = tuple(source for source, _ in pairs if source is not None)
    return (sources, tuple(number for _, number in pairs)), rest if now.is_input else ()


def _place_of(dim: LabelledDim, new_name: Callable[[str], str], *, is_only: bool) -> Callable[[Label], int | None]:
    """Return a function from a label of the new model to the entry of the old one. The one output may be renamed."""
    if is_only and not dim.is_input:
        return lambda _: 0
    places = {renamed(label, new_name): number for number, label in enumerate(dim.labels)}
    return places.get


def _size(layer: LayerShape) -> str:
    return " x ".join(map(str, layer.size)) or "number"


def _notes(old: ModelShape, new: ModelShape, names: _Names) -> Iterator[str]:
    for was, numbers in old.scales.items():
        name = names.feature(was)
        if name in new.scales and new.scales[name] != numbers and old.dense.get(was) == new.dense.get(name):
            yield f"Dense feature {name!r} is scaled by other numbers than before: {numbers} became {new.scales[name]}."
    if not (old.dense or old.sparse) or not (new.dense or new.sparse):
        yield "Features are not known on one side: tables and layers were matched by name and size alone."


def refusal(matching: Matching, title: str) -> str:
    """Return why a warm start is refused: all problems, a line each.

    >>> entry = Entry("table", "t_a", "refused", "t_a", "10 x 8", "10 x 4", "rows do not fit. Keep the dim")
    >>> print(refusal(Matching((entry,)), "runs/a"))
    runs/a does not fit this model, and nothing was taken:
      what       saved   now     problem
      table t_a  10 x 8  10 x 4  rows do not fit. Keep the dim
    """
    rows = [("what", "saved", "now", "problem")]
    rows += [(_what(entry), entry.saved, entry.now, entry.why) for entry in matching.refused]
    return "\n".join([f"{title} does not fit this model, and nothing was taken:", *_lines(rows)])


def summary(matching: Matching, title: str) -> str:
    """Return what a new model takes: everything that is not as it was, a line each, and how many are.

    >>> print(summary(Matching((Entry("table", "t_a", "taken"), Entry("layer", "over.bias", "taken"))), "runs/a"))
    From runs/a: 1 table taken; 1 layer taken.
    """
    counts: Counter[tuple[str, str]] = Counter((entry.kind, entry.fate) for entry in matching.entries)
    parts = [
        ", ".join(_counted(kind, fate, counts[kind, fate]) for fate in get_args(Fate) if counts[kind, fate])
        for kind in ("table", "layer")
    ]
    text = f"From {title}: {'; '.join(filter(None, parts)) or 'nothing'}."
    others = [entry for entry in matching.entries if entry.fate != "taken" or entry.why]
    if not others:
        return "\n".join([text, *matching.notes])
    rows = [("what", "saved", "now", "", "")]
    rows += [(_what(entry), entry.saved, entry.now, _fate(entry), entry.why) for entry in others]
    return "\n".join([text, *_lines(rows), *matching.notes])


def _what(entry: Entry) -> str:
    return entry.name if entry.kind == "option" else f"{entry.kind} {entry.name}"


def _fate(entry: Entry) -> str:
    return f"{entry.fate}, was {entry.was}" if entry.was not in ("", entry.name) else entry.fate


def _counted(kind: str, fate: str, count: int) -> str:
    return f"{count} {kind}{'' if count == 1 else 's'} {fate}"


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    padded = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    return [f"  {line}".rstrip() for line in padded]
