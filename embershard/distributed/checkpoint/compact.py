"""Makes a delta whole: what its chain has is written into its folder, and its manifest is replaced by one rename."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from embershard.distributed.checkpoint.digests import DigestingFileSystem
from embershard.distributed.checkpoint.load import SCALARS, BoxReader, causes, verify_alone, without_known_warnings
from embershard.distributed.checkpoint.manifest import MANIFEST, Manifest, SavedLink
from embershard.whole_file import sync_folder, whole_file

#: Begins the names of the files of a checkpoint that was made whole.
_PREFIX = "whole"
_METADATA = f"{_PREFIX}.metadata"
#: Ends of the names of files that a checkpoint may have.
_ENDINGS = (".distcp", ".safetensors", ".metadata", ".tmp", ".partial")
_BLOCK_BYTES = 16 << 20


def compact(checkpoint: Path) -> Manifest:
    """Make a delta whole, so that it needs no other checkpoint, and return its manifest; those that follow it still do.
    A whole one stays as it is. Files of a compaction that was interrupted are removed.

    Until the manifest is replaced, the checkpoint is the delta; from then on, it is whole.

    Raises:
        InvalidCheckpointError: the checkpoint, or one that it follows, is damaged or lost.
        OSError: the disk is full, or the folder may not be written to; the checkpoint is as it was.

    >>> from embershard.distributed import process_group, save_checkpoint
    >>> with process_group("cpu") as ranks:
    ...     saved = save_checkpoint(Path("made"), 4, {"w": torch.ones(2)}, {}, ranks, keep_last=1, run_id="8c1f")
    >>> compact(saved).step
    4
    """
    manifest = verify_alone(checkpoint)
    remove_unlisted(checkpoint)
    if manifest.parent is None:
        return manifest
    blocks = _ChainBlocks(checkpoint)
    writer = _Writer(checkpoint, single_file_per_rank=True, sync_files=True, per_thread_copy_ahead=0)
    writer.fs = files = DigestingFileSystem()
    try:
        with without_known_warnings():
            dcp.save({}, storage_writer=writer, planner=blocks, no_dist=True)
    except dcp.CheckpointException as error:
        remove_unlisted(checkpoint)
        raise files.error or next(iter(causes(error).values())) from error
    entries = {name: digests.finish() for name, digests in files.digests.items()}
    entries[SCALARS] = manifest.files[SCALARS]
    link = SavedLink(manifest.token)
    whole = Manifest.of(manifest.step, manifest.run_id, entries, link, _METADATA)
    sync_folder(checkpoint)
    with whole_file(checkpoint / MANIFEST) as partial:
        partial.write_text(whole.text())
    sync_folder(checkpoint)  # before what the manifest of the delta needs is removed
    remove_unlisted(checkpoint)
    return whole


def remove_unlisted(checkpoint: Path) -> list[str]:
    """Remove files of a checkpoint that its manifest does not list, which an interrupted compaction left; return their
    names. Files of other kinds stay.

    Raises:
        InvalidCheckpointError: the manifest is damaged.

    >>> from embershard.distributed import process_group, save_checkpoint
    >>> with process_group("cpu") as ranks:
    ...     saved = save_checkpoint(Path("left"), 4, {"w": torch.ones(2)}, {}, ranks, keep_last=1, run_id="8c1f")
    >>> _ = (saved / "whole_0.distcp").write_text("x"), (saved / "notes.txt").write_text("mine")
    >>> remove_unlisted(saved)
    ['whole_0.distcp']
    """
    listed = {*Manifest.read(checkpoint).files, MANIFEST}
    there = [path for path in checkpoint.iterdir() if path.is_file() and path.name not in listed]
    going = sorted(path.name for path in there if path.name.endswith(_ENDINGS))
    for name in going:
        (checkpoint / name).unlink()
    return going


class _Writer(FileSystemWriter):
    """Writes beside the files of the delta."""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=_StoragePrefix(f"{_PREFIX}_")) for plan in plans]

    def _get_metadata_path(self, rank: int | None = None) -> os.PathLike[str]:
        return Path(self.path) / _METADATA


class _ChainBlocks(DefaultSavePlanner):
    """The tensors of a checkpoint as a plan of blocks, each read of the chain when it is written."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__()
        self._reader = BoxReader(checkpoint)

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        self.is_coordinator = True
        self.mappings = self._reader.metadata.planner_data

    def create_local_plan(self) -> SavePlan:
        items = [item for name, entry in self._reader.tensors.items() for item in _items(name, entry)]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        data = write_item.tensor_data
        assert data is not None, "no tensor"
        return self._reader.read(write_item.index.fqn, data.chunk.offsets, data.chunk.sizes)


def _items(name: str, entry: TensorStorageMetadata) -> Iterator[WriteItem]:
    num_rows = entry.size[0] if entry.size else 1
    row_bytes = entry.size[1:].numel() * entry.properties.dtype.itemsize
    block_rows = max(1, _BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, max(1, num_rows), block_rows):
        offsets = torch.Size((start, *(0 for _ in entry.size[1:]))) if entry.size else torch.Size()
        sizes = torch.Size((min(block_rows, num_rows - start), *entry.size[1:])) if entry.size else torch.Size()
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), entry.properties, entry.size)
        yield WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)
