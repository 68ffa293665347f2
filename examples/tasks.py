"""Writes clicks.parquet: shown videos, whether they were clicked, and of the clicked ones whether they were bought and
how long they were watched. See examples/tasks.toml.

    python examples/tasks.py clicks.parquet

All rows are made up. What is bought and watched depends on the taste that clicks show.
"""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NUM_USERS, NUM_ITEMS, DIM = 400, 300, 3


def main(path: str, rows: int = 40_000, seed: int = 0) -> None:
    """Write the file."""
    draw = np.random.default_rng(seed)
    users, items = draw.normal(size=(NUM_USERS, DIM)), draw.normal(size=(NUM_ITEMS, DIM))
    user, item = draw.integers(0, NUM_USERS, rows), (draw.random(rows) ** 2 * NUM_ITEMS).astype(int)
    likes = (users[user] * items[item]).sum(axis=1) / np.sqrt(DIM)
    price = draw.gamma(2.0, 4.0, rows)
    is_click = draw.random(rows) < sigmoid(2 * likes - 1)
    is_bought = draw.random(rows) < sigmoid(2 * likes - price / 6 - 1)
    minutes = np.maximum(0, 5 + 3 * likes + draw.normal(size=rows))
    table = {
        "click": is_click.astype(np.int8),
        "bought": pa.array(is_bought.astype(np.int8), mask=~is_click),
        "minutes": pa.array(minutes, mask=~is_click),
        "user": user,
        "item": item,
        "price": price,
    }
    pq.write_table(pa.table(table), path, row_group_size=4096, write_page_checksum=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return probabilities of logits."""
    return 1 / (1 + np.exp(-x))


if __name__ == "__main__":
    main(sys.argv[1])
