"""From a layer's per-example gradients to its parameters, and back.

Suffixes: b example, s position, i layer input, o layer output, d parameter entry, v table row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from gradtrail.factors import (
    DenseGradient,
    EmbeddingFactors,
    LayerGradient,
    ScaleFactors,
    SumGradient,
    accumulation_dtype,
    map_tensors,
    to_dense,
)
from gradtrail.hooks import Owner, Unit
from gradtrail.hooks.parameter_rows import entry_order, layer_parameters
from gradtrail.hooks.wrapped import whole_shape

__all__ = [
    "Contribution",
    "Direction",
    "TableRows",
    "TrainedLayer",
    "add_up",
    "lightened",
    "parts_of",
    "trained_layers",
]


_EXACT = {torch.float32, torch.float64}


@dataclass(frozen=True, eq=False)
class TableRows:
    """A gradient that has entries in some rows of a table only; rows may repeat.

    Attributes:
        index_n: Row numbers. Shape ``[n]``.
        values_no: What is added to each. Shape ``[n, o]``.
    """

    index_n: Tensor
    values_no: Tensor


Contribution: TypeAlias = Tensor | TableRows


@dataclass(frozen=True, eq=False)
class Direction:
    """One gradient of a layer, laid out as written-out gradients are.

    Attributes:
        weight: The weight's entries. ``[o, i]``, ``[v, o]`` or ``[d]``.
        bias: The bias's entries, or None. Shape ``[o]`` or ``[d]``.
    """

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, dense: DenseGradient) -> Direction:
        """Take the only row of written-out gradients."""
        row_d = dense.values_bd[0]
        bias = row_d[dense.weight_size :] if dense.has_bias else None
        return cls(row_d[: dense.weight_size].view(dense.shape), bias)


@dataclass(eq=False)
class TrainedLayer:
    """One captured layer and the parameters that its gradient belongs to.

    Attributes:
        name: The layer's name.
        owner: The module (any, where several share the parameter) that gives the layout.
        parameters: By role, ``"weight"`` or ``"bias"``.
        names: Names of the parameters in the model, by role.
    """

    name: str
    owner: Owner
    parameters: dict[str, nn.Parameter]
    names: dict[str, str]
    _orders: dict[tuple[int, ...], tuple[int, ...] | Tensor] = field(default_factory=dict)

    @property
    def is_row_major(self) -> bool:
        """Whether the weight of a linear layer is ``[o, i]``, as its written-out gradient."""
        return isinstance(self.owner.module, nn.Linear)

    def shape(self, role: str) -> torch.Size:
        """Shape of a whole parameter, also where this process holds a part of it."""
        return whole_shape(self.owner.module, role)

    def total(
        self, gradient: LayerGradient, rows_k: Tensor | None
    ) -> dict[str, list[Contribution]]:
        """Add up some examples' gradients, without writing out any single one.

        Args:
            gradient: The layer's gradients.
            rows_k: Numbers of the examples, or None for all. Shape ``[k]``.

        Returns:
            By role, terms whose sum is the gradient of these examples, in float32 or wider.
        """
        found: dict[str, list[Contribution]] = {role: [] for role in self.parameters}
        for part in parts_of(gradient):
            part = _as_one_example(part, rows_k)  # noqa: PLW2901  # the same uses, fewer examples
            if isinstance(part, EmbeddingFactors) and self._is_table(part):
                found["weight"].append(_table_rows(part))
                continue
            named = self.owner.rule.to_parameters(self.owner.module, to_dense(part))
            for role in found:
                if role in named:
                    found[role].append(named[role][0])
        return found

    def direction(self, gradient: LayerGradient, values: Mapping[str, Tensor]) -> Direction:
        """Bring tensors shaped like the parameters into the layout of the written-out gradient.

        Args:
            gradient: Gradients of the layer, which give the layout.
            values: By role; a role that is missing has zeros.

        Returns:
            The direction whose inner products with gradients are those of ``values``; views where
            the layout allows.
        """
        shape, has_bias = layout_of(gradient)
        dense = {role: v.to_dense() if v.is_sparse else v for role, v in values.items()}
        weight = dense.get("weight")
        bias = dense["bias"].reshape(-1) if has_bias and "bias" in dense else None
        if weight is None:
            like = next(iter(dense.values()))
            return Direction(like.new_zeros(shape), bias)
        order = self._order_of(shape, has_bias=has_bias)
        if isinstance(order, tuple):
            return Direction(weight.permute(order).reshape(shape), bias)
        row_d = weight.new_empty(order.numel())
        row_d[order.to(weight.device)] = weight.reshape(-1)
        return Direction(row_d.view(shape), bias)

    def matrix(self, weight: Tensor, gradient: LayerGradient) -> Tensor | None:
        """View a tensor shaped like the weight as the written-out gradient lies, or None."""
        shape, has_bias = layout_of(gradient)
        order = self._order_of(shape, has_bias=has_bias)
        if not isinstance(order, tuple) or weight.is_sparse:
            return None
        laid_out = weight.permute(order).reshape(shape)
        same = laid_out.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        return laid_out if same else None

    def _order_of(self, shape: tuple[int, ...], *, has_bias: bool) -> tuple[int, ...] | Tensor:
        if shape not in self._orders:
            self._orders[shape] = entry_order(self.owner, shape, has_bias=has_bias)
        return self._orders[shape]

    def _is_table(self, part: EmbeddingFactors) -> bool:
        """Whether the parameter is the table as it stands."""
        o = part.output_gradient_bso.shape[2]
        plain = isinstance(self.owner.module, (nn.Embedding, nn.EmbeddingBag, nn.Linear))
        return plain and self.shape("weight") == (part.num_embeddings, o)


def trained_layers(units: tuple[Unit, ...], model: nn.Module) -> dict[str, TrainedLayer]:
    """Find the parameters of captured layers.

    Args:
        units: The layers, of trained parameters only.
        model: The model they belong to.

    Returns:
        By layer name.
    """
    return {
        name: TrainedLayer(name, found.owner, found.parameters, found.names)
        for name, found in layer_parameters(units, model).items()
    }


def add_up(gradient: LayerGradient) -> DenseGradient:
    """Sum the gradients of all examples, written out as one row, without writing out any other."""
    parts = tuple(_as_one_example(part, None) for part in parts_of(gradient))
    return to_dense(parts[0] if len(parts) == 1 else SumGradient(parts))


def lightened(gradient: LayerGradient) -> LayerGradient:
    """Write a norm's gradients out, which are smaller so; others come back as they are."""
    if not isinstance(gradient, ScaleFactors):
        return gradient
    exact = {gradient.activation_bsd.dtype, gradient.output_gradient_bsd.dtype} <= _EXACT
    return to_dense(gradient) if exact else gradient


