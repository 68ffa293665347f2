"""The server of `embershard serve`: whatever clients send, or do not, they get JSON, and the next one is answered."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from embershard.extras.serving.server import prediction_server
from embershard.extras.serving.server.prediction_server import Limits, PredictionServer

pytestmark = pytest.mark.extra

BODY = b'{"rows": [1, 2]}'
HEAD = b"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n"


class Numbers:
    """Scores rows, which are numbers, with themselves; `then` is called in between."""

    def __init__(self) -> None:
        self.then: Callable[[], object] = lambda: None
        self.now, self.most, self._lock = 0, 0, threading.Lock()
        self.health = {"status": "ok"}

    def predict(self, rows: list[Any]) -> dict[str, Any]:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            self.then()
            return {"scores": rows}
        finally:
            with self._lock:
                self.now -= 1


@contextmanager
def running(predictor: Numbers, **limits: Any) -> Iterator[PredictionServer]:
    with PredictionServer(predictor, "127.0.0.1", 0, Limits(**limits)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
    assert not server.clients


@pytest.fixture
def predictor() -> Numbers:
    return Numbers()


@pytest.fixture
def server(predictor: Numbers) -> Iterator[PredictionServer]:
    with running(predictor, body_bytes=1000) as server:
        yield server
        assert answer_to(server, HEAD % len(BODY) + BODY)[0] == 200, "the next request is answered"


def connect(server: PredictionServer) -> socket.socket:
    return socket.create_connection(server.server_address[:2], timeout=60)  # type: ignore[arg-type]


def read(client: socket.socket) -> tuple[int, dict[str, str], Any]:
    """Status, headers and content of an answer."""
    answer = http.client.HTTPResponse(client)
    answer.begin()
    data = answer.read()
    assert answer.headers["Content-Type"] == "application/json"
    return answer.status, dict(answer.headers), json.loads(data)


def answer_to(server: PredictionServer, data: bytes, is_all: bool = True) -> tuple[int, dict[str, str], Any]:
    """The answer to these bytes, behind which nothing comes (`is_all`), or nothing yet."""
    with connect(server) as client:
        client.sendall(data)
        if is_all:
            client.shutdown(socket.SHUT_WR)
        return read(client)


def wait_until(is_so: Callable[[], object]) -> None:
    ends = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ("Content-Length: " + "9" * 5000, 413, "the body has a number of 5000 digits of bytes; needed at most 1,000"),
        ("Content-Length: 1001", 413, "the body has 1,001 bytes; needed at most 1,000 (--max-body): send fewer rows"),
        ("Content-Length: -1", 400, "Content-Length is '-1'; needed a whole number of bytes"),
        ("Content-Length: +16", 400, "Content-Length is '+16'"),
        ("Content-Length: 1_6", 400, "Content-Length is '1_6'"),
        ("Content-Length: \xb2", 400, "Content-Length is "),
        ("Content-Length: " + "x" * 5000, 400, "Content-Length is 'xxx"),
        ("Content-Length: 16\r\nContent-Length: 3", 400, "and another one; needed a whole number"),
        ("Accept: */*", 411, "needed the header Content-Length, the bytes of the body"),
        ("Transfer-Encoding: chunked", 411, "a body in chunks is not taken"),
        ("Transfer-Encoding: chunked\r\nContent-Length: 16", 411, "a body in chunks is not taken"),
        ("Content-Length: 17", 400, "the body ended after 16 bytes; needed the 17 of its Content-Length"),
    ],
)
def test_bodies_whose_length_is_wrong_are_refused(server, headers, status, said):
    found, _, content = answer_to(server, f"POST /predict HTTP/1.1\r\n{headers}\r\n\r\n".encode("latin-1") + BODY)
    assert (found, said in content["error"]) == (status, True), content
    assert len(content["error"]) < 200


@pytest.mark.parametrize("method", ["PUT", "OPTIONS", "DELETE", "PATCH", "TRACE", "BREW", "get", "M" * 60_000])
@pytest.mark.parametrize(("path", "needed"), [("/predict", "POST"), ("/health", "GET"), ("/other", None)])
def test_other_methods_are_refused_with_those_that_there_are(server, method, path, needed):
    status, headers, content = answer_to(server, f"{method} {path} HTTP/1.1\r\n\r\n".encode())
    assert (status, headers.get("Allow")) == (405 if needed else 404, needed)
    assert "needed " in content["error"]
    assert len(content["error"]) < 200


def test_head_is_answered_without_a_body(server):
    with connect(server) as client:
        client.sendall(b"HEAD /health HTTP/1.1\r\n\r\n")
        client.shutdown(socket.SHUT_WR)
        said = b"".join(iter(lambda: client.recv(1000), b""))
    assert said.startswith(b"HTTP/1.1 405 ")
    assert b"\r\nAllow: GET\r\n" in said
    assert said.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),  # TLS
        (b"garbage\r\n\r\n", 400),
        (b"POST /predict\r\n\r\n", 400),
        (b"GET /health HTTP/1.x\r\n\r\n", 400),
        (b"GET /health HTTP/9.9\r\n\r\n", 505),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET /health HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", 431),
        (b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\n\r\n", 404),
    ],
)
def test_what_is_no_request_is_refused_as_json(server, data, status):
    found, _, content = answer_to(server, data)
    assert (found, set(content)) == (status, {"error"})
    assert len(content["error"]) <= prediction_server._MOST_CHARACTERS + 3


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("no \N{GREEK SMALL LETTER MU}"), OSError(5, "x"), KeyError("k")]
)
def test_what_fails_is_an_answer_without_its_traceback(server, predictor, error, capsys):
    def fail() -> None:
        predictor.then = lambda: None
        raise error

    predictor.then = fail
    status, _, content = answer_to(server, HEAD % len(BODY) + BODY)
    assert (status, content) == (500, {"error": "the server failed; its output says at what"})
    assert type(error).__name__ in capsys.readouterr().err


def test_long_errors_are_cut(server, predictor):
    def fail() -> None:
        predictor.then = lambda: None
        raise ValueError("k" * 1_000_000)

    predictor.then = fail
    status, _, content = answer_to(server, HEAD % len(BODY) + BODY)
    assert (status, len(content["error"])) == (400, prediction_server._MOST_CHARACTERS + 3)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["line", "headers", "body"])
def test_a_request_that_drips_is_refused_when_its_time_is_over(predictor, where):
    start = {"line": b"P", "headers": b"POST /predict HTTP/1.1\r\nX: ", "body": HEAD % 9000}[where]
    with running(predictor, seconds=0.3) as server, connect(server) as client:
        client.sendall(start)
        client.settimeout(0.01)
        for _ in range(2000):
            try:
                client.sendall(b"a")
                client.recv(1, socket.MSG_PEEK)
                break
            except TimeoutError:
                pass
        client.settimeout(60)
        status, _, content = read(client)
        assert (status, "--request-seconds" in content["error"]) == (408, True)


def test_connections_without_a_request_are_closed(predictor):
    with running(predictor, seconds=0.2) as server, connect(server) as client:
        assert client.recv(1) == b""


@pytest.mark.slow
def test_an_answer_that_nobody_takes_is_given_up(predictor):
    body = json.dumps({"rows": ["a" * 20_000_000]}).encode()  # more than sockets hold
    with running(predictor, seconds=0.5, body_bytes=1 << 30) as server, connect(server) as client:
        client.sendall(HEAD % len(body) + body)
        wait_until(lambda: predictor.most)
        wait_until(lambda: not server.clients)


def test_requests_beyond_the_limit_are_refused_at_once(predictor):
    is_free = threading.Event()
    with running(predictor, requests=2) as server, ExitStack() as stack:
        predictor.then = lambda: is_free.wait(60)
        stack.callback(is_free.set)
        clients = [stack.enter_context(connect(server)) for _ in range(2)]
        for client in clients:
            client.sendall(HEAD % len(BODY) + BODY)
        wait_until(lambda: predictor.now == 2)
        status, headers, content = answer_to(server, HEAD % len(BODY) + BODY)
        assert (status, headers["Retry-After"], "--max-requests" in content["error"]) == (503, "1", True)
        assert answer_to(server, b"GET /health HTTP/1.1\r\n\r\n")[0] == 200
        is_free.set()
        assert [read(client)[0] for client in clients] == [200, 200]
        assert answer_to(server, HEAD % len(BODY) + BODY)[0] == 200


def test_connections_beyond_the_limit_are_refused_at_once(predictor):
    with running(predictor, requests=1) as server, ExitStack() as stack:
        most = 1 + prediction_server._MORE_CONNECTIONS
        idle = [stack.enter_context(connect(server)) for _ in range(most)]
        wait_until(lambda: len(server.clients) == most)
        with connect(server) as client:
            assert read(client)[0] == 503
        idle.pop().close()
        wait_until(lambda: len(server.clients) < most)
        assert answer_to(server, HEAD % len(BODY) + BODY)[0] == 200


def test_large_bodies_are_read_and_parsed_a_few_at_a_time(predictor, monkeypatch):
    """The others are not read: they wait in the clients. Small ones pass by."""
    is_free, taken, lock = threading.Event(), [0, 0], threading.Lock()
    large = json.dumps({"rows": ["a" * prediction_server._LARGE_BYTES]}).encode()
    body_of = prediction_server._Handler._body

    def counted(self: Any, size: int) -> bytes:
        with lock:
            taken[0] += size > prediction_server._LARGE_BYTES
            taken[1] = max(taken)
        return body_of(self, size)

    def done() -> None:
        is_free.wait(60)
        with lock:
            taken[0] -= 1

    monkeypatch.setattr(prediction_server._Handler, "_body", counted)
    predictor.then = done
    with running(predictor) as server, ExitStack() as stack:
        stack.callback(is_free.set)
        clients = [stack.enter_context(connect(server)) for _ in range(20)]
        for client in clients:
            client.sendall(HEAD % len(large) + large)
        wait_until(lambda: taken[0] == prediction_server._LARGE_AT_ONCE)
        wait_until(lambda: predictor.now == prediction_server._PARSED_AT_ONCE)
        is_free.set()
        assert [read(client)[0] for client in clients] == [200] * 20
    assert (taken[1], predictor.most) == (prediction_server._LARGE_AT_ONCE, prediction_server._PARSED_AT_ONCE)


@pytest.mark.slow
def test_a_large_body_that_finds_no_room_in_time_is_refused(predictor):
    is_free = threading.Event()
    large = json.dumps({"rows": ["a" * prediction_server._LARGE_BYTES]}).encode()
    predictor.then = lambda: is_free.wait(60)
    with running(predictor, seconds=0.5) as server, ExitStack() as stack:
        stack.callback(is_free.set)
        clients = [stack.enter_context(connect(server)) for _ in range(prediction_server._LARGE_AT_ONCE)]
        for client in clients:
            client.sendall(HEAD % len(large) + large)
        wait_until(lambda: [each.does for each in list(server.clients.values())] == ["waits"] * len(clients))
        status, headers, content = answer_to(server, HEAD % len(large) + large)
        assert (status, headers["Retry-After"], "large bodies are in work" in content["error"]) == (503, "1", True)
        is_free.set()
        assert [read(client)[0] for client in clients] == [200] * len(clients)


def test_a_client_that_asks_first_sends_no_body_in_vain(server):
    with connect(server) as client:
        client.sendall(HEAD.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n") % len(BODY))
        assert client.recv(25, socket.MSG_WAITALL) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(BODY)
        assert read(client)[0] == 200
    asked = HEAD.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n") % 1001
    assert answer_to(server, asked, is_all=False)[0] == 413


def test_a_client_that_is_refused_can_still_send_and_read_why(server):
    """Without that, its body would meet a closed connection, and a reset take the answer with it."""
    body = b" " * 20_000_000
    with connect(server) as client:
        client.sendall(HEAD % len(body))
        client.sendall(body)
        assert read(client)[0] == 413


WHOLE = HEAD % len(BODY) + BODY


@pytest.mark.parametrize("sent", [0, 1, 10, 24, 40, len(WHOLE) - len(BODY), len(WHOLE) - 1, len(WHOLE)])
@pytest.mark.parametrize("is_reset", [False, True])
def test_clients_that_go_leave_nothing(server, sent, is_reset, capsys):
    with connect(server) as client:
        client.sendall(WHOLE[:sent])
        if is_reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert answer_to(server, WHOLE)[0] == 200
    wait_until(lambda: not server.clients)
    assert capsys.readouterr().err == ""


def test_the_accepting_thread_survives(server, monkeypatch, capsys):
    def fail() -> None:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(server, "service_actions", fail)
    wait_until(lambda: "MemoryError" in capsys.readouterr().err)
