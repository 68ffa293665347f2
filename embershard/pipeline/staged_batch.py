"""The life of a batch in the pipeline, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from embershard.errors import DataError
from embershard.pipeline.batch_tensors import tensors_of
from embershard.pipeline.pipelined_forward import PipelinedForward
from embershard.pipeline.streams import Streams


class StagedBatch:
    """A batch in the pipeline: as the iterator gave it, its copy on the device, and its modules' inputs.

    Its methods are its stages, in this order; the first three are collective::

        StagedBatch(...)   arriving    copy it to the device and start its input all-to-all
        send               arriving    send its ids; the ranks know how many each sends
        receive            arrived     wait for the ids of this rank's tables
        know               known       tell the caches when its rows are used: they evict accordingly
        make_resident      resident    bring its rows into slots that no other resident batch uses; until it is True
        begin              training    hand its inputs to the model's forward
        close              released    release its slots, and take back what was announced and did not happen

    An exception in a stage leaves the batch in the stage before. The stage can then be tried again.

    Args:
        batch: has `to(device, non_blocking)` and `record_stream(stream)`.
        forwards: of the sharded modules that are pipelined.
    """

    def __init__(
        self, batch: Any, device: torch.device, forwards: Sequence[PipelinedForward], streams: Streams
    ) -> None:
        self.batch = batch
        self._device, self._forwards, self._streams = device, forwards, streams
        announced = [forward.features_of(batch) for forward in forwards]  # of a batch whose parts nobody else can read
        self._versions = [(each, each._version) for each in tensors_of([batch, announced]) if not each.is_inference()]
        with streams.copying():
            self.on_device = batch.to(device, non_blocking=True)
        with streams.distributing(self.on_device):
            self.inputs = {forward.name: forward.start(self.on_device) for forward in forwards}
        self._is_sent = False

    @property
    def num_ids(self) -> int:
        """Ids that this rank received."""
        return sum(part.num_ids for part in self.inputs.values())

    @property
    def known_bytes(self) -> int:
        """Memory of its inputs, beside the batch itself, in bytes."""
        return sum(part.known_bytes for part in self.inputs.values())

    def send(self) -> None:
        """Send the ids. A second call does nothing."""
        if self._is_sent:
            return
        with self._streams.distributing():
            for part in self.inputs.values():
                part.send()
        self._is_sent = True

    def receive(self) -> None:
        """Wait for the ids of this rank's tables."""
        self.send()
        with self._streams.distributing():
            for part in self.inputs.values():
                part.receive()
        if self._device.type == "cuda":
            self.on_device = None  # copied again before it trains: until then only its ids stay on the device

    def know(self) -> None:
        """Tell the caches when its rows are used."""
        with self._streams.preparing(self.inputs):
            for part in self.inputs.values():
                part.know()

    def make_resident(self, critical_path: bool) -> bool:
        """Bring in its rows, as far as they fit beside those of the batches before it; return True when all are in."""
        self._copy_to_device()
        with self._streams.preparing():
            complete = [part.make_resident(critical_path) for part in self.inputs.values()]
        return all(complete)

    def begin(self) -> Any:
        """Begin its step; return the batch on the device.

        Raises:
            DataError: the batch's tensors were written to since the pipeline took it.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise DataError(
                "a batch was written to in place after the pipeline had taken it, which keeps it for up to "
                "lookahead + 6 steps. Give each batch tensors of its own (batch.clone(), or no reuse of buffers in the "
                "loader)"
            )
        self._copy_to_device()
        self._streams.give(self.on_device, self.inputs)
        for forward in self._forwards:
            forward.install()
            self.inputs[forward.name].expect(*forward.args.build_args_kwargs(self.on_device))
        return self.on_device

    def close(self) -> None:
        """End its life: nothing reads it any more."""
        with self._streams.preparing():
            for part in self.inputs.values():
                part.close()

    def _copy_to_device(self) -> None:
        if self.on_device is None:
            with self._streams.copying():
                self.on_device = self.batch.to(self._device, non_blocking=True)
