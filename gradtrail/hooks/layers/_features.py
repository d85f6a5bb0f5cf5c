"""Elementwise scales and shifts: what the rules of the normalisation layers share.

Suffixes: b example, s position, d parameter entry.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradtrail.errors import CaptureError
from gradtrail.factors import DenseGradient, LinearFactors
from gradtrail.hooks.layers._base import named, split_linear, to_positions

__all__ = ["bias_factors", "feature_positions", "scale_to_parameters"]


def bias_factors(g_bso: Tensor) -> LinearFactors:
    """Express the gradient of a bias on its own."""
    return LinearFactors(g_bso[..., :0], g_bso, has_bias=True)


def feature_positions(tensor: Tensor, axes: int) -> Tensor:
    """Fold the last axes into features and those before them into positions.

    Args:
        tensor: A normalisation layer's input or output gradient. Shape ``[b, ..., *features]``.
        axes: Number of feature axes.

    Returns:
        Shape ``[b, s, d]``.

    Raises:
        CaptureError: If no axis is left for the batch.
    """
    if tensor.dim() <= axes:
        raise CaptureError(
            f"A normalisation layer must see a batch, an input of more than {axes} axes, got "
            f"shape {tuple(tensor.shape)}. Add the batch axis (input.unsqueeze(0)) in the model."
        )
    return to_positions(tensor.flatten(-axes))


def scale_to_parameters(dense: DenseGradient, shape: Sequence[int]) -> dict[str, Tensor]:
    """Cut written-out gradients of a scale and shift into parameters of one shape.

    Args:
        dense: Gradients of a scale (and shift), or of a shift alone.
        shape: Shape of the parameters.

    Returns:
        By parameter name, those that hold entries. Shape ``[b, *shape]``.
    """
    parts = named(*split_linear(dense))
    return {name: part.reshape(part.shape[0], *shape) for name, part in parts.items()}
