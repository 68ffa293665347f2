"""A run that does not fit is refused before it takes memory, and what is said to fit does."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from embershard.cache.rows.memory import pinned_bytes
from embershard.commands.plan.inputs import make_workload
from embershard.distributed import process_group
from embershard.errors import ConfigError, ShardingError
from embershard.frequency.assumed import AssumedTable, assumed_statistics
from embershard.machine import HostMemory
from embershard.planning.cost.topology import load_topology
from embershard.planning.make_plan import make_plan
from embershard.planning.request import Budget, PlanRequest
from embershard.settings.decoding import decode
from embershard.settings.files import apply_override
from embershard.sharding.plan import Plan
from embershard.sharding.shards import TablePlacement, pools_of
from embershard.sharding.torchrec import cache_stats
from embershard.training import trainer
from embershard.training.config import RunConfig
from embershard.training.fit import machine_limits
from embershard.training.fit.machine_limits import MachineLimits, larger_limit
from embershard.training.fit.memory_check import check_memory, check_memory_for_run
from embershard.training.fit.memory_needs import MemoryNeeds, RanksHere, memory_needs
from embershard.training.fit.model_size import model_size, table_rows
from embershard.training.trainer import Trainer
from tests.covering import matrix

pytestmark = pytest.mark.slow

GB = 10**9
#: Criteo Kaggle's rows, all written at the start: 2.16 GB of weights, 0.14 of states, 0.14 of scores, 0.14 of maps.
EAGER = ("data.synthetic.scale=1.0", "train.init=torchrec", "cache.ratio=0.2")
LAZY = ("data.synthetic.scale=1.0", "cache.ratio=0.2")
FILES = (*EAGER, "cache.host=mmap", "cache.host_dir=/rows")
ON_CPU = RanksHere(2, 2, "cpu")


def config_of(*settings: str) -> RunConfig:
    values: dict[str, Any] = {}
    for setting in settings:
        apply_override(RunConfig, values, setting)
    return decode(RunConfig, values)


def needs_of(*settings: str, ranks: RanksHere = ON_CPU, plan: Plan | None = None) -> MemoryNeeds:
    config = config_of(*settings)
    return memory_needs(config, table_rows(config), ranks, plan)


def limits(host: float, device: float | None = None, disk: float | None = None) -> MachineLimits:
    gpu, folder = (None if size is None else round(size * GB) for size in (device, disk))
    return MachineLimits(HostMemory(64 * GB, round(host * GB)), gpu, folder)


def check(*settings: str, machine: MachineLimits, ranks: RanksHere = ON_CPU, plan: Plan | None = None) -> str:
    config = config_of(*settings)
    return check_memory(config, table_rows(config), ranks, machine, plan)


def refusal(*settings: str, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        check(*settings, **arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def changes_in(message: str) -> list[list[str]]:
    """Return the settings of each change that a message proposes."""
    proposed = message.partition("Each of these fits: ")[2].split("; ")
    return [found for change in proposed if (found := re.findall(r"--set ([\w.]+=[\w.]*\w)", change))]


@pytest.mark.parametrize(
    "setting", ["cache.warmup=true", matrix("cache.policy=static"), matrix("cache.policy=frequency")]
)
def test_settings_of_a_disabled_cache_are_not_asked_for_a_profile(setting: str) -> None:
    assert needs_of(*LAZY, setting, "cache.enabled=false") == needs_of(*LAZY, "cache.enabled=false")


def test_data_parallel_tables_are_there_once_and_their_caches_on_every_rank() -> None:
    sharded, alike = needs_of(*EAGER), needs_of(*EAGER, "sharding.mode=data_parallel")
    for part in ("weights", "optimizer_states"):
        assert alike.host[part] == sharded.host[part]
    for part in ("slots", "maps", "scores"):
        assert alike.host[part] == pytest.approx(2 * sharded.host[part], rel=0.01)
    assert needs_of(*LAZY, "sharding.mode=data_parallel").lazy_bytes == 0
    alone = RanksHere(1, 1, "cpu")
    assert needs_of(*LAZY, "sharding.mode=data_parallel", ranks=alone) == needs_of(*LAZY, ranks=alone)


def test_no_more_machines_are_advised_where_one_is_needed() -> None:
    assert "machines like this one" in refusal(*EAGER, machine=limits(host=2))
    assert "machines like this one" not in refusal(*EAGER, "sharding.mode=data_parallel", machine=limits(host=2))


def test_what_fits_exactly_is_accepted():
    for settings, need in ((EAGER, needs_of(*EAGER).host_bytes), (LAZY, needs_of(*LAZY).host_bytes)):
        assert check(*settings, machine=limits(need / GB)) == ""
        assert needs_of(*settings).host_bytes == need
    assert "does not fit" in refusal(*EAGER, machine=limits(needs_of(*EAGER).host_bytes / GB - 1e-9))


def test_rows_made_when_used_are_a_warning_and_the_rest_an_error():
    needs = needs_of(*LAZY)
    assert needs.lazy_bytes == needs.host["weights"] + needs.host["optimizer_states"] > needs.start_bytes
    warning = check(*LAZY, machine=limits(needs.host_bytes / GB - 1e-9))
    assert warning.startswith("Rows take memory when they are first used. If all are, the 2 ranks on this machine need")
    assert check(*LAZY, machine=limits(needs.start_bytes / GB)) != ""
    assert "before any row is used" in refusal(*LAZY, machine=limits(needs.start_bytes / GB - 1e-9))


def test_the_message_has_figures_and_the_largest_table():
    message = refusal(*EAGER, machine=limits(1.5))
    assert "its 2 ranks on this machine need" in message
    assert "1.40 GiB of 59.60 GiB are available (this machine)" in message
    assert "weights 2.01 GiB, slots of the caches" in message
    assert "the largest table is 't_C3' with 10,131,227 rows of 68 bytes" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "machine", "ranks", "expected"),
    [
        (EAGER, limits(3.0), ON_CPU, {"cache.host", "cache.ratio", "model.table_dtype", "data.synthetic.scale"}),
        matrix(EAGER, limits(1.5), ON_CPU, {"cache.host", "data.synthetic.scale"}),
        matrix((*EAGER, "cache.enabled=false"), limits(1.5), ON_CPU, {"model.table_dtype", "data.synthetic.scale"}),
        (FILES, limits(1.0, disk=9), ON_CPU, {"cache.ratio", "data.synthetic.scale"}),
        matrix(FILES, limits(9.0, disk=2), ON_CPU, {"cache.host", "model.table_dtype", "data.synthetic.scale"}),
        matrix(
            (*EAGER, "cache.enabled=false"),
            limits(9, device=0.9),
            RanksHere(2, 2, "cuda"),
            {"cache.ratio", "model.table_dtype", "data.synthetic.scale"},
        ),
        (
            (*EAGER, "cache.ratio=0.9"),
            limits(9, device=0.9),
            RanksHere(2, 2, "cuda"),
            {"cache.ratio", "data.synthetic.scale"},
        ),
    ],
)
def test_proposed_changes_fit(settings, machine, ranks, expected):
    proposed = changes_in(refusal(*settings, machine=machine, ranks=ranks))
    assert {change[0].partition("=")[0] for change in proposed} == expected
    for change in proposed:
        assert check(*settings, *change, machine=machine, ranks=ranks) == "", change
        key, _, value = change[0].partition("=")
        if (
            key in ("cache.ratio", "data.synthetic.scale") and float(value) < 0.2
        ):  # two digits: a tenth more is too much
            with pytest.raises(ConfigError):
                check(*settings, f"{key}={1.11 * float(value)}", *change[1:], machine=machine, ranks=ranks)


def test_batches_known_ahead_may_be_what_does_not_fit():
    far = ("data.synthetic.scale=0.001", "look_ahead.lookahead=100000000")
    message = refusal(*far, machine=limits(3.0))
    [known] = [change for change in changes_in(message) if change[0].startswith("look_ahead.lookahead=")]
    assert int(known[0].partition("=")[2]) > 64
    assert check(*far, *known, machine=limits(3.0)) == ""
    assert check(*far, "train.max_steps=60", machine=limits(3.0)) == "", "no batch comes after the last step"


def test_machines_and_rows_of_files_are_proposed():
    files = ("data.kind=criteo", "data.path=logs", "data.criteo.num_rows=2000000", "train.init=torchrec")
    message = refusal(*files, machine=limits(2.4))
    most, machines = re.search(r"no table with more than ([\d,]+) rows", message), re.search(r"(\d+) machines", message)
    rows, count = int(most[1].replace(",", "")), int(machines[1])
    assert check(*files, f"data.criteo.num_rows={rows}", machine=limits(2.4)) == ""
    for number, fits in ((count, True), (count - 1, False)):
        needs = needs_of(*files, ranks=dataclasses.replace(ON_CPU, world_size=2 * number))
        assert (needs.host_bytes <= 2.4 * GB) is fits
    assert "No single change" in refusal(*files, machine=limits(0.1))


def test_publications_take_a_mark_per_cached_row_and_a_copy_of_others() -> None:
    publishing = ("publish.folder=published", "publish.every_steps=5")
    plain, publishes = needs_of().host, needs_of(*publishing).host
    assert {name: publishes[name] - plain.get(name, 0) for name in publishes} == {
        **dict.fromkeys(plain, 0), "marks": sum(table_rows(config_of()).values()),
    }  # fmt: skip
    uncached = needs_of("cache.enabled=false", *publishing).host
    assert uncached["compared"] == sum(table_rows(config_of()).values()) * 16 * 4
    assert "marks" not in uncached
    chains = needs_of(*publishing, "checkpoint.every_steps=5", "checkpoint.full_every=4").host
    assert chains["marks"] == 2 * publishes["marks"], "saves of what changed have marks of their own"


def test_a_deep_window_in_front_of_a_file_takes_what_its_batches_take():
    """On a GPU device memory, and host memory for the ids and for what is known of them there."""
    filed = (*LAZY, "cache.host=file", "cache.host_dir=/rows", "cache.host_bytes=1000000000")
    gpu = dataclasses.replace(ON_CPU, device="cuda")
    few, many, in_memory = (
        needs_of(*settings, f"look_ahead.lookahead={lookahead}", ranks=gpu)
        for settings, lookahead in ((filed, 128), (filed, 1128), (LAZY, 1128))
    )
    assert many.device["input_buffers"] == in_memory.device["input_buffers"] > 5 * few.device["input_buffers"]
    ids = 26 * 2 * config_of(*filed).train.rank_batch_size(2)  # of both ranks
    on_host = 12 * ids + pinned_bytes(8 * ids)
    assert few.host["known_batches"] == pytest.approx((128 + 6) * on_host, rel=0.01)
    assert many.host["known_batches"] == pytest.approx((1128 + 6) * on_host, rel=0.01)
    assert many.host["read_ahead"] > 5 * few.host["read_ahead"]
    on_cpu, of_memory = (needs_of(*settings, "look_ahead.lookahead=1128").host for settings in (filed, LAZY))
    assert "known_batches" not in on_cpu
    more = on_cpu["input_buffers"] - of_memory["input_buffers"]
    assert more == pytest.approx((1128 + 6) * 12 * ids, rel=0.01)


def test_the_window_that_fits_a_gpu_in_front_of_a_file_is_proposed():
    """It takes the memory of the device: 5,000 batches do not fit beside the slots."""
    filed = (*LAZY, "cache.host=file", "cache.host_dir=/rows", "cache.host_bytes=1000000000")
    gpu = dataclasses.replace(ON_CPU, device="cuda")
    taken = needs_of(*filed, "look_ahead.lookahead=800", ranks=gpu).device_bytes / GB
    given: Any = {"machine": limits(1000.0, taken, 1000.0), "ranks": gpu}
    deep = (*filed, "look_ahead.lookahead=5000")
    [known] = [change for change in changes_in(refusal(*deep, **given)) if change[0].startswith("look_ahead.")]
    assert 700 <= int(known[0].partition("=")[2]) <= 801
    assert check(*deep, *known, **given) == ""


def test_files_take_disk_in_place_of_memory():
    memory, files = needs_of(*EAGER), needs_of(*FILES)
    assert files.disk_bytes == memory.host["weights"] + memory.host["optimizer_states"]
    assert files.host_bytes == memory.host_bytes - files.disk_bytes
    assert "of disk in cache.host_dir='/rows'" in refusal(*FILES, machine=limits(9, disk=1.5))


def test_a_plan_says_what_each_rank_holds():
    config = config_of(*EAGER)
    rows = table_rows(config)
    tables = tuple(
        TablePlacement(name, count, 16, "fp32", "table_wise", "cached", (int(name == "t_C3"),))
        for name, count in rows.items()
    )
    pools = tuple(pool.with_slots(1000) for pool in pools_of(tables, ranks_per_node=1))
    plan = Plan(2, 1, 1024, "cpu", None, None, {}, tables, pools)
    here = [needs_of(*EAGER, ranks=RanksHere(2, 1, "cpu", first), plan=plan) for first in (0, 1)]
    assert [needs.host["weights"] for needs in here] == [(sum(rows.values()) - rows["t_C3"]) * 64, rows["t_C3"] * 64]
    assert all(needs.host["slots"] == 1001 * (68 + 12 + 4 + 8) for needs in here)
    message = refusal(*EAGER, machine=limits(0.5), ranks=RanksHere(2, 1, "cpu"), plan=plan)
    assert message.endswith("Or plan for this machine: embershard plan --host-memory, --device-memory.")
    assert "cache.ratio" not in message  # the plan's slots apply


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan for GPUs that uses the memory that each of two ranks may use."""
    config = config_of(*PLANNED)
    rows = table_rows(config)
    data = assumed_statistics([AssumedTable(name, count, 1.0, 1) for name, count in rows.items()], 10**6)
    workload = make_workload(config, data, 2, ranks_per_node=2, device="cuda", reserve_bytes=10_000_000)
    rates, settings = load_topology("h100x2").rates_for(2), config.predicted_from("cuda", 2)
    budget = Budget(device_bytes=30_000_000, less_bytes=(0, 9_000_000))
    return make_plan(PlanRequest(workload, rates, budget, settings=settings, effort=0.2))


