"""The settings of the modes are whole or refused."""

from __future__ import annotations

import pytest

from embershard.errors import ConfigError
from embershard.sharding.config import ShardingConfig


def test_hot_bytes_and_its_mode_belong_together():
    assert ShardingConfig(mode="hot_cold", hot_bytes=1 << 20).hot_bytes == 1 << 20
    for settings in ({"mode": "hot_cold"}, {"hot_bytes": 5}, {"mode": "data_parallel", "hot_bytes": 5}):
        with pytest.raises(ConfigError, match='needed both mode="hot_cold" and hot_bytes, or neither'):
            ShardingConfig(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"sharding\.hot_bytes: got 0, needed at least 1"):
        ShardingConfig(mode="hot_cold", hot_bytes=0)


def test_an_unknown_mode_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"sharding\.mode: got 'fae', needed one of sharded, hot_cold, data_parallel"):
        ShardingConfig(mode="fae")  # type: ignore[arg-type]
