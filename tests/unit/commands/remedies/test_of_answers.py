"""What a server answers that it needs: given so, it answers with scores."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest

from embershard.extras.serving import command as export
from embershard.extras.serving.server.prediction_server import Limits, PredictionServer, Predictor
from tests.unit.commands.conftest import Trained

pytestmark = [pytest.mark.extra, pytest.mark.slow]  # a run is trained and exported
_SAMPLE: dict[str, Any] = {"age": 31.5, "user": 4711, "items": [3, 5]}


class Sent(NamedTuple):
    """A request: the rows of its body or, of other bodies, their bytes."""

    rows: Any = (_SAMPLE,)
    method: str = "POST"
    path: str = "/predict"
    body: bytes | None = None
    chunks: bool = False


def _with(**changes: Any) -> Sent:
    return Sent([_SAMPLE | changes])


#: A request, the remedy's words in the answer, and the request that has taken the remedy.
ANSWERS: list[tuple[Sent, str, Callable[[str], Sent]]] = [
    (Sent(path="/predictions"), "needed GET /health or POST (/predict)", lambda word: Sent(path=word)),
    (Sent(path="/healthy"), "needed (GET) /health", lambda word: Sent(method=word, path="/health")),
    (Sent(method="GET"), "needed (POST) /predict", lambda word: Sent(method=word)),
    (Sent(method="POST", path="/health"), "needed (GET) /health", lambda word: Sent(method=word, path="/health")),
    (Sent(chunks=True), "needed the header (Content-Length)", lambda _: Sent()),
    (Sent(body=b"{rows: []}"), 'needed {"(rows)": ', lambda _: Sent()),
    (Sent(body=b'{"samples": []}'), 'needed {"(rows)": ', lambda word: Sent(body=json.dumps({word: []}).encode())),
    (Sent(_SAMPLE), r'needed {"rows": (\[{...}, ...\])}', lambda _: Sent([_SAMPLE])),
    (Sent([_SAMPLE] * 99), "(send fewer rows) at once", lambda _: Sent([_SAMPLE] * 9)),
    (Sent([[31.5, 4711]]), "needed a dict with the keys (age, user, items)", lambda _: Sent([_SAMPLE])),
    (Sent([{"age": 1, "items": []}]), "absent, and a missing value is (None)", lambda _: _with(user=None)),
    (
        Sent([{"age": 1, "items": [], "usr": 3}]),
        "did you mean '(user)'",
        lambda word: Sent([{"age": 1, "items": [], word: 3}]),
    ),
    (_with(click=1), "'click' is not read by the model, (leave it out)", lambda _: Sent()),
    (_with(age="old"), "needed a number, or (nothing)", lambda _: _with(age=None)),
    (_with(age=1e39), "needed a finite number, below (3.4e38)", lambda _: _with(age=3.3e38)),
    (_with(user="new"), "needed an (integer) of 64 bits", lambda _: _with(user=1)),
    (_with(user=1.5), "or (nothing)", lambda _: _with(user=None)),
    (_with(items=[2**70]), "integer of (64) bits", lambda _: _with(items=[2**60])),
]


@pytest.fixture(scope="module")
def exported(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers") / "exported"
    export.main([str(trained.run_dir), "-o", str(folder)])
    return folder


@contextmanager
def _serving(exported: Path, limits: Limits) -> Iterator[PredictionServer]:
    predictor = Predictor(exported)
    with PredictionServer(predictor, "127.0.0.1", 0, limits) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
    predictor.close()


@pytest.fixture(scope="module")
def server(exported: Path) -> Iterator[PredictionServer]:
    with _serving(exported, Limits(3000, 2)) as server:
        yield server


def _answer(server: PredictionServer, sent: Sent) -> tuple[int, dict[str, Any]]:
    host, port = server.server_address[:2]
    connection = HTTPConnection(str(host), int(port), timeout=60)
    body = json.dumps({"rows": sent.rows}).encode() if sent.body is None else sent.body
    connection.request(sent.method, sent.path, iter([body]) if sent.chunks else body)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


@pytest.mark.parametrize(("sent", "said", "mended"), ANSWERS)
def test_what_an_answer_needs_is_answered_with_scores(
    server: PredictionServer, sent: Sent, said: str, mended: Callable[[str], Sent]
):
    status, content = _answer(server, sent)
    assert 400 <= status < 500, content
    found = re.search(said, content["error"])
    assert found is not None, content
    status, content = _answer(server, mended(found[1]))
    assert status == 200, content


def test_a_server_whose_limits_are_raised_as_it_says_takes_what_it_refused(server: PredictionServer, exported: Path):
    status, content = _answer(server, Sent([_SAMPLE] * 99))
    assert (status, "(--max-body)" in content["error"]) == (413, True)
    for _ in range(2):
        server.turns.acquire()
    try:
        status, content = _answer(server, Sent())
        assert (status, "(--max-requests); try again" in content["error"]) == (503, True)
    finally:
        for _ in range(2):
            server.turns.release()
    assert _answer(server, Sent())[0] == 200, "it is tried again"
    with _serving(exported, Limits(300_000, 3)) as larger:
        for _ in range(2):
            larger.turns.acquire()
        assert _answer(larger, Sent([_SAMPLE] * 99))[0] == 200
        for _ in range(2):
            larger.turns.release()
