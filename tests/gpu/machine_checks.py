"""What the first hour measures of a machine by itself: FBGEMM's lookup, page-locking, and how ranks end. FBGEMM is
imported where it is used: what else is here runs on a machine without it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from embershard.cache.rows import memory
from embershard.cache.rows.page_lock import lock_for
from embershard.machine import host_memory

NUM_TABLES, DIM = 26, 16
_RATE = 0.5
_POLL_SECONDS = 0.05


def _tables(device: str, rows: int, dim: int, optimizer: str) -> Any:
    """FBGEMM's tables, with one of its optimizers by name."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    on_gpu = device == "cuda"
    place = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, place, ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU)] * NUM_TABLES,
        optimizer=EmbOptimType[optimizer],
        learning_rate=_RATE,
        device=torch.device(device),
    )


def lookup_differences(device: str, rows: int = 500, batch: int = 300) -> list[str]:
    """Names of what differs from plain torch after a forward, a backward and an update. All numbers are dyadic
    rationals with few digits, so no sum is rounded, in whichever order it is added up."""
    tables = _tables(device, rows, DIM, "EXACT_SGD")
    generator = torch.Generator().manual_seed(5)
    weights = torch.randint(-32, 33, (NUM_TABLES, rows, DIM), generator=generator) / 32
    for table, values in zip(tables.split_embedding_weights(), weights, strict=True):
        table.data.copy_(values)
    ids = torch.randint(0, rows, (NUM_TABLES, batch, 3), generator=generator)
    gradients = torch.randint(-8, 9, (batch, NUM_TABLES, DIM), generator=generator) / 8
    offsets = torch.arange(0, ids.numel() + 1, 3)
    out = tables(ids.flatten().to(device), offsets.to(device))
    out.backward(gradients.flatten(1).to(device))
    expected = torch.stack([weights[t][ids[t]].sum(dim=1) for t in range(NUM_TABLES)], dim=1)
    different = [] if torch.equal(out.detach().cpu(), expected.flatten(1)) else ["forward"]
    for t, table in enumerate(tables.split_embedding_weights()):
        weights[t].index_add_(0, ids[t].flatten(), gradients[:, t].repeat_interleave(3, dim=0), alpha=-_RATE)
        if not torch.equal(table.cpu(), weights[t]):
            different.append(f"rows of table {t}")
    return different


def is_same_twice(device: str, deterministic: bool, rows: int = 3, batch: int = 8192) -> bool:
    """Whether two equal trainings give equal bits where a batch uses a row thousands of times: FBGEMM cuts more than
    1,024 uses, and adds the parts with atomics, unless torch's algorithms are deterministic."""
    found = []
    torch.use_deterministic_algorithms(deterministic)
    try:
        for _ in range(2):
            generator = torch.Generator().manual_seed(5)
            tables = _tables(device, rows, DIM, "EXACT_SGD")
            for table in tables.split_embedding_weights():
                table.data.copy_(torch.rand(rows, DIM, generator=generator))
            ids = torch.randint(0, rows, (NUM_TABLES * batch,), generator=generator).to(device)
            gradients = torch.randn(batch, NUM_TABLES * DIM, generator=generator).to(device)
            for _ in range(3):
                tables(ids, torch.arange(ids.numel() + 1, device=device)).backward(gradients)
            found.append([table.cpu() for table in tables.split_embedding_weights()])
    finally:
        torch.use_deterministic_algorithms(False)
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


