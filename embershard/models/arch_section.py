"""`ArchSection`: the settings of one architecture, and what the rest of the package asks of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any, ClassVar

FLOPS_PER_MULTIPLY_ADD = 2 * 3  # the forward, and in the backward the gradients of inputs and of weights


class ArchSection(ABC):
    """Settings of an architecture with a history: a frozen dataclass, and a field of `ModelConfig` that is called as
    its architecture. All numbers of events are of one history.

    P features of the scored item and Q >= P of an event, of dim D.

    Attributes:
        network: class of what is over the embeddings, "module:class", made of Q, D, the section and the widths of the
            last MLP, which is its `over`; called as `HSTU` is.
    """

    network: ClassVar[str]
    times: Sequence[str]
    max_events: int

    @property
    @abstractmethod
    def drops(self) -> bool:
        """Training leaves out some numbers by chance."""

    @abstractmethod
    def num_parameters(self, num_features: int, dim: int) -> int:
        """Return the number of weights and biases of `network` below its last MLP, which gets D numbers."""

    @abstractmethod
    def samples_at_once(self, num_tokens: int) -> int:
        """Return the most samples, of so many tokens each, that go through the layers together."""

    @abstractmethod
    def sample_cost(
        self, num_features: int, dim: int, num_contexts: int, batch_size: int, num_events: int | None = None
    ) -> tuple[float, float]:
        """Return operations of forward and backward, and numbers kept for the backward, of a sample with so many events
        (default: a full history) and other features."""

    @abstractmethod
    def token_costs(self, num_features: int, dim: int) -> tuple[int, int]:
        """Return a and b: of a sample, T tokens (events, the scored item, other features) cost about a T + b T^2
        multiply-adds."""

    def changed(self) -> list[str]:
        """Return the names of the settings that are not the default ones."""
        return [each.name for each in fields(self) if getattr(self, each.name) != each.default]  # type: ignore[arg-type]

    def without_dropout(self) -> dict[str, Any]:
        """Return the settings that say which numbers a sample takes, by name."""
        return {
            each.name: getattr(self, each.name)
            for each in fields(self)  # type: ignore[arg-type]
            if not each.name.endswith("dropout")
        }


def mlp_parameters(*widths: int) -> int:
    """Return the number of weights and biases of linear layers between these widths."""
    return sum((a + 1) * b for a, b in pairwise(widths))
