"""In place of the collectives of gloo and NCCL: of one rank, or of the first of two ranks that are mirror images.

The other rank has the same samples. So it adds the same to a sum, and sends this rank the ids that this rank sends
itself; its rows are not there, and in place of rows and of their gradients it sends zeros. A collective is some kernels
of the current stream: NCCL's own streams are not modelled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

_BACKEND = "mirror"


class Mirror(dist.ProcessGroup):
    """Rank 0 of `num_ranks`, one or two."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__(0, num_ranks)
        self._num_ranks = num_ranks

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
            is_sum = opts is not None and opts.reduceOp == dist.ReduceOp.SUM
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
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_(parts[0])
        return _done(outputs)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        own = given.view(self._num_ranks, *output.shape)[0]
        output.copy_(own * self._num_ranks)
        return _done([output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_(parts[0] * self._num_ranks)
        return _done(outputs)

    def all_to_all_single(
        self, output: Tensor, given: Tensor, to_get: Sequence[int], to_send: Sequence[int], opts: Any = None
    ) -> Any:
        sent = list(to_send) or [len(given) // self._num_ranks] * self._num_ranks
        own = given[: sent[0]].flatten()
        if self._num_ranks > 1 and given.is_floating_point():
            output.zero_()
            output[: len(given[: sent[0]])] = given[: sent[0]]
            return _done([output])
        for part in output.split(list(to_get) or [len(output) // self._num_ranks] * self._num_ranks):
            assert part.numel() == own.numel(), "the mirror image sends as many ids as this rank sends itself"
            part.copy_(own.view(part.shape))
        return _done([output])

    alltoall_base = all_to_all_single


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


@contextlib.contextmanager
def mirrored_ranks(num_ranks: int) -> Iterator[None]:
    """The default process group is a `Mirror`."""
    if _BACKEND not in dist.Backend.backend_list:
        make = lambda store, rank, size, timeout: Mirror(size)  # noqa: E731
        dist.Backend.register_backend(_BACKEND, make, devices=["cpu", "cuda"])
    with contextlib.ExitStack() as stack:
        dist.init_process_group(_BACKEND, rank=0, world_size=num_ranks, store=dist.HashStore())
        stack.callback(dist.destroy_process_group)
        yield
