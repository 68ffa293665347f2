"""`embershard plan --tables`: a plan from numbers of tables, without data."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

import pytest

from embershard.commands import cli
from embershard.commands.plan import command as plan_command
from embershard.commands.plan.inputs import read_tables
from embershard.errors import ConfigError
from embershard.frequency.assumed import AssumedTable, assumed_statistics
from embershard.sharding.plan import Plan
from tests.covering import matrix

pytestmark = pytest.mark.slow

TABLES = """
samples = 1_000_000
[tables.item]
rows = 40_000_000
dim = 32
[tables.context]
count = 3
rows = 2000
lookups = 4
zipf = 0.5
[model]
embedding_dim = 16
dense_arch_layer_sizes = [32, 16]
over_arch_layer_sizes = [16, 1]
[train]
batch_size = 512
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "tables.toml").write_text(TABLES)
    return tmp_path / "tables.toml"


def plan(file: Path, *more: str) -> int:
    return cli.main(["plan", "--tables", str(file), "--topology", "h200x8", "--effort", "0.03", *more])


@pytest.mark.matrix
def test_tables_that_are_numbers_are_planned(file, tmp_path, capsys):
    assert plan(file, "--ranks", "4", "-o", str(tmp_path / "plan.json")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Note: No data were read" in said
    assert "Train with it" not in said, "there are no data to train on"
    made = Plan.load(tmp_path / "plan.json")
    assert {table.table: (table.rows, table.dim) for table in made.tables} == {
        "item": (40_000_000, 32),
        **{f"context_{n}": (2000, 16) for n in range(3)},
    }
    tables = sum(rank.device_bytes["device_tables"] for rank in made.prediction.ranks)
    assert tables == 40_000_000 * (4 * 32 + 4) + 3 * 2000 * (4 * 16 + 4)
    assert made.made_from["tables"] == str(file)


def test_less_memory_takes_caches(file, capsys):
    assert plan(file, "--ranks", "1", "--device-memory", "4GiB") == 0
    assert "cached" in capsys.readouterr().out


HUGE = """
samples = 10_000_000
[tables.t0]
rows = 31_622_776
lookups = 20
dim = 128
zipf = 1.1
[model]
embedding_dim = 64
dense_arch_layer_sizes = [128, 64]
over_arch_layer_sizes = [128, 1]
[train]
batch_size = 1024
"""
#: Words of a plan that does not fit, and parts of the changes that its refusal names.
REFUSED = [
    ("--ranks 1 --device-memory 60MiB", ["--device-memory ", "cache.slot_map=hashed"]),
    ("--ranks 4 --device-memory 60MiB",
        ["--device-memory ", "cache.slot_map=hashed", "look_ahead.lookahead=", "train.batch_size="]),
    ("--ranks 2 --device-memory 70MiB,50MiB", ["--device-memory ", "cache.slot_map=hashed"]),
    ("--ranks 1 --device-memory 16GiB --ratios 0.99", ["--device-memory ", "--ratios 0."]),
    ("--ranks 1 --device-memory 140MiB --set cache.slot_map=array --set train.batch_size=4096",
        ["--device-memory ", "train.batch_size="]),
    ("--ranks 1 --device-memory 1GiB --host-memory 1GiB", ["--host-memory ", "--ranks "]),
    ("--ranks 1 --device-memory 12GiB --set cache.enabled=false", ["model.table_dtype=fp16 (rounds what is trained)"]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "named"), [case if number in (0, 1, 6) else matrix(*case) for number, case in enumerate(REFUSED)]
)
def test_each_change_that_a_refusal_names_fits(file, capsys, words, named):
    """In the command that names it: in place of the option that is wrong, or behind it."""
    file.write_text(HUGE)
    given = words.split()
    assert plan(file, *given) == 2
    said = " ".join(capsys.readouterr().err.split()).partition("Smallest change that fits: ")[2]
    changes = [each.removeprefix("or ") for each in said.rstrip(".").split("; ") if "--" in each]
    assert all(any(part in change for change in changes) for part in named), said
    for change in changes:
        option, value = change.removesuffix(" (rounds what is trained)").split()
        at = given.index(option) if option in given and option != "--set" else None
        changed = [*given, option, value] if at is None else [*given[:at], option, value, *given[at + 2 :]]
        assert plan(file, *changed) == 0, change
    capsys.readouterr()


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("small", "more"), [("cache.host_dtype", 3 * 2000 * (16 + 2)), matrix("cache.host_dtypes.item", 0)]
)
def test_small_host_rows_take_the_memory_that_they_take(file, tmp_path, capsys, small, more):
    """Of the large table; those of contexts are few, stay full, and take `more`."""
    given = ("--ranks", "1", "--device-memory", "4GiB", "-o", str(tmp_path / "plan.json"))
    note, profile, rows = 'cache.host_dtype = "int8" rounds no row', ("--set", "profile.samples=1000"), []
    for changes in ((), ("--set", f"{small}=int8", *profile)):
        assert plan(file, *given, *changes) == 0
        assert note not in " ".join(capsys.readouterr().out.split())
        rows.append(Plan.load(tmp_path / "plan.json").prediction.ranks[0].host_bytes["rows"])
    assert rows[0] - rows[1] == 40_000_000 * (4 * 32 - (32 + 2)) - 400_000 * 4 * 32 - more
    assert plan(file, *given, "--set", "cache.host_dtypes.context_1=int8", *profile) == 0
    assert note in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("setting", ["model.table_dtypes.item", matrix("model.table_dtype")])
