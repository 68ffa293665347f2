"""Boxes of saved tensors: of checkpoints that ranks wrote in shards and blocks, and of exports of every type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from embershard.distributed import save_checkpoint
from embershard.distributed.checkpoint import boxes
from embershard.distributed.checkpoint.boxes import Box, CheckpointSaved, fill, fill_rows
from embershard.errors import CheckpointError

WHOLE = torch.arange(40.0 * 8).view(40, 8)


@pytest.fixture
def saved(ranks, tmp_path: Path) -> CheckpointSaved:
    folder = save_checkpoint(tmp_path, 1, {"model": {"t": WHOLE.clone()}}, {}, ranks, keep_last=1, run_id="8c")
    return CheckpointSaved(folder)


@pytest.mark.parametrize("box", [Box((0, 0), (40, 8)), Box((3, 2), (30, 5)), Box((39, 7), (1, 1)), Box((4, 0), (0, 8))])
def test_a_box_is_that_part(saved, box):
    assert torch.equal(saved.read("model.t", box), box.of(WHOLE))


def test_what_is_not_there(saved):
    with pytest.raises(CheckpointError, match=r"has no tensor 'model\.u'"):
        saved.read("model.u", Box((0, 0), (1, 1)))
    with pytest.raises(CheckpointError, match="lacks some of its rows 35 to 44"):
        saved.read("model.t", Box((35, 0), (10, 8)))
    with pytest.raises(CheckpointError, match=r"has no tensor 'model\.u'"):
        saved.whole("model.u")


def test_blocks_are_all_rows(saved, monkeypatch):
    monkeypatch.setattr(boxes, "BLOCK_BYTES", 3 * 8 * 8)
    parts = list(saved.blocks("model.t"))
    assert [first for first, _ in parts] == list(range(0, 40, 3))
    assert torch.equal(torch.cat([part for _, part in parts]), WHOLE)


def test_a_fill_leaves_the_rest(saved, monkeypatch):
    monkeypatch.setattr(boxes, "BLOCK_BYTES", 7 * 8 * 4)
    grown = torch.full((50, 8), -1.0)
    fill(grown, saved, "model.t")
    assert torch.equal(grown[:40], WHOLE)
    assert bool((grown[40:] == -1).all())
    part = torch.full((40, 8), -1.0)
    fill(part, saved, "model.t", Box((2, 4), (5, 4)))
    assert torch.equal(part[2:7, 4:], WHOLE[2:7, 4:])
    assert int((part != -1).sum()) == 20


def test_rows_go_to_other_rows(saved, monkeypatch):
    monkeypatch.setattr(boxes, "BLOCK_BYTES", 5 * 8 * 8)
    random = np.random.default_rng(0)
    old, new = random.permutation(40)[:25], random.permutation(60)[:25]
    target = torch.full((60, 8), -1.0)
    fill_rows(target, saved, "model.t", old, new)
    assert torch.equal(target[new], WHOLE[old])
    assert int((target == -1).all(dim=1).sum()) == 35


class Layers(torch.nn.Module):
    """Layers as exports have them: a model inside of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.nn.Linear(2, 1)

    def forward(self, dense: torch.Tensor) -> torch.Tensor:
        return self.model(dense)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "int8", "int4"])
def test_exports_of_every_type(tmp_path, dtype):
    import json

    from embershard.distributed.publish.exported import ExportSaved
    from embershard.extras.serving.serving_model import StoredTable, read_tensor
    from embershard.extras.serving.write import write_safetensors

    rows = torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    (tmp_path / "tables").mkdir()
    write_safetensors(tmp_path / "tables" / "t_a.safetensors", rows.split(7), 20, dtype)
    (tmp_path / "export.json").write_text(json.dumps({"format": "module", "dtype": dtype, "step": 3}))
    (tmp_path / "inputs.json").write_text(json.dumps({"lookups": [{"feature": "a", "table": "t_a"}]}))
    torch.export.save(torch.export.export(Layers(), (torch.zeros(1, 2),)), tmp_path / "dense.pt2")
    saved = ExportSaved(tmp_path)
    name = "model.tables.embedding_bags.t_a.weight"
    assert saved.sizes() == {
        name: torch.Size([20, 8]), "model.weight": torch.Size([1, 2]), "model.bias": torch.Size([1])
    }  # fmt: skip
    served = StoredTable(read_tensor(tmp_path / "tables" / "t_a.safetensors"), dtype).rows(torch.arange(20))
    assert torch.equal(saved.whole(name), served)
    assert torch.equal(saved.read(name, Box((4, 2), (9, 3))), served[4:13, 2:5])
    with pytest.raises(CheckpointError, match="no rows"):
        saved.read(name, Box((15, 0), (6, 8)))


def test_a_parquet_export_is_refused_with_what_to_do(tmp_path):
    from embershard.distributed.publish.exported import ExportSaved

    (tmp_path / "export.json").write_text('{"format": "parquet"}')
    (tmp_path / "inputs.json").write_text('{"lookups": []}')
    with pytest.raises(CheckpointError, match=r"model\.pretrained\.TABLE"):
        ExportSaved(tmp_path)
    with pytest.raises(CheckpointError, match="is no export"):
        ExportSaved(tmp_path / "gone")
