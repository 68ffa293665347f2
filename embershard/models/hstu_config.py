"""`HstuConfig`: the settings of HSTU, the architecture "hstu"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from embershard.errors import ConfigError
from embershard.models.arch_section import FLOPS_PER_MULTIPLY_ADD, ArchSection, mlp_parameters
from embershard.settings.resume_rules import Free, OfModel, OfTraining

_HALF_OCTAVES = 64  # differences of times up to 2^32 seconds are told apart
#: Least seconds of each bucket of such differences but the first: about sqrt(2) times those of the bucket before.
TIME_BOUNDS = sorted({math.isqrt((1 << number) - 1) + 1 for number in range(_HALF_OCTAVES)})
NUM_TIME_BUCKETS = len(TIME_BOUNDS) + 1
#: Bytes of one layer's scores above which the samples of a batch go through the layers in groups, one after another.
GROUP_BYTES = 64 << 20


@dataclass(frozen=True)
class HstuConfig(ArchSection):
    """Sizes of HSTU's layers, and what its attention sees. Only for arch "hstu".

    >>> HstuConfig(num_layers=5, num_heads=4, head_dim=128, max_events=2039).token_width(4)
    2048
    """

    network: ClassVar[str] = "embershard.extras.hstu:HSTU"

    num_layers: OfModel[int] = 2
    """Layers of attention."""
    num_heads: OfModel[int] = 2
    """Heads of each layer."""
    head_dim: OfModel[int] = 16
    """Numbers per head of each query, key, value and gate."""
    max_events: OfModel[int] = 256
    """Most events of a history; a longer one is refused. Sums over events are divided by it, and the bias by position
    has a number for each distance up to it."""
    window: OfModel[int | None] = None
    """Events before it that an event sees, besides itself, and that the scored item sees. Default: all."""
    times: OfModel[tuple[str, ...]] = ()
    """Two sparse features of whole seconds, ["time", "hist_time"]: when the item is scored, one number, and when each
    event of the history was. Their differences give the bias by time; they look up no table. Default: no such bias."""
    kernel: Free[Literal["torch", "fbgemm"]] = "torch"
    """What computes the attention on GPUs: operations of torch, or the kernel of the package fbgemm_gpu_hstu, which
    needs `train.precision` "bf16" and no `window`. On a CPU always torch."""
    input_dropout: OfTraining[float] = 0.0
    """Probability with which training leaves out each number of what the first layer gets."""
    linear_dropout: OfTraining[float] = 0.0
    """Probability with which training leaves out each number of what a layer's last projection gets."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "head_dim", "max_events", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"model.hstu.{name}: got {value}, needed at least 1.")
        for name in ("input_dropout", "linear_dropout"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ConfigError(f"model.hstu.{name}: got {value}, needed a probability from 0 to below 1.")
        if self.times and (len(self.times) != 2 or self.times[0] == self.times[1]):
            raise ConfigError(
                f"model.hstu.times: got {list(self.times)}, needed two sparse features: the time of the sample, and "
                'those of its history\'s events. For instance ["time", "hist_time"].'
            )
        if self.kernel == "fbgemm" and self.window is not None:
            raise ConfigError(
                f'model.hstu.kernel: got "fbgemm" and window = {self.window}, which that kernel has not beside '
                'contextual tokens. Set window to none, or kernel to "torch".'
            )
        if self.window is not None and self.window >= self.max_events:
            raise ConfigError(
                f"model.hstu.window: got {self.window}, which has no effect with max_events={self.max_events}. Remove "
                "it, or make it smaller."
            )

    def token_width(self, num_parts: int) -> int:
        """Return the numbers that a layer's heads have of a token, in `num_parts` of gate, value, query and key."""
        return num_parts * self.num_heads * self.head_dim

    def samples_at_once(self, num_tokens: int) -> int:
        return max(1, GROUP_BYTES // (4 * self.num_heads * num_tokens**2))

    @property
    def drops(self) -> bool:
        return any((self.input_dropout, self.linear_dropout))

    def num_parameters(self, num_features: int, dim: int) -> int:
        biases = self.max_events + 1 + (NUM_TIME_BUCKETS if self.times else 0)
        maps = mlp_parameters(dim, self.token_width(4)) + mlp_parameters(self.token_width(3), dim)
        layer = maps + biases + 2 * dim + 2 * self.token_width(1)
        return mlp_parameters(num_features * dim, dim) + self.num_layers * layer + 2 * dim

    def sample_cost(
        self, num_features: int, dim: int, num_contexts: int, batch_size: int, num_events: int | None = None
    ) -> tuple[float, float]:
        """Count the layers alone. A layer keeps three numbers of each two tokens and head. Of a batch that goes through
        the layers in groups, one group is kept at a time, and of the others what goes into them; a group's forward is
        then computed twice.

        >>> HstuConfig().sample_cost(num_features=1, dim=16, num_contexts=1, batch_size=1)
        (62611968.0, 996912.0)
        """
        own = 1 + (self.max_events if num_events is None else num_events)
        tokens, width = own + num_contexts, self.token_width(1)
        events = own * num_features * dim**2
        layers = self.num_layers * tokens * (7 * width * dim + 2 * tokens * width)
        kept = self.num_layers * tokens * (2 * dim + 11 * width + 3 * self.num_heads * tokens)
        at_once = self.samples_at_once(tokens)
        flops = float(FLOPS_PER_MULTIPLY_ADD * (events + layers))
        if batch_size <= at_once:
            return flops, float(kept)
        return flops * 4 / 3, tokens * dim + kept * at_once / batch_size

    def token_costs(self, num_features: int, dim: int) -> tuple[int, int]:
        """Count multiply-adds, as `sample_cost` does."""
        width = self.num_layers * self.token_width(1)
        return num_features * dim**2 + 7 * width * dim, 2 * width
