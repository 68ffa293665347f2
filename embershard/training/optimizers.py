"""The two optimizers of a run and their common learning-rate schedule.

FBGEMM's fused optimizers train the embedding rows inside the backward pass, so only touched rows cost time. A torch
optimizer trains the dense layers after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from embershard.errors import ConfigError
from embershard.settings.resume_rules import OfTraining

if TYPE_CHECKING:  # they take seconds to import, and settings do not need them
    import torch
    from torch import nn
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.optim.keyed import KeyedOptimizerWrapper

#: Classes of torch.optim.
_DENSE = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam", "adamw": "AdamW"}
#: Bytes of FBGEMM's optimizer state per row, and per column of a row.
_STATE_BYTES: dict[str, tuple[int, int]] = {
    "sgd": (0, 0),
    "rowwise_adagrad": (4, 0),
    "adagrad": (0, 4),
    "adam": (0, 8),
    "partial_rowwise_adam": (4, 4),
    "lamb": (0, 8),
    "partial_rowwise_lamb": (4, 4),
}
_FUSED_ON_CPU = ("sgd", "rowwise_adagrad", "adagrad")
_WITH_FUSED_DECAY = ("adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb")
_WITH_BETAS = (*_WITH_FUSED_DECAY, "adamw")
#: Why a fused optimizer decays no rows, or not those that it should (decision 0061).
_WITHOUT_WEIGHT_DECAY = {
    "sgd": "FBGEMM's kernels of it have none",
    "adagrad": "FBGEMM's kernels of it have none",
    "rowwise_adagrad": "TorchRec sets no mode of it, and in any mode FBGEMM decays on a CPU only tables that several "
    "features share: a cache's slots would decay, and the same tables without a cache would not",
}


@dataclass(frozen=True)
class EmbeddingOptimizerConfig:
    """The optimizer of the embedding rows, fused into the backward pass by FBGEMM."""

    kind: OfTraining[
        Literal["sgd", "rowwise_adagrad", "adagrad", "adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb"]
    ] = "rowwise_adagrad"
    """FBGEMM's optimizer: "sgd", "rowwise_adagrad" and "adagrad" on the CPU, all on GPUs."""

    lr: OfTraining[float] = 0.02
    """Learning rate after warm-up."""

    eps: OfTraining[float | None] = None
    """Added to the denominator of the adaptive optimizers; FBGEMM's default is 1e-8. Not for "sgd"."""

    weight_decay: OfTraining[float | None] = None
    """Weight decay of the touched rows. Only for the Adam and LAMB kinds, so on GPUs: FBGEMM's others ignore it."""

    betas: OfTraining[tuple[float, float] | None] = None
    """Decay of the first and second moment. Only for the Adam and LAMB kinds."""

    def __post_init__(self) -> None:
        if self.weight_decay is not None and (reason := _WITHOUT_WEIGHT_DECAY.get(self.kind)):
            raise ConfigError(
                f"embedding_optimizer.weight_decay has no effect with kind={self.kind!r}: {reason}. Rows decay with "
                f"{', '.join(_WITH_FUSED_DECAY)}, which FBGEMM has on GPUs. Against overfitting there are "
                "model.dropout, train.early_stopping and dense_optimizer.weight_decay."
            )
        _check_optimizer("embedding_optimizer", self, tuple(_STATE_BYTES))

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes of optimizer state per row, and per column of a row."""
        return _STATE_BYTES[self.kind]

    def apply(self, module: nn.Module, device: torch.device) -> None:
        """Attach the optimizer to the tables in `module`; TorchRec fuses it when it shards them.

        Raises:
            ConfigError: FBGEMM has no such optimizer on `device`.
        """
        if device.type == "cpu" and self.kind not in _FUSED_ON_CPU:
            raise ConfigError(
                f"embedding_optimizer.kind: got {self.kind!r}, which FBGEMM has on GPUs only; "
                f"on the CPU it has {', '.join(_FUSED_ON_CPU)}."
            )
        import torch
        from torch.distributed.optim import _apply_optimizer_in_backward  # TorchRec deprecates its own for it
        from torchrec.optim import optimizers as fused
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        arguments = _arguments(self)  # a new dict: TorchRec writes into it
        if self.betas is not None:
            arguments["beta1"], arguments["beta2"] = arguments.pop("betas")  # FBGEMM's names
        classes: dict[str, type[torch.optim.Optimizer]] = {
            "sgd": torch.optim.SGD,
            "rowwise_adagrad": RowWiseAdagrad,
            "adagrad": torch.optim.Adagrad,
            "adam": fused.Adam,
            "partial_rowwise_adam": fused.PartialRowWiseAdam,
            "lamb": fused.LAMB,
            "partial_rowwise_lamb": fused.PartialRowWiseLAMB,
        }
        _apply_optimizer_in_backward(classes[self.kind], module.parameters(), arguments)


@dataclass(frozen=True)
class DenseOptimizerConfig:
    """The optimizer of the dense layers."""

    kind: OfTraining[Literal["sgd", "adagrad", "adam", "adamw"]] = "adam"
    """An optimizer of torch.optim. On GPUs it is a fused one, which rounds otherwise: by about 1e-7."""

    lr: OfTraining[float] = 0.001
    """Learning rate after warm-up."""

    eps: OfTraining[float | None] = None
    """Added to the denominator of the adaptive optimizers; torch's default when absent. Not for "sgd"."""

    weight_decay: OfTraining[float | None] = None
    """L2 penalty, for "adamw" decoupled weight decay; torch's default when absent."""

    betas: OfTraining[tuple[float, float] | None] = None
    """Decay of the first and second moment. Only for "adam" and "adamw"."""

    clip_norm: OfTraining[float | None] = None
    """Largest norm of the gradient of all dense parameters together; absent: no clipping."""

    def __post_init__(self) -> None:
        _check_optimizer("dense_optimizer", self, tuple(_DENSE))

    @property
    def num_states(self) -> int:
        """States as large as the parameters, the gradients among them."""
        return {"sgd": 1, "adagrad": 2, "adam": 3, "adamw": 3}[self.kind]

    def build(self, parameters: Mapping[str, nn.Parameter]) -> KeyedOptimizerWrapper:
        """Return an optimizer whose state dict is keyed by parameter name, as checkpoints need it."""
        import torch
        from torchrec.optim.keyed import KeyedOptimizerWrapper

        optimizer, arguments = getattr(torch.optim, _DENSE[self.kind]), _arguments(self)
        if _are_on_gpu(parameters.values()):
            arguments["fused"] = True  # few kernels for all parameters and steps of the formula (decision 0146)
        elif self.kind in _AT_ONCE and all(each.device.type == "cpu" for each in parameters.values()):
            arguments[_AT_ONCE[self.kind]] = True
        return KeyedOptimizerWrapper(dict(parameters), lambda params: optimizer(params, **arguments))

    def clip(self, parameters: Iterable[nn.Parameter]) -> None:
        """Clip the gradients of all dense parameters to `clip_norm`, if there is one."""
        if self.clip_norm is not None:
            from torch.nn.utils import clip_grad_norm_

            clip_grad_norm_(parameters, self.clip_norm)


