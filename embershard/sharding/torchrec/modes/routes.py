"""What a batch's ids and pooled rows of one sharded module do between the ranks: TorchRec's way, or by a `Route`.

TorchRec asks the device for sizes, sends lengths and ids of each group of tables in collectives of their own, and wraps
every part in objects that another step makes anew. A route is made once for a module: the ranks learn the sizes through
host memory with their agreement on the batch (`Agreement.told`), lengths and ids of all tables travel in one
all-to-all, and pooled rows in one each way, with the same values in the same order. What a route cannot do goes
TorchRec's way, and :func:`why_no_route` says why.

Letters: B samples of a rank, W ranks, F features of the module, N ids, D columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torchrec
from numpy.typing import NDArray
from torch import Tensor
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingDist, TwPooledEmbeddingSharding
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from embershard.distributed.traffic import counted_by_hand
from embershard.sharding.torchrec.compat import sharding_group
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.feature_keys import FeatureIds, FeaturePlaces
from embershard.sharding.torchrec.inspection import narrowed, pools_with_features
from embershard.sharding.torchrec.modules import CachedShardedEmbeddingBagCollection, ids_are_checked, in_batch
from embershard.sharding.torchrec.spec import CACHED_KERNEL

_ID_WORDS = 2  # of 4 bytes, beside lengths of one word
Ints = NDArray[np.int64]
#: What the ranks tell each other of a batch, a row for each of them.
Told = NDArray[np.float64]
PoolIds = list[tuple[CachedTableBatchedEmbeddings, FeatureIds]]


class TorchRecExchange:
    """One module's ids and pooled rows of one batch, TorchRec's way. Its methods are called in this order, all but
    `pools` on every rank: the constructor exchanges sizes, `send` and `receive` ids, and `look_up` rows.

    Args:
        batch: on the device, of which `args` and `kwargs` are the module's input; its ids were checked.
    """

    def __init__(self, module: ShardedModule, batch: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        self._module, self._context = module, module.create_context()
        with ids_are_checked(module), in_batch(module, batch):
            args, kwargs = module.preprocess_input(args, kwargs)
            self._given = features_among(args, kwargs)  # until it has arrived
            self._waiting = module.input_dist(self._context, *args, **kwargs)
        self._is_sent = False
        self._received: Any = None

    def send(self) -> None:
        """Send the ids, once the ranks know how many each of them sends. A second call does nothing."""
        if not self._is_sent:
            self._waiting, self._is_sent = self._waiting.wait(), True

    def receive(self) -> None:
        """Wait for the ids of this rank's tables. A second call does nothing, or what an exception cut off."""
        if self._waiting is not None:
            self._received, self._waiting = self._waiting.wait(), None
        if self._given is not None and len(self._received):  # a batch of hot rows sends no ids
            self._received = narrowed(self._module, self._received, self._given.values())
        self._given = None

    def pools(self) -> PoolIds:
        """Return the module's pools on this rank, with the ids that each looks up."""
        return [(pool, FeatureIds.of(ids)) for pool, ids in pools_with_features(self._module, self._received)]

    @property
    def num_ids(self) -> int:
        """Ids that this rank received."""
        return sum(features.values().numel() for features in self._received)

    @property
    def kept(self) -> Any:
        """What it keeps of the batch until the batch trains: the ids, and what the module notes of them."""
        return self._received, self._context

    def look_up(self) -> Any:
        """Look up the rows, and exchange what was pooled; return what the module's own forward returns."""
        return self._module.compute_and_output_dist(self._context, self._received)

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until `stream` is done with it."""
        self._context.record_stream(stream)
        if self._received is not None:
            self._received.record_stream(stream)


def features_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> KeyedJaggedTensor | None:
    """Return the features among a forward's arguments, or None."""
    return next((value for value in [*args, *kwargs.values()] if isinstance(value, KeyedJaggedTensor)), None)


