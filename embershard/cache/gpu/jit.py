"""Compilation of planning kernels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton


def kernel(*aligned: str) -> Callable[[Callable[..., None]], Any]:
    """Compile a function once for all sizes and alignments; by default Triton compiles others for 1, for multiples of
    16 and for each alignment, while the training waits. Names in capitals are constants.

    Args:
        aligned: tensors that begin at multiples of 16 bytes, which allows wider accesses.
    """

    def compiled(function: Callable[..., None]) -> Any:
        names = inspect.signature(function).parameters
        arguments = [name for name in names if not name.isupper() and name not in aligned]
        return triton.jit(function, do_not_specialize=arguments, do_not_specialize_on_alignment=arguments)

    return compiled
