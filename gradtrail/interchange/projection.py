r"""The cheaper query: what made an activation point along a direction, or along its class?

One run instead of two, and only the layers upstream of the site take part: what reads the
variable out later does not count. Compare Kowal et al., 2026, https://arxiv.org/abs/2602.14869,
where the gradient of a probe's output takes the place of a loss.

Suffixes: n row, d width, k rank, c class.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradtrail.attribution.data import Rows
from gradtrail.attribution.query_source import AbstractQuerySource, QueryBatch
from gradtrail.factors import LayerGradient
from gradtrail.hooks import batch_ids, tokens_of
from gradtrail.interchange.inputs import (
    Forward,
    Inputs,
    check_forward,
    check_labels,
    check_logits,
    check_positions,
    named_tensors,
    num_rows,
    take_inputs,
)
from gradtrail.interchange.passes import collect_rows
from gradtrail.interchange.query import check_same_model, check_trained, definition_of
from gradtrail.interchange.site import Site, SiteTap, as_site, check_model, prepared, read_rows
from gradtrail.interchange.subspace import LearnedSubspace, as_basis, check_width
from gradtrail.options import check_choice

__all__ = ["ProjectionQuery"]

_BATCH = 256
_APART = 1e-6


class ProjectionQuery(AbstractQuerySource):
    r"""Projections of an activation as queries: pass one as ``query=`` to ``attribute``.

    With ``direction`` the measurement of an input is :math:`h \cdot v`. With ``basis`` and
    ``labels`` it is :math:`B^T h \cdot u_y`, with :math:`u_y` the unit vector from the mean of the
    class means to the mean of the input's own class inside the subspace, both as they are when
    the query is made. A score above 0 means that training more on the example raises it.
    """

    def __init__(  # noqa: PLR0913  # the issue names direction, basis and labels beside the inputs
        self,
        model: nn.Module,
        site: Site | str,
        inputs: Inputs,
        forward: Forward,
        *,
        direction: Tensor | None = None,
        basis: Tensor | LearnedSubspace | None = None,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        granularity: Literal["example", "mean"] = "example",
    ) -> None:
        """Choose the inputs and what they are projected on.

        Args:
            model: The model that will be attributed, in evaluation mode.
            site: Where.
            inputs: A tensor, a tuple or a mapping of tensors, ``n`` rows.
            forward: ``(model, inputs) -> [n, C]`` runs the model once; its logits are not used.
            direction: Any vector ``[d]``; or else
            basis: orthonormal columns ``[d, k]``, or a subspace, and
            labels: the class of each input. Shape ``[n]``.
            positions: Where in each row, needed at a site of ``[n, T, d]``. Shape ``[n]``.
            granularity: ``"example"``: every input is a query; ``"mean"``: one query, their mean.
        """
        check_forward(forward)
        check_choice("granularity", granularity, ("example", "mean"))
        check_model(model)
        check_trained(model)
        self.model = model
        self.site = as_site(site)
        self.granularity = granularity
        self._kind = _kind_of(direction, basis, labels)
        self._forward = forward
        count = num_rows(inputs, "inputs")
        self._share = 1 / count if granularity == "mean" else 1.0
        places = (check_positions(positions, count, "positions"), "positions")
        with prepared(model):
            activations = collect_rows(model, self.site, inputs, forward, places, _BATCH)
        if direction is not None:
            check_direction(direction, activations.shape[1])
            vectors = direction.detach().cpu().expand(count, -1)
        else:
            columns = as_basis(basis).cpu()
            check_width(columns, activations)
            vectors = _class_vectors(activations, columns, check_labels(labels, count, "labels"))
        self._keep(inputs, places[0], vectors)

    @property
    def num_parts(self) -> int:
        """Number of inputs."""
        return len(self._vectors)

    @property
    def is_summed(self) -> bool:
        """Whether the mean over the inputs is the only query."""
        return self.granularity == "mean"

    @property
    def description(self) -> str:
        """Site and what it is projected on."""
        what = "mean over inputs" if self.is_summed else "by input"
        return f"negative projection at {self.site} on {self._kind}, {what}"

    def check_model(self, model: nn.Module) -> None:
        """Refuse another model than the query's own."""
        check_same_model(self, model)

    def batches(self, size: int) -> Iterator[QueryBatch]:
        """Cut the inputs into batches.

        Args:
            size: Inputs a batch.

        Yields:
            The batches.
        """
        head = definition_of(self.description)
        for start in range(0, self.num_parts, size):
            rows = slice(start, min(start + size, self.num_parts))
            count = rows.stop - start
            inputs = take_inputs(self._inputs, rows)
            positions = None if self._positions is None else self._positions[rows]
            values = {"inputs": inputs, "positions": positions, "vectors": self._vectors[rows]}
            named = named_tensors(inputs, "inputs") | {"vector": self._vectors[rows]}
            if positions is not None:
                named["position"] = positions
            ids = tuple(head + name for name in batch_ids(named, count))
            yield QueryBatch(start, count, count, tokens_of(inputs), values, ids)

    def loss(self, model: nn.Module, values: Any) -> Tensor:  # noqa: ANN401
        """Run the inputs and project what passes the site.

        Args:
            model: The model.
            values: Of a batch, on the model's device.

        Returns:
            Negative projections. Shape ``[n]``.
        """
        self._values = values
        vectors = values["vectors"]
        with self._tap.counted():
            check_logits(self._forward(model, values["inputs"]), len(vectors))
        wide = torch.float64 if self._found.dtype == torch.float64 else torch.float32
        return -self._share * (self._found.to(wide) * vectors.to(wide)).sum(1)

    def fold(self, gradient: LayerGradient) -> LayerGradient:
        """Leave the rows: one is one input."""
        return gradient

    @contextmanager
    def active(self) -> Iterator[None]:
        """Keep the hook installed."""
        with self._tap.installed():
            try:
                yield
            finally:
                self._values = self._found = None

    def probe(self) -> tuple[Rows, Callable[[nn.Module, Any], Tensor]]:
        """Give the inputs as plain rows."""
        inputs = self._inputs
        return Rows(
            range(self.num_parts), lambda numbers: take_inputs(inputs, numbers)
        ), self._forward

    def head(self, count: int) -> ProjectionQuery:
        """Give the first inputs.

        Args:
            count: How many at most.

        Returns:
            A query like this one.
        """
        other = copy.copy(self)
        other._keep(  # noqa: SLF001  # a copy of this object
            take_inputs(self._inputs, slice(0, count)),
            None if self._positions is None else self._positions[:count],
            self._vectors[:count],
        )
        return other

    def _keep(self, inputs: Inputs, positions: Tensor | None, vectors: Tensor) -> None:
        """Keep the rows, and make what belongs to this object alone."""
        self._inputs = inputs
        self._positions = positions
        self._vectors = vectors
        self._tap = SiteTap(self.model, self.site, self._read)
        self._values: dict[str, Any] | None = None
        self._found: Tensor | None = None

    def _read(self, activation: Tensor) -> None:
        if self._tap.is_counting:  # not where checkpointing runs the forward again
            positions, count = self._values["positions"], len(self._values["vectors"])
            self._found = read_rows(activation, positions, count, "positions")


