"""Adds to each rating what the user liked before, and holds out a tenth of each user's ratings.

    embershard data convert ml-100k.inter --join ml-100k.user --join ml-100k.item -o ratings.parquet
    python examples/movielens.py ratings.parquet movielens
    embershard sweep examples/movielens_sweep.toml

The files of MovieLens are RecBole's; any Parquet file with user_id, item_id, rating and timestamp will do. `liked` is 1
from 4 stars on. `past_items` are the last 50 items that the user liked before, among the ratings to train on alone: no
sample tells how a held-out one ends.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

LIKED_FROM = 4
MOST_PAST_ITEMS = 50
HELD_OUT = 0.1


def main(path: Path, folder: Path, seed: int = 0) -> None:
    """Write `train.parquet` and `eval.parquet` into a folder, which is made."""
    ratings = pq.read_table(path)
    users, items, stars, times = (ratings[name].to_pylist() for name in ("user_id", "item_id", "rating", "timestamp"))
    rows_of: dict[object, list[int]] = {}
    for row in sorted(range(len(times)), key=times.__getitem__):
        rows_of.setdefault(users[row], []).append(row)
    draw, is_held_out = random.Random(seed), [False] * len(times)
    past: list[list[object]] = [[]] * len(times)
    for rows in rows_of.values():
        for row in draw.sample(rows, round(HELD_OUT * len(rows))):
            is_held_out[row] = True
        liked: deque[int] = deque(maxlen=MOST_PAST_ITEMS)
        for row in rows:  # ratings of one second came at once: none is in the history of another
            past[row] = [items[before] for before in liked if times[before] < times[row]]
            if stars[row] >= LIKED_FROM and not is_held_out[row]:
                liked.append(row)
    samples = {
        **{name: ratings[name] for name in ratings.column_names},
        "liked": pa.array([int(number >= LIKED_FROM) for number in stars]),
        "past_items": pa.array(past, pa.list_(ratings.schema.field("item_id").type)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    table, held_out = pa.table(samples), pa.array(is_held_out)
    pq.write_table(table.filter(pc.invert(held_out)), folder / "train.parquet", write_page_checksum=True)
    pq.write_table(table.filter(held_out), folder / "eval.parquet", write_page_checksum=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
