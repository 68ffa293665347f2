"""From files on disk to scores by commands alone; and what `inspect`, `convert` and `--dry-run` say on the way."""

from __future__ import annotations

import json
import runpy
import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import date, time, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv

from embershard.commands import cli
from embershard.commands.train.command import rank_job
from embershard.data import DataConfig, open_source, write_samples
from embershard.data.hashing import mix64
from embershard.data.sample_bits import Flags
from embershard.data.sources.table.cells import Form, read_cells
from embershard.data.sources.table.counts import DistinctCount
from embershard.data.sources.table.decode import scaled
from embershard.data.sources.table.survey import survey
from embershard.errors import CheckpointError, DataError
from embershard.extras.judging.kinds import judge
from embershard.extras.judging.suggest import facts_of, suggest_features, suggest_label
from embershard.launch import rank
from embershard.settings.files import load_config
from embershard.training.checkpoint.identity import FEATURES, changes, identity_of, refusal
from embershard.training.checkpoint.saved_run import SavedRun
from embershard.training.config import RunConfig
from tests.unit.commands.conftest import score_here
from tests.unit.test_docs import blocks, commands

pytestmark = pytest.mark.slow  # whole training runs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_three_files_become_scores_by_the_commands_of_the_page(folder, one_rank_here, project_dir, capsys):
    """MovieLens-100k's layout. The commands are those of docs/own_data.md, which are four."""
    page = blocks((project_dir / "docs" / "own_data.md").read_text(), "bash")[0]
    make, *rest = [shlex.split(line) for line in commands(page)]
    assert make == ["python", "examples/ratings.py", "ratings"]
    assert len(rest) == 4
    runpy.run_path(str(project_dir / "examples" / "ratings.py"))["main"](folder / "ratings")
    for words in rest:
        assert cli.main(words[1:]) == 0, words
    assert "6,000 rows with 10 columns are in ratings.parquet" in capsys.readouterr().out
    found = pq.read_table("scores.parquet")
    assert len(found) == 600
    ratings = pq.read_table("ratings.parquet")["rating"].to_numpy()[-600:]
    assert found["label"].to_pylist() == ratings.tolist()
    error = np.sqrt(np.mean((found["score"].to_numpy() - ratings) ** 2))
    assert error < 0.97 * ratings.std(), "the model has learned from the joined columns"


def clicks(num_rows: int = 600) -> pa.Table:
    """Texts, lists, times, and in each column missing values."""
    draw = np.random.default_rng(0)
    cities = np.array(["Oslo", "Bern", "Rome, IT", "Łódź"])[draw.integers(0, 4, num_rows)]
    tags = [[f"t{n}" for n in draw.integers(0, 30, draw.integers(0, 4))] for _ in range(num_rows)]
    missing = draw.random((5, num_rows)) < 0.1
    seen = [draw.integers(0, 10**12, draw.integers(1, 4)).tolist() for _ in range(num_rows)]
    return pa.table(
        {
            "click": pa.array(draw.integers(0, 2, num_rows), pa.int8()),
            "city": pa.array(cities, mask=missing[0]).dictionary_encode(),
            "tags": pa.array([None if gone else each for gone, each in zip(missing[1], tags, strict=True)]),
            "seen": pa.array([None if gone else each for gone, each in zip(missing[2], seen, strict=True)]),
            "price": pa.array(draw.gamma(0.3, 100, num_rows), mask=missing[3]),
            "at": pa.array(draw.integers(0, 2**30, num_rows), pa.timestamp("s"), mask=missing[4]),
            "is.new": pa.array(draw.random(num_rows) < 0.5),
            "always": pa.array(["x"] * num_rows),
            "request": pa.array([f"r{n}" for n in range(num_rows)]),
        }
    )


