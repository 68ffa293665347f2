"""Errors that several ranks raise alike are shown by one of them."""

from __future__ import annotations

import errno
import sys

import pytest
import torch.distributed as dist

from embershard.distributed import Supervision, process_group
from embershard.distributed.ranks import _was_raised_before
from embershard.errors import ConfigError, DataError, EmbershardError, StepError
from embershard.launch.rank import _show_error


def test_the_first_rank_shows_it_and_others_do_not():
    store = dist.HashStore()  # of all ranks
    assert [_was_raised_before(ConfigError("lr=inf"), store) for _ in range(3)] == [False, True, True]
    assert not _was_raised_before(ConfigError("lr=nan"), store)
    assert not _was_raised_before(DataError("lr=inf"), store)


def test_an_error_that_leaves_the_group_knows():
    with pytest.raises(ConfigError) as raised, process_group("cpu"):
        raise ConfigError("lr=inf")
    assert not raised.value.is_shown_elsewhere


def shown(error: Exception, capsys: pytest.CaptureFixture[str], has_launcher: bool = False) -> str:
    supervision = Supervision([0, 0, 0, 0]) if has_launcher else Supervision()
    _show_error(supervision, type(error), error, None)
    return capsys.readouterr().err


def test_what_a_rank_shows(capsys, monkeypatch):
    monkeypatch.setattr(sys, "__excepthook__", lambda *_: print("traceback", file=sys.stderr))
    known: EmbershardError = ConfigError("lr=inf")
    assert shown(known, capsys) == "ConfigError: lr=inf\n"
    known.is_shown_elsewhere = True
    assert shown(known, capsys) == ""
    lost = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711")
    assert shown(lost, capsys) == "This rank lost the connection to another one, which has ended or hangs.\n"
    assert shown(lost, capsys, has_launcher=True) == ""  # it names the rank that ended
    assert shown(RuntimeError("a bug"), capsys) == "traceback\n"


@pytest.mark.parametrize(
    ("error", "is_final"),
    [
        (ConfigError("x"), True),
        (StepError("x"), False),
        (RuntimeError("x"), False),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EIO, "Input/output error"), False),
    ],
)
def test_the_launcher_learns_whether_the_error_would_come_again(error, is_final, monkeypatch):
    monkeypatch.setattr(sys, "__excepthook__", lambda *_: None)
    pulse = [0, 0, 0, 0]
    _show_error(Supervision(pulse), type(error), error, None)
    assert pulse[3] == is_final
    assert pulse[2] > 0


def test_a_name_that_is_no_utf_8_does_not_hide_the_error():
    with pytest.raises(DataError, match="not sound"), process_group("cpu"):
        raise DataError("/data/\udcff.parquet: not sound")
