"""`check_machines`: whether the machines of a run have the same settings and files, and see the run's folder."""

from __future__ import annotations

import dataclasses
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embershard.data.sources.input_file import FileIdentity, identify_files
from embershard.distributed import Ranks
from embershard.errors import ConfigError, EmbershardError, naming_file, os_problem
from embershard.settings.decoding import flat
from embershard.training.checkpoint.identity import changes
from embershard.training.config import RunConfig

_MOST_SHOWN = 4
#: Settings that may be other paths on each machine: what is there is compared, or read by one rank alone.
_PATHS = ("data.path", "data.eval_path", "profile.path", "sharding.plan", "cache.host_dir")
#: A new file may take as long to be seen on another machine of a network file system.
_WAIT_SECONDS = 3.0


@dataclass(frozen=True)
class SeenByRank:
    """What a rank finds on its machine.

    Attributes:
        host: the machine's name.
        inputs: all settings by `section.key`, and the files that are read, as values that can be compared.
        has_folder: it sees the folder that the first rank writes to.
        problem: why a file cannot be read; empty if all can.
    """

    host: str
    inputs: dict[str, Any]
    has_folder: bool
    problem: str = ""


def check_machines(config: RunConfig, ranks: Ranks, folder: Path | None) -> None:
    """Raise unless all machines of a run can work together; one machine always can. Collective.

    The settings, the data and the profile's file must be the same, since every rank reads its own: ranks that differ
    would train on other batches, or wait for each other for ever. Paths may differ. (A plan is read by the first rank
    alone.) Checkpoints need a folder that all machines see.

    Args:
        folder: of the run; None where it saves nothing.

    Raises:
        ConfigError: on all ranks, with the first rank that differs, and how.

    >>> import torch
    >>> here = Ranks(rank=0, world_size=2, local_rank=0, local_world_size=2, device=torch.device("cpu"))
    >>> check_machines(RunConfig(), here, Path("runs/one"))
    """
    if ranks.world_size == ranks.local_world_size:
        return
    mark = ranks.from_first(lambda: None if folder is None else _leave_mark(folder))
    found = ranks.all_gather_objects(_look(config, mark))
    if mark is not None and ranks.is_first:
        mark.unlink(missing_ok=True)
    if problem := machines_problem(found, folder):
        raise ConfigError(problem)


def machines_problem(found: Sequence[SeenByRank], folder: Path | None) -> str:
    """Return why machines cannot work together, of which each rank found this; empty if they can.

    >>> first = SeenByRank("a", {"cache.ratio": 0.1}, has_folder=True)
    >>> print(machines_problem([first, SeenByRank("b", {"cache.ratio": 0.2}, has_folder=True)], None))
    All machines of a run need the same settings and files. Of rank 0 on a / of rank 1 on b: cache.ratio: 0.1 / 0.2. \
Give all ranks the same --config and --set, and the same files.
    """
    first = found[0]
    for rank, other in enumerate(found):
        if other.problem:
            return f"rank {rank} on {other.host}: {other.problem}"
        if different := changes(first.inputs, other.inputs):
            shown = "; ".join(f"{each.key}: {each.saved} / {each.now}" for each in different[:_MOST_SHOWN])
            more = f"; and {len(different) - _MOST_SHOWN} more" if len(different) > _MOST_SHOWN else ""
            return (
                f"All machines of a run need the same settings and files. Of rank 0 on {first.host} / of rank {rank} "
                f"on {other.host}: {shown}{more}. Give all ranks the same --config and --set, and the same files."
            )
    for rank, other in enumerate(found):
        if not other.has_folder:
            return (
                f"rank {rank} on {other.host} does not see the run's folder {folder}, to which rank 0 on {first.host} "
                "writes: all ranks write parts of a checkpoint there. Give all of them a --run-dir on a file system "
                "that all machines share, as an absolute path."
            )
    return ""


def _look(config: RunConfig, mark: Path | None) -> SeenByRank:
    host, inputs = socket.gethostname(), flat(dataclasses.asdict(config))
    inputs |= {key: None if inputs[key] is None else "a path" for key in _PATHS}
    try:
        inputs |= {f"data.{name}": files for name, files in identify_files(config.data).items()}
        if config.profile.path is not None:
            inputs["profile.contents"] = FileIdentity.of(Path(config.profile.path)).sha256
    except EmbershardError as error:
        return SeenByRank(host, inputs, has_folder=True, problem=str(error))
    except OSError as error:
        return SeenByRank(host, inputs, has_folder=True, problem=os_problem(error))
    ends_at = time.monotonic() + _WAIT_SECONDS
    while mark is not None and not mark.exists() and time.monotonic() <= ends_at:
        time.sleep(0.1)
    return SeenByRank(host, inputs, mark is None or mark.exists())


def _leave_mark(folder: Path) -> Path:
    mark = folder / f".seen_by_all_{uuid.uuid4().hex}"
    with naming_file(mark):
        folder.mkdir(parents=True, exist_ok=True)
        mark.touch()
    return mark
