"""Verifies and loads checkpoints: nothing is parsed that is not what was written."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, Metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.futures import Future

from embershard.distributed.checkpoint.chain import Chain, Link, lost
from embershard.distributed.checkpoint.manifest import MANIFEST, Manifest
from embershard.distributed.checkpoint.metadata import read_metadata, tensors_of
from embershard.distributed.ranks import Ranks
from embershard.errors import CheckpointError, InvalidCheckpointError

T = TypeVar("T")

SCALARS = "scalars.json"
#: Group of a checkpoint's tensors: averages of weights of the group "model", by the same names.
AVERAGE = "average"


def verify_checkpoint(checkpoint: Path, ranks: Ranks, *, allow_unverified: bool = False) -> Manifest | None:
    """Check that every file of a checkpoint is what was written. Every rank calls it, and reads its share of the bytes.

    Args:
        allow_unverified: also take a checkpoint without a manifest, of which nothing can be verified: those of earlier
            versions.

    Returns:
        The manifest; None for a checkpoint without one.

    Raises:
        InvalidCheckpointError: on all ranks: with the file, and what is wrong with it.

    >>> import torch
    >>> from embershard.distributed import process_group, save_checkpoint
    >>> with process_group("cpu") as ranks:
    ...     saved = save_checkpoint(Path("verified"), 4, {"w": torch.ones(2)}, {}, ranks, keep_last=1, run_id="8c1f")
    ...     verify_checkpoint(saved, ranks).step
    4
    """

    def read() -> Chain:
        if allow_unverified and checkpoint.is_dir() and not (checkpoint / MANIFEST).exists():
            return Chain((Link(checkpoint, None),))
        Manifest.read(checkpoint)
        return Chain.of(checkpoint)

    chain = ranks.from_first(read)
    share = (ranks.rank, ranks.world_size)
    for link in chain.links:
        if link.manifest is not None:
            found = ranks.all_gather_objects(link.manifest.damage(link.path, share))
            _raise_damage(checkpoint, link, next(filter(None, found), None))
    ranks.from_first(lambda: _check_all_listed(chain))
    return chain.links[-1].manifest


def verify_alone(checkpoint: Path, sound: set[Path] | None = None) -> Manifest:
    """Verify a checkpoint, and those that it follows, in this process, without a process group.

    Args:
        sound: checkpoints that were verified: they are not read again. Those that are found sound are added.

    Raises:
        InvalidCheckpointError: as `verify_checkpoint`.
    """
    manifest = Manifest.read(checkpoint)
    for link in Chain.of(checkpoint).links:
        if link.manifest is not None and (sound is None or link.path not in sound):
            _raise_damage(checkpoint, link, link.manifest.damage(link.path))
            _check_listed(link)
            if sound is not None:
                sound.add(link.path)
    return manifest


def _raise_damage(checkpoint: Path, link: Link, problem: str | None) -> None:
    if problem is not None and link.path == checkpoint:
        raise InvalidCheckpointError(f"{checkpoint}: {problem}")
    if problem is not None:
        raise lost(checkpoint, link.path, f"{link.path}: {problem}")


def _check_all_listed(chain: Chain) -> None:
    for link in chain.links:
        _check_listed(link)


def _check_listed(link: Link) -> None:
    """Raise unless the manifest, where there is one, lists every file that is read; so all of them were verified."""
    listed = None if link.manifest is None else link.manifest.files.keys()
    own = () if link.manifest is None else {shard.file for shard in link.manifest.shards}
    for name in (link.metadata, SCALARS, *own):
        if listed is not None and name not in listed:
            raise InvalidCheckpointError(f"{link.path}: {MANIFEST} does not list {name}")
    for part in read_metadata(link.path, link.metadata).storage_data.values():
        if listed is not None and part.relative_path not in listed:
            raise InvalidCheckpointError(f"{link.path}: {MANIFEST} does not list {part.relative_path}")


def read_scalars(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's scalars; verify the checkpoint first.

    Raises:
        InvalidCheckpointError: they cannot be read.

    >>> checkpoint = Path("step_7")
    >>> checkpoint.mkdir()
    >>> size = (checkpoint / "scalars.json").write_text('{"step": 7}')
    >>> read_scalars(checkpoint)["step"]
    7
    """
    try:
        scalars = json.loads((checkpoint / SCALARS).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise damaged_scalars(checkpoint, f"cannot be read ({error})") from error
    if not isinstance(scalars, dict):
        raise damaged_scalars(checkpoint, f"it holds a {type(scalars).__name__}, needed an object")
    return scalars


def damaged_scalars(checkpoint: Path, problem: str) -> InvalidCheckpointError:
    """Return the error for scalars that are wrong.

    >>> str(damaged_scalars(Path("step_7"), "'step' is missing"))
    "step_7: scalars.json: 'step' is missing"
    """
    return InvalidCheckpointError(f"{checkpoint}: {SCALARS}: {problem}")


def load_tensors(checkpoint: Path, tensors: dict[str, Any], *, alone: bool = False) -> None:
    """Fill `tensors` in place from a checkpoint; any number of ranks may have written it. Verify it first. Collective.

    Args:
        alone: only this rank calls it.

    Raises:
        InvalidCheckpointError: its `.metadata` is damaged, or would run code.
        CheckpointError: the checkpoint lacks one of the tensors, or has it in another shape.

    >>> import torch
    >>> from embershard.distributed import process_group, save_checkpoint
    >>> with process_group("cpu") as ranks:
    ...     saved = save_checkpoint(Path("run"), 4, {"w": torch.ones(2)}, {}, ranks, keep_last=1, run_id="8c1f")
    >>> tensors = {"w": torch.zeros(2)}
    >>> load_tensors(saved, tensors)
    >>> tensors["w"]
    tensor([1., 1.])
    """
    reader = _Reader(checkpoint)
    try:
        with without_known_warnings():
            dcp.load(tensors, storage_reader=reader, no_dist=alone)
    except (RuntimeError, ValueError, KeyError, OSError, dcp.CheckpointException) as error:
        raise CheckpointError(
            f"{checkpoint} cannot be loaded: {_first_line(error)}. It is damaged, or of another model: "
            "resume with the config and the version it was written with, or from another checkpoint."
        ) from error


def load_group(checkpoint: Path, group: str) -> dict[str, torch.Tensor]:
    """Return all tensors whose names begin with `group.`, without it; none for a checkpoint without the group. Verify
    it first.

    Raises:
        InvalidCheckpointError: its `.metadata` is damaged, or would run code.

    >>> from embershard.distributed import process_group, save_checkpoint
    >>> with process_group("cpu") as ranks:
    ...     tensors = {"a": {"x": torch.ones(2), "y": torch.ones(3)}, "b": torch.ones(1)}
    ...     saved = save_checkpoint(Path("group"), 4, tensors, {}, ranks, keep_last=1, run_id="8c1f")
    >>> sorted(load_group(saved, "a"))
    ['x', 'y']
    """
    tensors = empty_group(saved_tensors(checkpoint), group)
    if tensors:
        load_tensors(checkpoint, {group: tensors})
    return tensors


def empty_group(saved: Mapping[str, TensorStorageMetadata], group: str) -> dict[str, torch.Tensor]:
    """Return tensors to load a group into, by their names without it.

    Args:
        saved: of a checkpoint, as `saved_tensors` returns them.
    """
    return {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in _entries(saved, group)}


def load_served(checkpoint: Path, weights: dict[str, Any], *, alone: bool = False) -> None:
    """Fill the weights of a model in place, by name, as all that uses a trained model has them: those of dense layers
    are the average, where the run kept one (`train.ema`). Verify the checkpoint first. Collective.

    Args:
        alone: only this rank calls it.

    Raises:
        InvalidCheckpointError, CheckpointError: as `load_tensors`.

    >>> from embershard.distributed import process_group, save_checkpoint
    >>> with process_group("cpu") as ranks:
    ...     tensors = {"model": {"a": torch.ones(1), "b": torch.ones(1)}, AVERAGE: {"b": torch.full((1,), 0.5)}}
    ...     saved = save_checkpoint(Path("served"), 4, tensors, {}, ranks, keep_last=1, run_id="8c1f")
    >>> weights = {"a": torch.zeros(1), "b": torch.zeros(1)}
    >>> load_served(saved, weights, alone=True)
    >>> weights
    {'a': tensor([1.]), 'b': tensor([0.5000])}
    """
    averaged = {name: weights[name] for name in saved_sizes(saved_tensors(checkpoint), AVERAGE) if name in weights}
    others = {name: weight for name, weight in weights.items() if name not in averaged}
    groups = {"model": others, AVERAGE: averaged}
    load_tensors(checkpoint, {name: tensors for name, tensors in groups.items() if tensors}, alone=alone)


def saved_sizes(saved: Mapping[str, TensorStorageMetadata], group: str) -> dict[str, torch.Size]:
    """Return the sizes of all tensors whose names begin with `group.`, by their names without it.

    Args:
        saved: of a checkpoint, as `saved_tensors` returns them.

    >>> from embershard.distributed import process_group, save_checkpoint
    >>> with process_group("cpu") as ranks:
    ...     saved = save_checkpoint(Path("sizes"), 4, {"a": {"x": torch.ones(2)}}, {}, ranks, keep_last=1, run_id="8c")
    >>> saved_sizes(saved_tensors(saved), "a")
    {'x': torch.Size([2])}
    """
    return {name: entry.size for name, entry in _entries(saved, group)}


def saved_tensors(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Return size and type of all tensors of a checkpoint, by name.

    Raises:
        InvalidCheckpointError: the checkpoint's `.metadata` is damaged, or would run code; or a link is lost.

    >>> from embershard.distributed import process_group, save_checkpoint
    >>> with process_group("cpu") as ranks:
    ...     saved = save_checkpoint(Path("tensors"), 4, {"w": torch.ones(2)}, {}, ranks, keep_last=1, run_id="8c1f")
    >>> saved_tensors(saved)["w"].size
    torch.Size([2])
    """
    return tensors_of(Chain.of(checkpoint).metadata()[0])


def _entries(saved: Mapping[str, TensorStorageMetadata], group: str) -> list[tuple[str, TensorStorageMetadata]]:
    prefix = f"{group}."
    return [(name.removeprefix(prefix), entry) for name, entry in saved.items() if name.startswith(prefix)]


def newest_valid(checkpoints: Sequence[Path], use: Callable[[Path], T]) -> tuple[tuple[Path, T] | None, list[str]]:
    """Return the newest checkpoint that `use` does not find invalid, with what `use` returned; None if there is none.
    And why newer ones were not used, as sentences without a full stop. Collective if `use` is.

    Args:
        checkpoints: oldest first.
        use: raises `InvalidCheckpointError` on all ranks, or on none.

    >>> newest_valid([Path("step_1"), Path("step_2")], lambda path: path.name)
    ((PosixPath('step_2'), 'step_2'), [])
    """
    skipped: list[str] = []
    for checkpoint in reversed(checkpoints):
        try:
            return (checkpoint, use(checkpoint)), skipped
        except InvalidCheckpointError as error:
            skipped.append(str(error).removesuffix("."))
    return None, skipped


class _Reader(FileSystemReader):
    """Reads a checkpoint's tensors by metadata that were checked; torch itself loads tensors with `weights_only=True`.
    Those of a delta are read of the checkpoints that it follows, and its rows are laid over them.

    The constructor reads the metadata: torch catches errors of `read_metadata`, and tries other files.
    """

    def __init__(self, checkpoint: Path) -> None:
        chain = Chain.of(checkpoint)
        self._metadata, self._rows = chain.metadata()
        super().__init__(chain.path.parent)
        self._metadata.storage_meta = StorageMeta(load_id=self.load_id)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        done = super().read_data(plan, planner)
        done.wait()
        for item in plan.items:
            chunk = item.storage_index.offset
            if chunk is not None and len(chunk):
                offsets = [start + more for start, more in zip(chunk, item.storage_offsets, strict=True)]
                self._rows.lay_over(item.storage_index.fqn, offsets, planner.resolve_tensor(item).detach())
        return done


def causes(error: dcp.CheckpointException) -> dict[int, BaseException]:
    """Return the errors of the ranks, by rank, from the one that torch raises on all of them."""
    return {rank: failure[0] for rank, failure in error.failures.items()}


def _first_line(error: BaseException) -> str:
    if isinstance(error, dcp.CheckpointException):
        error = next(iter(causes(error).values()))
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return "a file cannot be unpickled" if "weights_only" in text else text  # torch's advice there is dangerous


@contextmanager
def without_known_warnings() -> Iterator[None]:
    """Hide the deprecation of ShardedTensors, which TorchRec's state dicts hold and torch announces on every use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield


def saved_rows(checkpoint: Path, name: str) -> Iterator[Tensor]:
    """Yield all rows of a tensor in their order, in the blocks they were written in. Verify the checkpoint first.

    Any number of ranks may have written it, each with some rows, or some columns of them. Needs no process group.

    Args:
        name: of a tensor with a dimension at least, with the names of the groups it is in.

    Raises:
        InvalidCheckpointError: the checkpoint's `.metadata` is damaged, or would run code.
        CheckpointError: it has no such tensor, or not all of its rows.

    >>> from embershard.distributed import process_group, save_checkpoint
    >>> with process_group("cpu") as ranks:
    ...     tensors = {"model": {"t.weight": torch.arange(6.0).view(3, 2)}}
    ...     saved = save_checkpoint(Path("rows"), 4, tensors, {}, ranks, keep_last=1, run_id="8c1f")
    >>> torch.cat(list(saved_rows(saved, "model.t.weight"))).tolist()
    [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    """
    boxes = BoxReader(checkpoint)
    entry = boxes.tensors.get(name)
    if entry is None or not entry.size:
        raise CheckpointError(f"{checkpoint} has no tensor {name!r} with rows; it is of another model.")
    borders = {row for chunk in entry.chunks for row in (chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])}
    for first, last in itertools.pairwise(sorted({0, entry.size[0], *borders})):
        yield boxes.read(name, (first, *(0 for _ in entry.size[1:])), (last - first, *entry.size[1:]))


class BoxReader:
    """Reads parts of a checkpoint's tensors in this process alone. Verify the checkpoint first.

    Attributes:
        metadata: of the checkpoint.
        tensors: sizes and types, by name.

    Raises:
        InvalidCheckpointError: the checkpoint's `.metadata` is damaged, or would run code; or a link is lost.

    >>> from embershard.distributed import process_group, save_checkpoint
    >>> with process_group("cpu") as ranks:
    ...     tensors = {"w": torch.arange(6.0).view(3, 2)}
    ...     saved = save_checkpoint(Path("boxes"), 4, tensors, {}, ranks, keep_last=1, run_id="8c1f")
    >>> BoxReader(saved).read("w", (1, 1), (2, 1)).tolist()
    [[3.0], [5.0]]
    """

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint, self._reader = checkpoint, _Reader(checkpoint)
        self.metadata = self._reader.read_metadata()
        self.tensors = tensors_of(self.metadata)
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    def read_whole(self, name: str) -> Tensor:
        """Return a tensor. Raises as `read`."""
        size = self.tensors[name].size
        return self.read(name, [0] * len(size), size)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return the part of tensor `name` with these offsets and sizes, whoever wrote it.

        Raises:
            InvalidCheckpointError: a file of it is gone, or cannot be read.
            CheckpointError: the checkpoint lacks the tensor, or some of the part.
        """
        if (entry := self.tensors.get(name)) is None:
            raise CheckpointError(f"{self._checkpoint} has no tensor {name!r}; it is of another model.")
        window = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(name, entry, [window])
        found = torch.empty(window.sizes, dtype=entry.properties.dtype)
        if sum(item.lengths.numel() for item in items) != found.numel():
            last = offsets[0] + sizes[0] - 1 if offsets else 0
            raise CheckpointError(f"{self._checkpoint}: {name} lacks some of its rows {offsets[0]} to {last}.")
        try:
            if found.numel():
                self._reader.read_data(LoadPlan(items), _IntoRows(found)).wait()
        except OSError as error:
            is_gone = isinstance(error, FileNotFoundError)
            why = ": its run, or `embershard ckpt`, removed it meanwhile. Read a newer checkpoint" if is_gone else ""
            raise InvalidCheckpointError(f"{error.filename}: {error.strerror}{why}") from error
        return found


class _IntoRows(DefaultLoadPlanner):
    """Puts what is read into a block of rows."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self._rows = rows

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._rows
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        """Nothing to do: it was read into its place."""
