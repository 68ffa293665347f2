"""What the sharded modules of a model read of a batch, taken out of the model's forward and run ahead of it.

TorchRec's tracer, which its own train pipelines use, finds out how each sharded module's input comes from the batch.
The input then goes through stages of its own: its all-to-all, being *known* to the caches, being *resident*, the
forward.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.train_pipeline.utils import _rewrite_model
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from embershard.cache.next_use import KnownBatch
from embershard.cache.tickets import Ticket
from embershard.errors import CacheError, ShardingError
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.modules import check_ids, ids_are_checked, reads_checked_ids

_log = logging.getLogger(__name__)

#: For each sharded module, by name, how its arguments come from a batch.
Features = Callable[[Any], Mapping[str, Any]]


class OpenStep:
    """The step that runs now, shared by the pipeline and the forwards of its model.

    Attributes:
        inputs: what went ahead for it, by module name; empty between two steps.
        trains: whether it was begun with gradients.
        is_ahead: whether batches are resident for later steps.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, ModuleInput] = {}
        self.trains = self.is_ahead = False

    def begin(self, inputs: dict[str, ModuleInput], trains: bool) -> None:
        """Hand out ``inputs``."""
        self.inputs, self.trains = inputs, trains

    def end(self, is_ahead: bool) -> None:
        """Between two steps a module's forward is its own."""
        self.inputs, self.is_ahead = {}, is_ahead

    @property
    def is_forwarded(self) -> bool:
        """Whether every module has read its input."""
        return all(part.is_used for part in self.inputs.values())


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
        self._announced: _Announced | None = None
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
        self.known_bytes = _tensor_bytes((self._received, self._context))

    def know(self) -> None:
        """Tell the caches, and keep no more than the ids."""
        for number, (pool, features) in enumerate(_pools(self._module, self._received)):
            self._known[number] = pool.know(features.values(), features.offsets(), _batch_sizes(features))
        if reads_checked_ids(self._module) and isinstance(self._received, KJTList):
            self._received = KJTList([_with_values(f, f.values().int()) for f in self._received])
            self._is_packed = True
        chosen = sum(batch.num_bytes for batch in self._known.values() if batch is not None)
        self.known_bytes = chosen + _tensor_bytes((self._received, self._context))

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
                features.values(), features.offsets(), _batch_sizes(features), known, critical_path
            )
            if ticket is None:
                complete = False
            else:
                self._tickets[number] = ticket
                self._known[number] = None
        return complete

    def expect(self, args: list[Any], kwargs: dict[str, Any]) -> None:
        """The module's own input, in the batch that trains now."""
        features = _features_among(args, kwargs)
        self._announced = None if features is None else _Announced(features)

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
            self._announced.check(_features_among(args, kwargs))
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
                pool.skip(features.values(), features.offsets(), _batch_sizes(features), self._known[number])

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


class PipelinedForward:
    """Stands in for a sharded module's forward. It hands out the input that went ahead, if there is one; otherwise the
    module does what it always does.

    Args:
        name, args, module, stream: as TorchRec's tracer gives them; the stream is not used.
        step: shared by all forwards of a model.
    """

    def __init__(self, name: str, args: Any, module: ShardedModule, step: OpenStep, stream: Any = None) -> None:
        self.name, self.args, self.module = name, args, module
        self._step = step
        self._own_forward = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs, has_gradients = self._step.inputs.get(self.name), torch.is_grad_enabled()
        if inputs is not None and (has_gradients if self._step.trains else not inputs.is_used):
            return inputs.forward(args, kwargs)
        if inputs is None and has_gradients and self._step.is_ahead:
            raise CacheError(
                f"{self.name}: this batch is not the one prefetched for the next step. Under a LookAheadPipeline, "
                "forward other batches with torch.no_grad(), or call its detach() first"
            )
        return self._own_forward(*args, **kwargs)

    def install(self) -> None:
        """Be the module's forward, also where another pipeline's forward is by now."""
        if self.module.forward is not self:
            self.module.forward = self

    def check(self, batch: Any) -> None:
        """Whether the module can read ``batch``. Not collective.

        Raises:
            IdOutOfRangeError: an id is no row of its table.
        """
        args, kwargs = self.args.build_args_kwargs(batch)
        features = _features_among(args, kwargs)
        if features is not None:
            check_ids(self.module, features)

    def start(self, batch: Any) -> ModuleInput:
        """Begin with the module's input all-to-all for ``batch``, which is checked. Collective."""
        with ids_are_checked(self.module):
            return ModuleInput(self.module, *self.args.build_args_kwargs(batch))

    def remove(self) -> None:
        """Give the module its own forward back, unless there is another forward by now."""
        if self.module.forward is self:
            self.module.forward = self._own_forward