PLANNED = ("data.synthetic.scale=0.02", "train.batch_size=64")
WHOLE = "cache.enabled=false"
GPUS = RanksHere(2, 2, "cuda")


def test_ranks_keep_to_what_each_may_use(plan: Plan):
    """By the plan's own count, which knows how often the data look rows up; a byte less is refused."""
    taken = [sum(each.values()) for each in needs_of(*PLANNED, ranks=GPUS, plan=plan).by_rank]
    assert plan.prediction is not None
    assert taken == [rank.total_device_bytes for rank in plan.prediction.ranks]
    assert max(plan.memory_bytes_by_rank) > taken[0] > plan.memory_bytes_by_rank[1] >= taken[1]
    machine = dataclasses.replace(limits(9), by_rank=plan.memory_bytes_by_rank)
    assert check(*PLANNED, machine=machine, ranks=GPUS, plan=plan) == ""
    machine = dataclasses.replace(machine, by_rank=(taken[0], taken[1] - 1))
    said = refusal(*PLANNED, machine=machine, ranks=GPUS, plan=plan)
    assert re.search(r"rank 1 needs \S+ MiB of device memory, and may use \S+ MiB \(its plan\)\. It is for", said), said
    given = (*PLANNED, f"sharding.device_bytes=[{taken[0]}, {taken[1] - 1}]")
    assert "(sharding.device_bytes)" in refusal(*given, machine=machine, ranks=GPUS, plan=plan)


