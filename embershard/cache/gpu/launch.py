"""Launch of Triton kernels over the items of a batch. With `TRITON_INTERPRET=1` they run on a CPU, for tests."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

HAS_TRITON = find_spec("triton") is not None
BLOCK = 512  # items of a program


def uses_kernels(device: torch.device) -> bool:
    """Return True if caches on `device` plan by kernels. Without Triton, torch's operations do the same work."""
    return device.type == "cuda" and HAS_TRITON


def launch(kernel: Any, count: int, *arguments: Any, **constants: Any) -> None:
    """Launch `kernel` over `count` items, which is its last argument; does nothing without items."""
    if count:
        _run(kernel, (-(-count // BLOCK),), (*arguments, count), {"BLOCK": BLOCK, **constants})


def _run(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    kernel[grid](*arguments, **constants)
