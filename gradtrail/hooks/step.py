"""One root forward in a training loop, on its way to its backward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from gradtrail.factors import (
    DenseGradient,
    EmbeddingFactors,
    LayerGradient,
    LinearFactors,
    Projection,
    ScaleFactors,
    SumGradient,
    map_tensors,
    merge_uses,
    project,
    to_dense,
)
from gradtrail.hooks.capture import Capture

__all__ = ["Form", "ScaledLayers", "Step"]

_OUTPUT_SIDE = {
    DenseGradient: "values_bd",
    EmbeddingFactors: "output_gradient_bso",
    LinearFactors: "output_gradient_bso",
    ScaleFactors: "output_gradient_bsd",
}


@dataclass(frozen=True)
class Form:
    """The form that layer gradients are brought into.

    Attributes:
        projection: Compression, or None.
        capture: Factors as they are, written out, or whichever is smaller.
    """

    projection: Projection | None
    capture: Literal["factored", "materialized", "auto"]

    def bring(self, name: str, gradient: LayerGradient) -> LayerGradient:
        """Bring one layer's gradient into the form."""
        gradient = merge_uses(gradient)
        if self.projection is not None:
            gradient = project(name, gradient, self.projection)
        if self.capture == "materialized" or (
            self.capture == "auto" and _dense_is_smaller(gradient)
        ):
            gradient = to_dense(gradient)
        return gradient


class ScaledLayers(Mapping[str, LayerGradient]):
    """Layer gradients whose scale is applied when one is asked for.

    Attributes:
        unscaled: The gradients as the backward of the loop's loss brought them.
    """

    unscaled: Mapping[str, LayerGradient]

    def __init__(self, unscaled: Mapping[str, LayerGradient], scale: float | Tensor) -> None:
        """Keep both.

        Args:
            unscaled: Gradients by layer name.
            scale: What they are to be multiplied with.
        """
        self.unscaled = unscaled
        self._scale = scale
        self._scaled: dict[str, LayerGradient] = {}

    def __getitem__(self, name: str) -> LayerGradient:
        """Give a layer's gradient, scaled."""
        if name not in self._scaled:
            self._scaled[name] = _scaled(self.unscaled[name], self._scale)
        return self._scaled[name]

    def __iter__(self) -> Iterator[str]:
        """Go through the names, in order."""
        return iter(self.unscaled)

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.unscaled)


@dataclass(eq=False)
class Step:
    """What one forward knows, and what its backward brings.

    Attributes:
        capture: State of the hooked layers.
        form: Form of the layer gradients.
        ids: Ids of the examples.
        layers: Layer gradients that have come, by layer name.
        fields: What the model was called with, until the forward is over; empty if not needed.
        divisor: What the loss was divided by.
        weights: How much of it each example stands for, as ``Reduction.weights`` gives it.
        spans: Whether the divisor is that of a whole optimizer step.
        scale: What gradients are multiplied with to undo the loop's mean; None for 1.
        keeps_unscaled: Whether that waits until somebody asks for a layer.
        task: The backward under way, by the engine's number.
        borrowed: Storages that the loop may write to before the block is read.
        copies: Copies of what lies there, by the original's id, with the original.
    """

    capture: Capture
    form: Form
    ids: tuple[int | str, ...]
    layers: dict[str, LayerGradient] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    divisor: float | Tensor = 1.0
    weights: Tensor | None = None
    spans: bool = False
    scale: float | Tensor | None = None
    keeps_unscaled: bool = False
    task: int = -1
    borrowed: frozenset[int] = frozenset()
    copies: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def keep(self, name: str, gradient: LayerGradient) -> None:
        """Keep one layer's gradient in the form that was asked for."""
        gradient = map_tensors(self.form.bring(name, gradient), self._own)
        # after the projection, which makes it smaller
        at_once = self.scale is not None and not self.keeps_unscaled
        self.layers[name] = _scaled(gradient, self.scale) if at_once else gradient

    def take(self, names: Iterable[str]) -> Mapping[str, LayerGradient]:
        """Hand the layer gradients out, in the order of the names, and hold none of them."""
        layers = {name: self.layers[name] for name in names if name in self.layers}
        self.layers = {}
        waits = self.scale is not None and self.keeps_unscaled
        return ScaledLayers(layers, self.scale) if waits else layers

    def _own(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of the model's or the caller's own, once for all layers that read it."""
        if tensor.untyped_storage().data_ptr() not in self.borrowed:
            return tensor
        if id(tensor) not in self.copies:
            self.copies[id(tensor)] = (tensor, tensor.clone())
        return self.copies[id(tensor)][1]


def _scaled(gradient: LayerGradient, scale: float | Tensor) -> LayerGradient:
    """Undo a mean, in float32 or wider: low precision would round or overflow."""
    if isinstance(gradient, SumGradient):
        return SumGradient(tuple(_scaled(part, scale) for part in gradient.parts))
    name = _OUTPUT_SIDE[type(gradient)]
    values = getattr(gradient, name)
    wide = values if values.dtype == torch.float64 else values.float()
    factor = scale.to(values.device) if isinstance(scale, Tensor) else scale
    return replace(gradient, **{name: wide * factor})


def _dense_is_smaller(gradient: LayerGradient) -> bool:
    """Compare ``s (i + o)`` numbers of factors with ``i o`` written out."""
    if not isinstance(gradient, LinearFactors):
        return False
    i, o = gradient.activation_bsi.shape[2], gradient.output_gradient_bso.shape[2]
    return gradient.num_positions * (i + o) >= (i // gradient.groups) * o