def test_what_an_edited_plan_takes_is_counted_anew(plan: Plan):
    """Its prediction is gone, and more slots are more memory."""
    machine = dataclasses.replace(limits(9), by_rank=plan.memory_bytes_by_rank)
    edited = dataclasses.replace(plan, prediction=None)
    assert check(*PLANNED, machine=machine, ranks=GPUS, plan=edited) == ""
    tables = [dataclasses.replace(table, kernel="cached") for table in plan.tables]
    pools = tuple(pool.with_slots(pool.rows) for pool in pools_of(tables, ranks_per_node=2))
    edited = dataclasses.replace(edited, tables=tuple(tables), pools=pools)
    assert "(its plan)" in refusal(*PLANNED, machine=machine, ranks=GPUS, plan=edited)


def test_each_gpu_has_to_hold_its_own_rank(plan: Plan):
    """Not the fullest rank of all: GPUs may have other amounts of free memory."""
    own = [needs_of(*PLANNED, ranks=dataclasses.replace(GPUS, own=n), plan=plan).device_bytes for n in (0, 1)]
    assert own[0] > own[1] > 0
    machine = limits(9, device=own[1] / GB)
    assert check(*PLANNED, machine=machine, ranks=dataclasses.replace(GPUS, own=1), plan=plan) == ""
    assert "of GPU memory, and" in refusal(*PLANNED, machine=machine, ranks=dataclasses.replace(GPUS, own=0), plan=plan)


