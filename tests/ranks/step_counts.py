"""What the training thread does in a step, counted: operations of torch, frames of Python, collectives and reads; but
for the next batch, which is read in other threads elsewhere."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.models.dlrm import InteractionArch, SparseArch

from embershard.cache import CacheConfig
from embershard.data import BatchStream, DataConfig
from embershard.data.config import SyntheticConfig
from embershard.distributed import CheckpointConfig
from embershard.models import ModelConfig, build
from embershard.pipeline import LookAheadPipeline
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.torchrec.modes.routes import Route
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.optimizers import DenseOptimizerConfig
from embershard.training.parts import part as part_module
from embershard.training.trainer import Trainer
from tests.ranks import planned

WARM_UP, STEPS = 24, 8  # batches become known four at a time
_READS = ("tolist", "item", "cpu")


def config(cached: bool) -> RunConfig:
    """26 tables of dim 4 and narrow layers: what is left of a step is its calls."""
    return RunConfig(
        data=DataConfig(synthetic=SyntheticConfig(num_samples=4000, scale=0.001), num_workers=0),
        model=ModelConfig(embedding_dim=4, dense_arch_layer_sizes=(8, 8, 4), over_arch_layer_sizes=(8, 8, 8, 8, 1)),
        cache=CacheConfig(ratio=0.9) if cached else CacheConfig(enabled=False),
        look_ahead=LookAheadConfig(4 if cached else 0),
        train=TrainConfig(batch_size=8, device="cpu", log_every=1000),
        checkpoint=CheckpointConfig(at_end=False),
        dense_optimizer=DenseOptimizerConfig(kind="sgd", lr=0.01),
    )


_is_reading = False  # a batch


@contextlib.contextmanager
def _reading_apart() -> Iterator[None]:
    """While it lasts, who reads a batch does not count."""
    read = BatchStream.__next__

    def apart(self: BatchStream) -> Any:
        global _is_reading
        _is_reading = True
        try:
            return read(self)
        finally:
            _is_reading = False

    with mock.patch.object(BatchStream, "__next__", apart):
        yield


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._counts["operations"] += not _is_reading
        if func._schema.name.startswith("c10d::"):
            self._counts[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


def counted(step: Callable[[], Any]) -> dict[str, int]:
    """What eight steps do, after some others: operations and collectives, then frames, then reads of a tensor."""
    counts: Counter[str] = Counter()
    with _reading_apart():
        for _ in range(WARM_UP):
            step()
        with _Operations(counts):
            for _ in range(STEPS):
                step()
        _count_frames(step, counts)
        _count_reads(step, counts)
    return dict(counts)


def _count_frames(step: Callable[[], Any], counts: Counter[str]) -> None:

    def count(frame: Any, event: str, _: Any) -> None:
        counts["frames"] += event == "call" and not _is_reading

    sys.setprofile(count)
    try:
        for _ in range(STEPS):
            step()
    finally:
        sys.setprofile(None)


def _count_reads(step: Callable[[], Any], counts: Counter[str]) -> None:
    with contextlib.ExitStack() as stack:
        for name in _READS:
            read = getattr(torch.Tensor, name)

            def noted(*given: Any, _read: Any = read, **more: Any) -> Any:
                counts["reads"] += 1
                return _read(*given, **more)

            stack.enter_context(mock.patch.object(torch.Tensor, name, noted))
        for _ in range(STEPS):
            step()


def ours(further_read: bool = False) -> dict[str, int]:
    """Counts of the trainer's steps, planning on the thread that trains."""
    on_thread = functools.partial(LookAheadPipeline, worker=False)
    start = Route.start

    def reads(self: Route, *given: Any) -> Any:
        torch.zeros(1).tolist()
        return start(self, *given)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(part_module, "LookAheadPipeline", on_thread))
        if further_read:
            stack.enter_context(mock.patch.object(Route, "start", reads))
        trainer = Trainer(config(cached=True), planned.here())
        stack.callback(trainer.close)
        reports = list(trainer._each(lambda part: part.begin()))
        assert not reports

        def step() -> None:
            with trainer.upcoming.next() as batch:
                trainer.step(batch)

        return counted(step)


def stock() -> dict[str, int]:
    """Counts of TorchRec's own steps over the same tables, with TorchRec's own layers."""
    theirs = {"PooledRows": SparseArch, "Interactions": InteractionArch}
    with mock.patch.multiple(build, **theirs):
        trainer = Trainer(config(cached=False), planned.here())
    pipeline: Any = TrainPipelineSparseDist(trainer.model, trainer.optimizers.dense, trainer.ranks.device)
    batches = iter(trainer.stream)
    try:
        return counted(lambda: pipeline.progress(batches))
    finally:
        trainer.close()