def test_tables_in_fp16_take_half_the_device_memory(file, tmp_path, capsys, setting):
    """Of their weights: states stay fp32. A table that there is not is refused."""
    given, found = ("--ranks", "1", "-o", str(tmp_path / "plan.json")), []
    for changes in ((), ("--set", f"{setting}=fp16")):
        assert plan(file, *given, *changes) == 0
        made = Plan.load(tmp_path / "plan.json")
        found.append(made.prediction.ranks[0].device_bytes["device_tables"])
    assert [table.dtype for table in made.tables].count("fp16") == (4 if setting.endswith("dtype") else 1)
    assert found[0] - found[1] == 2 * (40_000_000 * 32 + (3 * 2000 * 16 if setting.endswith("dtype") else 0))
    for key in ("model.table_dtypes", "cache.host_dtypes"):
        assert plan(file, *given, "--set", f"{key}.itm=fp16") == 2
        assert f"{key}: got no table 'itm', needed some of item, context_0" in capsys.readouterr().err


@pytest.mark.matrix
def test_several_ranks_are_compared(file, capsys):
    assert plan(file, "--ranks", "1,2,4") == 0
    assert "ranks" in capsys.readouterr().out


def test_a_mix_of_machines_has_its_own_number_of_ranks_in_a_search(file, capsys):
    """And does not keep others from being tried at all of theirs."""
    machines = ("--topology", "h100x2+l4x2,h100x4", "--price", "3,2", "--effort", "0.03")
    assert cli.main(["plan", "--tables", str(file), "--target", "20k/s", *machines]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"20,000 samples/s take (\d+) ranks? of ", said), said
    assert "4 ranks of h100x2+l4x2: " in said


