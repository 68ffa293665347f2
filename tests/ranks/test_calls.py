"""The pipeline's tracer: which modules it lets run ahead, and what it leaves behind when it is cut off."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import _symbolic_trace
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from embershard import (
    CacheConfig,
    CachedEmbeddingBagCollectionSharder,
    CachedEmbeddingCollectionSharder,
    LookAheadPipeline,
    StockEmbeddingBagCollectionSharder,
    StockEmbeddingCollectionSharder,
    plan_sharding,
)
from embershard.errors import ShardingError
from embershard.pipeline.pipelined_forward import OpenStep, PipelinedForward, pipelined_forwards
from tests.covering import keep, matrix
from tests.ranks.look_ahead import message_of
from tests.ranks.parity import snapshot
from tests.ranks.workers import RankPool

pytestmark = pytest.mark.ranks

ROWS, SAMPLES, STEPS = 200, 8, 6
CPU = torch.device("cpu")


@dataclass
class Batch(Pipelineable):
    """Two sets of the same feature."""

    first: KeyedJaggedTensor
    second: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """A copy there."""
        return dataclasses.replace(self, first=self.first.to(device), second=self.second.to(device))

    def record_stream(self, stream: Any) -> None:
        """No streams on a CPU."""


class Model(nn.Module):
    """``calls``: what each call of the embeddings reads: "first" or "second" of the batch, or what is "computed" of
    it."""

    def __init__(self, calls: tuple[str, ...], sequence: bool) -> None:
        super().__init__()
        config: dict[str, Any] = {"name": "t", "num_embeddings": ROWS, "embedding_dim": 8, "feature_names": ["f"]}
        meta = torch.device("meta")
        self.tables: nn.Module = (
            EmbeddingCollection([EmbeddingConfig(**config)], device=meta)
            if sequence
            else EmbeddingBagCollection([EmbeddingBagConfig(**config)], device=meta)
        )
        self.dense = nn.Linear(8, 1)
        self._calls, self._is_sequence = calls, sequence

    def forward(self, batch: Batch) -> Tensor:
        """The loss."""
        pooled = []
        for call in self._calls:
            given = batch.first if call == "first" else batch.second
            if call == "computed":
                given = shifted(given)
            found = self.tables(given)
            pooled.append(found["f"].to_padded_dense(2).sum(1) if self._is_sequence else found.values())
        return ((self.dense(sum(pooled)).squeeze(1) - batch.labels) ** 2).mean()


@torch.fx.wrap
def shifted(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same bags of other ids."""
    return KeyedJaggedTensor(["f"], (features.values() + 1) % ROWS, lengths=features.lengths())


