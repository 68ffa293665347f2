"""One CUDA stream per stage of the look-ahead pipeline. Nothing on a CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from embershard.pipeline.module_input import ModuleInput


class Streams:
    """On a GPU a stream per stage; without one, nothing. Every tensor that a stream reads is recorded on it.

    Their kernels are small, and later ones wait for them, some on the host: they go before the training's, which fill
    the device. Not run on a GPU so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._copy, self._distribute, self._prepare = (torch.cuda.Stream(device, priority=-1) for _ in range(3))

    def copying(self) -> Any:
        """Batches are copied to the device."""
        return torch.cuda.stream(self._copy) if self._is_cuda else nullcontext()

    def distributing(self, on_device: Any = None) -> Any:
        """Ids are exchanged; of this batch, once it is copied."""
        if not self._is_cuda:
            return nullcontext()
        if on_device is not None:
            self._distribute.wait_stream(self._copy)
            on_device.record_stream(self._distribute)
        return torch.cuda.stream(self._distribute)

    def preparing(self, inputs: dict[str, ModuleInput] | None = None) -> Any:
        """The caches work on these inputs, once they are exchanged."""
        if not self._is_cuda:
            return nullcontext()
        if inputs is not None:
            self._prepare.wait_stream(self._distribute)
            for part in inputs.values():
                part.record_stream(self._prepare)
        return torch.cuda.stream(self._prepare)

    def give(self, on_device: Any, inputs: dict[str, ModuleInput]) -> None:
        """The stream that trains or evaluates may read the batch and its inputs. The rows have events of their own."""
        if not self._is_cuda:
            return
        training = torch.cuda.current_stream(self._device)
        training.wait_stream(self._copy)
        training.wait_stream(self._distribute)  # the caches were not told of a batch that is only evaluated
        training.wait_stream(self._prepare)
        on_device.record_stream(training)
        for part in inputs.values():
            part.record_stream(training)
