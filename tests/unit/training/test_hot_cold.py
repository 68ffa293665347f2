"""Runs with hot and cold batches on one rank: what is hot, what is kept, and how a run goes on."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embershard.data import CriteoConfig, DataConfig, StreamState, open_source
from embershard.data.config import SyntheticConfig
from embershard.data.order.segments import READ_AHEAD, PackedState
from embershard.distributed import CheckpointConfig
from embershard.errors import CheckpointError, ConfigError, DataError
from embershard.extras.hot_cold import part as hot_cold
from embershard.extras.hot_cold.part import FILE, HotCold, find_hot_set
from embershard.frequency import FrequencyProfile
from embershard.frequency.config import ProfileConfig
from embershard.models import table_name
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.config import ShardingConfig
from embershard.training.build import find_profile
from embershard.training.checkpoint.identity import ORDER, check_keys
from embershard.training.checkpoint.saved_run import SavedRun
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.fit.model_size import table_rows
from embershard.training.parts.counts import CacheReader
from embershard.training.reports import TrainReport
from embershard.training.steps import open_stream
from embershard.training.trainer import Trainer
from tests.unit.training.checkpoint.test_identity import write_clicks
from tests.unit.training.test_trainer import losses, make_config, run

pytestmark = [pytest.mark.extra, pytest.mark.slow]

HOT_BYTES = 20_000


def hot_config(**changes: Any) -> RunConfig:
    parts = {
        "data": DataConfig(synthetic=SyntheticConfig(num_samples=1000, scale=0.0001), num_workers=0),
        "sharding": ShardingConfig(mode="hot_cold", hot_bytes=HOT_BYTES),
        "train": TrainConfig(batch_size=20, log_every=1, epochs=2),
        "checkpoint": CheckpointConfig(every_steps=13, at_end=False, keep_last=9),
    }
    return make_config(**{**parts, **changes})


def stream_start(config: RunConfig) -> StreamState:
    return StreamState(seed=config.data.seed)


@pytest.mark.smoke
def test_hot_batches_look_up_hot_rows_only_and_cold_ones_others_too(ranks):
    config = hot_config()
    source = open_source(config.data)
    hot = find_hot_set(config, find_profile(config, source), source, ranks, None)
    assert hot.rows.num_bytes <= HOT_BYTES
    seen = {True: 0, False: 0}
    stream = open_stream(config, source, ranks, stream_start(config), hot=hot.samples)
    mixed = 0
    for batch in stream:
        ids = batch.sparse_features
        is_cold = np.zeros(batch.num_samples, bool)
        for key in source.schema.keys:
            rows = hot.rows.rows[table_name(key)]
            is_cold |= ~np.isin(ids[key].values().numpy(), rows)
        assert batch.is_hot == (not is_cold.any())
        mixed += bool(is_cold.any() and not is_cold.all())
        seen[batch.is_hot] += 1
        stream.observe(1.0)
    assert min(seen.values()) > 10, "neither kind is an exception in these data"
    assert mixed <= 2
    assert f"{hot.samples.share:.1%} of the training samples look up no others" in hot.describe()


@pytest.mark.matrix
@pytest.mark.parametrize("lookahead", [0, 8])
def test_a_run_goes_on_in_the_middle_of_a_segment_bit_for_bit(ranks, tmp_path, lookahead):
    depths = LookAheadConfig(lookahead=lookahead, prefetch=1 if lookahead else 2)
    config = hot_config(look_ahead=depths)
    reports = run(config, ranks, tmp_path / "checkpoints")
    expected = losses(reports)
    assert len(expected) == 90
    counts = [report.batches for report in reports if isinstance(report, TrainReport)][-1]
    assert sum(counts.values()) == 90
    assert min(counts["hot"], counts["cold"]) > 10
    for step in (26, 39):
        trainer = Trainer(config, ranks, tmp_path / "checkpoints")
        _, comparison = trainer.resume(tmp_path / "checkpoints" / f"step_{step}")
        packed = comparison.stream.packed
        assert packed.batches == step
        assert packed.left, "the test is about the middle of a segment"
        trainer.checkpoints = None
        assert losses(list(trainer.train())) == {at: loss for at, loss in expected.items() if at > step}
        trainer.close()


def test_the_samples_of_an_epoch_are_those_of_the_plain_order(ranks):
    config = hot_config(train=TrainConfig(batch_size=20, epochs=1))
    source = open_source(config.data)
    hot = find_hot_set(config, find_profile(config, source), source, ranks, None)
    found = []
    for order in (hot.samples, None):
        stream = open_stream(config, source, ranks, stream_start(config), hot=order)
        samples = []
        for batch in stream:
            samples += batch.dense_features[:, :4].tolist()
            stream.observe(1.0)
        found.append(sorted(samples))
    assert found[0] == found[1]


def test_lookups_and_bytes_of_hot_rows_are_reported(ranks):
    found = {}
    for mode in (ShardingConfig(), hot_config().sharding):
        config = hot_config(train=TrainConfig(batch_size=20, max_steps=40, log_every=20), sharding=mode)
        trainer = Trainer(config, ranks, None)
        list(trainer.train())
        trainer.close()
        totals = trainer.metrics.cache_reader.totals(0.1)
        (rank,) = totals.ranks
        for whole in (totals, rank):
            of_tables = {
                key: sum(getattr(t, key) for t in whole.tables.values()) for key in ("device_bytes", "lookups")
            }
            assert whole.device_bytes == of_tables["device_bytes"] + whole.hot_rows_bytes
            assert whole.lookups == of_tables["lookups"] + whole.hot_lookups
        assert CacheReader(trainer.model, ranks).since_last().hit_rate_lookups == totals.hit_rate_lookups
        found[mode.mode] = totals
    sharded, packed = found["sharded"], found["hot_cold"]
    assert packed.lookups == sharded.lookups > packed.hot_lookups > 0
    assert sharded.hot_lookups == sharded.hot_rows_bytes == 0
    hot = trainer.part(HotCold).hot
    map_bytes = 4 * (sum(table_rows(config).values()) + 1)
    assert packed.hot_rows_bytes == hot.rows.num_bytes + map_bytes


def test_the_bits_are_kept_and_used_again_only_for_the_same_data_and_rows(ranks, tmp_path, monkeypatch):
    config = hot_config()
    source = open_source(config.data)

    def find(config: RunConfig) -> Any:
        return find_hot_set(config, find_profile(config, source), source, ranks, tmp_path)

    first = find(config)
    calls = []
    plain = hot_cold._all_bits
    monkeypatch.setattr(hot_cold, "_all_bits", lambda *args: calls.append(args) or plain(*args))
    again = find(config)
    assert not calls
    assert np.array_equal(again.samples.bits, first.samples.bits)
    assert again.samples.digest == first.samples.digest
    fewer = find(replace(config, sharding=ShardingConfig(mode="hot_cold", hot_bytes=HOT_BYTES // 2)))
    assert len(calls) == 1
    assert fewer.samples.share < first.samples.share
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:30])
    find(config)
    assert len(calls) == 2, "a damaged file is made again"
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError, match=r"got no file of hot samples .*Is a directory.*; remove it, and it is made"):
        find(config)
    assert len(calls) == 2, "refused before the data are read"


def test_another_order_is_refused_and_allowed_on_request(ranks, tmp_path):
    run(hot_config(train=TrainConfig(batch_size=20, max_steps=14)), ranks, tmp_path / "checkpoints")
    checkpoint = tmp_path / "checkpoints" / "step_13"
    others = [
        hot_config(sharding=ShardingConfig()),
        hot_config(sharding=ShardingConfig(mode="hot_cold", hot_bytes=HOT_BYTES // 2)),
        hot_config(profile=ProfileConfig(samples=100)),
    ]
    for other in others:
        trainer = Trainer(other, ranks, None)
        with pytest.raises(CheckpointError, match=r"data\.order +\"hot_cold \w+\" +\"(plain|hot_cold)") as caught:
            trainer.resume(checkpoint)
        assert "sharding.mode, sharding.hot_bytes and the profile" in str(caught.value)
        _, comparison = trainer.resume(checkpoint, allow_changes=[ORDER])
        assert comparison.stream.packed is None
        (note,) = [note for note in comparison.notes if "come twice" in note]
        assert "step_13 is 260 samples into an epoch of hot and cold batches" in note
        assert trainer.stream.num_steps == 90 - 13
        assert next(trainer.train()).step == 14
        trainer.close()
    with pytest.raises(ConfigError, match=r"it is compared as data\.order\. Allow that"):
        check_keys(["sharding.hot_bytes"])


def test_a_plain_run_s_checkpoint_goes_on_packed_on_request(ranks, tmp_path):
    run(make_config(train=TrainConfig(batch_size=20, max_steps=14)), ranks, tmp_path)
    trainer = Trainer(hot_config(checkpoint=CheckpointConfig(at_end=False)), ranks, None)
    with pytest.raises(CheckpointError, match=r"data\.order +\"plain\" +\"hot_cold"):
        trainer.resume(tmp_path / "step_12")
    _, comparison = trainer.resume(tmp_path / "step_12", allow_changes=[ORDER])
    assert not any("come twice" in note for note in comparison.notes)
    assert len(losses(list(itertools.islice(trainer.train(), 10)))) == 10
    trainer.close()


def test_a_position_with_too_many_hot_samples_is_refused():
    position = replace(stream_start(hot_config()), global_sample=10, packed=PackedState("d", 5, hot_samples=11))
    with pytest.raises(CheckpointError, match=r"stream\.packed\.hot_samples: got 11, needed at most 10"):
        SavedRun(2, 10, position, {}, {}, 1, ({"cpu": ""},))


def test_settings_that_the_mode_cannot_have_are_refused():
    with pytest.raises(ConfigError, match=r"cache\.enabled: got false, needed true in the mode \"hot_cold\""):
        hot_config(cache=replace(hot_config().cache, enabled=False))
    with pytest.raises(ConfigError, match="got 128, needed at most 120 in the mode"):
        hot_config(look_ahead=LookAheadConfig(lookahead=READ_AHEAD - 8))


def test_hot_rows_are_of_the_model_s_tables(ranks):
    config = hot_config()
    source = open_source(config.data)
    profile = find_profile(config, source)
    assert profile is not None
    other = hot_config(data=replace(config.data, synthetic=SyntheticConfig(num_samples=1000, scale=0.001)))
    with pytest.raises(ConfigError, match="the frequency profile counted"):
        find_hot_set(other, profile, open_source(other.data), ranks, None)


def test_a_bad_row_is_named_before_training(ranks, tmp_path):
    path = tmp_path / "day_0"
    write_clicks(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:150], lines[150].replace("\t", "\tx", 20), *lines[151:]]))
    data = DataConfig(kind="criteo", path=str(path), criteo=CriteoConfig(num_rows=50), num_workers=0)
    config = hot_config(data=data, sharding=ShardingConfig(mode="hot_cold", hot_bytes=100_000))
    count = FrequencyProfile.count([{table: torch.arange(50) for table in table_rows(config)}], table_rows(config))
    with pytest.raises(DataError, match="day_0:151 "):
        find_hot_set(config, count, open_source(data), ranks, None)


def test_checkpoints_are_written_beside_the_file(ranks, tmp_path):
    config = hot_config(train=TrainConfig(batch_size=20, max_steps=3), checkpoint=CheckpointConfig())
    run(config, ranks, tmp_path / "checkpoints")
    assert {path.name for path in Path(tmp_path).iterdir()} == {FILE, "checkpoints"}