@pytest.mark.extra
def test_a_parquet_file_of_texts_lists_and_nulls_becomes_scores(folder, one_rank_here):
    pq.write_table(clicks(), "clicks.parquet", row_group_size=128, write_page_checksum=True)
    assert cli.main(["data", "inspect", "clicks.parquet", "--feature", "is.new", "-o", "run.toml"]) == 0
    config = load_config(RunConfig, Path("run.toml"))
    features = config.data.table.features
    assert list(features) == ["city", "tags", "seen", "price", "at_hour", "at_weekday", "is_new"]
    assert (features["tags"].mapping, features["seen"].mapping, features["is_new"].column) == ("text", "hash", "is.new")
    assert features["price"].scale == "log1p"
    assert cli.main(["train", "--config", "run.toml", "--dry-run"]) == 0
    assert cli.main(["train", "--config", "run.toml", "--run-dir", "run"]) == 0
    assert cli.main(["predict", "run", "--data", "clicks.parquet", "-o", "scores.parquet"]) == 0
    assert len(pq.read_table("scores.parquet")) == 600
    assert cli.main(["export", "run", "-o", "exported"]) == 0
    from embershard.extras.serving import serving_model

    model = serving_model.load("exported")
    samples = pq.read_table("clicks.parquet", columns=model.columns).to_pylist()[:32]
    logits = model(*model.encode(samples)).detach().numpy()
    assert logits == pytest.approx(pq.read_table("scores.parquet")["logit"].to_numpy()[:32], abs=1e-5)


@pytest.mark.parametrize(("shift", "scale"), [(0.0, "log1p"), (-5.0, "quantile")])
def test_numbers_of_heavy_tails_are_centred(shift, scale, folder):
    """A mean of 4 where all is above 0 weighs more than what differs between samples."""
    draw = np.random.default_rng(1)
    prices = draw.lognormal(3, 2, 900) + shift
    cities = ["a", "b", "c"] * 300
    pq.write_table(pa.table({"click": draw.integers(0, 2, 900), "price": prices, "city": cities}), "a.parquet")
    assert cli.main(["data", "inspect", "a.parquet", "-o", "run.toml"]) == 0
    price = load_config(RunConfig, Path("run.toml")).data.table.features["price"]
    assert price.scale == scale
    found = scaled(prices, price)
    assert (found.mean(), found.std()) == pytest.approx((0.0, 1.0), abs=1e-4)


def test_scaling_is_compared_and_used_again(folder):
    """The statistics stand in the run's settings: a resume with others is refused, and so are other features."""
    pq.write_table(clicks(), "clicks.parquet", row_group_size=128, write_page_checksum=True)
    Path("run.toml").write_text(
        '[data]\nkind = "table"\npath = "clicks.parquet"\n[data.table]\nlabel = "click"\n[data.table.features]\n'
        'price = {kind = "dense", scale = "standardize", mean = 30.0, std = 50.0}\n'
        'city = {kind = "sparse", num_rows = 40}\n[train]\nbatch_size = 32\nmax_steps = 2\n'
    )
    given = ["--config", "run.toml", "--run-dir", "run"]
    rank.do(lambda: rank_job(given))
    assert load_config(RunConfig, Path("run/config.toml")).data.table.features["price"].mean == 30.0
    saved = SavedRun.read(Path("run/checkpoints/step_2")).identity
    same = load_config(RunConfig, Path("run.toml"), ["train.max_steps=4", "data.num_workers=1"])
    assert not changes(saved, identity_of(same, 1))
    other = load_config(RunConfig, Path("run.toml"), ["data.table.features.price.mean=31.0"])
    (found,) = changes(saved, identity_of(other, 1))
    assert (found.key, found.now) == (FEATURES, found.saved.replace("mean = 30.0", "mean = 31.0"))
    assert "Set back what should not change (the features), or allow it" in refusal([found])
    moved = dict(reversed(same.data.table.features.items()))
    moved_data = replace(same.data, table=replace(same.data.table, features=moved))
    assert [each.key for each in changes(saved, identity_of(replace(same, data=moved_data), 1))] == [FEATURES]
    with pytest.raises(CheckpointError, match=r"data.table.features = price = .*model cannot score such data"):
        score_here("run", "-o", "x.parquet", "--set", "data.table.features.price.std=51.0")


