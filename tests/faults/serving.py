"""Errors at every operation of a replica that takes publications, and of a server that answers requests: after each of
them both go on, and nothing is served that was not published. `python -m tests.faults.serving [--points N] [--seed S]
[--memory ROWS]`.

An error is raised at a line (`tests.faults.injection`), in the thread that does the work: the replica's own, or that of
a request. The publications are of lives of `tests.faults.publications`, with a table of ids.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from embershard.distributed import changed_rows
from embershard.distributed.publish import published
from embershard.distributed.publish.published import DamagedError
from embershard.extras.publications import compact
from embershard.extras.serving import serving_model, serving_replica, serving_values
from embershard.extras.serving.server import prediction_server
from embershard.extras.serving.server.prediction_server import Limits, PredictionServer, Predictor
from embershard.extras.serving.serving_replica import Replica
from tests.faults.injection import Injector, no_collections
from tests.faults.publications import Life, _differs
from tests.unit.distributed.publications import program

States = dict[int, dict[str, Tensor]]
ERRORS: tuple[type[Exception], ...] = (OSError, MemoryError, RuntimeError, DamagedError)
_OF_REPLICA = frozenset(str(module.__file__) for module in (serving_replica, published, changed_rows, serving_model))
_OF_REQUEST = frozenset(str(module.__file__) for module in (prediction_server, serving_model, serving_values))
_ROWS = [{"user": 3, "item": 5}, {"user": None, "item": 17}]
_MOST_SECONDS = 60.0
_GIVES_BACK = ("if has_turn", "server.turns.release", "if has_room", "self.server.room.release")


def publish(root: Path, count: int, with_bases: bool = True) -> States:
    """Publish a base, as many deltas, and a base of each second of these; return the trainer's state at each."""
    life, states = Life(root, None, False, 1, program(), every_steps=1, base_every=count + 1), States()
    for seq in range(count + 1):
        if seq:
            life._train()
            life.step = seq
            life.publisher.cut(seq)
            list(life.publisher.reports())
        states[seq] = {name: tensor.clone() for name, tensor in life.state().items()}
    list(life.publisher.end(count))
    for seq in range(2, count + 1, 2) if with_bases else ():
        compact.make_base(root / "published", seq)
    return states


class Follower:
    """A replica that follows a folder, a try at a time, with errors in its thread.

    Args:
        source: of the publications that come into its folder.
        folder: new.
        states: of the trainer.
    """

    def __init__(self, source: Path, folder: Path, states: States) -> None:
        self._source, self._folder, self._states = source, folder, states
        self._waits, self._turn = threading.Event(), threading.Semaphore(0)
        self.put("base_0")
        self._injector: Injector | None = None
        self.replica = Replica(folder)
        self._update = self.replica.update
        self.replica.update = self._next  # type: ignore[method-assign]
        self.replica.follow(every_seconds=0.0005)

    def close(self) -> None:
        """End it."""
        self._injector, self._update = None, lambda: 0
        self._turn.release()
        self.replica.close()

    def _next(self) -> int:
        self._waits.set()
        self._turn.acquire()
        return self._update() if self._injector is None else self._injector.run(self._update)

    def put(self, name: str) -> None:
        """Put a publication into its folder, whole, in place of the last one: as many lines run for each."""
        for path in self._folder.glob("*_*"):
            if path.name != "base_0":
                shutil.rmtree(path)
        partial = self._folder / f"{name}.partial"
        shutil.copytree(self._source / name, partial)
        partial.rename(self._folder / name)

    def lines(self, name: str) -> list[str]:
        """Return the lines that it runs to take a publication."""
        self.put(name)
        with self._injected(None, OSError) as injector:
            self._once()
        return [place for _, place in injector.events]

    @contextmanager
    def _injected(self, at: int | None, error: type[Exception]) -> Iterator[Injector]:
        self._injector = Injector(at, error, _OF_REPLICA)
        try:
            yield self._injector
        finally:
            self._injector = None

    def _once(self) -> None:
        self._wait()
        self._waits.clear()
        self._turn.release()
        self._wait()

    def _wait(self) -> None:
        while not self._waits.wait(0.5):
            assert "replica" in {thread.name for thread in threading.enumerate()}, "the replica's thread is dead"

    def point(self, name: str, at: int, error: type[Exception]) -> tuple[str, str]:
        """Let an error be raised at a line while it takes a publication; return where, and what is wrong after it."""
        replica, seq = self.replica, int(name.partition("_")[2])
        self.put(name)
        failures = replica.failures
        with self._injected(at, error) as injector:
            self._once()
        if injector.raised is None:
            return injector.where, "the line was not reached"
        if replica.have.seq != seq and (not replica.problem or replica.failures == failures):
            return injector.where, "it is stale without a word"
        if replica.problem and str(self._folder) not in replica.problem:
            return injector.where, f"it names no folder: {replica.problem}"
        with replica.state() as (_, have):  # where the change was half-way, it is whole now
            served = self._states[have.seq]
        if problem := _differs(replica, served):
            return injector.where, f"right after it: {problem}"
        self._once()
        if replica.have.seq != seq or replica.problem:
            return injector.where, f"it has {replica.have.name}, needed {name}: {replica.problem}"
        return injector.where, _differs(replica, self._states[seq])


