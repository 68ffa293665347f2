"""HSTU: loops over tokens in float64, forward and gradients; what sees what; long histories in bf16; settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from embershard.data import Batch, Schema, SparseFeature
from embershard.errors import ConfigError, DataError
from embershard.extras import hstu
from embershard.extras.hstu import HSTU
from embershard.extras.length_groups.groups import run_in_groups
from embershard.models import ModelConfig, build_model, hstu_config, model_tables
from embershard.models.history import LookedUp
from embershard.models.hstu_config import HstuConfig
from tests.covering import examples, matrix

pytestmark = pytest.mark.extra

DIM, FEATURES, MOST = 4, 2, 9
SCHEMA = Schema(
    ("age",),
    (
        *(SparseFeature(name, 20) for name in ("user", "item", "past_item")),
        SparseFeature("past_action", 7),
        *(SparseFeature(name, 1 << 40) for name in ("time", "past_time")),
    ),
)
SETTINGS: dict[str, Any] = {
    "arch": "hstu", "embedding_dim": DIM, "dense_arch_layer_sizes": (5, DIM), "over_arch_layer_sizes": (6, 1),
    "target": ("item",), "history": ("past_item", "past_action"),
}  # fmt: skip


def make(settings: HstuConfig, seed: int = 0) -> HSTU:
    """A network whose numbers all matter: scales, biases and tables of biases are random, too."""
    torch.manual_seed(seed)
    network = HSTU(FEATURES, DIM, settings, [6, 1]).double()
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(torch.randn_like(weight) * 0.7)
    return network


def sees(query: tuple[str, int], key: tuple[str, int], window: int | None) -> bool:
    (kind, place), (other, earlier) = query, key
    if other == "context":
        return True
    if kind == "context":
        return other == "event"
    if other == "scored":
        return query == key
    back = place - earlier if kind == "event" else -earlier  # a scored item's events are -1, -2, ... by their ends
    return back >= 0 and (window is None or back <= window)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def normalized(x: Tensor, norm: Any) -> Tensor:
    mean = x.sum() / len(x)
    return (x - mean) / torch.sqrt(((x - mean) ** 2).sum() / len(x) + norm.eps) * norm.weight + norm.bias


def slow(network: HSTU, s: HstuConfig, contexts: Tensor, events: Tensor, scored: Tensor, times: list[int]) -> Tensor:
    """One sample by loops: contexts [C, D], events [n, Q, D], scored items [K, Q, D] to [K, D]; times of both."""
    n, names = len(events), [("context", number) for number in range(len(contexts))]
    names += [("event", number) for number in range(n)] + [("scored", number) for number in range(len(scored))]
    tokens = [*contexts, *(network.event.weight @ x.flatten() + network.event.bias for x in (*events, *scored))]
    moment = dict(zip(names[len(contexts) :], times, strict=True)) if times else {}
    d = s.head_dim
    for layer in network.layers:
        parts = [silu(layer.into.weight @ normalized(x, layer.norm) + layer.into.bias) for x in tokens]
        width, outputs = s.num_heads * d, []
        for i, query in enumerate(names):
            heads = []
            for head in range(s.num_heads):
                _, _, q, _ = (parts[i][p * width + head * d :][:d] for p in range(4))
                total = torch.zeros(d, dtype=torch.float64)
                for j, key in enumerate(names):
                    place = key[1] - n if query[0] == "scored" and key[0] == "event" else key[1]
                    if not sees(query, (key[0], place), s.window):
                        continue
                    _, v, _, k = (parts[j][p * width + head * d :][:d] for p in range(4))
                    score = sum(q[c] * k[c] for c in range(d)) / math.sqrt(d)
                    if "context" not in (query[0], key[0]):
                        at = [n if kind == "scored" else number for kind, number in (query, key)]
                        score = score + layer.position[at[0] - at[1]]
                        if moment:
                            ago = moment[query] - moment[key]
                            bounds = {math.ceil(math.sqrt(2.0**number)) for number in range(64)}
                            score = score + layer.time[len([bound for bound in bounds if bound <= ago])]
                    total = total + silu(score) * v / s.max_events
                heads.append(total)
            a, u = normalized(torch.cat(heads), layer.attention_norm), parts[i][:width]
            outputs.append(tokens[i] + layer.out.weight @ torch.cat([u, a, u * a]) + layer.out.bias)
        tokens = outputs
    return torch.stack([normalized(x, network.norm) for x in tokens[len(contexts) + n :]])


@st.composite
def cases(draw: Any) -> tuple[HstuConfig, list[int], int, int, list[list[int]], int]:
    """Settings, lengths, contextual tokens, scored items, the rising times of each sample, a seed."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    scored, has_times = draw(st.integers(1, 2)), draw(st.booleans())
    steps = st.one_of(st.integers(0, 9), st.integers(0, 10**9))
    times = [draw(st.lists(steps, min_size=n + 1, max_size=n + 1)) for n in lengths] if has_times else []
    settings = HstuConfig(
        draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3)), MOST,
        window=draw(st.one_of(st.none(), st.integers(1, 4))), times=("time", "past_time") if has_times else (),
    )  # fmt: skip
    rising = [[sum(each[: k + 1]) for k in range(len(each))] for each in times]
    return settings, lengths, draw(st.integers(0, 2)), scored, rising, draw(st.integers(0, 99))


