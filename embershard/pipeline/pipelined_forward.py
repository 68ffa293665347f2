"""Replacements for the forwards of a model's sharded modules: they use the input that ran ahead.

TorchRec's tracer, which its own train pipelines use, finds how each sharded module's input comes from the batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import _symbolic_trace
from torchrec.distributed.train_pipeline.utils import _rewrite_model
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.errors import CacheError, ShardingError
from embershard.interrupts import interrupts_wait
from embershard.pipeline.left_steps import BackwardWatch
from embershard.pipeline.module_input import ModuleInput
from embershard.sharding.torchrec.compat import unwrapped
from embershard.sharding.torchrec.modes.routes import Route, Told, TorchRecExchange, features_among, why_no_route
from embershard.sharding.torchrec.modules import check_ids

_log = logging.getLogger(__name__)

_NOTHING = slice(0)  # of what the ranks tell each other: of a module without a route

#: From a batch to each sharded module's input, by the module's name.
Features = Callable[[Any], Mapping[str, Any]]


class ModelInputs:
    """Pipelined forwards of a model's sharded modules, from the first batch on.

    Args:
        model: a `DistributedModelParallel`.
        features: gives each sharded module's input from a batch; None: the model is traced.

    Attributes:
        forwards: empty before the first batch.
        step: the step that runs now; the forwards hand out its inputs.
        backward: notices the end of the step's backward.
    """

    def __init__(self, model: nn.Module, features: Features | None) -> None:
        self._model, self._features = model, features
        modules = [module for module in model.modules() if isinstance(module, ShardedModule)]
        self._routes = {module: Route(module) for module in modules if not why_no_route(module)}
        ends = list(itertools.accumulate((route.num_told for route in self._routes.values()), initial=0))
        self._told_of = dict(zip(self._routes, itertools.starmap(slice, itertools.pairwise(ends)), strict=True))
        self._handle: Any = None  # of a hook on the model
        self.forwards: list[PipelinedForward] = []
        self.step = OpenStep()
        self.backward = BackwardWatch()

    @property
    def num_told(self) -> int:
        """Numbers that the ranks tell each other about a batch."""
        return sum(route.num_told for route in self._routes.values())

    def tell(self, checked: Sequence[KeyedJaggedTensor | None]) -> list[float]:
        """Return this rank's numbers of a batch, by what :meth:`check` returned for it."""
        read = {forward.module: features for forward, features in zip(self.forwards, checked, strict=True)}
        return [number for module, route in self._routes.items() for number in route.tell(read.get(module))]

    def start(self, batch: Any, told: Told) -> dict[str, ModuleInput]:
        """Start to exchange the ids of a batch, which is on the device and checked, of which the ranks have told these
        numbers; return the inputs of the modules by name. Collective."""
        found = {}
        for forward in self.forwards:
            route, own = self._routes.get(forward.module), told[:, self._told_of.get(forward.module, _NOTHING)]
            found[forward.name] = forward.start(batch, route, own)
        return found

    def check(self, batch: Any) -> list[KeyedJaggedTensor | None]:
        """Return what each forward would read of a batch. Raise what this rank finds wrong with it, before the other
        ranks count on it."""
        if self._handle is None:
            self.forwards = pipelined_forwards(self._model, batch, self.step, self._features)
            backward = self.backward  # not self: the model would keep the pipeline alive
            self._handle = self._model.register_forward_hook(lambda *called: backward.watch(called[-1]))
        return [forward.check(batch) for forward in self.forwards]

    def remove(self) -> None:
        """Give the modules their own forwards back."""
        for forward in self.forwards:
            forward.remove()
        self.forwards = []
        self.step.end(is_ahead=False)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class OpenStep:
    """The step that runs now, shared by the pipeline and the forwards of its model.

    Attributes:
        inputs: inputs that ran ahead for it, by module name; empty between two steps.
        trains: the step began with gradients.
        is_ahead: batches are resident for later steps.
    """

    def __init__(self) -> None:
        self.inputs: dict[str, ModuleInput] = {}
        self.trains = self.is_ahead = False

    def begin(self, inputs: dict[str, ModuleInput], trains: bool) -> None:
        """Hand out `inputs`."""
        self.inputs, self.trains = inputs, trains

    def end(self, is_ahead: bool) -> None:
        """Between two steps, leave every module its own forward."""
        self.inputs, self.is_ahead = {}, is_ahead

    @property
    def is_forwarded(self) -> bool:
        """True when every module has read its input."""
        return all(part.is_used for part in self.inputs.values())