def why_no_route(module: Any) -> str:
    """Return why a sharded module's batches go TorchRec's way; empty: by a `Route`."""
    if not torchrec.__version__.startswith("1.8."):
        return f"TorchRec {torchrec.__version__} is not 1.8, whose modules a route reads"
    if type(module) is not CachedShardedEmbeddingBagCollection:
        return f"the module is a {type(module).__name__}"
    if any(getattr(module, name, None) is not None for name in ("post_lookup_tracker_fn", "post_odist_tracker_fn")):
        return "something tracks the lookups"
    for sharding, output in zip(module._embedding_shardings, module._output_dists, strict=True):
        is_whole = isinstance(sharding, TwPooledEmbeddingSharding | CwPooledEmbeddingSharding)
        if not is_whole or type(output) is not TwPooledEmbeddingDist:
            return f"a group of tables is a {type(sharding).__name__.strip('_')}"
        if sharding.qcomm_codecs_registry:
            return "the exchange is quantised"
    by_rank = [own for sharding in module._embedding_shardings for own in sharding._grouped_embedding_configs_per_rank]
    others = sorted({group.compute_kernel.value for own in by_rank for group in own} - {CACHED_KERNEL, "fused"})
    return f"tables have the kernel {others[0]!r}" if others else ""


class Route:
    """How the ids of a sharded module reach their tables, and pooled rows their samples. The same on every rank.

    Args:
        module: one for which `why_no_route` is empty.

    Attributes:
        num_told: numbers that the ranks tell each other about a batch.
    """

    def __init__(self, module: Any) -> None:
        shardings = module._embedding_shardings
        self.module = module
        self.group = sharding_group(module._env)  # its methods: `torch.distributed`'s functions take 12 us more, each
        self.rank, self.world_size = module._env.rank, module._env.world_size
        self._told_by = torch.distributed.get_process_group_ranks(self.group)
        self.kernels = [kernel.emb_module for lookup in module._lookups for kernel in lookup._emb_modules]
        self._num_features = [n for lookup in module._lookups for n in lookup._feature_splits]  # of each kernel
        by_rank = [[f for s in shardings for f in s.feature_names_per_rank()[r]] for r in range(self.world_size)]
        sent = [feature for own in by_rank for feature in own]
        features = list(dict.fromkeys(sent))
        self.num_told = 1 + len(features)
        self.device = module._device
        self._told = FeaturePlaces(features, torch.device("cpu"))
        self.sent = FeaturePlaces(sent, self.device)
        #: Of what is sent, feature after feature: its place in what is told, and where each rank's part begins.
        self.places = np.array([1 + features.index(feature) for feature in sent], np.int64)
        self.num_of_rank = np.array([len(own) for own in by_rank], np.int64)
        self.bounds = np.concatenate([[0], self.num_of_rank.cumsum()])
        self.own_places = self.places[self.bounds[self.rank] : self.bounds[self.rank + 1]]
        num_own = len(by_rank[self.rank])
        by_feature = [source * num_own + f for f in range(num_own) for source in range(self.world_size)]
        self.by_feature = torch.tensor(by_feature, dtype=torch.int32, device=self.device)
        pools = [kernel for kernel in self.kernels if isinstance(kernel, CachedTableBatchedEmbeddings)]
        #: Ids that have come become int32: all are of caches, which have fewer than 2^31 rows.
        self.is_narrow = len(pools) == len(self.kernels) and not any(pool.keys.gives_rows for pool in pools)
        self.in_order = list(range(len(sent)))
        self._names: list[str] | None = None  # as `columns` has them

    def outputs(self) -> tuple[Columns, list[str], list[int]]:
        """Return the columns of pooled rows, with the names and dims of their parts, in the order that the model asks
        for, or in TorchRec's."""
        names, module = self.module.feature_order or self.module._embedding_names, self.module
        if names is not self._names:
            dims = dict(zip(module._embedding_names, module._embedding_dims, strict=True))
            self.columns = Columns(module._embedding_shardings, dims, names, self.device)
            self._names, self._dims = names, [dims[name] for name in names]
        return self.columns, names, self._dims

    # -- the ranks' agreement on a batch

    def tell(self, features: KeyedJaggedTensor | None) -> list[float]:
        """Return samples and ids of each feature of this rank's batch; -1 where it has to go TorchRec's way: the first
        one, which TorchRec checks, and one with weights or batch sizes of its own."""
        if (
            features is None
            or self.module._has_uninitialized_input_dist
            or features.weights_or_none() is not None
            or features.variable_stride_per_key()
            or features.inverse_indices_or_none() is not None
        ):
            return [-1.0] * self.num_told
        counts = features.length_per_key()
        places, _ = self._told.of(features.keys())
        return [features.stride(), *map(counts.__getitem__, places)]

    def start(self, features: KeyedJaggedTensor, told: Told) -> RoutedExchange | None:
        """Return the exchange of a batch of which all ranks, those of other groups too, have told these numbers,
        [ranks, num_told]; None: it goes TorchRec's way."""
        sizes = told[self._told_by].astype(np.int64)
        samples = sizes[:, 0].tolist()
        is_even = samples[0] > 0 and samples.count(samples[0]) == len(samples)
        return RoutedExchange(self, features, sizes) if is_even else None

    def by_kernel(self, counts: Ints, lengths: Tensor, ids: Tensor) -> list[_KernelIds]:
        """Return what each of this rank's kernels looks up, of the ids [N] of all its features, `counts` of each, and
        of their bags, feature after feature."""
        if len(self.kernels) == 1:
            return [_KernelIds(counts, lengths, ids)]
        of_kernel = np.split(counts, np.cumsum(self._num_features)[:-1])
        num_bags = lengths.numel() // max(1, len(counts))
        lengths_of = lengths.split([number * num_bags for number in self._num_features])
        return list(map(_KernelIds, of_kernel, lengths_of, ids.split([int(each.sum()) for each in of_kernel])))


