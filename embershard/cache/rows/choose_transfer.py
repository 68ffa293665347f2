"""Choice of a pool's transfer by its settings and its device."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from embershard.cache.config import CacheConfig, TransferKind
from embershard.cache.homes.home import Home
from embershard.cache.rows.page_lock import PageLock, lock_for
from embershard.cache.rows.transfer import MakeTransfer, ScoresTransfer, Transfer
from embershard.errors import ConfigError


def transfer_kind(config: CacheConfig, device: torch.device) -> TransferKind:
    """Resolve `config.transfer` for `device`.

    Raises:
        ConfigError: the device or the installation cannot run the configured transfer.
    """
    on_cuda = device.type == "cuda"
    if config.rounds_rows:
        _check_small_rows(config, on_cuda)
    if config.transfer is None:
        if not on_cuda:
            return "plain"
        return "triton_uva" if config.host == "memory" and find_spec("triton") else "staged"
    if config.transfer == "triton_uva":
        if find_spec("triton") is None:
            raise ConfigError('cache.transfer="triton_uva" needs triton, which is not installed; set "staged"')
        if not on_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError(
                f'cache.transfer="triton_uva" needs a GPU, the slots are on {device.type!r}; set "plain" or leave it '
                "out (with TRITON_INTERPRET=1 in the environment its kernels run on a CPU, slowly)"
            )
    return config.transfer


def transfer_maker(kind: TransferKind | MakeTransfer, device: torch.device, host: Home) -> MakeTransfer:
    """Return the maker of transfers of this kind; the pool calls it with its first slots and whenever it grows."""
    if not isinstance(kind, str):
        return kind
    if kind != "triton_uva" or device.type != "cuda":
        return host.transfer(kind)
    staged, by_kernel = host.transfer("staged"), host.transfer(kind)
    # A GPU cannot ask for rows to be made, so all are made by the time their memory is locked.
    lock = functools.cache(lambda: lock_for(device, host.parts, before=host.make_memory))
    return lambda slots, rows: WhenLocked(slots, rows, lock, staged, by_kernel)


def scores_transfer_maker(kind: TransferKind | MakeTransfer, device: torch.device, row_scores: Tensor) -> MakeTransfer:
    """Return the maker of transfers for the scores [R] of rows that `kind` moves. Planning reads scores right away, so
    they never pass through buffers that land later."""
    if kind != "triton_uva" or device.type != "cuda":
        return ScoresTransfer
    from embershard.cache.rows.uva_transfer import UvaTransfer

    lock = functools.cache(functools.partial(lock_for, device, [row_scores]))
    return lambda slots, host: WhenLocked(slots, host, lock, ScoresTransfer, UvaTransfer)


class PageLockWarning(UserWarning):
    """Host rows could not be page-locked, so they move through buffers."""


class WhenLocked:
    """Transfer that switches to another one once the host rows are page-locked. The methods are those of `Transfer`.

    Args:
        device, host: as for every transfer.
        lock: returns the lock of the memory of `host`; the first call starts locking. It is made with the first fill,
            when the model is complete: torch takes locked memory for pinned, and ShardedTensors compare that with the
            plan, so they could not be made of it.
        before, then: make the two transfers; `then` needs locked memory. Where it cannot be locked, a warning says so,
            and `before` stays.
    """

    def __init__(
        self,
        device: Sequence[Tensor],
        host: Sequence[Tensor],
        lock: Callable[[], PageLock],
        before: MakeTransfer,
        then: MakeTransfer,
    ) -> None:
        self._lock, self._then = lock, then
        self._payload = device, host
        self._transfer: Transfer = before(device, host)
        self._is_settled = False

    @property
    def key_device(self) -> torch.device:
        """Device of the keys; it changes with the transfer."""
        return self._transfer.key_device

    def wait_until_locked(self) -> None:
        """Block until the memory is locked, for measurements: the next fill is the last one before the switch.

        Raises:
            CacheError: the memory could not be locked.
        """
        self._lock().wait()

    def fill(self, keys: Tensor, slots: Tensor) -> None:
        """Copy host rows `keys` to `slots`, and switch transfers if the memory is locked by now. A fill is the last
        call of a plan, and the switch finishes all copies, so the next plan sees all rows.
        """
        self._transfer.fill(keys, slots)
        if self._is_settled:
            return
        lock = self._lock()
        if lock.is_done:
            self._transfer.finish()
            self._transfer = self._then(*self._payload)
            self._is_settled = True
        elif problem := lock.problem:
            warnings.warn(
                f'{problem}. Rows move as with cache.transfer="staged", slower.', PageLockWarning, stacklevel=2
            )
            self._is_settled = True

    def write_back(self, slots: Tensor, keys: Tensor) -> None:
        self._transfer.write_back(slots, keys)

    def finish(self) -> None:
        self._transfer.finish()

    def discard(self) -> int:
        return self._transfer.discard()


def _check_small_rows(config: CacheConfig, on_cuda: bool) -> None:
    """Raise `ConfigError` where nothing narrows and widens the rows of `cache.host_dtype`."""
    got = f"cache.host_dtype asks for {' and '.join(config.small_types)}"
    if on_cuda and find_spec("triton") is None:
        raise ConfigError(f'{got}, whose kernels need triton, and it is not installed; install it, or set "fp32"')
    if on_cuda and config.transfer == "plain":
        raise ConfigError(f'{got}, and cache.transfer="plain" moves fp32 on a GPU; leave it out, or set "staged"')
    if not on_cuda and config.transfer not in (None, "plain") and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(f'{got}, and cache.transfer="{config.transfer}" moves them by kernels of a GPU; leave it out')
