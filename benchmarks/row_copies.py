"""Time of copying one batch's rows, by element width and page size (decision 0003).

python -m benchmarks.row_copies
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.common import interleaved, machine, make_parser, median_ms, report, settings_of
from embershard.cache.rows.memory import widest_views, zeros


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=33_760_000)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--moved", type=int, default=7000, help="random rows written per call")
    parser.add_argument("--repeats", type=int, default=120)
    options = parser.parse_args()
    size = options.rows * options.dim
    small = torch.zeros(size).fill_(1).view(options.rows, options.dim)
    huge = zeros(size, torch.float32, small_pages=False).fill_(1).view(options.rows, options.dim)
    source = torch.randn(options.moved, options.dim)
    keys = [torch.randint(0, options.rows, (options.moved,)) for _ in range(20)]
    variants = {
        "float32": _writer(small, source, keys),
        "wide": _writer(*widest_views(small, source), keys),
        "float32, huge pages": _writer(huge, source, keys),
        "wide, huge pages": _writer(*widest_views(huge, source), keys),
    }
    seconds = interleaved(variants, range(options.repeats), torch.device("cpu"))
    result = {
        "benchmark": "row_copies",
        "settings": settings_of(options),
        "write_rows_ms": {name: median_ms(values) for name, values in seconds.items()},
        "machine": machine(),
    }
    report(result, options.output)


def _writer(table: Tensor, source: Tensor, keys: list[Tensor]) -> Callable[[int], None]:
    def write(index: int) -> None:
        table[keys[index % len(keys)]] = source

    return write


if __name__ == "__main__":
    main()
