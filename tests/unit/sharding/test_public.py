"""What `from embershard import ...` offers. What importing costs is in tests/unit/test_import.py."""

from __future__ import annotations

import importlib

import pytest

import embershard


def test_the_public_names():
    assert set(embershard.__all__) >= {
        "CacheConfig",
        "CachedEmbeddingBagCollectionSharder",
        "CachedEmbeddingCollectionSharder",
        "FrequencyProfile",
        "cache_stats",
        "flush",
        "plan_sharding",
    }
    assert list(embershard.__all__) == sorted(embershard.__all__)


@pytest.mark.parametrize("name", embershard.__all__)
def test_every_public_name_is_the_object_of_its_own_module(name):
    value = getattr(embershard, name)
    if name != "__version__":
        assert value.__doc__
        assert getattr(importlib.import_module(value.__module__), value.__name__) is value
        assert value.__module__.startswith("embershard.")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'embershard' has no attribute 'CacheConfigs'"):
        _ = embershard.CacheConfigs
    with pytest.raises(ImportError):
        exec("from embershard import nothing")


def test_the_torchrec_folder_offers_what_the_package_does():
    torchrec_part = importlib.import_module("embershard.sharding.torchrec")
    for name in ("plan_sharding", "flush", "cache_stats", "CachedEmbeddingBagCollectionSharder"):
        assert getattr(torchrec_part, name) is getattr(embershard, name)
    assert [name for name in torchrec_part.__all__ if not hasattr(torchrec_part, name)] == []
