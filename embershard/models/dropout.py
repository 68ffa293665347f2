"""Dropout behind the hidden layers of the MLP over the interaction, and the seed of its masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.modules.mlp import Perceptron


def add_dropout(over: nn.Module, probability: float) -> None:
    """Let the hidden layers in `over` drop each output with this probability while they train, and scale the others by
    1 / (1 - probability). Names of parameters stay: checkpoints fit models with and without dropout.

    Args:
        over: has TorchRec's perceptrons, the hidden layers.
    """
    if not probability:
        return

    def drop(layer: nn.Module, _: Any, output: Tensor) -> Tensor | None:
        return nn.functional.dropout(output, probability) if layer.training else None

    for layer in over.modules():
        if isinstance(layer, Perceptron):
            layer.register_forward_hook(drop)


def seed_masks(seed: int, step: int, rank: int, micro_batch: int = 0) -> None:
    """Seed torch's generators for the masks of a rank's step, or of a further micro-batch of its batch.

    They are functions of the three, so a resumed run draws the masks of one that was not interrupted, also where a
    skipped batch drew some, and ranks draw different ones.

    >>> seed_masks(seed=0, step=3, rank=1)
    >>> first = torch.rand(2)
    >>> seed_masks(seed=0, step=3, rank=1)
    >>> torch.equal(first, torch.rand(2))
    True
    """
    torch.manual_seed(
        int(np.random.SeedSequence((seed, step, rank) + (micro_batch,) * bool(micro_batch)).generate_state(1)[0])
    )
