"""How many ranks are started, and when that is too many."""

from __future__ import annotations

import os

import pytest
import torch

from embershard.launch.ranks.number import warn_of_cores
from embershard.training.config import RunConfig, TrainConfig


@pytest.mark.parametrize(
    ("num_ranks", "device", "has_gpu", "warns"),
    [
        (128, "cpu", False, True),
        (128, "cpu", True, True),
        (128, "auto", False, True),
        (128, "auto", True, False),
        (128, "cuda", True, False),
        (4, "cpu", False, False),
    ],
)
def test_many_more_ranks_than_cores_are_said(num_ranks, device, has_gpu, warns, monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    warn_of_cores(RunConfig(train=TrainConfig(device=device)), num_ranks)
    said = capsys.readouterr().err
    assert said.startswith("embershard: 128 ranks share the 2 cores of this machine") is warns
    assert ("Use --nproc 2" in said) is warns
