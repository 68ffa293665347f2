"""A first look at the files of a run's data, before anything is started: in a second, and without torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from embershard.data.config import DataConfig
from embershard.data.sources.input_file import list_files, need_path, next_file


def check_data(
    config: DataConfig, of_metrics: Sequence[str] = (), kept: Sequence[str] = (), *, needs_labels: bool = True
) -> None:
    """Check that the files are there; of "parquet" and "table" that every column is, with a type and, in the first
    rows, values that its feature takes.

    Args:
        of_metrics: columns that evaluations need, too.
        kept: columns, of any type, that go along with scores.
        needs_labels: False: the columns of labels and of what goes with them may be missing.

    Raises:
        ConfigError: a setting that this kind of data needs is missing; or one of `of_metrics` is, or has lists.
        DataError: a file is missing, empty or damaged, a column is missing or of another type, or a value does not fit.
    """
    need_path(config)
    if config.follow and next_file(Path(str(config.path)).expanduser(), config.file_patterns, ())[0] is None:
        return
    files, _ = list_files(config)
    if config.has_names:
        from embershard.data.sources.table.source import check_table  # it loads pyarrow

        check_table(config, files, of_metrics, kept, needs_labels=needs_labels)
