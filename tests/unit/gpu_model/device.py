"""A model of a GPU on a CPU: tensors that say they are on ``cuda:0``, streams, events, and what goes wrong with them.

Every operation computes at once, on ordinary memory, so its results are right whatever the streams are. What the model
adds is what would happen on a device: which accesses no event orders (a race), which memory is given away while another
stream may still read it, where the host waits, and which operations mix devices. Clocks of streams and events are those
of torch's own CUDA sanitizer.

Not modelled: how long anything takes. FBGEMM's tables and collectives have stand-ins (`fbgemm.py`, `collectives.py`);
other operations of FBGEMM and TorchRec are those of a CPU.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.cuda._sanitizer import StreamSynchronizations
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

CUDA = torch.device("cuda", 0)
HOST = -1  # in place of a stream: what the CPU does

# Operations whose result tells the host something: it waits for their stream.
_WAITED_FOR = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::masked_select",
    "aten::bincount",
    "aten::equal",
    "aten::repeat_interleave",
    "aten::histc",
}
# They only take memory: no kernel runs.
_ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "empty", "empty_like"}
# Operations that sort, and how often they hold what a sort takes inside.
_SORTS = {"aten::sort": 1, "aten::argsort": 1, "aten::_unique2": 2, "aten::unique_dim": 2}
_MOST_SORTED_IN_PLACE = 4096
# Operations that touch rows by number: (table, dim, rows, ...).
_READ_ROWS = {"aten::index_select", "aten::gather"}
_WRITE_ROWS = {"aten::scatter_", "aten::index_fill_", "aten::index_add_", "aten::index_copy_"}


class GpuTensor(torch.Tensor):
    """A tensor on the modelled device. ``inner`` has its values; ``memory`` is the allocation that it views.

    Torch's own code takes it for a CPU tensor: without CUDA it could do nothing with another one.
    """

    inner: Tensor
    memory: Memory
    device = CUDA  # type: ignore[assignment]
    is_cuda = True
    is_cpu = False

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Memory) -> GpuTensor:
        """Shaped like ``inner``."""
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype
        )
        made.inner, made.memory = inner, memory
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Outside of the model nothing can be done with it."""
        raise AssertionError(f"{func} outside of the modelled GPU")

    def record_stream(self, stream: Any) -> None:
        """The memory stays until ``stream`` is done with what it was given so far."""
        self.memory.recorded.add(stream.number)

    def data_ptr(self) -> int:
        """Where it is."""
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """For its address and size."""
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        """The host waits for the numbers."""
        gpu = Gpu.active()
        gpu.launch("tolist", [self], [])
        gpu.wait_for_stream("tolist")
        return self.inner.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """For messages."""
        return f"GpuTensor({tuple(self.shape)}, {self.dtype})"


@dataclass(frozen=True)
class Access:
    """Of a kernel (or, with stream ``HOST``, of the CPU) to some memory."""

    stream: int
    number: int
    what: str


@dataclass
class _Part:
    """What was last done to some memory."""

    written: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)


class Memory:
    """One allocation. With ``row_bytes`` its rows are watched one by one."""

    def __init__(self, stream: int, name: str, row_bytes: int | None = None) -> None:
        self.stream, self.name, self.row_bytes = stream, name, row_bytes
        self.num_bytes = 0  # as an allocator counts it
        self.whole = _Part()
        self.rows: dict[int, _Part] = {}
        self.recorded: set[int] = set()
        self.used: dict[int, int] = {}  # by stream, the number of the last kernel

    def parts(self, rows: Iterable[int] | None) -> list[_Part]:
        """What an access to these rows touches."""
        if self.row_bytes is None:
            return [self.whole]
        if rows is None:
            return [self.whole, *self.rows.values()]
        return [self.whole, *(self.rows.setdefault(row, _Part()) for row in rows)]

    def noted(self, rows: Iterable[int] | None) -> list[_Part]:
        """Where to note it."""
        if self.row_bytes is None or rows is None:
            return [self.whole]
        return [self.rows.setdefault(row, _Part()) for row in rows]


