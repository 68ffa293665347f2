"""What the backward of weighted bags costs where nobody trains their weights (pytorch/torchrec#4703).

    python -m benchmarks.weighted_bags

The same bags over the same slots, in turn: without weights; with weights, whose gradients FBGEMM computes for nobody;
and as `SlotTable` asks for them, without. Milliseconds of the backward, optimizer included; rows are compared at the
end.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode

from benchmarks.common import machine, make_parser, median_ms, median_ratio, report, settings_of
from embershard.sharding.torchrec.slots import SlotTable


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--rows", type=int, default=400_000, help="slots of all tables")
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--ids", type=int, default=10, help="of a bag")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    cpu, params = torch.device("cpu"), {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
    names, seconds = ("no weights", "all gradients", "masked"), dict[str, list[float]]()
    tables = {
        name: SlotTable(options.dim, range(options.tables), cpu, PoolingMode.SUM, SparseType.FP32, params)
        for name in names
    }
    for table in tables.values():
        table.resize(options.rows)
    num_ids = options.tables * options.batch_size * options.ids
    offsets = torch.arange(0, num_ids + 1, options.ids)
    for number in range(options.rounds + 1):
        generator = torch.Generator().manual_seed(number)
        slots = torch.randint(1, options.rows + 1, (num_ids,), generator=generator)
        weights = torch.rand(num_ids, generator=generator)
        for name in names[:: -1 if number % 2 else 1]:
            given: dict[str, Any] = {} if name == "no weights" else {"per_sample_weights": weights}
            forward = tables[name].tbe if name == "all gradients" else tables[name].forward
            output = forward(slots, offsets, **given)
            gradients = torch.ones_like(output)
            begin = time.perf_counter()
            output.backward(gradients)
            if number:  # the first touches memory
                seconds.setdefault(name, []).append(time.perf_counter() - begin)
    masked, others = (tables[name].payload for name in ("masked", "all gradients"))
    result = {
        "benchmark": "weighted_bags",
        "settings": settings_of(options),
        "backward_ms": {name: median_ms(values) for name, values in seconds.items()},
        "masked_over_all_gradients": median_ratio(seconds["masked"], seconds["all gradients"]),
        "masked_over_no_weights": median_ratio(seconds["masked"], seconds["no weights"]),
        "same_rows": all(torch.equal(a, b) for a, b in zip(masked, others, strict=True)),
        "machine": machine(),
    }
    report(result, options.output)


if __name__ == "__main__":
    main()
