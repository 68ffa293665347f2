"""How torch computes in a run: the number format of its matrix products, whether sums keep one order, and in how many
threads.

All belong to the process, not to a tensor. A run sets the first two when it begins to compute, and sets them back at
its end; the threads are set for all that the process of a rank does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils.deterministic

from embershard.distributed import Ranks
from embershard.errors import ConfigError
from embershard.machine import OWN_THREADS_VARIABLE, THREADS_VARIABLE, RankThreads, cores_of_a_rank
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.fit.model_size import step_flops

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
    if settings.cuda_graph and device.type != "cuda":
        raise ConfigError(
            f"train.cuda_graph: got true on a {device.type.upper()}, needed a GPU. Remove it, or train on one."
        )


def rank_threads(config: RunConfig, ranks: Ranks) -> RankThreads:
    """Return in how many threads the operations of this rank run: as many as OMP_NUM_THREADS says where the user has
    set it, or by the size of a step.

    >>> import torch
    >>> rank_threads(RunConfig(), Ranks(0, 1, 0, 1, torch.device("cpu"))).count
    1
    """
    given, own = os.environ.get(THREADS_VARIABLE), os.environ.get(OWN_THREADS_VARIABLE)
    if given is not None and given != own:
        return RankThreads(torch.get_num_threads(), f"by {THREADS_VARIABLE}")
    cores = int(own) if own else cores_of_a_rank(ranks.local_world_size)
    if ranks.device.type != "cpu":
        return RankThreads(min(cores, torch.get_num_threads()), "cores of a rank: steps run on a GPU")
    return RankThreads.for_step(step_flops(config, ranks.world_size), cores)


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
    return torch.autocast(device.type, dtype=torch.bfloat16) if settings.precision == "bf16" else nullcontext()
