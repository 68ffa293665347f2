"""A hostile `.metadata` runs nothing and leads nowhere, also with a manifest that fits it."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from embershard.distributed import load_tensors, save_checkpoint, verify_checkpoint
from embershard.distributed.checkpoint.metadata import read_metadata
from embershard.errors import CheckpointError, InvalidCheckpointError
from tests.unit.distributed.checkpoints import make_manifest_right, save


class RunsCode:
    """Unpickling it makes a folder."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.made),)


def torchs_own(checkpoint: Path) -> Any:
    return pickle.loads((checkpoint / ".metadata").read_bytes())


def attack(checkpoint: Path, metadata: Any) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("fits", [False, True], ids=["manifest as it was", "manifest made right again"])
def test_a_hostile_metadata_runs_nothing(tmp_path, ranks, fits):
    save(tmp_path, 1, ranks)
    checkpoint, made = tmp_path / "step_1", tmp_path / "made"
    metadata = torchs_own(checkpoint)
    metadata.planner_data = RunsCode(made)
    attack(checkpoint, metadata)
    if fits:
        make_manifest_right(checkpoint)
    said = r"\.metadata is refused: it names posix\.mkdir" if fits else r"\.metadata: (has|its bytes)"
    with pytest.raises(InvalidCheckpointError, match=said):
        verify_checkpoint(checkpoint, ranks)
    with pytest.raises(InvalidCheckpointError, match=r"it names posix\.mkdir, which no checkpoint needs"):
        load_tensors(checkpoint, {"a": {"b": torch.zeros(2, 3)}})
    assert not made.exists()
    torchs_own(checkpoint)
    assert made.exists(), "the attack is real: torch's own reader runs it"


def test_a_pickled_value_in_a_shard_runs_nothing(tmp_path, ranks):
    """torch unpickles values that are no tensors without its protection."""
    save(tmp_path, 1, ranks)
    checkpoint, made = tmp_path / "step_1", tmp_path / "made"
    shard, value = checkpoint / "__0_0.distcp", io.BytesIO()
    torch.save(RunsCode(made), value)
    start = shard.stat().st_size
    shard.write_bytes(shard.read_bytes() + value.getvalue())
    metadata = torchs_own(checkpoint)
    metadata.state_dict_metadata["a.b"] = BytesStorageMetadata()
    (place,) = metadata.storage_data.values()
    place.offset, place.length = start, len(value.getvalue())
    metadata.storage_data = {MetadataIndex("a.b"): place}
    attack(checkpoint, metadata)
    make_manifest_right(checkpoint)
    with pytest.raises(InvalidCheckpointError, match=r"a\.b is no tensor but a pickled value"):
        verify_checkpoint(checkpoint, ranks)
    with pytest.raises(InvalidCheckpointError, match=r"a\.b is no tensor"):
        load_tensors(checkpoint, {"a": {"b": torch.zeros(2, 3)}})
    assert not made.exists()
    dcp.load({"a": {"b": torch.zeros(2, 3)}}, storage_reader=FileSystemReader(checkpoint))
    assert made.exists(), "the attack is real"