def seconds_of_a_lookup(device: str, rows: int, batch: int, dim: int = 128, turns: int = 20) -> float:
    """Median seconds of a forward, backward and update with row-wise Adagrad, one id per sample and table."""
    tables = _tables(device, rows, dim if device == "cuda" else DIM, "EXACT_ROWWISE_ADAGRAD")
    ids = torch.randint(0, rows, (NUM_TABLES * batch,), device=device)
    offsets = torch.arange(ids.numel() + 1, device=device)
    seconds = []
    for _ in range(turns):
        _wait(device)
        started = time.perf_counter()
        out = tables(ids, offsets)
        out.backward(out.detach())
        _wait(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def launches_while_locking(num_bytes: int, device: str = "cuda") -> dict[str, float]:
    """Launch small kernels while host memory is page-locked, in blocks. Return milliseconds that a launch took, seconds
    that a GiB took to be allocated and locked, and memory that a forked process takes, as those of a loader are."""
    on_gpu = torch.zeros(1000, device=device)
    host = memory.zeros(num_bytes, torch.uint8, whole_pages=True)
    _wait(device)
    started, took = time.perf_counter(), []
    lock = lock_for(torch.device(device, 0), [host])
    while not lock.is_done and not lock.problem:
        before = time.perf_counter()
        on_gpu.add_(1.0)
        took.append(time.perf_counter() - before)
        time.sleep(1e-4)
    seconds = time.perf_counter() - started
    lock.wait()
    taken = bytes_taken_by_a_fork()
    unlocked = time.perf_counter()
    del lock
    return {
        "gib": num_bytes / (1 << 30),
        "seconds_per_gib": seconds / (num_bytes / (1 << 30)),
        "seconds_to_unlock": time.perf_counter() - unlocked,
        "gib_of_a_forked_process": taken / (1 << 30),
        "launches": len(took),
        "median_ms": statistics.median(took) * 1e3,
        "longest_ms": max(took) * 1e3,
    }


def bytes_taken_by_a_fork() -> int:
    """How much less memory is available while a forked process waits. The system copies locked pages at the fork."""
    before, process = host_memory().available_bytes, os.fork()
    if not process:
        signal.pause()
        os._exit(1)
    time.sleep(0.5)
    taken = before - host_memory().available_bytes
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return taken


def seconds_to_end(command: Sequence[str], run_dir: Path, number: signal.Signals, seconds: float) -> dict[str, Any]:
    """Start ranks; once they train, send a signal: SIGTERM to the launcher, others to the last rank. Return how long
    all took to end, the exit code, the last lines, and before: how many cores each rank keeps to (train.numa), and the
    memory of each process on each GPU."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    file, ends_at = run_dir.parent / f"{run_dir.name}.txt", time.monotonic() + seconds
    with file.open("w", encoding="utf-8") as output:
        launcher = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while not _has_trained(run_dir):
                if launcher.poll() is not None or time.monotonic() > ends_at:
                    return {"problem": f"it did not train (exit code {launcher.returncode})", "last": _last(file)}
                time.sleep(_POLL_SECONDS)
            on_gpus = _memory_on_gpus()
            ranks = [child.pid for child in psutil.Process(launcher.pid).children() if _rank(child) is not None]
            cores = {pid: len(psutil.Process(pid).cpu_affinity()) for pid in ranks}
            os.kill(launcher.pid if number == signal.SIGTERM else max(ranks), number)
            sent = time.monotonic()
            try:
                code: int | None = launcher.wait(max(1.0, ends_at - sent))
            except subprocess.TimeoutExpired:
                code = None
            took = round(time.monotonic() - sent, 2)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)  # its ranks end with it
            launcher.wait()
    return {"seconds": took, "code": code, "cores": cores, "last": _last(file), "memory_on_gpus": on_gpus}


def _has_trained(run_dir: Path) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.is_file() and '"train"' in metrics.read_text(encoding="utf-8")


def _rank(process: psutil.Process) -> str | None:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("RANK")
    return None


def _last(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8", errors="replace").splitlines()[-4:]


def _memory_on_gpus() -> list[str]:
    """A line for each process and GPU: a rank that has memory on another GPU than its own shows."""
    if shutil.which("nvidia-smi") is None:
        return []
    words = ["nvidia-smi", "--query-compute-apps=pid,gpu_bus_id,used_memory", "--format=csv,noheader"]
    return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.splitlines()