def machine_of(*settings: str, plan: Plan | None = None) -> MachineLimits:
    """This machine, with two ranks and much host memory."""
    with process_group("cpu") as ranks:
        ranks = dataclasses.replace(ranks, world_size=2, local_world_size=2)
        return dataclasses.replace(MachineLimits.here(config_of(*settings), ranks, plan), host=limits(9).host)


@pytest.mark.parametrize("edited", ["slots", "limit"])
def test_one_limit_of_a_plan_is_kept_as_limits_by_rank_are(plan: Plan, edited: str):
    """With more slots than it allows, and with a lower limit, which leaves the prediction; what is proposed fits."""
    plan = dataclasses.replace(plan, memory_bytes_by_rank=())
    assert plan.device_limits == (plan.device_memory_bytes,) * 2
    given: dict[str, Any] = {"ranks": GPUS, "plan": plan}
    assert check(*PLANNED, machine=machine_of(*PLANNED, plan=plan), **given) == ""
    if edited == "limit":
        plan = dataclasses.replace(plan, device_memory_bytes=1)
    else:
        tables = tuple(dataclasses.replace(table, kernel="cached") for table in plan.tables)
        pools = tuple(pool.with_slots(pool.rows) for pool in pools_of(tables, ranks_per_node=2))
        plan = dataclasses.replace(plan, tables=tables, pools=pools, prediction=None)
    given["plan"] = plan
    said = refusal(*PLANNED, machine=machine_of(*PLANNED, plan=plan), **given)
    assert "of device memory, and may use" in said
    assert "(its plan)" in said
    changes = changes_in(said)
    assert changes
    for change in changes:
        machine = machine_of(*PLANNED, *change, plan=plan)
        assert check(*PLANNED, *change, machine=machine, **given) == "", change


