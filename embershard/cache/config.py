"""Settings of the cache: its size, as a ratio or a byte budget, and defaults for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from embershard.errors import ConfigError
from embershard.settings.own_code import names_function
from embershard.settings.resume_rules import Free

#: Scoring rules; `make_scores` in `policies.py` makes the scores of each.
Scoring = Literal["frequency", "lfu", "lru"]
Policy = Literal["lookahead", Scoring, "static"]
TransferKind = Literal["plain", "staged", "triton_uva"]
Overflow = Literal["grow", "raise"]
MapKind = Literal["array", "hashed"]

DEFAULT_RATIO = 0.05
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

    host: Free[Literal["memory", "mmap"]] = "memory"
    """Storage of a rank's full shard: plain host memory, or files mapped into memory."""

    host_dir: Free[str | None] = None
    """Folder for the files of `host = "mmap"`. They are working storage, freed with the process."""

    transfer: Free[TransferKind | None] = None
    """Transfer of rows between host and device. `triton_uva`: a kernel reads and writes page-locked host memory.
    `staged`: through page-locked buffers, for mapped files or if memory cannot be locked. `plain`: torch's indexed
    copies. Default: `plain` on a CPU; on a GPU `triton_uva` with `host = "memory"`, else `staged`."""

    slot_map: Free[MapKind | None] = None
    """Map from rows to slots. `array`: 4 bytes per row of the shard. `hashed`: 24 bytes per slot, more if more rows
    than slots are known ahead; look-ups take longer. Default: `array`; on a GPU `hashed` for pools of more than 2^27
    rows."""

    overflow: Free[Overflow] = "grow"
    """Reaction to a batch with more rows than slots: `grow` enlarges the cache with a warning, `raise` raises."""

    decay: Free[float | None] = None
    """Factor in (0, 1) by which `lfu`, and `lookahead` if it counts as `lfu` does, reduce old uses with every batch.
    Default: no decay."""

    enabled: Free[bool] = True
    """False trains with stock TorchRec, all rows on the device. The losses are the same, bit for bit."""

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
        _one_of("host", self.host, ("memory", "mmap"))
        _one_of("overflow", self.overflow, get_args(Overflow))
        _one_of("slot_map", self.slot_map, (None, *get_args(MapKind)))
        _one_of("transfer", self.transfer, (None, *get_args(TransferKind)))
        if self.transfer == "triton_uva" and self.host == "mmap":
            raise ConfigError(
                'cache.transfer="triton_uva" needs host rows in page-locked memory, and cache.host="mmap" has them in '
                'files; set cache.transfer="staged" or cache.host="memory"'
            )
        if self.host == "mmap" and not self.host_dir:
            raise ConfigError('cache.host="mmap" needs cache.host_dir, a folder on a disk with room for the tables')
        if self.host == "memory" and self.host_dir is not None:
            raise ConfigError(
                f'cache.host_dir={self.host_dir!r} has no effect with cache.host="memory"; set '
                'cache.host="mmap" '
                "or remove it"
            )
        if self.decay is not None:
            if self.policy not in (None, "lookahead", "lfu"):
                raise ConfigError(f'cache.decay has no effect with cache.policy="{self.policy}"; it belongs to "lfu"')
            if not 0.0 < self.decay < 1.0:
                raise ConfigError(f"cache.decay must be in (0, 1), got {self.decay}; 0.999 halves a count in 693 steps")

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
