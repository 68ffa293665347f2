"""The states of a rank's random number generators, as text."""

from __future__ import annotations

import base64
from collections.abc import Mapping

import torch


def rng_state(device: torch.device) -> dict[str, str]:
    """Return the states of this rank's random number generators, as text for JSON.

    >>> sorted(rng_state(torch.device("cpu")))
    ['cpu']
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(bytes(state.tolist())).decode() for name, state in states.items()}


def set_rng_state(saved: Mapping[str, str], device: torch.device) -> None:
    """Restore what `rng_state` returned; without a GPU, its state is skipped.

    >>> cpu = torch.device("cpu")
    >>> saved, number = rng_state(cpu), torch.rand(1)
    >>> set_rng_state(saved, cpu)
    >>> bool(torch.rand(1) == number)
    True
    """
    states = {name: torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8) for name, text in saved.items()}
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