def test_joins_keep_rows_and_name_what_does_not_fit(folder, capsys):
    Path("clicks.csv").write_text("user,item,label\n2,a,1\n1,b,0\n,a,1\n9,a,0\n")
    Path("users.csv").write_text('user,zip,note\n1,02139,"x\ny"\n2,10001,z\n')
    assert cli.main(["data", "convert", "clicks.csv", "--join", "users.csv", "-o", "all.parquet"]) == 0
    assert "2 rows have no user in users.csv." in capsys.readouterr().out
    found = pq.read_table("all.parquet")
    assert found["user"].to_pylist() == [2, 1, None, 9]
    assert found["zip"].to_pylist() == ["10001", "02139", None, None], "a code keeps its zero"
    assert found["note"].to_pylist() == ["z", "x\ny", None, None]
    for text, said in (
        ("user,zip\n1,a\n1,b\n", "users.csv: user=1 is in 2 rows; needed each value once"),
        ("id,zip\n1,a\n", "needs one column in common with the rows, and has none: id, zip beside user, item, label"),
    ):
        Path("users.csv").write_text(text)
        assert cli.main(["data", "convert", "clicks.csv", "--join", "users.csv", "-o", "other.parquet"]) == 2
        assert said in capsys.readouterr().err
        assert not Path("other.parquet").exists()
    assert cli.main(["data", "convert", "clicks.csv", "-o", "all.parquet"]) == 2
    assert "all.parquet exists and is not overwritten" in capsys.readouterr().err


def test_suggestions_are_what_columns_hold(folder):
    """Each comment says the truth, and training takes every suggestion, from CSV and from Parquet."""
    days = [date(2024, 1, 1) + timedelta(days=n * 37 % 300) for n in range(40)]
    columns = {
        "label": [n % 2 for n in range(40)],
        "day": days,
        "born": [f"{day}T00:00:00" for day in days],
        "at": [f"{day}T09:{n:02}:00Z" for n, day in enumerate(days)],
        "signed": [1704067200 + 86400 * (n % 9) + n for n in range(40)],
        "signup_time": [1704067200 + 86400 * (n % 9) for n in range(40)],
        "digits": [int(f"{day:%Y%m%d}") for day in days],
        "flag": ["true" if n % 3 else "" for n in range(40)],
        "number": [f"{n / 4}" for n in range(40)],
        "long": [10**18 + n % 5 for n in range(40)],
        "brand": [n % 4 for n in range(40)],
        "same": [7] * 40,
        "none": [None] * 40,
    }
    table = pa.table(columns)
    with open("a.csv", "wb") as file:
        csv.write_csv(table, file)
    pq.write_table(table.append_column("clock", pa.array([time(9, n) for n in range(40)])), "a.parquet")
    said = (
        "; 40 distinct, 0 missing; time, sure: times; dates without a clock, 2024-01-01 to 2024-10-23, in UTC: the",
        'born_days = {kind = "dense", scale = "days", mean = 19874.',
        'born_weekday = {kind = "sparse", mapping = "weekday", column = "born"}\n#',
        "# at: timestamp[us, tz=UTC] in text; 40 distinct, 0 missing; time, sure: times; "
        "a time, 2024-01-01 to 2024-10-23, in UTC\n"
        'at_hour = {kind = "sparse", mapping = "hour", column = "at"}\nat_weekday =',
        'signed_hour = {kind = "sparse", mapping = "hour", column = "signed"}',
        "signup_time_days = ",
        "time, likely: dates as %Y%m%d; dates without a clock, 2024-01-01 to 2024-10-23",
        'format.digits = "%Y%m%d"',
        "# flag: bool in text; 1 distinct, 14 missing; ",
        "# number: double in text; 40 distinct",
        'long = {kind = "sparse", mapping = "hash"',
        'brand = {kind = "sparse", mapping = "modulo", num_rows = 5}',
        "left out: it has one value in all rows",
        "left out: it has no values",
    )
    for name in ("a.csv", "a.parquet"):
        assert cli.main(["data", "inspect", name, "-o", f"{name}.toml"]) == 0
        written = Path(f"{name}.toml").read_text()
        for part in said:
            assert part in written, part
        assert cli.main(["data", "validate", "--config", f"{name}.toml"]) == 0
        assert cli.main(["train", f"{name}.toml", "--dry-run"]) == 0
    assert "# clock: time64[us]; ? distinct, 0 missing; left out: no feature is made of time64[us]" in written


