"""What a checkpoint's scalars say of the run that wrote it, checked before anything of it is used."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embershard.data import StreamState
from embershard.distributed import damaged_scalars, read_scalars
from embershard.errors import CheckpointError


@dataclass(frozen=True)
class SavedRun:
    """Where a run stood, and what it was.

    Attributes:
        step, samples: trained by then.
        stream: the position in the data.
        tables: rows and dim of every sparse feature's table.
        settings: those that its tensors were made with.
        world_size: number of ranks.
        rng: the states of each rank's random number generators.
    """

    step: int
    samples: int
    stream: StreamState
    tables: dict[str, list[int]]
    settings: dict[str, Any]
    world_size: int
    rng: list[dict[str, str]]

    @staticmethod
    def read(checkpoint: Path) -> SavedRun:
        """From a checkpoint.

        Raises:
            CheckpointError: it is incomplete, or something in its scalars is missing, or is not what it should be.
        """
        scalars = _Scalars(read_scalars(checkpoint), checkpoint)
        stream = _Scalars(scalars.object("stream"), checkpoint, "stream.")
        world_size = scalars.integer("world_size", least=1)
        return SavedRun(
            step=scalars.integer("step"),
            samples=scalars.integer("samples"),
            stream=StreamState(stream.integer("epoch"), stream.integer("global_sample"), stream.integer("seed")),
            tables=scalars.tables("tables"),
            settings=scalars.object("settings"),
            world_size=world_size,
            rng=scalars.rng("rng", world_size),
        )


@dataclass(frozen=True)
class _Scalars:
    """Values of a checkpoint's scalars, each of the type that is needed."""

    values: Mapping[str, Any]
    checkpoint: Path
    prefix: str = ""

    def integer(self, key: str, least: int = 0) -> int:
        value = self._get(key)
        if type(value) is not int or value < least:
            raise self._wrong(key, value, f"an integer of at least {least}")
        return value

    def object(self, key: str) -> dict[str, Any]:
        value = self._get(key)
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return value

    def tables(self, key: str) -> dict[str, list[int]]:
        tables = self.object(key)
        for name, size in tables.items():
            if not isinstance(size, list) or [type(number) for number in size] != [int, int]:
                raise self._wrong(f"{key}.{name}", size, "a list of rows and dim")
        return tables

    def rng(self, key: str, world_size: int) -> list[dict[str, str]]:
        states = self._get(key)
        if not isinstance(states, list) or len(states) != world_size:
            raise self._wrong(key, states, f"a list with the states of {world_size} ranks (world_size)")
        for rank, state in enumerate(states):
            if not isinstance(state, dict) or "cpu" not in state:
                raise self._wrong(f"{key}[{rank}]", state, "an object with a state for 'cpu'")
            for device, text in state.items():
                if not _is_state(device, text):
                    raise self._wrong(f"{key}[{rank}].{device}", text, "a generator's state in base64")
        return states

    def _get(self, key: str) -> Any:
        if key not in self.values:
            raise damaged_scalars(self.checkpoint, f"{self.prefix + key!r} is missing")
        return self.values[key]

    def _wrong(self, key: str, value: Any, needed: str) -> CheckpointError:
        got = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
        got = got if len(got) <= 60 else f"{got[:57]}..."
        return damaged_scalars(self.checkpoint, f"{self.prefix + key!r} is {got}, needed {needed}")


def _is_state(device: str, text: Any) -> bool:
    try:
        state = base64.b64decode(text, validate=True)
    except (TypeError, ValueError):
        return False
    return len(state) == torch.get_rng_state().numel() if device == "cpu" else bool(state)
