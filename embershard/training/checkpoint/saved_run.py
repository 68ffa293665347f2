"""The state of a run in a checkpoint's scalars, checked before any of it is used."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embershard.data import StreamState
from embershard.decoding import decode, field_types
from embershard.distributed import damaged_scalars, read_scalars, step_of
from embershard.errors import CheckpointError, DataError
from embershard.training.checkpoint.identity import SEED, Change

#: Parts of a position that every checkpoint has.
_POSITION = ("epoch", "global_sample", "seed")


@dataclass(frozen=True)
class SavedRun:
    """State of a saved run, and its setup.

    Attributes:
        step, samples: trained by then.
        stream: the position in the data.
        tables: rows and dim of every sparse feature's table.
        settings: those that are compared on a resume; of earlier versions, some of them.
        world_size: number of ranks.
        rng: the states of each rank's random number generators, in base64, by device.
        changes: settings that were changed on request by earlier resumes.
        rank_batch_size: samples per rank and step that the settings asked for, though resumes on other ranks may have
            kept the samples per step; None where they gave these, and in earlier versions.

    Raises:
        CheckpointError: a number is out of its range, or a generator's state is missing or damaged.
    """

    step: int
    samples: int
    stream: StreamState
    tables: dict[str, tuple[int, int]]
    settings: dict[str, Any]
    world_size: int
    rng: tuple[dict[str, str], ...]
    changes: tuple[Change, ...] = ()
    rank_batch_size: int | None = None

    def __post_init__(self) -> None:
        numbers = {"step": self.step, "samples": self.samples, "world_size": self.world_size}
        numbers |= {f"stream.{name}": getattr(self.stream, name) for name in _POSITION}
        for name, value in numbers.items():
            least = 1 if name == "world_size" else 0
            _need(value >= least, name, value, f"at least {least}")
        _need(self.samples < 2**63, "samples", self.samples, "less than 2^63")
        if packed := self.stream.packed:
            most = self.stream.global_sample
            _need(packed.hot_samples <= most, "stream.packed.hot_samples", packed.hot_samples, f"at most {most}")
        for name in ("step", "stream.epoch"):  # each takes a sample at least
            _need(numbers[name] <= self.samples, name, numbers[name], f"at most {self.samples} (samples)")
        _need(len(self.rng) == self.world_size, "rng", f"{len(self.rng)} ranks", f"{self.world_size} (world_size)")
        for rank, states in enumerate(self.rng):
            _need("cpu" in states, f"rng[{rank}]", list(states), "a state for 'cpu'")
            for device, text in states.items():
                _need(_is_state(device, text), f"rng[{rank}].{device}", text, "a generator's state in base64")

    @staticmethod
    def read(checkpoint: Path) -> SavedRun:
        """Read the scalars of a checkpoint.

        Raises:
            InvalidCheckpointError: the scalars cannot be read, or an entry of them is missing or wrong.
        """
        scalars = read_scalars(checkpoint)
        values = {name: scalars[name] for name in field_types(SavedRun) if name in scalars}
        try:
            if isinstance(stream := values.get("stream"), dict):  # no part of a position has a default
                for name in _POSITION:
                    _need(name in stream, f"stream.{name}", "nothing", "integer")
            saved = decode(SavedRun, values, CheckpointError)
            _need(saved.step == step_of(checkpoint), "step", saved.step, f"that of {checkpoint.name}")
            return saved
        except (CheckpointError, DataError) as error:
            raise damaged_scalars(checkpoint, str(error)) from error

    @property
    def identity(self) -> dict[str, Any]:
        """The settings that are compared, by name."""
        return {SEED: self.stream.seed, **self.settings}

    def check_tables(self, checkpoint: Path, tables: dict[str, tuple[int, int]]) -> None:
        """Raise unless the tensors of the checkpoint fit these tables.

        Raises:
            CheckpointError: with both sides.
        """
        different = (name for name in sorted(self.tables.keys() | tables) if self.tables.get(name) != tables.get(name))
        if (name := next(different, None)) is not None:
            sizes = (found.get(name) for found in (self.tables, tables))
            was, now = (f"{size[0]} rows x {size[1]}" if size else "no table" for size in sizes)
            raise CheckpointError(
                f"{checkpoint} does not fit: feature {name!r} has {was} in it, {now} in this run. "
                "Resume with the config and data it was written with."
            )

    def check_position(self, checkpoint: Path, num_samples: int, *, same_data: bool = True) -> None:
        """Raise unless the position is within training data of `num_samples` per epoch.

        Args:
            same_data: False if the epochs before had other data.

        Raises:
            CheckpointError: with both sides.
        """
        at, most = self.stream.global_sample, self.stream.epoch * num_samples + self.stream.global_sample
        if at > num_samples or (same_data and self.samples > most):
            raise CheckpointError(
                f"{checkpoint} does not fit: it was saved after {self.samples} samples, at sample {at} of epoch "
                f"{self.stream.epoch}, and the training data have {num_samples} samples. Resume with its own data."
            )


def _need(holds: bool, key: str, got: object, needed: str) -> None:
    if not holds:
        raise CheckpointError(f"{key}: got {got!r:.60}, needed {needed}")


def _is_state(device: str, text: str) -> bool:
    try:
        state = base64.b64decode(text, validate=True)
    except ValueError:
        return False
    if device != "cpu":
        return bool(state)
    try:
        torch.Generator().set_state(torch.tensor(list(state), dtype=torch.uint8))
    except RuntimeError:
        return False
    return True
