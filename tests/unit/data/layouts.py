"""The layouts of well-known public data sets: separators, headers, quotes, encodings, compression and parts, as their
descriptions say, with made-up contents; and whether each is read as it was meant, or refused with what reads it.

`python -m tests.unit.data.layouts 1000` writes each with so many rows, and says which went wrong.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from embershard.commands.data.columns import columns_of_files, survey_files
from embershard.commands.data.command import parser
from embershard.data.sources.table.whole_columns import all_batches
from embershard.errors import DataError

Row = dict[str, Any]
_WORDS = [
    "Night of the Red River",
    "Köln, at Last",
    "Dr. No",
    'He said "Go"',
    "It's 5 O'Clock",
    "A; B & C",
    "Amélie",
    "50% Off: Part 2",
]
_PLAIN = ["alpha", "beta", "gamma", "delta", "omega", "kappa", "sigma"]


class Draw:
    """Cells of a row, of a seed."""

    def __init__(self, number_of_row: int) -> None:
        self.number_of_row, self.random = number_of_row, random.Random(number_of_row)

    def id(self, most: int = 500, prefix: str = "") -> str:
        return f"{prefix}{self.random.randrange(most)}"

    def hex(self, size: int = 8) -> str:
        return f"{self.random.getrandbits(4 * size):0{size}x}"

    def flag(self) -> str:
        return str(int(self.random.random() < 0.3))

    def number(self) -> str:
        return str(round(self.random.lognormvariate(2, 1), 2))

    def seconds(self) -> str:
        return str(1_400_000_000 + self.random.randrange(10**7))

    def some(self, cell: str) -> str | None:
        return cell if self.random.random() < 0.6 else None

    def title(self, words: Sequence[str] = _WORDS) -> str:
        return self.random.choice(words)

    def word(self) -> str:
        return self.random.choice(_PLAIN)

    def several(self, separator: str, prefix: str = "") -> str:
        return separator.join(self.id(40, prefix) for _ in range(self.random.randrange(1, 6)))

    def day(self, form: str) -> str:
        return form.format(*(self.random.randrange(10, most) for most in (28, 13, 24, 60, 60)))


@dataclass(frozen=True)
class Layout:
    """How a data set's file is written.

    Attributes:
        name: of the data set's file.
        row: a row's cells by column; None is an empty cell, or in JSON a key that is missing.
        options: of `inspect`, that a refusal names.
        says: what a refusal says; "": the file is read at first sight.
        line: writes a row; None: its cells, with `separator` between.
        compression: of the whole file.
        parts: files, in a folder.
    """

    name: str
    row: Callable[[Draw], Row]
    separator: str = ","
    header: bool = True
    quotes: str = "minimal"
    encoding: str = "utf-8"
    end: str = "\n"
    options: tuple[str, ...] = ()
    says: str = ""
    line: Callable[[Row], str] | None = None
    compression: str = ""
    parts: tuple[str, ...] = ()
    titles: str = field(default="")

    def rows(self, count: int) -> list[Row]:
        return [self.row(Draw(n)) for n in range(count)]

    def write(self, folder: Path, rows: list[Row]) -> Path:
        """Write rows, and return the file, or the folder of parts."""
        if not self.parts:
            return self._write(folder / self.name, rows)
        (folder / self.name).mkdir()
        step = -(-len(rows) // len(self.parts))
        for number, part in enumerate(self.parts):
            self._write(folder / self.name / part, rows[number * step : (number + 1) * step])
        return folder / self.name

    def _write(self, path: Path, rows: list[Row]) -> Path:
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=500)
            return path
        lines = [self.titles] if self.titles else []
        lines += [self.separator.join(self._cell(name) for name in rows[0])] if self.header else []
        write = self.line or (lambda row: self.separator.join(map(self._cell, row.values())))
        data = "".join(line + self.end for line in [*lines, *map(write, rows)]).encode(self.encoding)
        if self.compression == "zip":
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(path.stem, data)
            return path
        compressed = {"": bytes, "gz": gzip.compress, "bz2": bz2.compress}[self.compression](data)
        path.write_bytes(compressed)
        return path

    def _cell(self, cell: str | None) -> str:
        if self.quotes == "none" or (cell is None and self.quotes != "all"):
            return cell or ""
        cell = cell or ""
        if self.quotes == "escape":
            return '"' + cell.replace('"', '\\"') + '"'
        needs = self.quotes == "all" or any(each in cell for each in (self.separator, '"', "\n"))
        return '"' + cell.replace('"', '""') + '"' if needs else cell


_ASKS = "--columns NAME,..."


def unheaded(name: str, row: Callable[[Draw], Row], separator: str = ",", *options: str, **more: Any) -> Layout:
    columns = ",".join(row(Draw(0)))
    return Layout(name, row, separator, header=False, options=("--columns", columns, *options), says=_ASKS, **more)


def as_json(row: Row) -> str:
    return json.dumps({name: value for name, value in row.items() if value is not None}, ensure_ascii=False)


def jsonl(name: str, row: Callable[[Draw], Row], **more: Any) -> Layout:
    return Layout(name, row, header=False, line=as_json, **more)


def of_criteo(d: Draw) -> Row:
    numbers = {f"I{n}": d.some(d.id(90)) for n in range(1, 14)}
    return {"label": d.flag(), **numbers, **{f"C{n}": d.some(d.hex()) for n in range(1, 27)}}


def of_avazu(d: Draw) -> Row:
    names = [
        "banner_pos",
        "site_id",
        "site_domain",
        "site_category",
        "app_id",
        "device_id",
        "device_ip",
        "device_model",
        "device_type",
    ]
    cells = {name: d.hex() for name in names} | {f"C{n}": d.id(900) for n in range(14, 22)}
    return {"id": d.id(10**18), "click": d.flag(), "hour": d.day("14{1}{0}{2}"), "C1": "1005", **cells}


def of_kdd_cup(d: Draw) -> Row:
    names = [
        "Impression",
        "DisplayURL",
        "AdID",
        "AdvertiserID",
        "Depth",
        "Position",
        "QueryID",
        "KeywordID",
        "TitleID",
        "DescriptionID",
        "UserID",
    ]
    return {"Click": d.id(3)} | {name: d.id(10**6) for name in names}


def of_movielens(d: Draw) -> Row:
    return {"user": d.id(900), "item": d.id(1600), "rating": d.id(5), "time": d.seconds()}


def of_item(d: Draw) -> Row:
    url = f"http://us.imdb.com/M/title-exact?{d.word()}%20(1995)"
    flags = {f"genre{n}": d.flag() for n in range(19)}
    title = d.title([word for word in _WORDS if '"' not in word])
    return {"item": d.id(1600), "title": title, "released": "01-Jan-1995", "video": None, "url": url, **flags}


def of_book(d: Draw) -> Row:
    images = {f"Image-URL-{size}": f"http://images.com/{d.id()}.{size}.jpg" for size in "SML"}
    return {"ISBN": d.id(10**9, "0"), "Book-Title": d.title(), "Book-Author": d.title(), "Year": "2001", **images}


def of_reviews(d: Draw) -> Row:
    texts = {"reviewerName": d.some(d.title()), "reviewText": f"{d.title()}\n{d.word()}", "summary": d.title()}
    ids = {"reviewerID": "A" + d.hex(12), "asin": d.hex(10), **texts}
    return ids | {"helpful": [1, int(d.id(9))], "overall": float(d.id(5)), "unixReviewTime": int(d.seconds())}


def of_reviews_2018(d: Draw) -> Row:
    style = {"Format:": " Hardcover"} if d.flag() == "1" else None
    votes = {"vote": d.some(d.id(300)), "verified": d.flag() == "1", "style": style}
    return {"overall": 4.0, **votes, "reviewerID": d.hex(12), "image": [d.word()] if d.flag() == "1" else None}


def of_business(d: Draw) -> Row:
    attributes = {"WiFi": f"u'{d.word()}'", "ByAppointmentOnly": "True"} if d.flag() == "0" else None
    place = {"stars": float(d.id(5)), "postal_code": d.id(99999), "attributes": attributes}
    return {
        "business_id": d.hex(22),
        "name": d.title(),
        **place,
        "categories": f"{d.word()}, {d.word()}",
        "hours": None,
    }


def of_ali_ccp(d: Draw) -> Row:
    features = "\x01".join(f"{d.id(300)}\x02{d.id(9999)}\x03{d.number()}" for _ in range(4))
    return {
        "sample": d.id(10**6),
        "click": d.flag(),
        "buy": "0",
        "common": d.hex(16),
        "count": "4",
        "features": features,
    }


def of_mind(d: Draw) -> Row:
    shown = " ".join(f"N{d.id()}-{d.flag()}" for _ in range(4))
    return {"impression": d.id(10**6), "user": d.id(900, "U"), "time": d.day("{1}/{0}/2019 9:{3}:{4} AM"),
            "history": d.some(d.several(" ", "N")), "shown": shown}  # fmt: skip


def of_news(d: Draw) -> Row:
    entities = json.dumps([{"Label": d.word(), "Type": "P", "Confidence": 1.0}]) if d.flag() == "1" else "[]"
    texts = {"title": d.title(), "abstract": d.some(d.title()), "url": "https://assets.msn.com/labs/a.html"}
    return {"news": d.id(10**5, "N"), "category": d.word(), "sub": d.word(), **texts, "entities": entities}


def of_checkins(d: Draw) -> Row:
    place = {"latitude": f"{d.random.uniform(-90, 90):.6f}", "longitude": f"{d.random.uniform(-180, 180):.6f}"}
    return {"user": d.id(), "time": d.day("2010-{1}-{0}T{2}:{3}:{4}Z"), **place, "location": d.id(30000)}


def of_tweets(d: Draw) -> Row:
    counts = {name: d.id(9999) for name in ("followers", "following")}
    tokens, hashtags = d.several("\t"), d.some(d.several("\t", "h"))
    return {"tokens": tokens, "hashtags": hashtags, "tweet": d.hex(32), "type": d.word(), "user": d.hex(32), **counts,
            "like": d.some(d.seconds())}  # fmt: skip


def of_ratings(d: Draw) -> Row:
    rating = {"user": d.id(10**6), "rating": d.id(5), "day": d.day("2005-{1}-{0}")}
    return {"is_movie": d.number_of_row % 30 == 0, "movie": d.id(), **rating}


def of_recipes(d: Draw) -> Row:
    steps = str([d.word(), d.title(["mix it", "don't stir"]), d.word()])
    text = d.title(["good", 'my "best"\n\nand only', "x, y"])
    return {"name": d.title(), "id": d.id(10**5), "minutes": d.id(90), "steps": steps, "description": d.some(text)}


def plain(*columns: str, **of: Callable[[Draw], str | None]) -> Callable[[Draw], Row]:
    """Return what draws a row whose columns are ids, unless `of` has another way."""
    return lambda d: {name: of[name](d) if name in of else d.id(3000) for name in columns}


def python_dict(row: Row) -> str:
    return str(row)


def of_netflix(row: Row) -> str:
    return f"{row['movie']}:" if row["is_movie"] else f"{row['user']},{row['rating']},{row['day']}"


TIME, FLAG, WORD, TITLE = Draw.seconds, Draw.flag, Draw.word, Draw.title
LAYOUTS = [
    unheaded("criteo_kaggle_train.txt", of_criteo, "\t"),
    unheaded("criteo_day_0.gz", of_criteo, "\t", compression="gz"),
    Layout("avazu_train.gz", of_avazu, compression="gz"),
    unheaded("kdd_cup_2012_training.txt", of_kdd_cup, "\t"),
    Layout("outbrain_clicks_train.csv.zip", plain("display_id", "ad_id", "clicked", clicked=FLAG), compression="zip"),
    unheaded("ml_100k_u.data", of_movielens, "\t"),
    unheaded("ml_100k_u.user", plain("user", "age", "sex", "job", "zip", sex=WORD, job=WORD), "|"),
    unheaded("ml_100k_u.item", of_item, "|", "--encoding", "latin-1", encoding="latin-1", quotes="none"),
    unheaded("ml_1m_ratings.dat", of_movielens, "::"),
    unheaded("ml_1m_movies.dat", plain("movie", "title", "genres", title=lambda d: d.title(_WORDS[4:]),
             genres=lambda d: f"{d.word()}|{d.word()}"), "::", "--encoding", "latin-1", encoding="latin-1",
             quotes="none"),
    Layout("ml_25m_movies.csv", plain("movieId", "title", "genres", title=TITLE, genres=lambda d: d.several("|", "g"))),
    jsonl("amazon_2014_reviews_5.json.gz", of_reviews, compression="gz"),
    unheaded("amazon_ratings_books.csv", plain("user", "item", "rating", "time", user=lambda d: d.hex(14), time=TIME,
             item=lambda d: d.id(10**9, "0"), rating=lambda d: d.id(5) + ".0")),
    jsonl("amazon_2018_reviews.json", of_reviews_2018),
    Layout("amazon_2014_meta.json", plain("asin", "title", "price", title=TITLE), header=False, line=python_dict,
           says="python -c"),
    jsonl("yelp_business.json", of_business),
    unheaded("taobao_UserBehavior.csv", plain("user", "item", "category", "behaviour", "time",
             behaviour=lambda d: d.random.choice(["pv", "buy", "cart", "fav"]), time=TIME)),
    unheaded("ali_ccp_skeleton_train.csv", of_ali_ccp),
    Layout("alimama_raw_sample.csv", plain("user", "time_stamp", "adgroup_id", "pid", "nonclk", "clk", time_stamp=TIME,
           pid=lambda d: f"430548_100{d.id(9)}", nonclk=FLAG, clk=FLAG)),
    Layout("book_crossing_ratings.csv", plain("User-ID", "ISBN", "Book-Rating"), ";", quotes="all", end="\r\n"),
    Layout("book_crossing_books.csv", of_book, ";", quotes="escape", encoding="latin-1", end="\r\n",
           options=("--encoding", "latin-1"), says="--encoding"),
    unheaded("lastfm_360k_plays.tsv", plain("user", "mbid", "artist", "plays", user=lambda d: d.hex(40), artist=TITLE,
             mbid=lambda d: d.some(d.hex(36))), "\t", quotes="none"),
    Layout("lastfm_hetrec_user_artists.dat", plain("userID", "artistID", "weight"), "\t", end="\r\n"),
    unheaded("yoochoose_clicks.dat", plain("session", "time", "item", "category",
             time=lambda d: d.day("2014-{1}-{0}T{2}:{3}:{4}.277Z"))),
    Layout("diginetica_train-item-views.csv", plain("session_id", "user_id", "item_id", "timeframe", "eventdate",
           user_id=lambda d: d.some(d.id()), eventdate=lambda d: d.day("2016-{1}-{0}")), ";"),
    Layout("retailrocket_events.csv", plain("timestamp", "visitorid", "event", "itemid", "transactionid", event=WORD,
           timestamp=lambda d: d.seconds() + "000", transactionid=lambda d: d.some(d.id()))),
    unheaded("mind_behaviors.tsv", of_mind, "\t"),
    unheaded("mind_news.tsv", of_news, "\t", quotes="none"),
    unheaded("gowalla_totalCheckins.txt.gz", of_checkins, "\t", compression="gz"),
    unheaded("foursquare_TSMC2014_NYC.txt", plain("user", "venue", "category", "latitude", "time",
             venue=lambda d: d.hex(24), category=lambda d: d.title(["Café", "Arts & Crafts Store", "Bar"]),
             latitude=Draw.number,
             time=lambda d: d.day("Tue Apr {0} 18:{3}:{4} +0000 2012")), "\t", "--encoding", "latin-1",
             encoding="latin-1"),
    unheaded("steam-200k.csv", plain("user", "game", "behaviour", "value", "zero", behaviour=WORD, value=Draw.number,
             game=lambda d: '"' + d.title(["Dota 2", "Portal, Part 2"]) + '"'), quotes="none"),
    Layout("netflix_combined_data_1.txt", of_ratings, header=False, line=of_netflix, says="python -c",
           options=("--columns", "movie,user,rating,day")),
    jsonl("goodreads_reviews.json.gz", lambda d: {"user_id": d.hex(32), "book_id": d.id(10**6), "rating": int(d.id(5)),
          "review_text": d.title() + "\n", "date_added": d.day("Sun Jul {0} 07:{3}:{4} -0700 2017"), "n_votes": 0},
          compression="gz"),
    Layout("hm_transactions_train.csv", plain("t_dat", "customer_id", "article_id", "price", price=Draw.number,
           t_dat=lambda d: d.day("2018-09-{0}"), customer_id=lambda d: d.hex(64),
           article_id=lambda d: d.id(10**9, "0"))),
    Layout("instacart_orders.csv", plain("order_id", "user_id", "eval_set", "order_dow", "days_since_prior_order",
           eval_set=WORD, days_since_prior_order=lambda d: d.some(d.id(30) + ".0"))),
    Layout("kuairec_item_categories.csv", plain("video_id", "feat", feat=lambda d: f"[{d.several(', ')}]")),
    Layout("tenrec_ctr_data.csv", plain("user_id", "item_id", "click", "follow", "gender", "hist_1", click=FLAG)),
    Layout("yambda_listens", lambda d: {"uid": int(d.id()), "item_id": int(d.id(10**6)), "is_organic": int(d.flag()),
           "played": [int(d.id()) for _ in range(3)]}, parts=("part-0.parquet", "part-1.parquet")),
    unheaded("recsys_2020_tweets", of_tweets, "\x01", parts=("part-00000", "part-00001", "part-00002")),
    Layout("food_com_recipes.csv", of_recipes),
    Layout("trivago_2019_train.csv", plain("user_id", "session_id", "timestamp", "reference", "impressions", "prices",
           timestamp=TIME, impressions=lambda d: d.some(d.several("|")), prices=lambda d: d.some(d.several("|")))),
    Layout("frappe.csv", plain("user", "item", "cnt", "daytime", "weather", daytime=WORD, weather=WORD), "\t"),
]  # fmt: skip


def read(path: Path, options: Sequence[str] = ()) -> tuple[list[Row], int]:
    """Return the rows of a file as `inspect` reads it, and how many lines are none."""
    files = columns_of_files(path, parser().parse_args(["inspect", str(path), *options]))
    found = survey_files(files)
    return pa.Table.from_batches(all_batches(found.files)).to_pylist(), len(found.bad)


def flat(row: Row) -> Iterator[tuple[str, Any]]:
    """Yield what a row has, without what is missing; keys of an object in it as columns."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", each) for inner, each in flat(value))
        elif value not in (None, ""):
            yield name, value