def make_batch(step: int) -> Batch:
    """This rank's."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    lengths = torch.full((SAMPLES,), 2)
    first, second = (torch.randint(0, ROWS, (2 * SAMPLES,), generator=generator) for _ in range(2))
    return Batch(
        KeyedJaggedTensor(["f"], first, lengths=lengths),
        KeyedJaggedTensor(["f"], second, lengths=lengths),
        torch.rand(SAMPLES, generator=generator),
    )


def trained(calls: tuple[str, ...], sequence: bool, pipelined: bool) -> tuple[DistributedModelParallel, list[float]]:
    """The model after some steps: cached and under a pipeline, or stock."""
    torch.manual_seed(3)
    model, size = Model(calls, sequence), dist.get_world_size()
    params = {"learning_rate": 0.1}
    sharder: Any
    if pipelined:
        cls = CachedEmbeddingCollectionSharder if sequence else CachedEmbeddingBagCollectionSharder
        sharder = cls(CacheConfig(ratio=0.6, policy="lookahead"), fused_params=params)
    else:
        sharder = (StockEmbeddingCollectionSharder if sequence else StockEmbeddingBagCollectionSharder)(params)
    plan = plan_sharding(model, [sharder], world_size=size, local_world_size=size, device=CPU)
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder])
    optimizer = torch.optim.SGD([p for name, p in sharded.named_parameters() if "dense" in name], lr=0.05)
    losses, batches = list[float](), map(make_batch, range(STEPS))
    pipeline = LookAheadPipeline(sharded, optimizer, CPU, lookahead=3) if pipelined else None
    for _ in range(STEPS):
        if pipeline is not None:
            with pipeline.step(batches) as batch:
                losses.append(_step(sharded, optimizer, batch))
        else:
            losses.append(_step(sharded, optimizer, next(batches)))
    if pipeline is not None:
        pipeline.detach()
    return sharded, losses


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    optimizer.zero_grad()
    loss = model(batch)
    loss.backward()
    optimizer.step()
    return loss.item()  # type: ignore[no-any-return]


def run(calls: tuple[str, ...], sequence: bool) -> dict[str, Any]:
    """What a pipeline says of the calls, and what differs from stock."""
    said = list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("embershard")
    logger.addHandler(handler)
    different = ["not trained"]

    def compare() -> None:
        cached, losses = trained(calls, sequence, pipelined=True)
        stock, expected = trained(calls, sequence, pipelined=False)
        found, wanted = snapshot(cached), snapshot(stock)
        different[:] = [name for name in wanted if not torch.equal(wanted[name], found[name])]
        different.extend(["losses"] if losses != expected else [])

    try:
        error = message_of(compare)
    finally:
        logger.removeHandler(handler)
    return {"error": error, "said": said, "different": different}


def run_in_orders(calls: tuple[str, ...], sequence: bool) -> list[dict[str, Any]]:
    """The same for the calls in this order and in the opposite one."""
    return [run(order, sequence) for order in dict.fromkeys((calls, calls[::-1]))]


class CutOff:
    """Raises once, in torch.fx or in TorchRec's tracer: at one of the lines, or of the instructions of the functions
    that replace functions of the whole process and put them back.

    Attributes:
        places: that were passed, up to the exception.
    """

    _INSTRUCTIONS = ("_new_patcher", "_Patcher.", "_PatchedFn")

    def __init__(self, at: int | None) -> None:
        self.places: list[tuple[str, int, int]] = []
        self._at = at

    def __enter__(self) -> CutOff:
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.endswith(("torch/fx/_symbolic_trace.py", "train_pipeline/utils.py")):
            return None
        frame.f_trace_opcodes = code.co_qualname.startswith(self._INSTRUCTIONS)
        return self._place

    def _place(self, frame: FrameType, event: str, _: Any) -> Any:
        if event in ("line", "opcode"):
            self.places.append((frame.f_code.co_qualname, frame.f_lineno, frame.f_lasti))
            if len(self.places) - 1 == self._at:
                raise KeyboardInterrupt
        return self._place


def cut_off_traces(at_first: bool) -> dict[str, Any]:
    """Cut off the trace of one model at every place of torch.fx's and TorchRec's code, when it is passed for the last
    time, or ``at_first``; what is then not as before, and what trains otherwise than in stock TorchRec."""
    model, _ = trained(("first",), False, pipelined=True)
    before, batch = _process_wide(model), make_batch(0)
    with CutOff(None) as whole:
        pipelined_forwards(model, batch, OpenStep())[0].remove()
    passed = list(enumerate(whole.places))
    numbers = {place: number for number, place in (reversed(passed) if at_first else passed)}.values()
    numbers = {*numbers, *(number for number, place in passed if place[0].startswith("_PatchedFnSetAttr"))}
    wrong, raised = list[tuple[str, int, int]](), 0
    for number in sorted(numbers):
        try:
            with CutOff(number) as cut:
                pipelined_forwards(model, batch, OpenStep())[0].remove()
        except (KeyboardInterrupt, ShardingError):  # torch.fx misses a patcher that it has not made yet
            raised += 1
        if _process_wide(model) != before:
            wrong.append(cut.places[-1])
    return {"wrong": wrong, "raised": raised, "places": len(numbers), **run(("first",), False)}


def _process_wide(model: nn.Module) -> list[Any]:
    """What a trace replaces: functions of all modules and of whole files, flags, and the forward of the tables."""
    names = [*_symbolic_trace._wrapped_fns_to_patch.items(), *[((0, name), vars(math)) for name in vars(math)]]
    tables = next(part for part in model.modules() if isinstance(part, ShardedModule))
    return [
        nn.Module.__call__,
        nn.Module.__getattr__,
        *(functions.get(name) for (_, name), functions in names),
        *(getattr(cls, name) for cls, name in _symbolic_trace._wrapped_methods_to_patch),
        _symbolic_trace.is_fx_tracing(),
        torch._dynamo.config.error_on_nested_fx_trace,
        tables.is_pipelined,
        isinstance(tables.forward, PipelinedForward),
    ]


SEVERAL = [
    several
    for count in (2, 3, 4)
    for several in itertools.combinations_with_replacement(("first", "second", "computed"), count)
]
KEPT = {("first", "first"), ("first", "second", "computed")}


@pytest.mark.parametrize("several", [each if each in KEPT else matrix(each) for each in SEVERAL], ids=",".join)
@pytest.mark.parametrize("sequence", keep([False], [False, True]))
def test_a_module_that_is_called_several_times_runs_unpipelined(one_rank, several, sequence) -> None:
    """Whatever the calls read, alike or not, and whatever their order: one rule."""
    (found,) = one_rank.run(run_in_orders, several, sequence)
    for each in found:
        assert each["error"] == ""
        assert each["said"] == ["tables runs unpipelined: it is called more than once in a forward"]
        assert each["different"] == []


def test_a_module_that_is_called_once_runs_ahead_if_its_input_is_the_batch_s(two_ranks: RankPool) -> None:
    for found in two_ranks.run(run, ("first",), False):
        assert found == {"error": "", "said": [], "different": []}
    for found in two_ranks.run(run, ("computed",), False):
        said = "tables runs unpipelined: its input does not come straight from the batch"
        assert found == {"error": "", "said": [said], "different": []}


@pytest.mark.matrix
@pytest.mark.parametrize("at_first", [False, True], ids=["last", "first"])
def test_a_trace_that_is_cut_off_anywhere_leaves_nothing_replaced(one_rank: RankPool, at_first: bool) -> None:
    """Also inside of torch.fx's own undoing."""
    (found,) = one_rank.run(cut_off_traces, at_first)
    assert found["wrong"] == []
    assert found["raised"] == found["places"] > 300
    assert (found["error"], found["different"]) == ("", [])
