"""`embershard serve`: an exported model, or what a run publishes, over HTTP, by Python's own server: JSON in, scores
out."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from embershard.errors import ConfigError, os_problem
from embershard.launch.arguments import make_parser, positive, whole
from embershard.launch.stop_signals import stop_asked
from embershard.settings.files import RUN_CONFIG
from embershard.units import parse_bytes

if TYPE_CHECKING:  # it loads torch, and --help must answer at once
    from embershard.extras.serving.server.prediction_server import PredictionServer

_HELP = """Serve an exported model over HTTP: POST /predict takes samples as JSON,
{"rows": [{"age": 31.5, "user": 4711, "items": [3, 5]}]}, and GET /health says what is served. Of the publish.folder
of a run it serves the newest state, and takes new ones while it answers. Ctrl-C or SIGTERM ends it, after the requests
in work, or in --stop-seconds. See docs/serving.md and docs/online.md.

  embershard serve exported
  embershard serve published
  embershard serve exported --port 0 --max-body 64MiB
"""
_SECONDS_TO_NOTICE = 0.2  # that the server is asked to end


def main(argv: Sequence[str]) -> int:
    """Run `embershard serve`; return 0 once it is asked to end."""
    arguments = _parser().parse_args(argv)
    from embershard.extras.serving.server.prediction_server import Limits, PredictionServer, Predictor

    if (arguments.folder / RUN_CONFIG).is_file():
        run = shlex.quote(str(arguments.folder))
        raise ConfigError(
            f"{arguments.folder} is the folder of a run. Export it: embershard export {run} -o NEW; then serve NEW."
        )
    predictor = Predictor(arguments.folder)
    host, port = arguments.host, arguments.port
    limits = Limits(arguments.max_body, arguments.max_requests, arguments.request_seconds)
    try:
        server = PredictionServer(predictor, host, port, limits)
    except (OSError, OverflowError) as error:
        problem = os_problem(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"--host {host} --port {port}: {str(problem).rstrip('.')}; choose another port, or 0 for any."
        ) from None
    last = threading.Timer(arguments.stop_seconds, _end_with, [server])  # whatever clients do, or a model computes
    last.daemon = True
    with stop_asked(lambda asked: os._exit(128 + asked.number) if asked.is_at_once else None) as asked, server:
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
    last.join()  # it holds the server, and would free the model's tensors while the interpreter ends: an abort
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


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("serve", _HELP)
    text = "folder that embershard export wrote, or publish.folder"
    parser.add_argument("folder", type=Path, metavar="EXPORT", help=text)
    text = "address to listen at (default: %(default)s, this machine alone)"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    text = "port (default: %(default)s); 0: any free one"
    parser.add_argument("--port", type=whole, default=8000, metavar="N", help=text)
    text = "most bytes of a request (16MiB)"
    parser.add_argument("--max-body", type=parse_bytes, default="16MiB", metavar="BYTES", help=text)
    for name, default, unit, text in (
        ("--max-requests", 64, "N", "predictions at once; more are refused"),
        ("--request-seconds", 30, "S", "for a request to arrive, and again for its answer to be taken"),
        ("--stop-seconds", 10, "S", "for the requests in work once it is asked to end"),
    ):
        parser.add_argument(name, type=positive, default=default, metavar=unit, help=f"{text} (default: %(default)s)")
    return parser
