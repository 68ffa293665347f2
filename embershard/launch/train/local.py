"""Starts ranks on this machine, as torchrun does, but lets no other machine connect."""

from __future__ import annotations

import os
import socket
import sys
import uuid
from collections.abc import Sequence

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

LOOPBACK = "127.0.0.1"
_BACKEND = "loopback"


def default_num_ranks() -> int:
    """Return one rank per GPU, or 2 on a machine without one."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def start_ranks(num_ranks: int, module: str, arguments: Sequence[str]) -> int:
    """Run `python -m module arguments...` as `num_ranks` ranks; return 0 when all of them ended well.

    Each rank gets cores / `num_ranks` OpenMP threads and uses the loopback interface only, unless OMP_NUM_THREADS,
    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME say otherwise.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    rendezvous_handler_registry.register(_BACKEND, LoopbackRendezvous)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend=_BACKEND,
        rdzv_endpoint=LOOPBACK,
        local_addr=LOOPBACK,
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"embershard: rank {rank} failed first (exit code {failure.exitcode}).", file=sys.stderr)
        return 1
    except (SignalException, KeyboardInterrupt):
        print("embershard: stopped.", file=sys.stderr)
        return 130
    return 0


class LoopbackRendezvous(StaticTCPRendezvous):
    """A rendezvous of one node. torchrun's own handlers listen on every network interface, unprotected."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        super().__init__(LOOPBACK, port, rank=0, world_size=1, run_id=parameters.run_id, timeout=0)
        # The store owns the socket's descriptor from here on.
        descriptor = listener.detach()
        self._listening = TCPStore(LOOPBACK, port, is_master=True, master_listen_fd=descriptor, wait_for_workers=False)

    def get_backend(self) -> str:
        return _BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        address = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(PrefixStore(self.run_id, self._listening), self.rank, self.world_size, address)
