"""Memory that all ranks of one machine have in common."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from embershard.distributed.ranks import Ranks
from embershard.errors import ConfigError
from embershard.units import size


class NodeMemory:
    """Allocates zeroed tensors in memory that all ranks of a group map, each into its own address space. Linux only.

    The memory has no name: the system frees it when the last rank has ended, however that ends. Without a folder it is
    anonymous (memfd), so the size of /dev/shm does not limit it.

    Args:
        ranks: all on one machine. Collective.
        folder: of an unlinked file in place of memory; its disk space is allocated at once.

    Raises:
        ConfigError: the ranks are on several machines, or this system has no such memory.

    >>> from embershard.distributed import process_group
    >>> with process_group("cpu") as ranks:
    ...     NodeMemory(ranks).zeros(3, torch.float32)
    tensor([0., 0., 0.])
    """

    def __init__(self, ranks: Ranks, folder: str | None = None) -> None:
        self._ranks, self._folder = ranks, folder
        machines = ranks.all_gather_objects(_machine())
        if len(set(machines)) > 1:
            places = ", ".join(f"rank {rank} on {name}" for rank, (name, *_) in enumerate(machines[:4]))
            raise ConfigError(
                'mode "data_parallel" keeps one copy of the tables in memory that all ranks map, so all ranks must be '
                f"on one machine (and in one container); got {places}{', ...' if len(machines) > 4 else ''}. Start "
                'them on one machine, or use mode "sharded"'
            )
        if not hasattr(os, "memfd_create"):
            raise ConfigError('mode "data_parallel" needs Linux: its ranks share memory by memfd. Use mode "sharded"')

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed tensor [numel], the same memory on every rank. Collective.

        Raises:
            ConfigError: on all ranks: there is not enough of it, or a rank cannot map it.
        """
        if numel == 0:
            return torch.zeros(0, dtype=dtype)
        num_bytes, handle = numel * dtype.itemsize, -1

        def make() -> str:
            nonlocal handle
            handle = self._open(num_bytes)
            return f"/proc/{os.getpid()}/fd/{handle}"

        def map_it() -> Tensor:
            try:
                return torch.from_file(path, shared=True, size=numel, dtype=dtype)
            except (OSError, RuntimeError) as error:
                raise ConfigError(
                    f"rank {self._ranks.rank} cannot map {size(num_bytes)} of rank 0: {error}. Run all ranks as one "
                    "user in one container, or use another mode"
                ) from error

        try:
            path = self._ranks.from_first(make)
            return self._ranks.together(map_it, ConfigError)
        finally:
            if handle >= 0:
                os.close(handle)

    def _open(self, num_bytes: int) -> int:
        """Return a handle of new memory or disk space without a name."""
        if self._folder is None:
            handle = os.memfd_create("embershard-rows")
            os.ftruncate(handle, num_bytes)
            return handle
        try:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            handle, path = tempfile.mkstemp(prefix="embershard-", suffix=".rows", dir=self._folder)
            os.unlink(path)
            os.posix_fallocate(handle, 0, num_bytes)
        except OSError as error:
            raise ConfigError(
                f"cache.host_dir={self._folder!r}: {size(num_bytes)} could not be taken: {error}. Choose another disk"
            ) from error
        return handle


def _machine() -> tuple[str, ...]:
    """Return the host's name, and what tells this machine and container from others: ranks find each other's memory by
    process number."""
    parts = [socket.gethostname()]
    for read in (lambda: Path("/proc/sys/kernel/random/boot_id").read_text(), lambda: os.readlink("/proc/self/ns/pid")):
        try:
            parts.append(read().strip())
        except OSError:
            parts.append("")
    return tuple(parts)
