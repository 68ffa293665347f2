"""Tensors as the bytes of a safetensors file. A copy of this file is beside an exported model, without embershard."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: By their names in such a file.
TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in TYPES.items()}
_ALIGNMENT = 64  # the data of a file begin at a multiple of it, so that they can be mapped into memory as numbers


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the entries of a safetensors file, by name, and the byte at which its values begin.

    Raises:
        OSError, ValueError, struct.error: it cannot be read, or is no such file.

    >>> path = Path("a.safetensors")
    >>> _ = path.write_bytes(b"".join(map(bytes, safetensors({"a": torch.tensor([1.5])}))))
    >>> read_header(path)
    ({'a': {'dtype': 'F32', 'shape': [1], 'data_offsets': [0, 4]}}, 128)
    """
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        return json.loads(file.read(size)), 8 + size


def safetensors(tensors: dict[str, Tensor]) -> Iterable[Any]:
    """Yield the bytes of tensors as a safetensors file (https://github.com/huggingface/safetensors#format).

    >>> content = b"".join(map(bytes, safetensors({"a": torch.tensor([1.5])})))
    >>> content[8:-4].rstrip(), content[-4:].hex()
    (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', '0000c03f')
    """
    yield safetensors_header({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    for tensor in filter(Tensor.numel, tensors.values()):  # an empty one may have strides of 0, and then no bytes
        yield tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def safetensors_header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    """Return what a safetensors file begins with, before the values of its tensors, given by type and shape.

    >>> safetensors_header({"a": (torch.float32, (1,))})[8:].rstrip()
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    """
    entries, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    return struct.pack("<Q", len(header)) + header
