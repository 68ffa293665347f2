"""What the columns of dense layers stand for: labels of those dimensions of a model's parameters that run over features
or outputs. By them, a model with other features takes each column over from where it was.

Letters: D the dim of rows, N dense features, T outputs, K = D - T factors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from embershard.models.config import FACTORIZED, WITH_TOWERS, Arch

#: Names of features, and a number where each has several columns.
Label = tuple[tuple[str, ...], int]
#: In place of a feature's name, the output of the MLP over the dense features.
DENSE = "#dense"
#: In place of a feature's name, an output of the model.
OUTPUT = "#output"


@dataclass(frozen=True)
class LabelledDim:
    """A dimension of a parameter.

    Attributes:
        labels: of its entries, in their order.
        is_input: its entries are multiplied by inputs of the layer. Zeros in it leave the layer's outputs as they are,
            whatever a new feature gives; entries of other dimensions make outputs.
    """

    labels: tuple[Label, ...]
    is_input: bool


@dataclass(frozen=True)
class SeenFeatures:
    """The features of a model, as its dense layers see them.

    Attributes:
        arch: as `ModelConfig.arch`.
        dim: of the rows.
        dense: names of the dense features.
        fields: names of the sparse features, in the order in which the tables give them.
        outputs: names of what is predicted.
    """

    arch: Arch
    dim: int
    dense: tuple[str, ...]
    fields: tuple[str, ...]
    outputs: tuple[str, ...]


def labelled_dims(inputs: SeenFeatures, parameters: Collection[str]) -> dict[str, tuple[LabelledDim | None, ...]]:
    """Return the labels of a model's dimensions, by parameter; those without any are left out. Of models with a
    history, of towers and of one's own, few or none are known.

    Args:
        parameters: names in the state dict of the model.

    >>> inputs = SeenFeatures("dlrm", 4, ("I1",), ("a", "b"), ("click",))
    >>> weight = "model.over_arch.model.0._mlp.0._linear.weight"
    >>> _, columns = labelled_dims(inputs, [weight])[weight]
    >>> [names for names, _ in columns.labels]
    [('#dense',), ('#dense',), ('#dense',), ('#dense',), ('#dense', 'a'), ('#dense', 'b'), ('a', 'b')]
    """
    if inputs.arch in FACTORIZED:
        found = _factorized(inputs, parameters)
    elif inputs.arch in ("dlrm", "dlrm_dcn", *WITH_TOWERS):
        found = _crossed(inputs, parameters)
    else:
        found = {}
    return {name: dims for name, dims in found.items() if name in parameters}


def renamed(label: Label, name_of: Callable[[str], str]) -> Label:
    """Return a label with other names of its features.

    >>> renamed((("a", "b"), 0), {"a": "c", "b": "b"}.__getitem__)
    (('b', 'c'), 0)
    """
    names, number = label
    return tuple(sorted(map(name_of, names))), number


def _crossed(inputs: SeenFeatures, parameters: Collection[str]) -> dict[str, tuple[LabelledDim | None, ...]]:
    """Return the labels of DLRM and DLRM-DCNv2, and of what is below towers over them."""
    over, cross = "model.over_arch.model", "model.inter_arch.crossnet"
    first = f"{over}.0._mlp.0._linear.weight"
    found: dict[str, tuple[LabelledDim | None, ...]] = {
        "model.dense_arch.model._mlp.0._linear.weight": (None, LabelledDim(_of_names(inputs.dense), is_input=True))
    }
    names = (DENSE, *inputs.fields)
    layers = [name for name in parameters if name.startswith(f"{cross}.")]
    if layers:
        columns = tuple(((name,), number) for name in names for number in range(inputs.dim))
        read, made = LabelledDim(columns, is_input=True), LabelledDim(columns, is_input=False)
        kinds = {"W_kernels": (made, None), "V_kernels": (None, read), "bias": (made,)}
        found |= {name: kinds[name.removeprefix(f"{cross}.").partition(".")[0]] for name in layers}
    else:
        pairs = [(tuple(sorted(pair)), 0) for pair in itertools.combinations(names, 2)]
        read = LabelledDim((*(((DENSE,), number) for number in range(inputs.dim)), *pairs), is_input=True)
    if inputs.arch not in WITH_TOWERS:
        found[first] = None, read
        found |= _outputs(inputs, over, parameters)
    return found


def _factorized(inputs: SeenFeatures, parameters: Collection[str]) -> dict[str, tuple[LabelledDim | None, ...]]:
    """Return the labels of FM, DeepFM and Wide & Deep. In an FM, a new feature changes outputs at once."""
    network, num_factors = "model.network", inputs.dim - len(inputs.outputs)
    dense = LabelledDim(_of_names(inputs.dense), is_input=True)
    outputs = LabelledDim(_of_names(inputs.outputs, OUTPUT), is_input=False)
    embeddings = tuple(((name,), number) for name in inputs.fields for number in range(num_factors))
    columns: tuple[Label, ...] = (*_of_names(inputs.dense), *embeddings)
    rows = LabelledDim(dense.labels, is_input=False)
    found: dict[str, tuple[LabelledDim | None, ...]] = {
        f"{network}.dense_rows": (rows, None),
        f"{network}.fm.dense_rows": (rows, None),
        f"{network}.wide": (dense, outputs),
        f"{network}.bias": (outputs,),
    }
    first, only = f"{network}.deep.0._mlp.0._linear.weight", f"{network}.deep.1.weight"
    found |= _outputs(inputs, f"{network}.deep", parameters)
    read = LabelledDim(columns, is_input=True)
    if first in parameters:
        found[first] = None, read
    else:
        found[only] = outputs, read
    return found


def _outputs(inputs: SeenFeatures, mlp: str, parameters: Collection[str]) -> dict[str, tuple[LabelledDim | None, ...]]:
    """Return the labels of an MLP's last layer, which is beside the others."""
    outputs = LabelledDim(_of_names(inputs.outputs, OUTPUT), is_input=False)
    return {
        name: (outputs, None) if name.endswith("weight") else (outputs,)
        for name in parameters
        if name in (f"{mlp}.1.weight", f"{mlp}.1.bias")
    }


def _of_names(names: Sequence[str], kind: str = "") -> tuple[Label, ...]:
    return tuple(((f"{kind}:{name}" if kind else name,), -1) for name in names)
