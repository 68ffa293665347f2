"""Chains of checkpoints: read as whole ones are, or refused by name; made whole; kept while something needs them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from embershard.distributed import Manifest, Ranks, complete_checkpoints, load_group, load_tensors, verify_checkpoint
from embershard.distributed.checkpoint import rows_file
from embershard.distributed.checkpoint.best import BestEvaluation
from embershard.distributed.checkpoint.chain import Chain, prune
from embershard.distributed.checkpoint.compact import compact, remove_unlisted
from embershard.distributed.checkpoint.load import BoxReader, newest_valid, saved_rows, saved_tensors, verify_alone
from embershard.distributed.checkpoint.manifest import Parent
from embershard.errors import CheckpointError, InvalidCheckpointError
from embershard.settings.decoding import decode
from tests.covering import matrix
from tests.unit.distributed.chains import DIM, NAMES, ROWS, rewritten, save_chain
from tests.unit.distributed.checkpoints import DAMAGES

FILES = (".metadata", "__0_0.distcp", "manifest.json", "scalars.json", "rows_0.safetensors")
Saved = tuple[Path, dict[int, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("saved")
    return folder, save_chain(folder, ranks)


def copy_of(saved: Saved, folder: Path) -> Path:
    return Path(shutil.copytree(saved[0], folder / "checkpoints"))


def loaded(checkpoint: Path) -> dict[str, torch.Tensor]:
    tensors = {name: torch.full(entry.size, -7.0) for name, entry in saved_tensors(checkpoint).items()}
    load_tensors(checkpoint, tensors)
    return tensors


def is_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_what_is_removed_while_somebody_reads_is_named(saved: Saved, tmp_path: Path) -> None:
    """By a compaction, or by a run that prunes."""
    folder = copy_of(saved, tmp_path)
    newest = complete_checkpoints(folder)[-1]
    verify_alone(newest)
    reader = BoxReader(newest)
    for path in folder.iterdir():
        shutil.rmtree(path)
    for name in reader.tensors:
        with pytest.raises(InvalidCheckpointError, match=r"step_\d/.*: No such file.* removed it meanwhile"):
            reader.read_whole(name)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_delta_is_read_as_a_whole_checkpoint(saved, ranks, step):
    folder, states = saved
    checkpoint = folder / f"step_{step}"
    assert verify_checkpoint(checkpoint, ranks).step == step
    assert is_equal(loaded(checkpoint), states[step])
    assert torch.equal(torch.cat(list(saved_rows(checkpoint, NAMES[0]))), states[step][NAMES[0]])
    assert torch.equal(load_group(checkpoint, "states")["t.momentum"], states[step][NAMES[1]])


def test_the_files_of_a_delta_are_these(saved):
    """A new kind of file must be added to FILES, so that its damage is tested."""
    assert {path.name for path in (saved[0] / "step_2").iterdir()} == set(FILES)


def test_any_box(saved):
    boxes, expected = BoxReader(saved[0] / "step_4"), saved[1][4][NAMES[0]]
    for first, stop, left, right in ((0, ROWS, 1, 3), (7, 31, 0, DIM), (20, 21, 3, 4), (0, 50, 2, 2)):
        found = boxes.read(NAMES[0], (first, left), (stop - first, right - left))
        assert torch.equal(found, expected[first:stop, left:right])


def test_rows_in_many_pieces(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(rows_file, "_PIECE_BYTES", 30)
    states = save_chain(tmp_path, ranks)
    assert max(shard.pieces for shard in Manifest.read(tmp_path / "step_3").shards) > 2
    assert is_equal(loaded(tmp_path / "step_4"), states[4])


@pytest.mark.parametrize("step", [matrix(1), 2, matrix(3)])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_damage_of_a_link_is_found_and_named(saved, tmp_path, ranks, step, name, damage):
    folder = copy_of(saved, tmp_path)
    if not (folder / f"step_{step}" / name).exists():
        return
    other = folder / ("step_4" if step > 1 else "step_2") / name
    damage(folder / f"step_{step}" / name, other)
    where = "step_3: " if step == 3 else rf"step_3: it follows step_{step}, and .*step_{step}: "
    newest = "" if step == 3 else f".* is step_{step - 1}$" if step > 1 else ".*No other step is there"
    for check in (verify_alone, lambda path: verify_checkpoint(path, ranks)):
        with pytest.raises(InvalidCheckpointError, match=rf"{where}.*{name}.*{newest}"):
            check(folder / "step_3")


def test_a_resume_takes_the_newest_step_with_all_that_it_follows(saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    shutil.rmtree(folder / "step_3")
    used, skipped = newest_valid(complete_checkpoints(folder), lambda path: verify_alone(path).step)
    assert used == (folder / "step_2", 2)
    assert [text.partition(f"{folder}/")[2] for text in skipped] == [
        f"step_4: it follows step_3, and {folder}/step_3: manifest.json is missing, so nothing can be verified. The "
        "newest step with all that it follows is step_2"
    ]


def test_links_that_are_swapped(saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    (folder / "step_2").rename(folder / "kept")
    (folder / "step_3").rename(folder / "step_2")
    (folder / "kept").rename(folder / "step_3")
    with pytest.raises(InvalidCheckpointError, match=r"step_4: it follows step_3, and .*is that of step 2"):
        verify_alone(folder / "step_4")


def test_links_that_are_swapped_and_say_otherwise(saved, tmp_path):
    """Rows of step 3 before those of step 2: without tokens, nothing would tell."""
    folder, states = copy_of(saved, tmp_path), saved[1]
    (folder / "step_2").rename(folder / "kept")
    (folder / "step_3").rename(folder / "step_2")
    (folder / "kept").rename(folder / "step_3")
    for step, parent in ((2, Parent(1, "0.1")), (3, Parent(2, "0.3"))):
        _renamed(folder / f"step_{step}", step, parent)
    with pytest.raises(InvalidCheckpointError, match=r"step_4: it follows step_3, and .*another save"):
        Chain.of(folder / "step_4")
    rewritten(folder / "step_4", parent=Parent(3, "0.2"))
    assert not is_equal(loaded(folder / "step_4"), states[4])


def _renamed(checkpoint: Path, step: int, parent: Parent) -> None:
    """Let a manifest be that of another step."""
    values = json.loads((checkpoint / "manifest.json").read_text())
    manifest = decode(Manifest, values, InvalidCheckpointError)
    (checkpoint / "manifest.json").write_text(dataclasses.replace(manifest, step=step, parent=parent).text())


def test_the_parent_of_another_run(saved, ranks, tmp_path):
    folder = copy_of(saved, tmp_path)
    save_chain(tmp_path / "other", ranks, seed=1)
    shutil.rmtree(folder / "step_2")
    shutil.copytree(tmp_path / "other" / "step_2", folder / "step_2")
    with pytest.raises(InvalidCheckpointError, match="step_2 is another save than the one that step_3 follows"):
        verify_alone(folder / "step_4")


def test_a_missing_row_is_noticed_here(saved):
    """The comparisons above can fail: a chain without one of its links has other tensors."""
    folder, states = saved
    links = Chain.of(folder / "step_4").links
    metadata, rows = Chain((links[0], links[1], links[3])).metadata()
    table = states[1][NAMES[0]].clone()
    rows.lay_over(NAMES[0], (0, 0), table)
    assert metadata.state_dict_metadata.keys() == states[4].keys()
    assert not torch.equal(table, states[4][NAMES[0]])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensors": ("model.other", NAMES[1])}, "has no model.other, which"),
        ({"offsets": ((0,), (0,))}, "have the place"),
        ({"offsets": ((-1, 0), (0,))}, "have the place"),
        ({"pieces": 3}, "not as the manifest says"),
        ({"place": 9}, "not as the manifest says"),
        ({"file": "rows_7.safetensors"}, "does not list rows_7.safetensors"),
    ],
)
def test_a_manifest_whose_rows_are_wrong(saved, tmp_path, changes, said):
    folder = copy_of(saved, tmp_path)
    shards = tuple(dataclasses.replace(shard, **changes) for shard in Manifest.read(folder / "step_4").shards)
    rewritten(folder / "step_4", shards=shards)
    with pytest.raises(InvalidCheckpointError, match=said):
        _verified_and_loaded(folder / "step_4")


def _verified_and_loaded(checkpoint: Path) -> dict[str, torch.Tensor]:
    verify_alone(checkpoint)
    return loaded(checkpoint)


def test_pruning_keeps_what_the_kept_ones_follow(saved, ranks, tmp_path):
    folder = copy_of(saved, tmp_path)
    assert prune(folder, step=4, keep_last=1) == []
    compact(folder / "step_3")
    BestEvaluation(2, "auc", 0.7).write(folder)
    assert prune(folder, step=4, keep_last=1) == []
    (folder / "best.json").unlink()
    assert prune(folder, step=4, keep_last=1) == ["step_1", "step_2"]
    assert is_equal(loaded(folder / "step_4"), saved[1][4])


def test_pruning_keeps_all_behind_a_manifest_that_is_damaged(saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    compact(folder / "step_3")
    (folder / "step_4" / "manifest.json").write_text("{}")
    assert prune(folder, step=4, keep_last=1) == []


def test_a_compacted_delta_is_whole_and_those_behind_it_stay_valid(saved, ranks, tmp_path):
    folder, states = copy_of(saved, tmp_path), saved[1]
    token = Manifest.read(folder / "step_3").token
    assert compact(folder / "step_3").parent is None
    assert Manifest.read(folder / "step_3").token == token
    assert {path.name for path in (folder / "step_3").iterdir()} == {
        "manifest.json",
        "scalars.json",
        "whole.metadata",
        "whole_0.distcp",
    }
    for step in (1, 2):
        shutil.rmtree(folder / f"step_{step}")
    for step in (3, 4):
        verify_checkpoint(folder / f"step_{step}", ranks)
        assert is_equal(loaded(folder / f"step_{step}"), states[step])
    assert compact(folder / "step_3").step == 3  # nothing to do


def test_what_a_compaction_that_died_left_goes(saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    for name in ("whole_0.distcp", ".metadata.tmp", "manifest.json.partial", "notes.txt"):
        (folder / "step_2" / name).write_text("x")
    assert verify_alone(folder / "step_2").step == 2
    assert remove_unlisted(folder / "step_2") == [".metadata.tmp", "manifest.json.partial", "whole_0.distcp"]
    assert {path.name for path in (folder / "step_2").iterdir()} == {*FILES, "notes.txt"}


def test_a_full_disk_leaves_the_delta(saved, tmp_path, monkeypatch):
    folder = copy_of(saved, tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("embershard.distributed.checkpoint.digests._DigestedFile._write", full)
    with pytest.raises(OSError, match="No space left"):
        compact(folder / "step_3")
    assert {path.name for path in (folder / "step_3").iterdir()} == set(FILES)
    assert is_equal(loaded(folder / "step_4"), saved[1][4])


def test_a_damaged_chain_is_not_compacted(saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    DAMAGES[0](folder / "step_1" / "__0_0.distcp", folder)
    with pytest.raises(CheckpointError, match="step_3: it follows step_1"):
        compact(folder / "step_3")
