"""A folder of publications: names, manifests and tensors of bases and deltas. Needs torch, nothing else.

    base_0/    an export, and manifest.json
    delta_1/   manifest.json, dense.safetensors, and of each rank rows_RANK.safetensors: touched rows, by table

A publication gets its name when it is complete. Its manifest has sizes and checksums of its files, a checksum of
itself, and the `link` of the publication before it. Sequence numbers count on through the whole folder. A `life` is a
part of a run, from its start or from a resume on; only the newest one publishes.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from embershard.distributed.changed_rows import ChangedRows, changed_ids
from embershard.distributed.tensors_file import TYPES

FORMAT = 2  # 1, where no table has ids
MANIFEST, DENSE = "manifest.json", "dense.safetensors"
#: What follows the name of a table of ids, in the name of the file that has them in a base.
IDS = ".ids.safetensors"
_NAME = re.compile(r"(base|delta)_(\d+)")
ROW_TYPES = {"fp32": torch.float32, "fp16": torch.float16}
_READ_BYTES = 1 << 20


class PublicationError(ValueError):
    """A publication cannot be used; nothing was changed."""


class GoneError(PublicationError):
    """The folder is gone, or has no publications any more."""


class MissingDeltaError(PublicationError):
    """A delta before it is not in the folder."""


class OutOfOrderError(PublicationError):
    """A delta before it is in the folder, and was not applied."""


class AlreadyAppliedError(PublicationError):
    """The replica has this state, or a later one."""


class OtherChainError(PublicationError):
    """It is of another run, or does not follow the state that the replica has."""


class StaleLifeError(PublicationError):
    """It is of a life of the run that has ended: a resume publishes in its place."""


class DamagedError(PublicationError):
    """Its files are not what was written."""


@dataclass(frozen=True)
class RowsInFile:
    """Rows of a table, or of some of its columns, in a file: the tensors "PLACE.keys" and "PLACE.rows".

    Attributes:
        live: of a table of ids, how many of the shard have a row; "PLACE.changed", "PLACE.old" and "PLACE.new" are the
            rows that changed hands. Else None.
    """

    file: str
    place: str
    table: str
    first_column: int
    num_columns: int
    rows: int
    live: int | None = None

    def changed(self, tensors: dict[str, Tensor]) -> ChangedRows | None:
        """Return which rows changed hands, from the tensors of its file; None of a table of row numbers.

        Raises:
            KeyError: they are not there.
        """
        if self.live is None:
            return None
        rows, old, new = (tensors[f"{self.place}.{name}"] for name in ("changed", "old", "new"))
        return ChangedRows(rows, old, new, self.live)


@dataclass(frozen=True)
class Publication:
    """The manifest of a base or a delta.

    Attributes:
        kind: "base" or "delta".
        seq: number of its state; a base made of deltas has that of the last one.
        run_id: of the run.
        life: number of the part of the run.
        token: name of its state, which no other state has; checkpoints of the same state have it, too.
        step: trained by then.
        parent: link of the publication before; of a base "".
        state: of a base made of deltas, the link of the last one; else "".
        dtype: number type of rows.
        tables: rows and columns of each.
        parts: rows of a delta.
        files: size and SHA-256 of each.
    """

    kind: str
    seq: int
    run_id: str
    life: int
    token: str
    step: int
    parent: str
    dtype: str
    tables: dict[str, tuple[int, int]]
    files: dict[str, tuple[int, str]]
    parts: tuple[RowsInFile, ...] = ()
    state: str = ""
    format: int = field(default=1)

    @property
    def name(self) -> str:
        """Name of its folder."""
        return f"{self.kind}_{self.seq}"

    @property
    def link(self) -> str:
        """Name of the state that a replica has with it: what the next delta has as its parent."""
        return self.state or hashlib.sha256(self.text().encode()).hexdigest()

    @property
    def num_bytes(self) -> int:
        """Bytes of its files."""
        return sum(count for count, _ in self.files.values())

    @property
    def num_rows(self) -> int:
        """Rows of a delta; one that is cut by columns counts for each part."""
        return sum(part.rows for part in self.parts)

    def text(self) -> str:
        """Return the manifest's text, with its checksum."""
        values = asdict(self)
        for part in values["parts"]:
            if part["live"] is None:  # as before there were tables of ids
                del part["live"]
        checksum = hashlib.sha256(json.dumps(values, indent=1).encode()).hexdigest()
        return json.dumps({**values, "checksum": checksum}, indent=1)


