"""What `embershard ckpt` shows and removes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from embershard.distributed import Manifest, complete_checkpoints, step_of
from embershard.distributed.checkpoint.folder import ASIDE, folder_bytes, leftovers, remove
from embershard.errors import InvalidCheckpointError
from embershard.units import size

__all__ = ["differences", "listing", "remove", "to_prune"]


def listing(folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield name, run, state, size, number of files and time of every checkpoint; files are not read."""
    found = [path for path in folder.glob("step_*") if path.is_dir()]
    for path in sorted(found, key=lambda path: (step_of(path) is None, step_of(path) or 0, path.name)):
        run, state = "", "unfinished" if path.suffix == ".tmp" else "set aside"
        if step_of(path) is not None:
            state = "complete"
            try:
                manifest = Manifest.read(path)
                run, problem = manifest.run_id[:8], manifest.wrong_size(path)
                state = problem or state
            except InvalidCheckpointError as error:
                state = str(error).partition(": ")[2]
        files = [file for file in path.iterdir() if file.is_file()]
        written = datetime.fromtimestamp(path.stat().st_mtime)
        yield path.name, run, state, size(folder_bytes(path)), str(len(files)), f"{written:%Y-%m-%d %H:%M}"


def to_prune(folder: Path, keep: int) -> tuple[list[Path], list[Path]]:
    """Return the newest `keep` valid checkpoints, and all else that may go, invalid ones among it.

    Raises:
        InvalidCheckpointError: no checkpoint is valid: then none goes.
    """
    from embershard.distributed.checkpoint.load import verify_alone  # loads torch, and a list needs it not

    kept: list[Path] = []
    for path in reversed(complete_checkpoints(folder)):
        try:
            if len(kept) < keep and verify_alone(path):
                kept.append(path)
        except InvalidCheckpointError:
            continue
    if not kept:
        raise InvalidCheckpointError(f"{folder} has no valid checkpoint, so none is removed. Remove folders by hand.")
    others = [path for path in complete_checkpoints(folder) if path not in kept]
    return kept, [*others, *leftovers(folder), *sorted(folder.glob(f"step_*{ASIDE}*"))]


def differences(first: Path, second: Path) -> Iterator[tuple[str, str, str]]:
    """Yield how two valid checkpoints differ: name, in the first, in the second. Reads one tensor at a time."""
    from embershard.distributed import read_scalars
    from embershard.distributed.checkpoint.load import verify_alone
    from embershard.distributed.checkpoint.metadata import read_metadata

    manifests = [verify_alone(path) for path in (first, second)]
    if manifests[0].run_id != manifests[1].run_id:
        yield "run", manifests[0].run_id, manifests[1].run_id
    values = [dict(_flat(read_scalars(path))) for path in (first, second)]
    for name in sorted(values[0].keys() | values[1].keys()):
        pair = [repr(found[name])[:40] if name in found else "" for found in values]
        if values[0].get(name) != values[1].get(name):
            yield name, pair[0], pair[1]
    entries = [read_metadata(path).state_dict_metadata for path in (first, second)]
    for name in sorted(entries[0].keys() | entries[1].keys()):
        kinds = [_kind(found.get(name)) for found in entries]
        if kinds[0] != kinds[1]:
            yield name, kinds[0], kinds[1]
        elif (changed := _changed(name, entries[0][name], first, second)) is not None:
            yield name, kinds[0], changed


def _changed(name: str, entry: Any, first: Path, second: Path) -> str | None:
    import torch

    from embershard.distributed import load_tensors

    tensors = []
    for path in (first, second):
        tensors.append(torch.empty(entry.size, dtype=entry.properties.dtype))
        load_tensors(path, {name: tensors[-1]})
    different = tensors[0] != tensors[1]
    count = int(different.sum())
    if not count:
        return None
    largest = (tensors[0].double() - tensors[1].double()).abs().max()
    return f"{count:,} of {different.numel():,} values differ, by {largest:.3g} at most"


def _flat(values: dict[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{at}{key}.")
        else:
            yield f"{at}{key}", value


def _kind(entry: Any) -> str:
    return "" if entry is None else f"{str(entry.properties.dtype).removeprefix('torch.')} {list(entry.size)}"