@pytest.mark.smoke
@given(cases())
@examples(40)
def test_forward_and_gradients_are_those_of_loops(case):
    settings, lengths, num_contexts, scored, rising, seed = case
    network, size, longest = make(settings, seed), len(lengths), max(1, *lengths)
    given_ = [
        torch.randn(size, count, *shape, dtype=torch.float64).requires_grad_()
        for count, shape in ((num_contexts, (DIM,)), (longest, (FEATURES, DIM)), (scored, (FEATURES, DIM)))
    ]
    contexts, history, items = given_
    times = None
    if rising:
        rows = [[*t[:n], *[7] * (longest - n), *[t[n]] * scored] for t, n in zip(rising, lengths, strict=True)]
        times = torch.tensor(rows)
    found = network.encode(items, history, torch.tensor(lengths), contexts, times)
    moments = [[*t[:n], *[t[n]] * scored] for t, n in zip(rising, lengths, strict=True)] if rising else [[]] * size
    samples = [(contexts[b], history[b, :n], items[b], moments[b]) for b, n in enumerate(lengths)]
    expected = torch.stack([slow(network, settings, *each) for each in samples])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    factors = torch.randn_like(found)
    inputs = [*given_, *(each for name, each in network.named_parameters() if not name.startswith("over"))]
    gradients = [
        torch.autograd.grad((out * factors).sum(), inputs, allow_unused=True, materialize_grads=True)
        for out in (found, expected)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-8)


def seen_by(what: str, place: int, window: int | None = None) -> tuple[list[int], list[int], list[int]]:
    """Contexts, events and scored items whose numbers change what a token of two layers' input gives after one."""
    settings = HstuConfig(1, 1, 2, MOST, window=window)
    network, counts = make(settings), (2, 5, 2)
    tokens = torch.randn(1, 9, DIM, dtype=torch.float64, requires_grad=True)
    pairs = hstu.pairs_of(torch.tensor([4]), None, counts, MOST, window)
    out = network.layers[0](tokens, pairs)[0, {"context": 0, "event": 2, "scored": 7}[what] + place]
    (gradient,) = torch.autograd.grad(out.square().sum(), tokens)
    touched = gradient[0].any(dim=1)
    return tuple(part.nonzero().flatten().tolist() for part in touched.split(counts))  # type: ignore[return-value]


def test_what_sees_what():
    """The fifth event stands behind the history's end."""
    everything = [0, 1, 2, 3]
    assert seen_by("context", 0) == ([0, 1], everything, [])
    assert seen_by("event", 2) == ([0, 1], [0, 1, 2], [])
    assert seen_by("scored", 0) == ([0, 1], everything, [0])
    assert seen_by("scored", 1) == ([0, 1], everything, [1])
    assert seen_by("context", 1, window=1) == ([0, 1], everything, [])
    assert seen_by("event", 2, window=1) == ([0, 1], [1, 2], [])
    assert seen_by("scored", 0, window=2) == ([0, 1], [2, 3], [0])


class Layers(nn.Module):
    """A network without its last MLP, of which a plan knows by other means."""

    def __init__(self, network: HSTU) -> None:
        super().__init__()
        self._network = network

    def forward(self, target: Tensor, history: Tensor, is_event: Tensor, others: Tensor, *times: Tensor) -> Tensor:
        absent = target.new_zeros(len(target), 1, target.shape[2])
        item = torch.cat([target, absent], dim=1).unsqueeze(1)
        return self._network.encode(item, history, is_event.sum(1), others, *times)


