"""Checkpoints of one rank: complete or not there, pruned, refused when they do not fit."""

from __future__ import annotations

import pytest
import torch

from embershard.distributed import (
    complete_checkpoints,
    load_tensors,
    process_group,
    read_scalars,
    rng_state,
    set_rng_state,
)
from embershard.errors import CheckpointError, ConfigError, EmbershardError, NotFiniteError, SetupError
from embershard.training.parts.loss_monitor import LossMonitor
from tests.unit.distributed.checkpoints import save


def test_saved_is_loaded_and_old_ones_go(tmp_path, ranks):
    for step in (5, 10, 100):
        tensor = save(tmp_path, step, ranks)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step_10", "step_100"]
    scalars = read_scalars(tmp_path / "step_100")
    assert (scalars["step"], scalars["note"]) == (100, "x")
    loaded = {"a": {"b": torch.zeros(2, 3)}}
    load_tensors(tmp_path / "step_100", loaded)
    assert torch.equal(loaded["a"]["b"], tensor)


def test_what_a_dead_run_left_is_not_read_and_is_replaced(tmp_path, ranks):
    left = tmp_path / "step_7.tmp"
    left.mkdir()
    (left / "rubbish").write_text("x")
    assert complete_checkpoints(tmp_path) == []
    save(tmp_path, 7, ranks)
    assert "rubbish" not in {path.name for path in (tmp_path / "step_7").iterdir()}
    assert not left.exists()


def test_a_complete_one_is_never_overwritten(tmp_path, ranks):
    save(tmp_path, 3, ranks)
    with pytest.raises(CheckpointError, match="step_3 exists already"):
        save(tmp_path, 3, ranks)


@pytest.mark.parametrize("wanted", [{"a": {"other": torch.zeros(2, 3)}}, {"a": {"b": torch.zeros(4, 3)}}])
def test_another_model_is_refused(tmp_path, ranks, wanted):
    save(tmp_path, 1, ranks)
    with pytest.raises(CheckpointError, match=r"step_1 cannot be loaded: .*resume with the config"):
        load_tensors(tmp_path / "step_1", wanted)


def test_random_numbers_go_on(ranks):
    saved = rng_state(ranks.device)
    first = torch.rand(3)
    set_rng_state(saved, ranks.device)
    assert torch.equal(torch.rand(3), first)


def test_one_rank_needs_no_torchrun_and_collectives_are_the_identity(ranks):
    assert (ranks.rank, ranks.world_size, ranks.is_first) == (0, 1, True)
    value = torch.arange(3.0)
    assert torch.equal(ranks.all_gather_rows(value), value)
    assert torch.equal(ranks.all_gather(value), value[None])
    assert ranks.from_first(lambda: 7) == 7
    with pytest.raises(ConfigError, match="no"):
        ranks.from_first(lambda: (_ for _ in ()).throw(ConfigError("no")))


def test_a_second_process_group_is_refused(ranks):
    with pytest.raises(SetupError, match="already"), process_group("cpu"):
        pass


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(SetupError, match="this node has 0"), process_group("cuda"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run(ranks, bad):
    watch = LossMonitor(ranks)
    watch.add(1, torch.tensor(0.5))
    watch.add(2, torch.tensor(0.25))
    assert watch.mean() == pytest.approx(0.375)
    assert issubclass(NotFiniteError, EmbershardError)
    with pytest.raises(NotFiniteError, match="Step 3: the loss of rank 0 is"):
        watch.add(3, torch.tensor(bad))