@dataclass(frozen=True)
class ScheduleConfig:
    """One factor on both learning rates, a function of the step: linear warm-up, constant, decay, floor.

    >>> ScheduleConfig(warmup_steps=4).factor(step=1)
    0.5
    """

    warmup_steps: OfTraining[int] = 0
    """Steps over which the factor rises linearly to 1."""

    decay: OfTraining[Literal["none", "linear", "cosine", "quadratic"]] = "none"
    """Shape of the decay; "quadratic" is the one of MLPerf's DLRM."""

    decay_start: OfTraining[int | None] = None
    """First step of the decay; the end of the warm-up when absent. Needs `decay`."""

    decay_steps: OfTraining[int | None] = None
    """Length of the decay in steps. Needed by every `decay` but "none"."""

    floor: OfTraining[float | None] = None
    """Factor at the end of the decay and after it; 0 when absent. Needs `decay`."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"schedule.warmup_steps: got {self.warmup_steps}, needed 0 or more.")
        if self.decay not in ("none", "linear", "cosine", "quadratic"):
            raise ConfigError(f"schedule.decay: got {self.decay!r}, needed 'none', 'linear', 'cosine' or 'quadratic'.")
        if self.decay == "none":
            for name in ("decay_start", "decay_steps", "floor"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"schedule.{name} has no effect without schedule.decay; remove it or set both.")
            return
        if self.decay_steps is None or self.decay_steps < 1:
            raise ConfigError(
                f"schedule.decay_steps: got {self.decay_steps}, but decay={self.decay!r} needs 1 or more."
            )
        if self.decay_start is not None and self.decay_start < self.warmup_steps:
            raise ConfigError(
                f"schedule.decay_start: got {self.decay_start}, needed warmup_steps={self.warmup_steps} or more."
            )
        if self.floor is not None and not 0 <= self.floor <= 1:
            raise ConfigError(f"schedule.floor: got {self.floor}, needed a factor from 0 to 1.")

    def factor(self, step: int) -> float:
        """Return the factor of the step that follows `step` trained ones."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay_steps is None:
            return 1.0
        start = self.warmup_steps if self.decay_start is None else self.decay_start
        left = 1.0 - min(max(step - start, 0) / self.decay_steps, 1.0)
        floor = self.floor or 0.0
        shapes = {"linear": left, "quadratic": left * left, "cosine": 0.5 - 0.5 * math.cos(math.pi * left)}
        return floor + (1.0 - floor) * shapes[self.decay]


