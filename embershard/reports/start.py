"""How a run was started, and the model that it trains: a line of starts.jsonl for each start and each resume."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from embershard.errors import ConfigError, naming_file
from embershard.launch.screen import time_now
from embershard.launch.versions import git_commit, versions
from embershard.settings.decoding import decode
from embershard.units import size

if TYPE_CHECKING:  # who reads the file loads no torch
    from torch import nn

    from embershard.models import ModelTable

STARTS = "starts.jsonl"
_NUMBER_BYTES = {"fp32": 4, "fp16": 2}
_MOST_NAMED = 3


@dataclass(frozen=True)
class Layer:
    """A dense layer: its path in the model, its kind, the shapes of its parameters, how many these are, their bytes."""

    name: str
    kind: str
    shape: str
    parameters: int
    bytes: int


@dataclass(frozen=True)
class EmbeddingTable:
    """A table of embeddings; `bytes` of its weights, without optimizer states."""

    name: str
    rows: int
    dim: int
    bytes: int


@dataclass(frozen=True)
class ModelSummary:
    """The layers and tables of a model.

    >>> ModelSummary((), (EmbeddingTable("t0", 1000, 16, 64000),)).lines[0]
    'Tables: 1,000 rows, 62.50 KiB of weights. The largest: t0 1,000 x 16 (62.50 KiB).'
    """

    layers: tuple[Layer, ...]
    tables: tuple[EmbeddingTable, ...]

    @staticmethod
    def of(model: nn.Module, tables: Sequence[ModelTable], left_out: Iterable[str] = ()) -> ModelSummary:
        """Return the summary of a model.

        Args:
            tables: its tables.
            left_out: paths of the modules that hold them.
        """
        held = tuple(f"{path}." for path in left_out)
        layers = []
        for path, module in model.named_modules():
            own = [each for each in module.parameters(recurse=False) if each.device.type != "meta"]
            if own and not f"{path}.".startswith(held):
                shape = ", ".join(" x ".join(map(str, each.shape)) or "1" for each in own)
                sizes = sum(each.numel() for each in own), sum(each.numel() * each.element_size() for each in own)
                layers.append(Layer(path.removeprefix("model."), type(module).__name__, shape, *sizes))
        return ModelSummary(
            tuple(layers),
            tuple(
                EmbeddingTable(each.name, each.num_rows, each.dim, each.num_rows * each.dim * _NUMBER_BYTES[each.dtype])
                for each in tables
            ),
        )

    @property
    def lines(self) -> list[str]:
        """What the screen shows: of the tables, and of the layers by the first part of their names."""
        largest = sorted(self.tables, key=lambda table: -table.bytes)
        named = ", ".join(
            f"{each.name} {each.rows:,} x {each.dim} ({size(each.bytes)})" for each in largest[:_MOST_NAMED]
        )
        more = f" and {len(largest) - _MOST_NAMED} more" if len(largest) > _MOST_NAMED else ""
        rows, whole = sum(each.rows for each in self.tables), sum(each.bytes for each in self.tables)
        parts: dict[str, int] = {}
        for layer in self.layers:
            part = layer.name.partition(".")[0] or "its own"
            parts[part] = parts.get(part, 0) + layer.parameters
        weights = sum(layer.bytes for layer in self.layers)
        of_parts = ", ".join(f"{name} {count:,}" for name, count in parts.items())
        return [
            f"Tables: {rows:,} rows, {size(whole)} of weights. The largest: {named}{more}.",
            f"Dense layers: {sum(parts.values()):,} parameters, {size(weights)}: {of_parts}.",
        ][: 2 if parts else 1]


@dataclass(frozen=True)
class Start:
    """A start of a run, or its resume.

    Attributes:
        time: in UTC, as in metrics.jsonl.
        step: trained before.
        command: that does the same again.
        host: of the first rank.
        device: of the ranks, in words.
        git_commit: of embershard, where it runs from a working tree.
    """

    time: str
    step: int
    command: str
    host: str
    device: str
    versions: dict[str, str]
    git_commit: str | None
    model: ModelSummary

    @staticmethod
    def now(step: int, command: str, device: str, model: ModelSummary) -> Start:
        """Return the start of this process."""
        cores = len(os.sched_getaffinity(0))
        host = f"{platform.node()} ({cores} {'core' if cores == 1 else 'cores'})"
        return Start(time_now(), step, command, host, device, versions(), git_commit(), model)

    def add_to(self, folder: Path) -> None:
        """Append it to the file in the folder of a run."""
        with naming_file(folder / STARTS), (folder / STARTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(self)) + "\n")

    @staticmethod
    def read(folder: Path) -> list[Start]:
        """Return the starts of a run, without damaged lines; none of runs of earlier versions."""
        try:
            lines = (folder / STARTS).read_bytes().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            try:
                found.append(decode(Start, json.loads(line)))
            except (ValueError, ConfigError):  # a write that was killed
                continue
        return found
