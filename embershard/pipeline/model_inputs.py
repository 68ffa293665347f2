"""The sharded modules of a model, seen by the pipeline: whose forwards it replaces, and the step that they serve."""

from __future__ import annotations

from typing import Any

from torch import nn

from embershard.pipeline.left_steps import BackwardWatch
from embershard.pipeline.pipelined_forward import Features, OpenStep, PipelinedForward, pipelined_forwards


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
        self._handle: Any = None  # of a hook on the model
        self.forwards: list[PipelinedForward] = []
        self.step = OpenStep()
        self.backward = BackwardWatch()

    def check(self, batch: Any) -> None:
        """Raise whatever this rank finds wrong with a batch, before the other ranks count on it."""
        if self._handle is None:
            self.forwards = pipelined_forwards(self._model, batch, self.step, self._features)
            watch = self.backward  # not self: the model would keep the pipeline alive
            self._handle = self._model.register_forward_hook(lambda *called: watch.follow(called[-1]))
        for forward in self.forwards:
            forward.check(batch)

    def remove(self) -> None:
        """Give the modules their own forwards back."""
        for forward in self.forwards:
            forward.remove()
        self.forwards = []
        self.step.end(is_ahead=False)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
