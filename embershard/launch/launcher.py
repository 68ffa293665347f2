"""Starts ranks on this machine, lets no other machine connect, and starts them again when they fail."""

from __future__ import annotations

import os
import socket
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from embershard.errors import ConfigError
from embershard.launch.arguments import whole
from embershard.launch.rank_group import RankGroup
from embershard.launch.stop_signals import stop_asked
from embershard.machine import MapLimit, cores_problem, limits_of_maps
from embershard.sharding.plan import Plan
from embershard.training.config import RunConfig

if TYPE_CHECKING:  # it takes seconds to import: once ranks are started
    from torch.distributed import TCPStore


LOOPBACK = "127.0.0.1"
#: Ranks that do nothing for so long are stopped; with what follows, within a minute.
HANG_SECONDS = 50.0
#: The libraries of a rank map 2.0 to 2.6 GB on a CPU, most of it never used; with less, libc ends the process.
_LEAST_MAPPED_BYTES = 2_500_000_000


def add_hang_seconds(parser: ArgumentParser) -> None:
    """Add `--hang-seconds S`, of which 0 is never."""
    text = "end ranks that do nothing for so long, and name the one that hangs (default: %(default)s; 0: never)"
    parser.add_argument("--hang-seconds", type=whole, default=int(HANG_SECONDS), metavar="S", help=text)


def start_ranks(
    num_ranks: int,
    module: str,
    arguments: Sequence[str] = (),
    *,
    job: object = None,
    most_restarts: int = 0,
    restarted: Callable[[bool], object] | None = None,
    hang_seconds: float | None = HANG_SECONDS,
    stacks: Path | None = None,
) -> int:
    """Run `python -m module arguments...` as `num_ranks` ranks, each with the same job; return the exit code.

    It is 0 when all ended well, also after a SIGTERM or SIGHUP that ended them in order; 130 after a Ctrl-C that did;
    128 and the signal's number after a second signal, which ends them at once; 1 when a rank failed.

    Each rank gets at most cores / `num_ranks` threads (`RankThreads`) and uses the loopback interface only, unless
    OMP_NUM_THREADS, GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME say otherwise. Ranks end when this process dies.

    Args:
        job: what ranks are to do (`embershard.launch.rank`).
        most_restarts: of ranks that failed, unless the same error would end them again.
        restarted: returns the job of restarted ranks, given whether a rank has trained a step; None: the same.
        hang_seconds: ranks that hang so long (`HangWatch`) are stopped, and the one that hangs is named. None: never.
        stacks: file for the stacks of ranks that hang.

    Raises:
        ConfigError: torchrun started this process as a rank, or the memory that a process may map is limited too much.
    """
    _check_map_limit(limits_of_maps())
    _check_alone()
    has_trained, num_restarts = False, 0
    command = [sys.executable, "-m", module, *arguments]
    with stop_asked() as asked:
        while True:
            store = loopback_store() if num_ranks > 1 else None  # which loads torch; one rank meets nobody
            address = None if store is None else (LOOPBACK, store.port)
            group = RankGroup(num_ranks, command, address, asked, hang_seconds, stacks, job)
            ended, has_trained = group.run(), has_trained or group.has_trained
            if not ended.may_restart or asked.number or num_restarts == most_restarts:
                _tell(ended.message)
                return ended.code
            num_restarts += 1
            _tell(f"{ended.message} Restart {num_restarts} of {most_restarts}.")
            job = job if restarted is None else restarted(has_trained)


