"""Losses of validation data and of batches that are scored before they are trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrail.factors import LayerGradient
from gradtrail.hooks import LivePass, batch_length, counted_labels, tokens_of

__all__ = ["LossFunction", "moved", "run_pass", "summed_loss"]

LossFunction: TypeAlias = Callable[[nn.Module, Any], Tensor]


def moved(batch: Any, device: torch.device) -> Any:  # noqa: ANN401
    """Bring the tensors of mappings, tuples, lists and dataclasses to a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: moved(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and type(batch) is not tuple:
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(moved(value, device) for value in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        values = {entry.name: moved(getattr(batch, entry.name), device) for entry in fields(batch)}
        return replace(batch, **values)
    return batch


def run_pass(
    live: LivePass,
    batch: Any,  # noqa: ANN401
    loss: LossFunction,
    option: str,
    sink: Callable[[str, LayerGradient], None],
) -> None:
    """Run one batch through a live pass.

    Args:
        live: The open pass.
        batch: The batch, on the model's device.
        loss: Gives one loss an example, or their sum.
        option: Name of the loss's option, for errors.
        sink: Receives each layer's gradients.

    Raises:
        ValueError: If the batch has no examples, or the loss is neither.
    """
    size = batch_length(batch)
    if not size:
        raise ValueError(
            f"A batch must hold a tensor with a row an example, got {type(batch).__name__}. "
            "Pass tensors in mappings, tuples or dataclasses."
        )

    def losses() -> Tensor:
        value = loss(live.model, batch)
        if isinstance(value, Tensor) and value.dim() == 0:
            return (value / size).expand(size)  # only the sum is differentiated
        if not isinstance(value, Tensor) or value.shape != (size,):
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"{option} must return one value an example, shape ({size},), or their sum, got "
                f"{got}."
            )
        return value

    live.run(losses, batch=size, tokens=tokens_of(batch), sink=sink)


def summed_loss(model: nn.Module, batch: Any) -> Tensor:  # noqa: ANN401
    """Sum the examples' losses of a batch with labels, or of a pair of inputs and targets.

    Args:
        model: The model.
        batch: A mapping with ``labels``, for which the model returns its mean loss; or a pair:
            cross-entropy for integer targets, half squared error for others.

    Returns:
        The sum, a scalar.

    Raises:
        ValueError: If the batch is neither.
    """
    if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
        tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        output, labels = model(**tensors), tensors["labels"]
        loss = output["loss"] if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(loss, Tensor):
            # a mean over nothing is NaN, and so is its gradient
            count = len(labels) if labels.is_floating_point() else counted_labels(model, labels)
            return loss.sum() * count if count else loss.new_zeros(())
    if isinstance(batch, (tuple, list)) and len(batch) == 2 and isinstance(batch[1], Tensor):
        inputs, targets = batch
        output = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
        if isinstance(output, Tensor) and targets.is_floating_point():
            return (output.reshape(targets.shape) - targets).square().sum() / 2
        if isinstance(output, Tensor) and output.shape[:-1] == targets.shape:
            return F.cross_entropy(output.flatten(0, -2), targets.flatten(), reduction="sum")
    shown = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
    raise ValueError(
        "The loss must be given where neither the model returns it for a batch with 'labels' nor "
        f"the batch is an (inputs, targets) pair, got {shown}. Pass (model, batch) -> [b]."
    )
