"""Training through the look-ahead pipeline on the modelled GPU: the package's pipeline, module inputs, pools, caches
and transfers. Left out are FBGEMM, whose table is stood in for by rows that are read and written, and collectives."""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor, nn
from torchrec.distributed.embedding_types import KJTList
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from embershard.cache import loops
from embershard.cache.config import CacheConfig
from embershard.cache.gpu import launch as kernel_launch
from embershard.cache.gpu import small_rows as small_kernels
from embershard.cache.gpu.small_rows import SmallSlots
from embershard.cache.homes import memory as homes
from embershard.cache.homes import quantised
from embershard.cache.homes.quantised import SmallStagedTransfer
from embershard.cache.homes.small_rows import SmallRows
from embershard.cache.rows import lazy_rows, memory, page_lock
from embershard.cache.rows.choose_transfer import WhenLocked
from embershard.cache.rows.initial_weights import ShardWeights
from embershard.cache.rows.transfer import StagedTransfer
from embershard.cache.rows.uva_transfer import RowKernel
from embershard.cache.tickets import Ticket
from embershard.pipeline.look_ahead import LookAheadPipeline
from embershard.pipeline.pipelined_forward import PipelinedForward
from embershard.pipeline.worker import CacheWorker
from embershard.sharding.torchrec import embeddings, modules, row_updates
from embershard.sharding.torchrec.counter_init import CounterInit
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.spec import SPEC_KEY, CacheSpec
from tests.unit.cache.torch_operations import torch_planning
from tests.unit.gpu_model.device import CUDA, HOST, Event, Gpu, GpuTensor, Stream, out_of_sight

DIM = 4
BATCH = 8
ROW = 4 * DIM + 4  # bytes of its weights and its state


@dataclass(frozen=True)
class Setting:
    """Of a run. ``locked_at``: the step before which host memory is locked, None for never; ``between``: what happens
    after a step, by its number: "flush", "evaluate", "state" or "stats". ``evaluated`` and ``abandoned`` are steps
    whose batch is only read: without gradients, or by a forward that no backward follows. ``worker``: a thread plans,
    which in this model has done so "at once", before the step's kernels are queued, or only "at the end". The first and
    the last ``plain`` steps train without the pipeline, and each batch's rows are prefetched on a stream of their own,
    as TorchRec's pipeline does. ``elsewhere``: the module's cached tables are on other ranks. After step ``left_after``
    the pipeline is detached, and nothing follows. ``buffer_bytes`` are those of staged copies. ``lazy``: host rows are
    made when they are first touched, two at a time. ``small``: their type in host memory, "int8" or "fp16".
    ``kernels``: Triton's interpreter runs the planning kernels, slowly; otherwise torch's operations do their work.
    ``filed``: host rows are in a file, but for so many; ``is_quick``: events are over when the host asks."""

    rows: tuple[int, ...] = (60, 5, 40)
    num_slots: int = 44
    steps: int = 13
    lookahead: int = 6
    prefetch: int = 2
    transfer: str | None = None
    slot_map: str = "array"
    policy: str = "lookahead"
    overflow: str = "raise"
    locked_at: int | None = 0
    between: dict[int, str] = field(default_factory=dict)
    worker: str | None = None
    evaluated: tuple[int, ...] = ()
    abandoned: tuple[int, ...] = ()
    plain: int = 0
    elsewhere: bool = False
    left_after: int | None = None
    buffer_bytes: int = 8 << 20
    kernels: bool = False
    lazy: bool = False
    small: Any = None
    filed: int | None = None
    is_quick: bool = False

    @property
    def full(self) -> Tensor:
        """Keys of small rows that stay float32."""
        return torch.arange(0, sum(self.rows) if self.small == "int8" else 0, 6)


