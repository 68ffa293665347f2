"""`AveragedWeights`: an exponential moving average of the dense layers' weights, for all that uses the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from embershard.distributed.checkpoint.load import AVERAGE, load_group
from embershard.training.parts.part import Part
from embershard.training.reports import Report


class AveragedWeights(Part):
    """A run with `train.ema`. Evaluations, checkpoints' users and publications get the average, and training does not.

    Rows of tables have none: an average of all rows would touch each of them in every step.

    Attributes:
        weights: the average of each weight of the dense layers, by its name in the model, of its shape and type.
    """

    weights: dict[str, Tensor]
    _is_read = False

    def after_build(self) -> None:
        self._live = self.run.optimizers.dense_parameters
        self.weights = {name: weight.detach().clone() for name, weight in self._live.items()}

    def notes(self) -> list[str]:
        return ["Evaluations are of an average of the dense weights (train.ema)."]

    def begin(self) -> Iterable[Report]:
        """Begin with the weights before the first step, which may be those of a trained model."""
        if not self._is_read:
            for name, weight in self._live.items():
                self.weights[name].copy_(weight.detach())
        return ()

    def after_step(self) -> Iterable[Report]:
        """Add this step's weights. The first steps count more: else a short run would have the initial weights in its
        average."""
        decay, steps = self.run.config.train.ema, self.run.steps
        assert decay is not None, "the run has no average"
        live: list[Any] = [weight.detach() for weight in self._live.values()]
        average: list[Any] = list(self.weights.values())
        get_ema_multi_avg_fn(min(decay, (1 + steps) / (10 + steps)))(average, live, steps)
        return ()

    @contextmanager
    def served(self) -> Iterator[None]:
        """While it lasts, the model has the average in place of what it trains."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        """Exchange the values, and no addresses: whoever noted these may go on."""
        for name, weight in self._live.items():
            trained = weight.detach().clone()
            weight.detach().copy_(self.weights[name])
            self.weights[name].copy_(trained)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return {AVERAGE: self.weights}

    def read_tensors(self, checkpoint: Path) -> None:
        """Go on with the average in the checkpoint; where it has none, begin with its weights."""
        saved, self._is_read = load_group(checkpoint, AVERAGE), True
        for name, weight in self._live.items():
            self.weights[name].copy_(saved.get(name, weight.detach()))
