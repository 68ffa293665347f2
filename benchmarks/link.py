"""Speed of the link between host and device: copies of pinned memory, and the cache's transfers of random rows."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import synchronize
from embershard.cache.rows import memory
from embershard.cache.rows.page_lock import lock_for
from embershard.cache.rows.transfer import StagedTransfer


def link_speeds(device: torch.device, dims: list[int]) -> dict[str, Any]:
    """Return gigabytes per second: of copies of pinned memory, and of each transfer's fills and write-backs."""
    megabytes = 512 if device.type == "cuda" else 16
    host = memory.zeros(megabytes << 18, torch.float32, whole_pages=True).fill_(1.0)
    lock = lock_for(device, [host]) if device.type == "cuda" else None
    if lock is not None:
        lock.wait()
    on_device = torch.empty_like(host, device=device)
    num_bytes = host.numel() * 4
    found: dict[str, Any] = {
        "copy_to_device": _speed(lambda: on_device.copy_(host, non_blocking=True), num_bytes, device),
        "copy_to_host": _speed(lambda: host.copy_(on_device, non_blocking=True), num_bytes, device),
    }
    for dim in dims:
        table = host[: host.numel() // dim * dim].view(-1, dim)
        count = table.shape[0] // 8
        keys, slots = torch.randperm(table.shape[0])[:count].to(device), torch.arange(count, device=device)
        rows = torch.zeros(count, dim, device=device)
        for name, make in _transfers(device).items():
            transfer = make([rows], [table])
            wanted = keys.to(transfer.key_device)
            speed = _speed(functools.partial(transfer.fill, wanted, slots), rows.numel() * 4, device)
            back = _speed(functools.partial(_written, transfer, slots, wanted), rows.numel() * 4, device)
            share = round(speed / found["copy_to_device"], 3)
            found[f"{name}, dim {dim}"] = {"fill": speed, "fill_of_copy": share, "write_back": back}
    return found


def _written(transfer: Any, slots: Tensor, keys: Tensor) -> None:
    transfer.write_back(slots, keys)
    transfer.finish()


def _transfers(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {"staged": StagedTransfer}
    if device.type == "cuda":
        from embershard.cache.rows.uva_transfer import UvaTransfer

        found["triton_uva"] = UvaTransfer
    return found


def _speed(call: Callable[[], Any], num_bytes: int, device: torch.device, repeats: int = 9) -> float:
    seconds = []
    for _ in range(repeats + 2):
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return round(num_bytes / statistics.median(seconds[2:]) / 1e9, 3)