class HeldBytes:
    """Memory as torch's caching allocators hold it at least. What was freed goes back to its pool, and is given out
    again from there only, so what is held is the sum of the pools' peaks. On the device a pool is a stream; of
    page-locked memory a size, a power of two. Views count once, tensors count while they are alive, and what an
    operation takes inside (`_inside`) counts while it runs.

    Attributes:
        live, peaks: by pool.
    """

    def __init__(self) -> None:
        self.live: Counter[int] = Counter()
        self.peaks: Counter[int] = Counter()

    @property
    def held(self) -> int:
        """What the allocator holds at least."""
        return self.peaks.total()

    def begin(self) -> None:
        """Forget peaks: count from what is alive now."""
        self.peaks = Counter(self.live)

    def take(self, pool: int, num_bytes: int) -> None:
        """Count memory until `give`."""
        self.live[pool] += num_bytes
        self.peaks[pool] = max(self.peaks[pool], self.live[pool])

    def give(self, pool: int, num_bytes: int) -> None:
        """The end of it."""
        self.live[pool] -= num_bytes


class Stream:
    """In place of ``torch.cuda.Stream``."""

    _numbers = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, number: int | None = None) -> None:
        self.number = next(self._numbers) if number is None else number
        Gpu.active().clocks.create_stream(self.number)

    def record_event(self, event: Event | None = None) -> Event:
        """What was queued so far."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """What is queued from now on comes after it."""
        Gpu.active().clocks.stream_wait_for_event(self.number, event.number)

    def wait_stream(self, stream: Stream) -> None:
        """What is queued from now on comes after what is queued there."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """The host waits."""
        Gpu.active().wait_for_stream("synchronize", self.number)


class Event:
    """In place of ``torch.cuda.Event``."""

    _numbers = itertools.count(1)

    def __init__(self, **settings: Any) -> None:
        self.number = next(self._numbers)
        Gpu.active().clocks.create_event(self.number)

    def record(self, stream: Stream | None = None) -> None:
        """What was queued on the stream so far."""
        gpu = Gpu.active()
        gpu.clocks.record_state(self.number, gpu.current.number if stream is None else stream.number)

    def wait(self, stream: Stream | None = None) -> None:
        """The stream waits."""
        (stream or Gpu.active().current).wait_event(self)

    def query(self) -> bool:
        """Whether it is over; in this model nobody can rely on that."""
        return False

    def synchronize(self) -> None:
        """The host waits."""
        gpu = Gpu.active()
        gpu.waits[HOST, "an event"] += 1
        gpu.clocks.all_streams_wait_for_event(self.number)


class Gpu:
    """The device: ``with Gpu() as gpu`` everything that asks for CUDA uses it.

    Attributes:
        problems: races, memory given away too early.
        waits: how often the host waited for a stream, by (stream, operation), or with ``HOST`` for an event.
        waits_at: the same but for events, by whose code waits, operation and lines of the package.
        launches: kernels, by (stream, operation).
        sent_bytes: copied from host memory to the device, by the address of the tensor's storage.
        bytes: device memory, by stream.
        pinned: page-locked memory of torch's own, by size.
    """

    _active: Gpu | None = None

    def __init__(self) -> None:
        self.clocks = StreamSynchronizations()
        self.problems: list[str] = []
        self.waits: Counter[tuple[int, str]] = Counter()
        self.waits_at: Counter[str] = Counter()
        self.launches: Counter[tuple[int, str]] = Counter()
        self.sent_bytes: Counter[int] = Counter()
        self.bytes, self.pinned = HeldBytes(), HeldBytes()
        self._memory: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()
        self._host: dict[int, Memory] = {}  # by the address of its storage: page-locked, or written by kernels
        self._locked: set[int] = set()  # addresses of storages
        self._kept: list[Tensor] = []
        self.newest = 0  # number of the newest kernel
        self._stack = contextlib.ExitStack()

    @classmethod
    def active(cls) -> Gpu:
        """The one in use."""
        assert cls._active is not None, "no modelled GPU is in use"
        return cls._active

    def __enter__(self) -> Gpu:
        """Patches what torch would not do without a GPU."""
        Gpu._active = self
        self.current = Stream(number=0)
        for name, stand_in in (
            ("Stream", Stream),
            ("Event", Event),
            ("stream", self.using),
            ("current_stream", lambda device=None: self.current),
        ):
            self._stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        run = torch.autograd._engine_run_backward  # a mode is not there while it handles `backward`

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            with _Functions(self):
                return run(*args, **kwargs)

        self._stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", run_backward))
        self._stack.enter_context(_Functions(self))
        self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *failure: Any) -> None:
        """Everything as before. What is still allocated is not looked at any more."""
        self._stack.close()
        for memory in self._memory.values():
            memory.stream = HOST
        Gpu._active = None

    @contextlib.contextmanager
    def using(self, stream: Stream | None) -> Iterator[None]:
        """In place of ``torch.cuda.stream``."""
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    # -- memory

    def wrap(self, inner: Tensor) -> GpuTensor:
        """The tensor as one on the device: of the allocation that it views, or a new one."""
        address = inner.untyped_storage().data_ptr()
        memory = self._memory.get(address) if address else None
        if memory is None:
            memory = Memory(self.current.number if address else HOST, _where())
            weakref.finalize(memory, _freed, weakref.ref(self), memory.__dict__).atexit = False
            if address:
                self._memory[address] = memory
                memory.num_bytes = inner.untyped_storage().nbytes()
                self.bytes.take(memory.stream, memory.num_bytes)
        return GpuTensor(inner, memory)

    def watch_rows(self, tensor: Tensor) -> None:
        """Watch the rows (dim 0) of a device tensor, or of a host tensor that kernels address, one by one."""
        row_bytes = tensor[:1].numel() * tensor.element_size()
        if isinstance(tensor, GpuTensor):
            tensor.memory.row_bytes = row_bytes
        else:
            self.watch_host(tensor, row_bytes)

    def watch_host(self, tensor: Tensor, row_bytes: int | None = None, is_pinned: bool = False) -> None:
        """Host memory that the device reads or writes by itself, once it is locked; of torch's own (``is_pinned``) it
        is locked from the start, and what kernels do to it must be over when it ends."""
        storage = tensor.untyped_storage()
        if address := storage.data_ptr():  # 0 is where all that is empty is
            self._host[address] = memory = Memory(HOST, _where(), row_bytes)
            if not is_pinned:
                self._kept.append(tensor)
                return
            self.lock(address)
            memory.num_bytes = 1 << (storage.nbytes() - 1).bit_length()
            self.pinned.take(memory.num_bytes, memory.num_bytes)
            weakref.finalize(storage, _unpinned, weakref.ref(self), address, memory).atexit = False

    def lock(self, address: int) -> None:
        """Kernels may address the host memory that begins there."""
        self._locked.add(address)

    def host_memory(self, tensor: Tensor) -> Memory | None:
        """The watched memory that a host tensor views, if any."""
        return self._host.get(tensor.untyped_storage().data_ptr())

    def _locked_memory(self, tensor: Tensor) -> Memory | None:
        return self.host_memory(tensor) if tensor.untyped_storage().data_ptr() in self._locked else None

    # -- what is queued

    def launch(self, what: str, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        """A kernel on the current stream. Each of ``reads`` and ``writes`` is a tensor, or a tensor and its rows."""
        self.newest += 1
        stream = self.current.number
        self.launches[stream, what] += 1
        self.clocks.update_seq_num(stream, self.newest)
        here = Access(stream, self.newest, f"{what} ({_where()})")
        for given in writes:
            memory, rows = self._place(given)
            for part in memory.parts(rows):
                self._check(here, memory, part.written, "writes what was written by")
                for access in part.reads.values():
                    self._check(here, memory, access, "writes what is read by")
            for part in memory.noted(rows):
                part.written = here
                part.reads.clear()
            memory.used[stream] = self.newest
        for given in reads:
            memory, rows = self._place(given)
            for part in memory.parts(rows):
                self._check(here, memory, part.written, "reads what was written by")
            for part in memory.noted(rows):
                part.reads[stream] = here
            memory.used[stream] = self.newest

    def touch_on_host(self, what: str, tensor: Tensor, writes: bool) -> None:
        """The CPU reads or writes watched memory: what the device does to it must be over, and seen to be."""
        memory = self.host_memory(tensor)
        if memory is None:
            return
        for part in memory.parts(_view_rows(tensor, memory)):
            for access in [part.written, *(part.reads.values() if writes else ())]:
                if access is not None and self.clocks.host_sync_state.get(access.stream, -1) < access.number:
                    doing = "writes" if writes else "reads"
                    self.problems.append(f"the CPU ({what}, {_where()}) {doing} {memory.name} before {access.what}")

    def wait_for_stream(self, what: str, stream: int | None = None) -> None:
        """The host waits until a stream is done."""
        stream = self.current.number if stream is None else stream
        self.waits[stream, what] += 1
        self.waits_at[f"{_who()}: {what} ({_where()})"] += 1
        self.clocks.all_streams_wait_for_stream(stream)

    def waits_for(self, stream: int) -> int:
        """How often the host waited for it."""
        return sum(count for (waited, _), count in self.waits.items() if waited == stream)

    def host_has_seen(self, number: int, stream: int = 0) -> bool:
        """Whether the host has waited for that kernel."""
        return self.clocks.host_sync_state.get(stream, -1) >= number

    def _place(self, given: Any) -> tuple[Memory, Iterable[int] | None]:
        tensor, rows = given if isinstance(given, tuple) else (given, None)
        memory = tensor.memory if isinstance(tensor, GpuTensor) else self._locked_memory(tensor)
        assert memory is not None, f"a kernel addresses host memory that is not locked ({_where()})"
        inner = tensor.inner if isinstance(tensor, GpuTensor) else tensor
        if rows is None or memory.row_bytes is None:
            return memory, _view_rows(inner, memory)
        rows = rows.inner if isinstance(rows, GpuTensor) else rows
        size = inner.element_size()
        first, step = inner.storage_offset() * size, inner.stride(0) * size
        return memory, {(first + int(row) * step) // memory.row_bytes for row in rows.flatten().tolist()}

    def _check(self, here: Access, memory: Memory, before: Access | None, how: str) -> None:
        if before is None or self.clocks.is_ordered_after(here.stream, before.number, before.stream):
            return
        self.problems.append(
            f"stream {here.stream}: {here.what} {how} {before.what} on stream {before.stream}, in {memory.name}"
        )

    def _free(self, memory: dict[str, Any]) -> None:
        """The allocator gives the memory to the next kernel of its stream."""
        owner = memory["stream"]
        self.bytes.give(owner, memory["num_bytes"])
        for stream, number in memory["used"].items():
            if owner in (HOST, stream) or stream in memory["recorded"]:
                continue
            if not self.clocks.is_ordered_after(owner, number, stream):
                self.problems.append(
                    f"memory of stream {owner} ({memory['name']}) is given away while stream {stream} uses it"
                )

    def _unpin(self, address: int, memory: Memory) -> None:
        """Torch gives the memory to whoever asks for some next. It waits for its own copies, and for no kernel."""
        self.pinned.give(memory.num_bytes, memory.num_bytes)
        if self._host.get(address) is memory:
            del self._host[address]
            self._locked.discard(address)
        for part in (memory.whole, *memory.rows.values()):
            for access in filter(None, (part.written, *part.reads.values())):
                if not access.what.startswith("copy") and not self.host_has_seen(access.number, access.stream):
                    self.problems.append(f"page-locked memory ({memory.name}) is given away before {access.what}")


def _unpinned(gpu: weakref.ref[Gpu], address: int, memory: Memory) -> None:
    alive = gpu()
    if alive is not None and Gpu._active is alive:
        alive._unpin(address, memory)


def _freed(gpu: weakref.ref[Gpu], memory: dict[str, Any]) -> None:
    alive = gpu()
    if alive is not None and Gpu._active is alive:
        alive._free(memory)


def _view_rows(tensor: Tensor, memory: Memory) -> Iterable[int] | None:
    """Rows of a view of watched memory; None for everything."""
    if memory.row_bytes is None or not tensor.is_contiguous():
        return None
    first = tensor.storage_offset() * tensor.element_size()
    total = tensor.numel() * tensor.element_size()
    return range(first // memory.row_bytes, -(-(first + total) // memory.row_bytes))


def _where() -> str:
    """The innermost lines of the package's code."""
    frame: FrameType | None = sys._getframe(1)
    found: list[str] = []
    while frame is not None and len(found) < 3:
        name = _own_file(frame.f_code)
        if name:
            found.append(f"{name}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "a test"


def _who() -> str:
    """Whose code does what is done: "embershard", "cache" (its room of that name) or "torchrec"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _own_file(frame.f_code):
            return "cache" if "/embershard/cache/" in frame.f_code.co_filename else "embershard"
        if "/torchrec/" in frame.f_code.co_filename:
            return "torchrec"
        frame = frame.f_back
    return "a test"


@functools.cache
def _own_file(code: CodeType) -> str:
    """Name of the file, if it is one of the package's."""
    folder, _, name = code.co_filename.rpartition("/")
    return name if "/embershard" in folder and "/tests" not in folder else ""


def _leaves(value: Any) -> list[Any]:
    """What is in (nested) arguments of an operation; torch's own function for it takes most of a test's time."""
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, list | tuple) else [value]


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same with every leaf replaced."""
    if isinstance(value, dict):
        return {name: _mapped(function, each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([_mapped(function, each) for each in value])
    return function(value)


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class _Functions(TorchFunctionMode):
    """Torch would refuse these without a GPU, before any operation is dispatched."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        pinned = kwargs.pop("pin_memory", False)
        device = kwargs.get("device")
        if func in (torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu):
            target = _target(func, args, kwargs)
            if target is not None and _is_cuda(target) != isinstance(args[0], GpuTensor):
                return self._move(*args, **kwargs)
            if isinstance(args[0], GpuTensor):  # it stays where it is
                dtypes = [each for each in [*args[1:], *kwargs.values()] if isinstance(each, torch.dtype)]
                return args[0].to(*dtypes) if dtypes else args[0]
        if _is_cuda(device) and not any(isinstance(each, GpuTensor) for each in _leaves(args)):
            kwargs["device"] = torch.device("cpu")
            needs_gradients = kwargs.pop("requires_grad", False)
            made = func(*args, **kwargs)
            on_gpu, name = self._gpu.wrap(made).requires_grad_(needs_gradients), getattr(func, "__name__", str(func))
            if name not in _ALLOCATIONS:
                self._gpu.launch(name, [], [on_gpu])
            if func is torch.tensor:  # made from numbers in host memory
                self._gpu.wait_for_stream("copy to the device")
            return on_gpu
        made = args[0].clone() if func is torch.Tensor.pin_memory else func(*args, **kwargs)
        if pinned or func is torch.Tensor.pin_memory:
            self._gpu.watch_host(made, is_pinned=True)
        return made

    def _move(self, tensor: Tensor, *rest: Any, non_blocking: bool = False, **named: Any) -> Tensor:
        """To the device, or from it."""
        gpu = self._gpu
        dtype = next((each for each in [*rest, *named.values()] if isinstance(each, torch.dtype)), tensor.dtype)
        moved = torch.empty(tensor.shape, dtype=dtype).copy_(_inner(tensor).detach())
        if not moved.numel():  # torch copies nothing, and waits for nothing
            return moved if isinstance(tensor, GpuTensor) else gpu.wrap(moved)
        if isinstance(tensor, GpuTensor):
            assert not non_blocking, f"a copy to the CPU that nobody waits for ({_where()})"
            gpu.launch("copy to the host", [tensor], [])
            gpu.wait_for_stream("copy to the host")
            return moved
        gpu.sent_bytes[tensor.untyped_storage().data_ptr()] += moved.nbytes
        made, is_locked = gpu.wrap(moved), gpu.host_memory(tensor) is not None
        gpu.launch("copy to the device", [tensor] if is_locked else [], [made])
        if not (is_locked and non_blocking):
            gpu.wait_for_stream("copy to the device")
        return made