def pipelined_forwards(
    model: nn.Module, batch: Any, step: OpenStep, features: Features | None = None
) -> list[PipelinedForward]:
    """Put a forward before every sharded module of ``model`` whose input comes straight from the batch.

    Args:
        model: a ``DistributedModelParallel``.
        batch: any batch, for models that the tracer needs one for.
        step: see :class:`PipelinedForward`.
        features: gives each module's input; without it, the model is traced.

    Raises:
        ShardingError: the model cannot be traced, or ``features`` leaves a module out.
    """
    for module in model.modules():  # of a pipeline that was left without detach()
        while isinstance(module.forward, PipelinedForward):
            module.forward.remove()
    if features is not None:
        return _named_forwards(model, batch, step, features)
    try:
        modules, _, _, _, others = _rewrite_model(model, step, None, batch, pipelined_forward=PipelinedForward)
    except Exception as error:
        raise ShardingError(
            f"the inputs of the sharded modules could not be traced through the model's forward ({error}). Pass "
            "features=lambda batch: {name of the sharded module: its KeyedJaggedTensor}, or keep control flow that "
            "depends on tensors out of the modules that hold the embeddings"
        ) from error
    for name in others:
        _log.warning("%s looks nothing ahead: its input does not come straight from the batch", name)
    forwards = {}
    for module in modules:
        module.is_pipelined = False  # or it would keep the whole batch for a stage that is not here
        forward = module.forward
        if modules.count(module) == 1:
            forwards[forward.name] = forward
        elif isinstance(forward, PipelinedForward):
            _log.warning("%s looks nothing ahead: it is called more than once in a forward", forward.name)
            while isinstance(module.forward, PipelinedForward):  # one for each call
                module.forward.remove()
    return list(forwards.values())


def _named_forwards(model: nn.Module, batch: Any, step: OpenStep, features: Features) -> list[PipelinedForward]:
    inner: Any = model.module
    while isinstance(inner, DistributedDataParallel):
        inner = inner.module
    sharded = {name: m for name, m in inner.named_modules() if isinstance(m, ShardedModule)}
    given = set(features(batch))
    if given != set(sharded):
        raise ShardingError(
            f"features(batch) gives inputs for {sorted(given)}; the sharded modules are {sorted(sharded)}"
        )
    forwards = []
    for name, module in sharded.items():
        forwards.append(PipelinedForward(name, _Given(features, name), module, step))
        module.forward = forwards[-1]
    return forwards


@dataclasses.dataclass(frozen=True)
class _Given:
    features: Features
    name: str

    def build_args_kwargs(self, batch: Any) -> tuple[list[Any], dict[str, Any]]:
        return [self.features(batch)[self.name]], {}


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


def _features_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> KeyedJaggedTensor | None:
    return next((value for value in [*args, *kwargs.values()] if isinstance(value, KeyedJaggedTensor)), None)


class _Announced:
    """A module's input in the batch that trains: the ids, lengths and weights that were sent ahead.

    Usually the forward gets the same object, or one of the same memory. Otherwise its contents are compared; on a GPU
    the host waits for that.
    """

    def __init__(self, features: KeyedJaggedTensor) -> None:
        self._features = features
        self._parts = _parts(features)
        self._versions = [None if part.is_inference() else part._version for part in self._parts.values()]

    def check(self, given: KeyedJaggedTensor | None) -> None:
        """Whether a forward that gets ``given`` means what was sent.

        Raises:
            CacheError: it does not, with what differs.
        """
        versions = [None if part.is_inference() else part._version for part in self._parts.values()]
        if versions != self._versions:
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
        if _batch_sizes(given) != _batch_sizes(self._features):
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


def _batch_sizes(features: KeyedJaggedTensor) -> list[list[int]] | None:
    return features.stride_per_key_per_rank() if features.variable_stride_per_key() else None


def _with_values(features: KeyedJaggedTensor, values: torch.Tensor) -> KeyedJaggedTensor:
    """The same bags with other values; what can be computed from the lengths is not kept."""
    changed = copy.copy(features)
    changed._values, changed._jt_dict = values, None
    changed._lengths, changed._offsets = features.lengths(), None
    return changed


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a batch, a module's input or its context."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, KeyedJaggedTensor):
        parts = (value.values(), value.weights_or_none(), value.lengths_or_none(), value.offsets_or_none())
        yield from (part for part in parts if part is not None)
    elif isinstance(value, KJTList | list | tuple):
        for part in value:
            yield from tensors_of(part)
    elif isinstance(value, dict):
        yield from tensors_of(list(value.values()))
    elif not isinstance(value, type) and (dataclasses.is_dataclass(value) or isinstance(value, Multistreamable)):
        yield from tensors_of(_attributes(value))


def _attributes(value: Any) -> dict[str, Any]:
    """What an object holds: in its ``__dict__``, and in the ``__slots__`` of its classes."""
    fields = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    members = [vars(each).items() for each in type(value).__mro__]
    slots = [name for each in members for name, member in each if isinstance(member, types.MemberDescriptorType)]
    found = {name: getattr(value, name) for name in [*fields, *slots] if hasattr(value, name)}
    return {**found, **getattr(value, "__dict__", {})}


def _tensor_bytes(value: Any) -> int:
    """Memory of all tensors in ``value``, each counted once, in bytes."""
    by_place = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors_of(value)}
    return sum(tensor.numel() * tensor.element_size() for tensor in by_place.values())