class PipelinedForward:
    """Replaces a sharded module's forward: uses the input that ran ahead, or calls the module's own forward.

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
        """Become the module's forward, in place of another pipeline's if need be."""
        if self.module.forward is not self:
            self.module.forward = self

    def check(self, batch: Any) -> KeyedJaggedTensor | None:
        """Return what the module would read of `batch`, with its ids checked. Not collective.

        Raises:
            IdOutOfRangeError: an out-of-range id.
        """
        features = features_among(*self.args.build_args_kwargs(batch))
        if features is not None:
            check_ids(self.module, features)
        return features

    def start(self, batch: Any, route: Route | None, told: Told) -> ModuleInput:
        """Start to exchange the module's ids of `batch`, which is checked: by its route where it has one, and by what
        the ranks have told of the batch. Collective."""
        args, kwargs = self.args.build_args_kwargs(batch)
        features = features_among(args, kwargs)
        routed = None if route is None or features is None else route.start(features, told)
        return ModuleInput(routed or TorchRecExchange(self.module, batch, args, kwargs))

    def remove(self) -> None:
        """Give the module its own forward back, unless another pipeline has replaced this one."""
        if self.module.forward is self:
            self.module.forward = self._own_forward


def pipelined_forwards(
    model: nn.Module, batch: Any, step: OpenStep, features: Features | None = None
) -> list[PipelinedForward]:
    """Replace the forward of every sharded module of `model` whose input comes straight from the batch.

    Args:
        model: a `DistributedModelParallel`.
        batch: any batch: the tracer needs one for some models.
        step: shared by the forwards.
        features: gives each module's input; None: the model is traced.

    Raises:
        ShardingError: the model cannot be traced, or `features` leaves a module out.
    """
    _give_back(model)  # an earlier pipeline was not detached
    if features is not None:
        return _named_forwards(model, batch, step, features)
    try:
        # torch.fx replaces `nn.Module.__call__` while it traces; an interrupt while it puts that back would leave it.
        with interrupts_wait(), _torch_fx_undone():
            modules, _, _, _, others = _rewrite_model(model, step, None, batch, pipelined_forward=PipelinedForward)
    except BaseException as error:
        _give_back(model)
        if not isinstance(error, Exception):
            raise
        raise ShardingError(
            f"the inputs of the sharded modules could not be traced through the model's forward ({error}). Pass "
            "features=lambda batch: {name of the sharded module: its KeyedJaggedTensor}, or keep control flow that "
            "depends on tensors out of the modules that hold the embeddings"
        ) from error
    calls = Counter([*(module.forward.name for module in modules), *others])
    for name, count in calls.items():
        if count > 1:  # whatever they read: what is brought in ahead is for one call
            _log.warning("%s runs unpipelined: it is called more than once in a forward", name)
        elif name in others:
            _log.warning("%s runs unpipelined: its input does not come straight from the batch", name)
    forwards = []
    for module in dict.fromkeys(modules):
        if calls[module.forward.name] == 1:
            module.is_pipelined = False  # else it keeps the whole batch for a stage of TorchRec's own pipelines
            forwards.append(module.forward)
        else:
            _give_back(module)
    return forwards


def _give_back(model: nn.Module) -> None:
    """Give all modules their own forwards back, also where several stand in front of one."""
    for module in model.modules():
        if isinstance(module, ShardedModule):
            module.is_pipelined = False
        while isinstance(module.forward, PipelinedForward):
            module.forward.remove()


@contextlib.contextmanager
def _torch_fx_undone() -> Iterator[None]:
    """After an exception inside, undo what torch.fx does to the whole process while it traces: another one may have cut
    off its own undoing (a second interrupt, a timeout, no memory), and would leave `nn.Module.__call__` replaced for
    all models."""
    dynamo = torch._dynamo.config
    is_tracing, refuses_nested = _symbolic_trace._is_fx_tracing_flag, dynamo.error_on_nested_fx_trace
    outer = _symbolic_trace.CURRENT_PATCHER
    try:
        yield
    except BaseException:
        patcher = _symbolic_trace.CURRENT_PATCHER
        if patcher is not None and patcher is not outer:
            for patch in reversed(patcher.patches_made):
                with contextlib.suppress(KeyError):  # a name that was added, and is away already
                    patch.revert()
            patcher.patches_made.clear()  # nobody puts them in again
        _symbolic_trace._is_fx_tracing_flag, dynamo.error_on_nested_fx_trace = is_tracing, refuses_nested
        raise


def sharded_modules(model: nn.Module) -> dict[str, ShardedModule]:
    """Return the sharded modules of a `DistributedModelParallel`, by name."""
    return {
        name: module for name, module in unwrapped(model.module).named_modules() if isinstance(module, ShardedModule)
    }


def _named_forwards(model: nn.Module, batch: Any, step: OpenStep, features: Features) -> list[PipelinedForward]:
    sharded = sharded_modules(model)
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
