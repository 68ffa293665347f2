"""Runs that do not fit the machine, or that go wrong while they train."""

import errno
from typing import Any
from unittest import mock

from embershard.extras.publications import write
from tests.unit.troubleshooting.case import Case, Outcome, rank

TITLE = "Training"
_SMALL = """
data.synthetic = { num_samples = 2000, scale = 0.0001 }
data.num_workers = 0
train.batch_size = 100
train.max_steps = 9
cache.ratio = 0.5
"""
_LARGE = """
data.synthetic = { num_samples = 2000, scale = 100.0 }
model = { embedding_dim = 512, dense_arch_layer_sizes = [512] }
train.batch_size = 100
train.init = "torchrec"
"""
_RUN = ("--config", "run.toml", "--run-dir", "mine")


def _publish_on_a_full_disk() -> Outcome:
    """A run whose deltas find the disk full, but whose base did not."""
    writes = write._write_tensors

    def fails(path: Any, tensors: Any) -> Any:
        if "delta_" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return writes(path, tensors)

    settings = _SMALL + 'publish = { folder = "published", every_steps = 9 }\n'
    with mock.patch.object(write, "_write_tensors", fails):
        return rank(*_RUN, files={"run.toml": settings})()


CASES = [
    Case(
        "The tables do not fit the memory",
        rank(*_RUN, files={"run.toml": _LARGE}),
        "[rank<number>]: ConfigError: This run does not fit: its one rank on this machine needs <size> of host memory, "
        "and <size> of <size> are available (<limit>). It is for weights <size>, <other uses>; the largest table is "
        "'t_C3' with <number> rows of <number> bytes. Each of these fits: <changes>.",
        "Make one of the changes that it names.",
        code=1,
    ),
    Case(
        "The loss is not a number",
        rank(*_RUN, files={"run.toml": _SMALL + "dense_optimizer.lr = 1e30\n"}),
        "[rank<number>]: NotFiniteError: Step <number>: the loss of rank 0 is <value>. Its batch is in "
        "mine/non_finite/<file>. Lower the learning rates, clip (dense_optimizer.clip_norm), warm up "
        "(schedule.warmup_steps), or look for bad data. There is no checkpoint.",
        "Look at the batch (`torch.load(FILE, weights_only=True)`). If its data are bad, correct them, or leave such "
        'batches out with `train.on_non_finite = "skip"`; else lower the learning rates.',
        code=1,
    ),
    Case(
        "The last state of a run could not be published",
        _publish_on_a_full_disk,
        "[rank<number>]: FailedPublicationError: step 9 is not published: <why>. Replicas have base_0, of step 0. "
        "Publish it with:    <command>",
        "The run itself is whole. Make room on the disk of `publish.folder`, then give the command it shows: it trains "
        "nothing again, and publishes what is missing.",
        code=1,
    ),
    Case(
        "The module of `model.build` is not there",
        rank(
            *("--config", "run.toml", "--run-dir", "mine"),
            files={"run.toml": '[model]\nbuild = "no_model:build"\n[train]\nmax_steps = 1\ndevice = "cpu"\n'},
        ),
        "[rank<number>]: ConfigError: model.build: no module 'no_model' in <folder> or on the Python path. Name a file "
        "there without .py.",
        "Put the module beside the settings, or set `model.folder`.",
        code=1,
    ),
]
