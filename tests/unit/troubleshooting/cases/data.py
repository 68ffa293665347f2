"""Data that cannot be read, or are not what the settings say."""

from tests.unit.troubleshooting.case import Case, rank

TITLE = "Data"
_CRITEO = '[data]\nkind = "criteo"\npath = "logs"\ncriteo.num_rows = 10\n[train]\nbatch_size = 1\n'
_LINE = "\t".join(["1", *["3"] * 13, *["a"] * 26]) + "\n"

CASES = [
    Case(
        "A cell is not what its column needs",
        rank(
            *("--config", "run.toml"),
            files={"run.toml": _CRITEO, "logs/day_0": _LINE + _LINE[:-2] + "zebra\n"},
        ),
        "[rank<number>]: DataError: logs/day_0:2 C26='zebra': needed 1 to 8 hexadecimal digits, or nothing",
        "Correct or remove the row.",
        code=1,
    ),
]