def _target(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device | None:
    """The device that a tensor is wanted on, if one is named."""
    if func is not torch.Tensor.to:
        return CUDA if func is torch.Tensor.cuda else torch.device("cpu")
    for each in [*args[1:], *kwargs.values()]:
        if isinstance(each, torch.device | str):
            return torch.device(each)
        if isinstance(each, Tensor):
            return each.device
    return None


class _Operations(TorchDispatchMode):
    """Every operation on tensors."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in _leaves((args, kwargs)) if isinstance(each, Tensor)]
        on_gpu = [each for each in tensors if isinstance(each, GpuTensor)]
        name = func._schema.name
        if not on_gpu:
            return self._on_host(func, name, args, kwargs)
        if name == "aten::copy_":
            return self._copy(args, kwargs)
        mixed = [each for each in tensors if not isinstance(each, GpuTensor) and each.dim()]
        assert not mixed, f"{name} mixes devices ({_where()}): {on_gpu} with host tensors {[m.shape for m in mixed]}"
        return self._on_gpu(func, name, args, kwargs)

    def _on_host(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        for is_written, value in _arguments(func, args, kwargs):
            for tensor in _leaves(value):
                if isinstance(tensor, Tensor) and not _is_view(func):
                    self._gpu.touch_on_host(name, tensor, is_written)
        return func(*args, **kwargs)

    def _on_gpu(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        gpu = self._gpu
        found = func(*_mapped(_inner, args), **_mapped(_inner, kwargs))
        # An operation that writes to one of its arguments returns that argument.
        made = _mapped(lambda each: gpu.wrap(each) if isinstance(each, Tensor) else each, found)
        if not _is_view(func) and name not in _ALLOCATIONS:
            reads, writes = _accesses(func, name, args, kwargs)
            gpu.launch(name, reads, writes or [each for each in _leaves(made) if isinstance(each, GpuTensor)])
            gpu.bytes.take(gpu.current.number, inside := _inside(name, args))
            gpu.bytes.give(gpu.current.number, inside)
            if (name in _WAITED_FOR or _has_mask(name, args)) and kwargs.get("output_size") is None:
                gpu.wait_for_stream(name)
        for is_written, value in _arguments(func, args, kwargs):
            if is_written and isinstance(value, GpuTensor) and isinstance(made, Tensor):
                return value
        return made

    def _copy(self, args: Any, kwargs: Any) -> Any:
        """Between the devices, or on one."""
        gpu = self._gpu
        target, source = args[0], args[1]
        non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        _inner(target).copy_(_inner(source))
        if not target.numel():  # nothing is copied, and nobody waits
            return target
        host = [each for each in (target, source) if not isinstance(each, GpuTensor)]
        locked = [each for each in host if gpu.host_memory(each) is not None]
        to_host = not isinstance(target, GpuTensor)
        if to_host:
            gpu.launch("copy to the host", [source], locked)
        else:
            if host:
                gpu.sent_bytes[source.untyped_storage().data_ptr()] += _inner(target).nbytes
            gpu.launch("copy", locked if host else [source], [target])
        if host and not (locked and non_blocking):
            gpu.wait_for_stream("copy to the host" if to_host else "copy to the device")
        return target


def _inside(name: str, args: Any) -> int:
    """Bytes that an operation takes beside its results, in torch's CUDA code: to sort more than 4096 numbers, the
    numbers of their places, and a second copy of both, which is CUB's; `unique` sorts, and keeps what it sorted."""
    if name in _SORTS and args[0].numel() > _MOST_SORTED_IN_PLACE:
        return int(args[0].numel() * (8 + args[0].element_size() + 8)) * _SORTS[name]
    return 0


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, GpuTensor) else value


