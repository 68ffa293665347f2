"""A checkpoint is what was written, or it is refused by name: every file, every kind of damage."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embershard.distributed import Manifest, Ranks, verify_checkpoint
from embershard.distributed.checkpoint import manifest as manifests
from embershard.distributed.checkpoint.digests import BlockDigests, file_entry
from embershard.errors import InvalidCheckpointError
from embershard.whole_file import sync_folder
from tests.covering import matrix
from tests.unit.distributed.checkpoints import DAMAGES, flip_bit, make_manifest_right, save

FILES = (".metadata", "__0_0.distcp", "manifest.json", "scalars.json")


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        save(folder, step, ranks)
    return folder


def copy_of(saved: Path, folder: Path) -> Path:
    return Path(shutil.copytree(saved, folder / "checkpoints"))


def test_the_files_of_a_checkpoint_are_these(saved, ranks):
    """A new kind of file must be added to FILES, so that its damage is tested."""
    assert {path.name for path in (saved / "step_2").iterdir()} == set(FILES)
    manifest = verify_checkpoint(saved / "step_2", ranks)
    assert {*manifest.files, "manifest.json"} == set(FILES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_every_damage_is_found_and_named(saved, tmp_path, ranks, name, damage):
    folder = copy_of(saved, tmp_path)
    damage(folder / "step_2" / name, folder / "step_1" / name)
    with pytest.raises(InvalidCheckpointError, match=rf"step_2: {name}\b|step_2: .*{name} "):
        verify_checkpoint(folder / "step_2", ranks)
    verify_checkpoint(folder / "step_1", ranks)


def test_the_swapped_shard_has_the_same_size(saved):
    """So the test above proves that contents are compared, and not sizes alone."""
    sizes = {(saved / step / "__0_0.distcp").stat().st_size for step in ("step_1", "step_2")}
    assert len(sizes) == 1


def test_a_check_of_sizes_alone_would_miss_it(saved, tmp_path, ranks, monkeypatch):
    folder = copy_of(saved, tmp_path)
    flip_bit(folder / "step_2" / "__0_0.distcp", folder)
    monkeypatch.setattr(Manifest, "damage", lambda self, checkpoint, share=(0, 1): self.wrong_size(checkpoint))
    verify_checkpoint(folder / "step_2", ranks)


@pytest.mark.slow
@pytest.mark.parametrize("every", [8, matrix(1)])
def test_every_bit_of_the_manifest_counts(saved, tmp_path, every):
    folder = copy_of(saved, tmp_path)
    path = folder / "step_2" / "manifest.json"
    sound = path.read_bytes()
    for position in range(len(sound)):
        for bit in range(position % every, 8, every):
            path.write_bytes(sound[:position] + bytes([sound[position] ^ 1 << bit]) + sound[position + 1 :])
            with pytest.raises(InvalidCheckpointError, match="manifest"):
                Manifest.read(folder / "step_2")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("../outside", "not the name of a file"),
        ("/etc/passwd", "not the name"),
        ("..", "not the name"),
        ("a\0b", "not"),
    ],
)
def test_a_manifest_leads_nowhere_else(saved, tmp_path, ranks, name, said):
    folder = copy_of(saved, tmp_path)
    (folder / "outside").write_text("x")
    manifest = Manifest.of(2, "run", {name: file_entry(folder / "outside")})
    (folder / "step_2" / "manifest.json").write_text(manifest.text())
    with pytest.raises(InvalidCheckpointError, match=said):
        verify_checkpoint(folder / "step_2", ranks)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_bytes": 0}, "in blocks of 0"),
        ({"files": {}}, r"does not list \.metadata"),
        ({"format": 3}, "has format 3, needed 2"),
        ({"step": 1}, "is that of step 1"),
        ({"step": "2"}, "needed integer"),
        ({"files": {"a": {"bytes": -1, "sha256": []}}}, "a: "),
        ({"files": {"scalars.json": {"bytes": 3, "sha256": []}}}, "0 checksums for 3 bytes"),
    ],
)
def test_a_manifest_with_a_right_checksum_and_wrong_values(saved, tmp_path, ranks, changes, said):
    folder = copy_of(saved, tmp_path)
    path = folder / "step_2" / "manifest.json"
    values = {**json.loads(path.read_text()), **changes}
    del values["checksum"]
    checksum = manifests.hashlib.sha256(json.dumps(values, indent=1).encode()).hexdigest()
    path.write_text(json.dumps({**values, "checksum": checksum}, indent=1))
    with pytest.raises(InvalidCheckpointError, match=said):
        verify_checkpoint(folder / "step_2", ranks)


@pytest.mark.parametrize("name", [".metadata", "scalars.json", "__0_0.distcp"])
def test_a_manifest_that_leaves_a_file_out(saved, tmp_path, ranks, name):
    """A file that is read and was not verified."""
    checkpoint = copy_of(saved, tmp_path) / "step_2"
    files = {key: entry for key, entry in Manifest.read(checkpoint).files.items() if key != name}
    (checkpoint / "manifest.json").write_text(Manifest.of(2, "run", files).text())
    with pytest.raises(InvalidCheckpointError, match=f"does not list {name}"):
        verify_checkpoint(checkpoint, ranks)


def test_another_folder_is_another_checkpoint(saved, tmp_path, ranks):
    folder = copy_of(saved, tmp_path)
    (folder / "step_2").rename(folder / "step_3")
    with pytest.raises(InvalidCheckpointError, match="that of step 2"):
        verify_checkpoint(folder / "step_3", ranks)


def test_an_empty_folder_is_no_checkpoint(tmp_path, ranks):
    (tmp_path / "step_999").mkdir()
    with pytest.raises(InvalidCheckpointError, match=r"step_999: manifest\.json is missing"):
        verify_checkpoint(tmp_path / "step_999", ranks)
    with pytest.raises(InvalidCheckpointError, match=r"step_999: \.metadata is refused: No such file"):
        verify_checkpoint(tmp_path / "step_999", ranks, allow_unverified=True)


def test_without_a_manifest_only_on_request(saved, tmp_path, ranks):
    folder = copy_of(saved, tmp_path)
    (folder / "step_2" / "manifest.json").unlink()
    assert verify_checkpoint(folder / "step_2", ranks, allow_unverified=True) is None
    with pytest.raises(InvalidCheckpointError, match="nothing can be verified"):
        verify_checkpoint(folder / "step_2", ranks)


def test_the_checksums_taken_while_writing_are_those_of_the_files(saved, tmp_path):
    folder = copy_of(saved, tmp_path)
    written = Manifest.read(folder / "step_2")
    make_manifest_right(folder / "step_2")
    assert Manifest.read(folder / "step_2").files == written.files


@pytest.mark.slow
@given(st.binary(max_size=60), st.integers(1, 9), st.lists(st.integers(0, 60), max_size=6))
@settings(max_examples=60, deadline=None)
def test_pieces_make_the_same_blocks(data: bytes, block_bytes: int, cuts: list[int]):
    whole, pieces = BlockDigests(block_bytes), BlockDigests(block_bytes)
    whole.update(data)
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    for start, end in pairwise(edges):
        pieces.update(data[start:end])
    assert pieces.finish() == whole.finish()
    assert len(whole.finish().sha256) == -(-len(data) // block_bytes)


@pytest.mark.parametrize("num_shares", [1, 2, 3, 7])
def test_the_shares_of_the_ranks_cover_every_block(tmp_path, monkeypatch, num_shares):
    monkeypatch.setattr(manifests, "BLOCK_BYTES", 4)
    checkpoint = tmp_path / "step_1"
    checkpoint.mkdir()
    entries = {}
    for name, num_bytes in (("a", 10), ("b", 0), ("c", 4), ("d", 1)):
        digests = BlockDigests(block_bytes=4)
        digests.update(bytes(num_bytes))
        entries[name] = digests.finish()
        (checkpoint / name).write_bytes(bytes(num_bytes))
    manifest = Manifest.of(1, "run", entries)

    def found() -> list[str | None]:
        return [manifest.damage(checkpoint, (k, num_shares)) for k in range(num_shares)]

    assert found() == [None] * num_shares
    for name, position in (("a", 0), ("a", 5), ("a", 9), ("c", 3), ("d", 0)):
        data = bytearray((checkpoint / name).read_bytes())
        (checkpoint / name).write_bytes(data[:position] + b"\1" + data[position + 1 :])
        assert sum(problem is not None for problem in found()) == 1
        assert f"{name}: its bytes {position // 4 * 4} to " in "".join(filter(None, found()))
        (checkpoint / name).write_bytes(data)


def test_a_folder_can_be_synced(tmp_path):
    sync_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "missing")
