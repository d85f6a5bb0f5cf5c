"""Losses: one value an example, the sum over its positions; inferred where none is given."""

from __future__ import annotations

import abc
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F

from gradtrail.attribution.digest import code_digest
from gradtrail.attribution.outputs import ModelOutputs, call_model, losses_of, model_outputs
from gradtrail.hooks import batch_length, counted_labels
from gradtrail.options import check_choice

__all__ = ["AbstractLoss", "Loss", "LossReduction", "call_model", "outputs_of", "resolve_loss"]

LossReduction: TypeAlias = Literal["sum", "mean", "token_mean"]
_LOGGER = logging.getLogger("gradtrail")


class AbstractLoss(abc.ABC):
    """What a pass over data differentiates.

    Attributes:
        several: Whether a forward gives several losses an example, for a backward each.
        description: What it is, in words.
    """

    several: bool = False
    description: str

    @abc.abstractmethod
    def __call__(self, model: nn.Module, batch: Any) -> Tensor:  # noqa: ANN401
        """Run the model on a batch of the data set's first rows.

        Args:
            model: The model.
            batch: One batch, on the model's device.

        Returns:
            Summed loss of each example, ``[b]``, or ``[k, b]`` where ``several`` is true.
        """

    @abc.abstractmethod
    def rounds(
        self,
        model: nn.Module,
        batch: Any,  # noqa: ANN401
        start: int,
    ) -> Iterator[Callable[[], Tensor | tuple[Tensor, ...]]]:
        """Give the forwards that a pass runs on one batch, each captured on its own.

        What is done before one is yielded is not captured.

        Args:
            model: The model.
            batch: One batch, on the model's device.
            start: Number of its first row in the data set.

        Returns:
            What runs a forward and returns the losses as a call does; where ``several`` is true
            in a tuple of ``[b]``, so that a backward of one does not pass through the others.
        """


class Loss(AbstractLoss):
    """A loss of one value an example, with a description of what it is.

    Attributes:
        inferred: Whether it is a built-in loss, whose outputs are known.
        description: What it is, in words; an inferred loss knows after its first call.
    """

    inferred: bool
    description: str

    def __init__(
        self,
        function: Callable[[nn.Module, Any], Tensor] | None,
        reduction: LossReduction | None = None,
    ) -> None:
        """Wrap a user's loss, or none.

        Args:
            function: ``(model, batch) -> [b]``, or a scalar with ``reduction``; None infers it.
            reduction: How a scalar was reduced.
        """
        self._function = function
        self._reduction = reduction
        self.inferred = function is None
        self.description = "inferred" if function is None else _name_of(function, reduction)

    @property
    def name(self) -> str:
        """``"inferred"``, or the function's name with a digest of its code."""
        if self._function is None:
            return "inferred"
        return f"{_name_of(self._function, self._reduction)} {code_digest(self._function)}"

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:  # noqa: ANN401
        """Run the model on a batch.

        Args:
            model: The model.
            batch: One batch, on the model's device.

        Returns:
            Summed loss of each example. Shape ``[b]``; for a scalar loss its undivided total
            stands in the first entry.
        """
        if self._function is None:
            outputs = model_outputs(model, batch)
            if self.description != outputs.description:
                _LOGGER.info("loss inferred: %s", outputs.description)
                self.description = outputs.description
            return losses_of(outputs)
        value = self._function(model, batch)
        if self._reduction is None:
            return value
        return _undivided(value, self._reduction, model, batch)

    def rounds(
        self,
        model: nn.Module,
        batch: Any,  # noqa: ANN401
        start: int,
    ) -> Iterator[Callable[[], Tensor | tuple[Tensor, ...]]]:
        """One forward, the same for any row numbers."""
        del start
        yield partial(self, model, batch)


def resolve_loss(
    loss: Callable[[nn.Module, Any], Tensor] | None, reduction: LossReduction | None
) -> Loss:
    """Check the loss options.

    Args:
        loss: The user's loss or None.
        reduction: How a scalar loss was reduced, or None.

    Returns:
        The loss.

    Raises:
        ValueError: If a reduction was given without a loss.
        TypeError: If the loss cannot be called.
    """
    if reduction is not None:
        check_choice("loss_reduction", reduction, ("sum", "mean", "token_mean"))
        if loss is None:
            raise ValueError(
                "loss_reduction must go with a loss that returns a scalar, got loss=None. "
                "Leave it out: an inferred loss is summed by example."
            )
    if loss is not None and not callable(loss):
        raise TypeError(
            f"loss must be a callable (model, batch) -> [b], got {type(loss).__name__}."
        )
    return Loss(loss, reduction)


def outputs_of(
    loss: Loss,
    model: nn.Module,
    batch: Any,  # noqa: ANN401
    *,
    option: str,
) -> ModelOutputs:
    """Run a model under a built-in loss and give its outputs.

    Args:
        loss: The loss.
        model: The model.
        batch: One batch, on the model's device.
        option: What asks, as the user wrote it, for the error.

    Returns:
        The outputs, with a graph, and their labels.

    Raises:
        ValueError: If the loss is the user's own, of whose outputs nothing is known.
    """
    if not loss.inferred:
        raise ValueError(
            f"{option} must know the outputs that the loss compares, got a loss of your own "
            f"({loss.description}). Leave loss out, so that it is inferred, or leave {option} out."
        )
    return model_outputs(model, batch)


def _undivided(value: Tensor, reduction: LossReduction, model: nn.Module, batch: Any) -> Tensor:  # noqa: ANN401
    if value.dim() != 0:
        raise ValueError(
            f"loss must return a scalar with loss_reduction={reduction!r}, got shape "
            f"{tuple(value.shape)}. Leave loss_reduction out."
        )
    count = batch_length(batch) or 1
    if reduction == "mean":
        value = value * count
    elif reduction == "token_mean":
        if not isinstance(batch, Mapping) or "labels" not in batch:
            raise ValueError(
                "loss_reduction='token_mean' must find 'labels' in the batch, got none. "
                "Return one value an example instead."
            )
        labels = counted_labels(model, batch["labels"])
        if not labels:
            return value.new_zeros(count)  # a mean over nothing is NaN, and so is its gradient
        value = value * labels
    return F.pad(value.reshape(1), (0, count - 1))


def _name_of(function: Callable[..., Any], reduction: LossReduction | None) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    return name if reduction is None else f"{name} ({reduction})"
