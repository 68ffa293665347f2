"""Files as people's programs write them: one table in dialects that a number decides; and what must become of each.

`python -m tests.unit.data.dialects 500` tries so many, and says which were refused and which read wrongly. With
`--train` it trains ten steps on each, too, with the losses of the clean file.
"""

from __future__ import annotations

import argparse
import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import random
import sys
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from embershard.commands import cli
from embershard.data import DataConfig, open_source
from embershard.data.block import Block
from embershard.data.sources.source import FileSource
from embershard.data.text_form import TextForm
from embershard.distributed import Ranks, process_group
from embershard.settings.files import load_config
from embershard.training.config import RunConfig
from embershard.training.reports import TrainReport
from embershard.training.trainer import Trainer

STEPS = 10
NAMES = ("click", "user_id", "age", "price", "city", "seen", "tags")
_CITIES = {"utf-8": "Köln Praha 北京 Łódź Paris", "latin-1": "Köln Málaga Paris", "gb18030": "北京 上海 Paris"}
_TIMES = ("2026-01-{:02} 10:00:00", "2026-01-{:02}T10:00:00", "2026-01-{:02}", "17672{:02}000")
_COMPRESSED = {
    "": lambda data: data,
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zip": lambda data: _zipped(data),
}


def _zipped(data: bytes) -> bytes:
    with io.BytesIO() as kept:
        with zipfile.ZipFile(kept, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("data.csv", data)
        return kept.getvalue()


@dataclass(frozen=True)
class Dialect:
    """How a file is written. `told`: the options that `inspect` needs, since the file does not show it."""

    separator: str = ","
    quoting: str = "minimal"
    encoding: str = "utf-8"
    mark: bytes = b""
    missing: str = ""
    line_end: str = "\n"
    header: bool = True
    suffix: str = ""
    list_separator: str = "|"
    time: str = _TIMES[0]
    titles: int = 0
    breaks: bool = False
    parts: int = 1
    told: tuple[str, ...] = ()

    @staticmethod
    def of(seed: int) -> Dialect:
        draw = random.Random(seed)
        separator = draw.choice([",", ",", "\t", ";", "|", "::", "^", "\x01"])
        encoding, mark = draw.choice(
            [("utf-8", b"")] * 4 + [("utf-8", b"\xef\xbb\xbf"), ("utf-16", b""), ("utf-16-le", b"")]
            + [("latin-1", b""), ("cp1252", b""), ("gb18030", b"")]
        )  # fmt: skip
        quoting = draw.choice(["minimal", "minimal", "all", "escape", "none"])
        breaks, header = quoting != "none" and draw.random() < 0.2, draw.random() < 0.8
        told = []
        if encoding in ("latin-1", "cp1252", "gb18030"):
            told += ["--encoding", encoding]
        if not header:
            told += ["--columns", ",".join(NAMES)]
        return Dialect(
            separator=separator,
            quoting=quoting,
            encoding=encoding,
            mark=mark,
            missing=draw.choice(["", "", "NA", "null", "\\N", "NaN"]),
            line_end=draw.choice(["\n", "\n", "\r\n", "\n" if breaks else "\r"]),
            header=header,
            suffix=draw.choice(list(_COMPRESSED)),
            list_separator=draw.choice([each for each in "|;^" if each != separator]),
            time=draw.choice(_TIMES),
            titles=draw.choice([0, 0, 0, 2]) if header and not breaks else 0,
            breaks=breaks,
            parts=draw.choice([1, 1, 3]),
            told=tuple(told),
        )

    def text(self, rows: list[list[str]], *, header: bool) -> bytes:
        lines = ["# an export", "# of clicks"][: self.titles]
        lines += [self.line(cells) for cells in ([list(NAMES)] if header else []) + rows]
        text = "".join(line + self.line_end for line in lines)
        return _COMPRESSED[self.suffix](self.mark + text.encode(self.encoding))

    def line(self, cells: list[str]) -> str:
        return self.separator.join(map(self.cell, cells))

    def cell(self, cell: str) -> str:
        if self.quoting == "none":
            return cell
        if self.quoting == "all" or any(each in cell for each in (self.separator, '"', "\n", "\r", "\\")):
            inner = cell.replace('"', '""')
            if self.quoting == "escape":
                inner = cell.replace("\\", "\\\\").replace('"', '\\"')
            return f'"{inner}"'
        return cell


CLEAN = Dialect()


def rows_of(dialect: Dialect, count: int = 60) -> list[list[str]]:
    """Return cells; a missing one is None."""
    cities = _CITIES.get(dialect.encoding, _CITIES["latin-1" if dialect.encoding == "cp1252" else "utf-8"]).split()
    rows = []
    for n in range(count):
        city = cities[n % len(cities)]
        if dialect.quoting != "none" and n % 3 == 0:
            city = f'{city}{dialect.separator} "old" town'
        if dialect.breaks and n % 5 == 1:
            city = f"{city}\nby the sea"
        tags = dialect.list_separator.join(f"t{(n * k) % 7}" for k in range(1, 2 + n % 3))
        price = None if n % 11 == 5 else f"{n * 0.25}"
        rows.append([str(n % 2), f"u{n % 13}", str(20 + n % 30), price, city, dialect.time.format(10 + n % 19), tags])
    return rows


def write(folder: Path, dialect: Dialect, rows: list[list[str]], name: str = "data") -> Path:
    """Write rows as a file, or as parts in a folder, and return its path."""
    rows = [[dialect.missing if cell is None else cell for cell in row] for row in rows]
    if dialect.parts == 1:
        path = folder / f"{name}.csv{dialect.suffix}"
        path.write_bytes(dialect.text(rows, header=dialect.header))
        return path
    (folder / name).mkdir()
    step = -(-len(rows) // dialect.parts)
    for part in range(dialect.parts):
        path = folder / name / f"part-{part}.csv{dialect.suffix}"
        path.write_bytes(dialect.text(rows[part * step : (part + 1) * step], header=dialect.header))
    return folder / name


def write_json(path: Path, rows: list[list[str]], list_separator: str) -> Path:
    """Write rows as JSON lines: numbers as numbers, and lists as lists."""
    typed = [
        dict(zip(NAMES, (int(a), b, int(c), d and float(d), e, f, g.split(list_separator)), strict=True))
        for a, b, c, d, e, f, g in rows
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in typed))
    return path


def samples(config: DataConfig) -> Block:
    """Return all samples of a source, in the files' order."""
    source = open_source(replace(config, eval_fraction=0.0))
    assert isinstance(source, FileSource)
    return Block.join([source.parse(number).samples for number in range(source.num_physical)])


def same(one: Block, other: Block) -> bool:
    pairs = zip((one.dense, one.labels, *one.values), (other.dense, other.labels, *other.values), strict=True)
    lengths = all(np.array_equal(a, b) for a, b in zip(one.lengths, other.lengths, strict=True))
    return lengths and all(np.array_equal(a, b) for a, b in pairs)


def inspected(path: Path, *options: str) -> tuple[int, str, DataConfig | None]:
    """Run `data inspect`; return the exit code, what it said on stderr, and the settings that it wrote."""
    settings = path.parent / f"{path.name}.toml"
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = cli.main(["data", "inspect", str(path), "-o", str(settings), *options])
    return code, errors.getvalue(), load_config(RunConfig, settings).data if code == 0 else None


def clean_config(config: DataConfig, path: Path) -> DataConfig:
    """Return settings of the same features, for the clean file."""
    plain = {name: getattr(TextForm(), name) for name in vars(TextForm())}
    return replace(config, path=str(path), table=replace(config.table, **plain))


def losses(path: Path, config: DataConfig, ranks: Ranks) -> list[float]:
    """Train a run of the settings that `inspect` wrote, but for `config`, for `STEPS` steps; return their losses."""
    steps = [f"train.max_steps={STEPS}", "train.log_every=1", "train.early_stopping=none"]
    saves = ["checkpoint.at_end=false", "checkpoint.keep_best=none"]
    run = load_config(RunConfig, path.parent / f"{path.name}.toml", [*steps, *saves])
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(replace(run, data=replace(config, num_workers=0)), ranks, Path(folder))
        found = [report.loss for report in trainer.train() if isinstance(report, TrainReport)]
        trainer.close()
    return found


def tried(seed: int, folder: Path, ranks: Ranks | None = None) -> str:
    """Return "" where the samples of a dialect and, with `ranks`, the losses of a training on them are those of the
    clean file; else what went wrong."""
    dialect = Dialect.of(seed)
    rows = rows_of(dialect)
    path = write(folder, dialect, rows)
    clean_path = write(folder, replace(CLEAN, parts=dialect.parts), rows, "clean")
    code, said, config = inspected(path, *dialect.told)
    if config is None:
        return f"refused ({code}): {said.strip()}"
    clean = clean_config(config, clean_path)
    clean = replace(clean, table=replace(clean.table, line_breaks=dialect.breaks))
    found, expected = samples(config), samples(clean)
    if found.num_samples != len(rows):
        return f"{found.num_samples} of {len(rows)} rows"
    if not same(found, expected):
        return "other samples"
    if ranks is None:
        return ""
    trained = losses(path, config, ranks)
    return "" if len(trained) == STEPS and trained == losses(path, clean, ranks) else f"other losses: {trained}"


def main(count: int, *, train: bool) -> int:
    """Try so many dialects; return how many went wrong."""
    wrong = 0
    with process_group("cpu") if train else contextlib.nullcontext() as ranks:
        for seed in range(count):
            with tempfile.TemporaryDirectory() as name:
                os.environ["EMBERSHARD_COPIES"] = f"{name}/copies"
                if problem := tried(seed, Path(name), ranks):
                    wrong += 1
                    print(seed, problem, Dialect.of(seed), sep="\n    ", flush=True)
    what = "samples and losses" if train else "samples"
    print(f"{count - wrong} of {count} dialects give the {what} of the clean file")
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--train", action="store_true")
    arguments = parser.parse_args()
    sys.exit(bool(main(arguments.count, train=arguments.train)))
