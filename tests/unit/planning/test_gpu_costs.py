"""What a GPU's kernels cost: layers by what limits them, rows by sectors, and the host's thread beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embershard.errors import ConfigError
from embershard.models.dense_size import DenseSize
from embershard.planning.cost import work as formulas
from embershard.planning.cost.dense import SMALL_KERNELS, dense_work
from embershard.planning.cost.rates import Rates, StepWork, step_parts
from embershard.planning.cost.topology import load_topology, save_topology
from embershard.planning.make_plan import best_candidate, make_plan
from embershard.planning.request import Budget
from embershard.settings.decoding import decode
from embershard.sharding.sizes import ModelSize, TableSize
from tests.unit.planning.requests import make_request, tight_task

DLRM = DenseSize("dlrm", 13, 26, 128, (512, 256, 128), (1024, 1024, 512, 256, 1))


def model(dense: DenseSize = DLRM, **changes) -> ModelSize:
    size = ModelSize((), dense.flops_per_sample, dense.parameter_bytes, 0, dense.activation_bytes_per_sample)
    return replace(size, **{"products": dense.products, "passes": dense.passes, **changes})


def test_rows_are_read_once_and_in_sectors_by_hand() -> None:
    """10 lookups of 4 rows of 16 bytes, with a state of 4, pooled into 5 vectors."""
    read = 4 * 32 + 6 * 32 / 3  # each row's sector, and its repetitions from L2
    pooled = 5 * 16 + (5 * 16 + 5 * 16 / 3)  # written; their gradients, and for the further ids of bags from L2
    update = 4 * 2 * (32 + 32)  # weights and state, read and written
    found = formulas.gpu_embedding_bytes(10, 4, 5, TableSize("t", 100, 4, state_bytes=4))
    assert found == pytest.approx(read + pooled + 10 * 144 + update)


@given(st.floats(1, 1e6), st.floats(0, 1), st.integers(1, 64), st.sampled_from([0, 4]), st.sampled_from([0, 4, 8]))
def test_hot_rows_never_cost_more(num_ids, share, quarter_columns, state, state_per_column) -> None:
    table = TableSize("t", 100, 4 * quarter_columns, state_bytes=state, state_bytes_per_column=state_per_column)
    all_distinct = formulas.gpu_embedding_bytes(num_ids, num_ids, num_ids, table)
    assert formulas.gpu_embedding_bytes(num_ids, share * num_ids, num_ids, table) <= all_distinct


@pytest.mark.parametrize(
    ("products", "batch_size", "limit"),
    [([(4096, 4096)], 8192, "dense_flops"), ([(4096, 1)], 8192, "activation_bytes"), ([(64, 64)], 64, "launches")],
)
def test_a_layer_takes_what_limits_it(products, batch_size, limit) -> None:
    rates = load_topology("h100").at("bf16").rates_for(1)
    found = dense_work(model(products=products, passes=()), batch_size, 2, rates)
    found = replace(found, launches=found.launches - SMALL_KERNELS)
    assert [name for name, amount in found.to_dict().items() if amount] == [limit]
    assert limit != "launches" or found.launches == 3, "the output, and two gradients"
    assert limit != "dense_flops" or found.dense_flops == pytest.approx(6 * 8192 * 4096**2)


@pytest.mark.parametrize("machine", ["a100-40", "h100", "b200"])
def test_precision_matters_less_for_small_batches(machine) -> None:
    def seconds(precision: str, number_bytes: int, batch_size: int) -> float:
        rates = load_topology(machine).at(precision).rates_for(1)
        return step_parts(dense_work(model(), batch_size, number_bytes, rates), rates)["dense"]

    of_large = [seconds(*each, 65_536) for each in (("fp32", 4), ("tf32", 4), ("bf16", 2))]
    assert of_large[0] > 1.5 * of_large[1]
    assert of_large[1] > 1.5 * of_large[2]
    of_small = [seconds(*each, 32) for each in (("fp32", 4), ("tf32", 4), ("bf16", 2))]
    assert 1 <= of_small[0] / of_small[2] < 0.8 * of_large[0] / of_large[2], "half of them are launches"


def test_layers_that_are_not_known_one_by_one_are_charged_in_all() -> None:
    found = dense_work(model(products=(), passes=()), 100, 4, Rates())
    assert found.dense_flops == 100 * DLRM.flops_per_sample
    assert found.activation_bytes == 2 * 100 * DLRM.activation_bytes_per_sample


def test_a_format_without_a_speed_is_refused() -> None:
    volta = load_topology("v100")
    assert volta.at("bf16").precision == "fp32", "V100s have none"
    with pytest.raises(ConfigError, match=r"Bandwidths\.bf16_flops: got 0.*needed the operations of dense layers"):
        replace(volta, precision="bf16").rates_for(1)
    fp32, fp16 = (volta.at(name).rates_for(1).seconds_per_flop for name in ("fp32", "fp16"))
    assert fp32 / fp16 == pytest.approx(125 / 15.7), "but fp16, in which others train"


@pytest.mark.slow
def test_a_program_without_a_hosts_thread_is_a_machines_file(tmp_path) -> None:
    """Steps of CUDA graphs, say: its assumptions are 0, and a step is the GPUs' alone."""
    h100 = load_topology("h100x2")
    own = replace(h100.assumptions, step_overhead_seconds=0.0, collective_host_seconds=0.0)
    save_topology(replace(h100, name="graphs", assumptions=own), tmp_path / "graphs.toml")
    graphs = load_topology(str(tmp_path / "graphs.toml"))
    request = make_request(Budget(device_bytes=10**9), topology=h100, rates=h100.rates_for(2))
    with_host, without = (
        best_candidate(replace(request, topology=each, rates=each.rates_for(2))) for each in (h100, graphs)
    )
    assert without.tables == with_host.tables
    assert with_host.step_seconds == pytest.approx(6.3e-3)
    assert without.step_seconds < 2e-3


