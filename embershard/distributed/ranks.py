"""Start and end of the process group, and the few collectives that the trainer needs.

Threads beside the training keep to one core: with more OpenMP threads than cores, libgomp's barriers sleep where they
would spin, in all threads, as long as the threads are there: a step of 20 ms takes 30 (decision 0022, 0029). So
no thread but the training one may start an OpenMP team, gloo's among them.
"""

from __future__ import annotations

import dataclasses
import datetime
import gc
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from embershard.errors import ConfigError, EmbershardError, SetupError
from embershard.machine import cpus_near, keep_to

T = TypeVar("T")

#: A rank waits this long for another one, then fails: a lost rank ends the run.
TIMEOUT = datetime.timedelta(minutes=10)

#: Gathers a tensor of each rank in one, without a copy for each rank as `dist.all_gather`; by its newer name, or older.
gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Ranks:
    """The calling process's place among the ranks of a run. Its methods are collectives, at world size 1 the identity.

    Attributes:
        group: of the collectives; None is the default group.

    >>> Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2, device=torch.device("cpu")).is_first
    False
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """True on the rank that prints and writes the run's record."""
        return self.rank == 0

    def with_own_group(self) -> Ranks:
        """Return the ranks with a new group in host memory, for another thread's collectives. Collective."""
        group: Any = dist.new_group(backend="gloo", timeout=TIMEOUT)  # of all ranks: never torch's "not a member"
        keep_gloo_to_one_core(group)
        return dataclasses.replace(self, group=group)

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        dist.barrier(self.group)

    def all_gather(self, value: torch.Tensor) -> torch.Tensor:
        """Return the tensors [...] of all ranks as one, [world_size, ...]; their shapes must be equal. At world size 1
        it is a view of the value."""
        if self.world_size == 1:  # a thread of gloo's would take 30 us, and wake beside the training
            return value.unsqueeze(0)
        out = value.new_empty(self.world_size * value.numel())
        gather_into(out, value.flatten(), self.group)
        return out.view(self.world_size, *value.shape)

    def all_gather_rows(self, value: torch.Tensor) -> torch.Tensor:
        """Return the rows [n_r, ...] of all ranks in rank order, [sum n_r, ...]; the `n_r` may differ, and be 0."""
        sizes = self.all_gather(torch.tensor(value.shape[0], device=self.device)).tolist()
        padded = value.new_zeros((max(sizes), *value.shape[1:]))
        padded[: value.shape[0]] = value
        gathered = self.all_gather(padded)
        return torch.cat([gathered[r, :n] for r, n in enumerate(sizes)])

    def from_first(self, make: Callable[[], T]) -> T:
        """Call `make` on the first rank; return its value, or raise its exception, on every rank."""
        made: list[Any] = [None, None]
        if self.is_first:
            try:
                made[0] = make()
            except Exception as error:
                made[1] = error
        dist.broadcast_object_list(made, src=0, group=self.group)
        if made[1] is not None:
            raise made[1]
        return made[0]

    def together(self, make: Callable[[], T], kind: type[Exception]) -> T:
        """Call `make` on every rank and return this rank's value; or raise, on all ranks, the error of this kind by
        which it failed on the first rank where it did."""
        made, failed = None, None
        try:
            made = make()
        except kind as error:
            failed = error
        for found in self.all_gather_objects(failed):
            if found is not None:
                raise found
        return made  # type: ignore[return-value]

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Return the picklable values of all ranks, in rank order. Not for the hot path."""
        out: list[Any] = [None] * self.world_size
        dist.all_gather_object(out, value, self.group)
        return out


def pick_device(device: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """Return a rank's device, `cuda:<local_rank>` or the CPU; raise `SetupError` when there are too few GPUs."""
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"train.device: got {device!r}, needed 'auto', 'cpu' or 'cuda'.")
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cpu" or (device == "auto" and not available):
        return torch.device("cpu")
    if local_rank >= available:
        raise SetupError(
            f"The rank with LOCAL_RANK={local_rank} needs GPU {local_rank}, but this node has {available}. "
            'Start fewer ranks per node, or set train.device = "cpu".'
        )
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(device: Literal["auto", "cpu", "cuda"] = "auto", *, numa: bool = True) -> Iterator[Ranks]:
    """Start the default process group, and end it: gloo for host memory, NCCL for GPUs.

    Under torchrun it reads RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; otherwise there is one rank. torchrun
    keeps one store over restarts, where a new rank would read the addresses of ranks that are gone (pytorch issues
    135712 and 167288): each restart gets a key prefix of its own.

    Args:
        device: of all ranks.
        numa: on GPUs, keep the threads of this process to the cores next to its GPU.

    Raises:
        SetupError: a process group exists already, or this node has fewer GPUs than ranks.

    >>> with process_group("cpu") as ranks:
    ...     ranks.all_gather(torch.tensor([7]))
    tensor([[7]])
    """
    if dist.is_initialized():
        raise SetupError("A process group is already initialized in this process; end it first.")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    place = pick_device(device, local_rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
        if numa and (cpus := cpus_near(torch.cuda.get_device_properties(place))):
            keep_to(cpus)
            torch.set_num_threads(min(torch.get_num_threads(), len(cpus)))
    store, rank, world_size = _rendezvous()
    store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=TIMEOUT,
        device_id=place if place.type == "cuda" else None,
    )
    keep_gloo_to_one_core(None)
    try:
        yield Ranks(rank, world_size, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), place)
    except BaseException as error:
        if isinstance(error, EmbershardError):
            error.is_shown_elsewhere = _was_raised_before(error, store)
        if place.type == "cpu":  # NCCL would wait for ranks that wait for this one; the exit ends its group
            _end()
        raise
    _end()


