"""TorchRec names its work for profilers, and takes no time for it where none runs."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.autograd import profiler
from torchrec.distributed import comm_ops, dist_data, embeddingbag

from embershard.sharding.torchrec.compat import name_work_for_profilers_only


@pytest.fixture(autouse=True)
def _as_torchrec_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever test built a pipeline before: names are made, and are what they were afterwards."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torchrec.") and hasattr(module, "record_function"):
            monkeypatch.setattr(module, "record_function", profiler.record_function)


def names_of(function: Any) -> Counter[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as traced:
        function()
    return Counter({each.key: each.count for each in traced.key_averages() if each.key.startswith("##")})


def named() -> None:
    with comm_ops.record_function("## a ##"), dist_data.record_function("## b ##"):
        torch.ones(1)
    with embeddingbag.record_function("## a ##"):
        torch.ones(1)


def test_a_trace_has_the_names_that_it_had() -> None:
    before = names_of(named)
    name_work_for_profilers_only()
    assert names_of(named) == before == {"## a ##": 2, "## b ##": 1}


def test_without_a_profiler_nothing_is_named() -> None:
    assert isinstance(comm_ops.record_function("## a ##"), profiler.record_function), "the control"
    name_work_for_profilers_only()
    for module in (comm_ops, dist_data, embeddingbag):
        assert isinstance(module.record_function("## a ##"), nullcontext)
    with profiler.profile():
        assert isinstance(comm_ops.record_function("## a ##"), profiler.record_function)
    assert isinstance(comm_ops.record_function("## a ##"), nullcontext)
    name_work_for_profilers_only()  # once more
    assert isinstance(comm_ops.record_function("## a ##"), nullcontext)
