"""The dense part of a step as one call, once the embeddings are there: forward, losses and gradients of all layers.

What is left of a step's backward is that of the embeddings and their exchange. The operations and their order are those
of a backward through the whole model under DDP, and so are the bits.

With `train.cuda_graph` they are captured once, and repeated without Python (`embershard/extras/dense_graph.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel

from embershard.data import Batch
from embershard.distributed.traffic import counted_by_hand, ring_bytes
from embershard.errors import ConfigError
from embershard.lazy_names import named
from embershard.metrics.predictions import Predicted
from embershard.models.loss import WithLoss
from embershard.stages import stage
from embershard.training.config import RunConfig


class Computed(NamedTuple):
    """What a call computes: the loss [], the outputs [B] or [B, T], what the loss monitor adds of them, and the
    gradients of the rows and of all dense parameters."""

    loss: Tensor
    outputs: Tensor
    exact: Tensor
    sums: Tensor
    gradients: tuple[Tensor, ...]


T = TypeVar("T")
_TABLES = "sparse_arch"  # of the built-in models; it returns pooled rows [B, F, D]


def why_not(model: DistributedModelParallel, config: RunConfig, trained: Iterable[nn.Parameter]) -> str:
    """Return why the dense part of this model is no call of its own, as a sentence; empty where it is one.

    Args:
        trained: the parameters of the dense optimizer.
    """
    layers = model.module
    if not config.cache.enabled:
        return "cache.enabled is false: such a run is what others are compared with, and stock TorchRec throughout."
    if config.train.accumulate > 1:
        return "train.accumulate: the gradients of micro-batches are summed before they are averaged over ranks."
    if not isinstance(layers, WithLoss) or _TABLES not in dict(layers.model.named_children()):
        return "The model is one's own, or one over histories: its layers are not all behind its embeddings."
    for name, module in _dense(layers.named_modules()):
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            place = f"model.{name}" if name else "model"
            return f'{place} has hooks: those of dropout, of train.precision = "fp64", or of a program.'
    if {id(each) for _, each in _dense(layers.named_parameters()) if each.requires_grad} != {*map(id, trained)}:
        return "The dense optimizer trains tables, too, or not all of the layers need gradients."
    return ""


class DenseCall:
    """Computes the dense layers, their losses and gradients, while the trainer forwards a batch.

    The backward of the loss then hands the gradient of the embeddings back, and starts to average those of the dense
    parameters over the ranks, in the buckets, the order and the memory of DDP. DDP finds its buckets in its first
    steps; so these, and all batches that the call does not fit, go through DDP.

    Args:
        trained: the parameters of the dense optimizer.
        exact_losses: of the loss monitor.

    Attributes:
        exact: what `exact_losses` returned for the last batch; None where it went through DDP.
        by: what computes a batch: `compute`, or what repeats it.
        read: parameters and buffers that it reads.

    Raises:
        ConfigError: the settings ask for a CUDA graph, and the model has no such call.
    """

    read: list[Tensor]

    def __init__(
        self,
        model: DistributedModelParallel,
        config: RunConfig,
        trained: Iterable[nn.Parameter],
        exact_losses: Callable[[Tensor, Predicted], tuple[Tensor, Tensor]],
    ) -> None:
        self._model, self._config, self._trained, self._exact_losses = model, config, list(trained), exact_losses
        self._reason: str | None = None
        self.exact: tuple[Tensor, Tensor] | None = None
        self._works: list[dist.Work] = []
        self.by: Callable[[Tensor, Batch], Computed] = self.compute
        if config.train.cuda_graph:
            if self.reason:
                raise ConfigError(f"train.cuda_graph: got true, which nothing can be captured for. {self.reason}")
            self.by = named("embershard.extras.dense_graph:DenseGraph")(self)

    @property
    def reason(self) -> str:
        """Why no batch is computed so, as a sentence; empty where batches are. The model's hooks are read once."""
        if self._reason is None:
            self._reason = why_not(self._model, self._config, self._trained)
            if not self._reason:
                self._open()
        return self._reason

    def _open(self) -> None:
        layers: Any = self._model.module
        self._layers, self._tables = layers, layers.model.get_submodule(_TABLES)
        self._parameters = [each for _, each in _dense(layers.named_parameters())]
        self.read = [*self._parameters, *(each for _, each in _dense(layers.named_buffers()))]
        self._ddp = next(each for each in self._model.modules() if isinstance(each, DistributedDataParallel))
        self._num_ranks = dist.get_world_size(self._ddp.process_group)
        self._buckets: list[_Bucket] | None = [] if self._num_ranks == 1 else None
        # Gradients are no part of the mixed precision of a forward.
        mixed, device = self._config.train.precision == "bf16", self._parameters[0].device.type
        self._exactly: Callable[[], AbstractContextManager[Any]]
        self._exactly = (lambda: torch.autocast(device, enabled=False)) if mixed else nullcontext

    @contextmanager
    def used(self) -> Iterator[None]:
        """While it lasts, a forward of the model is this call, if that fits."""
        self._wait()  # where a step was left in its backward
        self.exact = None
        if self.reason or self._buckets is None:
            yield
        else:
            with _forward_of(self._ddp, self._forward):
                yield

    def finish(self) -> None:
        """Wait, behind a backward, until all gradients are averages."""
        self._wait()
        if not self.reason and self._buckets is None and self._ddp._has_rebuilt_buckets:  # as it does once
            self._buckets = _buckets_of(self._parameters)
            if self._buckets is None:
                self._reason = "DDP keeps gradients beside its buckets."

    def _wait(self) -> None:
        while self._works:
            self._works.pop(0).wait()

    def _forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return what the model does; the loss has a backward."""
        rows = self._tables(batch.sparse_features)
        found = self.by(rows, batch)
        self.exact = found.exact, found.sums
        if not rows.requires_grad:  # all tables are frozen
            rows = rows.detach().requires_grad_()
        loss = _HandBack.apply(rows, found.loss, self, found.gradients)
        return loss, (found.loss, found.outputs, batch.labels.detach())

    def compute(self, rows: Tensor, batch: Batch) -> Computed:
        """Compute a batch of pooled embeddings [B, F, D]. On a GPU the host waits for nothing."""
        leaf = rows.detach().requires_grad_()
        with _forward_of(self._tables, lambda _: leaf):
            loss, (own, outputs, labels) = self._layers(batch)
        with self._exactly():
            exact, sums = self._exact_losses(own, Predicted(outputs, labels, batch.weights))
            with stage("backward"):
                gradients = torch.autograd.grad(loss, [leaf, *self._parameters])
        return Computed(own, outputs, exact, sums, gradients)

    def write(self, gradients: tuple[Tensor, ...]) -> None:
        """Give the parameters these gradients, and start to average them over the ranks."""
        if self._num_ranks == 1:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            return
        assert self._buckets is not None
        for bucket in self._buckets:
            torch._foreach_copy_(bucket.views, [gradients[place] for place in bucket.places])
            bucket.flat.mul_(1.0 / self._num_ranks)  # as DDP: by three, a division has other bits
            with counted_by_hand("dense_all_reduce", ring_bytes(bucket.flat, self._num_ranks)):
                self._works.append(self._ddp.process_group.allreduce([bucket.flat]))
            for place, view in zip(bucket.places, bucket.views, strict=True):
                self._parameters[place].grad = view


class _HandBack(torch.autograd.Function):
    """A loss whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, loss: Tensor, call: DenseCall, gradients: tuple[Tensor, ...]) -> Tensor:  # type: ignore[override]
        ctx.call, ctx.gradients = call, gradients
        return loss

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        of_rows, *others = ctx.gradients
        ctx.call.write(others)
        return of_rows, None, None, None


