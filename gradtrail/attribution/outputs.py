"""What a model's outputs are compared with: logits with labels, or predictions with targets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrail.hooks import model_kind

__all__ = ["ModelOutputs", "OutputKind", "call_model", "losses_of", "model_outputs", "widened"]

OutputKind: TypeAlias = Literal["cross_entropy", "squared_error"]


@dataclass(frozen=True, eq=False)
class ModelOutputs:
    """A model's outputs beside what the inferred loss compares them with.

    Attributes:
        logits: Logits, the classes last, or predictions. Shape ``[b, c]`` or ``[b, s, c]`` for
            cross-entropy, ``[b, ...]`` for half squared error; in the model's dtype.
        labels: The class of every position (shifted already for causal models, -100 where none
            counts), ``[b]`` or ``[b, s]``; for half squared error targets of the predictions'
            shape.
        kind: The loss: ``"cross_entropy"`` or (half) ``"squared_error"``, summed by example.
        description: The loss in words.
    """

    logits: Tensor
    labels: Tensor
    kind: OutputKind
    description: str


def model_outputs(model: nn.Module, batch: Any) -> ModelOutputs:  # noqa: ANN401
    """Run a model on a batch and tell what its outputs are.

    Args:
        model: The model.
        batch: A mapping with ``labels``, or an ``(inputs, targets)`` pair.

    Returns:
        Outputs with a graph, and what they are compared with.

    Raises:
        ValueError: If no loss can be inferred from the model and the batch.
    """
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


def losses_of(outputs: ModelOutputs) -> Tensor:
    """Sum the loss of every example, in float32 or wider.

    Args:
        outputs: Outputs with their labels.

    Returns:
        Cross-entropy or half squared error, the sum over positions. Shape ``[b]``.
    """
    if outputs.kind == "squared_error":
        errors = (widened(outputs.logits) - outputs.labels).square()
        return errors.reshape(errors.shape[0], -1).sum(1) / 2
    labels = outputs.labels if outputs.labels.dim() > 1 else outputs.labels.unsqueeze(1)
    values = F.cross_entropy(
        widened(outputs.logits).flatten(0, -2),
        labels.flatten().long(),
        reduction="none",
        ignore_index=-100,
    )
    return values.view(labels.shape).sum(1)


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


def widened(tensor: Tensor) -> Tensor:
    """Cast to float32, or leave float64 as it is."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _labelled(
    kind: str | None, logits: Tensor, batch: Mapping[str, Any], model: nn.Module
) -> ModelOutputs:
    labels = batch["labels"]
    several = logits.dim() == 2 and logits.shape == labels.shape and logits.shape[1] > 1
    problem = getattr(getattr(model, "config", None), "problem_type", "regression")
    if logits.dim() == 2 and not (several and problem != "regression"):
        return _paired(logits, labels)
    if logits.dim() == 3 and logits.shape[:2] == labels.shape and kind is not None:
        if kind == "causal":
            labels = _shifted(labels, batch.get("attention_mask"))
        shift = "shifted" if kind == "causal" else "unshifted"
        description = f"cross-entropy of tokens, {shift}, summed"
        return ModelOutputs(logits, labels, "cross_entropy", description)
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


def _paired(outputs: Tensor, targets: Tensor) -> ModelOutputs:
    if targets.is_floating_point():
        if outputs.shape != targets.shape:
            outputs = outputs.squeeze(-1) if targets.dim() == outputs.dim() - 1 else outputs
        if outputs.shape != targets.shape:
            raise ValueError(
                f"loss must be given for outputs {tuple(outputs.shape)} and targets "
                f"{tuple(targets.shape)}: they have no half squared error. Pass loss."
            )
        return ModelOutputs(outputs, targets, "squared_error", "half squared error, summed")
    if outputs.shape[:-1] == targets.shape and outputs.dim() == 2:
        return ModelOutputs(outputs, targets, "cross_entropy", "cross-entropy")
    if outputs.shape[:-1] == targets.shape and outputs.dim() == 3:
        description = "cross-entropy of positions, summed"
        return ModelOutputs(outputs, targets, "cross_entropy", description)
    raise ValueError(
        f"loss must be given for outputs {tuple(outputs.shape)} and integer targets "
        f"{tuple(targets.shape)}: they are no [b, classes] and [b]. Pass loss."
    )


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