def read_publication(folder: Path) -> Publication:
    """Read the manifest in the folder of a publication, and check that it is whole and this folder's.

    Raises:
        DamagedError: it is not, or is missing, or of a newer version.
    """
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        values = json.loads(text)
        if values["format"] > FORMAT:
            raise DamagedError(f"{folder}: {MANIFEST} has format {values['format']}, needed {FORMAT} or lower")
        del values["checksum"]
        values["tables"] = {name: tuple(shape) for name, shape in values["tables"].items()}
        values["files"] = {name: tuple(entry) for name, entry in values["files"].items()}
        values["parts"] = tuple(RowsInFile(**part) for part in values["parts"])
        found = Publication(**values)
        if any(set(Path(name).parts) & {"..", "/"} for name in found.files):
            raise DamagedError(f"{folder}: {MANIFEST} has names of files outside of it")
    except DamagedError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise DamagedError(f"{folder}: {MANIFEST} cannot be read ({reason})") from error
    if found.text() != text:
        raise DamagedError(f"{folder}: {MANIFEST} is damaged: its checksum does not fit")
    if found.name != folder.name:
        raise DamagedError(f"{folder}: {MANIFEST} is that of {found.name}")
    return found


def published(folder: Path, kind: str) -> list[tuple[int, Path]]:
    """Return numbers and folders of the bases or the deltas in a folder, oldest first. Their names say that they are
    complete.

    >>> Path("out/delta_3").mkdir(parents=True), Path("out/delta_4.partial").mkdir()
    (None, None)
    >>> [seq for seq, _ in published(Path("out"), "delta")]
    [3]
    """
    found = [(match, path) for path in folder.glob(f"{kind}_*") if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[2]), path) for match, path in found)


def read_files(folder: Path, publication: Publication) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of a delta, by file. They are read once: what is returned is what was verified.

    Raises:
        DamagedError: a file is missing, or not what was written; a tensor is not what the manifest says.
    """
    found = {}
    for name, entry in publication.files.items():
        try:
            data = (folder / name).read_bytes()
        except OSError as error:
            raise DamagedError(f"{folder / name}: cannot be read ({error.strerror})") from error
        if (len(data), hashlib.sha256(data).hexdigest()) != entry:
            raise DamagedError(f"{folder / name}: its {len(data):,} bytes are not those that were written")
        found[name] = tensors_in(data)
    for part in publication.parts:
        num_rows, dim = publication.tables.get(part.table, (0, 0))
        tensors = found.get(part.file, {})
        keys, rows = tensors.get(f"{part.place}.keys"), tensors.get(f"{part.place}.rows")
        if keys is None or rows is None or keys.shape != (part.rows,) or rows.shape != (part.rows, part.num_columns):
            raise DamagedError(f"{folder / part.file}: the rows of {part.table} are not those of the manifest")
        if (keys.dtype, rows.dtype) != (torch.int64, ROW_TYPES.get(publication.dtype)):
            raise DamagedError(f"{folder / part.file}: the rows of {part.table} are not of type {publication.dtype}")
        if part.rows and (int(keys.min()) < 0 or int(keys.max()) >= num_rows):
            raise DamagedError(f"{folder / part.file}: {part.table} has {num_rows} rows, and not all keys are such")
        try:
            changed = part.changed(tensors)
        except KeyError as error:
            raise DamagedError(f"{folder / part.file}: needed {error} of {part.table}") from None
        if changed is not None and (problem := changed.problem(num_rows, keys)):
            raise DamagedError(f"{folder / part.file}: {part.table}: {problem}")
        if part.first_column < 0 or part.first_column + part.num_columns > dim:
            raise DamagedError(f"{folder / part.file}: {part.table} has {dim} columns, and not all columns are such")
    return found


def ids_of_base(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the ids of a verified base and their rows, by table.

    Raises:
        DamagedError: they are not ascending, or two have one row.
    """
    found = {}
    for path in folder.glob(f"tables/*{IDS}"):
        tensors = tensors_in(path.read_bytes())
        ids, rows = found[path.name.removesuffix(IDS)] = tensors["ids"], tensors["rows"]
        if (ids.diff() <= 0).any() or len(rows.unique()) < len(ids):
            raise DamagedError(f"{path}: ids are not ascending, or two have one row")
    return found