def _arguments(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[bool, Any]]:
    """Every argument, and whether the operation writes to it."""
    names, written = _declared(func)
    yield from zip(written, args, strict=False)
    if kwargs:
        yield from ((write, kwargs[name]) for name, write in zip(names, written, strict=True) if name in kwargs)


@functools.cache
def _declared(func: Any) -> tuple[list[str], list[bool]]:
    """Names of an operation's arguments, and which of them it writes to."""
    arguments = func._schema.arguments
    return [each.name for each in arguments], [bool(each.alias_info and each.alias_info.is_write) for each in arguments]


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether it makes another view, without any kernel."""
    returned = [each.alias_info for each in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in returned)


def _has_mask(name: str, args: Any) -> bool:
    """Indexing by True and False: the host must know how many."""
    if name not in ("aten::index", "aten::index_put_", "aten::_index_put_impl_"):
        return False
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _accesses(func: Any, name: str, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """What a kernel reads and writes."""
    reads: list[Any] = []
    writes: list[Any] = []
    rows = _rows(name, args)
    for is_written, value in _arguments(func, args, kwargs):
        for tensor in _leaves(value):
            if isinstance(tensor, GpuTensor):
                is_table = tensor is args[0]
                given = (tensor, rows) if is_table and rows is not None else tensor
                (writes if is_written else reads).append(given)
    return reads, writes


def _rows(name: str, args: Any) -> Tensor | None:
    """The rows of the first argument that are touched, where they are given by number."""
    if name in _READ_ROWS | _WRITE_ROWS and args[1] == 0:
        return args[2]
    if name in ("aten::index", "aten::index_put_", "aten::_index_put_impl_"):
        indices = args[1]
        if len(indices) == 1 and indices[0].dtype == torch.int64:
            return indices[0]
    return None


def out_of_sight() -> Any:
    """Inside, the model looks away: what a stand-in for a kernel does by itself."""
    return _disable_current_modes()
