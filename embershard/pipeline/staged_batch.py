"""The life of a batch in the pipeline, in one place; the window of the batches ahead; and their streams."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from embershard.cache.gpu.readback import ReadTogether
from embershard.errors import CacheError, DataError
from embershard.pipeline.batch_tensors import tensor_bytes, tensors_of
from embershard.pipeline.left_steps import collectives_begun
from embershard.pipeline.module_input import ModuleInput
from embershard.pipeline.pipelined_forward import ModelInputs
from embershard.sharding.torchrec.embeddings import CachedTableBatchedEmbeddings
from embershard.sharding.torchrec.modes.routes import Told


class StagedBatch:
    """A batch in the pipeline: as the iterator gave it, its copy on the device, and its modules' inputs.

    Its methods are its stages, in this order; the first three are collective::

        StagedBatch(...)   arriving    copy it to the device and start its input all-to-all
        send               arriving    send its ids; the ranks know how many each sends
        receive            arrived     wait for the ids of this rank's tables
        know               known       tell the caches when its rows are used: they evict accordingly
        bring_nearer       near        bring its rows nearer to the device, for pools with a part that does so
        make_resident      resident    bring its rows into slots that no other resident batch uses; until it is True
        begin              training    hand its inputs to the model's forward
        close              released    release its slots, and take back what was announced and did not happen

    An exception in a stage leaves the batch in the stage before. The stage can then be tried again, but for a
    collective that had begun.

    Args:
        batch: has `to(device, non_blocking)` and `record_stream(stream)`.
        announced: what the modules read of it, which is of tensors that may not be the batch's own.
        model_inputs: of the model, whose sharded modules are pipelined.
        told: what the ranks have told each other of it (`ModelInputs.tell`), by rank.
    """

    def __init__(
        self,
        batch: Any,
        announced: Any,
        device: torch.device,
        model_inputs: ModelInputs,
        streams: Streams,
        told: Told,
    ) -> None:
        self.batch = batch
        self._device, self._forwards, self._streams = device, model_inputs.forwards, streams
        self._versions = [(each, each._version) for each in tensors_of([batch, announced]) if not each.is_inference()]
        with streams.copying():
            self.on_device = batch.to(device, non_blocking=True)
        with streams.distributing(self.on_device):
            self.inputs = model_inputs.start(self.on_device, told)
        self._is_sent = False
        self.step = 0  # batches with one number train together

    @property
    def num_ids(self) -> int:
        """Ids that this rank received."""
        return sum(part.num_ids for part in self.inputs.values())

    @property
    def known_bytes(self) -> int:
        """Memory that it takes beside the batch as the iterator gave it, in bytes: its copy on a GPU, its inputs, which
        may be views of that, and their known uses. Walks through all tensors: ask once."""
        parts, copy = list(self.inputs.values()), self.on_device if self._device.type == "cuda" else None
        return tensor_bytes([copy, *(part.kept for part in parts)]) + sum(part.known_uses_bytes for part in parts)

    def send(self) -> None:
        """Send the ids. A second call does nothing."""
        if self._is_sent:
            return
        with self._streams.distributing():
            for part in self.inputs.values():
                part.send()
        self._is_sent = True

    def receive(self) -> None:
        """Wait for the ids of this rank's tables."""
        self.send()
        with self._streams.distributing():
            for part in self.inputs.values():
                part.receive()

    def know(self, others: Sequence[StagedBatch] = ()) -> None:
        """Tell the caches when its rows are used, and those of others that train together with it."""
        with self._streams.preparing(self.inputs, *(staged.inputs for staged in others)):
            for name, part in self.inputs.items():
                part.know([staged.inputs[name] for staged in others])

    def bring_nearer(self) -> bool:
        """Bring its rows nearer to the device, where they are far; return False if they do not fit there yet."""
        return all(part.bring_nearer() for part in self.inputs.values())

    def forget(self, pools: Collection[CachedTableBatchedEmbeddings]) -> None:
        """Note that these pools forgot it: it is to become known again."""
        for part in self.inputs.values():
            part.forget(pools)

    def make_resident(self, critical_path: bool) -> bool:
        """Bring in its rows, as far as they fit beside those of the batches before it; return True when all are in."""
        if self._device.type == "cuda":
            return self.end_resident(self.begin_resident(critical_path))
        complete = [part.make_resident(critical_path) for part in self.inputs.values()]
        return all(complete)

    def begin_resident(self, critical_path: bool) -> ReadTogether[bool]:
        """Begin `make_resident`, up to where the host needs the plans' numbers; `end_resident` does the rest."""
        with self._streams.preparing():
            parts = [part.becoming_resident(critical_path) for part in self.inputs.values()]
            return ReadTogether([work for works in parts for work in works])

    def end_resident(self, begun: ReadTogether[bool]) -> bool:
        """Read the numbers, for all pools together, and bring in the rows."""
        with self._streams.preparing():
            return all(begun.end())

    def begin(self) -> Any:
        """Begin its step; return the batch on the device.

        Raises:
            DataError: the batch's tensors were written to since the pipeline took it.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise DataError(
                "a batch was written to in place after the pipeline had taken it, which keeps it for up to "
                "lookahead + 6 steps. Give each batch tensors of its own (batch.clone(), or no reuse of buffers in the "
                "loader)"
            )
        self._streams.give(self.on_device, self.inputs)
        for forward in self._forwards:
            forward.install()
            self.inputs[forward.name].expect(*forward.args.build_args_kwargs(self.on_device))
        return self.on_device

    def close(self) -> None:
        """End its life: nothing reads it any more."""
        with self._streams.preparing():
            for part in self.inputs.values():
                part.close()


class IdExchange:
    """Context of a stage that exchanges ids: one that an exception ended is not begun again.

    The other ranks are in the first one, and would take what is sent then for something else. An exception before the
    first collective does not count, and one after the last collective does, until the stage has ended.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._begun = 0  # collectives, when the stage was entered
        self._error = "an interrupt"

    def __enter__(self) -> None:
        if self._is_open and collectives_begun() != self._begun:
            raise CacheError(
                f"the exchange of ids with the other ranks did not end on this rank ({self._error}), so no further "
                "batch can come in. The tables are whole: save them if need be, and start all ranks again from a "
                "checkpoint"
            )
        self._begun = collectives_begun()
        self._is_open = True

    def __exit__(self, cls: type[BaseException] | None, *_: Any) -> None:
        if cls is None:
            self._is_open = False
        else:
            self._error, self._is_open = cls.__name__, collectives_begun() != self._begun


