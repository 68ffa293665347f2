"""Messages about files of data and their columns."""

from __future__ import annotations

import pytest

from tests.unit.commands.remedies.table import Remedy, cases, check

INSPECT, TRAIN, CONVERT = "data inspect {} -o out.toml", "train {} --dry-run", "data convert {} -o out.parquet"
_OF_COLUMNS, _OF_FORMS = (INSPECT, TRAIN), (INSPECT, TRAIN, CONVERT)

OF_DATA = [
    Remedy(_OF_COLUMNS, "two.csv", "", r"Or the text that is 1: (--label \S+)"),
    Remedy(_OF_COLUMNS, "three.csv", "", r"Or the text that is 1: (--label \S+)"),
    Remedy(_OF_COLUMNS, "sold.csv", "", r"those of 0 and 1: (--label weekend) or --label revenue"),
    Remedy(_OF_COLUMNS, "sold.csv", "", r"those of 0 and 1: --label weekend or (--label revenue)"),
    Remedy(_OF_COLUMNS, "three.csv", "--label outcome", r"Or the text that is 1: (--label \S+) or", instead=True),
    Remedy(_OF_COLUMNS, "two.csv", "--label outcome=x", r"there are '\w+', ('kept')", "--label outcome=kept", True),
    Remedy(_OF_COLUMNS, "two.csv", "--label 'amount>=x'", r"for instance (amount>=4)", "--label 'amount>=4'", True),
    Remedy(_OF_COLUMNS, "two.csv", "--label amuont", r"did you mean ('amount')", "--label amount", True),
    Remedy(_OF_COLUMNS, "two.csv", "--label outcome --drop outcome", r"(name it once)", "--label outcome", True),
    Remedy(_OF_FORMS, "headless.csv", "", r"Name the columns: (--columns NAME,\.\.\.)", "--columns user,amount,click"),
    Remedy(_OF_COLUMNS, "words.csv", "", r"(--columns NAME,\.\.\.)", "--columns user,city,click --label click=d0"),
    Remedy((CONVERT,), "words.csv", "", r"(--columns NAME,\.\.\.)", "--columns user,city,click"),
    Remedy((CONVERT,), "words.csv", "", r"(--header)", "--header"),
    Remedy(_OF_FORMS, "odd.csv", "", r"(--separator), for instance", "--separator @ --columns user,amount,click"),
    Remedy(_OF_FORMS, "latin.csv", "", r"by (--encoding): in (?:\S+), for", "--encoding cp1252"),
    Remedy(_OF_FORMS, "latin.csv", "--encoding ascii", r"(--encoding)", "--encoding latin-1", True),
    Remedy(_OF_COLUMNS, "numbers.csv", "", r"Likeliest: (--category \S+)"),
    Remedy(_OF_COLUMNS, "city.csv", "--number city", r"Or leave it out: (--drop city)", instead=True),
    Remedy(_OF_COLUMNS, "days.csv", "--time when:%Y", r"leave it out: (--drop when)", instead=True),
    Remedy(_OF_COLUMNS, "days.csv", "--time when:%Y-%m-%d", r"(--time when:%\S+)", "--time when:%d/%m/%Y", True),
    Remedy(_OF_COLUMNS, "city.csv", "--time city", r"(--drop city)", instead=True),
    Remedy(_OF_COLUMNS, "lists.csv", "--list tags", r"for instance (--list tags:),", "--list tags:%", True),
    Remedy(_OF_COLUMNS, "city.csv", "--feature ctiy", r"there are click, user_id, (city)", "--feature city", True),
    Remedy(_OF_COLUMNS, "blanks.csv", "", r"To take them as missing: (--number 'unit price')", wrong_code=0),
    Remedy(_OF_COLUMNS, "blanks.csv", "--list 'user id'", r"leave it out: (--drop 'user id')", instead=True),
    Remedy(_OF_COLUMNS, "results.csv", "", r"To use one that is: (--feature purchased)", wrong_code=0),
    Remedy(_OF_COLUMNS, "results2.csv", "", r"To use one that is: (--feature 'was purchased')", wrong_code=0),
    Remedy(_OF_COLUMNS, "days.csv", "", r"Else: (--time when:%\S+)", wrong_code=0),
    Remedy((CONVERT,), "bad.csv", "", r"(--bad-rows [\d.]+)"),
    Remedy(_OF_COLUMNS, "torn.csv", "", r"or leave them out: (--bad-rows [\d.]+)"),
    Remedy(_OF_FORMS, "short.csv", "", r"Name all of them: (--columns NAME,\.\.\.)", "--columns click,user_id,day"),
    Remedy((CONVERT,), "open.csv", "", r"inspect, convert and train: (--no-quotes)"),
    *(
        Remedy((CONVERT,), "two.csv", words, r"(--join \S+NAME,\.\.\.)", "--join sizes.csv:user,size", True)
        for words in ("--join sizes.csv", "--join sizes.csv:id,size")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("row", "command"), cases(OF_DATA))
def test_what_is_advised_of_data_helps(row: Remedy, command: str, capsys: pytest.CaptureFixture[str]):
    check(row, command, capsys)
