"""`MachineLimits`: the memory and the disk space that a run can take."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from embershard.machine import HostMemory, host_memory
from embershard.training.config import RunConfig
from embershard.training.fit.memory_needs import MemoryNeeds


@dataclass(frozen=True)
class MachineLimits:
    """What a run can take on this machine.

    Attributes:
        device_bytes: free memory of a rank's GPU; None without one.
        disk_bytes: free space in `cache.host_dir`; None where there is no such folder in the settings.
    """

    host: HostMemory
    device_bytes: int | None = None
    disk_bytes: int | None = None

    @classmethod
    def here(cls, config: RunConfig, device: torch.device) -> MachineLimits:
        """Return what this machine has left, for a rank on `device`. (GPU memory was never read on a GPU yet.)"""
        is_gpu, folder = device.type == "cuda", config.cache.host_dir
        return cls(
            host_memory(),
            torch.cuda.mem_get_info(device)[0] if is_gpu else None,
            None if folder is None else shutil.disk_usage(_existing(Path(folder))).free,
        )

    def has_room_for(self, needs: MemoryNeeds) -> bool:
        """Return True if everything fits, all rows used."""
        return (
            needs.host_bytes <= self.host.available_bytes
            and (self.device_bytes is None or needs.device_bytes <= self.device_bytes)
            and (self.disk_bytes is None or needs.disk_bytes <= self.disk_bytes)
        )


def disk_of(folder: Path) -> int:
    """Return the number of the file system that a folder is on, or will be."""
    return _existing(folder).stat().st_dev


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
