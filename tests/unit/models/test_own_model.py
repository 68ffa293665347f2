"""`model.build`: the function is found beside the settings or on the Python path, and what it returns is checked."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.data import Batch, Schema, SparseFeature, Target
from embershard.distributed import Supervision
from embershard.errors import ConfigError
from embershard.launch.rank import _show_error
from embershard.models import ModelConfig, build_model, model_tables
from embershard.models.own_model import OwnModel, source_digest
from embershard.settings.own_code import message_for_user

CPU = torch.device("cpu")
SCHEMA = Schema(dense=("age",), sparse=(SparseFeature("user", 10), SparseFeature("item", 20)))
BEGIN = """
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig

def bags(*tables, device="meta", is_weighted=False):
    configs = [EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=d, feature_names=f) for n, r, d, f in tables]
    return EmbeddingBagCollection(configs, device=torch.device(device), is_weighted=is_weighted)

def sequences(*tables):
    configs = [EmbeddingConfig(name=n, num_embeddings=r, embedding_dim=d, feature_names=f) for n, r, d, f in tables]
    return EmbeddingCollection(configs, device=torch.device("meta"))
"""
GOOD = """
def build(schema, options):
    model = nn.Module()
    model.users = bags(("u", 10, 8, ["user"]))
    model.items = sequences(("i", 20, 4, ["item"]))
    model.over = nn.Linear(8, options.get("width", 1))
    return model
