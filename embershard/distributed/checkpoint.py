"""Checkpoints: tensors by torch.distributed.checkpoint, scalars as JSON beside them.

    checkpoints/
      step_200/              complete: it gets this name after every rank has written and synced its part
        *.distcp .metadata   tensors, written by all ranks
        scalars.json         step, position in the data, tables, sizes of the files above
      step_300.tmp/          being written, or left by a run that died; never read

A checkpoint's `.metadata` is a pickle: load only checkpoints from a source that you trust.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from embershard.distributed.process_group import Ranks
from embershard.errors import CheckpointError

SCALARS = "scalars.json"
_COMPLETE = re.compile(r"step_(\d+)")


def save_checkpoint(
    folder: Path, step: int, tensors: dict[str, Any], scalars: Mapping[str, Any], ranks: Ranks, *, keep_last: int
) -> Path:
    """Write `folder/step_<step>`, then remove the oldest complete checkpoints. Every rank calls it.

    Args:
        folder: shared by all ranks.
        step: steps trained so far.
        tensors: a state dict of tensors and sharded tensors, `without_empty`.
        scalars: JSON values, the same on every rank.
        ranks: the calling process's place.
        keep_last: complete checkpoints to keep, this one included; at least 1.

    Returns:
        The folder of this checkpoint.

    Raises:
        CheckpointError: a complete checkpoint of this step exists already.

    >>> from embershard.distributed import process_group
    >>> with process_group("cpu") as ranks:
    ...     save_checkpoint(Path("run"), 3, {"w": torch.ones(2)}, {"epoch": 0}, ranks, keep_last=1).name
    'step_3'
    """
    final, partial = folder / f"step_{step}", folder / f"step_{step}.tmp"
    if any(ranks.all_gather_objects(final.exists())):
        raise CheckpointError(f"{final} exists already and is not overwritten. Remove it, or use another --run-dir.")
    if ranks.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    ranks.barrier()
    with _without_known_warnings():
        dcp.save(tensors, storage_writer=FileSystemWriter(partial, single_file_per_rank=True, sync_files=True))
    ranks.barrier()
    if ranks.is_first:
        files = {p.name: p.stat().st_size for p in sorted(partial.iterdir())}
        _write_synced(partial / SCALARS, json.dumps({**scalars, "step": step, "files": files}, indent=1))
        _sync_folder(partial)
        os.rename(partial, final)
        _sync_folder(folder)
        for old in complete_checkpoints(folder)[:-keep_last]:
            shutil.rmtree(old)
    ranks.barrier()
    return final


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`, oldest first. Their names alone say so: no pointer can be wrong.

    >>> Path("runs/step_2.tmp").mkdir(parents=True), Path("runs/step_1").mkdir()
    (None, None)
    >>> [checkpoint.name for checkpoint in complete_checkpoints(Path("runs"))]
    ['step_1']
    """
    found = [(int(m[1]), p) for p in folder.glob("step_*") if (m := _COMPLETE.fullmatch(p.name)) and p.is_dir()]
    return [path for _, path in sorted(found)]


def read_scalars(checkpoint: Path) -> dict[str, Any]:
    """Return a checkpoint's scalars, after checking that its files are complete.

    Raises:
        CheckpointError: a file is missing or has another size, or the scalars cannot be read.

    >>> checkpoint = Path("step_7")
    >>> checkpoint.mkdir()
    >>> size = (checkpoint / "scalars.json").write_text('{"step": 7, "files": {}}')
    >>> read_scalars(checkpoint)["step"]
    7
    """
    path = checkpoint / SCALARS
    try:
        scalars = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}). Remove this checkpoint and resume again.") from error
    if not isinstance(scalars, dict):
        raise damaged_scalars(checkpoint, f"it holds a {type(scalars).__name__}, needed an object")
    files = scalars.get("files")
    if not isinstance(files, dict):
        raise damaged_scalars(checkpoint, "'files' is missing, or is no object of names and sizes")
    for name, size in files.items():
        file = checkpoint / name
        got = file.stat().st_size if file.is_file() else None
        if got != size:
            state = "is missing" if got is None else f"has {got} bytes"
            raise CheckpointError(f"{file} {state}, needed {size} bytes. Remove {checkpoint} and resume again.")
    return scalars


def damaged_scalars(checkpoint: Path, problem: str) -> CheckpointError:
    """Return the error for scalars that could be read and are wrong.

    >>> str(damaged_scalars(Path("step_7"), "'step' is missing")).partition(".")[0]
    'step_7/scalars'
    """
    return CheckpointError(
        f"{checkpoint / SCALARS}: {problem}. It was changed, or written by another version of embershard: remove "
        f"{checkpoint} and resume from another checkpoint."
    )


def load_tensors(checkpoint: Path, tensors: dict[str, Any]) -> None:
    """Fill `tensors` in place from a checkpoint; any number of ranks may have written it.

    Raises:
        CheckpointError: the checkpoint lacks one of the tensors, or has it in another shape.

    >>> from embershard.distributed import process_group
    >>> with process_group("cpu") as ranks:
    ...     saved = save_checkpoint(Path("run"), 4, {"w": torch.ones(2)}, {}, ranks, keep_last=1)
    >>> tensors = {"w": torch.zeros(2)}
    >>> load_tensors(saved, tensors)
    >>> tensors["w"]
    tensor([1., 1.])
    """
    try:
        with _without_known_warnings():
            dcp.load(tensors, storage_reader=FileSystemReader(checkpoint))
    except (RuntimeError, ValueError, KeyError, OSError, dcp.CheckpointException) as error:
        raise CheckpointError(
            f"{checkpoint} cannot be loaded: {_cause(error)}. It is damaged, or of another model: remove it and resume "
            "from the one before, or resume with the config it was written with."
        ) from error


def without_empty(tensors: Any) -> Any:
    """Return a state dict without its empty dicts, which torch.distributed.checkpoint cannot find again.

    >>> without_empty({"state": {}, "step": 3})
    {'step': 3}
    """
    if not isinstance(tensors, dict):
        return tensors
    kept = {key: without_empty(value) for key, value in tensors.items()}
    return {key: value for key, value in kept.items() if not (isinstance(value, dict) and not value)}


def rng_state(device: torch.device) -> dict[str, str]:
    """Return the states of this rank's random number generators, as text for JSON.

    >>> sorted(rng_state(torch.device("cpu")))
    ['cpu']
    """
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(bytes(state.tolist())).decode() for name, state in states.items()}


def set_rng_state(saved: Mapping[str, str], device: torch.device) -> None:
    """Restore what `rng_state` returned; without a GPU, its state is skipped.

    >>> cpu = torch.device("cpu")
    >>> saved, number = rng_state(cpu), torch.rand(1)
    >>> set_rng_state(saved, cpu)
    >>> bool(torch.rand(1) == number)
    True
    """
    states = {name: torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8) for name, text in saved.items()}
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _cause(error: BaseException) -> str:
    """Return the first line of the first rank's error."""
    causes = list((getattr(error, "failures", None) or {}).values())
    if causes:
        error = causes[0][0] if isinstance(causes[0], tuple) else causes[0]
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return "a file cannot be unpickled" if "weights_only" in text else text  # torch's advice there is dangerous


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _without_known_warnings() -> Iterator[None]:
    """Hide the deprecation of ShardedTensors, which TorchRec's state dicts hold and torch announces on every use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield
