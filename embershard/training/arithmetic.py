"""How torch computes in a run: the number format of its matrix products, and whether sums keep one order.

Both belong to the process, not to a tensor: a run sets them when it begins to compute, and sets them back at its end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils.deterministic

from embershard.errors import ConfigError
from embershard.training.config import TrainConfig

#: cuBLAS reads it once. With these values products on several streams do not choose their kernels by what is left of a
#: common workspace; torch refuses deterministic products without one of them.
_WORKSPACE, _WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")


def prepare_process(settings: TrainConfig) -> None:
    """Set the variable that `train.deterministic` needs, in a process in which CUDA has not started yet."""
    if settings.deterministic:
        os.environ.setdefault(_WORKSPACE, _WORKSPACES[0])


def check_process(settings: TrainConfig, device: torch.device) -> None:
    """Raise `ConfigError` if this process cannot compute as the settings ask for."""
    got = os.environ.get(_WORKSPACE)
    if settings.deterministic and device.type == "cuda" and got not in _WORKSPACES:
        raise ConfigError(
            f"train.deterministic: got {_WORKSPACE}={got or '(not set)'}, needed {' or '.join(_WORKSPACES)} before "
            f"CUDA starts. Set it in the environment of the ranks: export {_WORKSPACE}={_WORKSPACES[0]}"
        )


@contextmanager
def arithmetic(settings: TrainConfig, device: torch.device) -> Iterator[None]:
    """Let this process compute as the settings say, inside.

    TF32 is of GPUs; on a CPU it changes nothing. With `train.deterministic` torch takes algorithms that add in one
    order, on any device, FBGEMM splits no row's gradient over blocks that add with atomics, and an operation that has
    no such algorithm raises. Memory is not filled before it is written, as that mode would: it finds reads of such
    memory, and would touch all rows of all tables.

    Raises:
        ConfigError: see `check_process`.
    """
    check_process(settings, device)
    products: Any = torch.backends.cuda.matmul
    convolutions: Any = torch.backends.cudnn
    memory: Any = torch.utils.deterministic
    # Read by the new names, and set by the old ones: each raises where another program used the other.
    before = products.fp32_precision == "tf32", convolutions.conv.fp32_precision == "tf32"
    was = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    products.allow_tf32 = convolutions.allow_tf32 = settings.precision == "tf32"
    if settings.deterministic:
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before
        if settings.deterministic:
            torch.use_deterministic_algorithms(was[0])
            memory.fill_uninitialized_memory = was[1]


def autocast(settings: TrainConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a forward, in the precision of the settings."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings.precision == "bf16")
