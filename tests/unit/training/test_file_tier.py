"""Runs whose host rows are in a file: the bits of rows in memory, whatever the memory, the reads ahead, their delays,
the saves and the stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embershard.cache import CacheConfig
from embershard.cache.file import filed_rows, places
from embershard.cache.file.file_counts import FileCounts
from embershard.cache.file.file_part import FilePart
from embershard.cache.file.file_rows import FileRows, FileWork, PageIo
from embershard.cache.file.filed_rows import FiledRows
from embershard.cache.next_use import KnownBatch
from embershard.data import open_source
from embershard.distributed import CheckpointConfig, Manifest, Ranks, Supervision, complete_checkpoints
from embershard.errors import CacheError, ConfigError
from embershard.extras.verify.equivalence import _tensors_of, compare_with_stock
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.config import ShardingConfig
from embershard.sharding.torchrec import cache_stats, cached_embeddings, flush
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.fit.model_size import table_rows
from embershard.training.optimizers import EmbeddingOptimizerConfig
from embershard.training.trained_run import Scorer, open_trained
from embershard.training.trainer import Trainer
from tests.covering import keep, matrix
from tests.disks import BrokenIo, FlippingIo, SlowIo
from tests.small_runs import small_data, small_run

STEPS = 42
#: Of 26 tables of 4 columns, under row-wise Adagrad.
_ROW_BYTES = 20

Found = dict[str, Any]


def make_config(
    folder: Path, share: float = 0.08, lookahead: int = 12, every_steps: int | None = None, **cache: Any
) -> RunConfig:
    """`share` of the rows are in memory; 1: all of them, and no file."""
    data = small_data(3000, scale=0.0004)
    num_rows = sum(table_rows(small_run(data=data)).values())
    of_file = {"host": "file", "host_dir": str(folder / "rows"), "host_bytes": int(share * num_rows * _ROW_BYTES)}
    return small_run(
        data=data,
        cache=CacheConfig(**{"ratio": 0.025, **(of_file if share < 1 else {}), **cache}),
        look_ahead=LookAheadConfig(lookahead, 2),
        train=TrainConfig(batch_size=30, max_steps=STEPS),
        checkpoint=CheckpointConfig(every_steps=every_steps, at_end=False, keep_last=9),
    )


def trained(config: RunConfig, ranks: Ranks, folder: Path | None = None, start: Path | None = None) -> Found:
    """All weights and states after the run, from a checkpoint on if there is one."""
    trainer = Trainer(config, ranks, folder)
    if start is not None:
        trainer.resume(start)
    for _ in trainer.train():
        pass
    trainer.close()
    found = {name: part.tensor.clone() for name, part in _tensors_of(trainer).items()}
    found["evictions"] = torch.tensor(sum(table.evictions for table in cache_stats(trainer.model)))
    for pool in cached_embeddings(trainer.model):
        if isinstance(pool.host, FiledRows):
            found["counts"] = pool.host.counts
    return found


def assert_same(one: Found, other: Found) -> None:
    names = [name for name in one if name not in ("evictions", "counts")]
    assert names == [name for name in other if name not in ("evictions", "counts")]
    assert not [name for name in names if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def in_memory(ranks: Ranks) -> Found:
    """What the runs of `make_config` train, with all rows in memory."""
    return trained(make_config(Path("."), 1), ranks)


def use_io(monkeypatch: pytest.MonkeyPatch, make_io: Callable[[], PageIo]) -> None:
    """Read and write the files of all tables this way."""

    def make(*arguments: Any, **names: Any) -> FileRows:
        return FileRows(*arguments, **{**names, "io": make_io()})

    monkeypatch.setattr(filed_rows, "FileRows", make)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", keep(["adagrad"], ["sgd", "adagrad", "rowwise_adagrad"]))
def test_the_cache_equals_stock_torchrec(ranks: Ranks, tmp_path: Path, optimizer: Any) -> None:
    config = replace(make_config(tmp_path), embedding_optimizer=EmbeddingOptimizerConfig(optimizer, lr=0.1))
    config = replace(config, cache=replace(config.cache, host_bytes=3 * config.cache.host_bytes))  # states of a weight
    verdict = compare_with_stock(config, ranks, 16)
    assert verdict.is_equal
    assert verdict.caches[0].evictions > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "filed"),
    [(0.06, 1), (0.5, 8), matrix(0.06, 8), matrix(0.1, 1), matrix(0.1, 8), matrix(0.5, 1)],
)
def test_the_result_is_that_of_rows_in_memory(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: Found, share: float, filed: int
) -> None:
    """Whatever part of the rows is in memory, however early they are read and however long that takes."""
    monkeypatch.setattr(FilePart, "num_coming", filed)
    use_io(monkeypatch, SlowIo)
    found = trained(make_config(tmp_path, share), ranks)
    counts = found["counts"]
    if share < 0.5:  # which holds all rows that are used
        assert counts.rows_written > 500
        assert counts.rows_read > 200
    assert found["evictions"] > 1000
    assert_same(found, in_memory)


@pytest.mark.matrix
@pytest.mark.parametrize("lookahead", keep([40], [40, 12]))
def test_a_deep_window_changes_no_bit(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: Found, lookahead: int
) -> None:
    """Nor do saves with such batches ahead, and runs that go on from one. Fewer rows are read."""
    use_io(monkeypatch, SlowIo)
    config = make_config(tmp_path, 0.06, lookahead, every_steps=25)
    found = trained(config, ranks, tmp_path / "run")
    assert_same(found, in_memory)
    assert found["evictions"] > 1000
    for checkpoint in complete_checkpoints(tmp_path / "run"):
        assert_same(trained(config, ranks, None, checkpoint), in_memory)
    less = trained(make_config(tmp_path, 0.06, 3), ranks)
    assert_same(less, in_memory)
    assert 200 < found["counts"].rows_read < less["counts"].rows_read


def pin_without_wait(rows: FiledRows, keys: Tensor, known: KnownBatch | None) -> None:
    """As `bring_in`, but for reads that are not awaited."""
    rows._works, rows._reading = {}, []
    right_bring_in(rows, keys, known)


right_bring_in = FiledRows.bring_in


def write_nothing(rows: FileRows, keys: Tensor, tables: Any, places: Tensor) -> FileWork:
    """As `write`, but for contents: as if a place were used again before its row was copied."""
    for table in tables:
        table.data[places] = 0
    return right_write(rows, keys, tables, places)


right_write = FileRows.write


def read_the_file(rows: FileRows, keys: Tensor, tables: Any, places: Tensor) -> FileWork:
    """As `read`, but past what is still being written."""
    writing, rows._writing = rows._writing, ()
    work = right_read(rows, keys, tables, places)
    rows._writing = writing
    return work


right_read = FileRows.read


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (FiledRows, "bring_in", pin_without_wait),
        matrix(FileRows, "write", write_nothing),
        matrix(FileRows, "read", read_the_file),
    ],
    ids=["a late read is not awaited", "a place is used too early", "no wait for a write in flight"],
)
def test_what_is_done_wrongly_is_seen(
    ranks: Ranks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    in_memory: Found,
    owner: type,
    name: str,
    fault: Any,
) -> None:
    use_io(monkeypatch, lambda: SlowIo(most_seconds=0.1))
    monkeypatch.setattr(owner, name, fault)
    monkeypatch.setattr(FileRows, "_sums_of", lambda rows, memory, places: 0)  # which see the last one, too
    found = trained(make_config(tmp_path, 0.06), ranks)
    with pytest.raises(AssertionError):
        assert_same(found, in_memory)


@pytest.mark.slow
@pytest.mark.matrix  # a further fault of such a kind
def test_a_victim_that_is_on_the_device_is_noticed(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place is another row's when it is to be written back."""
    monkeypatch.setattr(places, "_PINNED", 0)
    with pytest.raises((AssertionError, CacheError)):
        trained(make_config(tmp_path, 0.06), ranks)


