"""Plans as values and as files: what is written reads back, edits are checked, differences are said."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from embershard import CacheConfig, CachedEmbeddingBagCollectionSharder, CachedEmbeddingCollectionSharder
from embershard.commands.cli import main
from embershard.distributed import Ranks
from embershard.errors import ConfigError, ShardingError
from embershard.pipeline.config import LookAheadConfig
from embershard.sharding.config import ShardingConfig
from embershard.sharding.pins import TablePin
from embershard.sharding.plan import Plan, PlanBound, TablePlacement
from embershard.sharding.plan_diff import diff_lines
from embershard.training.build import find_plan
from embershard.training.config import RunConfig
from embershard.training.optimizers import DenseOptimizerConfig, EmbeddingOptimizerConfig
from tests.unit.sharding.plans import make_plan, make_prediction, plans, small_plan

SHAPES = {t.table: (t.rows, t.dim, t.dtype) for t in small_plan().tables}


@pytest.fixture
def edited(tmp_path: Path):
    """Loads a plan after a person changed its file."""

    def load(change=lambda values: None, plan: Plan | None = None, text=lambda text: text) -> Plan:
        path = tmp_path / "plan.json"
        (plan or small_plan()).save(path)
        values = json.loads(path.read_text())
        change(values)
        path.write_text(text(json.dumps(values)))
        return Plan.load(path)

    return load


@pytest.mark.slow
@given(plans())
@settings(max_examples=40)
def test_what_is_written_reads_back(tmp_path_factory, plan):
    plan = dataclasses.replace(plan, prediction=make_prediction())
    path = tmp_path_factory.getbasetemp() / "written.json"
    plan.save(path)
    read = Plan.load(path)
    assert read == plan
    assert read.digest == plan.digest
    assert read.to_text() == path.read_text()


def test_a_change_is_one_line_of_the_file():
    plan = small_plan()
    pools = (dataclasses.replace(plan.pools[0], slots=7), *plan.pools[1:])
    table = dataclasses.replace(plan.tables[3], ranks=(0,))
    other = dataclasses.replace(plan, pools=pools, tables=(*plan.tables[:3], table, plan.tables[4]), prediction=None)
    lines, others = (p.to_text().splitlines() for p in (dataclasses.replace(plan, prediction=None), other))
    assert len(lines) == len(others)
    assert [a.strip()[:14] for a, b in zip(lines, others, strict=True) if a != b] == [
        '{"table": "t3"',
        '{"rank": 0, "t',
    ]


def test_a_prediction_belongs_to_a_placement(edited):
    assert edited().prediction == make_prediction()
    assert edited(lambda v: v.update(notes=[])).prediction is not None
    for change in (
        lambda v: v["pools"][0].update(slots=3),
        lambda v: v["tables"][3].update(ranks=[0]),
        lambda v: v["settings"].update({"cache.policy": "lru"}),
        lambda v: v["prediction"].pop("digest"),
    ):
        plan = edited(change)
        assert plan.prediction is None
        assert plan.notes[-1].startswith("The prediction was dropped: the plan was edited")
    assert edited(lambda v: v.pop("prediction")).notes == small_plan().notes


def test_an_edited_prediction_or_bound_is_dropped(tmp_path):
    """Each number and each word of them, one at a time: nobody may be told what no plan predicted."""
    bound = PlanBound(0.0102, 0.01, 0.004, rank=1, stage="embedding", change="memory of the device: 2 times as fast")
    made = dataclasses.replace(small_plan(), prediction=make_prediction(), bound=bound)
    path = tmp_path / "plan.json"
    made.save(path)
    assert Plan.load(path) == made
    text = path.read_text()
    places = [place for part in ("prediction", "bound") for place in _leaves(json.loads(text)[part], (part,))]
    assert len(places) > 30
    for place in places:
        if place[-1] in ("digest", "contents"):
            continue
        values = json.loads(text)
        *above, last = place
        inside = functools.reduce(lambda found, key: found[key], above, values)
        old = inside[last]
        inside[last] = old + 1 if isinstance(old, int | float) else 0.5 if old is None else _other_word(old)
        path.write_text(json.dumps(values))
        read = Plan.load(path)
        assert (read.prediction, read.bound) == (None, None), place
        assert read.notes[-1].startswith("The prediction was dropped: what it predicts was edited"), place
        assert (read.tables, read.pools) == (made.tables, made.pools), "the plan itself can be followed"


def _other_word(word: str) -> str:
    return {"replay": "counts", "counts": "replay"}.get(word, f"{word}s")


def _leaves(values: Any, above: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if isinstance(values, dict | list):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from _leaves(value, (*above, key))
    else:
        yield above


def test_a_diff_says_what_hits_and_what_moves():
    """Of all ranks together: a plan may be as fast, and fill twice the rows."""

    def moving(hits: float, fills: float) -> Plan:
        rank, table = made.ranks[0], made.tables[0]
        work = {"fills": fills, "bytes_to_device": fills * 1024, "sent_embedding_bytes": 2048.0, "sent_id_bytes": fills}
        ranks = tuple(dataclasses.replace(rank, rank=number, work=work) for number in range(2))
        tables = (dataclasses.replace(table, hit_rate_lookups=hits), dataclasses.replace(table, rank=1, lookups=0.0))
        return dataclasses.replace(small_plan(), prediction=dataclasses.replace(made, ranks=ranks, tables=tables))

    made = make_prediction()
    assert diff_lines(moving(0.9, 512), moving(0.95, 256)) == [
        "predicted fills a step: 1,024.0 -> 512.0 (-50.0%)",
        "predicted bytes between host and devices a step: 1.00 MiB -> 512.00 KiB (-50.0%)",
        "predicted bytes between ranks a step, for tables: 5.00 KiB -> 4.50 KiB (-10.0%)",
        "predicted hits of lookups: 90.00% -> 95.00% (+5.00 points)",
    ]
    assert diff_lines(moving(0.9, 512), moving(0.9, 512)) == []


def test_a_file_of_an_older_version_keeps_its_prediction(edited):
    """It has no hash of what it predicts."""
    assert edited(lambda v: v["prediction"].pop("contents")).prediction == make_prediction()


def _edit(part: str, number: int, **values: Any):
    return lambda v: v[part][number].update(values)


WRONG = {
    "unknown key": (_edit("tables", 1, rank=3), r"tables\[1\] \('t1'\): rank: unknown key. Did you mean ranks\?"),
    "missing key": (lambda v: v["pools"][2].pop("slots"), r"pools\[2\] \(1\): slots: is missing, needed integer"),
    "missing part": (lambda v: v.pop("pools"), r"pools: is missing, needed \[section, \.\.\.\]"),
    "type": (_edit("pools", 0, slots="9"), r"pools\[0\] \(0\): slots: got '9', needed integer"),
    "bool": (_edit("pools", 0, slots=True), r"slots: got True, needed integer"),
    "choice": (
        _edit("tables", 0, kernel="host"),
        r"kernel: got 'host', needed \"cached\" \| \"device\" \| \"replicated\"",
    ),
    "format": (lambda v: v.update(format=9), "format: got 9, needed 1. Plan again with this version"),
    "world size": (lambda v: v.update(world_size=0), "world_size: got 0, needed at least 1"),
    "node": (lambda v: v.update(world_size=3), "ranks_per_node: got 2, needed a divisor of world_size 3"),
    "table twice": (_edit("tables", 2, table="t0"), r"tables\[2\] \('t0'\): is the same table as tables\[0\]"),
    "rows": (_edit("tables", 0, rows=0), r"tables\[0\] \('t0'\): rows: got 0, needed at least 1"),
    "dim": (_edit("tables", 0, dim=6), "dim: got 6, needed a multiple of 4"),
    "rank": (_edit("tables", 0, ranks=[2]), r"ranks: got rank 2, needed ranks from 0 to 1"),
    "two ranks": (_edit("tables", 0, ranks=[0, 1]), r"ranks: got \[0, 1\]; table_wise needs one rank"),
    "row order": (_edit("tables", 1, ranks=[1, 0]), r"row_wise needs all ranks in order, 0 to 1"),
    "too few rows": (_edit("tables", 1, ranks=[0]), r"row_wise needs all ranks in order"),
    "columns": (
        _edit("tables", 0, sharding="column_wise", ranks=[0, 1, 0]),
        "16 columns cannot be cut into 3 equal shards of a multiple of 4",
    ),
    "half a grid": (_edit("tables", 0, sharding="grid_shard", ranks=[0, 1, 0]), "grid_shard needs for each column"),
    "half a node": (_edit("tables", 0, sharding="table_row_wise", ranks=[1]), "table_row_wise needs the 2 ranks of"),
    "rows that cannot travel": (
        _edit("tables", 0, sharding="table_row_wise", ranks=[0, 1], exchange="rows"),
        'exchange "rows" with sharding "table_row_wise"; needed one of table_wise, row_wise, ',
    ),
    "replicated": (_edit("tables", 4, kernel="device"), '"replicated" and "data_parallel" go together'),
    "no slots": (_edit("pools", 0, slots=0), r"pools\[0\] \(rank 0, row_wise, dim 16\): slots: got 0, needed 1 to 51"),
    "many slots": (_edit("pools", 0, slots=52), "slots: got 52, needed 1 to 51, the rows of its shards"),
    "stranger": (_edit("pools", 1, tables=["t0", "t9"]), "'t9' has no cached shard on rank 0. Remove it"),
    "device table": (_edit("pools", 2, tables=["t1", "t3"]), "'t3' has no cached shard on rank 1"),
    "wrong rank": (_edit("pools", 1, rank=1), "'t0' has no cached shard on rank 1"),
    "half a pool": (
        _edit("pools", 1, tables=["t0"]),
        r"got \['t0'\], needed \['t0', 't2'\]: shards of a rank with the",
    ),
    "other kind": (_edit("pools", 0, dim=8), "the shard of 't1' on rank 0 is row_wise with 16 columns"),
    "pool twice": (lambda v: v["pools"].append(v["pools"][0]), r"pools\[3\].*is the same pool as pools\[0\]"),
    "no pool": (lambda v: v["pools"].pop(0), r"row_wise shards of \['t1'\] on rank 0, .* Add one .* 1 to 51 slots"),
    "moved": (_edit("tables", 0, ranks=[1]), "'t0' has no cached shard on rank 0"),
    "more rows than a cache can number": (
        _edit("tables", 0, rows=2**31 - 102),
        r"pools: the table_wise cache of rank 0 would have 2147483648 rows, of 't0' \(2147483546\), 't2' \(102\), and "
        r"a cache can number 2147483647. Move tables to other ranks, cut them by rows, or use more ranks",
    ),
    "cached": (_edit("tables", 3, kernel="cached"), r"table_wise shards of \['t3'\] on rank 1.*are in no pool"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_broken_file_is_refused_by_name(edited, name):
    change, message = WRONG[name]
    with pytest.raises(ShardingError, match=rf"plan\.json: .*{message}"):
        edited(change)


def test_a_cache_may_have_as_many_rows_as_it_can_number(edited):
    assert edited(_edit("tables", 0, rows=2**31 - 103)).tables[0].rows == 2**31 - 103
    on_device = edited(lambda v: v["tables"][3].update(rows=2**40))  # numbers are for cached rows
    assert on_device.tables[3].rows == 2**40


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lambda text: text[:-5], "is not JSON"),
        (lambda text: "[]", "is not a plan: needed one JSON object"),
        (lambda text: text.replace('"slots": 67', '"slots": 67, "slots": 66'), "key 'slots' is twice in one object"),
        (lambda text: text.replace("0.8", "NaN"), "holds NaN, which is no number"),
        (lambda text: "\x00", "is not JSON"),
    ],
)
def test_a_file_that_is_no_plan_is_refused(edited, text, message):
    with pytest.raises(ShardingError, match=message):
        edited(text=text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ShardingError, match=r"nowhere\.json: cannot be read \(No such file"):
        Plan.load(tmp_path / "nowhere.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ShardingError, match="binary: cannot be read"):
        Plan.load(tmp_path / "binary")


def test_a_wrong_plan_is_not_saved(tmp_path):
    with pytest.raises(ShardingError, match="are in no pool"):
        small_plan(pools=()).save(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"t9": (5, 16, "fp32")}, "does not place tables of the model: t9"),
        ({"t0": None}, "places tables that the model does not have: t0"),
        ({"t0": (99, 16, "fp32")}, "'t0' has 100 rows x 16 fp32 in the plan and 99 rows x 16 fp32 in the model"),
        ({"t0": (100, 8, "fp32"), "t1": (1, 1, "fp32")}, r"16 fp32 in the plan and 100 .* x 8 .*\(2 tables differ\)"),
        ({"t3": (50, 16, "fp16")}, "16 fp32 in the plan and 50 rows x 16 fp16 in the model"),
    ],
)
def test_a_plan_is_for_one_model(change, message):
    small_plan().check_model(SHAPES)
    tables = {name: shape for name, shape in {**SHAPES, **change}.items() if shape is not None}
    with pytest.raises(ShardingError, match=message):
        small_plan().check_model(tables)


def test_a_plan_is_for_one_number_of_ranks():
    small_plan().check_ranks(2, 2)
    for world_size, ranks_per_node in ((4, 2), (2, 1)):
        said = rf"is for 2 ranks, 2 to a node; this run has {world_size}, {ranks_per_node} to a node"
        with pytest.raises(ShardingError, match=said):
            small_plan().check_ranks(world_size, ranks_per_node)


def test_settings_that_the_prediction_did_not_assume_are_named():
    config = RunConfig(cache=CacheConfig(policy="lfu"))
    plan = small_plan(settings=config.predicted_from("cpu", 2), batch_size=config.train.rank_batch_size(2))
    assert plan.other_settings(config.predicted_from("cpu", 2)) == []
    other = RunConfig(look_ahead=LookAheadConfig(8), train=dataclasses.replace(config.train, batch_size=7))
    assert plan.other_settings(other.predicted_from("cpu", 2)) == [
        "cache.policy is 'lookahead'; the plan's prediction assumed 'lfu'",
        "look_ahead.lookahead is 8; the plan's prediction assumed 64",
        "train.batch_size is 7; the plan's prediction assumed 1024",
    ]
    packed = RunConfig(cache=config.cache, sharding=ShardingConfig(mode="hot_cold", hot_bytes=9))
    assert plan.other_settings(packed.predicted_from("cpu", 2)) == [
        "sharding.hot_bytes is 9; the plan's prediction assumed None",
        "sharding.mode is 'hot_cold'; the plan's prediction assumed 'sharded'",
    ]
    read_back = dataclasses.replace(plan, settings=json.loads(json.dumps(plan.settings)))
    assert read_back.other_settings(config.predicted_from("cpu", 2)) == []


@pytest.mark.parametrize(
    ("sharder", "stock"),
    [
        (CachedEmbeddingBagCollectionSharder, "StockEmbeddingBagCollectionSharder"),
        (CachedEmbeddingCollectionSharder, "StockEmbeddingCollectionSharder"),
    ],
)
def test_a_cached_sharder_refuses_to_have_no_cache(sharder, stock):
    with pytest.raises(ConfigError, match=f"cache.enabled=False has no effect on {sharder.__name__}; use {stock}"):
        sharder(CacheConfig(enabled=False))


def test_differences_are_said_in_lines():
    before = small_plan()
    assert diff_lines(before, before) == []
    t0, t1, t2, t3, t4 = before.tables
    tables = [t0, t1, dataclasses.replace(t2, ranks=(1,)), dataclasses.replace(t3, kernel="cached"), t4]
    tables.append(TablePlacement("t5", 7, 16, "fp32", "table_wise", "device", (0,)))
    after = make_plan(tables, 2, 2, device="cuda", settings={"cache.policy": "lru"}, prediction=make_prediction(0.008))
    pools = tuple(dataclasses.replace(p, slots=34) if p.sharding == "row_wise" else p for p in after.pools)
    assert diff_lines(before, dataclasses.replace(after, pools=pools)) == [
        "device: cpu -> cuda",
        "cache.policy: lfu -> lru",
        "model.over_arch_layer_sizes: [8, 1] -> none",
        "table t2: cached table_wise on rank 0 -> cached table_wise on rank 1",
        "table t3: device table_wise on rank 1 -> cached table_wise on rank 1",
        "table t5: added, device table_wise on rank 0",
        "rank 0: row_wise pool of dim 16 (t1): 17 -> 34 slots (+100.0%)",
        "rank 0: table_wise pool of dim 16: -t2, 67 -> 33 slots (-50.7%)",
        "rank 1: row_wise pool of dim 16 (t1): 16 -> 34 slots (+112.5%)",
        "rank 1: table_wise pool of dim 16 (t2, t3): added, 50 slots",
        "predicted step: 10.00 ms -> 8.00 ms (-20.0%)",
        "predicted samples per second: 12,800.00 -> 16,000.00 (+25.0%)",
    ]
    fewer = tuple(dataclasses.replace(p, slots=9) if p.sharding == "row_wise" else p for p in before.pools)
    more = tuple(dataclasses.replace(p, slots=10) if p.sharding == "row_wise" else p for p in before.pools)
    assert diff_lines(small_plan(pools=fewer), small_plan(pools=more, prediction=None)) == [
        "ranks 0-1: row_wise pool of dim 16 (t1): 9 -> 10 slots (+11.1%)",
        "predictions: only the first plan has them",
    ]


RENAMED = [
    TablePlacement("t0", 100, 64, "fp32", "table_wise", "cached", (0,)),
    TablePlacement("t1", 100, 64, "fp32", "table_wise", "cached", (2,)),
    TablePlacement("t2", 100, 64, "fp32", "column_wise", "cached", (1, 3)),
    TablePlacement("t3", 9, 64, "fp32", "data_parallel", "replicated", ()),
]


def on_other_ranks(names: Sequence[int]) -> list[TablePlacement]:
    return [dataclasses.replace(table, ranks=tuple(names[rank] for rank in table.ranks)) for table in RENAMED]


def test_renamed_ranks_are_one_line():
    before = make_plan(RENAMED, 4, 4)
    assert diff_lines(before, make_plan(on_other_ranks([3, 1, 2, 0]), 4, 4)) == [
        "the same placement, ranks renamed: 0 -> 3, 3 -> 0"
    ]
    # Blocks of columns, too, are on renamed ranks; and what differs beside the names is still said.
    after = make_plan(on_other_ranks([1, 3, 0, 2]), 4, 4, settings={**before.settings, "cache.policy": "lru"})
    pools = tuple(dataclasses.replace(p, slots=p.slots + 7) if p.rank == 1 else p for p in after.pools)
    assert diff_lines(before, dataclasses.replace(after, pools=pools)) == [
        "cache.policy: lfu -> lru",
        "the same placement, ranks renamed: 0 -> 1, 1 -> 3, 2 -> 0, 3 -> 2",
        "rank 1: table_wise pool of dim 64 (t0): 33 -> 40 slots (+21.2%)",
    ]


@pytest.mark.parametrize(
    ("tables", "ranks_per_node"),
    [
        (on_other_ranks([0, 2, 1, 3]), 2),  # t0 and t2's first columns were on one node
        ([*RENAMED[:2], dataclasses.replace(RENAMED[2], ranks=(2, 3)), RENAMED[3]], 4),
        ([RENAMED[0], dataclasses.replace(RENAMED[1], ranks=(0,)), *RENAMED[2:]], 4),
        ([dataclasses.replace(RENAMED[0], kernel="device"), *on_other_ranks([3, 1, 2, 0])[1:]], 4),
    ],
    ids=["another node", "with another table", "together", "another kernel"],
)
def test_another_placement_is_no_renaming(tables, ranks_per_node):
    lines = diff_lines(make_plan(RENAMED, 4, ranks_per_node), make_plan(tables, 4, ranks_per_node))
    assert any(line.startswith("table t") for line in lines)
    assert not any("renamed" in line for line in lines)


def test_a_plan_gives_the_size_so_the_settings_must_not():
    for size in ({"ratio": 0.1}, {"device_bytes": 10**6}):
        with pytest.raises(ConfigError, match="has no effect with a plan, which gives every cache its slots"):
            CachedEmbeddingBagCollectionSharder(CacheConfig(**size), plan=small_plan())


def test_replicated_tables_need_one_optimizer_without_a_cache(ranks: Ranks, tmp_path):
    tables = [TablePlacement("t0", 10, 16, "fp32", "data_parallel", "replicated", ())]
    make_plan(tables, 1, 1).save(tmp_path / "p.json")
    found = ShardingConfig(plan=str(tmp_path / "p.json"))
    sgd = EmbeddingOptimizerConfig(kind="sgd", lr=0.1)

    def planned(
        embedding: EmbeddingOptimizerConfig,
        dense: DenseOptimizerConfig,
        sharding: ShardingConfig = found,
        cached: bool = False,
    ):
        cache = CacheConfig(enabled=cached)
        return find_plan(
            RunConfig(sharding=sharding, embedding_optimizer=embedding, dense_optimizer=dense, cache=cache), ranks
        )

    assert planned(sgd, DenseOptimizerConfig(kind="sgd", lr=0.1)) == make_plan(tables, 1, 1)
    for embedding, dense in (
        (EmbeddingOptimizerConfig(), DenseOptimizerConfig(kind="sgd", lr=0.1)),
        (sgd, DenseOptimizerConfig(kind="adam", lr=0.1)),
        (sgd, DenseOptimizerConfig(kind="sgd", lr=0.2)),
        (sgd, DenseOptimizerConfig(kind="sgd", lr=0.1, clip_norm=1.0)),
        (sgd, DenseOptimizerConfig(kind="sgd", lr=0.1, weight_decay=1e-3)),
    ):
        with pytest.raises(ConfigError, match=r"replicates the tables \['t0'\], .* trained by the dense optimizer"):
            planned(embedding, dense)
        assert planned(embedding, dense, cached=True) == make_plan(tables, 1, 1)
    assert planned(sgd, DenseOptimizerConfig(), ShardingConfig()) is None


def test_a_plan_that_differs_from_a_pin_is_refused(ranks: Ranks, tmp_path):
    plan = make_plan([TablePlacement("t0", 10, 16, "fp32", "table_wise", "cached", (0,))], 1, 1)
    plan.save(tmp_path / "p.json")

    def found(**pins: TablePin) -> Plan | None:
        return find_plan(RunConfig(sharding=ShardingConfig(plan=str(tmp_path / "p.json"), pin=pins)), ranks)

    assert found(t0=TablePin(type="table_wise", ranks=(0,), kernel="cached", slots=3)) == plan
    for name, pin, said in (
        ("t0", TablePin(kernel="device"), "its kernel is 'cached' and pinned to 'device'. Plan again."),
        ("t0", TablePin(type="row_wise"), "its type is 'table_wise' and pinned to 'row_wise'. Plan again."),
        ("t1", TablePin(ranks=(0,)), "the plan has no such table. Plan again."),
    ):
        with pytest.raises(ConfigError, match=f"sharding.pin.{name}: .* was made otherwise: {said}"):
            found(**{name: pin})


def test_the_command_takes_a_plan_and_refuses_it_before_it_starts(tmp_path, capsys):
    config, plan = tmp_path / "c.toml", tmp_path / "a plan.json"
    config.write_text("")
    small_plan().save(plan)
    given = ["train", "--config", str(config), "--plan", str(plan), "--run-dir", str(tmp_path / "r")]
    assert main([*given, "--dry-run"]) == 0
    assert f'[sharding]\nplan = "{plan}"' in capsys.readouterr().out
    for more, message in (
        (["--nproc", "4"], "is for 2 ranks, 2 to a node; this run has 4"),
        (["--plan", "nowhere.json"], "nowhere.json: cannot be read"),
    ):
        assert main([*given, *more]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_for_a_billion_ranks_is_refused_at_once(tmp_path):
    small_plan().save(tmp_path / "p.json")
    text = (tmp_path / "p.json").read_text()
    huge = text.replace('"world_size": 2', '"world_size": 1000000000').replace(
        '"ranks_per_node": 2', '"ranks_per_node": 1000000000'
    )
    assert huge != text
    (tmp_path / "p.json").write_text(huge)
    with pytest.raises(ShardingError, match="world_size: got 1000000000, needed at most 65536"):
        Plan.load(tmp_path / "p.json")
