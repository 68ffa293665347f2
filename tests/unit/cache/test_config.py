"""One knob; everything that contradicts itself or has no effect is refused."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from embershard.cache import CacheConfig
from embershard.cache.config import CachePolicy, Scoring
from embershard.errors import ConfigError


def test_the_default_is_a_ratio():
    config = CacheConfig()
    assert (config.slot_ratio, config.device_bytes) == (0.05, None)
    assert [config.policy_for(profile) for profile in (False, True)] == [
        CachePolicy("lfu", by_next_use=True, warmup=False),
        CachePolicy("frequency", by_next_use=True, warmup=True),
    ]


@pytest.mark.parametrize("ratio", [1e-9, 0.015, 1.0])
def test_ratios_that_are_allowed(ratio):
    assert CacheConfig(ratio=ratio).ratio == ratio


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"ratio": 0.5, "device_bytes": 10},
            r"cache.ratio=0.5 and cache.device_bytes=10 are both set.*Remove the other",
        ),
        ({"ratio": 0.0}, r"cache.ratio must be in \(0, 1\], got 0.0; 0.015 keeps 1.5 %"),
        ({"ratio": -0.1}, "cache.ratio"),
        ({"ratio": 1.5}, "cache.ratio"),
        ({"ratio": 15}, "cache.ratio"),
        ({"ratio": float("nan")}, "cache.ratio"),
        ({"device_bytes": 0}, "cache.device_bytes must be positive, got 0"),
        ({"device_bytes": -5}, "cache.device_bytes"),
        ({"policy": "best"}, "cache.policy must be one of 'lookahead', .*, got 'best'"),
        ({"host": "disk"}, "cache.host must be one of 'memory', 'mmap', 'file', got 'disk'"),
        ({"overflow": "ignore"}, "cache.overflow must be one of 'grow', 'raise', got 'ignore'"),
        ({"host": "mmap"}, 'cache.host="mmap" needs cache.host_dir'),
        ({"host_dir": "/tmp"}, "cache.host_dir='/tmp' has no effect"),
        ({"decay": 0.9, "policy": "lru"}, 'cache.decay has no effect with cache.policy="lru"'),
        ({"decay": 0.9, "policy": "frequency"}, 'cache.decay has no effect with cache.policy="frequency"'),
        ({"decay": 0.0}, r"cache.decay must be in \(0, 1\), got 0.0"),
        ({"decay": 1.0}, "cache.decay"),
        ({"decay": float("nan")}, "cache.decay"),
    ],
)
def test_what_cannot_be_meant_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        CacheConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "has_profile", "message"),
    [
        ({"policy": "frequency"}, False, "needs a FrequencyProfile: pass profile="),
        ({"policy": "static"}, False, 'cache.policy="static" needs a FrequencyProfile: pass profile='),
        ({"warmup": True}, False, "cache.warmup=True needs a FrequencyProfile"),
        ({"warmup": True, "policy": "lru"}, False, "cache.warmup=True needs a FrequencyProfile"),
        ({"policy": "lru", "warmup": False}, True, 'no effect with cache.policy="lru" and cache.warmup=False'),
    ],
)
def test_what_the_profile_decides(settings, has_profile, message):
    config = CacheConfig(**settings)
    with pytest.raises(ConfigError, match=message):
        config.policy_for(has_profile)
    config.policy_for(not has_profile)


@pytest.mark.parametrize("has_profile", [False, True])
@pytest.mark.parametrize("policy", [None, "lookahead", "lfu"])
def test_decay_means_counting_even_with_a_profile(policy, has_profile):
    config = CacheConfig(decay=0.9, policy=policy)
    assert config.policy_for(has_profile).by_next_use == (policy != "lfu")
    assert config.policy_for(has_profile).scoring == "lfu"


@pytest.mark.parametrize("policy", get_args(Scoring))
def test_policies_that_do_not_look_ahead_are_their_own_scoring(policy):
    found = CacheConfig(policy=policy).policy_for(has_profile=True)
    assert (found.scoring, found.by_next_use) == (policy, False)


def test_looking_ahead_does_without_a_profile_and_has_a_use_for_one():
    config = CacheConfig(policy="lookahead", warmup=False)
    assert [config.policy_for(profile).scoring for profile in (False, True)] == ["lfu", "frequency"]


def test_a_static_cache_is_its_warm_up():
    assert CacheConfig(policy="static").policy_for(True) == CachePolicy("frequency", False, True, is_static=True)
    with pytest.raises(ConfigError, match=r'"static" keeps the rows of the warm-up; remove cache.warmup=False'):
        CacheConfig(policy="static", warmup=False).policy_for(True)


def test_warm_up_can_be_refused():
    assert not CacheConfig(warmup=False).policy_for(has_profile=True).warmup
    assert CacheConfig(warmup=True, policy="lru").policy_for(has_profile=True).warmup


def test_it_is_a_value():
    assert CacheConfig(ratio=0.5) == CacheConfig(ratio=0.5)
    assert hash(CacheConfig(ratio=0.5)) == hash(CacheConfig(ratio=0.5))
    with pytest.raises(dataclasses.FrozenInstanceError):
        CacheConfig().ratio = 0.5  # type: ignore[misc]
    assert dataclasses.replace(CacheConfig(ratio=0.5), policy="lru").policy == "lru"


def test_a_default_does_not_contradict_a_setting_that_replaces_it():
    assert dataclasses.replace(CacheConfig(), device_bytes=1000).device_bytes == 1000


@pytest.mark.parametrize("settings", [{"ratio": "0.5"}, {"device_bytes": 1e9}, {"decay": "0.9"}, {"warmup": "yes"}])
def test_values_of_the_wrong_type_are_refused(settings):
    with pytest.raises(ConfigError):
        CacheConfig(**settings)