def ids_behind(
    ids: dict[str, tuple[Tensor, Tensor]], folder: Path, delta: Publication, files: dict[str, dict[str, Tensor]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return each table's ids and their rows behind a delta.

    Args:
        ids: before it.
        folder: of the delta.
        files: its tensors, as `read_files` returns them.

    Raises:
        OtherChainError: it is not a delta of this state.
    """
    changes: dict[str, list[ChangedRows]] = {name: [] for name in ids}
    for part in delta.parts:
        changed = part.changed(files[part.file])
        if (changed is not None) != (part.table in ids):
            raise OtherChainError(f"{folder}: {part.table} has {'' if changed else 'no '}ids in it, unlike in the base")
        if changed is not None:
            changes[part.table].append(changed)
    found = {}
    for name, (own, rows) in ids.items():
        try:
            found[name] = changed_ids(own, rows, changes[name])
        except (ValueError, RuntimeError) as error:
            raise OtherChainError(f"{folder}: table {name}: {error}") from None
    return found


def file_entries(folder: Path) -> dict[str, tuple[int, str]]:
    """Return size and checksum of all files in a folder of a base but its manifest, by their names from there."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST):
        digest, num_bytes = hashlib.sha256(), 0
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
                num_bytes += len(piece)
        found[str(path.relative_to(folder))] = num_bytes, digest.hexdigest()
    return found


def verify(folder: Path) -> Publication:
    """Return a base or a delta, of which every byte was compared with its checksum.

    Raises:
        DamagedError: with the file.
    """
    publication = read_publication(folder)
    if publication.kind == "delta":
        read_files(folder, publication)
        return publication
    there = file_entries(folder)
    for name, entry in publication.files.items():
        if there.get(name) != entry:
            raise DamagedError(f"{folder / name}: is missing, or its bytes are not those that were written")
    return publication


def check_next(publication: Publication, have: Publication, folder: Path) -> None:
    """Raise unless a delta is the one that follows the state `have`.

    Args:
        folder: of both.

    Raises:
        PublicationError: by its class, the reason.
    """
    where, last = folder / publication.name, f"the replica has {have.name} (step {have.step})"
    if publication.kind != "delta":
        raise OtherChainError(f"{where}: got a {publication.kind}, needed a delta: {last}")
    if publication.run_id != have.run_id:
        raise OtherChainError(f"{where}: it is of run {publication.run_id[:8]}, needed {have.run_id[:8]}: {last}")
    if publication.life < have.life:
        raise StaleLifeError(f"{where}: it is of life {publication.life}, needed {have.life} or later: {last}")
    if publication.seq <= have.seq:
        raise AlreadyAppliedError(f"{where}: its rows are served already: {last}")
    if publication.seq > have.seq + 1:
        needed = folder / f"delta_{have.seq + 1}"
        kind = OutOfOrderError if needed.exists() else MissingDeltaError
        what = "comes first" if needed.exists() else "is missing; start again from a newer base"
        raise kind(f"{where}: {needed.name} {what}: {last}")
    if (publication.tables, publication.dtype) != (have.tables, have.dtype):
        raise OtherChainError(f"{where}: its tables or their type are not those of the base: {last}")
    if publication.parent != have.link:
        raise OtherChainError(f"{where}: it follows {publication.parent[:8]}, needed {have.link[:8]}: {last}")


def tensors_in(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file's bytes (`safetensors`).

    Raises:
        DamagedError: they are no such file.
    """
    try:
        size = struct.unpack_from("<Q", data)[0]
        entries = json.loads(data[8 : 8 + size])
        memory = torch.frombuffer(bytearray(data[8 + size :]) or bytearray(1), dtype=torch.uint8)
        found = {}
        for name, entry in entries.items():
            start, stop = entry["data_offsets"]
            # A copy where the place does not suit the type.
            found[name] = memory[start:stop].clone().view(TYPES[entry["dtype"]]).view(entry["shape"])
        return found
    except (ValueError, KeyError, TypeError, RuntimeError, struct.error) as error:
        raise DamagedError(f"no safetensors file: {type(error).__name__}: {error}") from error
