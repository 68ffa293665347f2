"""NVIDIA's published speeds of DLRM and DCNv2 in TensorFlow 2, PyTorch and SparseOperationKit, simulated as these place
and exchange tables: V100s and A100s, 1 to 16 of them, in fp32, TF32 and mixed precision.

`python -m benchmarks.simulator_back_test --public` prints them. A machine's speed, the dense layers and the kernels of
lookups are a plan's costs. What is another program's is here, each from its code or its README, and none fitted: where
tables are, what passes over looked-up rows beside FBGEMM's kernels, and what its host does.

* **None of them is without a host's thread.** TensorFlow's executor and Horovod's thread launch each step, and so does
  Python around PyTorch's CUDA graph, after it has waited for the GPU.
* **Lookups are not fused with the optimizer**: looked-up rows and their gradients are put together, taken apart, cast
  and scaled by kernels of their own (`System.passes`).
* **A step is the slowest rank's**: whole tables, four on a rank where the mean is 3.25; in PyTorch the layers over
  dense features are on the first rank, for the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from embershard.frequency.assumed import AssumedTable, assumed_statistics
from embershard.models.dense_size import DenseSize
from embershard.planning.cost.dense import SMALL_KERNELS, dense_work
from embershard.planning.cost.rates import Precision, Rates, StepWork, step_parts
from embershard.planning.cost.topology import load_topology
from embershard.planning.predict import predict
from embershard.planning.simulate.step_replay import Pipeline, replay_steps
from embershard.planning.workload import Layout, Workload
from embershard.settings.decoding import decode
from embershard.sharding.run_shape import ReplaySettings, RunShape
from embershard.sharding.sharding_types import Sharding
from embershard.sharding.shards import TablePlacement
from embershard.sharding.sizes import ModelSize, TableSize

_EXAMPLES = "https://github.com/NVIDIA/DeepLearningExamples at 729963dd, "
_NUM_SAMPLES = 4_195_197_692  # of Criteo 1TB's first 23 days
_DIM, _DENSE, _BOTTOM, _TOP = 128, 13, (512, 256, 128), (1024, 1024, 512, 256, 1)
#: Rows of the tables: Criteo 1TB without ids that occur less than 15, 3 and 0 times (`dataloading/
#: generate_feature_spec.py` in the first source). SOK's tables have 82 GB, as "large" ones.
ROWS = {
    "small": (
        7912889, 33823, 17139, 7339, 20046, 4, 7105, 1382, 63, 5554114, 582469, 245828, 11, 2209, 10667, 104, 4, 968,
        15, 8165896, 2675940, 7156453, 302516, 12022, 97, 35,
    ),
    "large": (
        45833188, 36747, 1572176, 345139, 11, 2209, 11268, 128, 4, 975, 15, 48937457, 17246, 11316796, 40094537, 452104,
        12607, 105, 36, 7414, 20244, 4, 7115, 1442, 63, 29275261,
    ),
    "extra_large": (
        227605432, 39061, 3067956, 405283, 11, 2209, 11939, 155, 4, 977, 15, 292775614, 17296, 40790948, 187188510,
        590152, 12974, 109, 37, 7425, 20266, 4, 7123, 1544, 64, 130229467,
    ),
}  # fmt: skip
Place = tuple[Sharding, tuple[int, ...]]


@dataclass(frozen=True)
class System:
    """A program that others train with.

    Attributes:
        places: of the tables of so many rows, on so many ranks.
        passes: bytes that kernels beside FBGEMM's read and write for each number that is looked up, if layers pass on
            numbers of so many bytes; on several ranks or on one.
        host_seconds: of a step's host, for a point; on several ranks or on one.
        waits: the host begins when the GPU is done, so that its time adds to the step's.
        bottom_on_first: the layers over dense features are the first rank's.
        by_lookup: a vector travels for each lookup, of tables by rows, too.
        exchanges_rows: distinct rows travel, in this precision.
    """

    source: str
    places: Callable[[Sequence[int], int], list[Place]]
    passes: Callable[[int, bool], float]
    host_seconds: Callable[[Point, bool], float]
    waits: bool = False
    bottom_on_first: bool = False
    by_lookup: bool = False
    exchanges_rows: Sequence[Precision] = ()


@dataclass(frozen=True)
class Point:
    """A throughput that others measured.

    Attributes:
        model: the interaction, and a name in `ROWS`.
        batch_size: samples per rank.
        reported: samples per second of all ranks.
    """

    system: str
    model: tuple[str, str]
    machine: str
    batch_size: int
    reported: int
    precision: Precision

    @property
    def number_bytes(self) -> int:
        """Of a number that layers pass on, and that travels."""
        return 2 if self.precision in ("bf16", "fp16") else 4

    @property
    def kind(self) -> str:
        """The kind of the machine."""
        return self.machine.rpartition("x")[0]


def _memory_balanced(rows: Sequence[int], num_ranks: int) -> list[Place]:
    """As `DistEmbeddingStrategy.apply_strategy` does for "memory_balanced" (distributed-embeddings at 45cffaa8, which
    the Dockerfile names): sorted by size, dealt to and fro. Tables of 10e9 numbers and more are cut by rows over all
    ranks, those of more than 5e9 into columns (main.py's defaults)."""
    if num_ranks == 1:
        return [("table_wise", (0,))] * len(rows)
    by_rows = {table for table, count in enumerate(rows) if count * _DIM >= 10e9}
    pieces = [(count * _DIM / cuts, table) for table, count in enumerate(rows) if table not in by_rows
              for cuts in (_columns(count),) for _ in range(cuts)]  # fmt: skip
    owners: dict[int, list[int]] = {}
    for number, (_, table) in enumerate(sorted(pieces, reverse=True)):
        turn = number % (2 * num_ranks)
        owners.setdefault(table, []).append(turn if turn < num_ranks else 2 * num_ranks - 1 - turn)
    found: list[Place] = []
    for table in range(len(rows)):
        ranks = tuple(owners.get(table, ()))
        if table in by_rows:
            found.append(("row_wise", tuple(range(num_ranks))))
        else:
            found.append(("column_wise" if len(ranks) > 1 else "table_wise", ranks))
    return found


def _columns(num_rows: int) -> int:
    return 2 ** max(0, math.ceil(math.log2(num_rows * _DIM / 5e9)))


def _buckets(rows: Sequence[int], num_ranks: int) -> list[Place]:
    """As `get_device_mapping` does (PyTorch/Recommendation/DLRM/dlrm/utils/distributed.py): beyond 4 GPUs the first one
    has no table; each table, the largest first, goes to the rank with the fewest rows, until that has its share."""
    first = 1 if num_ranks > 4 else 0
    most = math.ceil(len(rows) / (num_ranks - first))
    counts, sums, owner = [0] * num_ranks, [0] * num_ranks, dict[int, int]()
    for table in sorted(range(len(rows)), key=lambda each: -rows[each]):
        rank = min((rank for rank in range(first, num_ranks) if counts[rank] < most), key=lambda rank: sums[rank])
        counts[rank], sums[rank], owner[table] = counts[rank] + 1, sums[rank] + rows[table], rank
    return [("table_wise", (owner[table],)) for table in range(len(rows))]


def _by_rows(rows: Sequence[int], num_ranks: int) -> list[Place]:
    """As SOK's All2AllDenseEmbedding: a row is on the rank of its number modulo the ranks."""
    return [("row_wise", tuple(range(num_ranks)))] * len(rows)


def _tensorflow_passes(number_bytes: int, is_several: bool) -> float:
    """`DistributedEmbedding._call_table_parallel`, `SparseModel._call_embeddings`, and their gradients: outputs of the
    tables are cast and put together; gradients taken apart, and cast and scaled in one. Around the exchange, vectors
    are taken apart and put together on the other side, and so are their gradients."""
    cast = 6 if number_bytes == 2 else 0
    around_exchange = 8 * number_bytes if is_several else 0
    return cast + 2 * number_bytes + around_exchange + 2 * number_bytes + number_bytes + 4


def _torch_passes(number_bytes: int, is_several: bool) -> float:
    """`JointSparseEmbedding` (several ranks) and `FusedJointEmbedding`, `BottomToTop`, torch's SGD of sparse gradients:
    these are made in fp32, scaled by the rate into another tensor, and added. On several ranks vectors are cast, put
    together behind the exchange, and their gradients taken apart before it."""
    cast = 6 if number_bytes == 2 and is_several else 0
    around_exchange = 4 * number_bytes if is_several else 0
    return cast + around_exchange + number_bytes + 4 + 8


def _sok_passes(number_bytes: int, is_several: bool) -> float:
    """`SOKEmbedding` in documents/tutorials/DLRM_Benchmark/model.py: vectors are put into order behind the exchange,
    gradients before it, then cast and scaled. In fp32 and TF32 (--compress) distinct rows come, are copied to each
    lookup (2 x 4), and gradients are summed into zeros (3 x 4)."""
    compressed = 20 if number_bytes == 4 else 0
    return compressed + 2 * number_bytes + 2 * number_bytes + number_bytes + 4


#: Of TensorFlow's host for a forward: the least latency of inference with 2,048 samples in the same READMEs (mixed
#: precision; DLRM, then DCNv2). A step has three times the operations: each product of the forward has two gradients.
_FORWARD_SECONDS: Mapping[tuple[str, str], float] = {
    ("dlrm", "a100-80"): 1.38e-3, ("dlrm", "v100-32"): 2.15e-3, ("dlrm", "v100-nvswitch"): 1.50e-3,
    ("dlrm_dcn", "a100-80"): 1.56e-3,
}  # fmt: skip
#: Half a cycle of Horovod's thread, for which an operation waits in the mean: 0.2 ms in the Dockerfile of the first
#: source (HOROVOD_CYCLE_TIME), by default 1 ms (horovod at 2626dc87, operations.cc:527). Four are behind each other
#: there: vectors, their gradients, the dense gradients, the loss. In SOK the dense gradients alone.
_TENSORFLOW_CYCLES, _SOK_CYCLES = 4 * 0.2e-3 / 2, 1e-3 / 2
#: Of an operation of torch: 5.2 ms for 178 (`benchmarks.host_thread`), 1.36 times that on nodes of 2016 to 2019.
_TORCH_SECONDS = 5.2e-3 / 178 * 1.36
#: Operations of PyTorch's host while the GPU has nothing to do (dlrm/scripts/main.py): behind `torch.cuda.synchronize`
#: three copies of the inputs and the graph's replay; in mixed precision, where the scaler reads whether gradients are
#: finite, also the optimizers (2), rows' gradients unscaled (4), their SGD (4) and the scaler's update (4).
_TORCH_OPERATIONS, _SCALER_OPERATIONS = 4, 14


def _tensorflow_host(point: Point, is_several: bool) -> float:
    return 3 * _FORWARD_SECONDS[point.model[0], point.kind] + (_TENSORFLOW_CYCLES if is_several else 0.0)


def _sok_host(point: Point, is_several: bool) -> float:
    return 3 * _FORWARD_SECONDS[point.model[0], point.kind] + (_SOK_CYCLES if is_several else 0.0)


def _torch_host(point: Point, is_several: bool) -> float:
    operations = _TORCH_OPERATIONS + (_SCALER_OPERATIONS if point.number_bytes == 2 else 0)
    return operations * _TORCH_SECONDS


SYSTEMS = {
    "TensorFlow 2": System(
        f"{_EXAMPLES}TensorFlow2/Recommendation/DLRM_and_DCNv2/doc/DLRM.md and DCNv2.md (NGC 23.06; --xla, Horovod)",
        _memory_balanced, _tensorflow_passes, _tensorflow_host,
    ),
    "PyTorch": System(
        f"{_EXAMPLES}PyTorch/Recommendation/DLRM/README.md (October 2021; --cuda_graphs)",
        _buckets, _torch_passes, _torch_host, waits=True, bottom_on_first=True,
    ),
    "SOK": System(
        "https://github.com/NVIDIA-Merlin/HugeCTR at 2f2016fa, sparse_operation_kit/documents/tutorials/DLRM_Benchmark/"
        "README.md (TensorFlow 2, 22.04; --xla). 80 GB of an A100's memory and a DGX-1 are assumed",
        _by_rows, _sok_passes, _sok_host, by_lookup=True, exchanges_rows=("fp32", "tf32"),
    ),
}  # fmt: skip


def _points(
    system: str, interaction: str, rows: str, machine: str, batch_size: int, full: float, mixed: float
) -> tuple[Point, ...]:
    """Return the points of a line of a README: millions of samples a second in full and in mixed precision."""
    volta = machine.startswith("v100")
    formats: tuple[Precision, Precision] = ("fp32", "fp16") if volta else ("tf32", "bf16")
    return tuple(
        Point(system, (interaction, rows), machine, batch_size, round(speed * 1e6), precision)
        for speed, precision in zip((full, mixed), formats, strict=True)
    )


#: Every line of the READMEs' tables of training speed on GPUs alone.
POINTS = (
    *_points("TensorFlow 2", "dlrm", "small", "a100-80x1", 65_536, 2.84, 4.55),
    *_points("TensorFlow 2", "dlrm", "large", "a100-80x8", 8_192, 10.9, 13.8),
    *_points("TensorFlow 2", "dlrm", "extra_large", "a100-80x8", 8_192, 9.76, 11.5),
    *_points("TensorFlow 2", "dlrm", "small", "v100-32x1", 65_536, 0.663, 2.23),
    *_points("TensorFlow 2", "dlrm", "large", "v100-32x8", 8_192, 3.13, 6.31),
    *_points("TensorFlow 2", "dlrm", "small", "v100-nvswitchx1", 65_536, 0.698, 2.44),
    *_points("TensorFlow 2", "dlrm", "large", "v100-nvswitchx8", 8_192, 3.79, 7.82),
    *_points("TensorFlow 2", "dlrm", "large", "v100-nvswitchx16", 4_096, 6.43, 10.5),
    *_points("TensorFlow 2", "dlrm_dcn", "small", "a100-80x1", 65_536, 0.689, 1.37),
    *_points("TensorFlow 2", "dlrm_dcn", "large", "a100-80x8", 8_192, 3.81, 5.75),
    *_points("PyTorch", "dlrm", "large", "a100-80x8", 8_192, 11.4, 16.5),
    *_points("PyTorch", "dlrm", "small", "a100-80x1", 65_536, 2.88, 4.02),
    *_points("PyTorch", "dlrm", "large", "v100-32x8", 8_192, 2.88, 6.92),
    *_points("PyTorch", "dlrm", "small", "v100-32x1", 65_536, 0.672, 2.09),
    *_points("PyTorch", "dlrm", "large", "v100-nvswitchx16", 4_096, 4.74, 10.8),
    *_points("PyTorch", "dlrm", "large", "v100-nvswitchx8", 8_192, 3.33, 7.93),
    *_points("PyTorch", "dlrm", "small", "v100-nvswitchx1", 65_536, 0.717, 2.25),
    *_points("SOK", "dlrm", "large", "a100-80x8", 8_192, 12.08, 14.51),
    *_points("SOK", "dlrm", "large", "a100-80x8", 6_912, 11.66, 12.50),
    *_points("SOK", "dlrm", "large", "v100-32x8", 8_192, 4.02, 6.99),
    *_points("SOK", "dlrm", "large", "v100-32x8", 6_912, 3.85, 6.62),
)


def simulated(point: Point) -> tuple[float, dict[str, float], float]:
    """Return the seconds of a step, of its parts, and of the host."""
    system, topology = SYSTEMS[point.system], load_topology(point.machine).at(point.precision)
    is_several = topology.world_size > 1
    host = system.host_seconds(point, is_several)
    own = replace(topology.assumptions, step_overhead_seconds=0.0 if system.waits else host, collective_host_seconds=0)
    topology = replace(topology, assumptions=own)
    assert topology.precision == point.precision, "its speed is known"
    rates, split = topology.rates_for(), system.bottom_on_first and is_several
    layout = _layout(point, system, topology.world_size, topology.ranks_per_node, split)
    told = predict(layout, {}, rates, from_counts=True)
    works = [
        _with_passes(decode(StepWork, each.work), layout, rank, system.passes(point.number_bytes, is_several), point)
        for rank, each in enumerate(told.ranks)
    ]
    if split:
        works[0] = replace(works[0], embedding_bytes=works[0].embedding_bytes + _bottom(point, layout, rates))
    pipeline = Pipeline.of_run(layout.workload.shape)
    replayed = replay_steps(works, rates, pipeline, jitter=topology.jitter_for(topology.world_size))
    waited = host if system.waits else 0.0
    parts = replayed.mean_parts
    return replayed.step_seconds + waited, {**parts, "overhead": parts["overhead"] + waited}, host


def _layout(point: Point, system: System, num_ranks: int, ranks_per_node: int, split: bool) -> Layout:
    interaction, name = point.model
    adam = interaction == "dlrm_dcn"
    tables = [AssumedTable(f"t{number}", count) for number, count in enumerate(ROWS[name])]
    crosses = (3, 512) if adam else (0, 0)
    dense = DenseSize(interaction, _DENSE, len(tables), _DIM, _BOTTOM, _TOP, *crosses)  # type: ignore[arg-type]
    skipped = len(_BOTTOM) if split else 0
    size = ModelSize(
        tables=tuple(
            TableSize(t.table, t.num_rows, _DIM, state_bytes_per_column=8 if adam else 0, is_sequence=system.by_lookup)
            for t in tables
        ),
        dense_flops_per_sample=dense.flops_per_sample,
        dense_parameter_bytes=dense.parameter_bytes,
        dense_state_bytes=dense.parameter_bytes,
        activation_bytes_per_sample=dense.activation_bytes_per_sample,
        products=dense.products[skipped:],
        passes=dense.passes if adam else _custom_passes(dense.products[skipped:], len(tables)),
    )
    numbers = (point.number_bytes, point.number_bytes)
    ahead = ReplaySettings(lookahead=1, prefetch=1)
    shape = RunShape(num_ranks, ranks_per_node, point.batch_size, "cuda", ahead, number_bytes=numbers,
                     activation_bytes=point.number_bytes)  # fmt: skip
    workload = Workload(size, assumed_statistics(tables, _NUM_SAMPLES), shape)
    exchange: Any = "rows" if point.precision in system.exchanges_rows and num_ranks > 1 else "pooled"
    return Layout(
        workload,
        [
            TablePlacement(t.table, t.num_rows, _DIM, "fp32", sharding, "device", ranks, exchange)
            for t, (sharding, ranks) in zip(tables, system.places(ROWS[name], num_ranks), strict=True)
        ],
    )


def _custom_passes(products: Sequence[tuple[int, int]], num_tables: int) -> tuple[float, ...]:
    """Return the numbers of a sample that each kernel reads and writes: of layers as `DenseSize.passes`; and of the
    interaction, which all three have as one CUDA kernel each way, between vectors put together and taken apart."""
    fields, pairs = float((num_tables + 1) * _DIM), float(products[-len(_TOP)][0])
    interaction = (2 * fields, fields + pairs, 2 * fields + pairs, 2 * fields)
    return (*(float(times * outputs) for _, outputs in products for times in (2, 3, 1)), *interaction)


def _with_passes(work: StepWork, layout: Layout, rank: int, passes: float, point: Point) -> StepWork:
    """Return a rank's work with what passes over the vectors that it looks up. TensorFlow's LazyAdam (DCNv2) sums the
    gradients of equal ids into zeros (3 x 4 bytes a number); of each distinct row it gathers, computes and scatters
    both states and the weights (80 bytes a number, of which a fused kernel has 24)."""
    workload = layout.workload
    reports = [(workload.resident_report(shard), shard.columns) for shard in layout.of_ranks[rank]]
    numbers = sum(report.lookups * columns for report, columns in reports)
    moved = passes * numbers
    if point.model[0] == "dlrm_dcn":
        moved += 12 * numbers + (80 - 24) * sum(report.unique_ids * columns for report, columns in reports)
    return replace(work, activation_bytes=work.activation_bytes + moved)


def _bottom(point: Point, layout: Layout, rates: Rates) -> float:
    """Return the layers over dense features, for the whole batch, as bytes of lookups: they run beside the other ranks'
    lookups and updates."""
    dense = DenseSize("dlrm", _DENSE, len(layout.tables), _DIM, _BOTTOM, _TOP)
    products = dense.products[: len(_BOTTOM)]
    passes = tuple(float(times * outputs) for _, outputs in products for times in (2, 3, 1))
    model = replace(layout.workload.model, products=products, passes=passes)
    work = dense_work(model, layout.workload.shape.global_batch_size, point.number_bytes, rates)
    work = replace(work, launches=work.launches - SMALL_KERNELS)  # which are the first rank's already
    return step_parts(work, rates)["dense"] / rates.seconds_per_embedding_byte
