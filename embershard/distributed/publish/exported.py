"""`ExportSaved`: the rows and layers of an export, read by boxes as those of a checkpoint are."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embershard.distributed.checkpoint.boxes import Box, Saved
from embershard.distributed.publish.published import DENSE, IDS, MANIFEST, PublicationError, tensors_in, verify
from embershard.distributed.tensors_file import read_header
from embershard.errors import CheckpointError, InvalidCheckpointError

_NUMPY = {"F32": np.float32, "F16": np.float16, "U8": np.uint8}
_TAIL_BYTES = {"int8": 8, "int4": 4}  # of scale and offset, at the end of a row


class ExportSaved(Saved):
    """The tensors of an export that `embershard export` or a publication wrote as a module: rows and dense layers,
    without states. Tables are "model.tables.embedding_bags.TABLE.weight", mapped into memory. Rounded rows are read as
    the numbers that they stand for.

    A base of publications is verified.

    Raises:
        CheckpointError: the folder is no such export, or a damaged base (`InvalidCheckpointError`).
    """

    _PREFIX = "model.tables.embedding_bags."

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if (folder / MANIFEST).exists():
            try:
                verify(folder)
            except PublicationError as error:
                raise InvalidCheckpointError(f"{error}. Give another base, or the run.") from error
        try:
            self.about: dict[str, Any] = json.loads((folder / "export.json").read_text(encoding="utf-8"))
            self.inputs: dict[str, Any] = json.loads((folder / "inputs.json").read_text(encoding="utf-8"))
            is_module, self._dtype = self.about["format"] == "module", self.about.get("dtype", "fp32")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder} is no export: export.json or inputs.json cannot be read ({error})"
            ) from error
        if not is_module:
            raise CheckpointError(
                f"{folder} has tables as Parquet files, without the layers around them. Export it as a module, or take "
                f'rows of tables alone: model.pretrained.TABLE = {{file = "{folder}/tables/TABLE.parquet", '
                'rows = "row"} (docs/warm_start.md).'
            )
        names = {each["table"] for each in self.inputs["lookups"] if each["table"]}
        self._rows = {f"{self._PREFIX}{name}.weight": self._mapped(name) for name in sorted(names)}

    def __str__(self) -> str:
        return str(self.folder)

    def sizes(self) -> Mapping[str, torch.Size]:
        rows = {name: torch.Size((len(stored), self._dim(stored))) for name, stored in self._rows.items()}
        return {**rows, **{name: value.shape for name, value in self._dense.items()}}

    def read(self, name: str, box: Box) -> Tensor:
        if (weights := self._dense.get(name)) is not None:
            return box.of(weights).clone()
        stored = self._rows.get(name)
        if stored is None or box.offsets[0] + box.sizes[0] > len(stored):
            raise CheckpointError(f"{self.folder} has no rows {box.offsets[0]} to ... of {name!r}.")
        first, count = box.offsets[0], box.sizes[0]
        rows = self._as_float(torch.from_numpy(np.array(stored[first : first + count])))
        return Box((0, *box.offsets[1:]), box.sizes).of(rows)

    def ids(self, table: str) -> tuple[Tensor, Tensor] | None:
        path = self.folder / "tables" / f"{table}{IDS}"
        if not path.exists():
            return None
        found = tensors_in(path.read_bytes())
        return found["ids"], found["rows"].long()

    @cached_property
    def _dense(self) -> dict[str, Tensor]:
        if (newer := self.folder / DENSE).exists():  # of a base that was made of deltas
            return {f"model.{name}": value for name, value in tensors_in(newer.read_bytes()).items()}
        return dict(torch.export.load(self.folder / "dense.pt2").state_dict)

    def _mapped(self, table: str) -> Any:
        path = self.folder / "tables" / f"{table}.safetensors"
        try:
            entries, start = read_header(path)
            entry = entries["rows"]
            place = start + entry["data_offsets"][0]
            return np.memmap(path, _NUMPY[entry["dtype"]], "r", place, tuple(entry["shape"]))
        except (OSError, ValueError, KeyError, struct.error) as error:
            raise CheckpointError(f"{path} cannot be read as the rows of a table: {error}") from error

    def _dim(self, stored: Any) -> int:
        width = int(stored.shape[1]) - _TAIL_BYTES.get(self._dtype, 0)
        return 2 * width if self._dtype == "int4" else width

    def _as_float(self, rows: Tensor) -> Tensor:
        if self._dtype == "int8":
            scale, offset = rows[:, -_TAIL_BYTES["int8"] :].contiguous().view(torch.float32).split(1, dim=1)
            return rows[:, : -_TAIL_BYTES["int8"]].float() * scale + offset  # as the exported model has it
        if self._dtype == "int4":
            return torch.ops.quantized.embedding_bag_4bit_unpack(rows)
        return rows.float()