def test_the_run_to_compare_with_may_use_what_it_needs(plan: Plan):
    """Beside a run by a plan with a limit stands one with all rows on the devices: its limit is named with it."""
    plan = dataclasses.replace(plan, memory_bytes_by_rank=(), device_memory_bytes=1)
    assert "(its plan)" in refusal(*PLANNED, WHOLE, machine=machine_of(*PLANNED, WHOLE, plan=plan), plan=plan)
    with process_group("cpu") as ranks:
        ranks = dataclasses.replace(ranks, world_size=2, local_world_size=2)
        change = larger_limit(config_of(*PLANNED, WHOLE), ranks, plan).removeprefix(" --set ")
        assert larger_limit(config_of(*PLANNED, WHOLE, change), ranks, plan) == ""
    machine = machine_of(*PLANNED, WHOLE, change, plan=plan)
    assert check(*PLANNED, WHOLE, change, machine=machine, plan=plan) == ""


@pytest.mark.parametrize("cache", [(), matrix((WHOLE,))])
def test_a_run_without_a_plan_keeps_to_what_its_ranks_may_use(cache: tuple[str, ...]):
    """On a CPU, too; what is proposed fits."""
    taken = [sum(each.values()) for each in needs_of(*PLANNED, *cache).by_rank]
    for limit, fits in ((max(taken), True), (max(taken) - 1, False)):
        settings = (*PLANNED, *cache, f"sharding.device_bytes={limit}")
        machine = machine_of(*settings)
        assert machine.by_rank == (limit, limit)
        if fits:
            assert check(*settings, machine=machine) == ""
            continue
        said = refusal(*settings, machine=machine)
        assert "of device memory, and may use" in said
        assert (f"sharding.device_bytes={max(taken)}",) in [tuple(change) for change in changes_in(said)]
        for change in changes_in(said):
            assert check(*settings, *change, machine=machine_of(*settings, *change)) == "", change


def test_a_plan_for_another_model_is_refused_as_such():
    tables = (TablePlacement("t_other", 100, 16, "fp32", "table_wise", "cached", (0,)),)
    pools = tuple(pool.with_slots(10) for pool in pools_of(tables, ranks_per_node=1))
    plan = Plan(1, 1, 100, "cpu", None, None, {}, tables, pools)
    with (
        process_group("cpu") as ranks,
        pytest.raises(ShardingError, match="places tables that the model does not have"),
    ):
        check_memory_for_run(config_of(*SMALL), plan, ranks)


SMALL = ("data.synthetic.scale=0.001", "data.num_workers=0", "train.batch_size=100", "train.max_steps=1")


