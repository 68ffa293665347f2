"""Predictions over HTTP, of a model on a CPU by Python's own server: JSON in, scores out, and limits for what clients
may take.

A connection has one request. A thread answers it; the thread that accepts connections cuts off those that are late.
"""

from __future__ import annotations

import json
import math
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from embershard.distributed.publish.published import PublicationError, published
from embershard.errors import ConfigError
from embershard.extras.serving.serving_model import Model, load
from embershard.extras.serving.serving_replica import Replica

_METHODS = {"/predict": "POST", "/health": "GET"}
_FORM = 'needed {"rows": [{...}, ...]}, an object per sample'
_TRY_AGAIN = {"Retry-After": "1"}
_LARGE_BYTES = 64 << 10  # of a body; so many as there may be requests at once take no memory to speak of
_LARGE_AT_ONCE = 8  # read, or waiting to be parsed
_PARSED_AT_ONCE = 2  # a row takes 50 times as much memory parsed as in its text
_MORE_CONNECTIONS = 64  # than requests at once: for GET /health, and to say that there are too many
_SECONDS_TO_LEAVE = 5  # for a client that still sends what is not read
_SECONDS_TO_NOTICE = 0.2  # that a client is late, or that the server is asked to end
_MOST_CHARACTERS = 2000  # of an error


@dataclass(frozen=True)
class Limits:
    """What clients may take.

    Attributes:
        body_bytes: of a request.
        requests: at once; others are refused.
        seconds: until a request has arrived, the time in which the server lets it wait not counted; and as many for the
            client to take the answer.
    """

    body_bytes: int = 16 << 20
    requests: int = 64
    seconds: float = 30.0


class Predicts(Protocol):
    """What a server asks. `predict` raises ValueError for rows that are not what the model needs."""

    @property
    def health(self) -> dict[str, Any]: ...

    def predict(self, rows: list[Any]) -> dict[str, Any]: ...


@dataclass(eq=False)
class _Client:
    """A connection.

    Attributes:
        until: when it is late, in seconds of the monotonic clock.
        does: what it is at; "waits" for the server.
        is_late: it was, and is not read any more.
    """

    connection: socket.socket
    until: float
    does: Literal["asks", "sends", "waits", "takes"] = "asks"
    is_late: bool = False

    def begin(self, what: Literal["sends", "waits", "takes"], seconds: float = math.inf) -> None:
        """Note what it is at now, and for how long it may be."""
        self.does, self.until = what, time.monotonic() + seconds

    def cut_off(self) -> None:
        """Read no more from a client that is late, so that it gets an answer; or end a connection that takes none."""
        is_read = self.does in ("asks", "sends")
        self.is_late, self.until = True, math.inf
        with suppress(OSError):  # it has gone
            self.connection.shutdown(socket.SHUT_RD if is_read else socket.SHUT_RDWR)


@dataclass
class _RefusedError(Exception):
    """A request that is not answered with scores: its status, and the sentence that says what is needed."""

    status: HTTPStatus
    message: str
    headers: dict[str, str] = field(default_factory=dict)


class _GoneError(Exception):
    """The client has gone."""