def check_direction(direction: Tensor, width: int) -> None:
    """Refuse what is no direction of an activation.

    Args:
        direction: What was passed.
        width: Width ``d`` of the activation.

    Raises:
        TypeError: If it is no floating tensor.
        ValueError: If it is not ``[d]``, zero or not finite.
    """
    if not isinstance(direction, Tensor) or not direction.is_floating_point():
        got = direction.dtype if isinstance(direction, Tensor) else type(direction).__name__
        raise TypeError(f"direction must be a floating tensor [d], got {got}.")
    if direction.shape != (width,):
        raise ValueError(
            f"direction must be [d] with the activation's width d={width}, got "
            f"{tuple(direction.shape)}."
        )
    if not bool(torch.isfinite(direction).all()) or not bool(direction.any()):
        raise ValueError("direction must be finite and not zero, got one that is not.")


def _kind_of(direction: object, basis: object, labels: object) -> str:
    """Name the measurement; exactly one must be given in full.

    Args:
        direction: The direction or None.
        basis: The basis or None.
        labels: The labels or None.

    Returns:
        What is projected on.

    Raises:
        ValueError: If neither or both are given, or one half.
    """
    given = [
        name
        for name, value in (("direction", direction), ("basis", basis), ("labels", labels))
        if value is not None
    ]
    if given == ["direction"]:
        return "a direction"
    if given == ["basis", "labels"]:
        return "each class's own direction in a subspace"
    raise ValueError(
        f"ProjectionQuery must have direction alone, or basis and labels, got {given or 'none'}."
    )


def _class_vectors(activations: Tensor, columns: Tensor, labels: Tensor) -> Tensor:
    """Unit vectors in the subspace towards each row's own class.

    Args:
        activations: Shape ``[n, d]``.
        columns: The basis. Shape ``[d, k]``.
        labels: Classes. Shape ``[n]``.

    Returns:
        Shape ``[n, d]``.

    Raises:
        ValueError: If there is one class, or a class mean is where all of them are.
    """
    coordinates = activations.double() @ columns.double()
    classes = labels.unique()
    if len(classes) < 2:
        raise ValueError(f"labels must hold at least 2 classes, got {len(classes)}.")
    means = torch.stack([coordinates[labels == label].mean(0) for label in classes])
    offsets = means - means.mean(0)
    lengths = offsets.norm(dim=1, keepdim=True)
    if float(lengths.min()) <= _APART * float(coordinates.abs().max()):
        raise ValueError(
            "labels must be classes whose means lie apart in the subspace, got distances "
            f"{[f'{value:.2g}' for value in lengths[:, 0].tolist()]} from their centre."
        )
    units = (offsets / lengths) @ columns.double().mT
    return units[torch.searchsorted(classes, labels)].to(activations.dtype)