def test_a_hostile_tensor_in_a_shard_runs_nothing(tmp_path, ranks):
    save(tmp_path, 1, ranks)
    checkpoint, made = tmp_path / "step_1", tmp_path / "made"
    value = io.BytesIO()
    torch.save(RunsCode(made), value)
    (checkpoint / "__0_0.distcp").write_bytes(value.getvalue())
    metadata = torchs_own(checkpoint)
    (place,) = metadata.storage_data.values()
    place.offset, place.length = 0, len(value.getvalue())
    attack(checkpoint, metadata)
    make_manifest_right(checkpoint)
    verify_checkpoint(checkpoint, ranks)
    with pytest.raises(CheckpointError, match="a file cannot be unpickled"):
        load_tensors(checkpoint, {"a": {"b": torch.zeros(2, 3)}})
    assert not made.exists()


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "..", "a/b", "missing"])
def test_a_path_leads_to_a_file_of_the_checkpoint_only(tmp_path, ranks, path):
    save(tmp_path, 1, ranks)
    checkpoint = tmp_path / "step_1"
    (tmp_path / "outside").write_bytes((checkpoint / "__0_0.distcp").read_bytes())
    metadata = torchs_own(checkpoint)
    (place,) = metadata.storage_data.values()
    place.relative_path = path
    attack(checkpoint, metadata)
    make_manifest_right(checkpoint)
    with pytest.raises(InvalidCheckpointError, match=r"leads to .* no file of this checkpoint"):
        verify_checkpoint(checkpoint, ranks)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda metadata, place: setattr(place, "offset", -1), "leads to bytes -1"),
        (lambda metadata, place: setattr(place, "length", 10**12), "leads to bytes 0 to 1000000000000"),
        (lambda metadata, place: setattr(place, "offset", "0"), "has a str, needed int"),
        (lambda metadata, place: setattr(place, "transform_descriptors", ["zstd"]), "is transformed by"),
        (lambda metadata, place: setattr(metadata, "planner_data", None), "has a NoneType, needed dict"),
        (lambda metadata, place: setattr(metadata, "state_dict_metadata", []), "has a list, needed dict"),
        (lambda metadata, place: metadata.state_dict_metadata.update(x=metadata), "has a Metadata, needed Tensor"),
        (lambda metadata, place: metadata.state_dict_metadata.update({5: 5}), "has a int, needed"),
    ],
)
def test_wrong_values_are_named(tmp_path, ranks, change, said):
    save(tmp_path, 1, ranks)
    metadata = torchs_own(tmp_path / "step_1")
    (place,) = metadata.storage_data.values()
    change(metadata, place)
    attack(tmp_path / "step_1", metadata)
    with pytest.raises(InvalidCheckpointError, match=rf"\.metadata is refused: .*{said}"):
        read_metadata(tmp_path / "step_1")


@pytest.mark.parametrize("data", [b"", b"rubbish", b"\x80\x04N.", pickle.dumps([1, 2]), pickle.dumps(torch.Size([1]))])
def test_rubbish_is_refused(tmp_path, data):
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(InvalidCheckpointError, match=r"\.metadata is refused"):
        read_metadata(tmp_path)


def test_a_pickle_cannot_change_torch_s_classes(tmp_path):
    """BUILD sets attributes of whatever lies on the stack, a class included."""
    data = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}U\x06hackedK\x01s\x86b."
    assert type(pickle.loads(data)) is type
    from torch.distributed.checkpoint.metadata import Metadata

    assert Metadata.hacked == 1, "the attack is real"
    del Metadata.hacked
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(InvalidCheckpointError, match=r"\.metadata is refused"):
        read_metadata(tmp_path)
    assert not hasattr(Metadata, "hacked")


def test_our_reader_finds_what_torch_s_finds(tmp_path, ranks):
    tensors = {"x": torch.rand(3, 2), "y": {"z": torch.ones(4, dtype=torch.bfloat16), "empty": torch.zeros(0, 4)}}
    saved = save_checkpoint(tmp_path, 1, tensors, {}, ranks, keep_last=1, run_id="run")
    ours, theirs = read_metadata(saved), torchs_own(saved)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    for key, place in ours.storage_data.items():
        other = theirs.storage_data[key]
        assert (place.relative_path, place.offset, place.length) == (other.relative_path, other.offset, other.length)
    loaded = {"x": torch.zeros(3, 2), "y": {"z": torch.zeros(4, dtype=torch.bfloat16), "empty": torch.zeros(0, 4)}}
    load_tensors(saved, loaded)
    assert torch.equal(loaded["x"], tensors["x"])
    stock = {"x": torch.zeros(3, 2)}
    dcp.load(stock, checkpoint_id=saved)
    assert torch.equal(stock["x"], tensors["x"])


def test_only_tensors_are_saved(tmp_path, ranks):
    with pytest.raises(CheckpointError, match=r"a\.n is of type int, needed a tensor"):
        save_checkpoint(tmp_path, 1, {"a": {"n": 5}}, {}, ranks, keep_last=1, run_id="run")