def _check_alone() -> None:
    """Raise `ConfigError` where this process is one of several that would all start the ranks."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "torchrun starts ranks, and this command starts ranks, too: each of torchrun's would start all of them. "
            "Call this command without torchrun."
        )
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":  # one of several, without a LOCAL_RANK
        raise ConfigError(
            f"this process is rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, by RANK and WORLD_SIZE in its "
            "environment, and LOCAL_RANK or MASTER_ADDR is missing: each of them would start a run of its own. Start "
            "torchrun in each (docs/operations.md); or, for a run of this process alone: unset RANK WORLD_SIZE."
        )


def _check_map_limit(limits: Sequence[MapLimit]) -> None:
    for limit in limits:
        if limit.name == "ulimit -v" and limit.most_bytes < _LEAST_MAPPED_BYTES:
            raise ConfigError(
                f"{limit.name}: got {limit.most_bytes // 1024}, needed at least {_LEAST_MAPPED_BYTES // 1024} KiB for "
                "the libraries of a rank, and more for its rows. Raise it: ulimit -v unlimited."
            )


def loopback_store() -> TCPStore:
    """Return the server of a store that only this machine can reach. torchrun's listens on every network interface,
    unprotected."""
    from torch.distributed import TCPStore

    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    # The store owns the socket's descriptor from here on.
    return TCPStore(LOOPBACK, port, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False)


def _tell(message: str) -> None:
    if message:
        with suppress(OSError):  # `2>&1 | tee`: Ctrl-C ends the reader, too
            print(f"embershard: {message}", file=sys.stderr, flush=True)


_MOST_LOCAL_RANKS = 64  # above it, the number of processes must be asked for
_SMALL_BATCH = 256  # of all ranks: so few samples gain nothing from more ranks


def has_small_batches(config: RunConfig) -> bool:
    """Return whether batches of all ranks together are so small that more than one gain nothing."""
    size = config.train.global_batch_size
    return size is not None and size <= _SMALL_BATCH


def default_ranks(config: RunConfig) -> int:
    """Return the number of ranks where nobody chose one, and say it: one for small batches of all ranks; else one per
    GPU, or 2 on a machine without one."""
    num_ranks, why = 2, ""
    if has_small_batches(config):
        num_ranks, why = 1, f", since batches of {config.train.global_batch_size} samples gain nothing from more"
    elif config.train.device != "cpu":
        import torch

        num_ranks = torch.cuda.device_count() if torch.cuda.is_available() else 2
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    print(f"embershard: starting {ranks}{why} (--nproc N for another number).", file=sys.stderr, flush=True)
    return num_ranks


def warn_of_cores(config: RunConfig, num_ranks: int) -> None:
    """Print a warning where far more ranks than this machine has cores train on its CPU."""
    cores = len(os.sched_getaffinity(0))
    problem = cores_problem(num_ranks, cores, "this machine")
    if problem is None or config.train.device == "cuda":
        return
    import torch

    if config.train.device == "cpu" or not torch.cuda.is_available():
        advice = f"Use --nproc {cores} (and a plan for as many), or more machines (torchrun)."
        print(f"embershard: {problem} {advice}", file=sys.stderr, flush=True)


def planned_ranks(config: RunConfig, nproc: int | None, *, is_started: bool = True) -> int | None:
    """Return `nproc`, or the number of ranks of the run's plan; None where neither says one.

    Args:
        is_started: they will be started on this machine.

    Raises:
        ConfigError: a command for one machine may not start so many; a setting needs a plan.
        ShardingError: the plan is for another number.
    """
    config.check_planned()
    if config.sharding.plan is None:
        if is_started and nproc is not None:
            config.sharding.device_limits(nproc)  # are for as many
        return nproc
    plan = Plan.load(config.sharding.plan)
    if nproc is None and plan.ranks_per_node != plan.world_size:
        raise ConfigError(
            f"the plan is for {plan.world_size} ranks on {plan.world_size // plan.ranks_per_node} nodes, and this "
            "command starts those of one; start them with torchrun (docs/operations.md)."
        )
    if nproc is None and plan.world_size > _MOST_LOCAL_RANKS:
        raise ConfigError(
            f"the plan is for {plan.world_size} ranks on one node; say --nproc {plan.world_size} if you mean it."
        )
    num_ranks = nproc or plan.world_size * config.sharding.groups
    if is_started:
        plan.check_ranks(*config.sharding.group_shape(num_ranks, num_ranks))  # all of them on this machine
        config.sharding.device_limits(num_ranks)
    return num_ranks