_OF_CACHES = (
    ("cache.ratio=0.3",),
    ("cache.device_bytes=900000", "cache.policy=lru"),
    ("cache.device_bytes=900000",),
    ("cache.device_bytes=90000000",),
    ("cache.device_bytes=900000", "cache.slot_map=hashed"),
    ("cache.slot_map=hashed",),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "model"),
    [
        *((_OF_CACHES[1], "own"), (_OF_CACHES[4], "dlrm")),
        *(matrix(each, "dlrm") for each in _OF_CACHES if each != _OF_CACHES[4]),
        *(matrix(each, "own") for each in _OF_CACHES if each != _OF_CACHES[1]),
    ],
)
def test_a_built_model_takes_what_was_computed(model: str, settings: tuple[str, ...], several_pools: tuple[str, ...]):
    if model == "own":
        settings = (*settings, *several_pools)
    config = config_of(*SMALL, *settings)
    host = needs_of(*SMALL, *settings, ranks=RanksHere(1, 1, "cpu")).host
    with process_group("cpu") as ranks:
        run = Trainer(config, ranks)
        stats = cache_stats(run.model)
        run.close()
    assert sum(table.host_bytes for table in stats) == host["weights"] + host["optimizer_states"] + host["scores"]
    assert sum(table.device_bytes for table in stats) == host["slots"] + host["maps"]


@pytest.mark.slow
def test_a_planned_model_takes_what_was_computed(tmp_path):
    """Tables that are sharded in three ways, so that a rank has three pools, each with a number of slots of its own."""
    types = ("table_wise", "row_wise", "column_wise")
    model = model_size(config := config_of(*SMALL), table_rows(config))
    tables = tuple(
        TablePlacement(table.table, table.rows, table.dim, "fp32", types[number % 3], "cached", (0,))  # type: ignore[arg-type]
        for number, table in enumerate(model.tables)
    )
    pools = [pool.with_slots(max(1, pool.rows // share)) for share, pool in enumerate(pools_of(tables, 1), start=2)]
    assert len(pools) == 3
    plan = Plan(1, 1, 100, "cpu", None, None, {}, tables, tuple(pools))
    plan.save(tmp_path / "plan.json")
    planned = (*SMALL, f"sharding.plan={tmp_path / 'plan.json'}")
    host = needs_of(*planned, ranks=RanksHere(1, 1, "cpu"), plan=plan).host
    with process_group("cpu") as ranks:
        run = Trainer(config_of(*planned), ranks)
        stats = cache_stats(run.model)
        run.close()
    assert sum(table.host_bytes for table in stats) == host["weights"] + host["optimizer_states"] + host["scores"]
    assert sum(table.device_bytes for table in stats) == host["slots"] + host["maps"]


def test_pools_of_a_module_share_its_budget(several_pools: tuple[str, ...]):
    for world_size in (1, 2):  # on more ranks all rows fit
        ranks = RanksHere(world_size, world_size, "cpu")
        host = needs_of(*SMALL, "cache.device_bytes=600000", *several_pools, ranks=ranks).host
        most = 2 * 600_000 * world_size  # two modules
        assert 0.8 * most < host["slots"] + host["maps"] <= most


@pytest.fixture(scope="module")
def several_pools(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The settings of a model with three pools of cached rows in two modules: one has tables of dims 16 and 32."""
    folder = tmp_path_factory.mktemp("several_pools")
    (folder / "several_pools.py").write_text(_SEVERAL_POOLS)
    return ("model.build=several_pools:build", f"model.folder={folder}")


_SEVERAL_POOLS = """
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

class Model(torch.nn.Module):
    def __init__(self, features, dims):
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{f.name}", num_embeddings=f.num_rows, embedding_dim=dim, feature_names=[f.name])
            for f, dim in zip(features, dims)
        ]
        half = len(tables) // 2
        self.two_dims = EmbeddingBagCollection(tables[:half], device=torch.device("meta"))
        self.one_dim = EmbeddingBagCollection(tables[half:], device=torch.device("meta"))
        self.over = torch.nn.Linear(sum(dims), 1)

    def forward(self, dense, sparse):
        pooled = [self.two_dims(sparse).values(), self.one_dim(sparse).values()]
        return self.over(torch.cat(pooled, dim=1)).squeeze(1)

def build(schema, options):
    half = len(schema.sparse) // 2
    return Model(schema.sparse, [16] * (half - 3) + [32] * 3 + [8] * (len(schema.sparse) - half))
"""


def test_a_run_is_refused_before_its_model_is_built(monkeypatch):
    monkeypatch.setattr(trainer, "find_profile", None)  # would be called next
    monkeypatch.setattr(machine_limits, "host_memory", lambda: HostMemory(GB, GB // 20))
    with process_group("cpu") as ranks, pytest.raises(ConfigError, match="does not fit"):
        Trainer(config_of(*SMALL), ranks)
