"""`Scorer`: a trained model on its ranks, and what it says of samples."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from embershard.data import Source
from embershard.distributed import Ranks, Supervision, load_tensors, shortest, without_empty
from embershard.distributed.checkpoint.load import without_known_warnings
from embershard.training.build import build_sharded_model
from embershard.training.memory_check import check_memory_for_run
from embershard.training.metrics import PredictionBuffer
from embershard.training.prediction import autocast, logits_of
from embershard.training.quality import Quality
from embershard.training.steps import open_stream
from embershard.training.trained_run import TrainedRun, for_scoring


class Scorer:
    """Scores the held-out samples of a source with a trained model. All ranks call its methods together.

    Args:
        trained: the model.
        source: of the samples.
        supervision: is told of each batch.

    Raises:
        ConfigError: the model does not fit the memory of a machine.
        CheckpointError: the checkpoint is of another model.
    """

    def __init__(self, trained: TrainedRun, source: Source, ranks: Ranks, supervision: Supervision) -> None:
        config = for_scoring(trained.config, ranks.device.type)
        self._config, self._source, self._ranks, self._supervision = config, source, ranks, supervision
        self.memory_warning = check_memory_for_run(config, None, ranks)
        self.model = build_sharded_model(config, None, None, source.schema, ranks)
        tensors = {"model": self.model.state_dict()}
        load_tensors(trained.checkpoint, without_empty(tensors))
        with without_known_warnings():
            self.model.load_state_dict(tensors["model"])

    @property
    def num_samples(self) -> int:
        """Samples to score, of all ranks."""
        return self._source.chunks("eval").num_samples

    def scores(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield logits and labels, both float32 [n] on the host, of all samples in their order: those of all ranks, a
        global batch at a time, the same on every rank. Collective."""
        for logits, labels in self._own():
            both = torch.stack([logits.float().reshape(-1), labels.float().reshape(-1)], dim=1)
            yield tuple(self._ranks.all_gather_rows(both).cpu().unbind(1))  # type: ignore[misc]

    def quality(self) -> Quality:
        """Return the quality over all samples. Collective, with the same result everywhere."""
        buffer = PredictionBuffer()
        for logits, labels in self._own():
            buffer.add(logits, labels)
        return buffer.quality(self._ranks)

    def _own(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        device = self._ranks.device
        with open_stream(self._config, self._source, self._ranks, None, None) as stream:
            batches = shortest(stream, device)
            for found in logits_of(self.model, batches, device, lambda: autocast(self._config.train, device)):
                self._supervision.beat()
                yield found
