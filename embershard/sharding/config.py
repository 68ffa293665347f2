"""Settings of the placement of tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from embershard.cache.config import CacheConfig
from embershard.errors import ConfigError
from embershard.lazy_names import named
from embershard.settings.resume_rules import AsOrder, Free, OfTraining
from embershard.sharding.pins import TablePin

if TYPE_CHECKING:
    from embershard.sharding.sizes import ModeMemory

CommDtype = Literal["fp32", "fp16", "bf16", "int8", "fp8"]
SyncDtype = Literal["fp32", "fp16"]
ExchangeChoice = Literal["pooled", "rows", "auto"]
Mode = Literal["sharded", "hot_cold", "data_parallel"]
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class ShardingConfig:
    """Places of the tables, sizes of the caches, and number types between ranks."""

    plan: Free[str | None] = None
    """File of a plan that `embershard plan` made. It decides where every table is and how many slots every cache has;
    `cache.ratio`, `cache.device_bytes` and `sharding.exchange` are for planning then. Without it, TorchRec's planner
    places the tables."""

    forward_dtype: OfTraining[CommDtype] = "fp32"
    """Type of pooled embeddings between ranks. "fp16" and "bf16" halve the bytes and round: training then differs from
    that in fp32, alike with and without a cache. "bf16" on GPUs only. "int8" and "fp8" send a byte for each number, and
    four for each embedding of a sample and feature, its scale."""

    backward_dtype: OfTraining[CommDtype] = "fp32"
    """The same for their gradients."""

    exchange: Free[ExchangeChoice] = "pooled"
    """What travels between ranks. "pooled": one embedding per sample and feature, as in TorchRec. "rows": each distinct
    row once per rank and batch; it is pooled where the samples are. "rows" moves fewer bytes where bags are short and
    rows repeat in a batch, more where bags are long. It rounds sums in another order. "auto", for planning only, takes
    for each table what moves fewer bytes by the profile. Without a cache, all tables exchange pooled embeddings."""

    mode: AsOrder[Mode] = "sharded"
    """Where rows are trained. "sharded": each row on the rank that has its shard. "hot_cold": the most frequent rows on
    every rank, with equal values, the others as in "sharded"; batches are packed of samples that need hot rows only,
    and of the others (FAE). "data_parallel": all rows of a batch on every rank, with equal values (cDLRM); each rank's
    cache has its `cache.ratio` of the whole tables, and all ranks must be on one machine, on its CPU."""

    hot_bytes: AsOrder[int | None] = None
    """Device memory of each rank for hot rows and their optimizer states, in bytes. "hot_cold" needs it; other modes
    refuse it."""

    groups: OfTraining[int] = 1
    """Groups of ranks that are replicas of each other: tables are sharded over the ranks of a group, and groups average
    the rows that they trained (docs/groups.md). 1: all ranks shard the tables together."""

    sync_every: OfTraining[int] = 1
    """Steps between averages of the groups' rows. Saves and evaluations wait for one."""

    sync_delay: OfTraining[int] = 0
    """Steps that an average is computed beside; rows get it behind them, and keep what they added. That hides the link
    between groups. Averages before saves and evaluations have no delay: when these take place changes what is
    trained."""

    sync_dtype: OfTraining[SyncDtype] = "fp32"
    """Type of weights in averages. "fp16" sends half of their bytes and rounds rows that were trained: what changes a
    weight by less than 1/4096 between two averages is lost. Optimizer states are sent as they are."""

    moment_scale: OfTraining[float | None] = None
    """With groups, a factor on the sums of squares by whose root Adagrad divides: from 1 / groups to 1, as gradients of
    a group are means over fewer samples. Of "adagrad" and "rowwise_adagrad"."""

    pin: Free[dict[str, TablePin]] = field(default_factory=dict, hash=False)
    """What you decide of single tables' places, by table; for planning, which decides the rest. `[sharding.pin.t_C3]`
    with `type`, `ranks`, `kernel` ("cached", or whole on the "device") or `slots` of each cache that has rows of it."""

    device_bytes: Free[int | tuple[int, ...] | None] = None
    """Device memory that a rank may use for everything, in bytes: one number for all ranks, or one for each. A plan
    keeps to it, where the command line has no other, and a run that needs more is refused at its start."""

    def __post_init__(self) -> None:
        choices = {"exchange": ExchangeChoice, "forward_dtype": CommDtype, "backward_dtype": CommDtype, "mode": Mode}
        for name, choice in {**choices, "sync_dtype": SyncDtype}.items():
            value = getattr(self, name)
            if value not in get_args(choice):
                raise ConfigError(f"sharding.{name}: got {value!r}, needed one of {', '.join(get_args(choice))}.")
        if (self.mode == "hot_cold") != (self.hot_bytes is not None):
            raise ConfigError(
                f'sharding.mode={self.mode!r}, sharding.hot_bytes={self.hot_bytes}: needed both mode="hot_cold" and '
                "hot_bytes, or neither."
            )
        defaults = {"plan": None, "exchange": "pooled", "forward_dtype": "fp32", "backward_dtype": "fp32"}
        defaults["pin"] = {}  # type: ignore[assignment]
        for name, default in defaults.items() if self.mode == "data_parallel" else ():
            if getattr(self, name) != default:
                raise ConfigError(
                    f"sharding.{name}={getattr(self, name)!r} has no effect with sharding.mode='data_parallel': no "
                    "table is placed, and no embedding travels. Remove one of the two."
                )
        if self.hot_bytes is not None and self.hot_bytes < 1:
            raise ConfigError(f"sharding.hot_bytes: got {self.hot_bytes}, needed at least 1.")
        of_groups = (self.groups, self.sync_every, self.sync_delay, self.sync_dtype, self.moment_scale)
        if of_groups != (1, 1, 0, "fp32", None):
            named("embershard.extras.groups.settings:check_sharding")(self)
        limits = self.device_bytes if isinstance(self.device_bytes, tuple) else (self.device_bytes or 1,)
        if self.device_bytes == 0 or not limits or min(limits) < 1:
            raise ConfigError(f"sharding.device_bytes: got {self.device_bytes}, needed 1 or more, of all or of each.")

    def group_shape(self, world_size: int, ranks_per_node: int) -> tuple[int, int]:
        """Return the ranks that shard the tables together, and how many of them are on a node.

        >>> ShardingConfig(groups=2).group_shape(8, 8), ShardingConfig(groups=2).group_shape(32, 8)
        ((4, 4), (16, 8))
        """
        return (size := max(1, world_size // self.groups)), min(size, ranks_per_node)

    def device_limits(self, world_size: int) -> tuple[int, ...]:
        """Return the device memory that each rank may use, [ranks]; empty: it is not limited.

        Raises:
            ConfigError: the limits are for another number of ranks.

        >>> ShardingConfig(device_bytes=9).device_limits(2), ShardingConfig(device_bytes=(9, 5)).device_limits(2)
        ((9, 9), (9, 5))
        """
        if self.device_bytes is None:
            return ()
        if isinstance(self.device_bytes, int):
            return (self.device_bytes,) * world_size
        if len(self.device_bytes) != world_size:
            raise ConfigError(
                f"sharding.device_bytes: got {len(self.device_bytes)} numbers, needed one, or one for each of "
                f"{world_size} ranks."
            )
        return self.device_bytes

    @property
    def mode_memory(self) -> ModeMemory | None:
        """What the mode takes of each rank's device memory beside caches and tables; None: nothing."""
        if self.hot_bytes is None:
            return None
        of_mode: ModeMemory = named("embershard.extras.hot_cold.memory:HotRowsMemory")(self.hot_bytes)
        return of_mode

    @property
    def number_bytes(self) -> tuple[int, int]:
        """Bytes of an embedding's number between ranks, and of its gradient's; 1: each row has a scale, too."""
        return _BYTES[self.forward_dtype], _BYTES[self.backward_dtype]


def check_no_size(cache: CacheConfig) -> None:
    """Raise `ConfigError` when the settings give the cache a size beside a plan's."""
    for name in ("ratio", "device_bytes"):
        value = getattr(cache, name)
        if value is not None:
            raise ConfigError(
                f"cache.{name}={value} has no effect with a plan, which gives every cache its slots. Remove one."
            )
