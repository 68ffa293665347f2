"""Launch of Triton kernels over the items of a batch. With `TRITON_INTERPRET=1` they run on a CPU, for tests."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

HAS_TRITON = find_spec("triton") is not None
_BLOCK = 512


def uses_kernels(device: torch.device) -> bool:
    """Return True if caches on `device` plan by kernels. Without Triton, torch's operations do the same work."""
    return device.type == "cuda" and HAS_TRITON


def launch(kernel: Any, count: int, *arguments: Any, block: int = _BLOCK, **constants: Any) -> None:
    """Launch `kernel` over `count` items, `block` of them in a program; `count` is its last argument. Does nothing
    without items."""
    if count:
        _run(kernel, (-(-count // block),), (*arguments, count), {"BLOCK": block, **constants})


def _run(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    kernel[grid](*arguments, **constants)
