"""In place of the collectives of gloo and NCCL: of one of any number of ranks that are mirror images.

The other ranks have the same samples. So they add the same to a sum, and send this rank the ids that this rank sends
itself; their rows are not there, and in place of rows and of their gradients they send zeros. A collective is some
kernels of the current stream: NCCL's own streams are not modelled. (torch's "fake" group ends DDP's backward, and its
all-to-all gives a rank the ids of other ranks' tables.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchrec.distributed import comm

from embershard.distributed import Ranks

_BACKEND = "mirror"


class Mirror(dist.ProcessGroup):
    """One of `num_ranks`."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self._rank, self._num_ranks = rank, num_ranks

    def size(self) -> int:
        return self._num_ranks

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]  # type: ignore[no-any-return]

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def getBackendName(self) -> str:  # noqa: N802
        return _BACKEND

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            if tensor.dtype == torch.float64 and tensor.dim() == 2 and len(tensor) == self._num_ranks:
                tensor.copy_(tensor[self._rank].clone())  # an agreement, to which each rank adds a row
                continue
            is_sum = opts is None or opts.reduceOp == dist.ReduceOp.SUM
            if is_sum and tensor.dtype != torch.uint8:  # bytes are rows: one rank has a row, the others zeros
                tensor.mul_(self._num_ranks)
        return _done(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return _done(tensors)

    def barrier(self, opts: Any = None) -> Any:
        return _done([])

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for parts, own in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(own)
        return _done(outputs)

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> Any:
        for part in output.view(self._num_ranks, -1):
            part.copy_(own.flatten())
        return _done([output])

    _allgather_base = all_gather_single

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        return self.allgather(outputs, inputs) if outputs else _done([])

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        for output, parts in zip(outputs, inputs, strict=False):  # the first rank alone has inputs
            output.copy_(parts[self._rank])
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        own = given.view(self._num_ranks, *output.shape)[self._rank]
        output.copy_(own * self._num_ranks)
        return _done([output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_(parts[self._rank] * self._num_ranks)
        return _done(outputs)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, to_get: Sequence[int], to_send: Sequence[int], opts: Any = None
    ) -> Any:
        sent, got = (
            list(sizes) or [len(whole) // self._num_ranks] * self._num_ranks
            for whole, sizes in ((given, to_send), (output, to_get))
        )
        own, parts = given.split(sent)[self._rank], output.split(got)
        if self._num_ranks > 1 and (given.is_floating_point() or given.dtype == torch.uint8):  # bytes are rows
            output.zero_()
            parts[self._rank].copy_(own.view(parts[self._rank].shape))
            return _done([output])
        for part in parts:
            assert part.numel() == own.numel(), "the mirror images send as many ids as this rank sends itself"
            part.copy_(own.view(part.shape))
        return _done([output])

    alltoall_base = all_to_all_single


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


@contextlib.contextmanager
def mirrored_ranks(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """The default process group is a `Mirror`. What the first rank makes and sends, a later one makes for itself."""
    if _BACKEND not in dist.Backend.backend_list:
        make = lambda store, rank, size, timeout: Mirror(rank, size)  # noqa: E731
        dist.Backend.register_backend(_BACKEND, make, devices=["cpu", "cuda"])
    with contextlib.ExitStack() as stack:
        for name in ("_INTRA_PG", "_CROSS_PG"):  # TorchRec keeps a node's group for the life of a process
            stack.enter_context(mock.patch.object(comm, name, None))
        if rank:
            stack.enter_context(mock.patch.object(Ranks, "from_first", lambda self, make: make()))
            stack.enter_context(mock.patch.object(dist, "broadcast_object_list"))
        store = FakeStore() if num_ranks > 1 else dist.HashStore()  # where a rank would wait for the others
        dist.init_process_group(_BACKEND, rank=rank, world_size=num_ranks, store=store)
        stack.callback(dist.destroy_process_group)
        yield
