"""`KeptBatches`: batches whose loss was not finite, in files, to look at them."""

from __future__ import annotations

from pathlib import Path

import torch

from embershard.data import Batch
from embershard.distributed import Ranks, complete_checkpoints

FOLDER = "non_finite"  # in the run's folder
MOST_FILES = 20  # per rank


class KeptBatches:
    """Writes batches to the run's folder.

    A file has a dict for `torch.load(path, weights_only=True)`: "step", "rank", "losses" (of all ranks), "features"
    (names, F), "dense_features" [B, D], "lengths" [F * B], "values" [N], "labels" [B] or [B, T], and "weights" [B] or
    None.

    Args:
        checkpoints: the run's folder of checkpoints; files go to the folder `FOLDER` beside it.
    """

    def __init__(self, checkpoints: Path, ranks: Ranks) -> None:
        self._checkpoints, self._ranks = checkpoints, ranks
        self._last_step = self._repeats = self._num_files = 0

    def keep(self, step: int, named_rank: int, batch: Batch | None, losses: list[float]) -> str:
        """Write this rank's batch of a step; None: its loss is finite. Collective, for the same steps on all ranks.

        A step is repeated with the next batch where one was skipped: its files are numbered.

        Returns:
            A sentence of `named_rank` about its file, the same on all ranks. It begins with a space.
        """
        return self._ranks.all_gather_objects(self._keep(step, batch, losses))[named_rank]

    def _keep(self, step: int, batch: Batch | None, losses: list[float]) -> str:
        self._repeats = self._repeats + 1 if step == self._last_step else 1
        self._last_step = step
        if batch is None or self._num_files >= MOST_FILES:
            return " Its batch was not kept."
        path = self._path(step)
        try:
            self._write(path, step, batch, losses)
        except OSError as error:
            return f" Its batch could not be written to {path} ({error.strerror})."
        self._num_files += 1
        return f" Its batch is in {path}."

    def newest_checkpoint(self) -> str:
        """Return a sentence with the newest complete checkpoint. It begins with a space."""
        complete = complete_checkpoints(self._checkpoints)
        return f" The newest checkpoint is {complete[-1]}." if complete else " There is no checkpoint."

    def _path(self, step: int) -> Path:
        again = f"_batch_{self._repeats}" if self._repeats > 1 else ""
        return self._checkpoints.parent / FOLDER / f"step_{step}{again}_rank_{self._ranks.rank}.pt"

    def _write(self, path: Path, step: int, batch: Batch, losses: list[float]) -> None:
        ids = batch.sparse_features.to(torch.device("cpu"))
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:  # torch's own errors of files are RuntimeErrors
            torch.save(
                {
                    "step": step,
                    "rank": self._ranks.rank,
                    "losses": losses,
                    "features": ids.keys(),
                    "dense_features": batch.dense_features.cpu(),
                    "lengths": ids.lengths(),
                    "values": ids.values(),
                    "labels": batch.labels.cpu(),
                    "weights": None if batch.weights is None else batch.weights.cpu(),
                },
                file,
            )