class PredictionServer(ThreadingHTTPServer):
    """A server of predictions.

    Args:
        predictor: that it asks.
        host, port: to listen at; port 0 is any free one.
    """

    daemon_threads = False  # `server_close` waits for requests in work
    request_queue_size = 128

    def __init__(self, predictor: Predicts, host: str, port: int, limits: Limits) -> None:
        self.predictor, self.limits = predictor, limits
        self.clients: dict[socket.socket, _Client] = {}
        self.turns = threading.BoundedSemaphore(limits.requests)
        self.room = threading.BoundedSemaphore(_LARGE_AT_ONCE)
        self.parsing = threading.BoundedSemaphore(_PARSED_AT_ONCE)
        self._is_over = False
        super().__init__((host, port), _Handler)

    def serve_forever(self, poll_interval: float = _SECONDS_TO_NOTICE) -> None:
        """Answer until `shutdown`, whatever fails."""
        while True:
            try:
                super().serve_forever(poll_interval)
            except Exception:
                traceback.print_exc()
                time.sleep(poll_interval)
            if self._is_over:
                return

    def shutdown(self) -> None:
        """Accept nothing more."""
        self._is_over = True
        super().shutdown()

    def server_close(self) -> None:
        """Wait for the requests that have begun; connections without one are closed."""
        self.socket.close()
        for client in list(self.clients.values()):
            if client.does == "asks":
                client.cut_off()
        while self.clients:
            self.service_actions()
            time.sleep(_SECONDS_TO_NOTICE / 4)
        super().server_close()

    def service_actions(self) -> None:
        """Cut off the clients that are late."""
        now = time.monotonic()
        for client in list(self.clients.values()):
            if now >= client.until:
                client.cut_off()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, if that is not one too many."""
        if len(self.clients) >= self.limits.requests + _MORE_CONNECTIONS:
            with suppress(OSError):
                request.setblocking(False)
                request.send(_response(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "too many connections"}, _TRY_AGAIN))
            self.shutdown_request(request)
            return
        self.clients[request] = _Client(request, time.monotonic() + self.limits.seconds)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.clients.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print what was raised in a thread, unless a client has gone."""
        if not isinstance(sys.exc_info()[1], OSError):
            traceback.print_exc()