def layout_of(gradient: LayerGradient) -> tuple[tuple[int, ...], bool]:
    """Give the shape of the weight part and whether a bias follows, as ``to_dense`` would."""
    first = next(parts_of(gradient))
    if isinstance(first, DenseGradient):
        return tuple(first.shape), first.has_bias
    if isinstance(first, ScaleFactors):
        return (first.activation_bsd.shape[2],), first.has_bias
    if isinstance(first, EmbeddingFactors):
        return (first.num_embeddings, first.output_gradient_bso.shape[2]), False
    i, o = first.activation_bsi.shape[2] // first.groups, first.output_gradient_bso.shape[2]
    return (o, i), first.has_bias


def parts_of(gradient: LayerGradient) -> Iterator[LayerGradient]:
    """Go through the uses of the parameter."""
    yield from gradient.parts if isinstance(gradient, SumGradient) else (gradient,)


def _as_one_example(part: LayerGradient, rows_k: Tensor | None) -> LayerGradient:
    """Make one example of some: their positions in a row, whose gradient is the sum of theirs."""

    def joined(tensor: Tensor) -> Tensor:
        chosen = tensor if rows_k is None else tensor[rows_k]
        return chosen.flatten(0, 1).unsqueeze(0)

    if isinstance(part, DenseGradient):
        chosen = part.values_bd if rows_k is None else part.values_bd[rows_k]
        return replace(part, values_bd=chosen.sum(0, keepdim=True))
    return map_tensors(part, joined)


def _table_rows(part: EmbeddingFactors) -> TableRows:
    index_n, g_no = part.index_bs.flatten(), part.output_gradient_bso.flatten(0, 1)
    if part.padding_idx is not None:
        g_no = g_no * (index_n != part.padding_idx).unsqueeze(1)
    return TableRows(index_n, g_no.to(accumulation_dtype(g_no.dtype)))
