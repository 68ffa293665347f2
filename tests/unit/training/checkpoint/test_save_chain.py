"""Saves of what changed, on one rank: which are deltas, and that rows of saves that failed are in the next one."""

from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from embershard.cache import CacheConfig
from embershard.commands.ckpt import differences
from embershard.distributed import CheckpointConfig, Manifest, Ranks, complete_checkpoints
from embershard.distributed.checkpoint import digests
from embershard.errors import ConfigError
from embershard.extras.serving.write import export_base
from embershard.sharding.torchrec import flush, host_rows_changed
from embershard.sharding.torchrec.inspection import cached_embeddings
from embershard.training.checkpoint import save_chain
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.reports import FailedSaveReport, Report, SaveReport
from embershard.training.trainer import Trainer
from tests.covering import keep, matrix
from tests.small_runs import small_run

pytestmark = pytest.mark.slow  # whole training runs


def config(steps: int = 8, full_every: int = 4, **checkpoint: Any) -> RunConfig:
    values = {"every_steps": 1, "at_end": False, "keep_last": 99, "on_failed_save": "continue", "asynchronous": False}
    return small_run(
        cache=CacheConfig(ratio=0.3, policy="lru"),
        train=TrainConfig(batch_size=20, max_steps=steps, log_every=1, device="cpu"),
        checkpoint=CheckpointConfig(**{**values, "full_every": full_every, **checkpoint}),
    )


def train(trainer: Trainer, folder: Path) -> list[Report]:
    """Train, with a whole save of the same state beside each; the reports of saves."""
    found = []
    for report in trainer.train():
        if isinstance(report, SaveReport):
            trainer.prepare_save(folder / "whole").write(trainer.ranks)
        if isinstance(report, (SaveReport, FailedSaveReport)):
            found.append(report)
    trainer.close()
    return found


def parents(folder: Path) -> dict[int, int | None]:
    """The step that each save follows."""
    manifests = [Manifest.read(path) for path in complete_checkpoints(folder)]
    return {each.step: None if each.parent is None else each.parent.step for each in manifests}


def reasons(reports: list[Report]) -> dict[int, str]:
    """Why saves are whole, by step."""
    return {each.step: each.why_whole for each in reports if isinstance(each, SaveReport) and each.why_whole}


def different(folder: Path, name: str = "chain") -> list[str]:
    found = []
    for saved in complete_checkpoints(folder / name):
        found += [f"{saved.name} {row[0]}" for row in differences(saved, folder / "whole" / saved.name)]
    return [each for each in found if not each.endswith(" run")]


def failing(*steps: int) -> Any:
    """Saves of these steps meet a full disk, in their last file of rows or tensors."""
    write = digests._DigestedFile._write

    def full(file: Any, view: memoryview) -> None:
        if any(f"/step_{step}.tmp/" in str(file.name) for step in steps):
            raise OSError(28, "No space left on device")
        write(file, view)

    return mock.patch.object(digests._DigestedFile, "_write", full)


@pytest.mark.matrix
def test_one_of_so_many_is_whole(ranks: Ranks, tmp_path: Path):
    reports = train(Trainer(config(), ranks, tmp_path / "chain"), tmp_path)
    assert parents(tmp_path / "chain") == {1: None, 2: 1, 3: 2, 4: 3, 5: None, 6: 5, 7: 6, 8: 7}
    assert reasons(reports) == {1: "the first one", 5: "one of 4 is"}
    assert reports[4].line().endswith("; whole: one of 4 is)")
    assert different(tmp_path) == []


@pytest.mark.parametrize("failed", [(3, 4), matrix((3,)), matrix((1,)), matrix((5,)), matrix((2, 3, 4, 5))])
def test_rows_of_a_save_that_failed_are_in_the_next(ranks: Ranks, tmp_path: Path, failed: tuple[int, ...]):
    with failing(*failed):
        reports = train(Trainer(config(), ranks, tmp_path / "chain"), tmp_path)
    assert {each.step for each in reports if isinstance(each, FailedSaveReport)} == set(failed)
    found = parents(tmp_path / "chain")
    assert sum(parent is not None for parent in found.values()) >= 2
    assert set(reasons(reports)) == {step for step, parent in found.items() if parent is None}
    if failed == (1,):
        assert reasons(reports)[2] == "the save before it was not written"
    assert different(tmp_path) == []


@pytest.mark.matrix
def test_without_them_the_next_one_would_lack_rows(ranks: Ranks, tmp_path: Path):
    def forget(chain: save_chain.SaveChain) -> None:
        chain._open = None

    with failing(3), mock.patch.object(save_chain.SaveChain, "failed", forget):
        train(Trainer(config(), ranks, tmp_path / "chain"), tmp_path)
    assert different(tmp_path)


