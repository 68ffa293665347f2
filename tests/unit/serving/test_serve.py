"""`embershard serve`: scores over HTTP are those of `embershard predict`; what is wrong is said, and nothing fails."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from embershard.commands import cli
from embershard.extras.serving import command as export
from embershard.extras.serving.server import command as serve
from embershard.extras.serving.server import prediction_server
from embershard.extras.serving.server.prediction_server import Limits, PredictionServer, Predictor
from tests.faults.serving import dripping
from tests.unit.commands.conftest import Trained
from tests.unit.commands.test_score import scores

pytestmark = [pytest.mark.extra, pytest.mark.slow]
MOST_BYTES = 100_000
ROW = {"age": 31.5, "user": 4711, "items": [3, 5]}


@pytest.fixture(scope="module")
def exported(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "fp32"
    export.main([str(trained.run_dir), "-o", str(folder)])
    return folder


@contextmanager
def served(folder: Path, every_seconds: float = 1.0) -> Iterator[int]:
    """A server in this process."""
    predictor = Predictor(folder, every_seconds)
    with PredictionServer(predictor, "127.0.0.1", 0, Limits(MOST_BYTES)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()
    predictor.close()


@pytest.fixture(scope="module")
def port(exported: Path) -> Iterator[int]:
    with served(exported) as number:
        yield number


def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    found: dict[str, Any] = json.loads(answer.read())
    return answer.status, found


def predict(port: int, rows: Any) -> tuple[int, dict[str, Any]]:
    return ask(port, "POST", "/predict", json.dumps({"rows": rows}).encode())


@pytest.mark.smoke
def test_scores_are_those_of_predict_bit_for_bit(trained, port, tmp_path):
    expected = scores(trained, tmp_path / "s.parquet", "--data", str(trained.unlabelled))
    rows = pq.read_table(trained.unlabelled).to_pylist()
    for start in range(0, len(rows), 64):  # the batches of predict
        status, found = predict(port, rows[start : start + 64])
        assert status == 200
        for name in ("logit", "score"):
            values = np.array(found[f"{name}s"], np.float32)
            assert values.tobytes() == expected[name].to_numpy()[start : start + 64].tobytes()


def test_many_clients_at_once_get_their_own_scores(port):
    rows = [{**ROW, "user": user} for user in range(24)]
    expected = [predict(port, [row])[1]["scores"] for row in rows]
    found: dict[int, Any] = {}

    def client(number: int) -> None:
        found[number] = predict(port, [rows[number]])[1]["scores"]

    threads = [threading.Thread(target=client, args=(number,)) for number in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(len(rows))] == expected
    assert len({each[0] for each in expected}) > 1


def test_health_names_what_is_served(port, trained):
    status, about = ask(port, "GET", "/health")
    assert (status, about["status"], about["columns"], about["step"]) == (200, "ok", ["age", "user", "items"], 12)
    assert Path(about["run"]) == trained.run_dir
    assert predict(port, []) == (200, {"scores": [], "logits": []})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", 'the body is no JSON .*; needed {"rows": '),
        (b"\xff\xfe\x00", "the body is no JSON"),
        (b"[" * 50_000, "the body is no JSON"),
        (b"[]", "the body has no list of rows"),
        (b"3", "the body has no list of rows"),
        (b'{"rows": {"age": 1}}', "the body has no list of rows"),
        (b'{"row": []}', "the body has no list of rows"),
        (b'{"rows": [3]}', "sample 0: got 3; needed a dict with the keys age, user, items"),
        (b'{"rows": [{"age": 1, "user": 2}]}', "sample 0: 'items' is absent, and a missing value is None"),
        (b'{"rows": [{"age": 1, "usr": 2, "items": []}]}', "'usr' is not read by the model, did you mean 'user'"),
        (b'{"rows": [{"age": "old", "user": 2, "items": []}]}', "age: 'old': needed a number, or nothing"),
        (b'{"rows": [{"age": 1, "user": 2.5, "items": []}]}', "user: 2.5: needed an integer of 64 bits"),
        (b'{"rows": [{"age": 1, "user": 2, "items": [[1]]}]}', r"items: \[1\]: needed an integer"),
    ],
)
def test_what_is_wrong_is_said(port, body, said):
    status, found = ask(port, "POST", "/predict", body)
    assert status == 400
    assert re.search(said, found["error"]), found
    assert predict(port, [ROW])[0] == 200, "and the next request is answered"


@pytest.mark.parametrize(
    "row",
    [
        {"k" * 90_000: 1},
        {**ROW, **{f"key{number}": 1 for number in range(5000)}},
        *(
            {**ROW, name: value}
            for name in ROW
            for value in ("v" * 90_000, ["v" * 90_000], {"v" * 90_000: 1}, [[1] * 9000])
        ),
        {**ROW, "user": "9" * 90_000},
        ["v" * 90_000],
    ],
)
def test_long_keys_and_values_are_cut_in_errors(port, row):
    status, found = predict(port, [row])
    assert (status, len(found["error"]) < 600) == (400, True), found["error"][:1000]


def test_bodies_that_are_too_large_are_refused(port):
    status, found = ask(port, "POST", "/predict", b" " * (MOST_BYTES + 1))
    assert (status, found["error"]) == (
        413,
        "the body has 100,001 bytes; needed at most 100,000 (--max-body): send fewer rows at once",
    )


def test_a_failure_of_the_model_is_an_answer_and_not_the_end(port, monkeypatch, capsys):
    def fails(*_: object) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(prediction_server, "_forward", fails)
        assert predict(port, [ROW]) == (500, {"error": "the server failed; its output says at what"})
    assert "RuntimeError: no memory" in capsys.readouterr().err
    assert predict(port, [ROW])[0] == 200


def test_the_command_serves_until_it_is_told_to_end_and_waits_for_no_client(exported, project_dir):
    """A client sends a body byte by byte; without the limit the command would wait for it for a day."""
    words = [sys.executable, "-m", "embershard", "serve", str(exported), "--port", "0"]
    words += ["--request-seconds", "86400", "--stop-seconds", "1"]
    with subprocess.Popen(words, cwd=project_dir, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        said = program.stdout.readline()
        found = re.fullmatch(rf"Serving {exported} \(step 12\) at http://127.0.0.1:(\d+): POST /predict, .*\n", said)
        assert found, said
        assert predict(int(found[1]), [ROW])[0] == 200
        with dripping(int(found[1])):
            program.send_signal(signal.SIGTERM)
            assert program.wait(60) == 0
        said = program.stderr.read()
        assert "stopping after the requests in work, in at most 1 seconds (--stop-seconds)" in said
        assert "stopped with 1 requests that were not answered" in said


def test_the_command_says_once_which_state_is_served_and_why_no_newer_one(capsys):
    seen: dict[str, Any] = {"step": 4, "problem": ""}
    for step, problem in ((4, ""), (6, ""), (6, "delta_3 is damaged"), (6, "delta_3 is damaged"), (8, "")):
        seen = serve._say_what_changed(seen, {"step": step, "problem": problem, "age_seconds": 12.3})
    said = capsys.readouterr()
    assert said.out == "Serving step 6.\nServing step 8.\n"
    assert said.err == (
        "embershard: still step 6, published 12 seconds ago: delta_3 is damaged\n"
        "embershard: step 8 is the newest again.\n"
    )


def test_what_cannot_be_served_is_refused(trained, exported, tmp_path, capsys):
    def refusal(*words: str) -> str:
        assert cli.main(["serve", *words]) == 2
        return capsys.readouterr().err

    assert "config.toml" not in refusal(str(trained.run_dir))
    assert "export.json: not there, or no JSON; give a folder that" in refusal(str(tmp_path))
    export.main([str(trained.run_dir), "-o", str(tmp_path / "tables"), "--format", "parquet"])
    assert "has tables, and no module; export it with --format module" in refusal(str(tmp_path / "tables"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"--host 127.0.0.1 --port {port}: " in refusal(str(exported), "--port", port)
    assert "--port 70000: " in refusal(str(exported), "--port", "70000")
