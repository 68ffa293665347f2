"""Samples in groups of like lengths: outputs and gradients in float64 are those of one padded group."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from embershard.extras.hstu import HSTU
from embershard.extras.length_groups import groups as length_groups
from embershard.extras.length_groups.groups import group_sizes, run_in_groups
from embershard.extras.networks.over_history import DIN, TBSM
from embershard.extras.serving.dense_program import DenseLayers, PlainSequence, dense_program
from embershard.models.history import LookedUp
from embershard.models.hstu_config import HstuConfig
from tests.covering import examples
from tests.unit.models import test_history, test_hstu

pytestmark = pytest.mark.extra

DIM, MOST = 4, 40


@pytest.fixture(autouse=True)
def pads_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM does not."""
    monkeypatch.setattr(length_groups, "JaggedTensor", PlainSequence)


def at_once_of(bytes_of_scores: int) -> Any:
    return None if not bytes_of_scores else lambda tokens: max(1, bytes_of_scores // tokens**2)


#: Lengths of the histories of a batch: any, all alike, or short ones beside a huge one.
LENGTHS = st.one_of(
    st.lists(st.integers(0, 12), min_size=1, max_size=9),
    st.builds(lambda length, count: [length] * count, st.integers(0, 9), st.integers(2, 6)),
    st.lists(st.integers(0, 2), max_size=6).map(lambda short: [*short[:3], MOST, *short[3:]]),
)


def looked_up(lengths: list[int], features: tuple[int, int], has_times: bool, others: int = 2) -> LookedUp:
    """Random rows in float64, which get gradients."""

    def rows(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).requires_grad_()

    size, of_events, (of_item, of_event) = len(lengths), sum(lengths), features
    own = torch.tensor(lengths)
    falling, order = own.sort(descending=True, stable=True)
    ago = torch.randint(1, 10**6, (of_events,))
    times = (torch.full((size, 1), 10**9), JaggedTensor(10**9 - ago, lengths=own)) if has_times else None
    history = [PlainSequence(rows(of_events, DIM), own) for _ in range(of_event)]
    return LookedUp(rows(size, of_item, DIM), rows(size, others, DIM), own, history, times, order, falling.tolist())


def padded_by_hand(looked: LookedUp) -> tuple[Tensor, ...]:
    """What a network gets for the whole batch, with an event's room behind the longest history."""
    lengths, longest = looked.lengths.tolist(), max(looked.falling) + 1
    ends = looked.lengths.cumsum(0).tolist()

    def pad(values: Tensor) -> Tensor:
        parts = [values[end - n : end] for end, n in zip(ends, lengths, strict=True)]
        return torch.stack([torch.cat([part, part.new_zeros(longest - len(part), *part.shape[1:])]) for part in parts])

    history = torch.stack([pad(each.values()) for each in looked.history], dim=2)
    is_event = torch.tensor([[place < n for place in range(longest)] for n in lengths])
    times = () if looked.times is None else (torch.cat([pad(looked.times[1].values()), looked.times[0]], dim=1),)
    return looked.target, history, is_event, looked.others, *times


def network_of(arch: str, has_times: bool, window: int | None) -> tuple[Any, tuple[int, int]]:
    torch.manual_seed(1)
    if arch == "hstu":
        times = ("time", "past_time") if has_times else ()
        return HSTU(2, DIM, HstuConfig(2, 2, 3, MOST, window=window, times=times), [6, 2]).double(), (1, 2)
    return {"din": DIN, "tbsm": TBSM}[arch](2, 2, DIM, [6, 3], [6, 2]).double(), (2, 2)


def results(found: Tensor, looked: LookedUp, network: nn.Module) -> list[Tensor]:
    """Outputs, and gradients of all rows and weights."""
    inputs = [looked.target, looked.others, *(each.values() for each in looked.history), *network.parameters()]
    factors = torch.linspace(-1, 2, found.numel(), dtype=found.dtype).view_as(found)
    of_inputs = torch.autograd.grad((found * factors).sum(), inputs, allow_unused=True, materialize_grads=True)
    return [found.detach(), *of_inputs]


@pytest.mark.smoke
@given(
    lengths=LENGTHS, arch=st.sampled_from(["hstu", "hstu", "din", "tbsm"]), has_times=st.booleans(),
    window=st.sampled_from([None, 1, 5]), most_padding=st.sampled_from([0, 20, 300, 10**9]),
    scores=st.sampled_from([0, 1, 150, 10**9]),
)  # fmt: skip
@examples(60)
def test_groups_are_one_padded_batch(lengths, arch, has_times, window, most_padding, scores):
    network, features = network_of(arch, has_times, window)
    looked = looked_up(lengths, features, has_times and arch == "hstu")
    with mock.patch.dict(length_groups.MOST_PADDING, cpu=most_padding):
        found = run_in_groups(network, looked, (1, 1), at_once_of(scores))
    expected = network(*padded_by_hand(looked))
    for one, other in zip(*(results(each, looked, network) for each in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@given(
    tokens=st.lists(st.integers(1, 4000), min_size=1, max_size=40).map(lambda found: sorted(found, reverse=True)),
    costs=st.tuples(st.integers(0, 50), st.integers(0, 3)), most=st.integers(0, 10**7), scores=st.integers(0, 10**7),
)  # fmt: skip
@examples(100)
def test_a_group_takes_all_that_padding_and_memory_allow(tokens, costs, most, scores):
    at_once = at_once_of(scores)
    sizes = group_sizes(tokens, costs, most, at_once)
    assert sum(sizes) == len(tokens)
    work, first = [costs[0] * T + costs[1] * T * T for T in tokens], 0
    for size in sizes:
        allowed = len(tokens) if at_once is None else at_once(tokens[first])
        padding = [sum(work[first] - each for each in work[first : first + count]) for count in (size, size + 1)]
        assert 1 <= size <= allowed
        assert padding[0] <= most
        assert first + size == len(tokens) or size == allowed or padding[1] > most
        first += size


def test_a_batch_that_takes_little_is_one_group():
    """Its bits are those of a network that is called once, and so are an export's."""
    network, features = network_of("hstu", True, None)
    looked = looked_up([3, 9, 0, 1], features, True)
    assert torch.equal(run_in_groups(network, looked, (84, 12), at_once_of(10**9)), network(*looked.padded()))


def test_most_groups_of_a_large_batch_are_computed_again_with_the_same_masks(monkeypatch):
    """Groups that fit into memory together are kept. The device of dropout's masks is that of a tensor among what is
    given."""
    torch.manual_seed(1)
    network = HSTU(2, DIM, HstuConfig(2, 2, 3, MOST, input_dropout=0.3, linear_dropout=0.3), [6, 2]).double()
    looked = looked_up([5, 0, 9, 3, 3], (1, 2), False)
    again, run_again = [], length_groups.checkpoint

    def watched(run: Any, *given: Any, **more: Any) -> Tensor:
        again.append(any(isinstance(each, Tensor) for each in given))
        return run_again(run, *given, **more)

    def run(scores: int) -> list[Tensor]:
        torch.manual_seed(2)
        return results(run_in_groups(network, looked, (0, 1), at_once_of(scores)), looked, network)

    monkeypatch.setattr(length_groups, "checkpoint", watched)
    monkeypatch.setitem(length_groups.MOST_PADDING, "cpu", 0)
    kept = run(12**2 * 5)
    assert again == []
    for one, other in zip(kept, run(12**2), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert again == [True] * 4


def test_dropout_draws_for_each_sample(monkeypatch):
    """No two groups have the same masks, and as many numbers are kept as in one group."""

    class Drops(nn.Module):
        def forward(self, target: Tensor, history: Tensor, is_event: Tensor, others: Tensor) -> Tensor:
            return torch.nn.functional.dropout(torch.ones(len(target), 400), 0.3, self.training)

    looked = looked_up([number % 7 for number in range(60)], (1, 1), False)
    monkeypatch.setitem(length_groups.MOST_PADDING, "cpu", 0)
    torch.manual_seed(0)
    found = run_in_groups(Drops(), looked, (1, 1))
    assert found.unique().tolist() == pytest.approx([0, 1 / 0.7])
    assert len(found.unique(dim=0)) == 60
    assert 0.69 < float((found > 0).float().mean()) < 0.71
    assert torch.equal(run_in_groups(Drops().eval(), looked, (1, 1)), torch.ones(60, 400))


@pytest.mark.parametrize("arch", ["hstu", "din", "tbsm"])
def test_a_model_in_groups_gives_what_one_group_gives(arch, monkeypatch):
    """In training and in evaluation; and so does the program that an export records, which is one group."""
    module: Any = test_hstu if arch == "hstu" else test_history
    model = module.make_model(**({} if arch == "hstu" else {"arch": arch}))
    given = module.batch([[3, 4, 5], [], [6], [1, 2, 3, 4, 5, 6, 7, 8], [9, 9]])
    called: list[int] = []
    hook = model.model.network.register_forward_pre_hook(lambda network, inputs: called.append(len(inputs[0])))
    monkeypatch.undo()
    whole = model(given)[1][1]
    monkeypatch.setitem(length_groups.MOST_PADDING, "cpu", 0)
    torch.testing.assert_close(model(given)[1][1], whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.eval()(given)[1][1], whole, rtol=1e-5, atol=1e-6)
    assert called == [5, *2 * [1, 1, 1, 1, 1]]

    embeddings, features = model.model.embeddings, given.sparse_features
    rows, bags = embeddings.sequences(features), embeddings.bags(features).to_dict()
    layers, found = DenseLayers(model), []
    for table, feature in layers.lookups:
        found += [rows[feature].values(), rows[feature].lengths()] if table.is_sequence else [bags[feature]]
    for name in layers.read_as_ids:
        found += [features[name].values(), features[name].lengths()]
    hook.remove()  # it would make a constant of the number of samples
    program = dense_program(layers, given.dense_features.shape[1]).module()
    torch.testing.assert_close(program(given.dense_features, found), whole, rtol=1e-5, atol=1e-6)
