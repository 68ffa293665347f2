"""DIN and TBSM: the same logits as plain loops over samples and events, whatever stands behind a history's end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from embershard.data import Batch, Schema, SparseFeature
from embershard.errors import ConfigError, DataError
from embershard.models import ModelConfig, build_model, model_tables

pytestmark = pytest.mark.extra

SCHEMA = Schema(
    dense=("age",),
    sparse=(
        *(SparseFeature(name, 20) for name in ("user", "item", "past_item")),
        *(SparseFeature(name, 7) for name in ("shop", "past_shop")),
    ),
)
HISTORIES = ([3, 4, 5], [], [6], [7, 8, 9, 10, 3])
SETTINGS: dict[str, Any] = {
    "embedding_dim": 4, "dense_arch_layer_sizes": (5, 4), "over_arch_layer_sizes": (6, 1),
    "target": ("item", "shop"), "history": ("past_item", "past_shop"), "history_layer_sizes": (6, 3),
}  # fmt: skip


def features(histories: Any = HISTORIES, shops: Any = None) -> KeyedJaggedTensor:
    shops = shops or [[(item * 2) % 7 for item in each] for each in histories]
    count = len(histories)
    bags = [
        [[number, number + 1] for number in range(count)],
        [[11 + number] for number in range(count)],
        histories,
        [[number % 7] for number in range(count)],
        shops,
    ]
    ids = [one for bag in bags for each in bag for one in each]
    lengths = [len(each) for bag in bags for each in bag]
    return KeyedJaggedTensor(SCHEMA.keys, torch.tensor(ids), lengths=torch.tensor(lengths))


def batch(histories: Any = HISTORIES, **shops: Any) -> Batch:
    count = len(histories)
    return Batch(torch.arange(float(count))[:, None], features(histories, **shops), torch.arange(count) % 2.0)


def make_model(arch: str, schema: Schema = SCHEMA, **changes: Any) -> Any:
    torch.manual_seed(0)
    model: Any = build_model(ModelConfig(arch=arch, **{**SETTINGS, **changes}), schema, torch.device("cpu"))  # type: ignore[arg-type]
    embeddings = model.model.embeddings
    for tables in filter(None, (embeddings.sequences, embeddings.bags)):
        for weight in tables.to_empty(device="cpu").parameters():
            torch.nn.init.normal_(weight)
    return model


def plain_din(network: Any, target: Tensor, events: Tensor, others: Tensor) -> Tensor:
    interest = torch.zeros_like(target)
    for event in events:
        interest = interest + network.unit(torch.cat([event, target, event - target, event * target])[None])[0] * event
    return network.over(torch.cat([target, interest, target * interest, others.flatten()])[None])[0]


def plain_tbsm(network: Any, target: Tensor, events: Tensor, others: Tensor) -> Tensor:
    def step(event: Tensor) -> Tensor:
        vectors = [*event.view(-1, 4), *others]
        dots = [vectors[a] @ vectors[b] for a in range(len(vectors)) for b in range(a)]
        z = network.step(torch.cat([*vectors, torch.stack(dots)])[None])[0]
        return z / z.norm()

    now = step(target)
    context = torch.zeros_like(now)
    if len(events):
        past = torch.stack([step(event) for event in events])
        context = (network.scale * (past @ now)).softmax(0) @ past
    return network.over(torch.cat([now, context, now * context])[None])[0]


@pytest.mark.smoke
@pytest.mark.parametrize(("arch", "plain"), [("din", plain_din), ("tbsm", plain_tbsm)])
def test_logits_are_those_of_plain_loops(arch, plain):
    model = make_model(arch)
    embeddings, given = model.model.embeddings, batch()
    _, (_, logits, labels) = model(given)
    tables = {f"t_{name}": embeddings.sequences.embeddings[f"t_{name}"].weight for name in ("item", "shop")}
    users = embeddings.bags.embedding_bags["t_user"].weight
    dense = embeddings.dense_arch(given.dense_features)
    for number, items in enumerate(HISTORIES):
        events = [torch.cat([tables["t_item"][item], tables["t_shop"][item * 2 % 7]]) for item in items]
        target = torch.cat([tables["t_item"][11 + number], tables["t_shop"][number % 7]])
        others = torch.stack([dense[number], users[number] + users[number + 1]])
        expected = plain(model.model.network, target, torch.stack(events) if events else torch.empty(0, 8), others)
        assert torch.allclose(logits[number], expected[0], atol=1e-6), number
    assert torch.equal(labels, given.labels)


def test_prelu_learns_a_slope_for_each_layer():
    """Of the paper's equation 2: s where it is above 0, and a s below."""
    network = make_model("din", activation="prelu").model.network
    for part in (network.unit, network.over):
        inputs = hidden = torch.randn(50, 32)
        for layer in part[0]._mlp:
            sums, slope = layer._linear(hidden), layer._activation_fn.weight
            assert (slope.shape, slope.item()) == ((1,), 0.25)
            slope.data.fill_(0.5)
            hidden = torch.where(sums > 0, sums, 0.5 * sums)
        assert torch.allclose(part(inputs), part[1](hidden))