@pytest.mark.parametrize("times", [(), ("time", "past_time")])
@pytest.mark.parametrize("batch_size", [3, 40])
def test_operations_and_memory_are_those_that_are_planned_with(times, batch_size, monkeypatch):
    """Operations exactly; numbers that are kept within a fifth, whether a batch goes in groups or not."""
    settings = HstuConfig(2, 2, 8, 100, times=times)
    monkeypatch.setattr(hstu_config, "GROUP_BYTES", 4 * 2 * 103**2 * 5)  # five samples
    network, lengths = HSTU(2, 16, settings, [8, 1]), torch.full((batch_size,), 100)
    target, others = (torch.randn(batch_size, count, 16, requires_grad=True) for count in (1, 2))
    history = [JaggedTensor(torch.randn(batch_size * 100, 16, requires_grad=True), lengths=lengths) for _ in range(2)]
    moments = JaggedTensor(torch.arange(100).repeat(batch_size), lengths=lengths)
    of_samples = (torch.full((batch_size, 1), 100), moments) if times else None
    looked = LookedUp(target, others, lengths, history, of_samples, torch.arange(batch_size), [100] * batch_size)
    kept: dict[Any, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr(), tensor.dtype] = storage.nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run_in_groups(Layers(network), looked, settings.token_costs(2, 16), settings.samples_at_once).sum().backward()
    flops, numbers = settings.sample_cost(len(SETTINGS["history"]), 16, 2, batch_size)
    assert counter.get_total_flops() == flops * batch_size
    if batch_size == 3:
        own = sum(each.untyped_storage().nbytes() for each in network.parameters())
        assert (sum(kept.values()) - own) / 4 / batch_size == pytest.approx(numbers, rel=0.2)
    else:
        assert numbers < 0.3 * settings.sample_cost(len(SETTINGS["history"]), 16, 2, 1)[1]


@pytest.mark.parametrize("events", [1000, matrix(2000)])
def test_long_histories_in_bf16_are_finite_and_near_those_in_fp32(events):
    settings = HstuConfig(2, 2, 8, max_events=events, times=("time", "past_time"))
    torch.manual_seed(0)
    network = HSTU(1, 16, settings, [8, 1])
    history, item = torch.randn(2, events, 1, 16) * 30, torch.randn(2, 1, 16) * 30
    history[0, 1:] = history[0, :1]  # all alike: every term of a sum has one sign
    is_event = torch.arange(events) < torch.tensor([[events], [events - 300]])
    times = torch.arange(events + 1).expand(2, -1) * 60

    def run() -> tuple[Tensor, list[Tensor]]:
        network.zero_grad()
        out = network(item, history, is_event, torch.randn(2, 0, 16), times)
        out.float().square().sum().backward()
        return out.detach().float(), [each.grad.clone() for each in network.parameters()]

    exact, gradients = run()
    with torch.autocast("cpu", torch.bfloat16):
        rounded, rounded_gradients = run()
    assert all(each.isfinite().all() for each in (rounded, *rounded_gradients))
    assert (rounded - exact).abs().max() < 0.05 * exact.abs().max().clamp(min=0.5)
    one, other = (torch.cat([each.flatten() for each in found]) for found in (gradients, rounded_gradients))
    assert (one - other).norm() < 0.1 * one.norm()
    assert not torch.equal(rounded, exact), "bf16 must be noticed"


HISTORIES = ([3, 4, 5], [], [6])


def batch(histories: Any = HISTORIES, times: Any = None, now: int = 10**9) -> Batch:
    count = len(histories)
    times = times or [[now - 100 * (len(each) - k) for k in range(len(each))] for each in histories]
    bags = [
        [[number, number + 1] for number in range(count)],
        [[11 + number] for number in range(count)],
        histories,
        [[item % 7 for item in each] for each in histories],
        [[now]] * count,
        times,
    ]
    ids = torch.tensor([one for bag in bags for each in bag for one in each])
    lengths = torch.tensor([len(each) for bag in bags for each in bag])
    labels = torch.arange(count) % 2.0
    return Batch(torch.arange(float(count))[:, None], KeyedJaggedTensor(SCHEMA.keys, ids, lengths=lengths), labels)


def make_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    settings = HstuConfig(**{"max_events": MOST, "times": ("time", "past_time"), **changes})
    model: Any = build_model(ModelConfig(**SETTINGS, hstu=settings), SCHEMA, torch.device("cpu"))
    embeddings = model.model.embeddings
    for tables in (embeddings.sequences, embeddings.bags):
        for weight in tables.to_empty(device="cpu").parameters():
            torch.nn.init.normal_(weight)
    return model


