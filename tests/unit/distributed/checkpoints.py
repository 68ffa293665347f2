"""Checkpoints for tests: small ones, damaged ones, and manifests made right again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from embershard.distributed import Manifest, Ranks, save_checkpoint, step_of
from embershard.distributed.checkpoint.digests import file_entry
from embershard.distributed.checkpoint.manifest import MANIFEST


def save(folder: Path, step: int, ranks: Ranks, keep_last: int = 2, run_id: str = "run") -> torch.Tensor:
    """Save a tensor that is another one at every step; return it."""
    tensor = torch.arange(6.0).reshape(2, 3) + step
    save_checkpoint(folder, step, {"a": {"b": tensor}}, {"note": "x"}, ranks, keep_last=keep_last, run_id=run_id)
    return tensor


def make_manifest_right(checkpoint: Path) -> None:
    """Write the manifest that fits the files as they are now."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    files = {path.name: file_entry(path) for path in checkpoint.iterdir()}
    (checkpoint / MANIFEST).write_text(Manifest.of(step_of(checkpoint) or 0, "run", files).text())


def flip_bit(path: Path, other: Path, at: float = 0.5) -> None:
    """Flip one bit, at a share of the file."""
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def truncate(path: Path, other: Path) -> None:
    """Cut off the second half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def remove(path: Path, other: Path) -> None:
    """Remove the file."""
    path.unlink()


def swap(path: Path, other: Path) -> None:
    """Put the file of another checkpoint in its place."""
    path.write_bytes(other.read_bytes())


DAMAGES: tuple[Callable[[Path, Path], None], ...] = (flip_bit, truncate, remove, swap)
