"""A cache that is built has its compiled loops: no step compiles one, or loads what was compiled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from embershard.cache import CacheConfig, loops
from embershard.distributed import process_group
from embershard.pipeline.config import LookAheadConfig
from embershard.training.config import RunConfig, TrainConfig
from embershard.training.trainer import Trainer
from tests.covering import matrix
from tests.ranks.commands import Process, forked, print_to
from tests.small_runs import small_data, small_run

pytestmark = pytest.mark.ranks
CACHES: dict[str, dict[str, Any]] = {
    "memory": {},
    "a file": {"host": "file", "host_bytes": 60_000},
    "fp16": {"host_dtype": "fp16"},
    "int8": {"host_dtype": "int8", "full_rows": 0},
}


def train(config: RunConfig, is_built_so: bool, said: Path) -> None:
    """Print the loops that are loaded in training, in a process that forgets those that it has."""
    print_to(said)
    for name in [name for name in sys.modules if name.startswith(f"{loops.__name__}.")]:
        del sys.modules[name]
    for name in [name for name, each in vars(loops).items() if hasattr(each, "py_func")]:
        delattr(loops, name)
    nothing = mock.patch.object(loops, "load_those_of_a_cache")
    with process_group("cpu") as ranks:
        if not is_built_so:
            nothing.start()
        trainer = Trainer(config, ranks)
        from numba.core.dispatcher import Dispatcher

        late, right = list[str](), Dispatcher.compile

        def compile_loop(self: Any, signature: Any) -> Any:
            num_loaded, found = len(self.overloads), right(self, signature)
            late.extend([self.py_func.__name__] * (len(self.overloads) - num_loaded))
            return found

        with mock.patch.object(Dispatcher, "compile", compile_loop):
            for _ in trainer.train():
                pass
        trainer.close()
        print("loaded late:", *sorted(set(late)), "end")


def said_of(folder: Path, cache: str, is_built_so: bool = True) -> str:
    settings = CACHES[cache] | ({"host_dir": str(folder)} if cache == "a file" else {})
    config = small_run(
        data=small_data(2000, scale=0.0004),
        cache=CacheConfig(ratio=0.05, **settings),
        look_ahead=LookAheadConfig(12, 2),
        train=TrainConfig(batch_size=30, max_steps=20),
    )
    said = folder / "said.txt"
    process = Process(forked().Process(target=train, args=(config, is_built_so, said)))
    try:
        process.wait(600)
    finally:
        process.kill()
    return said.read_text()


@pytest.mark.parametrize("cache", [matrix("memory"), "a file", matrix("fp16"), matrix("int8")])
def test_no_step_loads_a_loop(tmp_path: Path, cache: str) -> None:
    assert "loaded late: end" in said_of(tmp_path, cache)


@pytest.mark.matrix  # of what tells: the program fails loudly where no loop is known
def test_a_loop_that_a_step_loads_is_noticed(tmp_path: Path) -> None:
    """The control."""
    said = said_of(tmp_path, "memory", is_built_so=False)
    assert " find " in said
    assert " copy_rows " in said