def tried(layout: Layout, folder: Path, count: int) -> str:
    """Return "" where a layout is read as it was meant, at first sight or as the refusal says; else what went wrong."""
    rows = layout.rows(count)
    path = layout.write(folder, rows)
    given, told = list[str](), [layout.options[n : n + 2] for n in range(0, len(layout.options), 2)]
    while True:
        try:
            found, num_bad = read(path, given)
            break
        except DataError as error:
            if "python -c" in str(error) and layout.says == "python -c":
                return as_told(str(error), path, layout, rows)
            option = next((each for each in told if each[0] in str(error) and each[0] not in given), None)
            if option is None:
                return f"refused: {error}"
            given += option
    if layout.says and not given:
        return f"read at first sight, as {', '.join(found[0])}"
    if num_bad or len(found) != len(rows):
        return f"{len(found)} of {len(rows)} rows, {num_bad} bad lines"
    wrong = next((n for n in range(len(rows)) if dict(flat(found[n])) != dict(flat(unquoted(rows[n])))), None)
    return "" if wrong is None else f"row {wrong}: {dict(flat(found[wrong]))} for {dict(flat(rows[wrong]))}"


def unquoted(row: Row) -> Row:
    return {name: cell.strip('"') if name == "game" else cell for name, cell in row.items()}


def as_told(said: str, path: Path, layout: Layout, rows: list[Row]) -> str:
    """Return what goes wrong where the line of Python that a refusal names writes another file, which is read."""
    command, _, ending = said.partition("python -c ")[2].rpartition(" > NEW")
    new = path.with_name(f"new{ending}")
    done = subprocess.run(f"{sys.executable} -c {command} > {new}", shell=True, capture_output=True, text=True)
    if done.returncode:
        return f"the line of Python fails: {done.stderr}"
    found, num_bad = read(new, layout.options)
    count = sum(not row.get("is_movie") for row in rows)
    return "" if (len(found), num_bad) == (count, 0) else f"{len(found)} of {count} rows, as told; {num_bad} bad"


def main(count: int) -> int:
    """Try all layouts; return how many went wrong."""
    wrong = 0
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as name:
            problem = tried(layout, Path(name), count)
        wrong += bool(problem)
        print(f"{layout.name}: {problem[:300] or ('as told' if layout.says else 'ok')}", flush=True)
    print(f"{len(LAYOUTS) - wrong} of {len(LAYOUTS)} layouts are read as they are meant")
    return wrong


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("count", type=int, help="rows of each")
    sys.exit(bool(main(arguments.parse_args().count)))
