"""`embershard serve` answers while a training publishes: every answer is that of one published state."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest

from embershard.distributed import PublishConfig, process_group
from embershard.distributed.publish.published import published
from embershard.errors import ConfigError
from embershard.extras.serving import serving_replica
from embershard.extras.serving.server.prediction_server import Predictor
from embershard.extras.serving.serving_replica import Replica
from embershard.extras.serving.write import export_base
from embershard.training.trainer import Trainer
from tests.unit.commands.conftest import clicks, config_of_clicks
from tests.unit.serving.test_serve import ask, predict, served

pytestmark = [pytest.mark.extra, pytest.mark.slow]
SAMPLES = clicks(20, seed=1).drop_columns("click").to_pylist()


@contextmanager
def asked(port: int, clients: int) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    """Clients that ask all the time: statuses and answers."""
    found: list[tuple[int, dict[str, Any]]] = []
    is_over = threading.Event()

    def client() -> None:
        while not is_over.is_set():
            found.append(predict(port, SAMPLES))

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    yield found
    is_over.set()
    for thread in threads:
        thread.join()


def train(folder: Path, clients: int = 3) -> list[tuple[int, dict[str, Any]]]:
    """Train and publish while clients ask a server; return what it said."""
    pq.write_table(clicks(), folder / "clicks.parquet")
    config = config_of_clicks(folder / "clicks.parquet", max_steps=12)
    config = dataclasses.replace(config, publish=PublishConfig(str(folder / "published"), every_steps=1))
    with process_group("cpu") as ranks:
        trainer = Trainer(config, ranks, export=partial(export_base, config))
        training = trainer.train()
        next(training)  # the base
        with served(folder / "published", every_seconds=0.01) as port, asked(port, clients) as found:
            for _ in training:
                _wait(lambda: found[-1:] and found[-1][1].get("step", 0) >= trainer.steps - 2)  # it follows
            _wait(lambda: ask(port, "GET", "/health")[1]["step"] == 12)
            assert ask(port, "GET", "/health")[1]["problem"] == ""
        trainer.close()
    return found


def _wait(is_so: Any) -> None:
    ends = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.001)


def wrong_answers(folder: Path, found: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Answers that are not those of the state whose step they name."""
    with mock.patch.object(Replica, "update"):
        replica = Replica(folder / "published")  # the base
    expected = {0: replica(*replica.encode(SAMPLES)).tolist()}
    for seq, path in published(folder / "published", "delta"):
        replica.apply(path)
        expected[seq] = replica(*replica.encode(SAMPLES)).tolist()  # a publication per step
    assert {status for status, _ in found} == {200}
    return [answer for _, answer in found if answer["logits"] != expected[answer["step"]]]


def test_every_answer_is_that_of_one_published_state(tmp_path):
    found = train(tmp_path)
    assert wrong_answers(tmp_path, found) == []
    assert len({answer["step"] for _, answer in found}) > 4


def test_torn_states_would_be_noticed(tmp_path, monkeypatch):
    """Without the lock, and with time between the rows and the layers."""
    made = Replica.__init__

    def without_lock(self: Replica, folder: Path) -> None:
        made(self, folder)
        self._lock = nullcontext()

    def late(*given: Any) -> None:
        time.sleep(0.05)
        set_weights(*given)

    set_weights = serving_replica.set_weights
    monkeypatch.setattr(Replica, "__init__", without_lock)
    monkeypatch.setattr(serving_replica, "set_weights", late)
    found = train(tmp_path)
    monkeypatch.undo()
    assert wrong_answers(tmp_path, found)


def test_a_folder_without_a_whole_base_is_refused(tmp_path):
    (tmp_path / "base_3").mkdir()
    (tmp_path / "base_3" / "export.json").write_text('{"format": "module", "task": "binary", "labels": ["click"]}')
    with pytest.raises(ConfigError, match="publish verify"):
        Predictor(tmp_path)
