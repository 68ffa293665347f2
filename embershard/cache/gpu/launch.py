"""Compilation and launch of the planning kernels. Their signatures have several parameters to a line (`# fmt: skip`),
so that a kernel is read on one screen.

With `TRITON_INTERPRET=1` Triton runs them on a CPU, for tests.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

_BLOCK = 512


def launch(
    kernel: Any, count: int, *arguments: Any, block: int = _BLOCK, most_programs: int | None = None, **constants: Any
) -> None:
    """Launch `kernel` over `count` items, `block` of them in a program, or in each round of a program where there are
    `most_programs`; `count` is its last argument. Does nothing without items."""
    if count:
        programs = -(-count // block)
        programs = programs if most_programs is None else min(programs, most_programs)
        _run(kernel, (programs, 1, 1), (*arguments, count), {"BLOCK": block, **constants})


#: What was compiled, and the constants that belong behind the arguments: by kernel, device, constants, and types.
_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def _run(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """Launch what an earlier call with arguments of these types compiled: Triton's own search for it takes half of a
    launch."""
    starts = [arguments[at].data_ptr() % 16 for at in kernel.aligned_at]
    key = (kernel, arguments[0].device, *constants.values(), *starts, *map(_type_of, arguments))
    if (found := _compiled.get(key)) is not None:
        compiled, in_order = found
        compiled[grid](*arguments, *in_order)
    elif (compiled := kernel[grid](*arguments, **constants)) is not None:  # the interpreter compiles nothing
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def _type_of(argument: Any) -> Any:
    """What decides which type Triton gives it: of a number of Python's its size, but for those of 0 to 31 bits."""
    return argument.bit_length() // 32 if type(argument) is int else getattr(argument, "dtype", type(argument))


def kernel(*aligned: str) -> Callable[[Callable[..., None]], Any]:
    """Compile a function once for all sizes and alignments; by default Triton compiles others for 1, for multiples of
    16 and for each alignment, while the training waits. Names in capitals are constants.

    Args:
        aligned: tensors that begin at multiples of 16 bytes, which allows wider accesses.
    """

    def compiled(function: Callable[..., None]) -> Any:
        names = inspect.signature(function).parameters
        arguments = [name for name in names if not name.isupper() and name not in aligned]
        made = triton.jit(function, do_not_specialize=arguments, do_not_specialize_on_alignment=arguments)
        made.aligned_at = [at for at, name in enumerate(names) if name in aligned]
        return made

    return compiled


#: Items of a program of kernels that number what they mark: one counts them by program (`block_counts`), `cumsum` adds
#: the counts up, and the next one numbers them by the sums.
COUNTED = 1024


def block_counts(items: Tensor, kinds: int = 1) -> Tensor:
    """Return room for the counts of each program over the last dimension of `items`: int32 [kinds, programs]."""
    return items.new_empty((kinds, -(-items.shape[-1] // COUNTED)), dtype=torch.int32)
