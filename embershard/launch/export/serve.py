"""`embershard serve`: an exported model over HTTP, by Python's own server: JSON in, scores out."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embershard.errors import ConfigError, os_problem
from embershard.launch.arguments import make_parser, whole
from embershard.launch.ranks.stop_signals import StopAsked, stop_asked
from embershard.units import parse_bytes

if TYPE_CHECKING:  # it loads torch, and --help must answer at once
    from torch import Tensor

    from embershard.launch.export.serving_model import Model

_HELP = """Serve an exported model over HTTP: POST /predict takes samples as JSON,
{"rows": [{"age": 31.5, "user": 4711, "items": [3, 5]}]}, and GET /health says what is served. Ctrl-C or SIGTERM ends
it, after the requests in work. See docs/serving.md.

  embershard serve exported
  embershard serve exported --port 0 --max-body 64MiB
"""
_SECONDS_TO_SEND = 10  # for a client that stops in the middle
_SECONDS_TO_NOTICE = 0.2  # that the server is asked to end
_FORM = 'needed {"rows": [{...}, ...]}, an object per sample'


class Predictor:
    """An exported model, as the scores of samples. Several threads may ask; the model computes for one at a time.

    Args:
        folder: that `embershard export` wrote.

    Raises:
        ConfigError: it is none, or has no module.
    """

    def __init__(self, folder: Path) -> None:
        self.about = _read_about(folder)
        from embershard.launch.export.serving_model import load

        self._model: Model = load(folder)
        # One thread has one team of torch's threads, however many clients there are.
        self._pool = ThreadPoolExecutor(1, "embershard-serve")

    @property
    def columns(self) -> list[str]:
        """The keys of a sample."""
        return self._model.columns

    def predict(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return what an answer has: `scores` and, unless they are predicted numbers, `logits`, of each row; of several
        labels a list of each row's, in the order of `labels`.

        Raises:
            ValueError: the rows are not what the model needs.
        """
        model = self._model  # of the whole request
        outputs = None
        if rows:
            inputs = model.encode(rows)
            outputs = self._pool.submit(_forward, model, inputs).result()
        answer: dict[str, Any] = {"labels": self.about["labels"]} if len(self.about["labels"]) > 1 else {}
        if self.about["task"] == "regression":
            return answer | {"scores": [] if outputs is None else outputs.tolist()}
        logits, scores = ([], []) if outputs is None else (outputs.tolist(), outputs.sigmoid().tolist())
        return answer | {"scores": scores, "logits": logits}

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()


def _read_about(folder: Path) -> dict[str, Any]:
    file = folder / "export.json"
    try:
        about: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"{file}: not there, or no JSON; give a folder that embershard export wrote.") from None
    if about.get("format") != "module":
        raise ConfigError(f"{folder} has tables, and no module; export it with --format module.")
    return about


def _forward(model: Model, inputs: tuple[Tensor, list[Tensor], list[Tensor]]) -> Tensor:
    import torch

    with torch.no_grad():
        outputs: Tensor = model(*inputs)
    return outputs


class PredictionServer(ThreadingHTTPServer):
    """A server of predictions; a thread per request.

    Args:
        most_bytes: of a request's body.
    """

    daemon_threads = False  # `server_close` waits for requests in work
    request_queue_size = 128

    def __init__(self, predictor: Predictor, host: str, port: int, most_bytes: int) -> None:
        self.predictor, self.most_bytes = predictor, most_bytes
        super().__init__((host, port), _Handler)


class _RefusedError(Exception):
    """A request that is not answered with scores: its status, and the sentence that says what is needed."""


class _Handler(BaseHTTPRequestHandler):
    server: PredictionServer
    timeout = _SECONDS_TO_SEND

    def do_GET(self) -> None:
        predictor = self.server.predictor
        if self.path != "/health":
            self._answer(HTTPStatus.NOT_FOUND, {"error": f"{self.path}: needed GET /health or POST /predict"})
            return
        about = {name: predictor.about.get(name) for name in ("run", "step", "arch", "task", "labels", "dtype")}
        self._answer(HTTPStatus.OK, {"status": "ok", "columns": predictor.columns, **about})

    def do_POST(self) -> None:
        try:
            rows = self._rows()
            try:
                answer = self.server.predictor.predict(rows)
            except ValueError as error:
                raise _RefusedError(HTTPStatus.BAD_REQUEST, str(error)) from None
            self._answer(HTTPStatus.OK, answer)
        except _RefusedError as refused:
            status, message = refused.args
            self._answer(status, {"error": message})
        except OSError:
            self.close_connection = True  # the client has gone, or sends nothing
        except Exception:
            traceback.print_exc()
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "the server failed; its output says at what"})

    def _rows(self) -> list[Any]:
        """Return the samples of a request."""
        if self.path != "/predict":
            raise _RefusedError(HTTPStatus.NOT_FOUND, f"{self.path}: needed GET /health or POST /predict")
        length, most = self.headers.get("Content-Length", ""), self.server.most_bytes
        if not length.isdecimal():
            raise _RefusedError(HTTPStatus.LENGTH_REQUIRED, "needed the header Content-Length, the bytes of the body")
        body = self.rfile.read(min(int(length), 2 * most))  # a client that is cut off would not read the answer
        if int(length) > most:
            said = f"the body has {int(length):,} bytes; needed at most {most:,} (--max-body): send fewer rows at once"
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, said)
        try:
            rows = json.loads(body)["rows"]
        except (KeyError, TypeError):
            rows = None
        except (ValueError, RecursionError) as error:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"the body is no JSON ({error}); {_FORM}") from None
        if not isinstance(rows, list):
            raise _RefusedError(HTTPStatus.BAD_REQUEST, f"the body has no list of rows; {_FORM}")
        return rows

    def _answer(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        body = json.dumps(content, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing of each request."""


def main(argv: Sequence[str]) -> int:
    """Run `embershard serve`; return 0 once it is asked to end."""
    arguments = _parser().parse_args(argv)
    predictor = Predictor(arguments.folder)
    host, port = arguments.host, arguments.port
    try:
        server = PredictionServer(predictor, host, port, arguments.max_body)
    except (OSError, OverflowError) as error:
        problem = os_problem(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"--host {host} --port {port}: {problem}; choose another port, or 0 for any.") from None
    with stop_asked(_end_at_once) as asked, server:
        threading.Thread(target=server.serve_forever, name="embershard-serve").start()
        step, (_, port) = predictor.about["step"], server.server_address[:2]
        place = f"http://{host}:{port}: POST /predict, GET /health"
        print(f"Serving {arguments.folder} (step {step}) at {place}. Ctrl-C ends it.", flush=True)
        while not asked.number:  # an exception out of a signal could come anywhere in the server
            time.sleep(_SECONDS_TO_NOTICE)
        print("embershard: stopping after the requests in work.", file=sys.stderr)
        server.shutdown()
    predictor.close()
    return 0


def _end_at_once(asked: StopAsked) -> None:
    if asked.is_at_once:
        os._exit(128 + asked.number)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("serve", _HELP)
    parser.add_argument("folder", type=Path, metavar="EXPORT", help="folder that embershard export wrote")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default: %(default)s, this machine alone)"
    )
    parser.add_argument(
        "--port", type=whole, default=8000, metavar="N", help="port (default: %(default)s); 0: any free one"
    )
    parser.add_argument(
        "--max-body", type=parse_bytes, default="16MiB", metavar="BYTES", help="most bytes of a request (16MiB)"
    )
    return parser
