"""Dropout: behind which layers, when, and by which seed."""

from __future__ import annotations

import pytest
import torch
from torchrec.modules.mlp import MLP

from embershard.errors import ConfigError
from embershard.models import ModelConfig, build_model
from embershard.models.dropout import add_dropout, seed_masks
from tests.unit.models.test_history import make_model
from tests.unit.models.test_models import CPU, SchemaStub


def dropped(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if module._forward_hooks]


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("dlrm", ["model.over_arch.model.0._mlp.0", "model.over_arch.model.0._mlp.1"]),
        ("dlrm_dcn", ["model.over_arch.model.0._mlp.0", "model.over_arch.model.0._mlp.1"]),
        *((arch, [f"model.network.deep.0._mlp.{n}" for n in range(2)]) for arch in ("deepfm", "wide_deep")),
    ],
)
def test_hidden_layers_over_the_interaction_drop(arch, expected):
    models = [build_model(ModelConfig(arch, dropout=p), SchemaStub(), CPU) for p in (0.0, 0.5)]
    assert [dropped(model) for model in models] == [[], expected]
    assert models[0].state_dict().keys() == models[1].state_dict().keys()


@pytest.mark.parametrize("arch", ["din", "tbsm", "hstu"])
def test_models_of_histories_drop_behind_their_last_mlp(arch):
    assert dropped(make_model(arch, dropout=0.5, history_layer_sizes=None)) == ["model.network.over.0._mlp.0"]


def test_training_drops_and_scales_and_evaluation_does_neither():
    over, inputs = MLP(4, [1000]), torch.rand(1, 4)
    plain = over(inputs)
    add_dropout(over, 0.5)
    seed_masks(0, 0, 0)
    found = over(inputs)
    kept = found != 0
    assert torch.equal(found[kept], 2 * plain[kept])
    share = float((kept & (plain != 0)).sum() / (plain != 0).sum())
    assert 0.4 < share < 0.6
    assert not torch.equal(over(inputs), found)
    over.eval()
    assert torch.equal(over(inputs), plain)


def test_masks_are_those_of_seed_step_and_rank():
    def mask(*place: int) -> list[bool]:
        seed_masks(*place)
        return torch.nn.functional.dropout(torch.ones(64)).bool().tolist()

    places = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    assert [mask(*place) for place in places] == [mask(*place) for place in places]
    assert len({tuple(mask(*place)) for place in places}) == 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dropout": 1.0}, "model.dropout: got 1.0, needed a probability from 0 to below 1"),
        ({"dropout": -0.1}, "model.dropout: got -0.1"),
        ({"dropout": 0.5, "over_arch_layer_sizes": (1,)}, "model.dropout has no effect: .* no hidden layer"),
        ({"dropout": 0.5, "arch": "fm"}, "model.dropout: got 0.5 with arch='fm', where it has no effect"),
        ({"dropout": 0.5, "build": "mine:build"}, "model.dropout has no effect with model.build"),
    ],
)
def test_wrong_settings(settings, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig(**settings)
