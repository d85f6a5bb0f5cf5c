"""Losses: one value an example, the sum over its positions; inferred where none is given."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrail.hooks import batch_length, counted_labels, model_kind
from gradtrail.options import check_choice

__all__ = ["Loss", "LossReduction", "call_model", "resolve_loss"]

LossReduction: TypeAlias = Literal["sum", "mean", "token_mean"]
_LOGGER = logging.getLogger("gradtrail")


class Loss:
    """A loss of one value an example, with a description of what it is."""

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
        self.description = "inferred" if function is None else _name_of(function, reduction)

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
            values, description = _inferred(model, batch)
            if self.description != description:
                _LOGGER.info("loss inferred: %s", description)
                self.description = description
            return values
        value = self._function(model, batch)
        if self._reduction is None:
            return value
        return _undivided(value, self._reduction, model, batch)


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


def call_model(model: nn.Module, batch: Mapping[str, Any], *, keep_labels: bool = False) -> Any:  # noqa: ANN401
    """Call a model with the tensor fields its ``forward`` takes.

    Args:
        model: The model.
        batch: Fields by name; others than tensors are not passed.
        keep_labels: Whether to pass ``labels`` on.

    Returns:
        What the model returns.
    """
    parameters = inspect.signature(_unwrapped(model).forward).parameters
    names = {
        name for name, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    if not keep_labels:
        tensors.pop("labels", None)
    if names:
        tensors = {name: value for name, value in tensors.items() if name in names}
    return model(**tensors)


def _inferred(model: nn.Module, batch: Any) -> tuple[Tensor, str]:  # noqa: ANN401
    if isinstance(batch, Mapping) and "labels" in batch:
        kind = model_kind(model)
        output = call_model(model, batch, keep_labels=kind == "encoder-decoder")
        return _labelled(kind, _logits(output), batch, model)
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        inputs, targets = batch
        if isinstance(inputs, Mapping):
            output = call_model(model, inputs)
        else:
            output = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
        return _paired(_logits(output), targets)
    fields = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
    raise ValueError(
        "loss must be given where it cannot be inferred: a batch needs 'labels' or must be an "
        f"(inputs, targets) pair, got {fields}. Pass loss=(model, batch) -> [b]."
    )


def _labelled(
    kind: str | None, logits: Tensor, batch: Mapping[str, Any], model: nn.Module
) -> tuple[Tensor, str]:
    labels = batch["labels"]
    several = logits.dim() == 2 and logits.shape == labels.shape and logits.shape[1] > 1
    problem = getattr(getattr(model, "config", None), "problem_type", "regression")
    if logits.dim() == 2 and not (several and problem != "regression"):
        return _paired(logits, labels)
    if logits.dim() == 3 and logits.shape[:2] == labels.shape and kind is not None:
        if kind == "causal":
            labels = _shifted(labels, batch.get("attention_mask"))
        shift = "shifted" if kind == "causal" else "unshifted"
        return _cross_entropy(logits, labels), f"cross-entropy of tokens, {shift}, summed"
    raise ValueError(
        "loss must be given where it cannot be inferred: got logits "
        f"{tuple(logits.shape)} and labels {tuple(labels.shape)} of {type(model).__name__}. "
        "Pass loss=(model, batch) -> [b]."
    )


def _shifted(labels: Tensor, mask: Any) -> Tensor:  # noqa: ANN401
    """Move every label to the position that predicts it; padding in front predicts nothing."""
    shifted = torch.full_like(labels, -100)
    shifted[:, :-1] = labels[:, 1:]
    if isinstance(mask, Tensor) and mask.shape == labels.shape:
        shifted = shifted.masked_fill(mask == 0, -100)
    return shifted


def _paired(outputs: Tensor, targets: Tensor) -> tuple[Tensor, str]:
    if targets.is_floating_point():
        if outputs.shape != targets.shape:
            outputs = outputs.squeeze(-1) if targets.dim() == outputs.dim() - 1 else outputs
        if outputs.shape != targets.shape:
            raise ValueError(
                f"loss must be given for outputs {tuple(outputs.shape)} and targets "
                f"{tuple(targets.shape)}: they have no half squared error. Pass loss."
            )
        errors = (_wide(outputs) - targets).square()
        return errors.reshape(errors.shape[0], -1).sum(1) / 2, "half squared error, summed"
    if outputs.shape[:-1] == targets.shape and outputs.dim() == 2:
        return _cross_entropy(outputs.unsqueeze(1), targets.unsqueeze(1)), "cross-entropy"
    if outputs.shape[:-1] == targets.shape and outputs.dim() == 3:
        return _cross_entropy(outputs, targets), "cross-entropy of positions, summed"
    raise ValueError(
        f"loss must be given for outputs {tuple(outputs.shape)} and integer targets "
        f"{tuple(targets.shape)}: they are no [b, classes] and [b]. Pass loss."
    )


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    values = F.cross_entropy(
        _wide(logits).flatten(0, 1), labels.flatten().long(), reduction="none", ignore_index=-100
    )
    return values.view(labels.shape).sum(1)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _logits(output: Any) -> Tensor:  # noqa: ANN401
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise ValueError(
        "loss must be given where it cannot be inferred: the model returned "
        f"{type(output).__name__} without logits. Pass loss=(model, batch) -> [b]."
    )


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


def _unwrapped(model: nn.Module) -> nn.Module:
    """Look through wrappers that pass every argument on."""
    while True:
        inner = model._modules.get("_orig_mod") or model._modules.get("module")  # noqa: SLF001
        if inner is None or type(model).__name__ not in (
            "OptimizedModule",
            "DistributedDataParallel",
            "DataParallel",
            "FullyShardedDataParallel",
        ):
            return model
        model = inner


def _name_of(function: Callable[..., Any], reduction: LossReduction | None) -> str:
    name = getattr(function, "__qualname__", type(function).__name__)
    return name if reduction is None else f"{name} ({reduction})"