def start_point(folder: Path, states: States, at: int, error: type[Exception]) -> tuple[str, str]:
    """Let an error be raised at a line while a replica starts: it starts with the newest state, or says why not."""
    injector = Injector(at, error, _OF_REPLICA)
    try:
        replica = injector.run(lambda: Replica(folder))
    except Exception as raised:
        return injector.where, "" if "injected" in f"{raised}{raised.__cause__}" else f"it says {raised!r}"
    return injector.where, _differs(replica, states[replica.have.seq])


class Asked:
    """A server of publications that has room for one request: one that leaves something behind is noticed.

    Args:
        folder: of the publications.
    """

    def __init__(self, folder: Path) -> None:
        self._injector: Injector | None = None
        self._predictor = Predictor(folder)
        with mock.patch.multiple(prediction_server, _LARGE_AT_ONCE=1, _PARSED_AT_ONCE=1):
            self.server = PredictionServer(self._predictor, "127.0.0.1", 0, Limits(requests=1, seconds=20))
        answer = self.server.finish_request
        self.server.finish_request = lambda *given: self._run(lambda: answer(*given))  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()
        self.right = self._ask()  # from then on the model has its thread
        self._threads = threading.active_count() - len(self.server.clients)
        self._ends()

    def close(self) -> None:
        """End it."""
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()
        self._predictor.close()

    def _run(self, answer: Callable[[], None]) -> None:
        injector = self._injector
        if injector is None:
            answer()
        else:
            injector.run(answer)

    def _ask(self) -> tuple[int, Any]:
        """Ask with a body that counts as a large one; return the status, 0 for no answer, and the answer."""
        body = json.dumps({"rows": _ROWS, "filler": "a" * 70_000})
        connection = http.client.HTTPConnection(*self.server.server_address[:2], timeout=20)  # type: ignore
        try:
            connection.request("POST", "/predict", body)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (http.client.HTTPException, OSError):
            return 0, None
        finally:
            connection.close()

    def lines(self) -> list[int]:
        """Return the numbers of the lines that a request runs, but for those that give something back: they do not
        fail, as they take no memory."""
        self._injector = injector = Injector(None, files=_OF_REQUEST)
        self._ask()
        self._ends()
        self._injector = None
        file = Path(str(prediction_server.__file__))
        lines = enumerate(file.read_text().splitlines(), 1)
        gives_back = {f"{file.name}:{number}" for number, line in lines if line.strip().startswith(_GIVES_BACK)}
        return [at for at, (_, place) in enumerate(injector.events) if place.split()[0] not in gives_back]

    def point(self, at: int, error: type[Exception]) -> tuple[str, str]:
        """Let an error be raised at a line of a request; return where, and what is wrong after it."""
        self._injector = injector = Injector(at, error, _OF_REQUEST)
        status, content = self._ask()
        self._ends()
        self._injector = None
        if injector.raised is None:
            return injector.where, "the line was not reached"
        if (status, content) != self.right and status and "error" not in content:
            return injector.where, f"the answer is {status} {content}"
        if "Traceback" in str(content):
            return injector.where, "the client got a traceback"
        if (found := self._ask()) != self.right:
            return injector.where, f"the next answer is {found}, needed {self.right}"
        self._ends()
        more = threading.active_count() - self._threads
        return injector.where, f"{more} more threads" if more > 0 else ""

    def _ends(self) -> None:
        ends = time.monotonic() + _MOST_SECONDS
        while self.server.clients or threading.active_count() > self._threads:
            assert time.monotonic() < ends, "a request does not end"
            time.sleep(0.0005)


