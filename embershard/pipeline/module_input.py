"""What one sharded module reads of a batch, taken out of the model's forward and run ahead of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache.next_use import KnownBatch
from embershard.cache.tickets import Ticket
from embershard.errors import CacheError
from embershard.pipeline.announced import Announced, batch_sizes, features_among
from embershard.pipeline.batch_tensors import tensor_bytes
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.modules import reads_checked_ids


class ModuleInput:
    """The input of one sharded module for one batch, from the all-to-all to the forward.

    The constructor starts the all-to-all; then, in this order: :meth:`send`, :meth:`receive`, :meth:`know`,
    :meth:`make_resident` until it is True, :meth:`forward` if at all, :meth:`close`. The constructor, the first two and
    the forward are collective.
    """

    def __init__(self, module: ShardedModule, args: list[Any], kwargs: dict[str, Any]) -> None:
        self._module = module
        self._context = module.create_context()
        args, kwargs = module.preprocess_input(args, kwargs)
        self._waiting = module.input_dist(self._context, *args, **kwargs)
        self._is_sent = False
        self._received: Any = None
        self._known: dict[int, KnownBatch | None] = {}  # by pool
        self._tickets: dict[int, Ticket] = {}
        self._is_packed = False
        self._announced: Announced | None = None
        self.is_used = False
        self.known_bytes = 0

    def send(self) -> None:
        """The ranks told each other how many ids they will send: send the ids. Doing it twice does nothing."""
        if not self._is_sent:
            self._waiting, self._is_sent = self._waiting.wait(), True

    def receive(self) -> None:
        """The ids of this rank's tables are here. Doing it twice does nothing."""
        if self._waiting is not None:
            self._received, self._waiting = self._waiting.wait(), None
        self.known_bytes = tensor_bytes((self._received, self._context))

    def know(self) -> None:
        """Tell the caches, and keep no more than the ids."""
        for number, (pool, features) in enumerate(_pools(self._module, self._received)):
            self._known[number] = pool.know(features.values(), features.offsets(), batch_sizes(features))
        if reads_checked_ids(self._module) and isinstance(self._received, KJTList):
            self._received = KJTList([_with_values(f, f.values().int()) for f in self._received])
            self._is_packed = True
        chosen = sum(batch.num_bytes for batch in self._known.values() if batch is not None)
        self.known_bytes = chosen + tensor_bytes((self._received, self._context))

    def make_resident(self, critical_path: bool) -> bool:
        """Bring the rows of the batch to the device, as far as they fit beside those that others use; True when all
        are there."""
        self._unpack()
        complete = True
        for number, (pool, features) in enumerate(_pools(self._module, self._received)):
            if self._is_resident(number):
                continue
            known = self._known.get(number)
            ticket = pool.prefetch_if_it_fits(
                features.values(), features.offsets(), batch_sizes(features), known, critical_path
            )
            if ticket is None:
                complete = False
            else:
                self._tickets[number] = ticket
                self._known[number] = None
        return complete

    def expect(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """The module's own input, in the batch that trains now."""
        features = features_among(args, kwargs)
        self._announced = None if features is None else Announced(features)

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Lookup and output all-to-all, as the module's own forward gives them for these arguments.

        Raises:
            CacheError: they are not those of the batch that went ahead, or were forwarded before.
        """
        if self.is_used:
            raise CacheError(
                "a second forward of one step's batch: its rows were brought in for one forward and one backward. In a "
                "step, call the model once with gradients (other calls under torch.no_grad()), or train without the "
                "pipeline"
            )
        if self._announced is not None:
            self._announced.check(features_among(args, kwargs))
        self.is_used = True
        self._unpack()
        for number, (pool, _) in enumerate(_pools(self._module, self._received)):
            pool.hand(self._tickets.get(number) if torch.is_grad_enabled() else None)
        return self._module.compute_and_output_dist(self._context, self._received)

    def close(self) -> None:
        """Nobody will read this input any more: what was announced for it and did not happen is taken back."""
        for ticket in self._tickets.values():
            if not ticket.released:  # a forward without a backward may have it, too, and be kept for long
                ticket.cancel()
        unheeded = {number for number, known in self._known.items() if known is not None}
        if not unheeded:
            return
        self._unpack()
        for number, (pool, features) in enumerate(_pools(self._module, self._received)):
            if number in unheeded:
                pool.skip(features.values(), features.offsets(), batch_sizes(features), self._known[number])

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until ``stream`` is done with it."""
        self._context.record_stream(stream)
        if self._received is not None:
            self._received.record_stream(stream)

    def _is_resident(self, number: int) -> bool:
        """Whether the pool still holds what it prefetched: another pipeline may have ended that."""
        return number in self._tickets and not self._tickets[number].released

    def _unpack(self) -> None:
        if self._is_packed:
            self._received = KJTList([_with_values(f, f.values().long()) for f in self._received])
            self._is_packed = False


def _pools(module: Any, received: Any) -> Iterator[tuple[CachedTableBatchedEmbeddings, KeyedJaggedTensor]]:
    """Every pool of a sharded module on this rank, with what it reads of a batch."""
    for features, lookup in zip(received, module._lookups, strict=True):
        while isinstance(lookup, DistributedDataParallel):
            lookup = lookup.module
        pools = [getattr(kernel, "emb_module", None) for kernel in getattr(lookup, "_emb_modules", ())]
        if any(isinstance(pool, CachedTableBatchedEmbeddings) for pool in pools):
            for pool, group in zip(pools, features.split(lookup._feature_splits), strict=True):
                if isinstance(pool, CachedTableBatchedEmbeddings):
                    yield pool, group


def _with_values(features: KeyedJaggedTensor, values: torch.Tensor) -> KeyedJaggedTensor:
    """The same bags with other values; what can be computed from the lengths is not kept."""
    changed = copy.copy(features)
    changed._values, changed._jt_dict = values, None
    changed._lengths, changed._offsets = features.lengths(), None
    return changed
