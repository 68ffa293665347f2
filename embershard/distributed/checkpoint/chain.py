"""`Chain`: a checkpoint with those that it follows, from a whole one on; and the removal of old ones.

step_100/  whole
step_200/  delta: the rows that changed after step 100, all other tensors, and the token of step_100
step_300/  delta: the rows that changed after step 200, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch.distributed.checkpoint import Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from embershard.distributed.checkpoint.folder import (
    best_checkpoint,
    checkpoint_at,
    complete_checkpoints,
    remove,
    step_of,
)
from embershard.distributed.checkpoint.manifest import MANIFEST, METADATA, Manifest
from embershard.distributed.checkpoint.metadata import StoredPart, read_metadata, tensors_of
from embershard.distributed.checkpoint.rows_file import RowsOver
from embershard.errors import InvalidCheckpointError


@dataclass(frozen=True)
class Link:
    """A checkpoint of a chain; `manifest` is None for one of an earlier version without any."""

    path: Path
    manifest: Manifest | None

    @property
    def metadata(self) -> str:
        """Name of the file with the places of its tensors."""
        return METADATA if self.manifest is None else self.manifest.metadata


@dataclass(frozen=True)
class Chain:
    """The links of a checkpoint, from a whole one to itself.

    >>> from embershard.distributed import process_group, save_checkpoint
    >>> with process_group("cpu") as ranks:
    ...     saved = save_checkpoint(Path("chain"), 4, {}, {}, ranks, keep_last=1, run_id="8c1f")
    >>> [link.path.name for link in Chain.of(saved).links]
    ['step_4']
    """

    links: tuple[Link, ...]

    @classmethod
    def of(cls, checkpoint: Path) -> Chain:
        """Read the manifests of a checkpoint and of those that it follows; files are not compared with them.

        Raises:
            InvalidCheckpointError: a link is lost, damaged, or another one than it was; with the newest step that needs
                it not.
        """
        links, gone = _links_of(checkpoint)
        if gone is not None:
            raise lost(checkpoint, *gone)
        return cls(tuple(links))

    @property
    def path(self) -> Path:
        """The checkpoint."""
        return self.links[-1].path

    @property
    def names(self) -> list[str]:
        """Names of the checkpoints, the oldest first."""
        return [link.path.name for link in self.links]

    def metadata(self) -> tuple[Metadata, RowsOver]:
        """Return the tensors of the checkpoint, stored in files of all links, from the folder of the checkpoints on;
        and the rows that go over what is read of them.

        Raises:
            InvalidCheckpointError: a file is damaged, or a link lacks a tensor of a later one.
        """
        found = [read_metadata(link.path, link.metadata) for link in self.links]
        shards = [() if link.manifest is None else link.manifest.shards for link in self.links]
        rows = [{name for shard in of_link for name in shard.tensors} for of_link in shards]
        whole, parts, since = dict(tensors_of(found[-1])), {}, dict[str, int]()
        for name in whole.keys() | rows[-1]:
            source = len(found) - 1
            while name not in found[source].state_dict_metadata:
                if source == 0 or name not in rows[source]:
                    raise InvalidCheckpointError(f"{self.links[source].path}: has no {name}, which {self.path} needs")
                source -= 1
            whole[name], since[name] = tensors_of(found[source])[name], source
        for number, (link, metadata) in enumerate(zip(self.links, found, strict=True)):
            for index, part in metadata.storage_data.items():
                if since.get(index.fqn) == number:
                    place = f"{link.path.name}/{part.relative_path}"
                    parts[index] = StoredPart(place, part.offset, part.length)
        paths = {name: path for metadata in found for name, path in (metadata.planner_data or {}).items()}
        merged = Metadata({**whole}, {name: path for name, path in paths.items() if name in whole}, parts)
        return merged, self._rows_over(whole, since)

    def _rows_over(self, tensors: dict[str, TensorStorageMetadata], since: dict[str, int]) -> RowsOver:
        """Return the rows of each tensor in the links after the one that has it whole."""
        over = []
        for number, link in enumerate(self.links):
            shards = () if link.manifest is None else link.manifest.shards
            for shard in shards:
                for name, place in zip(shard.tensors, shard.offsets, strict=True):
                    if name in tensors and (len(place) != len(tensors[name].size) or min(place) < 0):
                        raise InvalidCheckpointError(f"{link.path}: {MANIFEST}: rows of {name} have the place {place}")
            newer = [shard for shard in shards if any(since.get(name, number) < number for name in shard.tensors)]
            over.append((link.path, newer))
        dtypes = {
            name: tensors[name].properties.dtype for name, source in since.items() if source < len(self.links) - 1
        }
        return RowsOver(over, dtypes)


def lost(checkpoint: Path, link: Path, problem: str) -> InvalidCheckpointError:
    """Return the error for a checkpoint with a link that cannot be used: it names the newest step that can be.

    >>> Path("runs/step_1").mkdir(parents=True)
    >>> str(lost(Path("runs/step_3"), Path("runs/step_2"), "runs/step_2: a is missing"))
    'runs/step_3: it follows step_2, and runs/step_2: a is missing. The newest step with all that it follows is step_1'
    """
    newest = "No other step is there with all that it follows"
    for other in reversed(complete_checkpoints(checkpoint.parent)):
        try:
            links, gone = _links_of(other)
        except InvalidCheckpointError:
            continue
        if gone is None and link.name not in {found.path.name for found in links} and other.name != checkpoint.name:
            newest = f"The newest step with all that it follows is {other.name}"
            break
    return InvalidCheckpointError(f"{checkpoint}: it follows {link.name}, and {problem}. {newest}")


def _links_of(checkpoint: Path) -> tuple[list[Link], tuple[Path, str] | None]:
    """Return a checkpoint with what it follows, the oldest first; and the link that is lost, and why, if one is."""
    links = [Link(checkpoint, Manifest.read(checkpoint) if (checkpoint / MANIFEST).exists() else None)]
    while (manifest := links[0].manifest) is not None and (parent := manifest.parent) is not None:
        path = checkpoint_at(checkpoint.parent, parent.step)
        try:
            found = Manifest.read(path)
        except InvalidCheckpointError as error:
            return links, (path, str(error))
        if found.token != parent.token or found.step >= manifest.step:
            return links, (path, f"{path} is another save than the one that {links[0].path.name} follows")
        links.insert(0, Link(path, found))
    return links, None


def needed_by(kept: list[Path]) -> set[Path]:
    """Return checkpoints and all that they follow. Of one whose manifest cannot be read nobody knows what it follows:
    all older ones are needed then.

    >>> Path("none/step_1").mkdir(parents=True)
    >>> sorted(path.name for path in needed_by([Path("none/step_1")]))
    ['step_1']
    """
    needed = set[Path]()
    for checkpoint in kept:
        path: Path | None = checkpoint
        while path is not None and path not in needed:
            needed.add(path)
            try:
                parent = Manifest.read(path).parent if (path / MANIFEST).exists() else None
            except InvalidCheckpointError:
                older = complete_checkpoints(path.parent)
                needed.update(other for other in older if (step_of(other) or 0) < (step_of(path) or 0))
                break
            path = None if parent is None else checkpoint_at(path.parent, parent.step)
    return needed


def prune(folder: Path, step: int, keep_last: int) -> list[str]:
    """Remove the oldest complete checkpoints up to `step`, but for `keep_last`, that of the best evaluation, and all
    that these follow; return their names. One rank calls it.

    >>> for step in (1, 2, 3, 9):
    ...     Path(f"long/step_{step}").mkdir(parents=True)
    >>> prune(Path("long"), step=3, keep_last=1)
    ['step_1', 'step_2']
    """
    there = complete_checkpoints(folder)
    up_to = [path for path in there if (step_of(path) or 0) <= step]
    old, best = up_to[:-keep_last], best_checkpoint(folder)[0]
    needed = needed_by([path for path in there if path not in old or path == best])
    going = [path for path in old if path not in needed]
    for path in reversed(going):  # what follows another one goes first: none is left without what it follows
        remove(path)
    return [path.name for path in going]
