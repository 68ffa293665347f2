"""The program of each rank: it does a `Job`, such as a training.

`embershard train`, `verify`, `predict` and `eval` read the settings once, and start ranks that get the result: resolved
settings, no text (`python -m embershard.launch.rank`). Under torchrun these commands are a rank themselves.
"""

from __future__ import annotations

import errno
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ClassVar

from embershard import distributed  # its names load torch when they are used, and a launcher needs it not
from embershard.errors import EmbershardError, StepError, os_problem
from embershard.launch.arguments import as_called
from embershard.launch.stop_signals import stop_training_on_signals
from embershard.launch.versions import debug_problem
from embershard.settings.files import check_config_code
from embershard.settings.own_code import message_for_user
from embershard.training.config import RunConfig

#: The module that a launcher starts as a rank.
PROGRAM = "embershard.launch.rank"
#: Set by the launcher for its ranks: the descriptor of a file in memory with their job.
_JOB_VARIABLE = "EMBERSHARD_JOB"


@dataclass(frozen=True)
class Job:
    """What all ranks of a group do together. It is pickled on its way from the launcher to them.

    Attributes:
        config: all settings of the run.
        run_dir: folder of the run; None: not chosen yet, or there is none.
        trust_code: a module that settings name may be inside of a run's folder.
        stops_in_order: a signal ends the job after a step; else it ends the process at once.
    """

    config: RunConfig
    run_dir: Path | None
    trust_code: bool
    stops_in_order: ClassVar[bool] = False

    def run(self, ranks: distributed.Ranks, supervision: distributed.Supervision) -> int:
        """Do the job; return the exit code. Collective."""
        raise NotImplementedError


def is_rank() -> bool:
    """Return whether torchrun started this process as a rank, or another program that sets all variables of a rank."""
    return {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def hand_over(job: object) -> tuple[int, dict[str, str]]:
    """Return the descriptor of a file in memory that holds a job, and the variables by which a rank finds it. A process
    that inherits both has the job as `handed_job`."""
    descriptor = os.memfd_create("job")
    os.pwrite(descriptor, pickle.dumps(job), 0)
    return descriptor, {_JOB_VARIABLE: str(descriptor)}


def handed_job() -> Job:
    """Return the job that the launcher handed to this process."""
    descriptor = int(os.environ.pop(_JOB_VARIABLE))  # not for processes that this one starts
    job: Job = pickle.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    return job


def main() -> int:
    """Run as a rank that `embershard.launch.launcher` started; return the exit code."""
    job = handed_job()

    def checked() -> Job:
        if not job.trust_code:  # by the Python path of this process
            check_config_code(job.config, job.run_dir)
        return job

    return run_rank(checked, stops_in_order=job.stops_in_order)


def run_rank(make: Callable[[], Job], *, stops_in_order: bool = False) -> int:
    """Do the job that `make` returns, show the error that ends it, if any, and return the exit code.

    The error is also written to the file that torchrun reads.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        return record(do)(make, stops_in_order=stops_in_order) or 0
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        import torch

        if torch.cuda.is_initialized():  # an ordinary end frees models, which waits for kernels that may never end:
            sys.stdout.flush()  # those of a collective do not, once another rank has gone
            sys.stderr.flush()
            os._exit(1)
        return 1


def do(make: Callable[[], Job], *, stops_in_order: bool = False) -> int:
    """Do the job that `make` returns, as one rank of a group or alone; return the exit code."""
    import torch

    from embershard.launch.screen import silence_libraries
    from embershard.training.arithmetic import prepare_process, rank_threads

    silence_libraries()
    supervision = distributed.Supervision.of_this_process()
    sys.excepthook = partial(_show_error, supervision)
    with stop_training_on_signals(supervision) if stops_in_order else nullcontext():
        job = make()
        if os.environ.get("RANK", "0") == "0" and (problem := debug_problem()):
            print(f"embershard: warning: {problem}. Use INFO, or unset it.", file=sys.stderr, flush=True)
        prepare_process(job.config.train)
        with distributed.process_group(job.config.train.device, numa=job.config.train.numa) as ranks:
            torch.set_num_threads(rank_threads(job.config, ranks).count)
            return job.run(ranks, supervision)


def _show_error(
    supervision: distributed.Supervision, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show our own errors without a traceback, since they say what to do, and once; of errors in a user's own model
    the lines of that model; others with their traceback. Tell the launcher whether a new start may help."""
    if isinstance(error, EmbershardError) and error.is_shown_elsewhere:
        return
    if distributed.is_lost_connection(error):
        if not supervision.has_launcher:  # which names the rank that failed
            print("This rank lost the connection to another one, which has ended or hangs.", file=sys.stderr)
        return
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    is_final = is_full or (isinstance(error, EmbershardError) and not isinstance(error, StepError))
    supervision.has_failed(is_final)
    if isinstance(error, EmbershardError):  # torch puts the rank in front
        print(f"{kind.__name__}: {as_called(str(error))}", file=sys.stderr)
    elif isinstance(error, OSError):
        print(f"{kind.__name__}: {os_problem(error)}", file=sys.stderr)
    elif (text := message_for_user(error)) is not None:
        print(text, file=sys.stderr)
    elif not isinstance(error, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


if __name__ == "__main__":
    from embershard.launch import rank  # its classes by the name that pickles have

    sys.exit(rank.main())