@pytest.mark.parametrize(("arch", "activation"), [("din", "relu"), ("din", "prelu"), ("tbsm", "relu")])
def test_every_weight_learns_and_every_history_counts(arch, activation):
    model = make_model(arch, activation=activation)
    loss, (_, logits, _) = model(batch())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    other = make_model(arch, activation=activation)(batch([[3, 4, 6], *HISTORIES[1:]]))[1][1]
    assert (other != logits).tolist() == [True, False, False, False]


@pytest.mark.parametrize("arch", ["din", "tbsm"])
def test_a_batch_without_events_and_a_placeholder(arch):
    model = make_model(arch)
    empty = batch([[], []])
    alone = model(empty)[1][1]
    assert torch.allclose(alone, model(batch([[], [], [5, 6]]))[1][1][:2], atol=1e-6)
    nothing = KeyedJaggedTensor(
        SCHEMA.keys, torch.empty(0, dtype=torch.int64), lengths=torch.zeros(5, dtype=torch.int64)
    )
    assert model(Batch(torch.zeros(1, 1), nothing, torch.zeros(1)))[1][1].isfinite().all()


def test_target_and_history_share_a_table():
    tables = {table.name: table for table in model_tables(ModelConfig(arch="din", **SETTINGS), SCHEMA)}
    assert tables.keys() == {"t_item", "t_shop", "t_user"}
    assert tables["t_item"].features == ("item", "past_item")
    assert [tables[name].is_sequence for name in ("t_item", "t_shop", "t_user")] == [True, True, False]


@pytest.mark.parametrize("arch", ["din", "tbsm", "hstu"])
def test_without_dense_and_other_features(arch):
    schema = Schema((), tuple(f for f in SCHEMA.sparse if f.name != "user"))
    model = make_model(arch, schema, **({"history_layer_sizes": None} if arch == "hstu" else {}))
    ids = KeyedJaggedTensor.from_jt_dict({key: features().to_dict()[key] for key in schema.keys})
    assert model(Batch(torch.zeros(4, 0), ids, torch.zeros(4)))[1][1].shape == (4,)


@pytest.mark.smoke
def test_histories_of_different_lengths_are_refused():
    with pytest.raises(DataError, match=r"model.history \(past_item, past_shop\) have different numbers of ids"):
        make_model("din")(batch([[3], [4]], shops=[[1], []]))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"arch": "din"}, "needs a feature of the history for each of the target"),
        ({"arch": "tbsm", "target": ("item",)}, r"got \['item'\] and \[\]"),
        ({"target": ("item",)}, "model.target has no effect with arch='dlrm'"),
        ({"history_layer_sizes": (3,)}, "model.history_layer_sizes has no effect"),
        ({**SETTINGS, "arch": "din", "history_layer_sizes": (3, 0)}, "needed layers of width 1 or more"),
    ],
)
def test_settings_say_what_is_wrong(settings, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig(**settings)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"target": ("itme",), "history": ("past_item",)}, "model.target: got 'itme', needed a sparse feature of"),
        ({"target": ("item",), "history": ("item",)}, "model.history: 'item' is in target and history twice"),
        ({"target": ("item",), "history": ("past_shop",)}, "'item' has 20 rows and model.history 'past_shop' has 7"),
    ],
)
def test_features_are_checked(changes, said):
    with pytest.raises(ConfigError, match=said):
        make_model("din", **changes)
