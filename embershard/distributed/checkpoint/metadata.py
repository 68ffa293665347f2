"""Reads the `.metadata` of torch.distributed.checkpoint, a pickle, without running anything in it.

The pickle may name torch's number types and the classes in `_CLASSES`, and nothing else. Not even these classes are
used: stand-ins take their places, and what they hold is checked and copied into new objects.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from embershard.distributed.checkpoint.folder import is_plain_name
from embershard.distributed.checkpoint.manifest import METADATA
from embershard.errors import InvalidCheckpointError

_TORCH = "torch.distributed.checkpoint"
_CLASSES = {
    (f"{_TORCH}.metadata", "BytesStorageMetadata"),
    (f"{_TORCH}.metadata", "ChunkStorageMetadata"),
    (f"{_TORCH}.metadata", "Metadata"),
    (f"{_TORCH}.metadata", "MetadataIndex"),
    (f"{_TORCH}.metadata", "StorageMeta"),
    (f"{_TORCH}.metadata", "TensorProperties"),
    (f"{_TORCH}.metadata", "TensorStorageMetadata"),
    (f"{_TORCH}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_TORCH}.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


@dataclass(frozen=True)
class StoredPart:
    """Where a part of a tensor is stored; with the names that torch's reader asks for."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def read_metadata(checkpoint: Path, name: str = METADATA) -> Metadata:
    """Read and check a checkpoint's `.metadata`, or the file that its manifest names in its place; of a delta, the
    tensors that it has whole (`Chain.metadata` has all).

    Raises:
        InvalidCheckpointError: it is damaged, names something else than the classes that it needs, or a place outside
            of the checkpoint's files.

    >>> _ = Path(".metadata").write_bytes(pickle.dumps(print))
    >>> read_metadata(Path())
    Traceback (most recent call last):
    embershard.errors.InvalidCheckpointError: .: .metadata is refused: it names builtins.print, ...
    """
    try:
        with (checkpoint / name).open("rb") as file:
            root = _Unpickler(file).load()
        sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir() if path.is_file()}
        return _metadata(root, sizes)
    except Exception as error:  # a hostile pickle may raise anything
        cause = error.strerror if isinstance(error, OSError) else str(error) or type(error).__name__
        raise InvalidCheckpointError(f"{checkpoint}: {name} is refused: {cause}") from error


def tensors_of(metadata: Metadata) -> dict[str, TensorStorageMetadata]:
    """Return sizes and types of the tensors, by name, of metadata that `read_metadata` returned: all are tensors.

    >>> tensors_of(Metadata({}))
    {}
    """
    return cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata)


class _StandIn:
    """Takes the place of an instance: keeps its arguments and its state."""

    arguments: tuple[Any, ...]
    state: Any = None

    def __new__(cls, *arguments: Any) -> _StandIn:
        new = super().__new__(cls)
        new.arguments = arguments
        return new

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self._stand_ins: dict[str, type[_StandIn]] = {}  # new ones: a pickle can change the classes that it names

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in _CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return self._stand_ins.setdefault(name, type(name, (_StandIn,), {}))


def _metadata(root: Any, sizes: Mapping[str, int]) -> Metadata:
    found = _state(root, "Metadata")
    parts = {}
    for key, place in _typed(found["storage_data"], dict).items():
        state = _state(key, "MetadataIndex")
        offset, index = state.get("offset"), state.get("index")
        new = MetadataIndex(
            _typed(state["fqn"], str),
            None if offset is None else _size(offset),
            None if index is None else _typed(index, int),
        )
        parts[new] = _part(_state(place, "_StorageInfo"), sizes)
    paths = _typed(found["planner_data"], dict)
    return Metadata(
        state_dict_metadata={
            _typed(k, str): _tensor(k, v) for k, v in _typed(found["state_dict_metadata"], dict).items()
        },
        planner_data={_typed(k, str): tuple(_typed(step, str) for step in _typed(v, tuple)) for k, v in paths.items()},
        storage_data=parts,
    )


def _tensor(name: str, entry: Any) -> TensorStorageMetadata:
    if type(entry).__name__ == "BytesStorageMetadata":
        raise ValueError(f"{name} is no tensor but a pickled value")
    state = _state(entry, "TensorStorageMetadata")
    dtype = _typed(_typed(_standing(state["properties"], "TensorProperties").state, tuple)[0], torch.dtype)
    chunks = [_state(chunk, "ChunkStorageMetadata") for chunk in _typed(state["chunks"], list)]
    return TensorStorageMetadata(
        TensorProperties(dtype=dtype),
        _size(state["size"]),
        [ChunkStorageMetadata(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks],
    )


def _part(state: dict[str, Any], sizes: Mapping[str, int]) -> StoredPart:
    name, offset, length = (
        _typed(state[key], kind) for key, kind in (("relative_path", str), ("offset", int), ("length", int))
    )
    if not is_plain_name(name) or name not in sizes:
        raise ValueError(f"it leads to {name!r:.200}, which is no file of this checkpoint")
    if offset < 0 or length < 0 or offset + length > sizes[name]:
        raise ValueError(f"it leads to bytes {offset} to {offset + length} of {name}, which has {sizes[name]}")
    if state.get("transform_descriptors"):
        raise ValueError(f"{name} is transformed by {state['transform_descriptors']!r:.200}, needed plain tensors")
    return StoredPart(name, offset, length)


def _size(value: Any) -> torch.Size:
    (numbers,) = _standing(value, "Size").arguments
    if any(_typed(number, int) < 0 for number in numbers):
        raise ValueError("it has a negative size")
    return torch.Size(numbers)


def _state(value: Any, name: str) -> dict[str, Any]:
    return _typed(_standing(value, name).state, dict)


def _standing(value: Any, name: str) -> _StandIn:
    if not isinstance(value, _StandIn) or type(value).__name__ != name:
        raise TypeError(f"it has a {type(value).__name__}, needed {name}")
    return value


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"it has a {type(value).__name__}, needed {kind.__name__}")
    return value
