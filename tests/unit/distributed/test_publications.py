"""Publications as files: complete or not there, in a chain, and no byte is taken that was not written."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from embershard.distributed import PublishConfig
from embershard.distributed.changed_rows import TouchedRows
from embershard.distributed.publish.published import (
    DamagedError,
    PublicationError,
    published,
    read_publication,
    tensors_in,
    verify,
)
from embershard.distributed.tensors_file import safetensors
from embershard.errors import ConfigError
from embershard.extras.publications import compact, write
from embershard.extras.serving.serving_model import read_tensors
from tests.unit.distributed.publications import TABLES, Run, chain

pytestmark = pytest.mark.extra


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    _, found = chain(tmp_path, 2)
    assert [read_publication(tmp_path / each.name) for each in found] == found
    assert [each.parent for each in found] == ["", found[0].link, found[1].link]
    assert found[1].num_rows == 2 * 2 * 5  # tables, halves of the columns, rows


def test_bytes_of_a_delta(tmp_path):
    """Rows cost their bytes, keys 8 each, and a header."""
    run = Run(tmp_path)
    keys = torch.arange(20)
    touched = [TouchedRows("t_user", 0, keys, run.tables["t_user"])]
    delta = run.delta(run.base(), touched)
    assert delta.files["rows_0.safetensors"][0] == 20 * 4 * 4 + 20 * 8 + 192


def test_every_flipped_byte_is_found(tmp_path):
    _, found = chain(tmp_path, 1)
    for publication in found:
        for path in sorted(path for path in (tmp_path / publication.name).rglob("*") if path.is_file()):
            whole = path.read_bytes()
            for place in range(0, len(whole), max(1, len(whole) // 40)):
                path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
                with pytest.raises(DamagedError):
                    verify(tmp_path / publication.name)
            path.write_bytes(whole[:-1])
            if whole:
                with pytest.raises(DamagedError):
                    verify(tmp_path / publication.name)
            path.write_bytes(whole)
        verify(tmp_path / publication.name)


def test_a_manifest_that_was_made_right_again_names_no_other_file(tmp_path):
    _, (base, delta) = chain(tmp_path, 1)
    bad = type(delta)(**{**vars(delta), "files": {"../x": (1, "")}})
    (tmp_path / delta.name / "manifest.json").write_text(bad.text())
    with pytest.raises(DamagedError, match="outside"):
        read_publication(tmp_path / delta.name)
    shutil.copytree(tmp_path / base.name, tmp_path / "base_7")
    with pytest.raises(DamagedError, match="that of base_0"):
        read_publication(tmp_path / "base_7")


def test_nothing_is_left_of_a_delta_that_fails(tmp_path, monkeypatch):
    run, (_base, _) = chain(tmp_path, 1)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "_write_tensors", fail)
    with pytest.raises(OSError, match="No space"):
        run.delta(read_publication(tmp_path / "delta_1"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base_0", "delta_1"]


def test_a_name_is_given_once(tmp_path):
    run, (base, _) = chain(tmp_path, 1)
    with pytest.raises(OSError):
        run.delta(base)
    verify(tmp_path / "delta_1")


def test_a_base_of_deltas_has_the_weights_of_the_last(tmp_path):
    run, found = chain(tmp_path, 3)
    base = compact.make_base(tmp_path)
    assert (base.name, base.link, base.token) == ("base_3", found[-1].link, found[-1].token)
    for name in TABLES:
        rows = read_tensors(tmp_path / "base_3" / "tables" / f"{name}.safetensors")["rows"]
        assert torch.equal(rows, run.tables[name])
    dense = read_tensors(tmp_path / "base_3" / "dense.safetensors")
    assert all(torch.equal(dense[name], weight) for name, weight in run.dense.items())
    assert json.loads((tmp_path / "base_3" / "export.json").read_text())["step"] == found[-1].step
    verify(tmp_path / "base_3")


def test_no_base_is_made_of_damage(tmp_path):
    chain(tmp_path, 2)
    path = tmp_path / "base_0" / "tables" / "t_user.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedError):
        compact.make_base(tmp_path)
    chain(tmp_path / "gap", 3)
    shutil.rmtree(tmp_path / "gap" / "delta_2")
    with pytest.raises(PublicationError):
        compact.make_base(tmp_path / "gap")
    chain(tmp_path / "swapped", 3)
    for one, other in (("delta_1", "x"), ("delta_2", "delta_1"), ("x", "delta_2")):
        (tmp_path / "swapped" / one).rename(tmp_path / "swapped" / other)
    with pytest.raises(PublicationError):
        compact.make_base(tmp_path / "swapped")
    for folder in (tmp_path, tmp_path / "gap", tmp_path / "swapped"):
        assert len(published(folder, "base")) == 1
        assert not list(folder.glob("*.partial"))


def test_rows_since_a_state_are_those_of_all_deltas_after_it(tmp_path):
    _, found = chain(tmp_path, 3)
    assert write.touched_since(tmp_path, found[3].token) == {}
    after = write.touched_since(tmp_path, found[1].token)
    assert {name: len(behind.keys) for name, behind in after.items()} == {"t_user": 10, "t_item": 8}
    base = write.touched_since(tmp_path, found[0].token)
    assert len(base["t_user"].keys) == 13


def test_rows_since_a_state_need_every_delta(tmp_path):
    _run, found = chain(tmp_path, 3)
    with pytest.raises(PublicationError):
        write.touched_since(tmp_path, "of another chain")
    path = tmp_path / "delta_2" / "rows_0.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DamagedError):
        write.touched_since(tmp_path, found[0].token)
    path.write_bytes(whole)
    shutil.rmtree(tmp_path / "delta_2")
    with pytest.raises(PublicationError):
        write.touched_since(tmp_path, found[0].token)


def test_pruning_keeps_what_replicas_and_resumes_need(tmp_path):
    run, found = chain(tmp_path, 2)
    compact.make_base(tmp_path)
    for _ in range(2):
        found.append(run.delta(found[-1]))
    compact.make_base(tmp_path)
    assert write.prune(tmp_path, keep_bases=3, needed_from=None) == []
    assert write.prune(tmp_path, keep_bases=2, needed_from=2) == ["base_0", "delta_1"]
    assert write.touched_since(tmp_path, found[2].token), "a resume from there goes on"
    assert write.prune(tmp_path, keep_bases=1, needed_from=None) == ["base_2", "delta_2", "delta_3", "delta_4"]
    assert [path.name for path in tmp_path.iterdir()] == ["base_4"]


def test_tensors_of_all_types():
    tensors = {
        "empty": torch.empty(0, 4), "bool": torch.tensor([True, False, True]), "half": torch.ones(3, dtype=torch.half),
        "long": torch.tensor([2**40]), "number": torch.tensor(1.5, dtype=torch.float64),
    }  # fmt: skip
    found = tensors_in(b"".join(safetensors(tensors)))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(DamagedError):
        tensors_in(b"no such file")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"every_steps": 3}, "no effect without publish.folder"),
        ({"folder": "x"}, "needs publish.every_steps"),
        ({"folder": "x", "every_steps": 0}, "needed at least 1"),
        ({"folder": "x", "every_steps": 1, "every_seconds": 2.0}, "both set"),
        ({"folder": "x", "every_steps": 1, "keep_bases": 3}, "without publish.base_every"),
        ({"folder": "x", "every_steps": 1, "dtype": "int8"}, "'fp32' or 'fp16'"),
    ],
)
def test_settings_without_an_effect_are_errors(settings, said):
    with pytest.raises(ConfigError, match=said):
        PublishConfig(**settings)
