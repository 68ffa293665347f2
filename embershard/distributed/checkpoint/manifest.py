"""The manifest of a checkpoint: its step, its run, and size and checksums of every file. It has a checksum itself.

That of a chain also has a token, which no other save has. A delta has the token of its parent, and what is in its files
of rows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

from embershard.distributed.checkpoint.digests import BLOCK_BYTES, FileEntry, block_digest
from embershard.distributed.checkpoint.folder import is_plain_name, step_of
from embershard.errors import InvalidCheckpointError
from embershard.settings.decoding import decode

MANIFEST = "manifest.json"
FORMAT = 2  # 1, where checkpoints are no chains
METADATA = ".metadata"
#: Fields that format 1 does not have.
_OF_CHAINS = ("token", "parent", "shards", "metadata")


@dataclass(frozen=True)
class Parent:
    """The save that a delta follows."""

    step: int
    token: str


@dataclass(frozen=True)
class ShardRows:
    """Rows of a shard that changed, in a file of rows. Piece P of them is the tensors "PLACE.P.keys", int64 [n], row
    numbers in the shard, and "PLACE.P.T", [n, ...], the rows of tensor T.

    Attributes:
        file, place: where they are.
        tensors: whose rows they are: weights and states of one shard, which have the same rows.
        offsets: of the shard in each of these.
        pieces: that the rows are cut into, in ascending order.
        rows: in all pieces.
    """

    file: str
    place: int
    tensors: tuple[str, ...]
    offsets: tuple[tuple[int, ...], ...]
    pieces: int
    rows: int


@dataclass(frozen=True)
class SavedLink:
    """What the manifest of a checkpoint in a chain has beside its files.

    Attributes:
        token: names the save.
        parent: of a delta; None: the checkpoint is whole.
        shards: rows of a delta, of all ranks; those without a changed row, too.
    """

    token: str
    parent: Parent | None = None
    shards: tuple[ShardRows, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    >>> from embershard.distributed.checkpoint.digests import file_entry
    >>> checkpoint = Path("step_7")
    >>> checkpoint.mkdir()
    >>> _ = (checkpoint / "a").write_text("abc")
    >>> manifest = Manifest.of(7, "8c1f", {"a": file_entry(checkpoint / "a")})
    >>> manifest.num_bytes, manifest.step, manifest.run_id
    (3, 7, '8c1f')
    >>> _ = (checkpoint / "manifest.json").write_text(manifest.text()), (checkpoint / "a").write_text("abd")
    >>> Manifest.read(checkpoint).damage(checkpoint)
    'a: its bytes 0 to 2 are not those that were written'

    Attributes:
        format: version of this layout.
        step: steps trained when it was saved.
        run_id: the same in all checkpoints of a run, those after a resume included.
        block_bytes: bytes that one checksum covers.
        files: by name, all but the manifest itself.
        checksum: SHA-256 of all other fields.
        token, parent, shards: see `SavedLink`; "" and none where checkpoints are no chains.
        metadata: name of the file with the places of the tensors.
    """

    format: int
    step: int
    run_id: str
    block_bytes: int
    files: dict[str, FileEntry]
    checksum: str
    token: str = ""
    parent: Parent | None = None
    shards: tuple[ShardRows, ...] = field(default=())
    metadata: str = METADATA

    @staticmethod
    def of(
        step: int, run_id: str, files: Mapping[str, FileEntry], link: SavedLink | None = None, metadata: str = METADATA
    ) -> Manifest:
        """Return the manifest of files that were written; `link`: of a checkpoint in a chain."""
        values = (step, run_id, BLOCK_BYTES, dict(sorted(files.items())), "")
        if link is None:
            return Manifest(1, *values)
        return Manifest(FORMAT, *values, link.token, link.parent, link.shards, metadata)

    @staticmethod
    def read(checkpoint: Path) -> Manifest:
        """Read a checkpoint's manifest, and check that it is whole and is this checkpoint's.

        Raises:
            InvalidCheckpointError: it is missing, damaged, of another checkpoint, or of a newer embershard.
        """
        try:
            text = (checkpoint / MANIFEST).read_bytes()
            values = json.loads(text)
        except FileNotFoundError as error:
            raise InvalidCheckpointError(f"{checkpoint}: {MANIFEST} is missing, so nothing can be verified") from error
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidCheckpointError(f"{checkpoint}: {MANIFEST} cannot be read ({_reason(error)})") from error
        found = values.get("format") if isinstance(values, dict) else None
        if isinstance(found, int) and found > FORMAT:
            raise InvalidCheckpointError(f"{checkpoint}: {MANIFEST} has format {found}, needed {FORMAT} or lower")
        try:
            manifest = decode(Manifest, values, InvalidCheckpointError)
        except InvalidCheckpointError as error:
            raise InvalidCheckpointError(f"{checkpoint}: {MANIFEST} is damaged: {error}") from error
        if manifest.text().encode() != text:
            raise InvalidCheckpointError(f"{checkpoint}: {MANIFEST} is damaged: its checksum does not fit")
        if manifest.step != step_of(checkpoint):
            raise InvalidCheckpointError(f"{checkpoint}: {MANIFEST} is that of step {manifest.step}")
        return manifest

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.bytes for entry in self.files.values())

    def text(self) -> str:
        """Return the file's text, with its checksum."""
        values = asdict(self)
        for name in ("checksum", *(_OF_CHAINS if self.format < FORMAT else ())):
            del values[name]
        checksum = hashlib.sha256(json.dumps(values, indent=1).encode()).hexdigest()
        return json.dumps({**values, "checksum": checksum}, indent=1)

    def damage(self, checkpoint: Path, share: tuple[int, int] = (0, 1)) -> str | None:
        """Return what is wrong with a checkpoint's files, or None.

        Args:
            share: (index, number): check the contents of this share of the blocks only. Names and sizes are always
                checked in full.
        """
        if problem := self.wrong_size(checkpoint):
            return problem
        blocks = [(name, k) for name, entry in self.files.items() for k in range(len(entry.sha256))]
        index, number = share
        mine = blocks[index * len(blocks) // number : (index + 1) * len(blocks) // number]

        def damaged(block: tuple[str, int]) -> str | None:
            name, k = block
            entry, start = self.files[name], k * self.block_bytes
            try:
                if block_digest(checkpoint / name, start, self.block_bytes) == entry.sha256[k]:
                    return None
            except OSError as error:
                return f"{name}: cannot be read ({_reason(error)})"
            end = min(start + self.block_bytes, entry.bytes) - 1
            return f"{name}: its bytes {start} to {end} are not those that were written"

        with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))), "embershard-verify") as pool:
            return next(filter(None, pool.map(damaged, mine)), None)

    def wrong_size(self, checkpoint: Path) -> str | None:
        """Return which file is missing or of another size, or None; contents are not read."""
        size = self.block_bytes
        for name, entry in self.files.items():
            path, num_sums = checkpoint / name, len(entry.sha256)
            if not is_plain_name(name):
                return f"{name}: is not the name of a file in this folder"
            if size < 1 or num_sums != -(-entry.bytes // size):
                return f"{name}: has {num_sums} checksums for {entry.bytes} bytes in blocks of {size}"
            try:
                got = path.stat().st_size if path.is_file() else None
            except OSError as error:
                return f"{name}: cannot be read ({_reason(error)})"
            if got != entry.bytes:
                return f"{name}: is missing" if got is None else f"{name}: has {got} bytes, needed {entry.bytes}"
        return None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