class _KernelIds(NamedTuple):
    """Ids [N] that a kernel looks up, `counts` of each of its F features, in bags of `lengths` [F W B]."""

    counts: Ints
    lengths: Tensor
    ids: Tensor


class _Sent(NamedTuple):
    """Lengths and ids on their way. What comes, of each rank lengths and then ids, is cut by `cuts`."""

    work: Any
    received: Tensor
    sent: Tensor  # until it has left
    cuts: list[int]


class RoutedExchange:
    """One module's ids and pooled rows of one batch by its route; methods as those of `TorchRecExchange`.

    Args:
        sizes: the samples of each rank's batch, and the ids of each of the route's features: [W, num_told].
    """

    def __init__(self, route: Route, features: KeyedJaggedTensor, sizes: Ints) -> None:
        self._route, self._sizes, self._samples = route, sizes, int(sizes[0, 0])
        self._features: KeyedJaggedTensor | None = features  # until it has arrived
        self._sent: _Sent | None = None
        self._parts: list[_KernelIds] = []  # once it has

    def send(self) -> None:
        """Send lengths and ids, for each rank those of its tables. A second call does nothing."""
        route, features = self._route, self._features
        if route.world_size == 1 or self._sent is not None or features is None:
            return
        ends = np.zeros(len(route.places) + 1, np.int64)  # of the ids of each feature that is sent
        np.cumsum(self._sizes[route.rank, route.places], out=ends[1:])
        lengths, ids = self._by_destination(features, int(ends[-1]))
        num_lengths, num_words = self._samples * route.num_of_rank, _ID_WORDS * np.diff(ends[route.bounds])
        words = ids.long().view(torch.int32)
        parts = zip(lengths.int().split(num_lengths.tolist()), words.split(num_words.tolist()), strict=True)
        sent = torch.cat([part for pair in parts for part in pair])
        cuts = np.empty((route.world_size, 2), np.int64)
        cuts[:, 0] = self._samples * len(route.own_places)
        cuts[:, 1] = _ID_WORDS * self._sizes[:, route.own_places].sum(axis=1)
        received = sent.new_empty(int(cuts.sum()))
        incoming, outgoing = cuts.sum(axis=1).tolist(), (num_lengths + num_words).tolist()
        with counted_by_hand("ids", sent.nbytes - sent.element_size() * outgoing[route.rank]):
            work = route.group.alltoall_base(received, sent, incoming, outgoing)
        self._sent = _Sent(work, received, sent, cuts.ravel().tolist())

    def _by_destination(self, features: KeyedJaggedTensor, num_ids: int) -> tuple[Tensor, Tensor]:
        """Return lengths and ids of a batch in the order in which the ranks have the tables."""
        keys = features.keys()
        places, order = self._route.sent.of(keys)
        if len(keys) == len(places) and places == self._route.in_order:
            return features.lengths().view(-1), features.values()
        lengths = features.lengths().view(len(keys), -1)
        lengths, ids = _permuted(order, lengths, features.values(), num_ids)
        return lengths.view(-1), ids

    def receive(self) -> None:
        """Wait for the ids of this rank's tables, and put them in the order of the features. A second call does
        nothing."""
        route, features = self._route, self._features
        if features is None:
            return
        counts = self._sizes[:, route.own_places].sum(axis=0)
        if self._sent is None:
            lengths, ids = self._by_destination(features, int(counts.sum()))
        else:
            self._sent.work.wait()
            parts = self._sent.received.split(self._sent.cuts)
            lengths, ids = torch.cat(parts[::2]), torch.cat(parts[1::2]).view(torch.int64)
            ids = ids.int() if route.is_narrow else ids
            if len(counts):
                by_source = lengths.view(len(counts) * route.world_size, -1)
                lengths, ids = _permuted(route.by_feature, by_source, ids, int(counts.sum()))
        self._parts = route.by_kernel(counts, lengths.view(-1), ids)
        self._features = self._sent = None

    def pools(self) -> PoolIds:
        """Return the module's pools on this rank, with the ids that each looks up."""
        return [
            (kernel, FeatureIds.of_counts(part.counts, part.ids))
            for kernel, part in zip(self._route.kernels, self._parts, strict=True)
            if isinstance(kernel, CachedTableBatchedEmbeddings)
        ]

    @property
    def num_ids(self) -> int:
        """Ids that this rank received."""
        return sum(part.ids.numel() for part in self._parts)

    @property
    def kept(self) -> Any:
        """What it keeps of the batch until the batch trains."""
        return self._parts

    def look_up(self) -> KeyedTensor:
        """Look up the rows, and exchange what was pooled: [B, sum of D]."""
        route, found = self._route, []
        columns, names, dims = route.outputs()
        for kernel, part in zip(route.kernels, self._parts, strict=True):
            offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(part.lengths.long())
            is_pool = isinstance(kernel, CachedTableBatchedEmbeddings)
            found.append(kernel(part.ids if is_pool else part.ids.long(), offsets))
        if route.world_size > 1:
            if not found:  # of a rank without tables
                num_samples = route.world_size * self._samples
                found.append(torch.empty(num_samples, 0, device=route.device, requires_grad=True))
            rows = _RowsToSamples.apply(route, self._samples, *found)
        else:
            rows = found[0] if len(found) == 1 else torch.cat(found, dim=1)
            rows = rows if columns.order is None else _Reordered.apply(rows, columns)
        return KeyedTensor(names, dims, rows)

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until `stream` is done with it."""
        for part in self._parts:
            part.lengths.record_stream(stream)
            part.ids.record_stream(stream)


def _permuted(order: Tensor, lengths: Tensor, ids: Tensor, num_ids: int) -> tuple[Tensor, Tensor]:
    """Return lengths [F, B] by an order of the features, and the `num_ids` ids of their bags."""
    with torch._C._AutoDispatchBelowAutograd():  # whose kernel, for weights, takes as long as the operation
        lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(order, lengths, ids, None, num_ids)
    return lengths, ids


class Columns:
    """The order of the columns [sum of D] of pooled rows: as they come from the ranks, and as they are asked for.

    Args:
        dims: of the tables' features, in TorchRec's order.
        names: the same features, as they are asked for.

    Attributes:
        of_rank: columns that each rank sends.
        order: which block of `width` columns of those that come is the k-th; None: they are in order.
        inverse: the other way.
    """

    def __init__(
        self, shardings: Sequence[Any], dims: Mapping[str, int], names: Sequence[str], device: torch.device
    ) -> None:
        by_sharding = [sharding._emb_dim_per_rank_per_feature() for sharding in shardings]
        ranks = range(len(by_sharding[0]))
        self.of_rank = [sum(sum(of_sharding[rank]) for of_sharding in by_sharding) for rank in ranks]
        places = iter(range(sum(self.of_rank)))
        came: list[list[list[int]]] = [[] for _ in shardings]  # columns of each block, by sharding
        for rank in ranks:
            for blocks, of_sharding in zip(came, by_sharding, strict=True):
                blocks += [[next(places) for _ in range(dim)] for dim in of_sharding[rank]]
        wanted: list[int] = []
        for sharding, blocks in zip(shardings, came, strict=True):
            if getattr(sharding, "_permute_embeddings", False):  # column-wise: a table's blocks lie beside each other
                blocks = [blocks[place] for place in sharding._embedding_order]
            wanted += [column for block in blocks for column in block]
        ends = dict(zip(dims, accumulate(dims.values()), strict=True))
        wanted = [column for name in names for column in wanted[ends[name] - dims[name] : ends[name]]]
        self.width = math.gcd(*(dim for of_sharding in by_sharding for of_rank in of_sharding for dim in of_rank))
        self.order: Tensor | None = None
        self.inverse: Tensor | None = None
        if wanted != list(range(len(wanted))):
            order = np.array(wanted[:: self.width]) // self.width
            self.order = torch.tensor(order, device=device)
            self.inverse = torch.tensor(order.argsort(), device=device)

    def put(self, rows: Tensor, order: Tensor | None) -> Tensor:
        """Return rows [B, sum of D] with their columns by `order`, one of the two."""
        if order is None:
            return rows
        return rows.view(len(rows), -1, self.width).index_select(1, order).view(len(rows), -1)


class _Reordered(torch.autograd.Function):
    """On one rank: pooled rows with their columns in order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, columns: Columns) -> Tensor:  # type: ignore[override]
        ctx.columns = columns
        return columns.put(rows, columns.order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.columns.put(gradient.contiguous(), ctx.columns.inverse), None


class _RowsToSamples(torch.autograd.Function):
    """From what this rank's kernels pooled for the samples of all ranks, each [W B, D of its features], to all columns
    of its own samples, [B, sum of D]; the backward sends gradients the other way."""

    @staticmethod
    def forward(ctx: Any, route: Route, samples: int, *found: Tensor) -> Tensor:  # type: ignore[override]
        ctx.route, ctx.samples, ctx.widths = route, samples, [rows.shape[1] for rows in found]
        columns, width = route.columns, sum(ctx.widths)
        ctx.columns = columns
        rows = found[0] if len(found) == 1 else torch.cat(found, dim=1)
        incoming, outgoing = [samples * number for number in columns.of_rank], [samples * width] * route.world_size
        received = rows.new_empty(sum(incoming))
        with counted_by_hand("embeddings", rows.nbytes - rows.element_size() * samples * width):
            route.group.alltoall_base(received, rows.contiguous().view(-1), incoming, outgoing).wait()
        parts = [part.view(samples, -1) for part in received.split(incoming) if part.numel()]
        return columns.put(torch.cat(parts, dim=1), columns.order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        route, samples, columns = ctx.route, ctx.samples, ctx.columns
        width = sum(ctx.widths)
        gradient = columns.put(gradient.contiguous(), columns.inverse)
        sent = torch.cat([part.reshape(-1) for part in gradient.split(columns.of_rank, dim=1)])
        incoming, outgoing = [samples * width] * route.world_size, [samples * number for number in columns.of_rank]
        received = sent.new_empty(sum(incoming))
        with counted_by_hand("gradients", sent.nbytes - sent.element_size() * outgoing[route.rank]):
            route.group.alltoall_base(received, sent, incoming, outgoing).wait()
        if get_gradient_division():  # as TorchRec does, there
            received.div_(route.world_size)
        rows = received.view(samples * route.world_size, width)
        return None, None, *(rows.split(ctx.widths, dim=1) if len(ctx.widths) > 1 else (rows,))
