r"""The query that attributes a causal variable: the loss of an interchange intervention.

With the basis fixed, :math:`m = CE(f(base \mid site \leftarrow h_b + s (h_s - h_b) B B^T), target)`
is differentiated through both runs: what put the variable into the source's activation counts as
much as what reads it out of the base's.

Suffixes: p pair, d width, t position.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradtrail.attribution.data import Rows
from gradtrail.attribution.query_source import AbstractQuerySource, QueryBatch, RowJoin
from gradtrail.errors import CaptureError
from gradtrail.factors import LayerGradient, merge_uses
from gradtrail.hooks import batch_ids, tokens_of
from gradtrail.interchange.inputs import (
    Forward,
    Inputs,
    Pairs,
    check_forward,
    check_logits,
    join_inputs,
    pair_losses,
    take_inputs,
)
from gradtrail.interchange.site import (
    Site,
    SiteTap,
    as_site,
    check_model,
    read_rows,
    write_rows,
)
from gradtrail.interchange.subspace import LearnedSubspace, as_basis, check_strength, interchange
from gradtrail.options import check_choice

__all__ = ["InterchangeQuery", "check_same_model", "check_trained", "definition_of"]


class InterchangeQuery(AbstractQuerySource):
    """Interchange interventions as queries: pass one as ``query=`` to ``gradtrail.attribute``.

    A score above 0 means that training more on the example makes the interventions say more
    of what the causal model predicts.
    """

    def __init__(  # noqa: PLR0913  # spelled out by its issue
        self,
        model: nn.Module,
        site: Site | str,
        basis: Tensor | LearnedSubspace,
        base_inputs: Inputs,
        source_inputs: Inputs,
        targets: Tensor,
        forward: Forward,
        *,
        base_positions: Tensor | None = None,
        source_positions: Tensor | None = None,
        granularity: Literal["pair", "mean"] = "pair",
        strength: float = 1.0,
        forwards: Literal["joint", "separate"] | None = None,
    ) -> None:
        """Fix the subspace and choose the pairs.

        Args:
            model: The model that will be attributed, in evaluation mode.
            site: Where.
            basis: Orthonormal columns ``[d, k]``, or a subspace; its gradient is not taken.
            base_inputs: Inputs of the runs that are intervened on, ``p`` rows.
            source_inputs: Inputs of the runs whose activation is put in, row by row.
            targets: Class that the causal model predicts for each pair. Shape ``[p]``.
            forward: ``(model, inputs) -> [n, C]`` runs the model once.
            base_positions: Where in each base, needed at a site of ``[n, T, d]``. Shape ``[p]``.
            source_positions: Where in each source. Shape ``[p]``.
            granularity: ``"pair"``: every pair is a query; ``"mean"``: one query, the mean loss.
            strength: Share of the source's part that is put in.
            forwards: ``"joint"``: bases and sources in one batch; ``"separate"``: two forwards
                in one graph; None: joint where they are alike in shape.

        Raises:
            ValueError: If a joint forward is asked for and the shapes differ.
        """
        check_forward(forward)
        check_choice("granularity", granularity, ("pair", "mean"))
        check_choice("forwards", forwards, ("joint", "separate", None))
        check_strength(strength)
        check_model(model)
        check_trained(model)
        self.model = model
        self.site = as_site(site)
        self.basis = as_basis(basis)
        self.strength = strength
        self.granularity = granularity
        self._forward = forward
        pairs = Pairs.checked(base_inputs, source_inputs, base_positions, source_positions)
        self._pairs = pairs.aimed_at(targets)
        if forwards == "joint" and not self._pairs.are_alike:
            raise ValueError(
                "forwards='joint' must have base_inputs and source_inputs of one structure and "
                "shape, got others. Pad them to one length, or pass forwards='separate'."
            )
        self._is_joint = self._pairs.are_alike if forwards is None else forwards == "joint"
        self._share = 1 / len(self._pairs) if granularity == "mean" else 1.0
        self._connect()

    @property
    def num_parts(self) -> int:
        """Number of pairs."""
        return len(self._pairs)

    @property
    def is_summed(self) -> bool:
        """Whether the mean over the pairs is the only query."""
        return self.granularity == "mean"

    @property
    def description(self) -> str:
        """Site, rank and what is averaged."""
        what = "mean over pairs" if self.is_summed else "by pair"
        return (
            f"cross-entropy of interchange interventions at {self.site}, rank "
            f"{self.basis.shape[1]}, strength {self.strength:g}, {what}"
        )

    def check_model(self, model: nn.Module) -> None:
        """Refuse another model than the query's own."""
        check_same_model(self, model)

    def batches(self, size: int) -> Iterator[QueryBatch]:
        """Cut the pairs into batches.

        Args:
            size: Pairs a batch.

        Yields:
            The batches.
        """
        head = definition_of(self.description, self.basis)
        for start in range(0, len(self._pairs), size):
            pairs = self._pairs.take(slice(start, start + size))
            count = len(pairs)
            base, source = pairs.base_inputs, pairs.source_inputs
            values = {
                "inputs": join_inputs(base, source) if self._is_joint else (base, source),
                "base_positions": pairs.base_positions,
                "source_positions": pairs.source_positions,
                "targets": pairs.targets,
            }
            rows = 2 * count if self._is_joint else count
            ids = tuple(head + name for name in batch_ids(pairs.tensors(), count))
            yield QueryBatch(start, count, rows, tokens_of(base), values, ids)

    def loss(self, model: nn.Module, values: Any) -> Tensor:  # noqa: ANN401
        """Run bases and sources and take the loss of the bases.

        Args:
            model: The model.
            values: Of a batch, on the model's device.

        Returns:
            The pairs' losses, and zeros for the sources' rows where they ran in the same batch.
            Shape ``[2 p]`` or ``[p]``.
        """
        self._values = values
        targets = values["targets"]
        if self._is_joint:
            with self._tap.counted():
                logits = self._forward(model, values["inputs"])
            logits = check_logits(logits, 2 * len(targets))[: len(targets)]
        else:
            base, source = values["inputs"]
            self._source = None
            with self._tap.counted():
                check_logits(self._forward(model, source), len(targets))
            with self._tap.counted():
                logits = check_logits(self._forward(model, base), len(targets))
        losses = pair_losses(logits, targets) * self._share
        return torch.cat([losses, torch.zeros_like(losses)]) if self._is_joint else losses

    def fold(self, gradient: LayerGradient) -> LayerGradient:
        """Join base and source of each pair.

        Args:
            gradient: A layer's gradients of one batch.

        Returns:
            One example a pair.
        """
        if not self._is_joint:
            return merge_uses(gradient)  # a layer that was called twice sums its calls already
        return self._join(gradient, gradient.num_examples // 2)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Keep the intervention installed."""
        with self._tap.installed():
            try:
                yield
            finally:
                self._values = self._source = None
                self._join.clear()

    def probe(self) -> tuple[Rows, Callable[[nn.Module, Any], Tensor]]:
        """Give the bases as plain rows."""
        inputs = self._pairs.base_inputs
        return Rows(
            range(len(self._pairs)), lambda numbers: take_inputs(inputs, numbers)
        ), self._forward

    def head(self, count: int) -> InterchangeQuery:
        """Give the first pairs.

        Args:
            count: How many at most.

        Returns:
            A query like this one.
        """
        other = copy.copy(self)
        other._pairs = self._pairs.take(slice(0, count))  # noqa: SLF001  # a copy of this object
        other._connect()  # noqa: SLF001
        return other

    def _connect(self) -> None:
        """Make what belongs to this object alone."""
        self._tap = SiteTap(
            self.model, self.site, self._edit_both if self._is_joint else self._edit
        )
        self._join = RowJoin()
        self._values: dict[str, Any] | None = None
        self._source: Tensor | None = None

    def _edit_both(self, activation: Tensor) -> Tensor:
        """Edit the first half of the rows with what is in the second."""
        count = len(self._values["targets"])
        base = self._values["base_positions"]
        source = self._values["source_positions"]
        first, second = activation[:count], activation[count:]
        value = interchange(
            read_rows(first, base, count, "base_positions"),
            read_rows(second, source, count, "source_positions"),
            self.basis.to(activation.device),
            self.strength,
        )
        return torch.cat([write_rows(first, base, value), second])

    def _edit(self, activation: Tensor) -> Tensor | None:
        """Keep the source's activation, then edit the base's with it."""
        if not self._tap.is_counting:
            raise CaptureError(
                f"site {self.site} must not run again in the backward of separate forwards, got "
                "activation checkpointing around it. Pad base_inputs and source_inputs to one "
                "length, or switch checkpointing off."
            )
        count = len(self._values["targets"])
        if self._source is None:
            positions = self._values["source_positions"]
            self._source = read_rows(activation, positions, count, "source_positions")
            return None
        positions = self._values["base_positions"]
        base = read_rows(activation, positions, count, "base_positions")
        value = interchange(base, self._source, self.basis.to(base.device), self.strength)
        return write_rows(activation, positions, value)


def check_same_model(query: Any, model: nn.Module) -> None:  # noqa: ANN401
    """Refuse another model than the one a query was made with.

    Args:
        query: A query with its ``model``.
        model: The model that is attributed.

    Raises:
        ValueError: If it is another object.
    """
    if model is not query.model:
        raise ValueError(
            f"model must be the one that query was made with, got another {type(model).__name__}. "
            f"Make the {type(query).__name__} with it; for other weights of one model pass "
            "checkpoints."
        )


def check_trained(model: nn.Module) -> None:
    """Refuse a model without a trained parameter.

    Args:
        model: The model.

    Raises:
        ValueError: If every parameter is frozen.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "model must have a trained parameter to attribute a variable to, got "
            f"{sum(1 for _ in model.parameters())} parameters, none of which requires grad. "
            "Set requires_grad on those that were trained."
        )


def definition_of(description: str, *tensors: Tensor) -> str:
    """Digest what queries have in common, to stand in front of their ids."""
    digest = hashlib.blake2b(description.encode(), digest_size=8)
    for tensor in tensors:
        exact = tensor.detach().double().cpu().contiguous()
        digest.update(exact.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