def test_long_integers_stay_exact(folder, capsys):
    """Of 19 and 20 digits, as ids and as keys; longer ones are texts. None is a float, which would merge them."""
    first = {"user": 10**18, "item": 2**63, "hash": 10**25, "price": 9007199254740993}
    rows = [[n % 2, *(least + n % 5 for least in first.values()), n / 2] for n in range(20)]
    text = "\n".join(",".join(map(str, row)) for row in [["label", *first, "x"], *rows])
    Path("a.csv").write_text(text.replace("9007199254740993,0.0", "0.5,0.0"))
    for name in ("user", "item", "hash"):
        Path(f"{name}.csv").write_text(f"{name},of_{name}\n" + "".join(f"{first[name] + n},{n}\n" for n in range(5)))
    joins = [word for name in ("user", "item", "hash") for word in ("--join", f"{name}.csv")]
    assert cli.main(["data", "convert", "a.csv", *joins, "-o", "a.parquet"]) == 0
    found = pq.read_table("a.parquet")
    assert [str(found[name].type) for name in (*first, "x")] == ["int64", "uint64", "string", "string", "double"]
    for name, least in first.items():
        if name != "price":
            assert [int(each) for each in found[name].to_pylist()] == [least + n % 5 for n in range(20)]
            assert found[f"of_{name}"].to_pylist() == [n % 5 for n in range(20)]
    for path in ("a.csv", "a.parquet"):
        assert cli.main(["data", "inspect", path, "-o", f"{path}.toml"]) == 0
    configs = [load_config(RunConfig, Path(f"{path}.toml")).data for path in ("a.csv", "a.parquet")]
    features = [config.table.features for config in configs]
    assert {name: features[0][name] for name in features[0]} == {name: features[1][name] for name in features[0]}
    assert (features[0]["user"].mapping, features[0]["item"].mapping) == ("hash", "hash")
    values = [open_source(replace(config, table=configs[0].table)).parse(0).samples.values for config in configs]
    assert [each.tolist() for each in values[0]] == [each.tolist() for each in values[1]]


def test_inspect_names_words_for_missing_values_and_bools(folder, capsys):
    Path("a.csv").write_text("label,x,user\nTrue,1.5,a\nFalse,NaN,b\nTrue,2.5,NA\n")
    assert cli.main(["data", "inspect", "a.csv", "-o", "run.toml"]) == 0
    written = Path("run.toml").read_text()
    assert 'label = "label"    # bool, 0 to 1' in written
    assert 'null_values = ["", "NaN"]' in written, "NA is a text among texts"
    assert "# x: double in text; 3 distinct, 0 missing; 1 say NaN; " in written
    assert load_config(RunConfig, Path("run.toml")).data.table.features["x"].scale == "standardize"
    assert cli.main(["train", "--config", "run.toml", "--dry-run"]) == 0
    assert cli.main(["data", "inspect", "a.csv", "--null", "NaN", "-o", "with.toml"]) == 0
    assert load_config(RunConfig, Path("with.toml")).data.table.features["x"].scale == "standardize"


@pytest.mark.parametrize(("num_free", "is_number"), [(6, True), (8, False)])
def test_few_bad_cells_leave_a_column_its_type(folder, capsys, num_free, is_number):
    """At most 1 % are bad rows, and the settings allow them; more make a text of the column."""
    rows = [
        [n % 2, f"{n % 100 / 8:.2f}", f"2024-01-{n % 28 + 1:02} 10:00:{n % 60:02}", n % 7, int(n % 3 == 0)]
        for n in range(1000)
    ]
    for n in range(num_free):
        rows[90 + n][1] = "free"
    for n in range(4):
        rows[960 + n][1], rows[980 + n][2] = '"12,50"', "yesterday"
    text = ["clicked,price,at,user,purchased", *(",".join(map(str, row)) for row in rows), "1,2"]
    Path("a.csv").write_text("\n".join(text))
    assert cli.main(["data", "inspect", "a.csv", "-o", "run.toml"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "at: 99.6 % are times; others: 'yesterday' (4)" in said
    assert ("price: 99 % are numbers; others: 'free' (6), '12,50' (4)" in said) == is_number
    assert "purchased: left out, since columns of results are not known before the label" in said
    table = load_config(RunConfig, Path("run.toml")).data.table
    assert list(table.features) == ["price", "at_hour", "at_weekday", "user"]
    assert (table.features["price"].kind == "dense") == is_number
    assert "\n# purchased = {kind = " in Path("run.toml").read_text()
    assert cli.main(["data", "validate", "--config", "run.toml"]) == 0, "all 9 are held out"
    assert cli.main(["data", "inspect", "a.csv", "--feature", "purchased", "-o", "with.toml"]) == 0
    assert "purchased" in load_config(RunConfig, Path("with.toml")).data.table.features


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"label,u\n", "a.csv: no row behind its header; needed at least one"),
        (b"label,u\r", "a.csv: no row behind its header; needed at least one"),
    ],
)
def test_files_without_lines_are_named(folder, capsys, data, said):
    Path("a.csv").write_bytes(data)
    for words in (["inspect", "a.csv"], ["convert", "a.csv", "-o", "a.parquet"]):
        assert cli.main(["data", *words]) == 2
        assert said in capsys.readouterr().err
    columns = [pa.array([1, 0]), pa.array([1, 2]), pa.array([3, 4])]
    pq.write_table(pa.table(columns, names=["label", "u", "u"]), "twice.parquet")
    for words in (["inspect", "twice.parquet"], ["convert", "twice.parquet", "-o", "a.parquet"]):
        assert cli.main(["data", *words]) == 2
        assert "twice.parquet: has the column 'u' twice" in capsys.readouterr().err