def _end() -> None:
    """End the group now. TorchRec's sharded modules hold it in reference cycles; freed at the interpreter's exit,
    gloo's threads would outlive it and abort the process (pytorch issue 190489)."""
    dist.destroy_process_group()
    gc.collect()


def _was_raised_before(error: EmbershardError, store: dist.Store) -> bool:
    """Return whether another rank came first with this message."""
    text = f"{type(error).__name__}: {error}".encode(errors="surrogatepass")
    try:
        return store.add(f"embershard/raised/{hashlib.sha256(text).hexdigest()}", 1) > 1
    except (RuntimeError, dist.DistError):  # the process with the store has ended
        return False


def is_lost_connection(error: BaseException) -> bool:
    """Return whether a collective failed because another rank ended, or did not come.

    >>> is_lost_connection(RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    True
    """
    # gloo's errors have no class of their own.
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport/" in str(error))


def _rendezvous() -> tuple[dist.Store, int, int]:
    is_alone = os.environ.get("WORLD_SIZE") == "1" and "MASTER_ADDR" not in os.environ  # as our launcher starts it
    if is_alone or "RANK" not in os.environ:
        return dist.HashStore(), 0, 1
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://"))


#: Threads that run a group's gloo operations, as torch 2.13 starts them.
_GLOO_THREADS = 2
_MOST_ROUNDS = 100
_WAIT_SECONDS = 1.0
_GATHER_BYTES = 1 << 20  # takes longer than to ask for a call at its end


def keep_to_one_core() -> None:
    """Let the calling thread's operations run in one thread.

    A thread takes the process's number when it first asks for its own; after that, `set_num_threads` of another thread
    does not change it. Without asking first, the number set here is lost, and the thread starts an OpenMP team. MKL has
    one number for all threads: the training thread sets its own again afterwards.
    """
    torch.get_num_threads()
    torch.set_num_threads(1)


def keep_gloo_to_one_core(group: dist.ProcessGroup | None) -> None:
    """Let gloo's threads of a new group run their copies in one thread. Collective.

    They copy the tensors of a gather, from 32,768 elements on in parallel. Each takes the process's number of threads
    with its first gather, so that is 1 until both had one. Where that fails, only speed is lost.

    >>> from embershard.distributed import process_group
    >>> with process_group("cpu"):  # calls it for its own group
    ...     keep_gloo_to_one_core(dist.new_group(backend="gloo"))
    """
    num_threads, world_size = torch.get_num_threads(), dist.get_world_size(group)
    started, all_started = {threading.get_ident()}, threading.Event()

    def note_thread(_: Any) -> None:
        if threading.get_ident() not in started:  # the caller, if the gather has ended before
            started.add(threading.get_ident())
            if len(started) > _GLOO_THREADS:
                all_started.set()
            all_started.wait(_WAIT_SECONDS)  # so that the other thread takes the next gather

    torch.set_num_threads(1)
    try:
        for _ in range(_MOST_ROUNDS):
            gathered = [torch.empty(_GATHER_BYTES, dtype=torch.bool) for _ in range(world_size)]
            own = torch.full((_GATHER_BYTES,), all_started.is_set())
            gather = dist.all_gather(gathered, own, group, async_op=True).get_future()
            gather.then(note_thread)
            gather.wait()
            if all(rank[0] for rank in gathered):  # the ranks go on together
                break
    finally:
        torch.set_num_threads(num_threads)