@dataclass(frozen=True)
class _Bucket:
    """Gradients that are averaged together: their memory, the places of their parameters, and views for each."""

    flat: Tensor
    places: list[int]
    views: list[Tensor]


def _buckets_of(parameters: list[nn.Parameter]) -> list[_Bucket] | None:
    """Return DDP's buckets, behind a backward: the gradients are views of their memory, one behind another; None where
    they are not.

    Their order decides about bits: of a sum over more than two ranks, each part begins at another rank.
    """
    buckets: dict[int, _Bucket] = {}
    for place, parameter in enumerate(parameters):
        view = parameter.grad
        assert view is not None
        memory = view.untyped_storage()
        bucket = buckets.setdefault(memory.data_ptr(), _Bucket(view.new_empty(0).set_(memory), [], []))
        bucket.places.append(place)
        bucket.views.append(view)
    found = list(buckets.values())
    are_views = all(each.flat.numel() == sum(view.numel() for view in each.views) for each in found)
    return found if are_views else None


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, the module has another forward."""
    own = vars(module).get("forward")
    try:  # an interrupt may come anywhere
        vars(module)["forward"] = forward
        yield
    finally:
        vars(module).pop("forward", None) if own is None else vars(module).update(forward=own)


def _dense(named: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    """Yield what is outside of the tables."""
    return ((name, each) for name, each in named if not name.startswith(f"model.{_TABLES}."))