class _Handler(BaseHTTPRequestHandler):
    server: PredictionServer
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # so that a line that is no request gets a status, too
    raw_requestline = b""

    def setup(self) -> None:
        super().setup()
        self._client, self._is_unread, self._is_answered = self.server.clients[self.request], True, False

    def handle(self) -> None:
        """Answer one request."""
        self.handle_one_request()
        if self.raw_requestline and self._is_unread:  # a connection that is closed before would take the answer with it
            self._client.begin("takes", _SECONDS_TO_LEAVE)
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)
                while self.connection.recv(_LARGE_BYTES):
                    pass

    def handle_expect_100(self) -> bool:
        """Say "100 Continue" when the body is read, not before."""
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse what is no request, or has another method."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._respond()
        elif self._client.is_late:
            self._answer(HTTPStatus.REQUEST_TIMEOUT, {"error": self._too_slow()})
        else:
            self._answer(HTTPStatus(code), {"error": message or HTTPStatus(code).phrase})

    def do_GET(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._respond()

    def _respond(self) -> None:
        try:
            self._is_unread = self.headers.get("Content-Length", "0") != "0" or "Transfer-Encoding" in self.headers
            path = self.path.partition("?")[0]
            if self._client.is_late:
                raise _RefusedError(HTTPStatus.REQUEST_TIMEOUT, self._too_slow())
            if path not in _METHODS:
                raise _RefusedError(HTTPStatus.NOT_FOUND, f"{path:.100}: needed GET /health or POST /predict")
            if (needed := _METHODS[path]) != self.command:
                said = f"{self.command:.100} {path}: needed {needed} {path}"
                raise _RefusedError(HTTPStatus.METHOD_NOT_ALLOWED, said, {"Allow": needed})
            if path == "/health":
                self._answer(HTTPStatus.OK, self.server.predictor.health)
            else:
                self._predict()
        except _RefusedError as refused:
            self._answer(refused.status, {"error": refused.message}, refused.headers)
        except _GoneError:
            self._is_unread = False
        except Exception:
            traceback.print_exc()
            failed = {"error": "the server failed; its output says at what"}
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, failed)

    def _predict(self) -> None:
        size, server, has_turn = self._body_size(), self.server, False
        try:
            has_turn = server.turns.acquire(blocking=False)
            if not has_turn:
                said = f"{server.limits.requests} requests are in work (--max-requests); try again"
                raise _RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, said, _TRY_AGAIN)
            with self._room(size):
                body = self._body(size)
                with server.parsing:
                    data = _response(HTTPStatus.OK, self._answer_to(body))
                del body
                self._send(data)
        finally:
            if has_turn:
                server.turns.release()

    def _body_size(self) -> int:
        lengths, most = set(self.headers.get_all("Content-Length", [])), self.server.limits.body_bytes
        if not lengths or "Transfer-Encoding" in self.headers:
            said = "needed the header Content-Length, the bytes of the body; a body in chunks is not taken"
            raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, said)
        length = lengths.pop()
        if lengths or not (length.isascii() and length.isdecimal()):
            said = (
                f"Content-Length is {length!r:.40}{' and another one' * bool(lengths)}; needed a whole number of bytes"
            )
            raise _RefusedError(HTTPStatus.BAD_REQUEST, said)
        if len(length) > 18 or int(length) > most:
            has = f"{int(length):,}" if len(length) <= 18 else f"a number of {len(length)} digits of"
            said = f"the body has {has} bytes; needed at most {most:,} (--max-body): send fewer rows at once"
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, said)
        return int(length)

    @contextmanager
    def _room(self, size: int) -> Iterator[None]:
        """Return a context in which a body of this size may be held. Until then it is not read, and stays where it
        is."""
        if size <= _LARGE_BYTES:
            yield
            return
        left, has_room = self._client.until - time.monotonic(), False
        self._client.begin("waits")
        try:
            has_room = self.server.room.acquire(timeout=self.server.limits.seconds)
            if not has_room:
                said = f"{_LARGE_AT_ONCE} large bodies are in work; try again, or send fewer rows at once"
                raise _RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, said, _TRY_AGAIN)
            self._client.begin("sends", left)
            yield
        finally:
            if has_room:
                self.server.room.release()

    def _body(self, size: int) -> bytes:
        self._client.does = "sends"
        try:
            if self.headers.get("Expect", "").lower() == "100-continue":
                self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = self.rfile.read(size)
        except OSError as error:
            raise _GoneError from error
        if len(body) == size:
            self._client.begin("waits")
            self._is_unread = False
            return body
        if self._client.is_late:
            raise _RefusedError(HTTPStatus.REQUEST_TIMEOUT, self._too_slow())
        said = f"the body ended after {len(body):,} bytes; needed the {size:,} of its Content-Length"
        raise _RefusedError(HTTPStatus.BAD_REQUEST, said)

    def _too_slow(self) -> str:
        seconds = self.server.limits.seconds
        return f"the request did not arrive in {seconds:g} seconds (--request-seconds), or the server ends"

    def _answer_to(self, body: bytes) -> dict[str, Any]:
        try:
            rows = json.loads(body)["rows"]
        except (KeyError, TypeError):
            rows = None
        except (ValueError, RecursionError) as error:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"the body is no JSON ({error}); {_FORM}") from None
        if not isinstance(rows, list):
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"the body has no list of rows; {_FORM}")
        try:
            return self.server.predictor.predict(rows)
        except ValueError as error:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, str(error)) from None

    def _answer(self, status: HTTPStatus, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        """Send an answer, unless one has begun; a client that has gone gets none."""
        with suppress(_GoneError):
            self._send(_response(status, content, headers or {}))

    def _send(self, data: bytes) -> None:
        if self._is_answered:
            return
        self._is_answered = True
        self._client.begin("takes", self.server.limits.seconds)
        try:
            self.wfile.write(data if self.command != "HEAD" else data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
        except OSError as error:
            raise _GoneError from error

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""


def _response(status: HTTPStatus, content: dict[str, Any], headers: dict[str, str] | None = None) -> bytes:
    """Return the bytes of an answer."""
    if len(error := content.get("error", "")) > _MOST_CHARACTERS:
        content = {**content, "error": f"{error[:_MOST_CHARACTERS]}..."}
    body = json.dumps(content, allow_nan=False).encode()
    own = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"{name}: {value}" for name, value in {**own, **(headers or {})}.items()]
    return "\r\n".join([f"HTTP/1.1 {status.value} {status.phrase}", *lines, "", ""]).encode() + body


_HEALTH = ("run", "step", "arch", "task", "labels", "dtype", "problem", "failures", "failures_in_row", "age_seconds")


class Predictor:
    """An exported model, as the scores of samples. Several threads may ask; the model computes for one at a time.

    Args:
        folder: that `embershard export` wrote; or of publications, whose newest state is served.
        every_seconds: to look for new publications.

    Raises:
        ConfigError: it is none, or has no module.
    """

    def __init__(self, folder: Path, every_seconds: float = 1.0) -> None:
        bases = published(folder, "base")
        self._about = _read_about(bases[-1][1] if bases else folder)
        self._replica: Replica | None = None
        if bases:
            try:
                self._replica = Replica(folder)
            except PublicationError as error:
                raise ConfigError(f"{error}. `embershard publish verify {folder}` tells what is whole.") from None
            self._replica.follow(every_seconds)
        self._model: Model | None = None if bases else load(folder)
        # One thread has one team of torch's threads, however many clients there are.
        self._pool = ThreadPoolExecutor(1, "embershard-serve")

    @property
    def about(self) -> dict[str, Any]:
        """What is served now; of publications also how old it is, and what prevents that it is the newest."""
        if (replica := self._replica) is None:
            return self._about
        names = ("problem", "failures", "failures_in_row")
        now = {"step": replica.have.step, "age_seconds": round(replica.age_seconds, 3)}
        return self._about | now | {name: getattr(replica, name) for name in names}

    @property
    def health(self) -> dict[str, Any]:
        """The answer to GET /health: `status` is "stale" where what is served may not be the newest, else "ok"."""
        about = {name: value for name, value in self.about.items() if name in _HEALTH}
        model = self._model or self._replica
        assert model is not None
        return {"status": "stale" if about.get("problem") else "ok", "columns": model.columns, **about}

    @contextmanager
    def _state(self) -> Iterator[tuple[Model, int | None]]:
        """Return a context in which the model stays as it is, with its step if new ones come."""
        if self._replica is None:
            assert self._model is not None
            yield self._model, None
        else:
            with self._replica.state() as (model, have):
                yield model, have.step

    def predict(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what an answer has: `scores` and, unless they are predicted numbers, `logits`, of each row; of several
        labels a list of each row's, in the order of `labels`; the logit of a predicted number is None. Of publications,
        also the `step` of the state.

        Raises:
            ValueError: the rows are not what the model needs.
        """
        outputs = None
        encode = (self._model or self._replica).encode  # type: ignore[union-attr]
        inputs = encode(rows) if rows else None
        with self._state() as (model, step):
            if inputs is not None:
                outputs = self._pool.submit(_forward, model, inputs).result()
        answer: dict[str, Any] = {} if step is None else {"step": step}
        answer |= {"labels": self._about["labels"]} if len(self._about["labels"]) > 1 else {}
        task = self._about["task"]
        if task == "regression":
            return answer | {"scores": [] if outputs is None else outputs.tolist()}
        if outputs is None:
            return answer | {"scores": [], "logits": []}
        probabilities, logits = outputs.sigmoid(), outputs.tolist()
        if isinstance(task, list) and "regression" in task:
            are_numbers = [each == "regression" for each in task]
            probabilities[:, are_numbers] = outputs[:, are_numbers]
            logits = [[None if number else x for number, x in zip(are_numbers, row, strict=True)] for row in logits]
        return answer | {"scores": probabilities.tolist(), "logits": logits}

    def close(self) -> None:
        """End the threads."""
        if self._replica is not None:
            self._replica.close()
        self._pool.shutdown()


def _read_about(folder: Path) -> dict[str, Any]:
    file = folder / "export.json"
    try:
        about: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(
            f"{file}: not there, or no JSON; give a folder that embershard export wrote, or a publish.folder "
            "that has its first base (base_0)."
        ) from None
    if about.get("format") != "module":
        raise ConfigError(f"{folder} has tables, and no module; export it with --format module.")
    return about


def _forward(model: Model, inputs: tuple[Tensor, list[Tensor], list[Tensor]]) -> Tensor:
    with torch.no_grad():
        outputs: Tensor = model(*inputs)
    return outputs
