"""The shape of a run: its ranks, its batches and its caches' settings, for predictions of bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from embershard.cache.config import CachePolicy, MapKind
from embershard.sharding.config import ExchangeChoice
from embershard.sharding.home_sizes import HomeSizes
from embershard.sharding.sizes import ModeMemory


@dataclass(frozen=True)
class ReplaySettings:
    """The rows that stay, and how far ahead is looked; as `CacheConfig` and the trainer resolve it.

    A value of its own beside `RunShape`, since a trace is replayed without a run, too: to compare policies, and for the
    hit rate of any size.

    Attributes:
        policy: rule by which the cache chooses its rows.
        lookahead: batches known beyond the one in training; 0: a batch's rows come in at its own step.
        prefetch: batches resident beyond the one in training.
        profile_samples: samples that were counted before training: `frequency` needs counts, `lfu` starts with them.
            0: none were counted; None: all of the trace.
        shuffle_window: samples among which an epoch's order is mixed; 0: every epoch has the same order.
    """

    policy: CachePolicy = field(default_factory=CachePolicy)
    lookahead: int = 64
    prefetch: int = 2
    profile_samples: int | None = 0
    shuffle_window: int = 0

    @property
    def ahead(self) -> tuple[int, int]:
        """Batches beyond the one in training that are known, and that are resident."""
        return self.lookahead, self.prefetch


@dataclass(frozen=True)
class RunShape:
    """A run: the ranks, the batches and the caches' settings.

    Attributes:
        world_size, ranks_per_node: ranks in all, and per node.
        batch_size: samples per rank and step.
        accumulate: micro-batches of a rank's batch, whose activations exist one after the other.
        device: "cpu" or "cuda".
        cache: the rows that the caches keep, and how far ahead is looked.
        num_steps: steps of the run, where they are known.
        number_bytes: bytes of one number of an embedding, and of its gradient, between ranks.
        slot_map: kind of the maps from rows to slots; None where each pool's size decides.
        exchange: what travels between ranks; "auto": of each table what takes fewer bytes.
        mode_memory: what the mode takes beside caches and tables; None: nothing.
        reserve_bytes: device memory of a rank that is left free.
        activation_bytes: of a number that dense layers pass on.
        home: of the rows, in host memory.
        cores_per_node: that a CPU's ranks share; None: every rank has its own.
        groups: of so many ranks in all, which are replicas of each other; all other fields are of one group.
        groups_per_node: groups that share a node; 1: a group has a node or more.
        sync_every: steps from one average of the groups' rows to the next, and `sync_number_bytes` of a weight in it.
    """

    world_size: int
    ranks_per_node: int
    batch_size: int
    device: Literal["cpu", "cuda"]
    cache: ReplaySettings
    num_steps: int | None = None
    number_bytes: tuple[float, float] = (4, 4)
    slot_map: MapKind | None = None
    exchange: ExchangeChoice = "pooled"
    mode_memory: ModeMemory | None = None
    cores_per_node: int | None = None
    reserve_bytes: int = 0
    accumulate: int = 1
    activation_bytes: float = 4
    home: HomeSizes = field(default_factory=HomeSizes)
    groups: int = 1
    groups_per_node: int = 1
    sync_every: int = 1
    sync_number_bytes: int = 4

    @property
    def all_ranks(self) -> int:
        """Ranks of all groups."""
        return self.groups * self.world_size

    @property
    def pieces(self) -> int:
        """Micro-batches of a step."""
        return min(self.accumulate, self.batch_size)

    @property
    def cache_of_pieces(self) -> ReplaySettings:
        """The caches' settings as the pipeline takes them, which counts pieces. A CPU's holds one ahead."""
        held = self.cache.prefetch * (self.pieces if self.device == "cuda" else 1)
        return replace(self.cache, lookahead=self.cache.lookahead * self.pieces, prefetch=held)

    @property
    def micro_batch_size(self) -> int:
        """Samples of a rank that are forwarded together, at most."""
        return -(-self.batch_size // self.accumulate)

    @property
    def global_batch_size(self) -> int:
        """Samples of a step, over the ranks of a group: of all tables' lookups."""
        return self.batch_size * self.world_size
