"""What one batch of each side shows of a run's cost, and what a method makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from gradtrail.attribution.cached_form import KeptForm
from gradtrail.attribution.queries import query_form
from gradtrail.attribution.session import Batch
from gradtrail.factors import (
    LayerGradient,
    LinearFactors,
    SumGradient,
    accumulation_dtype,
    dense_size,
    tensors_of,
)

__all__ = ["Demands", "LayerMeasure", "Measures"]


@dataclass(frozen=True)
class LayerMeasure:
    """Sizes of one layer.

    Attributes:
        entries: Entries of a gradient that is written out.
        groups: Groups of a layer with Kronecker structure, 0 of another.
        sides: Output and input side of a group, with the bias's constant.
        reads: Which input it reads; layers that share one have the same number.
        item: Bytes of a number that is summed over examples.
    """

    entries: int
    groups: int
    sides: tuple[int, int]
    reads: int
    item: int = 4


@dataclass(frozen=True, kw_only=True)
class Demands:
    """What a method needs beside the model and one batch.

    Attributes:
        query_bytes: The queries' gradients, on the device.
        curvature_bytes: The fitted curvature.
        curvature_on: Where that rests: ``"device"``, ``"host"`` or ``"disk"``.
        kept_bytes: Training factors that are kept on the device after the first pass.
        disk_bytes: Files that stay.
        train_passes: Passes over the training data.
        refine_passes: Most passes that a refinement adds, each dearer.
    """

    query_bytes: int
    curvature_bytes: int = 0
    curvature_on: str = "device"
    kept_bytes: int = 0
    disk_bytes: int = 0
    train_passes: int = 1
    refine_passes: int = 0


@dataclass(eq=False)
class Measures:
    """Adds up what one batch of each side shows.

    Attributes:
        num_train: Training examples in all.
        num_query: Queries in all.
        budget: Bytes that written-out queries may take.
        kept: The form in which a cache keeps training gradients, or None without a cache.
        layers: Sizes by layer.
        query_bytes: Bytes of all queries' gradients in the form that scores cheapest.
        train_bytes: Bytes of all training examples' factors.
        stored_bytes: Bytes of all training examples' gradients in the form a cache keeps.
        layer_bytes: Bytes of the largest layer of one training batch.
        positions: Positions of a training example.
    """

    num_train: int
    num_query: int
    budget: int
    kept: KeptForm | None = None
    layers: dict[str, LayerMeasure] = field(default_factory=dict)
    query_bytes: int = 0
    train_bytes: int = 0
    stored_bytes: int = 0
    layer_bytes: int = 0
    positions: int = 0
    _left: int | None = None
    _queries: dict[int, Tensor] = field(default_factory=dict)
    _train: dict[int, Tensor] = field(default_factory=dict)
    _stored: dict[int, Tensor] = field(default_factory=dict)

    def add_query(self, place: Batch, name: str, gradient: LayerGradient) -> None:
        """Add what all queries' gradients of a layer will take; a shared input counts once.

        Args:
            place: The batch.
            name: The layer.
            gradient: Its gradients.
        """
        del name
        left = self.budget if self._left is None else self._left
        written, size = query_form(gradient, self.num_train, self.num_query, left)
        if written:
            self._left = left - size
            self.query_bytes += size
            return
        for tensor in tensors_of(gradient):
            if id(tensor) not in self._queries:
                self._queries[id(tensor)] = tensor
                self.query_bytes += tensor.nbytes * self.num_query // place.size

    def add_train(self, place: Batch, name: str, gradient: LayerGradient) -> None:
        """Note a layer's sizes; keep the largest: its factors and its gradients written out.

        Args:
            place: The batch.
            name: The layer.
            gradient: Its gradients.
        """
        self.positions = place.tokens
        tensors = tensors_of(gradient)
        if self.kept is not None:
            self._add_stored(place, name, gradient)
        for tensor in tensors:
            if id(tensor) not in self._train:
                self._train[id(tensor)] = tensor
                self.train_bytes += tensor.nbytes * self.num_train // place.size
        factors = sum(tensor.nbytes for tensor in tensors)
        written = 4 * dense_size(gradient) * gradient.num_examples
        self.layer_bytes = max(self.layer_bytes, factors + written)
        parts = gradient.parts if isinstance(gradient, SumGradient) else (gradient,)
        first = parts[0]
        groups, sides = 0, (0, 0)
        if isinstance(first, LinearFactors):
            groups = first.groups
            width = first.activation_bsi.shape[2] // groups + int(first.has_bias)
            sides = (first.output_gradient_bso.shape[2] // groups, width)
        item = accumulation_dtype(tensors[0].dtype).itemsize
        self.layers[name] = LayerMeasure(dense_size(gradient), groups, sides, id(tensors[0]), item)

    def covariance_bytes(self, names: Iterable[str]) -> int:
        """Bytes of covariances of some layers; those that share an input share its covariance.

        Args:
            names: The layers, which have Kronecker structure.

        Returns:
            The bytes.
        """
        total, inputs = 0, set()
        for layer in (self.layers[name] for name in names if name in self.layers):
            o, i = layer.sides
            total += layer.groups * layer.item * o * o
            if layer.reads not in inputs:
                total += layer.groups * layer.item * i * i
            inputs.add(layer.reads)
        return total

    def _add_stored(self, place: Batch, name: str, gradient: LayerGradient) -> None:
        """Add what all training examples' gradients of a layer will take in a cache."""
        tensors = tensors_of(gradient)
        if self.kept.writes(name, gradient):
            dtype = accumulation_dtype(*(tensor.dtype for tensor in tensors))
            size = self.kept.item_bytes(dtype)
            self.stored_bytes += dense_size(gradient) * self.num_train * size
            return
        for tensor in tensors:
            if id(tensor) not in self._stored:
                self._stored[id(tensor)] = tensor
                size = tensor.numel() * self.kept.item_bytes(tensor.dtype)
                self.stored_bytes += size * self.num_train // place.size
