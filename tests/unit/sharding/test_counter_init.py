"""Which weights a module's tables start from when they come from a counter."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import init
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from embershard.errors import ConfigError
from embershard.sharding.torchrec.counter_init import CounterInit

META = torch.device("meta")


def ranges(**settings) -> tuple[float, float]:
    table = EmbeddingBagConfig(name="t", num_embeddings=400, embedding_dim=4, feature_names=["f"], **settings)
    return CounterInit.of_module(EmbeddingBagCollection([table], device=META), seed=3).ranges["t"]


def test_the_default_is_torchrecs():
    assert ranges() == (-0.05, 0.05)
    assert ranges(weight_init_min=-0.5, weight_init_max=0.25) == (-0.5, 0.25)
    table = EmbeddingConfig(name="s", num_embeddings=100, embedding_dim=4, feature_names=["f"])
    assert CounterInit.of_module(EmbeddingCollection([table], device=META), 3).ranges == {"s": (-0.1, 0.1)}


@pytest.mark.parametrize(
    ("init_fn", "expected"),
    [
        (partial(init.uniform_, a=-2.0, b=3.0), (-2.0, 3.0)),
        (partial(init.uniform_, a=-2.0), (-2.0, 1.0)),
        (init.uniform_, (0.0, 1.0)),
        (partial(init.constant_, val=0.5), (0.5, 0.5)),
        (init.zeros_, (0.0, 0.0)),
        (init.ones_, (1.0, 1.0)),
    ],
)
def test_functions_that_say_their_range_are_honoured(init_fn, expected):
    assert ranges(init_fn=init_fn) == expected


@pytest.mark.parametrize(
    "init_fn",
    [
        init.normal_,
        init.xavier_uniform_,
        partial(init.uniform_, -1.0, 1.0),
        partial(init.uniform_, a=0.0, generator=torch.Generator()),
        partial(init.zeros_, val=1),
        lambda weights: weights.fill_(1.0),
    ],
)
def test_other_functions_are_refused_with_the_reason(init_fn):
    with pytest.raises(ConfigError, match=r"table 't': got init_fn=.*any block of rows is made by itself.*leave init_"):
        ranges(init_fn=init_fn)


def test_a_module_whose_weights_torchrec_would_copy_is_refused():
    module = EmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=400, embedding_dim=4, feature_names=["f"])], device=META
    )
    module._device = torch.device("cuda", 0)
    with pytest.raises(ConfigError, match=r'init_seed=3 and an embedding module on cuda:0.*torch.device."meta"'):
        CounterInit.of_module(module, 3)
