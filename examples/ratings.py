"""Writes three files in the layout of MovieLens-100k, without headers: ratings, users and items. See docs/own_data.md.

    python examples/ratings.py ratings

All rows are made up. A rating depends on the user's job and on the item's genres.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

GENRES = ("Action", "Adventure", "Comedy", "Crime", "Drama", "Romance", "War")
JOBS = ("artist", "doctor", "lawyer", "student", "writer")
NUM_USERS, NUM_ITEMS, NUM_RATINGS = 200, 300, 6000
FIRST_SECOND = 874_724_710  # 1997-09-20


def main(folder: Path) -> None:
    """Write the files into a folder, which is made."""
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    users = {user: (draw.randint(15, 70), draw.choice("MF"), draw.choice(JOBS)) for user in range(1, NUM_USERS + 1)}
    items = {item: draw.sample(GENRES, draw.randint(1, 3)) for item in range(1, NUM_ITEMS + 1)}
    with (folder / "u.user").open("w") as file:
        for user, (age, gender, job) in users.items():
            file.write(f"{user}\t{age}\t{gender}\t{job}\t{draw.randint(0, 99_999):05}\n")
    with (folder / "u.item").open("w") as file:
        for item, genres in items.items():
            file.write(f"{item}\tFilm {item}, The ({1950 + item % 50})\t{'|'.join(genres)}\n")
    with (folder / "u.data").open("w") as file:
        for number in range(NUM_RATINGS):
            user, item = draw.randint(1, NUM_USERS), draw.randint(1, NUM_ITEMS)
            likes = sum((JOBS.index(users[user][2]) + GENRES.index(genre)) % 3 - 1 for genre in items[item])
            rating = min(5, max(1, round(3.2 + likes + draw.gauss(0, 0.7))))
            file.write(f"{user}\t{item}\t{rating}\t{FIRST_SECOND + 37 * number}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
