"""Choice of the classes that plan, by the device."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from embershard.cache.next_use import NextUseIndex
from embershard.cache.planner import CachePlanner, Planner
from embershard.cache.slot_map import SlotMap
from embershard.cache.slot_state import SlotState

HAS_TRITON = find_spec("triton") is not None


def uses_kernels(device: torch.device) -> bool:
    """Return True if caches on `device` plan by kernels. Without Triton, torch's operations do the same work."""
    return device.type == "cuda" and HAS_TRITON


def planning_classes(
    device: torch.device,
) -> tuple[type[SlotMap], type[NextUseIndex], Callable[[SlotState], Planner]]:
    """Return the classes of the map, of the index of next uses and of the planner of a cache on `device`."""
    if not uses_kernels(device):
        return SlotMap, NextUseIndex, CachePlanner
    from embershard.cache.gpu.next_use import KernelNextUseIndex  # triton is not installed everywhere
    from embershard.cache.gpu.planner import KernelPlanner
    from embershard.cache.gpu.slot_map import KernelSlotMap

    return KernelSlotMap, KernelNextUseIndex, KernelPlanner
