"""The classes that plan, by the device: the one place that says which.

CPU: `SlotMap`, `NextUseIndex` and `CachePlanner` with `VictimQueue`, by compiled loops (`loops/`).

CUDA: `KernelSlotMap`, `KernelNextUseIndex` and `KernelPlanner` with `KernelVictimQueue`, by Triton kernels (`gpu/`).
They make the plans of the CPU, to the slot. CUDA builds of torch for Linux bring Triton along; without it, caches on a
GPU are refused.

Tests compare both with torch's operations (`tests/unit/cache/torch_operations.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from embershard.cache import loops
from embershard.cache.next_use import NextUseIndex
from embershard.cache.planner import CachePlanner, Planner
from embershard.cache.slot_map import SlotMap
from embershard.cache.slot_state import SlotState
from embershard.errors import SetupError

PlanningClasses = tuple[type[SlotMap], type[NextUseIndex], Callable[[SlotState], Planner]]


def planning_classes(device: torch.device) -> PlanningClasses:
    """Return the classes of the map, of the index of next uses and of the planner of a cache on `device`. Those of a
    CPU have their loops loaded.

    Raises:
        SetupError: caches on a GPU need Triton, which is not installed.
    """
    if device.type == "cuda":
        return kernel_classes()
    loops.load_those_of_a_cache()
    return SlotMap, NextUseIndex, CachePlanner


def kernel_classes() -> PlanningClasses:
    """Return the classes for a GPU, wherever Triton's kernels run.

    Raises:
        SetupError: Triton is not installed.
    """
    if find_spec("triton") is None:
        raise SetupError(
            "caches on a GPU are planned by Triton kernels, and triton is not installed. CUDA builds of torch for "
            "Linux bring it along: reinstall torch, or pip install the triton that `pip show torch` requires"
        )
    from embershard.cache.gpu.next_use import KernelNextUseIndex
    from embershard.cache.gpu.planner import KernelPlanner
    from embershard.cache.gpu.slot_map import KernelSlotMap

    return KernelSlotMap, KernelNextUseIndex, KernelPlanner
