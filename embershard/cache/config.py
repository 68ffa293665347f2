"""Settings of the cache: its size, as a ratio or a byte budget, and defaults for the rest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from embershard.errors import ConfigError
from embershard.settings.own_code import names_function
from embershard.settings.resume_rules import Free, OfTraining

#: Scoring rules; `make_scores` in `policies.py` makes the scores of each.
Scoring = Literal["frequency", "lfu", "lru"]
Policy = Literal["lookahead", Scoring, "static"]
TransferKind = Literal["plain", "staged", "triton_uva"]
Overflow = Literal["grow", "raise"]
HostKind = Literal["memory", "mmap", "file"]
MapKind = Literal["array", "hashed"]

#: Types of rows in host memory; slots are float32.
HostType = Literal["fp32", "fp16", "int8"]

DEFAULT_RATIO = 0.05
DEFAULT_FULL_ROWS = 0.01
# Without a least size, a pool of three rows at a ratio of 3 % would have no slot.
LEAST_SLOTS = 16
SCORE_BYTES = 4
#: Most rows of a pool, because keys are int32. Planning keeps to it, too.
MOST_POOL_ROWS = 2**31 - 1


@dataclass(frozen=True)
class CachePolicy:
    """Rule by which a cache chooses its rows: `CacheConfig` with every default resolved.

    Attributes:
        scoring: order in which rows without a known use are evicted.
        by_next_use: evict the rows without a known use first, then those whose next use is furthest.
        warmup: fill the cache with the profile's most frequent rows before the first batch.
        decay: factor of old uses per batch under `lfu`; None: 1.
        is_static: only the rows of the warm-up stay; any other row leaves once its batch has trained.
        own: a policy of one's own, "module:function", in place of `scoring`; with its `folder`.
    """

    scoring: Scoring = "lfu"
    by_next_use: bool = True
    warmup: bool = False
    decay: float | None = None
    is_static: bool = False
    own: str | None = None
    folder: str | None = None

    @property
    def is_recency(self) -> bool:
        """True if rows are compared by their last use alone."""
        return self.scoring == "lru"

    @property
    def score_bytes(self) -> int:
        """Bytes of a score: every slot has one on the device, and every row one in host memory."""
        return 0 if self.is_recency else SCORE_BYTES


@dataclass(frozen=True)
class CacheConfig:
    """Size and rules of the device cache of embedding rows.

    At most one of `ratio` and `device_bytes` is set; with neither, the ratio is 0.05. A setting that contradicts
    another one, or that would have no effect, raises `ConfigError`.

    >>> CacheConfig(ratio=0.015, policy="lru").slot_ratio
    0.015
    """

    ratio: Free[float | None] = None
    """Slots on the device as a share of the rows that a rank holds, in (0, 1]. Default: 0.05."""

    device_bytes: Free[int | None] = None
    """Device memory of this rank for slots, optimizer states and maps together, in bytes, per sharded module."""

    policy: Free[Policy | str | None] = None
    """Order in which rows are evicted. `lookahead`, the default: first rows without a known use, by frequency; then
    rows whose next use is furthest. Batches become known by a `LookAheadPipeline`; without one this equals
    `frequency` with a profile, else `lfu`. `frequency`: least frequent in the profile first. `lfu`: least used so far
    first; a row's count survives eviction. `lru`: longest unused first. `static`, a baseline: the profile's most
    frequent rows stay, and other rows are there for their own batches only; see docs/modes.md. Or a policy of one's
    own, "module:function"; see docs/cache.md."""

    policy_folder: Free[str | None] = None
    """Folder in which the module of a policy of one's own is looked up besides the Python path. Default: that of the
    settings' file. What is inside of a run's folder is imported only with --trust-code."""

    warmup: Free[bool | None] = None
    """Fill the cache with the profile's most frequent rows before the first step. Default: true with a profile."""

    host: Free[HostKind] = "memory"
    """Storage of a rank's full shard. `memory`: plain host memory. `mmap`: files mapped into memory; the system chooses
    what stays there. `file`: a file, of whose rows those that are used next are in `host_bytes` of memory; the
    look-ahead chooses, and reads rows before a step needs them."""

    host_dir: Free[str | None] = None
    """Folder for the files of `host = "mmap"` and `host = "file"`. They are working storage, freed with the process."""

    host_dtype: OfTraining[HostType] = "fp32"
    """Type of the weights in host memory; slots and optimizer states stay fp32. `fp16`: half precision. `int8`: a byte
    per weight and a step per row, a quarter of the memory. A row is rounded after each of its updates, so that the
    result depends on no cache, look-ahead or save; see docs/cache.md."""

    host_dtypes: OfTraining[dict[str, HostType]] = field(default_factory=dict, hash=False)
    """The same of some tables, by their names, in place of `host_dtype`."""

    full_rows: OfTraining[float | None] = None
    """Share of the rows of each int8 table that are not rounded: the most frequent ones of the profile, which train
    most often. Tables of at most 4096 rows stay whole. 0: every row is rounded, and no profile is needed. Default:
    0.01."""

    transfer: Free[TransferKind | None] = None
    """Transfer of rows between host and device. `triton_uva`: a kernel reads and writes page-locked host memory.
    `staged`: through page-locked buffers, for mapped files or if memory cannot be locked. `plain`: torch's indexed
    copies. Default: `plain` on a CPU; on a GPU `triton_uva` with `host = "memory"`, else `staged`."""

    slot_map: Free[MapKind | None] = None
    """Map from rows to slots. `array`: 4 bytes per row of the shard. `hashed`: 24 bytes per slot, more if more rows
    than slots are known ahead; look-ups take longer. Default: `hashed` for pools of more than 2^27 rows, else `array`.
    On a CPU the map is an array, whose pages are allocated as rows are cached."""

    overflow: Free[Overflow] = "grow"
    """Reaction to a batch with more rows than slots: `grow` enlarges the cache with a warning, `raise` raises."""

    decay: Free[float | None] = None
    """Factor in (0, 1) by which `lfu`, and `lookahead` if it counts as `lfu` does, reduce old uses with every batch.
    Default: no decay."""

    enabled: Free[bool] = True
    """False trains with stock TorchRec, all rows on the device. The losses are the same, bit for bit."""

    host_bytes: Free[int | None] = None
    """Host memory of this rank for the rows of `host = "file"`, weights and optimizer states, in bytes, per sharded
    module. Rows that are on the device take a part of it: at least twice what the slots take is needed."""

    def __post_init__(self) -> None:
        if self.ratio is not None and self.device_bytes is not None:
            raise ConfigError(
                f"cache.ratio={self.ratio} and cache.device_bytes={self.device_bytes} are both set; "
                "one of them decides the size. Remove the other."
            )
        _is("ratio", self.ratio, (int, float))
        _is("device_bytes", self.device_bytes, (int,))
        _is("warmup", self.warmup, (bool,))
        _is("enabled", self.enabled, (bool,))
        _is("host_dir", self.host_dir, (str,))
        _is("decay", self.decay, (int, float))
        if self.ratio is not None and not 0.0 < self.ratio <= 1.0:
            raise ConfigError(f"cache.ratio must be in (0, 1], got {self.ratio}; 0.015 keeps 1.5 % of the rows")
        if self.device_bytes is not None and self.device_bytes <= 0:
            raise ConfigError(f"cache.device_bytes must be positive, got {self.device_bytes}")
        _is("policy_folder", self.policy_folder, (str,))
        if not self.has_own_policy:
            _one_of("policy", self.policy, (None, *get_args(Policy)), ', or "module:function" for one of your own')
            if self.policy_folder is not None:
                raise ConfigError('cache.policy_folder has no effect without cache.policy = "module:function"')
        self._check_host()
        self._check_small_rows()
        _one_of("overflow", self.overflow, get_args(Overflow))
        _one_of("slot_map", self.slot_map, (None, *get_args(MapKind)))
        _one_of("transfer", self.transfer, (None, *get_args(TransferKind)))
        if self.decay is not None:
            if self.policy not in (None, "lookahead", "lfu"):
                raise ConfigError(f'cache.decay has no effect with cache.policy="{self.policy}"; it belongs to "lfu"')
            if not 0.0 < self.decay < 1.0:
                raise ConfigError(f"cache.decay must be in (0, 1), got {self.decay}; 0.999 halves a count in 693 steps")

    def _check_host(self) -> None:
        _one_of("host", self.host, get_args(HostKind))
        _is("host_bytes", self.host_bytes, (int,))
        if self.transfer == "triton_uva" and self.host == "mmap":
            raise ConfigError(
                'cache.transfer="triton_uva" needs host rows in page-locked memory, and cache.host="mmap" has '
                'them in files; set cache.transfer="staged" or cache.host="memory"'
            )
        if self.host != "memory" and not self.host_dir:
            more = ", and cache.host_bytes, the memory for the rows in front of it" if self.host == "file" else ""
            raise ConfigError(
                f'cache.host="{self.host}" needs cache.host_dir, a folder on a disk with room for the tables{more}'
            )
        if self.host == "memory" and self.host_dir is not None:
            raise ConfigError(
                f'cache.host_dir={self.host_dir!r} has no effect with cache.host="memory"; set cache.host="file" or '
                '"mmap", or remove it'
            )
        if (self.host == "file") != (self.host_bytes is not None):
            got = "no cache.host_bytes" if self.host_bytes is None else f"cache.host_bytes={self.host_bytes}"
            raise ConfigError(
                f'got {got} with cache.host="{self.host}"; host_bytes is the memory for rows in front of a file: set '
                'both host = "file" and host_bytes, or neither'
            )
        if self.host_bytes is not None and self.host_bytes <= 0:
            raise ConfigError(f"cache.host_bytes must be positive, got {self.host_bytes}")
        if self.host == "file":
            self._check_file()

    def _check_file(self) -> None:
        """Raise where rows in a file meet settings that know only rows in memory, or choose rows otherwise."""
        others = {
            "cache.policy": (self.policy, (None, "lookahead")),
            "cache.transfer": (self.transfer, (None,)),
            "cache.host_dtype": (", ".join(self.small_types) or None, (None,)),
        }
        for name, (got, allowed) in others.items():
            if got not in allowed:
                needed = " or ".join(f'"{each}"' for each in allowed if each is not None) or "the default"
                raise ConfigError(
                    f'{name}: got {got!r} with cache.host="file", needed {needed}: rows are read from the file by what '
                    "the look-ahead knows, as fp32, and move between slots and memory in one way. Leave it out"
                )

    def _check_small_rows(self) -> None:
        _one_of("host_dtype", self.host_dtype, get_args(HostType))
        for table, host_type in self.host_dtypes.items():
            _one_of(f"host_dtypes.{table}", host_type, get_args(HostType))
        _is("full_rows", self.full_rows, (int, float))
        if self.full_rows is not None:
            if "int8" not in self.small_types:
                raise ConfigError('cache.full_rows has no effect without cache.host_dtype = "int8"; remove it')
            if not 0.0 <= self.full_rows < 1.0:
                raise ConfigError(f"cache.full_rows must be in [0, 1), got {self.full_rows}; 0.01 keeps 1 % as fp32")
        if self.small_types and not self.enabled:
            raise ConfigError('cache.host_dtype has no effect with cache.enabled=false; set "fp32", or use the cache')

    @property
    def rows_are_memory(self) -> bool:
        """True if all rows are host memory that others may read and write, mapped or not."""
        return self.host in ("memory", "mmap")

    @property
    def small_types(self) -> list[str]:
        """The small types of rows in host memory; none: all rows are as in the slots."""
        return sorted({self.host_dtype, *self.host_dtypes.values()} - {"fp32"})

    @property
    def rounds_rows(self) -> bool:
        """True if rows are rounded to a small type: what they learn is not what they learn as fp32."""
        return bool(self.small_types)

    def small_type_of(self, table: str) -> Literal["fp16", "int8"] | None:
        """Return the small type of a table's rows in host memory; None: they are as in the slots.

        >>> CacheConfig(host_dtype="int8", host_dtypes={"clicks": "fp32"}).small_type_of("users")
        'int8'
        """
        found = self.host_dtypes.get(table, self.host_dtype)
        return None if found == "fp32" else found

    def group_suffix(self, table: str) -> str:
        """Return what tells the table's cache from those of other types of host rows; nothing where all have one."""
        return f", {self.small_type_of(table) or 'fp32'}" if self.host_dtypes else ""

    @property
    def full_share(self) -> float:
        """Share of an int8 table's rows that stay full."""
        return DEFAULT_FULL_ROWS if self.full_rows is None else self.full_rows

    def check_profile(self, has_profile: bool) -> None:
        """Raise `ConfigError` where full rows are asked for, and no profile can choose them."""
        if "int8" in self.small_types and self.full_share and not has_profile:
            raise ConfigError(
                f'cache.host_dtype="int8" keeps the most frequent {self.full_share:.2%} of the rows full, and there is '
                "no profile to choose them by. Count one (profile.samples = 200000, or profile.path), or set "
                'cache.full_rows = 0, which trains rows of many updates worse; "fp16" needs none'
            )

    @property
    def has_own_policy(self) -> bool:
        """True if the policy is a function of one's own."""
        return names_function(self.policy)

    @property
    def slot_ratio(self) -> float | None:
        """The ratio in force; None if `device_bytes` decides."""
        return self.ratio if self.ratio is not None or self.device_bytes is not None else DEFAULT_RATIO

    def policy_for(self, has_profile: bool) -> CachePolicy:
        """Resolve the defaults of a run with or without a frequency profile.

        Raises:
            ConfigError: a setting needs a profile and there is none, or contradicts the policy that follows.

        >>> CacheConfig().policy_for(has_profile=True).scoring
        'frequency'
        """
        policy = self.policy or "lookahead"
        if not has_profile and policy in ("frequency", "static"):
            raise ConfigError(f'cache.policy="{policy}" needs a FrequencyProfile: pass profile=..., or use "lfu"')
        if policy == "static" and self.warmup is False:
            raise ConfigError('cache.policy="static" keeps the rows of the warm-up; remove cache.warmup=False')
        if not has_profile and self.warmup:
            raise ConfigError("cache.warmup=True needs a FrequencyProfile to choose the rows from: pass profile=...")
        if has_profile and policy == "lru" and self.warmup is False:
            raise ConfigError('a profile has no effect with cache.policy="lru" and cache.warmup=False; drop one')
        counted: Scoring = "frequency" if has_profile and self.decay is None else "lfu"
        warmup = has_profile if self.warmup is None else self.warmup
        if self.has_own_policy:
            return CachePolicy("lfu", by_next_use=False, warmup=warmup, own=policy, folder=self.policy_folder)
        return CachePolicy(
            scoring=counted if policy == "lookahead" else "frequency" if policy == "static" else cast(Scoring, policy),
            by_next_use=policy == "lookahead",
            warmup=warmup,
            decay=self.decay,
            is_static=policy == "static",
        )


def _is(name: str, value: object, types: tuple[type, ...]) -> None:
    is_wrong_bool = isinstance(value, bool) and bool not in types
    if value is not None and (not isinstance(value, types) or is_wrong_bool):
        needed = " or ".join(kind.__name__ for kind in types)
        raise ConfigError(f"cache.{name} must be {needed}, got {value!r} ({type(value).__name__})")


def _one_of(name: str, value: object, allowed: tuple[object, ...], more: str = "") -> None:
    if value not in allowed:
        names = ", ".join(repr(choice) for choice in allowed if choice is not None)
        raise ConfigError(f"cache.{name} must be one of {names}{more}, got {value!r}")