class _Slots(nn.Module):
    """In place of FBGEMM's table: a weight and a state for every slot."""

    def __init__(self, dim: int, table_of_feature: list[int], device: torch.device, *rest: Any) -> None:
        super().__init__()
        self._dim, self._device = dim, device
        self.payload: list[Tensor] = []

    def set_pinned_slots(self, pinned_of_table: dict[int, tuple[int, int]]) -> None:
        """As :class:`SlotTable` on a GPU."""

    def resize(self, num_slots: int) -> list[Tensor]:
        """As :class:`SlotTable`."""
        old = self.payload
        self.payload = [torch.zeros((num_slots + 1, self._dim), device=self._device)]
        self.payload.append(torch.zeros(num_slots + 1, device=self._device))
        for new_rows, old_rows in zip(self.payload, old, strict=False):
            new_rows[: old_rows.shape[0]] = old_rows
            memory.record_stream(old_rows)
        for rows in self.payload:
            Gpu.active().watch_rows(rows)
        return self.payload

    def state_specs(self) -> list[tuple[str, torch.Size, torch.dtype]]:
        """As :class:`SlotTable`."""
        return [("momentum1", torch.Size([]), torch.float32)]

    def end_reading(self) -> None:
        """As :class:`SlotTable`."""

    def forward(self, slots: Tensor, offsets: Tensor, **arguments: Any) -> Tensor:
        """As :class:`SlotTable`: the sum over all ids."""
        return self.payload[0].data.index_select(0, slots).sum() + offsets.sum()

    def read(self, rows: Tensor, indices: Tensor, offsets: Tensor, **arguments: Any) -> Tensor:
        """As :class:`SlotTable`."""
        return rows.index_select(0, indices).sum() + offsets.sum()


class _Context(Multistreamable):
    def record_stream(self, stream: Any) -> None:
        """It has no tensors."""


class _Worker:
    """In place of the thread beside the training: the model knows one thread only."""

    is_awaited = False

    def __init__(self, at_once: bool) -> None:
        self._at_once, self._job = at_once, _nothing
        self.failure: Exception | None = None

    def start(self, job: Callable[[], None]) -> None:
        """As :class:`CacheWorker`."""
        self._job = job
        if self._at_once:
            self.join()

    def join(self) -> float:
        """As :class:`CacheWorker`."""
        job, self._job = self._job, _nothing
        with torch.enable_grad():  # a thread has its own mode
            try:
                job()
            except Exception as error:
                self.failure = error
        return 0.0

    check = CacheWorker.check


def _nothing() -> None:
    pass


class _Arriving:
    """In place of an all-to-all: the ids are copied when it begins, when its sizes are there, and when it is over."""

    def __init__(self, features: KeyedJaggedTensor, waits: int = 2) -> None:
        lengths, values = features.lengths().clone(), features.values().clone()
        self._features, self._waits = KeyedJaggedTensor(features.keys(), values, lengths=lengths), waits

    def wait(self) -> Any:
        then = _Arriving(self._features, self._waits - 1)
        return then if self._waits > 1 else KJTList([then._features])