"""


def write(folder: Path, name: str, body: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(BEGIN + textwrap.dedent(body))


def build(folder: Path, build: str, **options: Any) -> Any:
    return build_model(ModelConfig(build=build, folder=str(folder), options=options), SCHEMA, CPU)


def test_tables_of_all_collections_are_known(tmp_path):
    write(tmp_path, "own_good", GOOD)
    config = ModelConfig(build="own_good:build", folder=str(tmp_path), options={"width": 3})
    model: Any = build_model(config, SCHEMA, CPU)
    assert model.model.over.out_features == 3
    users, items = model_tables(config, SCHEMA)
    assert (users.name, users.dim, users.features, users.pooling) == ("u", 8, ("user",), "sum")
    assert (items.name, items.is_sequence, items.tensor) == ("i", True, "model.items.embeddings.i.weight")
    state = model.state_dict()
    assert {users.tensor, items.tensor} <= state.keys()


def test_building_it_to_look_at_it_draws_no_number(tmp_path):
    write(tmp_path, "own_drawn", GOOD)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    model_tables(ModelConfig(build="own_drawn:build", folder=str(tmp_path)), SCHEMA)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def other(schema, options): ...", "has no function 'build'; it has bags, sequences, other"),
        ("def build(schema, options): return 3", "returned int; needed a torch.nn.Module"),
        ("def build(schema): ...", "failed: TypeError: build.. takes 1 positional argument"),
        ("def build(schema, options): return options['depth']", r"KeyError: 'depth' .*, line \d+"),
        ("def build(schema, options): return nn.Linear(2, 1)", "a model without tables"),
        (
            "def build(schema, options): return nn.ModuleDict({'a': bags(('t', 10, 4, ['user']), device='cpu')})",
            r'a is on cpu; make it with device=torch.device\("meta"\)',
        ),
        (
            "def build(schema, options): return nn.ModuleDict({'a': bags(('t', 10, 4, ['user']), is_weighted=True)})",
            "a is weighted",
        ),
        (
            """
            def build(schema, options):
                return nn.ModuleDict({"a": bags(("t", 10, 4, ["user"])), "b": sequences(("t", 20, 4, ["item"]))})
            """,
            r"two tables are named 't' \(in a and b\).*rename one",
        ),
        (
            "def build(schema, options): return nn.ModuleDict({'a': bags(('t', 10, 4, ['shop']))})",
            "table 't' looks up the feature 'shop', which the data do not have; they have user, item",
        ),
        (
            "def build(schema, options): return nn.ModuleDict({'a': bags(('t', 10, 4, ['user']))})",
            "no table looks up the feature 'item'",
        ),
        (
            "def build(schema, options): return nn.ModuleDict({'a': bags(('t', 10, 4, ['user', 'item']))})",
            "has 10 rows, and its feature 'item' has ids up to 19; needed at least 20",
        ),
        (
            "def build(schema, options): return nn.ModuleDict({'a': bags(('t', 20, 6, ['user', 'item']))})",
            "dim 6; needed a multiple of 4",
        ),
        ("import no_such_package_at_all", "imports 'no_such_package_at_all', which is not installed"),
        ("1 / 0", r"importing 'own_\d+' failed: ZeroDivisionError: division by zero \(.*own_"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(body, said, tmp_path):
    name = f"own_{abs(hash(body))}"  # a module is imported once
    write(tmp_path, name, body)
    with pytest.raises(ConfigError, match=said) as found:
        build(tmp_path, f"{name}:build")
    assert "\n" not in str(found.value)


def test_a_module_that_is_nowhere(tmp_path):
    with pytest.raises(ConfigError, match=f"no module 'own_nowhere' in {tmp_path} or on the Python path"):
        build(tmp_path, "own_nowhere:build")


def test_another_module_of_that_name_is_not_taken_for_it(tmp_path):
    for folder in ("a", "b"):
        write(tmp_path / folder, "own_twice", GOOD)
    build(tmp_path / "a", "own_twice:build")
    with pytest.raises(ConfigError, match=r"is .*/a/own_twice.py, and there is another one in .*/b"):
        build(tmp_path / "b", "own_twice:build")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"build": "no_colon"}, 'needed "module:function"'),
        ({"build": "a:b", "embedding_dim": 32}, "model.embedding_dim has no effect with model.build"),
        ({"build": "a:b", "arch": "din", "target": ("x",), "history": ("y",)}, "model.arch has no effect"),
        ({"options": {"a": 1}}, "model.options has no effect without model.build"),
        ({"folder": "here"}, "model.folder has no effect without model.build"),
    ],
)
def test_settings_without_effect_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig(**settings)


class Returns(torch.nn.Module):
    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found

    def forward(self, batch: Batch) -> Any:
        return self.found


def batch(num_samples: int) -> Any:
    return Batch(torch.zeros(num_samples, 1), None, torch.arange(num_samples) % 2.0)  # type: ignore[arg-type]


def test_the_loss_is_the_cross_entropy_or_one_s_own():
    logits = torch.tensor([[0.5], [-1.0], [2.0]], requires_grad=True)
    loss, (shown, found, labels) = OwnModel(Returns(logits), "m", Target())(batch(3))
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits.flatten(), torch.tensor([0.0, 1.0, 0.0]))
    assert torch.equal(loss, expected)
    assert torch.equal(shown, expected)
    assert not shown.requires_grad
    assert found.tolist() == [0.5, -1.0, 2.0]
    assert labels.tolist() == [0, 1, 0]
    own, (_, found, _) = OwnModel(Returns((logits.sum(), logits)), "m", Target())(batch(3))
    assert torch.equal(own, logits.sum())
    assert found.shape == (3,)


@pytest.mark.parametrize("found", [torch.zeros(4), torch.zeros(3, 2), "text", (torch.zeros(3), torch.zeros(3)), None])
def test_a_forward_that_returns_something_else_is_refused(found):
    with pytest.raises(ConfigError, match=r"m: the model's forward returned .* for 3 samples; needed logits \[3\]"):
        OwnModel(Returns(found), "m", Target())(batch(3))


def test_an_error_in_the_forward_is_told_by_the_lines_of_the_model(tmp_path, monkeypatch, capsys):
    """With what the model was given; frames of torch and embershard are left out, unless they are asked for."""
    body = GOOD + "    model.forward = lambda batch: top(model, batch)\n    return model\n"
    body += "def top(model, batch):\n    return model.over(batch.dense_features)\n"
    write(tmp_path, "own_fails", body.replace("    return model\n    model", "    model"))
    model = build(tmp_path, "own_fails:build")
    ids = KeyedJaggedTensor(
        ["user", "item"], torch.zeros(6, dtype=torch.int64), lengths=torch.ones(6, dtype=torch.int32)
    )
    failed = []
    for wanted in ("", "1"):
        monkeypatch.setenv("EMBERSHARD_TRACEBACK", wanted)
        with pytest.raises(RuntimeError) as found:
            model(Batch(torch.zeros(3, 1), ids, torch.zeros(3)))
        _show_error(Supervision(), found.type, found.value, found.tb)
        failed.append(capsys.readouterr().err)
    *_, first, second, given, how = failed[0].splitlines()
    assert failed[0].startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied (3x1 and 8x1)")
    assert first.endswith("in <lambda>: model.forward = lambda batch: top(model, batch)")
    assert second.startswith(f"  {tmp_path}/own_fails.py, line ")
    assert second.endswith("in top: return model.over(batch.dense_features)")
    assert "dense_features float32 [3, 1], labels float32 [3], and sparse_features with ids int64 [6]" in given
    assert "EMBERSHARD_TRACEBACK=1 shows" in how
    assert "torch/nn" not in failed[0]
    assert "torch/nn" in failed[1]
    assert message_for_user(RuntimeError("of no model")) is None


def test_the_digest_is_that_of_the_file(tmp_path):
    write(tmp_path, "own_digest", GOOD)
    config = ModelConfig(build="own_digest:build", folder=str(tmp_path))
    before = source_digest(config)
    assert before == source_digest(config)
    write(tmp_path, "own_digest", GOOD + "\n# changed\n")
    assert source_digest(config) != before