def test_a_batch_reaches_the_network():
    model, given_ = make_model(), batch()
    _, (_, logits, _) = model(given_)
    embeddings, network = model.model.embeddings, model.model.network.double()
    items = embeddings.sequences.embeddings["t_item"].weight.double()
    actions = embeddings.sequences.embeddings["t_past_action"].weight.double()
    users = embeddings.bags.embedding_bags["t_user"].weight.double()
    dense = embeddings.dense_arch(given_.dense_features).double()
    for number, past in enumerate(HISTORIES):
        contexts = torch.stack([dense[number], users[number] + users[number + 1]])
        events = (
            torch.stack([torch.stack([items[i], actions[i % 7]]) for i in past]) if past else items[:0].view(0, 2, DIM)
        )
        scored = torch.stack([items[11 + number], torch.zeros(DIM).double()])[None]
        times = [10**9 - 100 * (len(past) - k) for k in range(len(past))] + [10**9]
        (out,) = slow(network, network._settings, contexts, events, scored, times)
        assert torch.allclose(logits[number].double(), network.over(out[None])[0, 0], atol=1e-5), number


def test_every_weight_learns_and_times_count():
    model = make_model()
    loss, (_, logits, _) = model(batch())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())
    later = make_model()(batch(times=[[1, 2, 3], [], [4]]))[1][1]
    assert (later != logits).tolist() == [True, False, True]
    moved = batch(now=2 * 10**9)
    assert torch.equal(make_model()(moved)[1][1], logits), "only differences of times count"


def test_times_look_up_no_table():
    tables = model_tables(ModelConfig(**SETTINGS, hstu=HstuConfig(times=("time", "past_time"))), SCHEMA)
    assert [(table.name, table.features) for table in tables] == [
        ("t_item", ("item", "past_item")), ("t_past_action", ("past_action",)), ("t_user", ("user",)),
    ]  # fmt: skip


def test_a_placeholder():
    nothing = KeyedJaggedTensor(
        SCHEMA.keys, torch.empty(0, dtype=torch.int64), lengths=torch.zeros(6, dtype=torch.int64)
    )
    assert make_model()(Batch(torch.zeros(1, 1), nothing, torch.zeros(1)))[1][1].isfinite().all()


def test_histories_that_are_too_long_or_unequal_are_refused():
    with pytest.raises(DataError, match=r"history in past_item has more events than model.hstu.max_events = 2; raise"):
        make_model(max_events=2)(batch())
    with pytest.raises(DataError, match=r"\(past_item, past_action, past_time\) have different numbers of ids"):
        make_model()(batch(times=[[1, 2], [], [3]]))


def test_dropout_is_for_training_alone():
    model, given_ = make_model(input_dropout=0.3, linear_dropout=0.3), batch()
    assert not torch.equal(model(given_)[1][1], model(given_)[1][1])
    assert torch.equal(model.eval()(given_)[1][1], make_model()(given_)[1][1])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {**SETTINGS, "history": ()},
            r"got \['item'\] and \[\], arch=\"hstu\" needs a feature of the history for each",
        ),
        ({**SETTINGS, "arch": "din"}, "needs a feature of the history for each of the target"),
        ({**SETTINGS, "history_layer_sizes": (3,)}, 'model.history_layer_sizes has no effect with arch="hstu"'),
        ({"hstu": HstuConfig(num_heads=3)}, "model.hstu.num_heads has no effect with arch='dlrm'"),
    ],
)
def test_settings_say_what_is_wrong(settings, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig(**settings)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_layers": 0}, "model.hstu.num_layers: got 0, needed at least 1"),
        ({"window": 0}, "model.hstu.window: got 0"),
        ({"window": 256}, "model.hstu.window: got 256, which has no effect with max_events=256"),
        ({"times": ("time",)}, r"model.hstu.times: got \['time'\], needed two sparse features"),
        ({"linear_dropout": 1.0}, "model.hstu.linear_dropout: got 1.0, needed a probability"),
    ],
)
def test_sizes_say_what_is_wrong(changes, said):
    with pytest.raises(ConfigError, match=said):
        HstuConfig(**changes)


def test_features_of_times_are_checked():
    config = ModelConfig(**SETTINGS, hstu=HstuConfig(times=("time", "past_item")))
    with pytest.raises(ConfigError, match=r"model.hstu.times: 'past_item' is in target and history twice"):
        model_tables(config, SCHEMA)
