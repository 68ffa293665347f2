"""Which operations torch refuses on a GPU with `train.deterministic`, found without a GPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Of the list in torch 2.13's `use_deterministic_algorithms`, what a recommendation model may meet; and kthvalue, which
# torch 2.12 and earlier refuse. (Not here: bags of the maximum, pooling, padding and interpolation of images, CTC.)
_REFUSED = {
    "aten::kthvalue",
    "aten::histc",
    "aten::put",
    "aten::put_",
    "aten::index_reduce_",
    "aten::nll_loss2d_forward",
}
_WITH_INDICES = {"aten::median", "aten::nanmedian"}
_RUNNING_SUMS = {"aten::cumsum", "aten::cumsum_"}


class Refused(TorchDispatchMode):
    """Collects operations, of the forward and the backward, that torch would refuse on a GPU: `found`, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.num_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.num_seen += 1
        name = func._schema.name
        is_sum_of_floats = name in _RUNNING_SUMS and isinstance(made, Tensor) and made.is_floating_point()
        has_weights = name == "aten::bincount" and len(args) > 1 and args[1] is not None
        is_product = name.startswith("aten::scatter_reduce") and "prod" in args
        has_indices = name in _WITH_INDICES and isinstance(made, tuple)
        if name in _REFUSED or is_sum_of_floats or has_weights or is_product or has_indices:
            self.found.add(name)
        return made
