"""CUDA streams of the look-ahead pipeline's stages. Nothing on a CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from embershard.pipeline.module_input import ModuleInput

_ON_A_CPU = nullcontext()


class Streams:
    """On a GPU, one stream per stage; every tensor that a stream reads is recorded on it.

    The streams have a higher priority than the training's: their kernels are small, and the host waits for some of
    them. Not run on a GPU so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._copy, self._distribute, self._prepare = (torch.cuda.Stream(device, priority=-1) for _ in range(3))

    def copying(self) -> Any:
        """Return a context for copying batches to the device."""
        return torch.cuda.stream(self._copy) if self._is_cuda else _ON_A_CPU

    def distributing(self, on_device: Any = None) -> Any:
        """Return a context for exchanging ids; those of `on_device`, once it is copied."""
        if not self._is_cuda:
            return _ON_A_CPU
        if on_device is not None:
            self._distribute.wait_stream(self._copy)
            on_device.record_stream(self._distribute)
        return torch.cuda.stream(self._distribute)

    def preparing(self, inputs: dict[str, ModuleInput] | None = None) -> Any:
        """Return a context for the caches' work; on `inputs`, once they are exchanged."""
        if not self._is_cuda:
            return _ON_A_CPU
        if inputs is not None:
            self._prepare.wait_stream(self._distribute)
            for part in inputs.values():
                part.record_stream(self._prepare)
        return torch.cuda.stream(self._prepare)

    def give(self, on_device: Any, inputs: dict[str, ModuleInput]) -> None:
        """Let the current stream, which trains or evaluates, read the batch and its inputs. Rows have own events."""
        if not self._is_cuda:
            return
        training = torch.cuda.current_stream(self._device)
        training.wait_stream(self._copy)
        training.wait_stream(self._distribute)  # the caches do not know a batch that is only evaluated
        training.wait_stream(self._prepare)
        on_device.record_stream(training)
        for part in inputs.values():
            part.record_stream(training)
