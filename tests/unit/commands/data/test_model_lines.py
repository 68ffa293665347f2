"""The model that `inspect` writes is one for data of that size, and of those features."""

from __future__ import annotations

import sys

import pytest

from embershard.extras.judging.inspect_files import model_lines
from embershard.extras.judging.kinds import Judgement
from embershard.extras.judging.suggest import Suggestion
from embershard.settings.decoding import decode, tomllib
from embershard.training.config import RunConfig
from tests.without import hide, is_in, rooms_of

pytestmark = pytest.mark.extra

USED = Judgement("category", "sure", "")


def features(num_sparse: int, num_dense: int) -> list[Suggestion]:
    sparse = {f"c{n}": {"kind": "sparse", "num_rows": 1000} for n in range(num_sparse)}
    dense = {f"n{n}": {"kind": "dense"} for n in range(num_dense)}
    return [Suggestion(name, {name: each}, "", 1, USED) for name, each in (sparse | dense).items()]


@pytest.mark.parametrize(
    ("num_rows", "num_dense", "arch", "batch", "epochs", "eval_every"),
    [
        (500, 0, "deepfm", 16, 40, None),
        (100_000, 2, "deepfm", 256, 40, None),
        (100_000, 9, "deepfm", 256, 40, None),
        (100_000, 10, "deepfm", 256, 40, None),
        (1_000_001, 0, "deepfm", 1024, 40, None),
        (5_000_000, 0, "dlrm", 1024, 1, 439),
        (50_000_000, 0, "dlrm", 4096, 1, 1099),
    ],
)
def test_the_model_fits_the_data(num_rows, num_dense, arch, batch, epochs, eval_every):
    text = "\n".join(model_lines(features(9, num_dense), num_rows))
    config = decode(RunConfig, tomllib.loads(text))
    assert (config.model.arch, config.model.embedding_dim) == (arch, 16)
    of_all, per_rank = config.train.global_batch_size, config.train.batch_size
    assert (of_all, per_rank) == ((batch, None) if num_rows <= 1_000_000 else (None, batch))
    assert (config.train.epochs, config.train.eval_every) == (epochs, eval_every)
    assert config.keeps_best == (epochs > 1)
    assert (config.model.over_arch_layer_sizes[0], config.train.ema) == ((256, 0.99) if epochs > 1 else (64, None))
    assert all("    # " in line for line in text.splitlines() if line.startswith(("arch", "batch", "epochs", "early")))


def test_an_installation_without_the_network_gets_one_that_it_can_train(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for module in [module for module in sys.modules if is_in(module, rooms_of(["networks"]))]:
        monkeypatch.delitem(sys.modules, module)
    hide(["networks"])
    config = decode(RunConfig, tomllib.loads("\n".join(model_lines(features(9, 2), 500))))
    assert (config.model.arch, config.train.epochs) == ("dlrm", 40)
