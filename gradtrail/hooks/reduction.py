"""How a loop's loss came from its examples' own losses, and what undoes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrail.errors import CaptureError
from gradtrail.hooks.labels import counted_labels, labels_by_example, model_kind
from gradtrail.options import check_choice

__all__ = ["LossReduction", "LossScale", "Reduction"]

LossReduction: TypeAlias = Literal["sum", "mean", "token_mean", "model"]
LossScale: TypeAlias = float | Callable[[], float]
_CHOICES = ("sum", "mean", "token_mean", "model")
_ITEMS = ("num_items_in_batch", "loss_div_factor")  # of transformers, of OLMo-core
_TOLERANCE = 2e-3  # between a loss and its twin from the logits, which may be of low precision


class Reduction:
    """Undoes what stands between the examples' own losses and the loss that a loop differentiates.

    With ``"model"`` that is the loss which the model returns. By what it divides is checked
    against its logits; what the loop makes of it afterwards (accumulation, loss scaling, ranks)
    is read off the gradient that the backward brings to it. A loop may also sum the labels'
    ``log_probs`` that the model returns (as TRL's do); then all is read off theirs. A loss that the
    loop multiplies with 0 has gradients of 0.
    """

    def __init__(
        self, model: nn.Module, reduction: LossReduction, loss_scale: LossScale | None
    ) -> None:
        """Check the options.

        Args:
            model: The model, whose class decides how labels are counted.
            reduction: How the loop's loss is reduced.
            loss_scale: What the loop multiplies it with on top, or None for nothing.

        Raises:
            ValueError: If a scale is given that is measured, or one that is not positive.
        """
        check_choice("loss_reduction", reduction, _CHOICES)
        if loss_scale is not None and reduction == "model":
            raise ValueError(
                f"loss_scale must be None with loss_reduction='model', got {loss_scale!r}: what "
                "the loop makes of the model's loss is measured. Leave it out."
            )
        self.measures = reduction == "model"
        self._model = model
        self.kind = reduction
        self._loss_scale = loss_scale
        self.scaler = _scaler_of(loss_scale)
        self._counts_items: bool | None = None
        self._has_checked = False
        if loss_scale is not None and not callable(loss_scale):
            _check_scale(loss_scale)

    def divisor(self, fields: Mapping[str, Any], size: int) -> float | Tensor:
        """Tell what a loss of known reduction was divided by.

        Args:
            fields: What the model was called with, by name.
            size: Number of examples.

        Returns:
            1, the number of examples, or the number of labels that count.

        Raises:
            CaptureError: If labels are to be counted and there are none.
        """
        if self.kind in {"sum", "model"}:
            return 1.0
        if self.kind == "mean":
            return float(size)
        labels = fields.get("labels")
        if not isinstance(labels, Tensor):
            raise CaptureError(
                "loss_reduction='token_mean' must find labels= in the model's call, got "
                f"{sorted(fields)}. Pass labels, or use loss_reduction='sum'."
            )
        return counted_labels(self._model, labels)

    def weights(self, fields: Mapping[str, Any], size: int) -> Tensor | None:
        """Tell how much of the divisor each example stands for.

        Args:
            fields: What the model was called with, by name.
            size: Number of examples.

        Returns:
            Its labels that count, or one where the loss is a mean over examples; None for a sum.
            One row, or two where loops count in two ways: with labels of causal models shifted,
            as the loss does, or as they are. Shape ``[1 or 2, b]``.
        """
        if self.kind == "sum":
            return None
        labels = fields.get("labels")
        counted = isinstance(labels, Tensor) and not labels.is_floating_point()
        if self.kind == "mean" or not counted:
            return torch.ones(1, size)
        ways = [labels_by_example(self._model, labels)]
        if self.spans_step(fields):
            ways.append((labels != -100).view(size, -1).sum(1))
        return torch.stack(ways)

    def spans_step(self, fields: Mapping[str, Any]) -> bool:
        """Tell whether the loss is divided by what a loop counted over several backwards."""
        return self.measures and any(fields.get(name) is not None for name in _ITEMS)

    def measured(
        self,
        output: Any,  # noqa: ANN401
        fields: Mapping[str, Any],
        size: int,
    ) -> tuple[tuple[Tensor, ...], float]:
        """Find the loss that the model returned, and what it was divided by.

        Args:
            output: What the model returned.
            fields: What it was called with, by name.
            size: Number of examples.

        Returns:
            Where the backward is to be measured, and the divisor: the loss, a scalar, and log-
            probabilities of the labels. Nothing where there are no labels, which matters only
            if a backward comes.
        """
        loss, labels = _entry(output, "loss", 0), fields.get("labels")
        if not isinstance(labels, Tensor):
            return (), 1.0
        measured = (loss, _entry(output, "log_probs", None))
        points = tuple(one for one in measured if isinstance(one, Tensor))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            return points, 1.0
        if labels.is_floating_point():
            return points, float(size)
        choices = [float(counted_labels(self._model, labels))]
        choices[:0] = [float(fields[name]) for name in _ITEMS if fields.get(name) is not None]
        if len(set(choices)) > 1 and self._counts_items is not None:
            return points, choices[0 if self._counts_items else -1]
        if len(set(choices)) > 1 or not self._has_checked:
            total = _summed_loss(self._model, output, fields)
            return points, self._choose(choices, float(loss.detach()), total)
        return points, choices[0]

    def scale(self, divisor: float | Tensor, outer: Tensor | None) -> float | Tensor | None:
        """Give what output gradients are multiplied with.

        Args:
            divisor: What the loss was divided by.
            outer: Gradient at the model's own loss where it is measured.

        Returns:
            The factor; None for 1.

        Raises:
            CaptureError: If the backward passes the model's loss by.
        """
        if self.measures:
            if outer is None:
                raise CaptureError(
                    "loss_reduction='model' must meet a backward from the loss that the model "
                    "returns for labels=, got one that passes it by. Say with 'sum', 'mean' or "
                    "'token_mean' how the loop reduces its loss, and with loss_scale what it is "
                    "multiplied with."
                )
            wide = outer if outer.device.type == "mps" else outer.double()
            factor, divisor = (wide, divisor) if outer.dim() == 0 else (_common(wide), 1.0)
            return divisor / torch.where(factor == 0, torch.ones_like(factor), factor)
        factor = self._loss_scale() if callable(self._loss_scale) else self._loss_scale
        if factor is None:
            return None if self.kind == "sum" else divisor
        return divisor / _check_scale(factor)

    def _choose(self, choices: list[float], loss: float, total: float | None) -> float:
        """Take the divisor by which the examples' losses give the loss.

        Args:
            choices: The number of items that the loop counted, if any; the batch's own.
            loss: The model's loss.
            total: Sum of the examples' losses, or None where it cannot be told.

        Returns:
            The divisor.

        Raises:
            CaptureError: If neither fits.
        """
        if total is None or not total or not torch.isfinite(torch.tensor(loss)):
            return choices[0]
        self._has_checked = True
        fitting = [one for one in choices if abs(loss * one - total) <= _TOLERANCE * abs(total)]
        if not fitting:
            raise CaptureError(
                "loss_reduction='model' must meet a loss that is the sum of its examples' losses "
                f"divided by the number of labels, {' or '.join(f'{one:g}' for one in choices)}, "
                f"got {loss:g} for a sum of {total:g}. Say 'sum', 'mean' or 'token_mean'."
            )
        if len(set(choices)) > 1:
            self._counts_items = fitting[0] == choices[0]
        return fitting[0]


def _common(outer: Tensor) -> Tensor:
    """Read what every label's loss is divided by off the gradient at its log-probability.

    Args:
        outer: Gradients at the labels' log-probabilities, zero where none counts. Shape ``[b, s]``.

    Returns:
        One over the divisor, a scalar.

    Raises:
        CaptureError: If the labels' losses have different weights.
    """
    common = -outer.amin()
    if not bool(((outer == -common) | (outer == 0)).all()):
        raise CaptureError(
            "loss_reduction='model' must meet a loss that sums its labels' with one weight, got "
            "weights that differ in the log-probabilities that the model returns. Say 'sum', "
            "'mean' or 'token_mean', and with loss_scale what the loss is multiplied with."
        )
    return common


def _check_scale(value: float) -> float:
    """Refuse a factor that cannot be undone."""
    if not value > 0:
        raise ValueError(
            f"loss_scale must be a positive number, got {value!r}. Leave it out for 1."
        )
    return value


def _scaler_of(loss_scale: LossScale | None) -> torch.amp.GradScaler | None:
    """Find the loss scaler that a scale is asked from: its owner, or one that a function names."""
    known = [getattr(loss_scale, "__self__", None)]
    if inspect.isfunction(loss_scale):
        named = inspect.getclosurevars(loss_scale)
        known += [*named.nonlocals.values(), *named.globals.values()]
    scalers = {id(one): one for one in known if isinstance(one, torch.amp.GradScaler)}
    return next(iter(scalers.values())) if len(scalers) == 1 else None


def _entry(output: Any, name: str, place: int | None) -> Any:  # noqa: ANN401
    """An output by name, or by place where the model returns a plain tuple."""
    if isinstance(output, Mapping):
        return output.get(name)
    if type(output) in {tuple, list}:
        return output[place] if place is not None and len(output) > place else None
    return getattr(output, name, None)


def _summed_loss(model: nn.Module, output: Any, fields: Mapping[str, Any]) -> float | None:  # noqa: ANN401
    """Take the examples' cross-entropies again, row by row, and sum them.

    Args:
        model: The model, whose class decides whether labels are shifted.
        output: What it returned.
        fields: What it was called with, by name.

    Returns:
        The sum, or None where logits and labels do not lie side by side.
    """
    logits, labels = _entry(output, "logits", 1), fields["labels"]
    if not isinstance(logits, Tensor) or "shift_labels" in fields:
        return None
    if logits.dim() != labels.dim() + 1 or logits.shape[:-1] != labels.shape:
        return None
    total = 0.0
    with torch.no_grad():
        for scores, wanted in zip(logits.detach(), labels.to(logits.device), strict=True):
            if labels.dim() == 2 and model_kind(model) == "causal":
                scores, wanted = scores[:-1], wanted[1:]
            total += float(F.cross_entropy(scores.float(), wanted, reduction="sum"))
    return total
