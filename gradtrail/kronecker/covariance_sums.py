"""The sums that covariances are made of, and the positions that count in them.

Suffixes: g group, b example, s position, t any stacked position, i input (with a constant where
there is a bias), o output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradtrail.factors import LinearFactors
from gradtrail.kronecker.symmetric import add_products

__all__ = [
    "InputSum",
    "KroneckerFactors",
    "LayerSums",
    "add_weighted",
    "counted_positions",
    "joint_owners",
]


@dataclass(frozen=True, eq=False)
class KroneckerFactors:
    """Covariances of one layer, a mean over the data.

    Attributes:
        activation_cov_gii: ``A``, with the constant of the bias in the last row and column.
            Layers that read one input hold the same tensor. Shape ``[g, i, i]``.
        gradient_cov_goo: ``S``. Shape ``[g, o, o]``.
        num_examples: Number of examples ``N``.
        num_positions: Number of positions with a gradient ``P``.
        input_of: Name of the first layer with this input.
    """

    activation_cov_gii: Tensor
    gradient_cov_goo: Tensor
    num_examples: int
    num_positions: int
    input_of: str


@dataclass(frozen=True, eq=False)
class LayerSums:
    """What the covariances of one layer are made of, not divided by anything.

    Attributes:
        activation_gii: Sum over positions with a gradient; layers that read one input hold the
            same tensor. Shape ``[g, i, i]``.
        gradient_goo: Sum over all positions. Shape ``[g, o, o]``.
        count: Number of positions with a gradient, int64, a scalar.
        input_of: Name of the first layer with this input.
    """

    activation_gii: Tensor
    gradient_goo: Tensor
    count: Tensor
    input_of: str


@dataclass(eq=False)
class InputSum:
    """Sum over the inputs of layers that read the same ones."""

    names: set[str]
    sum_gii: Tensor
    count: Tensor

    def without(self, names: set[str]) -> InputSum:
        """Split off layers that read something else from now on."""
        self.names -= names
        return InputSum(names, self.sum_gii.clone(), self.count.clone())


def counted_positions(g_bso: Tensor) -> Tensor:
    """Tell which positions have a gradient that is not exactly zero: ``[b s]``, bool."""
    g_to = g_bso.flatten(0, 1)
    if g_to.device.type != "cpu":
        return (g_to != 0).any(1)  # without asking the device
    some_t = g_to[:, 0] != 0  # one entry nearly always tells
    doubtful = (~some_t).nonzero()[:, 0]
    some_t[doubtful] = (g_to[doubtful] != 0).any(1)
    return some_t


def add_weighted(inputs: InputSum, part: LinearFactors, weights_t: Tensor) -> None:
    """Add the products of one use's inputs, with the bias's constant, where the weight is 1."""
    sum_gii = inputs.sum_gii
    a_ti = part.activation_bsi.flatten(0, 1)
    count = weights_t.sum()
    if a_ti.device.type == "cpu" and not count:
        return
    if a_ti.device.type != "cpu":
        a_ti = torch.where(weights_t.unsqueeze(1), a_ti, a_ti.new_zeros(()))
    elif int(count) < a_ti.shape[0]:
        a_ti = a_ti[weights_t]
    width = a_ti.shape[1] // part.groups
    a_tgi = a_ti.to(sum_gii.dtype).unflatten(1, (part.groups, width))
    for group in range(part.groups):
        add_products(sum_gii[group, :width, :width], a_tgi[:, group])
    if part.has_bias:
        sum_gii[:, :width, width] += a_tgi.sum(0)
        sum_gii[:, width, width] += count
    inputs.count += count


def joint_owners(seen: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Say which layers share an input where several processes have summed.

    Args:
        seen: What each has seen: by layer, the first layer there with its input.

    Returns:
        By layer, the first layer with its input. Two share one where they do in every process that
        saw them.
    """
    names = list(dict.fromkeys(name for one in seen for name in one))
    inputs = {name: tuple(one.get(name) for one in seen) for name in names}
    first: dict[tuple[str | None, ...], str] = {}
    for name in names:
        first.setdefault(inputs[name], name)
    return {name: first[inputs[name]] for name in names}