_WEIGH_EVERY = 8


class Window:
    """Batches between the iterator and their step, oldest first.

        [ first ... known to the caches | not known yet ] <- arriving

    A batch enters at the right with :meth:`add` and leaves at the left with :meth:`take_first`. An exception in between
    loses no batch: a batch leaves a place only when it has arrived in the next.

    Args:
        micro_batches: so many batches train together, and become known together.
    """

    def __init__(self, micro_batches: int = 1) -> None:
        self._micro_batches, self._num_added = micro_batches, 0
        self._batches: deque[StagedBatch] = deque()
        self._unknown: deque[StagedBatch] = deque()  # the newest of those
        self._arriving: deque[StagedBatch] = deque()
        self._bytes: dict[StagedBatch, int] = {}
        self._last_weighed, self._weighed_ids, self._num_counted = 0, 0, 0  # bytes and ids of a batch, and batches
        #: Memory of the batches and of their known uses, in bytes, as of when they became known; estimated.
        self.known_bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def first(self) -> StagedBatch:
        """The batch of the next step."""
        return self._batches[0]

    @property
    def num_unknown(self) -> int:
        """Batches that are to become known."""
        return len(self._unknown)

    @property
    def num_known(self) -> int:
        """Batches that the caches know."""
        return len(self._batches) - len(self._unknown)

    @property
    def num_arriving(self) -> int:
        """Batches whose ids are on their way."""
        return len(self._arriving)

    @property
    def newest_arriving(self) -> Any:
        """The batch that was added last, as the iterator gave it; None when none is arriving."""
        return self._arriving[-1].batch if self._arriving else None

    def coming(self, first: int, count: int) -> list[StagedBatch]:
        """Return up to `count` batches from place `first` on, to make them resident; where several train together, none
        whose step is not whole, as its ids would get rows without those of the others."""
        stop = min(first + count, self.num_known) if self._micro_batches > 1 else first + count
        return list(itertools.islice(self._batches, first, max(first, stop)))

    def add(self, staged: StagedBatch) -> None:
        """Add a batch that all ranks have agreed on."""
        staged.step = self._num_added // self._micro_batches
        self._num_added += 1
        self._arriving.append(staged)

    def send(self) -> None:
        """Send the ids of all arriving batches. Collective."""
        for staged in self._arriving:
            staged.send()

    def arrive(self) -> None:
        """Receive the ids of the oldest arriving batch. Collective."""
        staged = self._arriving[0]
        staged.receive()
        self._batches.append(self._arriving.popleft())
        self._unknown.append(staged)
        if not torch.is_grad_enabled():  # else it is about to become known, and larger
            self._weigh(staged)

    def know(self, is_over: bool = False) -> None:
        """Tell the caches about every batch that they do not know yet, once all of its step are here or none comes."""
        while self._unknown:
            step = self._unknown[0].step
            is_whole = self._num_added - len(self._arriving) >= (step + 1) * self._micro_batches
            if not is_whole and (self._arriving or not is_over):
                return
            together = list(next(itertools.groupby(self._unknown, key=lambda staged: staged.step))[1])
            together[0].know(together[1:])
            for staged in together:
                self._unknown.popleft()
                self._weigh(staged)

    def forget(self, pools: Collection[CachedTableBatchedEmbeddings]) -> None:
        """Note that these pools forgot all batches: they become known again, in their order."""
        for staged in self._batches:
            staged.forget(pools)
        self._unknown = deque(self._batches)

    def take_first(self) -> None:
        """Remove the batch of this step. If the caches do not know it, they need not: it is only evaluated."""
        staged = self._batches.popleft()
        self.known_bytes -= self._bytes.pop(staged, 0)
        if self._unknown and self._unknown[0] is staged:
            self._unknown.popleft()

    def put_back(self, staged: StagedBatch) -> None:
        """Make a batch whose step did not begin the first one again, if it is not any more."""
        if not self._batches or self._batches[0] is not staged:
            self._batches.appendleft(staged)
        self._weigh(staged)

    def clear(self) -> None:
        """Close and forget all batches: they will not train."""
        for staged in [*self._batches, *self._arriving]:
            staged.close()
        for batches in (self._batches, self._unknown, self._arriving, self._bytes):
            batches.clear()
        self._num_added = 0
        self.known_bytes = 0

    def _weigh(self, staged: StagedBatch) -> None:
        """Count a batch's memory. The tensors of one batch in eight are walked through, and of those with a number of
        ids that is not about that of the last one; the others are taken to be like it."""
        num_ids = staged.num_ids
        if self._num_counted % _WEIGH_EVERY == 0 or 16 * abs(num_ids - self._weighed_ids) > self._weighed_ids:
            self._last_weighed, self._weighed_ids = staged.known_bytes, num_ids
        self._num_counted += 1
        self.known_bytes += self._last_weighed - self._bytes.get(staged, 0)
        self._bytes[staged] = self._last_weighed


