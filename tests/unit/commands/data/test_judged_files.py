"""Files as people write them: `inspect` finds how, writes that into the settings, and training reads what they mean."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embershard.commands import cli
from embershard.commands.train.command import rank_job
from embershard.data import open_source
from embershard.data.block import Block
from embershard.data.sources.kinds import serving_inputs
from embershard.errors import ConfigError
from embershard.extras.serving.serving_model import Model
from embershard.settings.files import load_config
from embershard.training.config import RunConfig

pytestmark = pytest.mark.extra

ROWS = 240
NUMBERS = range(ROWS)
TIMES = np.datetime64("2024-01-01T00:30:00") + np.array([n * 7919 % 90_000 for n in NUMBERS]) * np.timedelta64(97, "s")
ISO = [str(each).replace("T", " ") for each in TIMES]
DAYS = [each[:10] for each in ISO]
EPOCHS = TIMES.astype(np.int64).tolist()
MONTHS = ["Jan", "Feb", "Mar", "Apr"]
CASES = {
    "german dates": ([f"{each[8:]}.{each[5:7]}.{each[:4]}" for each in DAYS], DAYS),
    "american times": ([f"{int(each[5:7])}/{int(each[8:10])}/{each[:4]} {each[11:16]}" for each in ISO],
                       [f"{each[:16]}:00" for each in ISO]),
    "american times with two digits of years": (
        [f"{t.month}/{t.day}/{t:%y} {t.hour % 12 or 12}:{t:%M} {t:%p}" for t in TIMES.tolist()],
        [f"{each[:16]}:00" for each in ISO],
    ),
    "dates without zeros": ([f"{t.year}-{t.month}-{t.day}" for t in TIMES.tolist()], DAYS),
    "chinese dates": ([f"{t.year}年{t.month}月{t.day}日" for t in TIMES.tolist()], DAYS),
    "chinese times": ([f"{t.year}年{t.month}月{t.day}日 {t:%H:%M}" for t in TIMES.tolist()],
                      [f"{each[:16]}:00" for each in ISO]),
    "blanks before numbers": ([f"{n * 7 % 90:6}.5 " if n % 50 else "  " for n in NUMBERS],
                              [f"{n * 7 % 90}.5" if n % 50 else "" for n in NUMBERS]),
    "blanks before ids": ([f"{n * 7919 % 13 + 9_000_000:9}" for n in NUMBERS],
                          [f"{n * 7919 % 13 + 9_000_000}" for n in NUMBERS]),
    "twitter's times": ([f"Mon {MONTHS[int(each[5:7]) - 1]} {each[8:19]} +0000 {each[:4]}" for each in ISO], ISO),
    "days in digits": ([each.replace("-", "") for each in DAYS], DAYS),
    "milliseconds": ([f"{each}007" for each in EPOCHS], ISO),
    "seconds": (list(map(str, EPOCHS)), ISO),
    "decimal commas": ([f"{n * 7 % 90},{n % 100:02}" for n in NUMBERS],
                       [f"{n * 7 % 90}.{n % 100:02}" for n in NUMBERS]),
    "money": ([f"$1,{n:03}.5" for n in NUMBERS], [f"1{n:03}.5" for n in NUMBERS]),
    "json lists": ([json.dumps([n % 7, n % 5])[: -1 if n % 9 else None] + "]" * (n % 9 > 0) for n in NUMBERS],
                   [f"{n % 7}|{n % 5}" for n in NUMBERS]),
    "lists of texts": ([str([f"t, {n % 7}", f"u{n % 5}"]) for n in NUMBERS],
                       [f"t, {n % 7}|u{n % 5}" for n in NUMBERS]),
    "lists with blanks": ([[f"g{n % 7} / g{n % 5}", f"g{n % 5} /g{n % 7}/ g{n % 3} ", "g1"][n % 3] for n in NUMBERS],
                          [[f"g{n % 7}|g{n % 5}", f"g{n % 5}|g{n % 7}|g{n % 3}", "g1"][n % 3] for n in NUMBERS]),
    "texts with blanks": ([f"g{n % 7}{' ' * (n % 3)}" for n in NUMBERS], [f"g{n % 7}" for n in NUMBERS]),
    "carets": ([f"{n % 7}^{n % 5}" for n in NUMBERS], [f"{n % 7}|{n % 5}" for n in NUMBERS]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, columns: dict[str, list[str]], separator: str = ";", encoding: str = "utf-8") -> None:
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    Path(name).write_text("".join(separator.join(row) + "\n" for row in rows), encoding=encoding)


def inspected(name: str, *words: str) -> RunConfig:
    """Return the settings that inspect writes of a file."""
    assert cli.main(["data", "inspect", name, *words, "-o", f"{name}.toml"]) == 0
    return load_config(RunConfig, Path(f"{name}.toml"))


def samples(config: RunConfig) -> Block:
    parsed = open_source(config.data).parse(0)
    assert not parsed.bad
    return parsed.samples


def assert_same(first: Block, second: Block) -> None:
    assert first.dense.tolist() == second.dense.tolist()
    assert first.labels.tolist() == second.labels.tolist()
    for one, other in zip(first.values, second.values, strict=True):
        assert one.tolist() == other.tolist()
    assert np.asarray(first.lengths).tolist() == np.asarray(second.lengths).tolist()


def others() -> dict[str, list[str]]:
    return {"click": [str(n % 2) for n in NUMBERS], "user_id": [str(n % 20) for n in NUMBERS]}


@pytest.mark.parametrize("case", CASES)
def test_cells_mean_the_same_however_they_are_written(case):
    """In training, and in the program that serves."""
    odd, clean = CASES[case]
    write("odd.csv", {**others(), "when": odd})
    write("clean.csv", {**others(), "when": clean})
    config = inspected("odd.csv")
    block = samples(config)
    assert_same(block, samples(inspected("clean.csv")))
    model = Model([], np.array, json.loads(json.dumps(serving_inputs(config.data))))  # type: ignore[arg-type]
    rows = [{"user_id": user, "when": cell} for user, cell in zip(others()["user_id"], odd, strict=True)]
    dense, ids, _ = model.encode(rows)
    assert dense.numpy().tolist() == block.dense.tolist()
    assert [each.tolist() for each in ids] == [each.tolist() for each in block.values]


def test_labels_may_be_words():
    for label, words in (("clicked", []), ("mood", ["--label", "mood=good"])):
        texts = ("no", "yes") if label == "clicked" else ("bad", "good")
        write(f"{label}.csv", {label: [texts[n % 2] for n in NUMBERS], "user": [f"u{n % 9}" for n in NUMBERS]})
        config = inspected(f"{label}.csv", *words)
        assert config.data.table.label_is == texts[1]
        assert samples(config).labels.tolist() == [float(n % 2) for n in NUMBERS]


def test_texts_that_may_be_the_label_are_named(capsys):
    write("a.csv", {"fate": [("kept", "thrown")[n % 2] for n in NUMBERS], "user": [f"u{n % 9}" for n in NUMBERS]})
    assert cli.main(["data", "inspect", "a.csv", "-o", "a.toml"]) == 2
    assert "Or the text that is 1: --label fate=kept or --label fate=thrown." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Bestell-Nr", "order_no", "nr"])
def test_what_numbers_the_rows_is_left_out_whatever_its_name(name):
    rows = range(1200)
    write("a.csv", {"click": [str(n % 2) for n in rows], "city": [f"c{n % 7}" for n in rows], name: [*map(str, rows)]})
    for words, is_there in (([], False), (["--category", name], True)):
        features = inspected("a.csv", *words).data.table.features
        assert (name in {each.column or own for own, each in features.items()}) == is_there
        Path("a.csv.toml").unlink()


def test_a_byte_order_mark_says_more_than_the_settings():
    """A run on latin-1 reads new rows that a spreadsheet wrote."""
    cells = {"click": others()["click"], "stadt": [("Zürich", "Genève")[n % 2] for n in NUMBERS]}
    write("old.csv", cells, encoding="latin-1")
    config = inspected("old.csv", "--encoding", "latin-1")
    expected = samples(config)
    write("old.csv", cells, encoding="utf-8-sig")
    assert_same(samples(config), expected)


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "gbk"])
def test_the_encoding_is_in_the_settings(encoding):
    names = ["上海", "北京"] if encoding == "gbk" else ["Zürich", "Genève"]
    cells = {"click": others()["click"], "stadt": [names[n % 2] for n in NUMBERS]}
    cells["größe" if encoding != "gbk" else "城市"] = [f"s{n % 5}" for n in NUMBERS]
    write("odd.csv", cells, encoding=encoding)
    write("clean.csv", cells)
    config = inspected("odd.csv", "--encoding", encoding)
    assert config.data.table.encoding == encoding
    assert_same(samples(config), samples(inspected("clean.csv")))
    assert cli.main(["train", "odd.csv.toml", "--dry-run"]) == 0


def test_options_win_over_rules():
    """By names, names without RecBole's types, several at once, and patterns; a name wins over a pattern."""
    draw = np.random.default_rng(0)
    cells = {
        **others(),
        **{f"C{n}": [f"{x:.2f}" for x in draw.random(ROWS)] for n in range(3)},
        "age": [str(20 + n % 50) for n in NUMBERS],
        "x:token": [str(n % 3) for n in NUMBERS],
        "cast": [f"a{n % 7} & b{n % 3}" for n in NUMBERS],
        "when": [f"{each[8:]}/{each[5:7]}/{each[:4]}" for each in DAYS],
    }
    write("a.csv", cells)
    words = ["--category", "C*,age", "--number", "C1,x", "--drop", "user_id", "--list", "cast: & ", "--time"]
    table = inspected("a.csv", *words, "when:%d/%m/%Y").data.table
    kinds = {name: feature.kind for name, feature in table.features.items()}
    assert kinds == {
        "C0": "sparse",
        "C1": "dense",
        "C2": "sparse",
        "age": "sparse",
        "x": "dense",
        "cast": "sparse",
        "when_days": "dense",
        "when_weekday": "sparse",
    }
    assert table.features["cast"].separator == " & "
    assert table.format == {"when": "%d/%m/%Y"}
    samples(load_config(RunConfig, Path("a.csv.toml")))
    assert "# C1: double in text; " in (written := Path("a.csv.toml").read_text())
    assert "number, sure: --number" in written


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--category", "uzer_id"], "--category: no column 'uzer_id'; did you mean 'user_id'?"),
        (["--drop", "z*"], "--drop: no column 'z*'; there are click, user_id, city, when"),
        (["--category", "city", "--drop", "city"], "'city' is named by --category, too; name it once"),
        (["--label", "click", "--drop", "click"], "--label click: it is named by --drop, too"),
        (["--number", "city"], "--number city: got 'c0', 'c1', 'c2'; needed numbers. Or leave it out: --drop city"),
        (["--time", "city"], "--time city: got 'c0', 'c1', 'c2'; needed how they are written: --time city:%d.%m.%Y"),
        (["--time", "city:%Q"], 'got \'%Q\' for how its times are written; needed "s", "ms", "us", "ns", or fields'),
        (["--list", "user_id"], "--list user_id: got '0', '1', '2'; needed the separator, too"),
        (["--label", "city>=x"], "--label city>=x: needed a number behind >="),
        (["--label", "city=c9"], "--label city=c9: no cell has this text; there are 'c0', 'c1'"),
        (["--label", "city"], "--label: 'city' is no column of numbers, but has 'c0' and 'c1'."),
        (
            ["--drop", "city,when", "--number", "user_id"],
            "no column is a category, and a model needs one: text, or ids. Likeliest: --category user_id",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(words, said, capsys):
    write("a.csv", {**others(), "city": [f"c{n % 4}" for n in NUMBERS], "when": ISO})
    assert cli.main(["data", "inspect", "a.csv", *words, "-o", "a.toml"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("a.toml").exists()


def test_near_misses_are_told_with_their_remedy(capsys):
    times = [each if n % 10 < 7 else f"{each[8:10]}.{each[5:7]}.{each[:4]}" for n, each in enumerate(ISO)]
    prices = [f"{n / 4}" if n % 8 else "free" for n in NUMBERS]
    write("a.csv", {**others(), "timestamp": times, "price": prices})
    inspected("a.csv")
    said = " ".join(capsys.readouterr().out.split())
    assert "timestamp: 70 % are times; others: '" in said
    assert ": --time timestamp:%d.%m.%Y" in said
    assert "price: 87 % are numbers; others: 'free'. To take them as missing: --number price" in said
    Path("a.csv.toml").unlink()
    config = inspected("a.csv", "--time", "timestamp:%d.%m.%Y", "--number", "price")
    assert config.data.table.null_values == ("", "free")
    block = samples(config)
    place = list(config.data.table.of_kind("sparse")).index("timestamp_weekday")
    weekdays = (TIMES.astype("datetime64[D]").astype(int) + 3) % 7 + 1
    assert block.values[place].tolist() == weekdays.tolist()


def test_dates_that_may_be_two_are_a_guess(capsys):
    write("a.csv", {**others(), "when": [f"{n % 12 + 1:02}/{n % 11 + 1:02}/2024" for n in NUMBERS]})
    assert inspected("a.csv").data.table.format == {"when": "%m/%d/%Y"}
    said = " ".join(capsys.readouterr().out.split())
    assert "when: time (a guess): times, if not as %d/%m/%Y. Else: --time when:%d/%m/%Y" in said
    Path("a.csv.toml").unlink()
    assert inspected("a.csv", "--time", "when:%d/%m/%Y").data.table.format == {"when": "%d/%m/%Y"}


def test_a_header_that_says_float_is_believed():
    cells = [f"{n * 7 % 300}.5" if n % 40 else "—" for n in NUMBERS]
    write(
        "a.inter", {"user_id:token": others()["user_id"], "price:float": cells, "label:float": others()["click"]}, "\t"
    )
    config = inspected("a.inter")
    assert config.data.table.features["price"].kind == "dense"
    assert config.data.table.null_values == ("", "—")
    assert samples(config).dense[0].tolist() == [0.0]


def test_a_few_cells_with_a_separator_make_no_list():
    notes = ["[deleted]" if n % 10 == 0 else "fine ^_^" if n == 7 else f"note, {n % 9}" for n in NUMBERS]
    write("a.csv", {**others(), "note": notes})
    assert inspected("a.csv").data.table.features["note"].separator is None


def test_columns_without_a_name_have_one():
    """pandas' index is no feature, and no more is what a separator at the end of lines makes."""
    write("index.csv", {"": list(map(str, NUMBERS)), **others()}, ",")
    write("trailing.csv", {**others(), "": [""] * ROWS}, ",")
    for name in ("index.csv", "trailing.csv"):
        config = inspected(name)
        assert list(config.data.table.features) == ["user_id"]
        samples(config)
    assert "# Unnamed: 0: " in Path("index.csv.toml").read_text()


def test_line_breaks_in_cells_are_read():
    cities = [f"by the sea {n % 3}" for n in NUMBERS]
    write("plain.csv", {**others(), "city": cities}, ",")
    write("a.csv", {**others(), "city": [f'"{city}"'.replace("the ", "the\n") for city in cities]}, ",")
    config = inspected("a.csv")
    assert config.data.table.line_breaks
    assert samples(config).num_samples == samples(inspected("plain.csv")).num_samples == ROWS
    rows = samples(config).values[list(config.data.table.of_kind("sparse")).index("city")]
    assert len(set(rows.tolist())) == 3


def test_a_parquet_column_of_nulls_is_missing():
    full = {"click": [n % 2 for n in NUMBERS], "user_id": [n % 20 for n in NUMBERS], "price": [n / 3 for n in NUMBERS]}
    full |= {
        "city": [f"c{n % 5}" for n in NUMBERS],
        "when": TIMES.astype("datetime64[us]"),
        "tags": [["a", "b"]] * ROWS,
    }
    pq.write_table(pa.table(full), "full.parquet")
    config = inspected("full.parquet")
    before = samples(config)
    for name in ("user_id", "price", "city", "when", "tags"):
        pq.write_table(pa.table({**full, name: pa.nulls(ROWS)}), "new.parquet")
        new = samples(load_config(RunConfig, Path("full.parquet.toml"), ["data.path=new.parquet"]))
        assert new.labels.tolist() == before.labels.tolist()
        places = [
            at for at, (key, each) in enumerate(config.data.table.of_kind("sparse").items()) if each.column == name
        ]
        assert all(not new.values[place].any() for place in places)
        assert name != "price" or not new.dense.any()


def test_a_column_may_be_called_constant(one_rank_here):
    cells = {**others(), "constant": [f"k{n % 3}" for n in NUMBERS]}
    write("a.csv", cells)
    assert cli.main(["train", "a.csv", "--run-dir", "run", "--set", "train.max_steps=2"]) == 0
    write("b.csv", {"constant": others()["click"], "user_id": others()["user_id"]})
    assert inspected("b.csv", "--label", "constant").data.table.label == "constant"


@pytest.mark.parametrize("case", ["german dates", "decimal commas", "json lists"])
def test_train_looks_at_data_by_itself(case, one_rank_here, capsys):
    """It says what it assumed, keeps it in the run's folder, and resumes from there."""
    write("shop.csv", {**others(), "when": CASES[case][0]})
    words = ["train", "shop.csv", "--run-dir", "run", "--set", "checkpoint.every_steps=2"]
    assert cli.main([*words, "--set", "train.max_steps=2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "shop.csv: 240 rows" in said
    assert "Assumed, and kept in run/inspected.toml. Options change it: embershard data inspect --help" in said
    assert cli.main([*words, "--set", "train.max_steps=4", "--resume", "--dry-run"]) == 0
    assert "Assumed" not in capsys.readouterr().out


def test_a_program_that_reads_json_gets_nothing_else(one_rank_here, capsys):
    write("shop.csv", others())
    words = ["train", "shop.csv", "--run-dir", "run", "--log-format", "json", "--set", "train.max_steps=2"]
    assert cli.main(words) == 0
    assert all(json.loads(line) for line in capsys.readouterr().out.splitlines())


def test_train_of_data_says_what_it_needs(capsys):
    write("shop.csv", {"user_id": others()["user_id"], "price": others()["click"], "size": others()["user_id"]})
    assert cli.main(["train", "shop.csv", "--dry-run"]) == 0
    write("shop.csv", {"user_id": others()["user_id"], "price": others()["user_id"]})
    assert cli.main(["train", "shop.csv", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "no column looks like a label" in said


def test_ranks_of_torchrun_do_not_look_at_data():
    write("shop.csv", others())
    with pytest.raises(ConfigError, match=r"embershard data inspect shop.csv -o run.toml; then give run.toml"):
        rank_job(["shop.csv"])


def test_what_is_known_with_the_label_alone_is_left_out(capsys):
    """Whatever its name: a flag, its complement, a count, a time. What is told by chance is not."""
    draw = np.random.default_rng(0)
    clicks, rare = draw.random(ROWS) < 0.3, draw.random(ROWS) < 0.02
    cells = {
        "click": [str(int(each)) for each in clicks],
        "user_id": others()["user_id"],
        "a": [str(int(each and draw.random() < 0.5)) for each in clicks],
        "b": [str(int(not (each and draw.random() < 0.5))) for each in clicks],
        "c": [str(int(each) * int(draw.integers(0, 9))) for each in clicks],
        "d": [iso if each else "" for iso, each in zip(ISO, clicks, strict=True)],
        "e": [str(int(each)) for each in draw.random(ROWS) < 0.4],
        "f": [str(int(each)) for each in clicks & rare],
    }
    write("a.csv", cells)
    config = inspected("a.csv")
    assert list(config.data.table.features) == ["user_id", "e", "f"]
    assert "a, b, c, d: left out, since columns of results are not known before the label" in capsys.readouterr().out
    Path("a.csv.toml").unlink()
    features = inspected("a.csv", "--feature", "d").data.table.features
    assert "d_hour" in features


@pytest.mark.parametrize("share", [1.0, 0.1, 0.004], ids=["all", "mixed", "few"])
@pytest.mark.parametrize("quote", ["", '"'], ids=["plain", "quoted"])
def test_digits_behind_a_zero_are_codes_and_stay_texts(share, quote):
    """However few of the codes begin with one; `convert` keeps them, and training takes them from both files alike."""
    codes = [f"{n % 61 * 37 + (0 if n < share * 1000 else 10_000):05}" for n in range(1000)]
    cells = {"click": [str(n % 2) for n in range(1000)], "plz": [f"{quote}{code}{quote}" for code in codes]}
    write("a.csv", cells, ",")
    config = inspected("a.csv")
    assert list(config.data.table.features) == ["plz"]
    assert config.data.table.features["plz"].mapping == "text"
    assert not config.data.table.decimal
    assert config.data.bad_rows == "stop"
    for words in ([], ["--bad-rows", "0.1"]):
        assert cli.main(["data", "convert", "a.csv", *words, "-o", "a.parquet"]) == 0
        assert pq.read_table("a.parquet").column("plz").to_pylist() == codes
        assert_same(samples(config), samples(inspected("a.parquet")))
        Path("a.parquet").unlink()
        Path("a.parquet.toml").unlink()


def test_a_stray_zero_in_front_makes_no_codes_of_numbers():
    """Prices, and years of age one of which was typed as `025`; nor what the user says are numbers."""
    ages = ["025", *(str(18 + n * 7 % 60) for n in range(1, 1000))]
    prices = [f"{n * 7919 % 1000 / 100:05.2f}" for n in range(1000)]
    clicks = [str(n % 2) for n in range(1000)]
    write("a.csv", {"click": clicks, "user": [f"u{n % 9}" for n in range(1000)], "age": ages, "price": prices})
    features = inspected("a.csv").data.table.features
    assert [features[name].kind for name in ("age", "price")] == ["dense", "dense"]
    write("b.csv", {"click": clicks, "user": [f"u{n % 9}" for n in range(1000)], "plz": [f"0{n}" for n in range(1000)]})
    config = inspected("b.csv", "--number", "plz")
    assert config.data.table.features["plz"].kind == "dense"
    assert samples(config).num_samples == len(clicks)


def test_columns_that_add_up_to_the_label_are_left_out(capsys):
    """Numbers of guests of a house: by day and by night; and what was paid for them, in whole cents."""
    draw = np.random.default_rng(0)
    day, night = draw.poisson(30, ROWS), draw.poisson(9, ROWS)
    kept, fee = draw.integers(1, 9000, (2, ROWS))
    columns = {
        "guests": day + night,
        "by_day": day,
        "by_night": night,
        "staff": draw.poisson(8, ROWS),
        "paid": [f"{each / 100:.2f}" for each in kept + fee],
        "returned": [f"{each / 100:.2f}" for each in fee],
        "kept": [f"{each / 100:.2f}" for each in kept],
        "house": draw.integers(0, 9, ROWS),
    }
    write("a.csv", {name: [str(each) for each in cells] for name, cells in columns.items()})
    assert "by_day" not in inspected("a.csv", "--label", "guests", "--category", "house").data.table.features
    said = " ".join(capsys.readouterr().out.split())
    assert "by_day, by_night: left out, since columns of results are not known before the label" in said
    assert "# by_day: int64 in text; " in (written := Path("a.csv.toml").read_text())
    assert "by_day + by_night is the label. Left out" in written
    Path("a.csv.toml").unlink()
    features = inspected("a.csv", "--label", "kept", "--category", "house").data.table.features
    assert set(features) == {"guests", "by_day", "by_night", "staff", "returned", "house"}
    Path("a.csv.toml").unlink()
    features = inspected("a.csv", "--label", "staff", "--category", "house").data.table.features
    assert set(features) == {"guests", "by_day", "by_night", "paid", "returned", "kept", "house"}