class Module(modules.CachedModule, nn.Module):
    """In place of TorchRec's sharded module, with one pool, on one rank."""

    def __init__(self, pool: CachedTableBatchedEmbeddings, rows: tuple[int, ...], elsewhere: bool = False) -> None:
        super().__init__()
        self.pool, self._elsewhere = pool, elsewhere
        kernel = SimpleNamespace(emb_module=None if elsewhere else pool)
        self._lookups = [SimpleNamespace(_emb_modules=[kernel], _feature_splits=[len(rows)])]
        self._rows_by_feature = {f"f{t}": (f"t{t}", num_rows) for t, num_rows in enumerate(rows)}
        self.trained: Any = None

    def create_context(self) -> _Context:
        """As TorchRec's."""
        return _Context()

    def preprocess_input(self, args: Any, kwargs: Any) -> Any:
        """As TorchRec's."""
        return args, kwargs

    def input_dist(self, context: Any, features: KeyedJaggedTensor) -> Any:
        """As TorchRec's, with copies in place of the all-to-alls."""
        return _Arriving(features)

    def compute_and_output_dist(self, context: Any, received: KJTList) -> Tensor:
        """The forward; with gradients it leaves a backward behind."""
        (features,) = received[0].split(self._lookups[0]._feature_splits)  # as TorchRec's lookup does
        if self._elsewhere:
            return features.values().sum()  # as tables in the GPU's own memory read it
        return self.pool(features.values(), features.offsets())

    def keep(self, cache: Any, ticket: Ticket, output: Tensor, zeros: Any) -> None:
        """In place of a hook on autograd's node: :meth:`backward` releases the ticket."""
        self.trained = ticket

    def backward(self, step: int) -> None:
        """Train the rows: ``weight = weight * 0.5 + step``, ``state += 1``, once for every row."""
        ticket, self.trained = self.trained, None
        if self._elsewhere:
            return
        slots = ticket.slots
        weights, states = (rows.data for rows in self.pool.slots.payload)
        weights[slots] = weights.index_select(0, slots) * 0.5 + float(step)
        states.scatter_(0, slots, states.gather(0, slots) + 1)
        self.pool.cache.release(ticket)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Without a pipeline."""
        return self.compute_and_output_dist(None, KJTList([features.to(CUDA)]))


def batches(setting: Setting, seed: int = 0) -> list[KeyedJaggedTensor]:
    """Ragged bags over scattered, skewed rows; in page-locked memory."""
    found = []
    for step in range(setting.steps):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        lengths = torch.randint(0, 4, (len(setting.rows) * BATCH,), generator=generator)
        counts = lengths.view(len(setting.rows), BATCH).sum(1).tolist()
        values = [
            (torch.rand(count, generator=generator) ** 2 * rows).long() * 7 % rows
            for count, rows in zip(counts, setting.rows, strict=True)
        ]
        ids = torch.cat(values).pin_memory()
        found.append(KeyedJaggedTensor([f"f{t}" for t in range(len(setting.rows))], ids, lengths=lengths.pin_memory()))
    return found


@contextlib.contextmanager
def modelled(setting: Setting) -> Iterator[tuple[Gpu, Module, threading.Event]]:
    """A GPU with one pool on it; the event lets the host memory be locked."""
    may_lock = threading.Event()
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(Gpu())

        def lock(device: torch.device, address: int, size: int) -> None:
            may_lock.wait()
            gpu.lock(address)

        for owner, name, stand_in in (
            (embeddings, "SlotTable", _Slots),
            (kernel_launch, "_run", _interpret if setting.kernels else compute_launch),
            (page_lock, "cpus_beside", lambda device: ()),
            (homes, "StagedTransfer", partial(StagedTransfer, buffer_bytes=setting.buffer_bytes)),
            (quantised, "SmallStagedTransfer", partial(SmallStagedTransfer, buffer_bytes=setting.buffer_bytes)),
            (page_lock, "lock_for_cuda", lock),
            (page_lock, "unlock_for_cuda", lambda device, address: None),
            (RowKernel, "_launch", _copy_rows),
            (SmallSlots, "attach", watch_marks),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))

        if not setting.kernels:
            stack.enter_context(torch_planning())
        if setting.is_quick:
            stack.enter_context(mock.patch.object(Event, "query", _is_over))

        def end_locking() -> None:
            may_lock.set()
            for thread in threading.enumerate():  # it looks each block's `lock` up: the next model has another one
                if thread.name == "embershard-page-lock":
                    thread.join()

        stack.callback(end_locking)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model = Module(_pool(setting, gpu, folder), setting.rows, setting.elsewhere)
        stack.enter_context(mock.patch.object(row_updates, "release_after_backward", model.keep))
        yield gpu, model, may_lock


def _is_over(event: Event) -> bool:
    """In place of `Event.query`: the host sees what was queued before the event, which it did not wait for."""
    Gpu.active().clocks.all_streams_wait_for_event(event.number)
    return True


def _pool(setting: Setting, gpu: Gpu, folder: str) -> CachedTableBatchedEmbeddings:
    config = CacheConfig(
        ratio=setting.num_slots / sum(setting.rows),
        policy=setting.policy,  # type: ignore[arg-type]
        transfer=setting.transfer,  # type: ignore[arg-type]
        slot_map=setting.slot_map,  # type: ignore[arg-type]
        overflow=setting.overflow,  # type: ignore[arg-type]
        host_dtype=setting.small or "fp32",
        full_rows=0.0 if setting.small == "int8" else None,
        **({} if setting.filed is None else {"host": "file", "host_dir": folder, "host_bytes": setting.filed * ROW}),
    )
    is_made = setting.lazy or setting.small is not None or setting.filed is not None
    init = CounterInit(5, {f"t{t}": (0.0, 1.0) for t in range(len(setting.rows))}) if is_made else None
    spec = CacheSpec(config, config.policy_for(False), None, 0, sum(setting.rows) * DIM, counter_init=init)
    tables = [
        SimpleNamespace(
            name=f"t{t}",
            local_rows=rows,
            local_cols=DIM,
            embedding_dim=DIM,
            num_embeddings=rows,
            feature_names=[f"f{t}"],
            fused_params={},
            local_metadata=None,
        )
        for t, rows in enumerate(setting.rows)
    ]
    grouped: Any = SimpleNamespace(embedding_tables=tables, data_type=DataType.FP32, fused_params={SPEC_KEY: spec})
    with mock.patch.object(lazy_rows, "BLOCK_BYTES", 2 * 4 * DIM):
        pool = CachedTableBatchedEmbeddings(grouped, PoolingMode.SUM, CUDA)
    row_scores = getattr(pool.cache.state.scores, "_row_scores", None)
    if row_scores is not None:
        gpu.watch_rows(row_scores)
    generator = torch.Generator().manual_seed(5)
    pool.host.mark(setting.full)
    for rows in pool.host.parts if setting.filed is None else ():
        if not is_made:
            rows.data.copy_(torch.rand(rows.shape, generator=generator))
        gpu.watch_rows(rows)
    return pool


def initial_rows(setting: Setting, model: Module) -> list[Tensor]:
    """Weights and states before training, without a touch of the pool's own."""
    if setting.small is not None:
        return [small_rows(setting).read(torch.arange(sum(setting.rows))), torch.zeros(sum(setting.rows))]
    if not setting.lazy and setting.filed is None:
        return [rows.clone() for rows in model.pool.host.parts]
    weights, states = torch.zeros(sum(setting.rows), DIM), torch.zeros(sum(setting.rows))
    for t, part in enumerate(weights.split(list(setting.rows))):
        ShardWeights(f"t{t}", 5, DIM, 0.0, 1.0).write(part)
    return [weights, states]