def try_points(points: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Try so many points of each kind, chosen by chance; return how many were tried, and what was wrong."""
    chance, tried, wrong = random.Random(seed), Counter[str](), list[str]()

    def note(kind: str, found: tuple[str, str]) -> None:
        tried[kind] += 1
        if found[1]:
            wrong.append(f"{kind}: {found[0]}: {found[1]}")

    with tempfile.TemporaryDirectory() as folder, no_collections():
        root = Path(folder)
        states = publish(root, points + 2)
        source = root / "published"
        for kind, names in (
            ("delta", [f"delta_{n}" for n in range(1, points + 2)]),
            ("base", [f"base_{n}" for n in range(2, points + 2, 2)]),
        ):
            follower = Follower(source, root / kind, states)
            lines = follower.lines(names[0])
            for name in names[1:]:
                note(kind, follower.point(name, chance.randrange(len(lines)), chance.choice(ERRORS)))
            follower.close()
        counting = Injector(None, files=_OF_REPLICA)
        counting.run(lambda: Replica(root / "base"))
        for _ in range(-(-points // 4)):
            at = chance.randrange(counting.count)
            note("start", start_point(root / "base", states, at, chance.choice(ERRORS)))
        asked = Asked(root / "base")
        lines = asked.lines()
        for _ in range(points):
            note("request", asked.point(chance.choice(lines), chance.choice(ERRORS)))
        asked.close()
    return tried, wrong


class Process:
    """A server of publications in a process of its own.

    Args:
        folder: of the publications.
        words: more of the command.
    """

    def __init__(self, folder: Path, *words: str) -> None:
        command = [sys.executable, "-m", "embershard", "serve", str(folder), "--port", "0", *words]
        self.program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        found = re.search(r"http://127.0.0.1:(\d+): ", self.program.stdout.readline())
        assert found, self.program.stderr and self.program.stderr.read()
        self.port = int(found[1])

    def peak(self) -> int:
        """Return the most bytes of memory that it had so far."""
        text = Path(f"/proc/{self.program.pid}/status").read_text()
        return 1024 * int(text.partition("VmHWM:")[2].split()[0])

    def ask(self, clients: int, body: bytes) -> list[int]:
        """Ask with so many clients at once; return the numbers of scores in the answers, 0 for other answers."""

        def one(_: int) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
            connection.request("POST", "/predict", body)
            return len(json.loads(connection.getresponse().read()).get("scores", ()))

        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(one, range(clients)))

    def close(self) -> str:
        """End it; return what it said on stderr."""
        self.program.send_signal(signal.SIGTERM)
        said = self.program.communicate(timeout=120)[1]
        assert self.program.returncode == 0, said
        return said


@contextmanager
def dripping(port: int) -> Iterator[None]:
    """Return a context in which a client sends a body byte by byte."""
    is_over = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not is_over.wait(0.05):
                client.sendall(b" ")

    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"POST /predict HTTP/1.1\r\nContent-Length: 60000\r\nExpect: 100-continue\r\n\r\n")
        assert client.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 100"  # it reads the body
        thread = threading.Thread(target=drip)
        thread.start()
        yield
        is_over.set()
        thread.join()


def memory(num_rows: int) -> dict[str, Any]:
    """Return how many bytes a server has before bodies of so many rows, and at most with one, with as many as it reads
    at once, and with 50."""
    with tempfile.TemporaryDirectory() as folder:
        publish(Path(folder), 0)
        server = Process(Path(folder) / "published", "--request-seconds", "600")
        body = json.dumps({"rows": [_ROWS[number % 2] for number in range(num_rows)]}).encode()
        peaks = {"body": len(body), "idle": server.ask(1, b'{"rows": []}') and server.peak()}
        for clients in (1, prediction_server._LARGE_AT_ONCE, 50):
            answers = server.ask(clients, body)
            assert answers == [num_rows] * clients, answers
            peaks[str(clients)] = server.peak()
        server.close()
    return peaks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.serving", description=__doc__)
    parser.add_argument("--points", type=int, default=300, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", type=int, metavar="ROWS", help="only peaks of memory, with bodies of so many rows")
    arguments = parser.parse_args()
    if arguments.memory:
        print(json.dumps(memory(arguments.memory)))
        return 0
    torch.set_num_threads(1)
    started = time.perf_counter()
    tried, wrong = try_points(arguments.points, arguments.seed)
    print("\n".join(wrong))
    counts = ", ".join(f"{count} {kind}" for kind, count in tried.items())
    print(f"{counts} in {time.perf_counter() - started:.0f} s: {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
