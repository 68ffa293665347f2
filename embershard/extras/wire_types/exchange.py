"""Exchanges of pooled embeddings whose rows travel as bytes, in place of TorchRec's of numbers.

Table-wise and column-wise, a rank sends its features' rows to the ranks that have the samples, and gets gradients
back. Row-wise, each rank has a part of each row's sum. A reduce-scatter would add up while rows travel, in the type in
which they travel; so the parts go to the samples' rank by an all-to-all, and are added up there, in rank order, in
float32. A rank's own part is encoded, too: an embedding is the same on whichever rank its sample is.

Letters: W ranks, B samples of a rank, D columns.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.types import Awaitable, NoWait

from embershard.errors import ShardingError
from embershard.extras.wire_types.encoding import WireType


class Types(NamedTuple):
    """Of embeddings between ranks, and of their gradients."""

    forward: WireType
    backward: WireType


class EncodedExchange(nn.Module):
    """Output exchange of a group of tables; called as TorchRec's are."""

    def __init__(
        self, group: dist.ProcessGroup, types: Types, callbacks: Sequence[Callable[[Tensor], Tensor]] = ()
    ) -> None:
        super().__init__()
        self._group, self._types, self._callbacks = group, types, callbacks
        self._rank, self._ranks = group.rank(), group.size()

    def forward(
        self,
        rows: Tensor,
        batch_size_per_rank: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        **of_features: Any,
    ) -> Awaitable[Tensor]:
        """Send what this rank pooled, [sum of B, sum of D]; the awaitable gives the rows of its samples, [B, sum of D].

        Args:
            batch_size_per_rank, input_splits: samples of each rank, by TorchRec's two names; None: as many of each.

        Raises:
            ShardingError: features differ in their number of samples.
        """
        if of_features:
            raise ShardingError(
                "got a batch whose features differ in their number of samples, with an 8-bit type between ranks, which "
                'needs the same number for all. Use "fp16" or "fp32"'
            )
        exchanged: Awaitable[Tensor] = NoWait(rows)
        if self._ranks > 1:
            sizes = batch_size_per_rank or input_splits or [len(rows) // self._ranks] * self._ranks
            exchanged = _Exchanged(self, list(sizes), rows)
        exchanged.callbacks.extend(self._callbacks)
        return exchanged

    @abstractmethod
    def send(self, rows: Tensor, sizes: list[int]) -> _UnderWay:
        """Send rows [sum of B, own D] to their samples' ranks, which have `sizes` samples."""

    @abstractmethod
    def received(self, sent: Tensor, sizes: list[int]) -> Tensor:
        """Return the rows of this rank's samples, [B, sum of D], from what came."""

    @abstractmethod
    def send_back(self, gradients: Tensor, sizes: list[int]) -> _UnderWay:
        """Send gradients [B, sum of D] of this rank's samples to the ranks that have the rows."""

    @abstractmethod
    def received_back(self, sent: Tensor, sizes: list[int]) -> Tensor:
        """Return the gradients of what this rank sent, [sum of B, own D]."""

    def _all_to_all(self, encoded: Tensor, outgoing: list[int], incoming: list[int]) -> _UnderWay:
        """Send bytes, cut for each rank by `outgoing`."""
        received = encoded.new_empty(sum(incoming))
        work = dist.all_to_all_single(received, encoded.reshape(-1), incoming, outgoing, self._group, async_op=True)
        return _UnderWay(work, received, encoded)

    def divided(self, gradients: Tensor) -> Tensor:
        """Return gradients as means over the ranks' losses, as TorchRec does."""
        return gradients.div_(self._ranks) if get_gradient_division() else gradients


class EncodedAllToAll(EncodedExchange):
    """Whole pooled rows from the ranks that have the tables.

    Args:
        dims: of each rank's features.
    """

    def __init__(self, group: dist.ProcessGroup, types: Types, dims: Sequence[Sequence[int]], *rest: Any) -> None:
        super().__init__(group, types, *rest)
        self._dims = [list(of_rank) for of_rank in dims]
        self._columns = list(map(sum, self._dims))

    def send(self, rows: Tensor, sizes: list[int]) -> _UnderWay:
        """Send the rows of this rank's features."""
        by_rank = [self._types.forward.sum_bytes(own) for own in self._dims]
        encoded = self._types.forward.encode_beside(rows, self._dims[self._rank])
        outgoing = [samples * by_rank[self._rank] for samples in sizes]
        return self._all_to_all(encoded, outgoing, [sizes[self._rank] * width for width in by_rank])

    def received(self, sent: Tensor, sizes: list[int]) -> Tensor:
        """Return the rows of all features."""
        samples, kind = sizes[self._rank], self._types.forward
        widths = [kind.sum_bytes(own) for own in self._dims]
        parts = sent.split([samples * width for width in widths])
        shaped = [part.view(samples, width) for part, width in zip(parts, widths, strict=True)]
        return torch.cat([kind.decode_beside(*each) for each in zip(shaped, self._dims, strict=True)], dim=1)

    def send_back(self, gradients: Tensor, sizes: list[int]) -> _UnderWay:
        """Send the gradients of each rank's features."""
        kind = self._types.backward
        by_rank = gradients.split(self._columns, dim=1)
        encoded = [kind.encode_beside(*each).view(-1) for each in zip(by_rank, self._dims, strict=True)]
        width = kind.sum_bytes(self._dims[self._rank])
        outgoing, incoming = [part.numel() for part in encoded], [number * width for number in sizes]
        return self._all_to_all(torch.cat(encoded), outgoing, incoming)

    def received_back(self, sent: Tensor, sizes: list[int]) -> Tensor:
        """Return the gradients of this rank's features."""
        kind, own = self._types.backward, self._dims[self._rank]
        return kind.decode_beside(sent.view(sum(sizes), kind.sum_bytes(own)), own)


class EncodedReduceScatter(EncodedExchange):
    """Sums of the parts that every rank has of each row.

    Args:
        dims: of the features.
    """

    def __init__(self, group: dist.ProcessGroup, types: Types, dims: Sequence[int]) -> None:
        super().__init__(group, types)
        self._dims = list(dims)

    def send(self, rows: Tensor, sizes: list[int]) -> _UnderWay:
        """Send this rank's parts."""
        width = self._types.forward.sum_bytes(self._dims)
        outgoing, incoming = [samples * width for samples in sizes], [sizes[self._rank] * width] * self._ranks
        return self._all_to_all(self._types.forward.encode_beside(rows, self._dims), outgoing, incoming)

    def received(self, sent: Tensor, sizes: list[int]) -> Tensor:
        """Return the sums, added in rank order."""
        kind, samples = self._types.forward, sizes[self._rank]
        every = kind.decode_beside(sent.view(self._ranks * samples, kind.sum_bytes(self._dims)), self._dims)
        total, *others = every.split(samples) if samples else [every] * self._ranks
        for part in others:
            total = total + part
        return total

    def send_back(self, gradients: Tensor, sizes: list[int]) -> _UnderWay:
        """Send the gradients of this rank's samples to every rank."""
        encoded = self._types.backward.encode_beside(gradients, self._dims)
        width = encoded.shape[1]
        if len(set(sizes)) > 1:  # gloo gathers equal parts only
            outgoing, incoming = [encoded.numel()] * self._ranks, [samples * width for samples in sizes]
            return self._all_to_all(encoded.repeat(self._ranks, 1), outgoing, incoming)
        received = encoded.new_empty(sum(sizes) * width)
        work = dist.all_gather_into_tensor(received, encoded.view(-1), self._group, async_op=True)
        return _UnderWay(work, received, encoded)

    def received_back(self, sent: Tensor, sizes: list[int]) -> Tensor:
        """Return the gradients of all ranks' samples."""
        kind = self._types.backward
        return kind.decode_beside(sent.view(sum(sizes), kind.sum_bytes(self._dims)), self._dims)


class _UnderWay(NamedTuple):
    """Bytes on their way: uint8, what comes, and what has to stay until it has left."""

    work: Any
    received: Tensor
    source: Tensor

    def wait(self) -> Tensor:
        """Return what came."""
        self.work.wait()
        if self.received.is_cuda:
            self.received.record_stream(torch.cuda.current_stream())
        return self.received


class _Exchanged(Awaitable[Tensor]):
    """One batch's exchange. It begins at once, and its backward with the gradient of what came, as TorchRec's do: what
    else there is to look up, or to differentiate, is done meanwhile."""

    def __init__(self, exchange: EncodedExchange, sizes: list[int], rows: Tensor) -> None:
        super().__init__()
        self.exchange, self.sizes, self.dtype = exchange, sizes, rows.dtype
        self.sent: _UnderWay | None = None
        self._begun: Tensor | None = _Begin.apply(self, rows)

    def _wait_impl(self) -> Tensor:
        begun, self._begun = self._begun, None  # whose graph has this object: else both stay
        return _End.apply(self, begun)  # type: ignore[no-any-return]

    def take(self) -> Tensor:
        """Wait for what came; once."""
        sent, self.sent = self.sent, None
        assert sent is not None
        return sent.wait()


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchanged: _Exchanged, rows: Tensor) -> Tensor:  # type: ignore[override]
        ctx.exchanged = exchanged
        exchanged.sent = exchanged.exchange.send(rows, exchanged.sizes)
        return rows.new_zeros(1)  # carries the graph from here to the end

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        exchanged = ctx.exchanged
        gradients = exchanged.exchange.received_back(exchanged.take(), exchanged.sizes)
        return None, exchanged.exchange.divided(gradients).to(exchanged.dtype)


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchanged: _Exchanged, begun: Tensor) -> Tensor:  # type: ignore[override]
        ctx.exchanged = exchanged
        return exchanged.exchange.received(exchanged.take(), exchanged.sizes).to(exchanged.dtype)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        exchanged = ctx.exchanged
        exchanged.sent = exchanged.exchange.send_back(gradients, exchanged.sizes)
        return None, gradients.new_zeros(1)