class Optimizers:
    """Both optimizers of a run on one rank, with their learning rates.

    Args:
        model: sharded, with the optimizer `embedding` attached to its tables.

    Attributes:
        dense: of the dense layers; its state dict is keyed by parameter name.
        dense_parameters: those that it trains, by name.
        factor: of the learning rates in the last step; None before the first one.
        steps_before: that the schedule counted before the first step: those of a trained model that the run began with.
        begun: what checkpoints say of that model.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        embedding: EmbeddingOptimizerConfig,
        dense: DenseOptimizerConfig,
        schedule: ScheduleConfig,
    ) -> None:
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        self._embedding_config, self._dense_config, self._schedule = embedding, dense, schedule
        self.dense_parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
        self.dense = dense.build(self.dense_parameters)
        self._fused = model.fused_optimizer
        self.factor: float | None = None
        self.steps_before = self._state_steps_before = 0
        self.begun: Mapping[str, Any] = {}

    def begin_behind(self, begun: Mapping[str, Any], steps: int = 0) -> None:
        """Let the schedule, and the counts of steps that belong to states, begin behind `schedule_steps` and
        `state_steps` of a trained model; set the number of trained steps."""
        self.begun = begun
        self.steps_before, self._state_steps_before = begun.get("schedule_steps", 0), begun.get("state_steps", 0)
        self.set_num_steps(steps)

    def begin_step(self, steps: int) -> None:
        """Drop the gradients, and set the learning rates of the step that follows `steps` trained ones."""
        for parameter in self.dense_parameters.values():  # what `zero_grad` does in 20 times the time
            parameter.grad = None
        factor = self._schedule.factor(steps + self.steps_before)
        if factor == self.factor:
            return
        self.factor = factor
        for optimizer, config in ((self.dense, self._dense_config), (self._fused, self._embedding_config)):
            for group in optimizer.param_groups:
                group["lr"] = config.lr * factor
        self._fused.step()  # only hands the rate to the kernels

    def step(self) -> None:
        """Train the dense layers. The backward has trained the embedding rows."""
        self._dense_config.clip(self.dense_parameters.values())
        self.dense.step()

    def set_num_steps(self, steps: int) -> None:
        """Set the number of trained steps in FBGEMM's kernels that depend on it: they count forwards, whatever becomes
        of them, and their state dicts leave the number out."""
        if self._embedding_config.kind in _WITH_BETAS:
            self._fused.set_optimizer_step(steps + self._state_steps_before)


#: On a CPU, ways of torch.optim to train all parameters in fewer calls, with the bits of its loop over them. "adagrad"
#: stays in that loop: for large layers it is three times as fast.
_AT_ONCE = {"sgd": "fused", "adam": "foreach", "adamw": "foreach"}


def _are_on_gpu(parameters: Iterable[nn.Parameter]) -> bool:
    return all(each.device.type == "cuda" for each in parameters)


def _check_optimizer(
    section: str, config: EmbeddingOptimizerConfig | DenseOptimizerConfig, kinds: tuple[str, ...]
) -> None:
    if config.kind not in kinds:
        raise ConfigError(f"{section}.kind: got {config.kind!r}, needed one of {', '.join(kinds)}.")
    for name in ("lr", "eps", "weight_decay", "clip_norm"):
        value = getattr(config, name, None)
        if value is not None and not value > 0:
            raise ConfigError(
                f"{section}.{name}: got {value}, needed more than 0{'' if name == 'lr' else ', or none'}."
            )
    if config.betas is not None and not all(0 <= beta < 1 for beta in config.betas):
        raise ConfigError(
            f"{section}.betas: got {list(config.betas)}, needed two numbers, each at least 0 and below 1."
        )
    for name, no_effect in (("eps", config.kind == "sgd"), ("betas", config.kind not in _WITH_BETAS)):
        if no_effect and getattr(config, name) is not None:
            raise ConfigError(f"{section}.{name} has no effect with kind={config.kind!r}; remove it.")


def _arguments(config: EmbeddingOptimizerConfig | DenseOptimizerConfig) -> dict[str, Any]:
    given = {"lr": config.lr, "eps": config.eps, "weight_decay": config.weight_decay, "betas": config.betas}
    return {name: value for name, value in given.items() if value is not None}
