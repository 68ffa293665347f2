"""`embershard serve`: an exported model, or what a run publishes, over HTTP, by Python's own server: JSON in, scores
out."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embershard.errors import ConfigError, os_problem
from embershard.launch.arguments import make_parser, positive, whole
from embershard.launch.stop_signals import StopAsked, stop_asked
from embershard.serving.prediction_server import Limits, PredictionServer
from embershard.units import parse_bytes

if TYPE_CHECKING:  # it loads torch, and --help must answer at once
    from torch import Tensor

    from embershard.serving.serving_model import Model

_HELP = """Serve an exported model over HTTP: POST /predict takes samples as JSON,
{"rows": [{"age": 31.5, "user": 4711, "items": [3, 5]}]}, and GET /health says what is served. Of the publish.folder
of a run it serves the newest state, and takes new ones while it answers. Ctrl-C or SIGTERM ends it, after the requests
in work, or in --stop-seconds. See docs/serving.md and docs/online.md.

  embershard serve exported
  embershard serve published
  embershard serve exported --port 0 --max-body 64MiB
"""
_SECONDS_TO_NOTICE = 0.2  # that the server is asked to end
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
        from embershard.distributed.publish.published import PublicationError, published
        from embershard.serving.serving_model import load
        from embershard.serving.serving_replica import Replica

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
    import torch

    with torch.no_grad():
        outputs: Tensor = model(*inputs)
    return outputs


def main(argv: Sequence[str]) -> int:
    """Run `embershard serve`; return 0 once it is asked to end."""
    arguments = _parser().parse_args(argv)
    predictor = Predictor(arguments.folder)
    host, port = arguments.host, arguments.port
    limits = Limits(arguments.max_body, arguments.max_requests, arguments.request_seconds)
    try:
        server = PredictionServer(predictor, host, port, limits)
    except (OSError, OverflowError) as error:
        problem = os_problem(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(f"--host {host} --port {port}: {problem}; choose another port, or 0 for any.") from None
    last = threading.Timer(arguments.stop_seconds, _end_with, [server])  # whatever clients do, or a model computes
    last.daemon = True
    with stop_asked(_end_at_once) as asked, server:
        threading.Thread(target=server.serve_forever, name="embershard-serve").start()
        try:
            seen, (_, port) = predictor.about, server.server_address[:2]
            place = f"http://{host}:{port}: POST /predict, GET /health"
            print(f"Serving {arguments.folder} (step {seen['step']}) at {place}. Ctrl-C ends it.", flush=True)
            while not asked.number:  # an exception out of a signal could come anywhere in the server
                time.sleep(_SECONDS_TO_NOTICE)
                seen = _say_what_changed(seen, predictor.about)
            most = f"at most {arguments.stop_seconds} seconds (--stop-seconds)"
            print(f"embershard: stopping after the requests in work, in {most}.", file=sys.stderr)
        finally:  # also where nobody reads what it prints
            last.start()
            server.shutdown()
    predictor.close()
    last.cancel()
    return 0


def _end_with(server: PredictionServer) -> None:
    """End the process with the requests that are left."""
    with suppress(OSError):
        print(f"embershard: stopped with {len(server.clients)} requests that were not answered.", file=sys.stderr)
    os._exit(0)


def _say_what_changed(seen: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Print which state is served now, and why it may not be the newest, unless that was said; return `now`."""
    if now["step"] != seen["step"]:
        print(f"Serving step {now['step']}.", flush=True)
    problem, before = now.get("problem"), seen.get("problem")
    if problem and problem != before:
        age = f"published {now['age_seconds']:.0f} seconds ago"
        print(f"embershard: still step {now['step']}, {age}: {problem}", file=sys.stderr)
    if before and not problem:
        print(f"embershard: step {now['step']} is the newest again.", file=sys.stderr)
    return now


def _end_at_once(asked: StopAsked) -> None:
    if asked.is_at_once:
        os._exit(128 + asked.number)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("serve", _HELP)
    parser.add_argument(
        "folder", type=Path, metavar="EXPORT", help="folder that embershard export wrote, or publish.folder"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default: %(default)s, this machine alone)"
    )
    parser.add_argument(
        "--port", type=whole, default=8000, metavar="N", help="port (default: %(default)s); 0: any free one"
    )
    parser.add_argument(
        "--max-body", type=parse_bytes, default="16MiB", metavar="BYTES", help="most bytes of a request (16MiB)"
    )
    for name, default, unit, text in (
        ("--max-requests", 64, "N", "predictions at once; more are refused"),
        ("--request-seconds", 30, "S", "for a request to arrive, and again for its answer to be taken"),
        ("--stop-seconds", 10, "S", "for the requests in work once it is asked to end"),
    ):
        parser.add_argument(name, type=positive, default=default, metavar=unit, help=f"{text} (default: %(default)s)")
    return parser
