"""In place of FBGEMM's kernels, torch's operations: enough for a training with one rank whose tables have one width, on
a machine that has FBGEMM's CPU build (a few megabytes of wheels) beside torch for GPUs.

    python -m tests.gpu.torch_tables cuda train quickstart --set train.max_steps=60

is `embershard train ...` in this process, with kernels for `cuda`. They are for tests: gradients of all rows are summed
into a tensor as large as the table, so that the host waits for nothing.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_MEAN = 1  # of FBGEMM's PoolingMode
#: FBGEMM's default split of an id's 32 bits between batch and table.
_BATCH_BITS = 26


class _Lookup(NamedTuple):
    """A call's parts: rows [R, D] of all tables; of N ids in F * B bags, the row (int64 [N]) and the bag of each; and,
    for means, what each id weighs."""

    rows: Tensor
    row_of_id: Tensor
    bag_of_id: Tensor
    weight_of_id: Tensor | None
    num_features: int


def _held(given: dict[str, Any], *names: str) -> Tensor:
    """Return the one of these tensors that is there."""
    (found,) = (given[name] for name in names if given.get(name) is not None and given[name].numel())
    return found  # type: ignore[no-any-return]


def _lookup(given: dict[str, Any]) -> _Lookup:
    weights, dim = _held(given, "dev_weights", "host_weights"), int(given["max_D"])
    offsets, num_features = given["offsets"], given["D_offsets"].numel() - 1
    num_bags, num_ids = offsets.numel() - 1, given["indices"].numel()
    lengths, bags = offsets.diff(), torch.arange(num_bags, device=offsets.device)
    bag_of_id = bags.repeat_interleave(lengths, output_size=num_ids)
    first_row = given["weights_offsets"] // dim
    row_of_id = first_row[bag_of_id // max(1, num_bags // num_features)] + given["indices"]
    is_mean = given["pooling_mode"] == _MEAN
    weight_of_id = lengths.clamp(min=1).reciprocal()[bag_of_id].unsqueeze(1) if is_mean else None
    return _Lookup(weights.view(-1, dim), row_of_id, bag_of_id, weight_of_id, num_features)


def _forward(given: dict[str, Any]) -> Tensor:
    lookup = _lookup(given)
    dim, num_bags = lookup.rows.shape[1], given["offsets"].numel() - 1
    assert given["total_D"] == lookup.num_features * dim, "tables of several widths"
    picked = lookup.rows[lookup.row_of_id].float()
    picked = picked if lookup.weight_of_id is None else picked * lookup.weight_of_id
    pooled = picked.new_zeros(num_bags, dim).index_add_(0, lookup.bag_of_id, picked)
    return pooled.view(lookup.num_features, -1, dim).transpose(0, 1).flatten(1)


def _gradients(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the table's rows and the sum of the gradients of each, both [R, D]."""
    lookup = _lookup(given)
    dim = lookup.rows.shape[1]
    of_bags = given["grad_output"].view(-1, lookup.num_features, dim).transpose(0, 1).reshape(-1, dim)
    of_ids = of_bags[lookup.bag_of_id]
    of_ids = of_ids if lookup.weight_of_id is None else of_ids * lookup.weight_of_id
    return lookup.rows, of_ids.new_zeros(lookup.rows.shape).index_add_(0, lookup.row_of_id, of_ids)


def _update_by_sgd(given: dict[str, Any]) -> Tensor:
    rows, gradients = _gradients(given)
    rows.sub_(given["learning_rate_tensor"].to(rows.device) * gradients)
    return torch.empty(0)


def _update_by_rowwise_adagrad(given: dict[str, Any]) -> Tensor:
    assert not given.get("weight_decay"), "weight decay"
    rows, gradients = _gradients(given)
    momentum = _held(given, "momentum1_dev", "momentum1_host").view(-1)
    momentum.add_(gradients.square().mean(1))
    rate = given["learning_rate_tensor"].to(rows.device) / (momentum.sqrt() + given.get("eps", 0.0))
    rows.sub_(rate.unsqueeze(1) * gradients)
    return torch.empty(0)


def _ends_of_lengths(given: dict[str, Any]) -> Tensor:
    lengths = given["t_in"]
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=lengths.dtype)])


_KERNELS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "asynchronous_complete_cumsum": _ends_of_lengths,
    "get_infos_metadata": lambda given: (_BATCH_BITS, (1 << _BATCH_BITS) - 1),
    "split_embedding_codegen_forward_unweighted_pt2_wrapper": _forward,
    "split_embedding_backward_codegen_sgd_unweighted_pt2_wrapper": _update_by_sgd,
    "split_embedding_backward_codegen_rowwise_adagrad_unweighted_pt2_wrapper": _update_by_rowwise_adagrad,
}


def register(device: str) -> torch.library.Library:
    """Compute with torch's operations on this kind of device, for as long as what is returned lives."""
    import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401 (it declares the operations)

    library = torch.library.Library("fbgemm", "IMPL")
    for name, compute in _KERNELS.items():
        names = [argument.name for argument in getattr(torch.ops.fbgemm, name).default._schema.arguments]

        def kernel(*values: Any, names: list[str] = names, compute: Any = compute) -> Any:
            return compute(dict(zip(names, values, strict=False)))

        library.impl(name, kernel, device.upper(), allow_override=True)
    return library


def main(argv: list[str]) -> int:
    """Run a command of embershard's in this process, as its only rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    here = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(here, MASTER_PORT=port)
    from embershard.commands import cli

    device, *words = argv
    kept = register(device) if device != "none" else None
    code = cli.main(words)
    del kept
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
