"""examples/movielens.py: histories without what is held out; and its sweep, whose models stand in one table."""

from __future__ import annotations

import io
import itertools
import runpy
import shlex
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from embershard.commands import cli
from embershard.reports.sweep_tables import spread_tables
from embershard.sweeps.spread import read_configurations
from tests.unit.test_docs import blocks, commands

NUM_RATINGS = 3000


@pytest.fixture
def ratings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pa.Table:
    """RecBole's three files of made-up ratings in the current folder, joined as the page does it."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    pairs = rng.permutation(60 * 80)[:NUM_RATINGS]
    users, items = pairs // 80 + 1, pairs % 80 + 1
    stars = 1 + (users + items + rng.integers(0, 3, NUM_RATINGS)) % 5
    times = 874_724_710 + rng.integers(0, 400, NUM_RATINGS)  # many of a user's in one second
    rows = np.stack([users, items, stars, times], axis=1).tolist()
    write("inter", "user_id:token\titem_id:token\trating:float\ttimestamp:float", rows)
    people = [(user, 20 + user % 50, "MF"[user % 2], "writer", "02139") for user in range(1, 61)]
    write("user", "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token", people)
    films = [(item, f"Film {item}", 1950 + item % 40, "Drama War") for item in range(1, 81)]
    write("item", "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq", films)
    convert, make, _ = page_commands()
    assert cli.main(convert[1:]) == 0
    example = Path(__file__).parents[4] / make[1]
    runpy.run_path(str(example))["main"](Path(make[2]), Path(make[3]))
    return pq.read_table(make[2])


def write(ending: str, header: str, rows: list) -> None:
    lines = ["\t".join(map(str, row)) for row in rows]
    Path(f"ml-100k.{ending}").write_text("\n".join([header, *lines, ""]))


def page_commands() -> list[list[str]]:
    """Those of docs/sweeps.md."""
    page = (Path(__file__).parents[4] / "docs" / "sweeps.md").read_text()
    (text,) = (text for text in blocks(page, "bash") if "movielens.py" in text)
    return [shlex.split(line) for line in commands(text)]


@pytest.mark.slow
def test_no_history_tells_how_a_held_out_rating_ends(ratings):
    parts = {name: pq.read_table(f"movielens/{name}.parquet").to_pylist() for name in ("train", "eval")}
    key = ("user_id", "item_id", "rating", "timestamp")
    assert Counter(tuple(row[name] for name in key) for rows in parts.values() for row in rows) == Counter(
        zip(*(ratings[name].to_pylist() for name in key), strict=True)
    )
    all_of, held_out_of = (Counter(row["user_id"] for row in rows) for rows in (ratings.to_pylist(), parts["eval"]))
    assert all(held_out_of[user] == round(0.1 * count) for user, count in all_of.items())
    longest = 0
    for row in itertools.chain(*parts.values()):
        assert row["liked"] == (row["rating"] >= 4)
        before = [
            other
            for other in parts["train"]
            if other["user_id"] == row["user_id"] and other["rating"] >= 4 and other["timestamp"] < row["timestamp"]
        ]
        assert set(row["past_items"]) <= {other["item_id"] for other in before}
        assert len(row["past_items"]) == min(50, len(before))
        times = {other["item_id"]: other["timestamp"] for other in before}
        order = [times[item] for item in row["past_items"]]
        assert order == sorted(order)
        assert sorted(times.values())[-len(order) :] == order or not order, "the latest ones"
        longest = max(longest, len(order))
    assert longest > 10


@pytest.mark.slow
def test_the_settings_of_the_pages_sweep(ratings, project_dir, capsys):
    _, _, (*words, file) = page_commands()
    assert cli.main([*words[1:], str(project_dir / file), "--dry-run"]) == 0
    assert capsys.readouterr().out.count("embershard train") == 25


@pytest.mark.slow
@pytest.mark.matrix
def test_the_sweep_of_the_page(ratings, project_dir, capsys):
    """DIN and MMoE are trained, for a few steps."""
    _, _, (*words, file) = page_commands()
    folder = project_dir / "examples"
    head, *runs = (project_dir / file).read_text().split("[[runs]]")
    assert "seed = [1, 2, 3, 4, 5]" in head
    head = head.replace('"movielens.toml"', f'"{folder / "movielens.toml"}"').replace("[1, 2, 3, 4, 5]", "[1, 2]")
    head = head.replace("[set]", "[set]\ntrain.max_steps = 8")
    Path("two.toml").write_text("[[runs]]".join([head, *runs[-2:]]))
    assert cli.main([*words[1:], "two.toml"]) == 0
    rows = pq.read_table("sweeps/two/configurations.parquet").to_pylist()
    assert sorted(row["model.arch"] for row in rows) == ["din", "mmoe"]
    for row in rows:
        assert {row[f"result.{name}/liked"] is None for name in ("auc", "gauc", "ne")} == {False}, "in one column"
        assert row["result.auc/liked.ci95"] > 0
    assert "result.auc" not in rows[0]
    (other,) = (row["result.rmse/rating"] for row in rows if row["model.arch"] == "din")
    assert other is None
    out = capsys.readouterr().out
    assert "Best by AUC liked: model.arch=" in out
    means = out[out.index("Means of repeats") :]
    assert "model.history=['past_items']" in means, "in the column of settings that some runs have"
    for row in rows:
        for name in ("auc", "gauc", "ne"):
            assert f"{row[f'result.{name}/liked']:.4f}" in means, "no number is cut"
            assert f"± {row[f'result.{name}/liked.ci95']:.4f}" in means
    num_tables = []
    for width in (80, 150):
        console = Console(width=width, file=io.StringIO())
        console.print(*spread_tables(read_configurations(Path("sweeps/two")), width))
        said = console.file.getvalue()
        assert max(map(len, said.splitlines())) <= width
        for row in rows:
            assert all(f"{row[f'result.{name}/liked']:.4f}" in said for name in ("auc", "gauc", "ne")), "none is cut"
            assert f"│{row['model.arch']}" in said
        assert "…" not in said
        num_tables.append(said.count("Means of repeats"))
    assert num_tables[0] > num_tables[1] > 0, "in as many tables as it takes"