@pytest.mark.matrix
def test_machines_for_a_target_are_named_with_what_they_cost(file, capsys):
    machines = ("--topology", "h200x8,a10x4", "--price", "3.5,1.25")
    assert cli.main(["plan", "--tables", str(file), "--target", "20k/s", "--effort", "0.03", *machines]) == 0
    said = " ".join(capsys.readouterr().out.split())
    found = re.search(r"20,000 samples/s take (\d+) ranks? of (\S+) .*?([\d.]+) an hour, ([\d,]+) samples/s", said)
    assert found is not None, said
    ranks, machine, cost, speed = int(found[1]), found[2], float(found[3]), int(found[4].replace(",", ""))
    assert cost == ranks * {"h200x8": 3.5, "a10x4": 1.25}[machine]
    assert speed >= 20_000
    assert f"What the step of {ranks} rank" in said
    assert "step_overhead_seconds" in said, "the host's thread limits a step of so small a model"
    assert (
        cli.main(["plan", "--tables", str(file), "--target", "900G/s", *machines, "--ranks", "1,2", "--effort=0.03"])
        == 0
    )
    assert "None of these reaches 900,000,000,000 samples/s. The fastest is 2 ranks of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--price", "1,2"), "--price: got 2 prices for 1 machines, needed one for each, or one."),
        (("--price", "0"), "needed numbers above 0"),
        (("--ranks", "\u0662"), "needed numbers with commas"),
        (("--ratios", "1.0000001"), "--ratios 1.0000001: needed shares"),
        (("--target", "fast"), "got 'fast'; needed samples a second, for instance 5M/s"),
        (("--target", "0"), "needed samples a second"),
        (("--topology", "h200x8,h200x8"), "needed names of machines with commas between them, each once"),
        (
            ("--simulate", "--batches", "2"),
            "--simulate takes one --topology, and neither --price nor --target: it compares no machines or batches.",
        ),
        (("--batches", "8..2"), "needed FEWEST..MOST"),
        (("--simulate", "--price", "2"), "--simulate takes one --topology, and neither --price nor --target"),
    ],
)
def test_options_of_machines_that_make_no_sense_are_refused(file, capsys, options, said):
    with contextlib.suppress(SystemExit):
        assert plan(file, *options) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_frequencies_are_those_of_the_numbers(file):
    config, data, model = read_tables(file, ["tables.item.zipf=1.2", "train.batch_size=64"], trust_code=False)
    assert config.train.batch_size == 64
    assert data.tables["context_2"].num_lookups == 4 * data.num_samples == 4_000_000
    assumed = assumed_statistics([AssumedTable("item", 40_000_000, 1.2)], 1_000_000)
    assert data.tables["item"].histogram.counts.tolist() == assumed.tables["item"].histogram.counts.tolist()
    assert model.dense_parameter_bytes == 4 * (14 * 32 + 33 * 16 + 27 * 16 + 17), "13 dense features, 5 features' pairs"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("samples = 5", "got 0 tables"),
        ("[tables.a]\ndim = 8", "tables.a.rows is missing"),
        ("[tables.a]\nrows = 0", "table 'a': got 0 rows"),
        ("[tables.a]\nrows = 9\nzipf = 9.0", "exponent of 9.0"),
        ("[tables.a]\nrows = 9\ndim = 6", "dim = 6"),
        ("[tables.a]\nrows = 9\ncount = 0", "count = 0"),
        ("[tables.a]\nrow = 9", "unknown key"),
        ("[tables.a]\nrows = 9\ncount = 2\n[tables.a_1]\nrows = 9", "two come to the same name"),
        ('[tables.a]\nrows = 9\n[model]\nbuild = "mine:make"', "needed dlrm"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, said):
    (tmp_path / "wrong.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_tables(tmp_path / "wrong.toml", [], trust_code=False)


def test_data_beside_numbers_are_refused(file, capsys):
    assert plan(file, "--profile", "p.npz") == 2
    assert "takes no --profile" in capsys.readouterr().err


@pytest.mark.matrix
def test_more_effort_finds_no_slower_plan(file, tmp_path):
    made = []
    for effort in ("0.02", "0.3"):
        assert plan(file, "--ranks", "2", "--effort", effort, "-o", str(tmp_path / effort)) == 0
        made.append(Plan.load(tmp_path / effort).bound)
    assert made[0] is not None
    assert made[1] is not None
    assert made[1].step_seconds <= made[0].step_seconds
    assert made[1].least_seconds <= made[0].step_seconds


@pytest.mark.parametrize("effort", ["0", "nan", "many", "1e9"])
def test_an_effort_that_is_none_is_refused(effort, file, capsys):
    with pytest.raises(SystemExit):
        plan(file, "--effort", effort)
    assert "needed a number above 0, at most 1000" in capsys.readouterr().err


RUN = """
[data]
kind = "parquet"
path = "nowhere"
[data.parquet]
sparse = ["user", "item", "past", "time", "past_time"]
num_rows = [5_000_000, 900, 900, 4_294_967_296, 4_294_967_296]
id_mapping = "none"
[model]
arch = "hstu"
embedding_dim = 64
dense_arch_layer_sizes = [64]
target = ["item"]
history = ["past"]
hstu = { times = ["time", "past_time"] }
[embedding_optimizer]
kind = "rowwise_adagrad"
"""


def plan_of_run(folder: Path, tables: str, *more: str) -> int:
    (folder / "run.toml").write_text(RUN)
    (folder / "lookups.toml").write_text(tables)
    return plan(folder / "lookups.toml", "--config", str(folder / "run.toml"), *more)


def test_a_runs_settings_have_the_rows_and_the_hstu(tmp_path, capsys):
    """So models whose dense part is not known without them are planned, too, and no data are read."""
    lookups = "samples = 1_000_000\n[tables.t_item]\nlookups = 90\n[tables.t_user]\nzipf = 0.6\n"
    options = ("--ranks", "2", "--types", "row_wise", "-o", str(tmp_path / "plan.json"))
    assert plan_of_run(tmp_path, lookups, *options) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Note: No data were read" in said
    assert "Note: Histories are of 89 events on average and 89 at most" in said
    made = Plan.load(tmp_path / "plan.json")
    assert {table.table: (table.rows, table.dim) for table in made.tables} == {
        "t_item": (900, 64),
        "t_user": (5_000_000, 64),
    }
    assert made.made_from["config"] == str(tmp_path / "run.toml")
    assert sum(rank.device_bytes["device_tables"] for rank in made.prediction.ranks) == 5_000_900 * (4 * 64 + 4)


@pytest.mark.parametrize(
    ("lookups", "said"),
    [
        ("[tables.t_item]", "table 't_user' is not in the file; needed those of its settings: t_item, t_user"),
        ("[tables]\nt_item = {}\nt_user = {}\nt_time = {}", "table 't_time' is none of the run"),
        ("[tables]\nt_item = { rows = 901 }\nt_user = {}", "tables.t_item has rows or dim other than the run's"),
        ("samples = 3", "got 0 tables"),
    ],
)
def test_other_tables_than_the_runs_are_refused(tmp_path, capsys, lookups, said):
    assert plan_of_run(tmp_path, lookups) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_rows_are_needed_without_a_runs_settings(tmp_path, capsys):
    (tmp_path / "lookups.toml").write_text("[tables.a]\nzipf = 0.5\n")
    assert plan(tmp_path / "lookups.toml") == 2
    assert "tables.a.rows is missing" in capsys.readouterr().err


PRICED = ("--topology", "h200x8,a10x4", "--price", "3.5,1.25", "--effort", "0.03")


@pytest.mark.extra
@pytest.mark.smoke
def test_what_if_compares_batches_and_names_the_settings_of_a_target(file, tmp_path, capsys):
    """The line that it prints makes the plan of the chosen case, whatever batch the settings have."""
    again = ("plan", "--tables", str(file), "--set", "train.accumulate=4", *PRICED)
    search = ("--target", "150k/s", "--batches", "2..2048", "--global-batches", "4096", "--most-batch", "4096")
    assert cli.main([*again, *search, "--png", str(tmp_path / "batches.png")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Of [\d,]+ cases \d+ were planned\. Not planned: ", said)
    for reason in (
        " with more than 4,096 samples a step (--most-batch)",
        " with fewer samples a rank than micro-batches (train.accumulate = 4)",
        " whose ranks cannot share 4,096 samples evenly",
        " no cheaper than one that reaches it, nor faster or surer",
    ):
        assert reason in said
    assert "scaling: weak, where a rank has as many samples on any number of ranks; strong, where" in said
    ranks, machine, batch = re.search(
        r"150,000 samples/s take (\d+) ranks? of (\w+), ([\d,]+ samples \w+) ", said
    ).groups()
    settings, line = re.search(
        r"Train it with (--set \S+(?: --set \S+)?)\. Its plan, .*?:  ?.*?(plan --tables .*? -o plan\.json)", said
    ).groups()
    words = shlex.split(line)
    assert cli.main([*words[:-1], str(tmp_path / "plan.json"), "--effort", "0.03", "--set", "train.accumulate=4"]) == 0
    made = Plan.load(tmp_path / "plan.json")
    samples = int(batch.split()[0].replace(",", ""))
    assert (made.world_size, made.made_from["topology"]) == (int(ranks), machine)
    assert samples == made.batch_size * (made.world_size if "together" in batch else 1)
    assert f"={samples}" in settings
    assert made.batch_size * made.world_size <= 4096
    assert made.prediction.samples_per_second >= 150_000
    assert (tmp_path / "batches.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.extra
def test_what_if_finds_the_fastest_that_money_pays(file, capsys):
    """With prices, of all batches and machines; the same with every case planned."""
    command = ["plan", "--tables", str(file), *PRICED, "--ranks", "1,2", "--batches", "512,4096"]
    assert cli.main(command) == 0
    everything = re.findall(
        r"Planned \d+ of 8: (\d) ranks? of (\w+), (\S+) samples each: .* ms a step, ([\d,]+) samp",
        capsys.readouterr().out,
    )
    assert len(everything) == 8
    price = {"h200x8": 3.5, "a10x4": 1.25}
    paid = [each for each in everything if int(each[0]) * price[each[1]] <= 4]
    best = max(paid, key=lambda each: int(each[3].replace(",", "")))
    assert cli.main([*command, "--target", "4/h"]) == 0
    out = capsys.readouterr().out
    said = " ".join(out.split())
    named = (
        f"{best[0]} ranks of {best[1]}, {best[2]} samples each"
        if best[0] != "1"
        else f"1 rank of {best[1]}, {best[2]} samples each"
    )
    assert f"The fastest for at most 4.00 an hour: {named} (" in said
    assert " above that price" in said
    assert out.count("Planned ") < len(paid)
    with pytest.raises(ConfigError, match="--target 1/h: no number of ranks costs so little"):
        plan_command.main([*command[1:], "--target", "1/h"])


@pytest.mark.extra
def test_what_if_without_a_target_plans_all_batches_and_refuses_those_that_ranks_cannot_share(file, capsys):
    command = ["plan", "--tables", str(file), "--effort", "0.03", "--topology", "h200x8", "--global-batches", "4096"]
    assert cli.main([*command, "--ranks", "1,2,3"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Of 3 cases 2 were planned. Not planned: 1 whose ranks cannot share 4,096 samples evenly." in said
    assert "strong │ 2 │ 2,048 │ 4,096 │" in said
    for more, expected in (
        (("--ranks", "3"), "of 1 cases none is left to plan: 1 whose ranks cannot share 4,096 samples evenly"),
        (("--ranks", "2", "--global-batches", f"{2**31}"), f"got {2**31}, needed at most {2**30}"),
        (("--ranks", "2", "--target", "7/h"), "--target 7/h needs --price"),
        (("--ranks", "2", "-o", "plan.json"), "and its batch as --set train.batch_size=N"),
    ):
        assert cli.main([*command, *more]) == 2
        assert expected in " ".join(capsys.readouterr().err.split())
