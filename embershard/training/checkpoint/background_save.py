"""A save that goes on beside training, in a thread of the lowest priority."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import torch

from embershard.distributed import Ranks
from embershard.distributed.ranks import keep_to_one_core
from embershard.training.checkpoint.run_state import PreparedSave

_LOWEST_PRIORITY = 19  # "niceness"
_GIVEN_UP_SECONDS = 5.0
#: Pause before a block, as a multiple of the CPU time that the block before took.
_PAUSE = 3.0


class BackgroundSave:
    """Writes a prepared checkpoint in a thread. Its collectives need a group of their own: they come at any time.

    The constructor returns once training may go on: tensors that could not be copied are written then.

    Args:
        prepared: what to write.
        ranks: with a group that only background saves use.

    Attributes:
        step: of the checkpoint.
        seconds: time since the constructor was called, until it was written.
    """

    def __init__(self, prepared: PreparedSave, ranks: Ranks) -> None:
        self.step = prepared.step
        self._prepared, self._ranks = prepared, ranks
        self._may_go_on, self._is_awaited = threading.Event(), threading.Event()
        self._cpu_seconds = 0.0  # of the thread, at the end of its last pause
        self._path: Path | None = None
        self._failure: BaseException | None = None
        self._started, self.seconds = time.perf_counter(), 0.0
        # A daemon: at the exit of a failed run nobody waits for ranks that are gone.
        self._thread = threading.Thread(target=self._write, name="embershard-save", daemon=True)
        threads = torch.get_num_threads()
        self._thread.start()
        self._may_go_on.wait()
        torch.set_num_threads(threads)  # `keep_to_one_core` also told MKL, which has one number for all threads

    @property
    def is_done(self) -> bool:
        """True if the checkpoint was written, or could not be."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end; the save makes no pauses any more."""
        self._is_awaited.set()
        self._thread.join()

    def result(self) -> Path:
        """Return the checkpoint, or raise what prevented it. The save is done. Called once: an error that is kept keeps
        this object, by its traceback."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure
        assert self._path is not None
        return self._path

    def give_up(self) -> None:
        """End the save without a checkpoint, after an error that ends the run. Waits a few seconds at most: other ranks
        may be gone."""
        self._prepared.close()
        self._thread.join(_GIVEN_UP_SECONDS)

    def _write(self) -> None:
        keep_to_one_core()
        try:
            if self._prepared.tensors.is_copied:
                self._go_on()
            self._path = self._prepared.write(self._ranks, self._before_block)
        except BaseException as error:  # raised by `result`
            self._failure = error
        finally:
            self.seconds = time.perf_counter() - self._started
            self._go_on()

    def _before_block(self) -> None:
        """Let training go on. Later, leave the cores to it for a while, unless it may soon wait for the save."""
        self._go_on()
        if not any(rows.is_filling for rows in self._prepared.frozen):
            self._is_awaited.wait(_PAUSE * (time.thread_time() - self._cpu_seconds))
        self._cpu_seconds = time.thread_time()

    def _go_on(self) -> None:
        if not self._may_go_on.is_set():
            with contextlib.suppress(OSError):  # a system that forbids it
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
            self._may_go_on.set()
