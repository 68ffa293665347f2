"""The examples in docstrings work, and every public name has one."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
FILES = sorted((PROJECT / "embershard").rglob("*.py"))
ROOMS = [file for file in FILES if file.name == "__init__.py" and "__all__" in file.read_text(encoding="utf-8")]

# Public names that still need an example. Remove yours once it has one; add none.
WITHOUT_EXAMPLE = {
    "embershard.CacheConfig",
    "embershard.CachedEmbeddingCollectionSharder",
    "embershard.LookAheadPipeline",
    "embershard.TableStats",
    "embershard.cache.CacheConfig",
    "embershard.cache.CachePlan",
    "embershard.cache.CachePlanner",
    "embershard.cache.HostStore",
    "embershard.cache.KnownBatch",
    "embershard.cache.NextUseIndex",
    "embershard.cache.RowCache",
    "embershard.cache.SlotMap",
    "embershard.cache.TableStats",
    "embershard.cache.Ticket",
    "embershard.cache.make_scores",
    "embershard.cache_stats",
    "embershard.flush",
    "embershard.host_rows_changed",
    "embershard.pipeline.LookAheadPipeline",
    "embershard.pipeline.LookAheadStats",
    "embershard.plan_sharding",
    "embershard.sharding.torchrec.CachedEmbeddingCollectionSharder",
    "embershard.sharding.torchrec.StockEmbeddingBagCollectionSharder",
    "embershard.sharding.torchrec.cache_stats",
    "embershard.sharding.torchrec.cached_embeddings",
    "embershard.sharding.torchrec.flush",
    "embershard.sharding.torchrec.host_rows_changed",
    "embershard.sharding.torchrec.plan_sharding",
    "embershard.sharding.torchrec.pools_by_module",
}


def module_name(file: Path) -> str:
    parts = file.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def examples(file: Path) -> int:
    return len(re.findall(r"^\s*>>> ", file.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.mark.parametrize("file", [file for file in FILES if examples(file)], ids=module_name)
def test_the_examples_work(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In an empty folder. No example escapes: doctest finds as many as the file shows."""
    monkeypatch.chdir(tmp_path)
    tests = doctest.DocTestFinder().find(importlib.import_module(module_name(file)))
    assert sum(len(test.examples) for test in tests) == examples(file)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    output: list[str] = []
    for test in tests:
        runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)


@pytest.mark.parametrize("file", ROOMS, ids=module_name)
def test_every_public_name_has_an_example(file: Path):
    """Constants and warnings excepted."""
    room = importlib.import_module(module_name(file))
    without = []
    for name in room.__all__:
        thing = getattr(room, name)
        is_excepted = not callable(thing) or (isinstance(thing, type) and issubclass(thing, Warning))
        if not is_excepted and ">>> " not in (thing.__doc__ or ""):
            without.append(f"{room.__name__}.{name}")
    assert sorted(set(without) - WITHOUT_EXAMPLE) == []
