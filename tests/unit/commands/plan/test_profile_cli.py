"""The command `embershard profile` and what it shows."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from embershard.cache import CacheConfig
from embershard.cache.ids.config import IdTable
from embershard.cache.ids.id_map import IdMap, mixed
from embershard.cache.loops import buckets_of_ids
from embershard.commands import cli
from embershard.commands.profile import data_pass as profile_pass
from embershard.commands.profile.command import main
from embershard.commands.profile.data_pass import PartReader, PassOptions, part_ranges, profile_data, rows_of_ids
from embershard.commands.profile.run import run_config
from embershard.data import BatchStream, DataConfig, SyntheticConfig, TableConfig, TableFeature, open_source
from embershard.data.sources.table import source
from embershard.errors import ConfigError
from embershard.extras.profile_picture.picture import make_figure
from embershard.frequency import FrequencyProfile
from embershard.frequency.config import ProfileConfig
from embershard.frequency.summary import stack_of_all
from embershard.launch.arguments import examples
from embershard.models import table_name
from embershard.settings.files import load_config
from embershard.training.build import find_profile
from embershard.training.config import RunConfig
from embershard.training.fit.id_rules import buckets_of_run
from embershard.units import parse_bytes
from tests.unit.planning.traces import profile_of, skewed

SMALL = SyntheticConfig(num_samples=12_000, scale=0.0005, bag_sizes=(2,))
SMALL_SET = ["data.synthetic.num_samples=12000", "data.synthetic.scale=0.0005", "data.synthetic.bag_sizes=[2]"]


def settings(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--set", text)]


def lookups_in_training_order(data: DataConfig) -> dict[str, np.ndarray]:
    rows: dict[str, list[np.ndarray]] = {}
    with BatchStream(
        open_source(data), batch_size=10, rank=0, world_size=1, split="train", epochs=1, config=data
    ) as stream:
        for batch in stream:
            for key, ids in batch.sparse_features.to_dict().items():
                rows.setdefault(table_name(key), []).append(ids.values().numpy())
    return {table: np.concatenate(parts) for table, parts in rows.items()}


def same(a: FrequencyProfile, b: FrequencyProfile) -> None:
    one, other = a.need_statistics(), b.need_statistics()
    assert one.trace.rate == other.trace.rate
    for table in a.tables:
        assert a.sparse(table).rows.tolist() == b.sparse(table).rows.tolist()
        assert a.sparse(table).hits.tolist() == b.sparse(table).hits.tolist()
        for name in ("rows", "samples"):
            assert np.array_equal(getattr(one.trace.tables[table], name), getattr(other.trace.tables[table], name))
        assert one.tables[table].window_rows.tolist() == other.tables[table].window_rows.tolist()


@pytest.mark.matrix
def test_the_number_of_processes_changes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(profile_pass, "PART_SAMPLES", 512)
    few = settings(*SMALL_SET, "data.synthetic.num_samples=3000")
    given = ["synthetic", *few, "--max-lookups", "7500", "--hot", "100kB"]
    for workers in ("1", "2"):
        assert main([*given, "-o", str(tmp_path / f"{workers}.npz"), "--workers", workers]) == 0
    said = capsys.readouterr().out
    assert "2,700 samples, 140,400 lookups in 26 tables" in said
    assert f"embershard profile show {tmp_path}/2.npz" in said
    hot = [line for line in said.splitlines() if line.startswith("Hot samples: ")]
    assert hot[0] == hot[1]
    one, two = (FrequencyProfile.load(tmp_path / f"{workers}.npz") for workers in "12")
    same(one, two)
    trace = one.need_statistics().trace
    assert trace.rate < 1
    assert trace.num_lookups <= 7500
    assert set(one.need_statistics().preferences) >= {"frequency", "lfu", "lru"}


def test_other_processes_take_what_is_held_out_from_the_first(tmp_path):
    lines = [f"{n % 2},{n % 9},u{n % 5}" for n in range(40)]
    (tmp_path / "a.csv").write_text("\n".join(["label,item,user", *lines]) + "\n")
    table = TableConfig({"item": TableFeature("sparse", num_rows=50)})
    data = DataConfig("table", str(tmp_path / "a.csv"), table=table, split="last", split_column="user")
    first = PartReader(data)
    with mock.patch.object(source, "hold_out_by_column", side_effect=AssertionError):
        other = PartReader(data, held_out=first.held_out)
    assert first.num_samples == other.num_samples == 35
    assert other.held_out is first.held_out


def test_ray_changes_nothing(monkeypatch):
    pytest.importorskip("ray", reason="Ray is not installed (the extra [ray])")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(profile_pass, "PART_SAMPLES", 2048)
    data = DataConfig(synthetic=SMALL)
    one, other = (profile_data(data, PassOptions(on_ray=on_ray)) for on_ray in (False, True))
    same(one, other)
    assert one.num_batches == other.num_batches == 6


@pytest.mark.slow
def test_the_trace_is_what_the_trainer_reads(monkeypatch):
    monkeypatch.setattr(profile_pass, "PART_SAMPLES", 200)
    data = DataConfig(synthetic=dataclasses.replace(SMALL, num_samples=900), seed=3, chunk_rows=64, num_workers=0)
    profile = profile_data(data, PassOptions())
    trace = profile.need_statistics().trace
    assert trace.num_samples == 810
    for table, rows in lookups_in_training_order(data).items():
        assert trace.tables[table].rows.tolist() == rows.tolist()
        assert profile.counts[table].tolist() == np.bincount(rows, minlength=profile.num_rows(table)).tolist()


@pytest.mark.slow
def test_the_real_sample(criteo_sample, tmp_path, capsys):
    file, picture = tmp_path / "p.npz", tmp_path / "curves.png"
    assert main([str(criteo_sample), "-o", str(file), *settings("data.criteo.num_rows=20000")]) == 0
    capsys.readouterr()
    assert main(["show", str(file), "--png", str(picture), "--top", "3"]) == 0
    said = capsys.readouterr().out
    for expected in (
        "9,000 training samples",
        "t_C1 ",
        "23 more",
        "together",
        "Drift: the 1% most",
        "Policy:",
        "Trust:",
    ):
        assert expected in said
    assert picture.read_bytes()[:4] == b"\x89PNG"
    statistics = FrequencyProfile.load(file).need_statistics()
    assert sum(table.num_lookups for table in statistics.tables.values()) == 9000 * 26
    assert statistics.trace.rate == 1.0
    assert statistics.read_seconds_per_sample is not None


@pytest.mark.slow
def test_a_training_run_takes_such_a_profile(tmp_path):
    data = DataConfig(synthetic=SMALL)
    profile_data(data, PassOptions()).save(tmp_path / "p.npz")
    example = Path(__file__).parents[4] / "examples" / "quickstart.toml"
    config = load_config(RunConfig, example, [f"profile.path={tmp_path / 'p.npz'}", "profile.samples=none", *SMALL_SET])
    found = find_profile(config, open_source(config.data))
    assert found is not None
    config = RunConfig(data=data, cache=CacheConfig(policy="frequency"), profile=ProfileConfig(samples=10_800))
    counted = find_profile(config, open_source(data))
    assert counted is not None
    table = "t_C3"
    rows = found.num_rows(table)
    found.shard(table, rows, 0, rows)
    # The profile of the run itself leaves the last, incomplete batch of 1024 samples out.
    less = found.counts[table] - counted.counts[table]
    assert int(less.min()) >= 0
    assert int(less.sum()) == 2 * (10_800 % 1024)


@pytest.mark.slow
def test_merge_and_compare(tmp_path, capsys):
    files = [str(tmp_path / f"{number}.npz") for number in (0, 1, 2)]
    for number, file in enumerate(files[:2]):
        data = DataConfig(synthetic=dataclasses.replace(SMALL, num_samples=3000), seed=number)
        profile_data(data, PassOptions()).save(file)
    assert main(["merge", *files[:2], "-o", files[2]]) == 0
    assert FrequencyProfile.load(files[2]).need_statistics().num_samples == 5400
    assert main(["compare", *files[:2], "--top", "2"]) == 0
    said = capsys.readouterr().out
    assert "2 profiles in one" in said
    assert "24 more" in said
    assert "those chosen by A find" in said


@pytest.mark.slow
def test_a_sample_states_its_error(capsys):
    data = DataConfig(synthetic=SMALL)
    statistics = profile_data(data, PassOptions(sample=0.25)).need_statistics()
    assert statistics.num_samples == 2700
    assert statistics.share_of_samples == pytest.approx(0.25, abs=0.01)
    for said in ("a sample of 25", "Its halves differ by", "of the other half's lookups", "not in the sample"):
        assert said in statistics.origin


@pytest.mark.parametrize("share", [0.001, 0.01, 0.3, 0.99])
def test_sampled_ranges_are_apart_and_spread(share):
    ranges = part_ranges(100_000, share, 4096)
    assert sum(stop - start for start, stop in ranges) == pytest.approx(100_000 * share, rel=0.01)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(ranges))
    assert max(stop - start for start, stop in ranges) <= 4096
    assert ranges[-1][1] <= 100_000
    assert ranges[-1][1] > 100_000 * (1 - 1 / len(ranges))
    assert part_ranges(10, 1.0, 4) == [(0, 4), (4, 8), (8, 10)]
    assert part_ranges(3, 0.5, 4) == [(0, 1), (1, 2)]


def test_data_and_config_together(tmp_path):
    (tmp_path / "x.parquet").touch()
    (tmp_path / "run.toml").write_text('[data]\nkind = "criteo"\nseed = 5\n[train]\nbatch_size = 7\n')
    guessed = run_config(str(tmp_path), None, [])
    assert (guessed.data.kind, guessed.data.path) == ("parquet", str(tmp_path))
    assert run_config("/data/day_0", None, []).data.kind == "criteo"
    configured = run_config("/data", tmp_path / "run.toml", ["data.seed=6"])
    assert (configured.data.kind, configured.data.seed, configured.train.batch_size) == ("criteo", 6, 7)
    assert run_config("synthetic", tmp_path / "run.toml", []).data.kind == "synthetic"
    assert run_config(str(tmp_path / "run.toml"), None, []) == run_config(None, tmp_path / "run.toml", [])
    assert run_config("quickstart", None, []) == run_config(None, examples()["quickstart"], [])
    assert run_config(None, tmp_path / "run.toml", ["data.path=/d"]).data.path == "/d"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-o", "p.npz"], "what is to be counted?"),
        (["synthetic", "-o", "nowhere/p.npz"], "is in a folder that does not exist"),
        (["synthetic", "-o", "."], "is a folder"),
        (["synthetic", "-o", "p.npz", "--sample", "0"], "sample = 0.0; needed a share"),
        (["synthetic", "-o", "p.npz", "--workers", "0"], "num_workers = 0; needed at least 1"),
        (["synthetic", "-o", "p.npz", "--on", "ray", "--workers", "2"], "--workers has no effect with --on ray"),
        (["nowhere", "-o", "p.npz"], "nowhere: no such file or folder"),
        (["synthetic", "-o", "p.npz", "--set", "data.sead=1"], "Did you mean data.seed?"),
        (["show", "p.npz"], "p.npz is not a frequency profile"),
        (["merge", "p.npz", "-o", "q.npz"], "p.npz is not a frequency profile"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["profile", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("embershard: ")
    assert said in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["profile", "merge", "p.npz", "-o", "q.npz", "--batch-size", "0"],
        ["profile", "merge", "p.npz", "-o", "q.npz", "--max-lookups", "-5"],
        ["profile", "show", "p.npz", "--top", "-1"],
        ["profile", "merge", "p.npz", "-o", "q.npz", "--batch-size", "²"],
        ["data", "convert", "a.csv", "-o", "a.parquet", "--bad-rows", "some"],
        ["data", "convert", "a.csv", "-o", "a.parquet", "--bad-rows", "1.5"],
    ],
)
def test_a_number_that_no_option_takes_is_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert f"error: argument {words[-2]}: got " in capsys.readouterr().err


def test_sizes_as_people_write_them():
    sizes = {"4GB": 4 * 10**9, "1.5GiB": 3 << 29, "512 mb": 512 * 10**6, "7": 7, "2k": 2000, "1TB": 10**12}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    with pytest.raises(argparse.ArgumentTypeError, match="needed a size such as 4GiB"):
        parse_bytes("much")


def test_a_share_of_the_memory_is_checked():
    with pytest.raises(ConfigError, match="memory_bytes = 5"):
        PassOptions(memory_bytes=5)


@pytest.mark.slow
def test_hit_rates_of_short_data_are_marked(tmp_path, capsys):
    """Where all rows fit, or most misses are first touches: never a number alone that says nothing of its size."""

    def shown(num_samples: int) -> list[str]:
        profile_of({"t_a": (40_000, skewed(40_000, num_samples))}).save(tmp_path / "p.npz")
        capsys.readouterr()
        assert main(["show", str(tmp_path / "p.npz")]) == 0
        said = capsys.readouterr().out
        assert " of the lookups are the first of their row, which no cache that starts empty finds." in said
        return [line for line in said.splitlines() if "together" in line][1].replace("│", " ").split()

    short, long = shown(500), shown(400_000)
    sizes = slice(-6, None)  # static, LRU and new data at two sizes
    assert [cell.endswith("*") for cell in short[sizes]] == [True, True, False] * 2
    assert short[-5] == short[-2], "LRU hits alike in caches of both sizes"
    assert float(short[-4].strip("%")) < float(short[-1].strip("%")) - 5, "new data do not"
    assert not any(cell.endswith("*") for cell in long[-6:-4])


@pytest.mark.extra
def test_the_picture_explains_its_curves(tmp_path, capsys):
    lookups = {name: (rows, skewed(rows, 30_000, seed=rows)) for name, rows in (("t_a", 20_000), ("t_b", 9000))}
    profile = profile_of(lookups)
    statistics = profile.need_statistics()
    done: list[tuple[int, int]] = []
    figure = make_figure(statistics, stack_of_all(statistics), lambda *numbers: done.append(numbers))
    together, alone = figure.axes
    lines = {str(line.get_label()).partition(":")[0]: np.asarray(line.get_ydata()) for line in together.get_lines()}
    assert list(lines)[:4] == ["optimum", "look-ahead (the default)", "static", "LRU"]
    assert list(lines)[4] == "new data, in the long run"
    assert (lines["optimum"] >= lines["look-ahead (the default)"]).all()
    assert done[-1][0] == done[-1][1]
    first = sum(table.histogram.num_rows for table in statistics.tables.values()) / 60_000
    assert figure.get_suptitle() == (
        f"Hit rate by size of the cache: 30,000 training samples, 2 tables; {first:.1%} of the lookups are first "
        "touches of a row\nEstimate: the hit rate on new data"
    )
    for axes in (together, alone):
        assert axes.get_xlabel().startswith("rows in the cache, of ")
        assert axes.get_ylabel().startswith("hit rate: lookups")
    sampled = dataclasses.replace(statistics, share_of_samples=0.1)
    assert "Estimate: 10.00% of the samples were read" in make_figure(sampled, None).get_suptitle()
    profile.save(tmp_path / "p.npz")
    assert main(["show", str(tmp_path / "p.npz"), "--png", str(tmp_path / "curves.png")]) == 0
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"


def test_it_says_whether_counts_last(tmp_path, capsys):
    profile_of({"t_a": (20_000, skewed(20_000, 30_000))}).save(tmp_path / "p.npz")
    assert main(["show", str(tmp_path / "p.npz")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    told = re.search(r"tell (\d+)% \(of its first 10%\), .* a replay has (\d+)%", said)
    assert told is not None
    assert abs(int(told[1]) - int(told[2])) <= 10


def test_ids_are_counted_as_rows_of_their_buckets():
    """Those in which training looks them up; an id has one row there, and none has the row that others share."""
    buckets = IdTable().buckets_of("t", 24_000)
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, 5000)
    rows, expected = rows_of_ids(ids, buckets), np.empty(5000, np.int64)
    buckets_of_ids(mixed(ids), buckets.num_buckets, expected)
    assert (rows // buckets.rows).tolist() == expected.tolist()
    ids_map = IdMap("t", IdTable(), buckets, seed=1)
    assert (ids_map.resolve(mixed(ids)).rows // buckets.rows).tolist() == expected.tolist()
    assert (rows % buckets.rows).min() == 1
    assert (rows % buckets.rows).max() == buckets.rows - 1
    assert rows_of_ids(ids[::-1].copy(), buckets).tolist() == rows[::-1].tolist()
    assert len(np.unique(rows)) > 4300  # of 24,000 rows: 4,514 by chance


@pytest.mark.slow
def test_tables_of_ids_are_profiled_as_an_estimate(monkeypatch):
    monkeypatch.setattr(profile_pass, "PART_SAMPLES", 2048)
    synthetic = dataclasses.replace(SMALL, id_rows=480, id_turnover=3.0)
    config = RunConfig(data=DataConfig(synthetic=synthetic, num_workers=0))
    buckets = buckets_of_run(config)
    assert buckets
    one, two = (
        profile_data(config.data, PassOptions(workers), None, PartReader(config.data, config.model, ids=buckets))
        for workers in (1, 2)
    )
    same(one, two)
    assert one.num_rows(next(iter(buckets))) == 480
    origin = one.need_statistics().origin
    assert origin.endswith(f"; an estimate for {', '.join(buckets)}, whose ids are hashed onto rows")
    rows = {name: ids for name, ids in lookups_in_training_order(config.data).items() if name in buckets}
    for table, ids in rows.items():
        counts = np.bincount(rows_of_ids(ids, buckets[table]), minlength=480)
        assert one.counts[table].tolist() == counts.tolist()


def test_hot_rows_of_ids_are_refused(tmp_path):
    ids = settings(*SMALL_SET, "data.synthetic.id_rows=480", "data.synthetic.id_turnover=3")
    with pytest.raises(
        ConfigError, match=r"hot rows have copies on all ranks, and tables .* take any id.*id_rows=none"
    ):
        main(["synthetic", *ids, "--hot", "1MB", "-o", str(tmp_path / "p.npz")])
