"""The parts of a training step's time: the work of one rank, times a machine's seconds for each kind of work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Literal, TypeVar

from embershard.errors import ConfigError

N = TypeVar("N", bound="Amounts")
#: Number formats of dense layers: what `train.precision` may be, and fp16, in which others train.
Precision = Literal["fp32", "tf32", "bf16", "fp16", "fp64"]


@dataclass(frozen=True)
class Amounts:
    """A value whose fields are all finite numbers, 0 or more, and within their limits."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, (least, most) = getattr(self, field.name), self.limits(field.name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not (least <= value <= most and value < math.inf):
                needed = "finite number, 0 or more" if most == math.inf else f"number from {least:g} to {most:g}"
                raise ConfigError(f"{type(self).__name__}.{field.name}: got {value!r}, needed a {needed}.")

    @staticmethod
    def limits(name: str) -> tuple[float, float]:
        """Return the least and the most that a field may be."""
        return 0.0, math.inf

    def to_dict(self) -> dict[str, float]:
        """The fields by name, for JSON and TOML."""
        return asdict(self)

    def scaled(self: N, factor: float) -> N:
        """Multiply every field by `factor`."""
        return type(self)(**{name: value * factor for name, value in self.to_dict().items()})


@dataclass(frozen=True)
class StepWork(Amounts):
    """The work of one rank in one step, for its B samples and for the N ids that reach its tables.

    Attributes:
        dense_flops: floating-point operations of the dense part, forward and backward; on a GPU of those of its
            kernels that arithmetic limits.
        activation_bytes: on a CPU those that the forward keeps; on a GPU those that the kernels of the dense part read
            and write which memory limits.
        launches: on a GPU, kernels that are too small for either, and take what any kernel takes.
        update_bytes: parameters that the dense optimizer updates, however few the samples.
        embedding_bytes: rows read and written in device memory, optimizer state included.
        row_ids: ids of the B samples in tables that exchange distinct rows: found distinct, and pooled, by the rank.
        planned_ids, unique_ids: N ids for which the rank's caches find slots, and the distinct ones of them.
        fills, write_backs: rows copied to the device, and back to the host.
        bytes_to_device, bytes_to_host: their payloads.
        sent_id_bytes, sent_embedding_bytes, sent_gradient_bytes: for the tables, to ranks of the same node; in each
            exchange the larger of sent and received.
        network_id_bytes, network_embedding_bytes, network_gradient_bytes: for the tables, to other nodes.
        sent_sync_bytes, network_sync_bytes: of rows that groups average, in the mean of all steps: to ranks of the same
            node, and to other nodes.
        all_reduce_bytes: sent for the dense gradients.
        num_collectives: operations among all ranks, each with its latency.
        input_seconds: seconds of one core to read and parse B samples.
        more_pieces: micro-batches of the step beyond the first; the host launches each of them.
        moved_pages: read from a file of rows, and written to it.
    """

    dense_flops: float = 0
    activation_bytes: float = 0
    launches: float = 0
    update_bytes: float = 0
    embedding_bytes: float = 0
    row_ids: float = 0
    planned_ids: float = 0
    unique_ids: float = 0
    fills: float = 0
    write_backs: float = 0
    bytes_to_device: float = 0
    bytes_to_host: float = 0
    sent_id_bytes: float = 0
    sent_embedding_bytes: float = 0
    sent_gradient_bytes: float = 0
    network_id_bytes: float = 0
    network_embedding_bytes: float = 0
    network_gradient_bytes: float = 0
    sent_sync_bytes: float = 0
    network_sync_bytes: float = 0
    all_reduce_bytes: float = 0
    num_collectives: float = 0
    input_seconds: float = 0
    moved_pages: float = 0
    more_pieces: float = 0

    @property
    def all_to_all_bytes(self) -> float:
        """What is sent for the tables: ids, embeddings and gradients."""
        within = self.sent_id_bytes + self.sent_embedding_bytes + self.sent_gradient_bytes
        return within + self.network_id_bytes + self.network_embedding_bytes + self.network_gradient_bytes

    @classmethod
    def total(cls, works: Sequence[StepWork]) -> StepWork:
        """The sum of the works."""
        return cls(**{field.name: sum(getattr(work, field.name) for work in works) for field in fields(cls)})

    @classmethod
    def mean(cls, works: Sequence[StepWork]) -> StepWork:
        """The mean of the works."""
        return cls.total(works).scaled(1 / len(works))