@pytest.mark.slow
def test_a_slower_host_changes_no_placement() -> None:
    """All plans are as fast then: what is chosen is still the GPUs' best, and the bound is the host."""
    request = make_request(Budget(device_bytes=10**9), world_size=4, rows=(40_000, 9000, 5000, 900))
    rates = replace(request.rates, step_overhead_seconds=0.0)
    fast = best_candidate(replace(request, rates=rates))
    slow = best_candidate(replace(request, rates=replace(rates, step_overhead_seconds=1.0)))
    assert slow.tables == fast.tables
    assert slow.bound is not None
    assert slow.step_seconds == pytest.approx(slow.bound.step_seconds) == pytest.approx(1.0)
    assert fast.step_seconds < 0.1


def test_work_in_plans_of_before_is_read() -> None:
    """It has no bytes to other nodes: all are charged as within the node, until the plan is made again."""
    old = {"dense_flops": 1e9, "embedding_bytes": 1e6, "sent_id_bytes": 10.0, "sent_embedding_bytes": 20.0}
    found = decode(StepWork, old)
    assert (found.all_to_all_bytes, found.network_id_bytes, found.launches) == (30.0, 0, 0)


@pytest.mark.slow
def test_beside_a_host_the_gpus_own_gap_is_told() -> None:
    """A step as long as the host's is no longer than the least, whatever the GPUs do: their own gap is that of a plan
    without the host."""
    request = tight_task(2)
    slow = make_plan(replace(request, rates=replace(request.rates, step_overhead_seconds=1.0)))
    assert slow.bound is not None
    assert slow.bound.step_seconds == pytest.approx(slow.bound.least_seconds)
    alone = make_plan(request)
    assert alone.bound is not None
    gap = alone.bound.step_seconds / alone.bound.least_seconds - 1
    assert gap > 0.01, "else the test shows nothing"
    assert slow.bound.own_gap == pytest.approx(gap)
    assert f"the GPUs' own work is within {100 * gap:.1f} %" in slow.bound.sentence
    assert "the host's thread" not in alone.bound.sentence
