"""Labels of language models: whether they are shifted, and which count."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["counted_labels", "labels_by_example", "model_kind"]

_SHIFTED = ("ForCausalLM", "LMHeadModel", "DoubleHeadsModel")
_UNSHIFTED = ("ForMaskedLM", "ForTokenClassification", "ForPreTraining")


def labels_by_example(model: nn.Module, labels: Tensor) -> Tensor:
    """Count the labels of every example that enter the loss, as ``counted_labels`` does: [b]."""
    if labels.dim() > 1 and model_kind(model) == "causal":
        labels = labels[:, 1:]
    return (labels != -100).flatten(1).sum(1) if labels.dim() > 1 else (labels != -100).long()


def counted_labels(model: nn.Module, labels: Tensor) -> Tensor:
    """Count the labels that enter the loss.

    Args:
        model: The model, which decides whether labels are shifted.
        labels: Integer labels, -100 where none counts. Shape ``[b, s]`` or ``[b]``.

    Returns:
        The count, a scalar tensor on the labels' device.
    """
    if labels.dim() > 1 and model_kind(model) == "causal":
        labels = labels[:, 1:]
    return (labels != -100).sum()


def model_kind(model: nn.Module) -> str | None:
    """Tell causal, encoder-decoder and position-wise language models apart by their classes."""
    for module in model.modules():
        names = [base.__name__ for base in type(module).__mro__]
        config = getattr(module, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            return "encoder-decoder"
        for name in names:  # the nearest class that says anything decides
            if any(part in name for part in (*_SHIFTED, "ForConditionalGeneration")):
                return "causal"
            if any(part in name for part in _UNSHIFTED):
                return "position"
    return None