@dataclass(frozen=True)
class Rates(Amounts):
    """Seconds that one rank of a machine takes per unit of each kind of `StepWork`, for one number of ranks.

    Attributes:
        seconds_per_all_to_all_byte, seconds_per_network_byte: of what is sent for the tables within a node, and to
            other nodes: one after the other.
        seconds_per_page: of the disk, which its node's ranks share; it works beside everything else. 0: not known.
        seconds_per_input_second: share of a core's parsing time that slows the step: parsing runs in threads.
        step_overhead_seconds: of each piece of a step, whatever its work. On a GPU it is the host's, which launches the
            kernels beside the GPU's work: a step takes at least as long.
    """

    seconds_per_flop: float = 0
    seconds_per_activation_byte: float = 0
    seconds_per_launch: float = 0
    seconds_per_update_byte: float = 0
    seconds_per_embedding_byte: float = 0
    seconds_per_row_id: float = 0
    seconds_per_planned_id: float = 0
    seconds_per_unique_id: float = 0
    seconds_per_fill: float = 0
    seconds_per_write_back: float = 0
    seconds_per_byte_to_device: float = 0
    seconds_per_byte_to_host: float = 0
    seconds_per_all_to_all_byte: float = 0
    seconds_per_network_byte: float = 0
    seconds_per_all_reduce_byte: float = 0
    seconds_per_collective: float = 0
    seconds_per_input_second: float = 0
    seconds_per_page: float = 0
    step_overhead_seconds: float = 0

    @staticmethod
    def limits(name: str) -> tuple[float, float]:
        """Return those with which sums of a step stay numbers."""
        return 0.0, 1e9


#: Of every rank, or of each one where they are on machines of several kinds.
RankRates = Rates | tuple[Rates, ...]


def of_each(rates: RankRates, num_ranks: int) -> Sequence[Rates]:
    """Return the rates of each rank."""
    return (rates,) * num_ranks if isinstance(rates, Rates) else rates


def fastest(rates: RankRates) -> Rates:
    """Return the rates of a machine that is as fast in each kind of work as the fastest rank."""
    if isinstance(rates, Rates):
        return rates
    return Rates(**{field.name: min(getattr(each, field.name) for each in rates) for field in fields(Rates)})


def changed(rates: RankRates, change: Callable[[Rates], Rates]) -> RankRates:
    """Return the rates with a change of all ranks'."""
    return change(rates) if isinstance(rates, Rates) else tuple(map(change, rates))


#: Kind of work, its rate, and the part of a step's time that it belongs to.
TERMS: tuple[tuple[str, str, str], ...] = (
    ("dense_flops", "seconds_per_flop", "dense"),
    ("activation_bytes", "seconds_per_activation_byte", "dense"),
    ("launches", "seconds_per_launch", "dense"),
    ("update_bytes", "seconds_per_update_byte", "optimizer"),
    ("embedding_bytes", "seconds_per_embedding_byte", "embedding"),
    ("row_ids", "seconds_per_row_id", "embedding"),
    ("planned_ids", "seconds_per_planned_id", "planning"),
    ("unique_ids", "seconds_per_unique_id", "planning"),
    ("fills", "seconds_per_fill", "fills"),
    ("bytes_to_device", "seconds_per_byte_to_device", "fills"),
    ("write_backs", "seconds_per_write_back", "write_backs"),
    ("bytes_to_host", "seconds_per_byte_to_host", "write_backs"),
    ("sent_id_bytes", "seconds_per_all_to_all_byte", "all_to_all"),
    ("sent_embedding_bytes", "seconds_per_all_to_all_byte", "all_to_all"),
    ("sent_gradient_bytes", "seconds_per_all_to_all_byte", "all_to_all"),
    ("network_id_bytes", "seconds_per_network_byte", "network"),
    ("network_embedding_bytes", "seconds_per_network_byte", "network"),
    ("network_gradient_bytes", "seconds_per_network_byte", "network"),
    ("sent_sync_bytes", "seconds_per_all_to_all_byte", "sync"),
    ("network_sync_bytes", "seconds_per_network_byte", "sync"),
    ("all_reduce_bytes", "seconds_per_all_reduce_byte", "all_reduce"),
    ("num_collectives", "seconds_per_collective", "latency"),
    ("input_seconds", "seconds_per_input_second", "input"),
    ("moved_pages", "seconds_per_page", "disk"),
    ("more_pieces", "step_overhead_seconds", "overhead"),
)

#: All parts of a step's time.
PARTS: tuple[str, ...] = tuple(dict.fromkeys(part for _, _, part in TERMS))


#: Parts of which a rank does the work alone, with its cores and its memory.
_OWN_PARTS = ("dense", "optimizer", "embedding", "planning", "fills", "write_backs")


def own_work(rates: Rates) -> dict[str, float]:
    """Return the rates, by name, of the work that a rank does alone.

    >>> rates = own_work(Rates(seconds_per_fill=1e-6, seconds_per_collective=1e-4))
    >>> rates["seconds_per_fill"], "seconds_per_collective" in rates
    (1e-06, False)
    """
    return {rate: float(getattr(rates, rate)) for _, rate, part in TERMS if part in _OWN_PARTS}


def step_parts(work: StepWork, rates: Rates) -> dict[str, float]:
    """Return the seconds of each of the `PARTS` of a rank's step. On a CPU, which does one thing after the other, the
    sum of all but the disk's, which works beside them, is the time of a step of one rank;
    `embershard.planning.simulate.step_replay` has what overlaps on a GPU.

    >>> step_parts(StepWork(planned_ids=1000), Rates(seconds_per_planned_id=1e-6))["planning"]
    0.001
    """
    parts = dict.fromkeys(PARTS, 0.0)
    for amount, rate, part in TERMS:
        parts[part] += getattr(work, amount) * getattr(rates, rate)
    parts["overhead"] += rates.step_overhead_seconds
    return parts
