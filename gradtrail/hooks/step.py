"""One root forward in a training loop, on its way to its backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

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
from gradtrail.hooks.examples import BatchShape

__all__ = ["Form", "Observer", "ScaledLayers", "Step", "Transform", "check_projection"]

Observer: TypeAlias = Callable[[str, LayerGradient], None]
Transform: TypeAlias = Callable[[str, LayerGradient], LayerGradient]

_OUTPUT_SIDE = {
    DenseGradient: "values_bd",
    EmbeddingFactors: "output_gradient_bso",
    LinearFactors: "output_gradient_bso",
    ScaleFactors: "output_gradient_bsd",
}


def check_projection(projection: object) -> None:
    """Refuse what is no projection.

    Args:
        projection: What the user passed.

    Raises:
        TypeError: If it is neither a ``Projection`` nor None.
    """
    if projection is None or isinstance(projection, Projection):
        return
    advice = "Make one: Projection(...)"
    if isinstance(projection, int) and not isinstance(projection, bool):
        advice = f"Write Projection(dim={projection})"
    elif isinstance(projection, str):
        advice = f"Write Projection(kind={projection!r})"
    raise TypeError(f"projection must be a Projection or None, got {projection!r}. {advice}.")


@dataclass(frozen=True)
class Form:
    """The form that layer gradients are brought into.

    Attributes:
        projection: Compression, or None.
        capture: Factors as they are, written out, or whichever is smaller.
        observers: Called with ``(layer name, gradient)`` before a gradient is written out.
        transform: Makes something else of the examples' own gradients, before they are projected.
    """

    projection: Projection | None
    capture: Literal["factored", "materialized", "auto"]
    observers: Mapping[int, Observer] = field(default_factory=dict)
    transform: Transform | None = None

    def compress(self, name: str, gradient: LayerGradient) -> LayerGradient:
        """Project one layer's gradient, where that was asked for."""
        if self.projection is None:
            return gradient
        return project(name, gradient, self.projection)

    def write_out(self, gradient: LayerGradient) -> LayerGradient:
        """Write out what is to be written out; anything else comes back as it is."""
        if self.capture == "materialized" or (
            self.capture == "auto" and _dense_is_smaller(gradient)
        ):
            return to_dense(gradient)
        return gradient

    def tell(self, name: str, gradient: LayerGradient) -> None:
        """Call the observers with one layer's gradient."""
        for observer in tuple(self.observers.values()):
            observer(name, gradient)


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
        shape: Where the examples have their positions.
        notes: What callbacks noted of the call, by callback.
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
    shape: BatchShape | None = None
    notes: Mapping[Hashable, Any] = field(default_factory=dict)
    scale: float | Tensor | None = None
    keeps_unscaled: bool = False
    task: int = -1
    borrowed: Collection[int] = frozenset()
    copies: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def keep(self, name: str, gradient: LayerGradient) -> None:
        """Keep one layer's gradient in the form that was asked for."""
        form, scale = self.form, self.scale
        gradient = merge_uses(gradient)
        if form.transform is not None:  # what an optimizer makes of a gradient is not linear in it
            gradient, scale = form.transform(name, _scaled(gradient, scale)), None
        factors = form.compress(name, gradient)
        kept = map_tensors(form.write_out(factors), self._own)
        # after the projection, which makes it smaller
        self.layers[name] = kept if self._scales_late else _scaled(kept, scale)
        if form.observers:
            shared = not self._scales_late and type(kept) is type(factors)
            form.tell(name, self.layers[name] if shared else _scaled(factors, scale))

    def take(self, names: Iterable[str]) -> Mapping[str, LayerGradient]:
        """Hand the layer gradients out, in the order of the names, and hold none of them."""
        layers = {name: self.layers[name] for name in names if name in self.layers}
        self.layers = {}
        return ScaledLayers(layers, self.scale) if self._scales_late else layers

    @property
    def _scales_late(self) -> bool:
        waits = self.keeps_unscaled and self.form.transform is None
        return waits and self.scale is not None

    def _own(self, tensor: Tensor) -> Tensor:
        """Copy a tensor of the model's or the caller's own, once for all layers that read it."""
        if tensor.untyped_storage().data_ptr() not in self.borrowed:
            return tensor
        if id(tensor) not in self.copies:
            self.copies[id(tensor)] = (tensor, tensor.clone())
        return self.copies[id(tensor)][1]


def _scaled(gradient: LayerGradient, scale: float | Tensor | None) -> LayerGradient:
    """Undo a mean, in float32 or wider: low precision would round or overflow."""
    if scale is None:
        return gradient
    if isinstance(gradient, SumGradient):
        return SumGradient(tuple(_scaled(part, scale) for part in gradient.parts))
    name = _OUTPUT_SIDE[type(gradient)]
    values = getattr(gradient, name)
    wide = values if values.dtype == torch.float64 else values.float()
    factor = scale.to(values.device) if isinstance(scale, Tensor) else scale
    return replace(gradient, **{name: wide * factor})


def _dense_is_smaller(gradient: LayerGradient) -> bool:
    """Compare an example's numbers as factors, ``s (i + o)``, with those written out, ``i o``."""
    parts = gradient.parts if isinstance(gradient, SumGradient) else (gradient,)
    counts = [_numbers(part) for part in parts]
    return sum(factored for factored, _ in counts) >= counts[0][1]


def _numbers(part: LayerGradient) -> tuple[int, int]:
    """Numbers an example as factors and written out, without a bias's own."""
    if isinstance(part, DenseGradient):
        return part.values_bd.shape[1], part.values_bd.shape[1]
    s = part.num_positions
    if isinstance(part, ScaleFactors):
        d = part.activation_bsd.shape[2]
        return 2 * s * d, d
    o = part.output_gradient_bso.shape[2]
    if isinstance(part, EmbeddingFactors):
        return s * (1 + o), part.num_embeddings * o
    i = part.activation_bsi.shape[2]
    return s * (i + o), (i // part.groups) * o