@pytest.mark.matrix
@pytest.mark.parametrize("every", [4, matrix(1)])
def test_saves_while_rows_move_are_those_of_rows_in_memory(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """Checkpoints are read beside the training; a run goes on from one in memory, and one of memory in a file."""
    use_io(monkeypatch, SlowIo)
    saving, plain = make_config(tmp_path, 0.06, every_steps=7), make_config(tmp_path, 1, every_steps=7)
    whole = trained(saving, ranks, tmp_path / "file")
    assert_same(whole, trained(plain, ranks, tmp_path / "memory"))
    of_file, of_memory = (complete_checkpoints(tmp_path / name) for name in ("file", "memory"))
    assert len(of_file) == len(of_memory) == STEPS // 7
    for one, other in list(zip(of_file, of_memory, strict=True))[every - 1 :: every]:
        assert_same(whole, trained(plain, ranks, None, one))
        assert_same(whole, trained(saving, ranks, None, other))


@pytest.mark.slow
def test_saves_of_what_changed_have_it(ranks: Ranks, tmp_path: Path) -> None:
    config = make_config(tmp_path, 0.08, every_steps=5)
    config = replace(config, checkpoint=replace(config.checkpoint, full_every=9))
    whole = trained(config, ranks, tmp_path / "run")
    last = tmp_path / "run" / "step_20"
    assert Manifest.read(last).parent is not None
    assert_same(whole, trained(config, ranks, start=last))
    assert_same(whole, trained(make_config(tmp_path, 1), ranks, start=last))


@pytest.mark.slow
@pytest.mark.parametrize("works", keep([30], [0, 1, 7, 30]))
def test_a_broken_disk_ends_the_run_and_leaves_the_checkpoint(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: Found, works: int
) -> None:
    config = make_config(tmp_path, 0.06, every_steps=4)
    with monkeypatch.context() as patch:
        use_io(patch, lambda: BrokenIo(works, 5))
        with pytest.raises(CacheError, match=r"cache.host_dir=.*could not be (read|written).*the disk failed.*resume"):
            trained(config, ranks, tmp_path / "run")
    for checkpoint in complete_checkpoints(tmp_path / "run"):
        assert_same(in_memory, trained(config, ranks, None, checkpoint))


@pytest.mark.slow
@pytest.mark.parametrize("works", keep([30], [0, 30]))
def test_a_disk_that_changes_bits_ends_the_run_and_leaves_the_checkpoint(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: Found, works: int
) -> None:
    """Neither a step nor a save takes a row of such a page."""
    config = make_config(tmp_path, 0.06, every_steps=4)
    with monkeypatch.context() as patch:
        use_io(patch, lambda: FlippingIo(works))
        with pytest.raises(CacheError, match=r"page \d+ of a file.*row.* of table 't.*not what was written.*resume"):
            trained(config, ranks, tmp_path / "run")
    for checkpoint in complete_checkpoints(tmp_path / "run"):
        assert_same(in_memory, trained(config, ranks, None, checkpoint))


@pytest.mark.slow
@pytest.mark.matrix
def test_bits_that_change_would_train(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: Found
) -> None:
    """The control: without sums the run ends as if nothing had happened, with other weights."""
    use_io(monkeypatch, lambda: FlippingIo(30))
    monkeypatch.setattr(FileRows, "_sums_of", lambda rows, memory, places: 0)
    found = trained(make_config(tmp_path, 0.06), ranks)
    with pytest.raises(AssertionError):
        assert_same(found, in_memory)


@pytest.mark.matrix
def test_a_run_is_scored_from_its_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    config = make_config(tmp_path, every_steps=STEPS)
    trained(config, ranks, tmp_path / "run")
    quality = []
    for used in (config, make_config(tmp_path, 1)):
        scorer = Scorer(open_trained(used, tmp_path / "run", ranks), open_source(config.data), ranks, Supervision())
        quality.append(scorer.evaluate().quality)
    assert quality[0] == quality[1]


@pytest.mark.matrix
def test_what_was_read_is_told(ranks: Ranks, tmp_path: Path) -> None:
    trainer = Trainer(make_config(tmp_path, 0.06), ranks)
    for _ in trainer.train():
        pass
    files = trainer.of_parts(lambda part: part.result())["look_ahead"].files
    trainer.close()
    assert isinstance(files, FileCounts)
    assert 0 < files.pages_read <= files.rows_read


@pytest.mark.slow
def test_rows_in_a_file_are_not_read_as_zeros(ranks: Ranks, tmp_path: Path) -> None:
    trainer = Trainer(make_config(tmp_path), ranks)
    for read in (trainer.model.state_dict, lambda: flush(trainer.model)):
        with pytest.raises(CacheError, match=r'rows are kept in a file \(cache.host = "file"\): they would read as'):
            read()
    trainer.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": TrainConfig(init="torchrec")}, 'train.init: got "torchrec", needed "counter" with cache.host = "fi'),
        (
            {"sharding": ShardingConfig(mode="data_parallel")},
            'sharding.mode: got "data_parallel", needed "sharded" with',
        ),
        ({"look_ahead": LookAheadConfig(0)}, "look_ahead.lookahead: got 0, needed 1 or more with cache.host"),
    ],
)
def test_settings_that_know_only_rows_in_memory_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(make_config(tmp_path), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_bytes": None}, r'got no cache.host_bytes with cache.host="file"'),
        ({"host": "mmap"}, r'got cache.host_bytes=\d+ with cache.host="mmap"'),
        ({"host_bytes": 0}, "cache.host_bytes must be positive, got 0"),
        ({"host_dir": None}, 'cache.host="file" needs cache.host_dir'),
        ({"policy": "lru"}, 'cache.policy: got .lru. with cache.host="file", needed "lookahead"'),
        ({"transfer": "staged"}, 'cache.transfer: got .staged. with cache.host="file", needed the default'),
        ({"host_dtype": "fp16"}, "cache.host_dtype: got .fp16. with cache.host="),
    ],
)
def test_settings_of_files_that_contradict_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(make_config(tmp_path).cache, **changes)


@pytest.mark.slow
def test_too_little_memory_is_told_before_the_training(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cache.host_bytes=\d+ holds \d+ rows .* Give rank 0 at least \d+ bytes"):
        Trainer(make_config(tmp_path, 0.03), ranks)
