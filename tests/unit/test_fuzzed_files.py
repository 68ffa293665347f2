"""Damaged files of every kind that embershard reads: each is read, or refused by one of our own errors in one line."""

from __future__ import annotations

import gzip
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embershard.commands import cli
from embershard.commands.data.scan import scan_data
from embershard.data import AvazuConfig, CriteoConfig, DataConfig, ParquetConfig, open_source
from embershard.data.sources.avazu import HASHED
from embershard.data.sources.source import FileSource
from embershard.errors import DataError, EmbershardError
from embershard.frequency import FrequencyProfile
from embershard.planning.cost.topology import load_topology, save_topology
from embershard.settings.decoding import to_toml
from embershard.settings.files import load_config
from embershard.sharding.plan import Plan
from embershard.training.config import RunConfig
from tests.covering import matrix
from tests.unit.planning.runs import predicted_plan, result_of
from tests.unit.sharding.plans import small_plan

#: 8 kinds: 1,520 files in all, as many as were tried when none crashed.
FILES_PER_KIND = 190


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Return the content after one to three changes: bits, ranges, ends, and texts that parsers stumble over."""
    changed = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        place = chance.randrange(len(changed)) if changed else 0
        length = chance.choice([1, 2, 8, 64])
        match chance.randrange(6):
            case 0 if changed:
                changed[place] ^= 1 << chance.randrange(8)
            case 1:
                del changed[place:]
            case 2:
                del changed[place : place + length]
            case 3:
                changed[place:place] = changed[: 4 * length]
            case 4:
                changed[place : place + length] = chance.randbytes(length)
            case _:
                stumbles = [
                    b"\0",
                    b"\xff\xfe",
                    b"1e999",
                    b"-1",
                    b"NaN",
                    b"[" * 300,
                    b"\r\n",
                    b'"',
                    b"9" * 30,
                    b"\t",
                    b"{}",
                ]
                changed[place : place + length] = chance.choice(stumbles)
    return bytes(changed)


def criteo_lines() -> bytes:
    lines = ["\t".join([str(row % 2), *[str(row)] * 13, *[f"{row * 7919:x}"] * 26]) for row in range(12)]
    return ("\n".join(lines) + "\n").encode()


def scan(config: DataConfig) -> None:
    source = open_source(config)
    assert isinstance(source, FileSource)
    found = scan_data(source, num_threads=1)
    assert found.num_bad <= found.num_train + found.num_held_out
    if found.damage or found.num_bad:
        raise DataError("".join(found.damage + [str(row) for row in found.first.values()]))


def read_criteo(path: Path) -> None:
    rows = CriteoConfig(num_rows=50)
    scan(DataConfig("criteo", str(path), chunk_rows=4, bad_rows=0.5, num_workers=1, criteo=rows))


def read_avazu(path: Path) -> None:
    scan(DataConfig("avazu", str(path), chunk_rows=4, bad_rows=0.5, num_workers=1, avazu=AvazuConfig(num_rows=50)))


def read_parquet(path: Path) -> None:
    columns = ParquetConfig(dense=("age",), sparse=("user", "seen"), num_rows=(9, 99), max_bag_size=100)
    scan(DataConfig("parquet", str(path), bad_rows=0.5, parquet=columns))


def read_profile(path: Path) -> None:
    profile = FrequencyProfile.load(path)
    for name in profile.tables:
        profile.sparse(name)


def read_result(path: Path) -> None:
    cli.main(["report", str(path.parent)])


def make_criteo(path: Path) -> None:
    path.write_bytes(criteo_lines())


def make_avazu(path: Path) -> None:
    columns = ("id", "click", "hour", *HASHED)
    lines = [",".join([str(row), str(row % 2), f"141021{row:02d}", *[f"{row * 7919:x}"] * 21]) for row in range(12)]
    path.write_text("\n".join([",".join(columns), *lines, ""]))


def make_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(criteo_lines(), mtime=0))


def make_parquet(path: Path) -> None:
    table = pa.table({
        "label": [0, 1] * 20, "age": [float(row) for row in range(40)], "user": list(range(40)),
        "seen": [[row] * (row % 4) for row in range(40)],
    })  # fmt: skip
    pq.write_table(table, path, row_group_size=10)


def make_settings(path: Path) -> None:
    path.write_text(to_toml(RunConfig()))


def make_a_plan(path: Path) -> None:
    small_plan().save(path)


def make_profile(path: Path) -> None:
    FrequencyProfile.count([{"a": torch.tensor([3, 0, 5])}, {"b": torch.tensor([1])}], {"a": 9, "b": 2}).save(path)


def make_topology(path: Path) -> None:
    save_topology(load_topology("cpu"), path)


def make_result(path: Path) -> None:
    path.write_text(json.dumps(result_of(predicted_plan())))


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], object]]] = {
    "day_0": (make_criteo, read_criteo),
    "day_0.gz": (make_gzip, read_criteo),
    "train.csv": (make_avazu, read_avazu),
    "a.parquet": (make_parquet, read_parquet),
    "run.toml": (make_settings, lambda path: load_config(RunConfig, path)),
    "plan.json": (make_a_plan, Plan.load),
    "profile.npz": (make_profile, read_profile),
    "machine.toml": (make_topology, lambda path: load_topology(str(path))),
    "result.json": (make_result, read_result),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"), [(name, 30) for name in KINDS] + [matrix(name, FILES_PER_KIND) for name in KINDS]
)
def test_a_damaged_file_is_read_or_refused(name: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make, read = KINDS[name]
    path, chance = tmp_path / name, random.Random(name)
    make(path)
    read(path)  # as it is, it is fine
    content, said = path.read_bytes(), []
    for _ in range(count):
        path.write_bytes(damaged(content, chance))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read(path)
        except EmbershardError as error:
            said.append(str(error))
    said += capsys.readouterr().err.splitlines()
    assert [text for text in said if not text or "\n" in text or "Traceback" in text] == []
    assert len(said) > count // 20
