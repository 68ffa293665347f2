"""One sharded module's input for one batch, taken out of the model's forward and run ahead of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache.next_use import KnownBatch
from embershard.cache.tickets import Ticket
from embershard.errors import CacheError
from embershard.pipeline.announced import Announced, features_among
from embershard.pipeline.batch_tensors import tensor_bytes
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.inspection import pools_with_features
from embershard.stages import is_stage


class ModuleInput:
    """The input of one sharded module for one batch, from the all-to-all to the forward.

    The constructor starts the all-to-all; then, in this order: :meth:`send`, :meth:`receive`, :meth:`know`,
    :meth:`make_resident` until it returns True, :meth:`forward` if at all, :meth:`close`. The constructor, `send`,
    `receive` and `forward` are collective.
    """

    def __init__(self, module: ShardedModule, args: list[Any], kwargs: dict[str, Any]) -> None:
        self._module = module
        self._context = module.create_context()
        args, kwargs = module.preprocess_input(args, kwargs)
        self._waiting = module.input_dist(self._context, *args, **kwargs)
        self._is_sent = False
        self._received: Any = None
        self._groups: list[tuple[CachedTableBatchedEmbeddings, KeyedJaggedTensor]] | None = None
        self._known: dict[int, KnownBatch | None] = {}  # by pool
        self._tickets: dict[int, Ticket] = {}
        self._announced: Announced | None = None
        self.is_used = False

    @is_stage("id exchange")
    def send(self) -> None:
        """Send the ids, once the ranks know how many each of them sends. A second call does nothing."""
        if not self._is_sent:
            self._waiting, self._is_sent = self._waiting.wait(), True

    @is_stage("id exchange")
    def receive(self) -> None:
        """Wait for the ids of this rank's tables. A second call does nothing."""
        if self._waiting is not None:
            self._received, self._waiting = self._waiting.wait(), None

    @property
    def _pools(self) -> list[tuple[CachedTableBatchedEmbeddings, KeyedJaggedTensor]]:
        """The module's pools on this rank, with the ids for each."""
        if self._groups is None:
            self._groups = list(pools_with_features(self._module, self._received))
        return self._groups

    @is_stage("know")
    def know(self) -> None:
        """Tell the caches when the batch's rows are used."""
        for number, (pool, features) in enumerate(self._pools):
            self._known[number] = pool.know(features)

    @property
    def num_ids(self) -> int:
        """Ids that this rank received."""
        return sum(features.values().numel() for features in self._received)

    @property
    def known_bytes(self) -> int:
        """Memory of the ids and of their known uses, in bytes. Walks through all tensors: ask once."""
        known_bytes = sum(batch.num_bytes for batch in self._known.values() if batch is not None)
        return known_bytes + tensor_bytes((self._received, self._context))

    def make_resident(self, critical_path: bool) -> bool:
        """Bring the batch's rows to the device, as far as they fit beside those in use; return True when all are."""
        complete = True
        for number, (pool, features) in enumerate(self._pools):
            if number in self._tickets and not self._tickets[number].released:  # another pipeline may have released it
                continue
            ticket = pool.prefetch_if_it_fits(features, self._known.get(number), critical_path)
            if ticket is None:
                complete = False
            else:
                self._tickets[number], self._known[number] = ticket, None
        return complete

    def expect(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Remember the module's own arguments for the batch that trains now: :meth:`forward` compares."""
        features = features_among(args, kwargs)
        self._announced = None if features is None else Announced(features)

    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Look up and exchange the embeddings, as the module's own forward does for these arguments.

        Raises:
            CacheError: the arguments are not those that were announced, or this is a second forward.
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
        for number, (pool, _) in enumerate(self._pools):
            pool.hand(self._tickets.get(number) if torch.is_grad_enabled() else None)
        return self._module.compute_and_output_dist(self._context, self._received)

    def close(self) -> None:
        """End this input's life: release its pins, and take back what was announced and did not happen."""
        for ticket in self._tickets.values():
            if not ticket.released:  # a forward without a backward may hold it, too, and be kept for long
                ticket.cancel()
        if any(known is not None for known in self._known.values()):
            for number, (pool, features) in enumerate(self._pools):
                pool.skip(features, self._known.get(number))

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until `stream` is done with it."""
        self._context.record_stream(stream)
        if self._received is not None:
            self._received.record_stream(stream)