_ON_A_CPU = nullcontext()


class Streams:
    """On a GPU, one stream per stage; every tensor that a stream reads is recorded on it.

    The streams have a higher priority than the training's: their kernels are small, and the host waits for some of
    them. Not run on a GPU so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._copy, self._distribute, self._prepare = (torch.cuda.Stream(device, priority=-1) for _ in range(3))

    def copying(self) -> Any:
        """Return a context for copying batches to the device."""
        return torch.cuda.stream(self._copy) if self._is_cuda else _ON_A_CPU

    def distributing(self, on_device: Any = None) -> Any:
        """Return a context for exchanging ids; those of `on_device`, once it is copied."""
        if not self._is_cuda:
            return _ON_A_CPU
        if on_device is not None:
            self._distribute.wait_stream(self._copy)
            on_device.record_stream(self._distribute)
        return torch.cuda.stream(self._distribute)

    def preparing(self, *batches: dict[str, ModuleInput]) -> Any:
        """Return a context for the caches' work; on inputs of `batches`, once they are exchanged."""
        if not self._is_cuda:
            return _ON_A_CPU
        for inputs in batches:
            self._prepare.wait_stream(self._distribute)
            for part in inputs.values():
                part.record_stream(self._prepare)
        return torch.cuda.stream(self._prepare)

    def give(self, on_device: Any, inputs: dict[str, ModuleInput]) -> None:
        """Let the current stream, which trains or evaluates, read the batch and its inputs. Rows have own events."""
        if not self._is_cuda:
            return
        training = torch.cuda.current_stream(self._device)
        training.wait_stream(self._copy)
        training.wait_stream(self._distribute)  # the caches do not know a batch that is only evaluated
        training.wait_stream(self._prepare)
        on_device.record_stream(training)
        for part in inputs.values():
            part.record_stream(training)