def test_converted_files_give_the_same_samples(folder):
    """Row groups as they were asked for, and every row once and in its place."""
    rows = "".join(f"{n % 2},u{n % 7},{n / 8}\n" for n in range(1000))
    Path("a.csv").write_text("label,user,price\n" + rows)
    assert cli.main(["data", "convert", "a.csv", "--rows", "300", "-o", "a.parquet"]) == 0
    assert cli.main(["data", "inspect", "a.csv", "-o", "run.toml"]) == 0
    written = load_config(RunConfig, Path("run.toml")).data
    for path in ("a.csv", "a.parquet"):
        source = open_source(DataConfig("table", path, eval_fraction=0.0, chunk_rows=300, table=written.table))
        assert source.num_physical == 4
        blocks = [source.parse(number).samples for number in range(4)]
        assert np.concatenate([block.labels for block in blocks]).tolist() == [n % 2 for n in range(1000)]
        users = np.concatenate([block.values[0] for block in blocks])
        assert len(np.unique(users)) == 7
        assert users.tolist() == (users[:7].tolist() * 143)[:1000]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            'user = {kind = "sparse", num_rows = 9}\nprise = {kind = "dense"}',
            "no column 'prise'; did you mean 'price'?",
        ),
        ('user = {kind = "dense"}\nlabel2 = {kind = "sparse", num_rows = 9, column = "user"}', "a.csv:2 user='u0'"),
        ('price = {kind = "dense"}', "`embershard data inspect FILE -o run.toml` writes them"),
        (
            'user = {kind = "sparse", num_rows = 9}\n'
            'seen = {kind = "sparse", num_rows = 8, column = "user", table = "user"}',
            "share the table 'user', and have num_rows 9 and 8",
        ),
    ],
)
def test_a_dry_run_checks_the_columns(folder, capsys, settings, said):
    Path("a.csv").write_text("label,user,price\n1,u0,2.5\n0,u1,\n")
    text = f'[data]\nkind = "table"\npath = "a.csv"\n[data.table.features]\n{settings}\n'
    Path("run.toml").write_text(text)
    assert cli.main(["train", "--config", "run.toml", "--dry-run"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("only_types", [False, True])
def test_what_a_text_is_is_found_once(monkeypatch, only_types):
    """Of columns with few texts, in many cells, only these few are read."""
    sizes: list[int] = []

    def counting(cells: pa.Array, forms: Sequence[Form]) -> tuple[pa.Array, Flags]:
        sizes.append(len(cells))
        return read_cells(cells, forms)

    monkeypatch.setattr("embershard.data.sources.table.survey.read_cells", counting)
    texts = {"n": ["7", " 8", "8", "NA", "9.5", "x"], "day": ["1.2.2026", "3.4.2026 ", "", "5.6.2026", "", ""]}
    table = pa.table({name: (each * 334)[:2000] for name, each in texts.items()})
    found = survey(table.schema, iter(table.to_batches()), only_types=only_types)
    assert 0 < max(sizes) <= 6
    assert found["n"].missing_words == {"NA": 333}
    assert found["n"].others["number"] == {"x": 333}
    assert found["day"].kind == "%d.%m.%Y"
    if not only_types:
        numbers = found["n"].summaries["number"]
        assert (numbers.count, numbers.least, numbers.largest) == (1334, 7.0, 9.5)
        assert found["n"].texts == {"7": 334, "8": 667, "NA": 333, "9.5": 333, "x": 333}
        assert (found["n"].blanks, found["day"].blanks, found["day"].missing) == (334, 334, 999)


def test_distinct_values_are_counted_and_do_not_share_rows():
    count = DistinctCount()
    for start in range(0, 50_000, 5000):
        count.add(mix64(np.arange(start, start + 6000, dtype=np.uint64)))
    assert abs(count.estimate / 51_000 - 1) < 0.05
    for start in range(20):  # of values that all differ, some would be taken for more than there are
        count = DistinctCount()
        count.add(mix64(np.arange(10_000 * start, 10_000 * start + 9000, dtype=np.uint64)))
        assert 0.9 * 9000 < count.estimate <= 9000
    columns = {"rating": pa.array([1, 5, 3, 4] * 30), "sex": pa.array(["M", "F", None, "M"] * 30)}
    table = pa.table({**columns, "user id": pa.array([10**12 * n for n in range(40)] * 3)})
    found = survey(table.schema, iter(table.to_batches()))
    label = suggest_label(found, None)
    assert (label.column, label.at_least, label.mean) == ("rating", 4.0, 3.25)
    sex, user = (
        suggest_features(found[name], judge([facts_of(found[name])])[0], taken)
        for name, taken in (("sex", []), ("user id", ["user_id"]))
    )
    assert "2 distinct, 30 missing; category, sure: text; no two share a row" in sex.why
    assert user.features["user_id_2"]["column"] == "user id"
    assert user.features["user_id_2"]["mapping"] == "hash"


def test_a_label_must_be_found_or_named(folder, capsys):
    Path("a.csv").write_text("kind,price\na,2.5\nb,3\n")
    assert cli.main(["data", "inspect", "a.csv", "-o", "run.toml"]) == 2
    assert "--label: no column looks like a label. Name the column to predict; columns of numbers: price." in (
        capsys.readouterr().err
    )
    assert cli.main(["data", "inspect", "a.csv", "--label", "price", "-o", "run.toml"]) == 0
    assert "\nlabel_at_least = 2.75" in Path("run.toml").read_text()
    assert load_config(RunConfig, Path("run.toml")).data.table.task == "binary", "two values"


def test_a_label_of_many_values_is_predicted_as_a_number(folder):
    """And the two other ways to train on it stand beside."""
    Path("a.csv").write_text("kind,stars\na,1\nb,3\nb,5\n")
    assert cli.main(["data", "inspect", "a.csv", "--label", "stars", "-o", "run.toml"]) == 0
    assert "multiclass" not in Path("run.toml").read_text(), "2 and 4 may be no classes"
    Path("a.csv").write_text("kind,stars\na,1\nb,3\nb,5\nc,2\na,4\n")
    Path("run.toml").unlink()
    assert cli.main(["data", "inspect", "a.csv", "--label", "stars", "-o", "run.toml"]) == 0
    assert load_config(RunConfig, Path("run.toml")).data.table.task == "regression"
    lines = Path("run.toml").read_text().splitlines()
    place = next(number for number, line in enumerate(lines) if line.startswith("task = "))
    assert lines[place + 1].startswith("# label_at_least = 4 ")
    of_clicks, of_classes = ([line.removeprefix("# ") for line in lines[start:end]]
                             for start, end in ((place + 1, place + 2), (place + 3, place + 5)))  # fmt: skip
    for name, own in (("clicks", of_clicks), ("classes", of_classes)):
        Path(f"{name}.toml").write_text("\n".join([*lines[: place - 1], *own, *lines[place + 5 :]]))
    assert load_config(RunConfig, Path("clicks.toml")).data.table.label_at_least == 4
    target = load_config(RunConfig, Path("classes.toml")).data.table.target
    assert target.labels == ("stars=1", "stars=2", "stars=3", "stars=4", "stars=5")


def test_samples_of_a_program_become_a_file(folder):
    rows = ({"click": n % 2, "tags": ["a"] * (n % 3), "at": None if n % 5 else n} for n in range(100))
    assert write_samples(rows, "a.parquet", group_rows=32) == 100
    found = pq.read_table("a.parquet")
    assert found["tags"].to_pylist() == [["a"] * (n % 3) for n in range(100)]
    assert pq.ParquetFile("a.parquet").metadata.num_row_groups == 4
    for wrong, said in (
        ([{"a": 1}, {"a": "x"}], "samples 1 to 1: "),
        ([{"a": 1}, {"b": 2}], "a sample has 'b', which the first 1 have not"),
        ([], "there is no sample to write"),
    ):
        with pytest.raises(DataError, match=said):
            write_samples(wrong, "b.parquet", group_rows=1)
        assert not Path("b.parquet").exists()


def test_convert_leaves_bad_rows_out_and_lists_them(folder, capsys):
    lines = [f'{n % 2},{n / 4},"u{n}\nv"' for n in range(1000)]
    lines[3], lines[500], lines[501] = "1,2", '0,free,"x"', "1"
    Path("a.csv").write_text("\n".join(["label,price,user", *lines]))
    assert cli.main(["data", "convert", "a.csv", "-o", "a.parquet"]) == 2
    assert (
        "a.csv:5 has 2 comma-separated columns; needed 3: label, price, user. To leave such lines out, and list them: "
        "--bad-rows" in capsys.readouterr().err
    )
    assert cli.main(["data", "convert", "a.csv", "--bad-rows", "0.001", "-o", "a.parquet"]) == 2
    assert "3 of 1,000 rows are bad, --bad-rows 0.001 allows 0.100%: a.csv:5 has 2 comma" in capsys.readouterr().err
    assert not Path("a.parquet").exists()
    assert cli.main(["data", "convert", "a.csv", "--bad-rows", "0.01", "-o", "a.parquet"]) == 0
    found = pq.read_table("a.parquet")
    assert found["price"].to_pylist() == [n / 4 for n in range(1000) if n not in (3, 500, 501)]
    listed = [json.loads(line) for line in Path("a.parquet.bad_rows.jsonl").read_text().splitlines()]
    assert sorted(each["row"] for each in listed) == [5, 502, 503]
    assert {
        "file": "a.csv",
        "row": 502,
        "column": "price",
        "problem": "price='free': needed double, or nothing",
    } in listed


def test_atomic_files_of_recbole_train_as_they_are(folder):
    """Types are in the header, sequences have spaces between; the folder has files of other columns, too."""
    Path("ml").mkdir()
    rows = [f"{n % 50}\ti{n % 70}\t{1 + n % 5}\t{881250949 + 997 * n}\t{('a', 'a b', '')[n % 3]}" for n in range(400)]
    header = "user_id:token\titem_id:token\trating:float\ttimestamp:float\ttags:token_seq"
    Path("ml/ml.inter").write_text("\n".join([header, *rows]))
    Path("ml/ml.user").write_text("user_id:token\tage:token\n" + "".join(f"{n}\t{20 + n}\n" for n in range(50)))
    Path("ml/ml.item").write_text(
        "item_id:token\tclass:token_seq\tvector:float_seq\n" + "".join(f"i{n}\tWar Drama\t0.5 {n}\n" for n in range(70))
    )
    assert cli.main(["data", "inspect", "ml", "-o", "run.toml"]) == 0
    assert cli.main(["train", "--config", "run.toml", "--dry-run"]) == 0
    data = load_config(RunConfig, Path("run.toml")).data
    names = ["user_id", "item_id", "timestamp_hour", "timestamp_weekday", "tags"]
    assert (data.table.label, list(data.table.features)) == ("rating:float", names)
    parsed = open_source(data).parse(0)
    assert not parsed.bad
    assert parsed.samples.num_samples == 400
    assert np.asarray(parsed.samples.lengths)[4].tolist() == [(1, 2, 1)[n % 3] for n in range(400)]
    joins = ["--join", "ml/ml.user", "--join", "ml/ml.item"]
    assert cli.main(["data", "convert", "ml", *joins, "-o", "all.parquet"]) == 0
    found = pq.read_table("all.parquet")
    assert found.column_names == ["user_id", "item_id", "rating", "timestamp", "tags", "age", "class", "vector"]
    assert (found["age"][3].as_py(), found["class"][0].as_py(), found["vector"][2].as_py()) == (
        "23",
        ["War", "Drama"],
        [0.5, 2.0],
    )
    assert cli.main(["data", "inspect", "all.parquet", "-o", "all.toml"]) == 0
    assert cli.main(["train", "--config", "all.toml", "--dry-run"]) == 0