def small_rows(setting: Setting) -> SmallRows:
    """Others than the pool's, to round on a CPU."""
    shards = [ShardWeights(f"t{t}", 5, DIM, 0.0, 1.0) for t in range(len(setting.rows))]
    return SmallRows(
        setting.small, setting.rows, shards, DIM, setting.full, lambda numel, dtype: torch.zeros(numel, dtype=dtype)
    )


def host_rows(model: Module) -> list[Tensor]:
    """Weights and states in the end."""
    host = model.pool.host
    if host.views.are_rows:
        model.pool.flush()
        return host.parts
    model.pool.cache.write_back()
    return host.select(torch.arange(host.num_rows))


def _copy_rows(self: RowKernel, targets: Any, sources: Any, target_rows: Tensor, source_rows: Tensor) -> None:
    """In place of the kernel's launch."""
    if not target_rows.numel():
        return
    of, to = source_rows.inner, target_rows.inner  # type: ignore[attr-defined]
    with out_of_sight():
        for target, source in zip(targets, sources, strict=True):
            _plain(target)[to] = _plain(source)[of]
    Gpu.active().launch(
        "copy rows",
        [*((source, source_rows) for source in sources), target_rows, source_rows],
        [(target, target_rows) for target in targets],
    )


def _interpret(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """In place of a launch of a planning kernel."""
    with out_of_sight():
        kernel[grid](*map(_plain, arguments), **constants)
    _note_launch(kernel, arguments)


def compute_launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
    """The same, by a compiled loop where the interpreter would take most of the time."""
    if kernel.fn.__name__ != "_count_plan":
        _interpret(kernel, grid, arguments, constants)
        return
    with out_of_sight():
        *parts, ends, table_of_feature, table_ends, values = (_plain(each).numpy() for each in arguments[:9])
        lengths, second = np.diff(ends, prepend=0), arguments[16]
        loops.count_plan(loops.Counters(values), table_of_feature, lengths, table_ends, *parts, second != -1)
    _note_launch(kernel, arguments)


def _note_launch(kernel: Any, arguments: tuple[Any, ...]) -> None:
    tensors = dict(zip(kernel.arg_names, arguments, strict=False))
    tensors = {name: each for name, each in tensors.items() if isinstance(each, Tensor)}
    is_of_small_rows = kernel.fn.__module__ == small_kernels.__name__
    if not is_of_small_rows:  # their launch checks that host memory is locked
        elsewhere = [name for name, each in tensors.items() if not isinstance(each, GpuTensor)]
        assert not elsewhere, f"{kernel.fn.__name__} mixes devices: {', '.join(elsewhere)} of the CPU"
    rows = {name: tensors[_ROWS_OF[name]] for name in tensors if is_of_small_rows and name in _ROWS_OF}
    touched = {name: (each, rows[name]) if name in rows else each for name, each in tensors.items()}
    written = written_by(kernel)
    Gpu.active().launch(
        kernel.fn.__name__,
        [each for name, each in touched.items() if name not in written],
        [each for name, each in touched.items() if name in written],
    )


#: Of kernels of small rows: which argument tells the rows of another one that are touched.
_ROWS_OF = {"rows": "places", "marks": "places", **dict.fromkeys(("codes", "words", "steps", "halfs"), "keys")}


def watch_marks(self: SmallSlots, rows: Tensor) -> None:
    """In place of `SmallSlots.attach`."""
    _attach(self, rows)
    if rows.is_cuda:
        Gpu.active().watch_rows(self._marks)


_attach = SmallSlots.attach


@cache
def written_by(kernel: Any) -> frozenset[str]:
    """The arguments that a kernel writes to, itself or by a function that it calls."""
    function = kernel.fn
    source = inspect.getsource(function)
    was_enabled = gc.isenabled()
    gc.disable()  # a collection may end a pool, whose kernels are looked at here: Python cannot parse within a parse
    try:
        nodes = list(ast.walk(ast.parse(source)))
    finally:
        if was_enabled:
            gc.enable()
    pointers = {
        node.targets[0].id: node.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    arguments = inspect.signature(function).parameters

    def base(pointer: ast.expr) -> str:
        while isinstance(pointer, ast.BinOp):
            pointer = pointer.left
        name = pointer.id if isinstance(pointer, ast.Name) else ""
        return base(pointers[name]) if name in pointers and name not in arguments else name

    found = set()
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        callee = ast.unparse(call.func)
        if callee == "tl.store" or callee.startswith("tl.atomic_"):
            found.add(base(call.args[0]))
        elif hasattr(helper := function.__globals__.get(callee), "fn"):
            of_helper = zip(inspect.signature(helper.fn).parameters, call.args, strict=False)
            found |= {base(argument) for name, argument in of_helper if name in written_by(helper)}
    return frozenset(found & set(arguments))


def _plain(tensor: Any) -> Tensor:
    return tensor.inner if isinstance(tensor, GpuTensor) else tensor


@dataclass
class Waits:
    """Where the host waited, after the first step. ``late`` are the steps whose forward was queued only when the step
    before was over on the device; ``for_training`` is how often it waited for the stream that trains, ``for_events``
    for an event."""

    late: list[int] = field(default_factory=list)
    for_training: int = 0
    for_events: int = 0


def train(setting: Setting, model: Module, may_lock: threading.Event) -> Waits:
    """Every batch once."""
    data, first, last = batches(setting), setting.plain, setting.steps - setting.plain
    _train_plainly(setting, model, data, range(first))
    waits = _train_through_pipeline(setting, model, may_lock, data, range(first, last))
    _train_plainly(setting, model, data, range(last, setting.steps))
    return waits


def _train_through_pipeline(
    setting: Setting, model: Module, may_lock: threading.Event, data: list[KeyedJaggedTensor], steps: range
) -> Waits:
    loop, iterator = _pipeline(setting, model), iter(data[steps.start : steps.stop])
    gpu, waits, newest = Gpu.active(), Waits(), 0
    for step in steps:
        if step == setting.locked_at:
            may_lock.set()
            if isinstance(model.pool.cache.transfer, WhenLocked):
                model.pool.cache.transfer.wait_until_locked()
        gradients = torch.enable_grad() if step not in setting.evaluated else torch.no_grad()
        with gradients, _step(loop, iterator) as features:
            if step != steps.start and gpu.host_has_seen(newest):
                waits.late.append(step)
            elif step == steps.start:
                waits.for_training, waits.for_events = -gpu.waits_for(0), -gpu.waits_for(HOST)
            model(features)
            features.values().sum()  # as the rest of a model reads its batch
            if step in setting.abandoned:
                model.trained = None
            elif step not in setting.evaluated:
                model.backward(step)
            newest = gpu.newest
        _between(setting.between.get(step), model, data)
        if step == setting.left_after:
            loop.detach()
            return waits
    waits.for_training += gpu.waits_for(0)
    waits.for_events += gpu.waits_for(HOST)
    with contextlib.suppress(StopIteration), loop.step(iterator):
        raise AssertionError("a batch too many")
    loop.detach()
    return waits


@contextlib.contextmanager
def _step(loop: LookAheadPipeline, iterator: Iterator[KeyedJaggedTensor]) -> Iterator[KeyedJaggedTensor]:
    """The next step, again and again where copies fail."""
    with contextlib.ExitStack() as stack:
        features = None
        while features is None:
            with contextlib.suppress(OSError):
                features = stack.enter_context(loop.step(iterator))
        yield features


def _train_plainly(setting: Setting, model: Module, data: list[KeyedJaggedTensor], steps: range) -> None:
    prefetching, ahead = Stream(priority=-1), None
    for step in steps:
        features = ahead or data[step].to(CUDA)
        training = torch.cuda.current_stream(CUDA)
        training.wait_stream(prefetching)
        model.compute_and_output_dist(None, KJTList([features]))
        if step + 1 < steps.stop:
            ahead = data[step + 1].to(CUDA)
            prefetching.wait_stream(training)  # the forward's rows are read; the backward comes
            with torch.cuda.stream(prefetching):
                ahead.record_stream(prefetching)
                model.pool.prefetch(ahead.values(), ahead.offsets())
            ahead.record_stream(training)
        model.backward(step)
        _between(setting.between.get(step), model, data)


def _pipeline(setting: Setting, model: Module) -> LookAheadPipeline:
    def forwards(_: Any, batch: Any, step: Any, features: Any) -> list[PipelinedForward]:
        given = SimpleNamespace(build_args_kwargs=lambda features: ([features], {}))
        forward: Any = PipelinedForward("module", given, model, step)  # type: ignore[arg-type]
        model.forward = forward  # type: ignore[method-assign]
        return [forward]

    loop = LookAheadPipeline(model, None, CUDA, setting.lookahead, setting.prefetch)  # type: ignore[arg-type]
    loop._inputs.forwards = forwards(None, None, loop._inputs.step, None)
    loop._inputs._handle = SimpleNamespace(remove=lambda: None)
    loop._worker = None if setting.worker is None else _Worker(setting.worker == "at once")  # type: ignore[assignment]
    return loop


def _between(what: str | None, model: Module, data: list[KeyedJaggedTensor]) -> None:
    if what == "flush":
        host_rows(model)
    elif what == "evaluate":
        with torch.no_grad():
            model(data[0])
    elif what == "state":
        _ = [rows.clone() for rows in host_rows(model)]  # as a checkpoint reads them
    elif what == "stats":
        model.pool.stats()
    else:
        assert what is None, what


def expected(setting: Setting, initial: list[Tensor]) -> list[Tensor]:
    """The rows after training without a cache."""
    weights, states = (rows.clone() for rows in initial)
    rounding = None if setting.small is None else small_rows(setting)
    offsets = torch.tensor([sum(setting.rows[:t]) for t in range(len(setting.rows))])
    for step, features in enumerate(batches(setting)):
        if step in setting.evaluated + setting.abandoned:
            continue
        if setting.left_after is not None and step > setting.left_after:
            break
        lengths = features.lengths().view(len(setting.rows), -1).sum(1)
        rows = (features.values() + offsets.repeat_interleave(lengths)).unique()
        weights[rows] = weights[rows] * 0.5 + float(step)
        states[rows] += 1
        if rounding is not None:
            rounding.round(weights, rows, rows, are_distinct=True)
    return [weights, states]
