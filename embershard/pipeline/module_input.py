"""One sharded module's input for one batch, taken out of the model's forward and run ahead of it; and the check that
the forward then gets what was announced.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.cache.gpu.readback import Reads
from embershard.cache.tickets import Ticket
from embershard.errors import CacheError
from embershard.sharding.torchrec.compat import batch_sizes
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.feature_keys import FeatureIds, Known
from embershard.sharding.torchrec.modes.routes import PoolIds, RoutedExchange, TorchRecExchange, features_among
from embershard.stages import is_stage


class ModuleInput:
    """The input of one sharded module for one batch, from the all-to-all to the forward.

    In this order: :meth:`send`, :meth:`receive`, :meth:`know`, :meth:`make_resident` until it returns True,
    :meth:`forward` if at all, :meth:`close`. `send`, `receive` and `forward` are collective.

    Args:
        exchange: of its ids and rows with the other ranks; it has begun.
    """

    def __init__(self, exchange: TorchRecExchange | RoutedExchange) -> None:
        self._exchange = exchange
        self._groups: PoolIds | None = None
        self._known: dict[int, Known] = {}  # by pool
        self._tickets: dict[int, Ticket] = {}
        self._announced: Announced | None = None
        self.is_used = False

    @is_stage("id exchange")
    def send(self) -> None:
        """Send the ids, once the ranks know how many each of them sends. A second call does nothing."""
        self._exchange.send()

    @is_stage("id exchange")
    def receive(self) -> None:
        """Wait for the ids of this rank's tables. A second call does nothing, or what an exception cut off."""
        self._exchange.receive()

    @property
    def _pools(self) -> PoolIds:
        """The module's pools on this rank, with the ids for each."""
        if self._groups is None:
            self._groups = self._exchange.pools()
        return self._groups

    @is_stage("know")
    def know(self, others: Sequence[ModuleInput] = ()) -> None:
        """Tell the caches when the batch's rows are used; and those of the module's `others`, which train together with
        it. What an interrupt cut off goes on."""
        together = [self, *others]
        for number, (pool, _) in enumerate(self._pools):
            if any(number not in each._known for each in together):
                ids = [each._pools[number][1] for each in together]
                for each, own in zip(together, pool.keys.know(*ids), strict=True):
                    each._known[number] = own

    def bring_nearer(self) -> bool:
        """Bring the batch's rows nearer to the device, where they are far; False if they do not fit there yet."""
        return all(
            pool.keys.bring_nearer(ids, self._known.get(number))
            for number, (pool, ids) in enumerate(self._pools)
            if pool.num_coming
        )

    def forget(self, pools: Collection[CachedTableBatchedEmbeddings]) -> None:
        """Note that these pools forgot the batch."""
        for number in list(self._known):
            if self._pools[number][0] in pools:
                del self._known[number]

    @property
    def num_ids(self) -> int:
        """Ids that this rank received."""
        return self._exchange.num_ids

    @property
    def kept(self) -> Any:
        """What it keeps of the batch until the batch trains: the ids, and what the module notes of them."""
        return self._exchange.kept

    @property
    def known_uses_bytes(self) -> int:
        """Memory of the known uses of the batch's rows, in bytes."""
        return sum(batch.num_bytes for batch in self._known.values() if batch is not None)

    def make_resident(self, critical_path: bool) -> bool:
        """Bring the batch's rows to the device, as far as they fit beside those in use; return True when all are."""
        complete = True
        for number, (pool, ids) in self._absent():
            ticket = pool.keys.prepare(ids, critical_path, self._known.get(number), if_it_fits=True)
            complete &= self._keep(number, ticket)
        return complete

    def becoming_resident(self, critical_path: bool) -> list[Reads[bool]]:
        """Return the work of `make_resident`, pool by pool."""
        return [self._prefetching(*each, critical_path) for each in self._absent()]

    def _prefetching(
        self, number: int, pool: tuple[CachedTableBatchedEmbeddings, FeatureIds], critical_path: bool
    ) -> Reads[bool]:
        known = self._known.get(number)
        ticket = yield from pool[0].keys.preparing(pool[1], critical_path, known, if_it_fits=True)
        return self._keep(number, ticket)

    def _absent(self) -> list[tuple[int, tuple[CachedTableBatchedEmbeddings, FeatureIds]]]:
        """The pools, by number, whose rows of the batch are not resident; another pipeline may have released them."""
        tickets = self._tickets
        return [each for each in enumerate(self._pools) if each[0] not in tickets or tickets[each[0]].released]

    def _keep(self, number: int, ticket: Ticket | None) -> bool:
        if ticket is None:
            return False
        self._tickets[number] = ticket
        if not self._pools[number][0].keys.gives_rows:  # else its rows are those given when it became known
            self._known[number] = None
        return True

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
        return self._exchange.look_up()

    def close(self) -> None:
        """End this input's life: release its pins, and take back what was announced and did not happen."""
        for ticket in self._tickets.values():
            if (
                not ticket.released and not ticket.held
            ):  # a forward without a backward may hold it, too, and be kept for long
                ticket.cancel()
        for number, known in self._known.items():
            if known is not None:
                pool, ids = self._pools[number]
                pool.keys.skip(ids, known)

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until `stream` is done with it."""
        self._exchange.record_stream(stream)


class Announced:
    """A module's input in the batch that trains: ids, lengths and weights as they were announced.

    The forward usually gets the same object, or another one over the same memory. Otherwise contents are compared; on a
    GPU the host waits for that.
    """

    def __init__(self, features: KeyedJaggedTensor) -> None:
        self._features = features
        self._parts = _parts(features)
        self._versions = _versions(self._parts)

    def check(self, given: KeyedJaggedTensor | None) -> None:
        """Compare what a forward gets with what was announced.

        Raises:
            CacheError: they differ; the message says in what.
        """
        if _versions(self._parts) != self._versions:
            raise CacheError(
                "the batch of this step was written to in place after it was announced: the ids, lengths and weights "
                "that train are those from before. Change batches before the pipeline takes them"
            )
        different = "no KeyedJaggedTensor" if given is None else self._difference(given)
        if different:
            raise CacheError(
                f"the forward got a batch with {different}; the batch of this step is another one, with "
                f"{self._features.values().numel()} ids. In a step, forward the batch that step() gives, as it is"
            )

    def _difference(self, given: KeyedJaggedTensor) -> str:
        if given is self._features:
            return ""
        if list(given.keys()) != list(self._features.keys()):
            return f"the keys {list(given.keys())}"
        if batch_sizes(given) != batch_sizes(self._features):
            return "other batch sizes per feature"
        parts = _parts(given)
        if parts.keys() != self._parts.keys():
            return "other tensors: weights in one of the two"
        for name, part in parts.items():
            expected = self._parts[name]
            if part.shape != expected.shape:
                return f"{part.numel()} {name}"
            if part.data_ptr() != expected.data_ptr() and not torch.equal(part, expected):
                return f"other {name}"
        return ""


def _parts(features: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
    parts = {"ids": features.values(), "lengths": features.lengths()}
    weights = features.weights_or_none()
    return parts if weights is None else {**parts, "weights": weights}


def _versions(parts: Mapping[str, torch.Tensor]) -> list[int | None]:
    return [None if part.is_inference() else part._version for part in parts.values()]
