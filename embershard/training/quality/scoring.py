"""`Scorer`: a trained model on its ranks, and what it says of samples."""

from __future__ import annotations

from collections.abc import Iterator

from embershard.data import Source, Target
from embershard.distributed import Ranks, Supervision, load_tensors, shortest, without_empty
from embershard.distributed.checkpoint.load import without_known_warnings
from embershard.training.build import build_sharded_model
from embershard.training.checkpoint.trained_run import TrainedRun, for_scoring
from embershard.training.fit.memory_check import check_memory_for_run
from embershard.training.quality.metrics import Predicted, PredictionBuffer
from embershard.training.quality.prediction import autocast, predicted_of
from embershard.training.quality.quality import AnyQuality
from embershard.training.steps import open_stream


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

    @property
    def target(self) -> Target:
        """What is predicted of a sample."""
        return self._source.schema.target

    def scores(self) -> Iterator[Predicted]:
        """Yield what the model says of all samples in their order, float32 on the host: those of all ranks, a global
        batch at a time, the same on every rank. Collective."""
        for predicted in self._own():
            gathered = self._ranks.all_gather_rows(predicted.columns()).cpu()
            yield Predicted.of_columns(gathered, self.target)

    def quality(self) -> AnyQuality:
        """Return the quality over all samples. Collective, with the same result everywhere."""
        buffer = PredictionBuffer(self.target)
        for predicted in self._own():
            buffer.add(predicted)
        return buffer.quality(self._ranks)

    def _own(self) -> Iterator[Predicted]:
        device = self._ranks.device
        with open_stream(self._config, self._source, self._ranks, None, None) as stream:
            batches = shortest(stream, device)
            for found in predicted_of(self.model, batches, device, lambda: autocast(self._config.train, device)):
                self._supervision.beat()
                yield found