def test_where_most_rows_changed_the_save_is_whole(ranks: Ranks, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(save_chain, "MOST_CHANGED", 0.0)
    reports = train(Trainer(config(3), ranks, tmp_path / "chain"), tmp_path)
    assert parents(tmp_path / "chain") == {1: None, 2: None, 3: None}
    assert re.fullmatch(r"\d+% of the rows' bytes changed", reasons(reports)[2])


WHY_WHOLE = dict.fromkeys(("torch", "announced"), "100% of the rows' bytes changed")


@pytest.mark.parametrize("how", keep(["announced, of a table"], ["torch", "announced", "announced, of a table"]))
def test_rows_that_somebody_else_wrote_are_saved(ranks: Ranks, tmp_path: Path, how: str):
    trainer, why = Trainer(config(4), ranks, tmp_path / "chain"), dict[int, str]()
    for report in trainer.train():
        if not isinstance(report, SaveReport):
            continue
        why |= reasons([report])
        trainer.prepare_save(tmp_path / "whole").write(ranks)
        if report.step == 2:
            flush(trainer.model)
            pool = max(cached_embeddings(trainer.model), key=lambda pool: pool.host.num_rows)
            shard = pool.shards[0]
            if how == "torch":
                with torch.no_grad():
                    pool.host.weights[0] += 1
            else:
                pool.host.weights.data[0] += 1
                host_rows_changed(
                    trainer.model, *((shard.table, torch.tensor([shard.first_row])) if "table" in how else ())
                )
    trainer.close()
    assert parents(tmp_path / "chain")[3] == (2 if "table" in how else None)
    assert why == {1: "the first one"} | ({3: WHY_WHOLE[how]} if how in WHY_WHOLE else {})
    assert different(tmp_path) == []


def test_a_resume_goes_on_with_the_chain(ranks: Ranks, tmp_path: Path):
    chain = tmp_path / "chain"
    train(Trainer(config(2), ranks, chain), tmp_path)
    for steps in (3, 6):
        trainer = Trainer(config(steps), ranks, chain)
        trainer.resume(complete_checkpoints(chain)[-1])
        train(trainer, tmp_path)
    assert parents(chain) == {1: None, 2: 1, 3: 2, 4: 3, 5: None, 6: 5}
    assert different(tmp_path) == []


WHY_NONE_FOLLOWS = {
    "another folder": "step_2 is of another folder",
    "no token": "step_2 is in no chain",
    "other sizes": "model.* has another size than in step_2",
}


@pytest.mark.parametrize("why", keep(["no token"], WHY_NONE_FOLLOWS))
def test_a_resume_that_cannot_go_on_with_it_saves_whole(ranks: Ranks, tmp_path: Path, monkeypatch, why: str):
    first = config(2, full_every=1 if why == "no token" else 4)
    train(Trainer(first, ranks, tmp_path / "chain"), tmp_path)
    folder = tmp_path / ("other" if why == "another folder" else "chain")
    if why == "other sizes":
        monkeypatch.setattr("embershard.training.parts.saves.saved_tensors", lambda checkpoint: {})
    trainer = Trainer(config(4), ranks, folder)
    trainer.resume(tmp_path / "chain" / "step_2")
    reports = train(trainer, tmp_path)
    found = parents(folder)
    assert (found[3], found[4]) == (None, 3)
    assert fnmatch(reasons(reports)[3], WHY_NONE_FOLLOWS[why])
    assert different(tmp_path, folder.name) == []


def test_deltas_need_saves_in_between():
    with pytest.raises(ConfigError, match=r"checkpoint\.full_every has no effect without"):
        CheckpointConfig(full_every=2)
    with pytest.raises(ConfigError, match=r"checkpoint\.full_every: got 0, needed at least 1"):
        CheckpointConfig(every_steps=1, full_every=0)


@pytest.mark.matrix
def test_an_export_of_a_delta_is_that_of_a_whole_save(ranks: Ranks, tmp_path: Path):
    trainer = Trainer(config(3), ranks, tmp_path / "chain")
    train(trainer, tmp_path)
    found = []
    for name in ("chain", "whole"):
        export_base(config(3), tmp_path / name / "step_3", "fp32", tmp_path / f"of_{name}")
        tables = sorted((tmp_path / f"of_{name}" / "tables").iterdir())
        found.append({path.name: path.read_bytes() for path in tables})
    assert parents(tmp_path / "chain")[3] == 2
    assert len(found[0]) > 20
    assert found[0] == found[1]


@pytest.mark.matrix  # all tests above save beside the chain, too
def test_a_publication_has_a_whole_save_of_its_own(ranks: Ranks, tmp_path: Path):
    """Saves outside of the chain take nothing from it, and are no link of it."""
    trainer = Trainer(config(4), ranks, tmp_path / "chain")
    for report in trainer.train():
        for name in ("whole", "again") if isinstance(report, SaveReport) else ():
            saved = trainer.prepare_save(tmp_path / name).write(ranks)
            assert Manifest.read(saved).format == 1
    trainer.close()
    assert different(tmp_path) == []
    assert replace(Manifest.read(tmp_path / "chain" / "step_2"), parent=None).format == 2
