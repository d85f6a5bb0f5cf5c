"""The border types: one layer's per-example gradients of one batch, and a block of layers.

Suffixes: b example, s position, i layer input, o layer output, d parameter entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

__all__ = [
    "DenseGradient",
    "EmbeddingFactors",
    "GradientBlock",
    "LayerGradient",
    "LinearFactors",
    "ScaleFactors",
    "SumGradient",
]


@dataclass(frozen=True, eq=False)
class LinearFactors:
    r"""Gradient of a layer that is affine in its weight, kept as its two factors.

    The gradient of example ``b`` is :math:`G_b = \sum_s g_{bs} [a_{bs}, 1]^T`, per example and
    unreduced. With ``groups > 1`` both factors hold the groups side by side and
    output channels meet only the inputs of their own group.

    Attributes:
        activation_bsi: Layer inputs. Shape ``[b, s, i]``; ``i = 0`` for a bias alone.
        output_gradient_bso: Loss gradients at the output. Shape ``[b, s, o]``.
        has_bias: Whether a bias entry per output belongs to the gradient.
        groups: Number of groups that divide ``i`` and ``o``.
        constant_bs: What stands in place of the 1 that the bias belongs to, as after a
            preconditioner has mixed it with the inputs; None for 1. Shape ``[b, s]``.
    """

    activation_bsi: Tensor
    output_gradient_bso: Tensor
    has_bias: bool = False
    groups: int = 1
    constant_bs: Tensor | None = None

    def __post_init__(self) -> None:
        """Check that the two factors describe the same examples and positions.

        Raises:
            ValueError: If the shapes do not fit each other or the groups.
        """
        a, g = self.activation_bsi, self.output_gradient_bso
        if a.dim() != 3 or g.dim() != 3 or a.shape[:2] != g.shape[:2]:
            raise ValueError(
                "activation_bsi and output_gradient_bso must be [b, s, i] and [b, s, o], "
                f"got {tuple(a.shape)} and {tuple(g.shape)}."
            )
        if a.shape[2] % self.groups or g.shape[2] % self.groups:
            raise ValueError(
                f"groups must divide i={a.shape[2]} and o={g.shape[2]}, got {self.groups}."
            )
        if self.constant_bs is not None and self.constant_bs.shape != a.shape[:2]:
            raise ValueError(
                f"constant_bs must be {tuple(a.shape[:2])}, got {tuple(self.constant_bs.shape)}."
            )

    @property
    def num_examples(self) -> int:
        """Number of examples ``b``."""
        return self.activation_bsi.shape[0]

    @property
    def num_positions(self) -> int:
        """Number of positions ``s``."""
        return self.activation_bsi.shape[1]


@dataclass(frozen=True, eq=False)
class EmbeddingFactors:
    """Gradient of a lookup table: which rows were read, and the gradient at each read.

    Attributes:
        index_bs: Row numbers. Shape ``[b, s]``, integer.
        output_gradient_bso: Loss gradients at the rows read. Shape ``[b, s, o]``.
        num_embeddings: Number of rows of the table.
        padding_idx: A row that receives no gradient, or None.
    """

    index_bs: Tensor
    output_gradient_bso: Tensor
    num_embeddings: int
    padding_idx: int | None = None

    def __post_init__(self) -> None:
        """Check that the indices and gradients describe the same reads.

        Raises:
            ValueError: If the shapes do not fit each other.
        """
        if self.index_bs.shape != self.output_gradient_bso.shape[:2]:
            raise ValueError(
                "index_bs and output_gradient_bso must be [b, s] and [b, s, o], got "
                f"{tuple(self.index_bs.shape)} and {tuple(self.output_gradient_bso.shape)}."
            )

    @property
    def num_examples(self) -> int:
        """Number of examples ``b``."""
        return self.index_bs.shape[0]

    @property
    def num_positions(self) -> int:
        """Number of positions ``s``."""
        return self.index_bs.shape[1]


@dataclass(frozen=True, eq=False)
class ScaleFactors:
    r"""Gradient of an elementwise scale and shift, as in normalisation layers.

    The weight's gradient is :math:`\sum_s g_{bs} \odot a_{bs}` with ``a`` the normalised input,
    the bias's is :math:`\sum_s g_{bs}`.

    Attributes:
        activation_bsd: What the weight multiplies. Shape ``[b, s, d]``.
        output_gradient_bsd: Loss gradients at the output. Shape ``[b, s, d]``.
        has_bias: Whether a bias entry per output belongs to the gradient.
    """

    activation_bsd: Tensor
    output_gradient_bsd: Tensor
    has_bias: bool = False

    def __post_init__(self) -> None:
        """Check that the two factors have one shape.

        Raises:
            ValueError: If they do not.
        """
        a, g = self.activation_bsd, self.output_gradient_bsd
        if a.dim() != 3 or a.shape != g.shape:
            raise ValueError(
                "activation_bsd and output_gradient_bsd must both be [b, s, d], "
                f"got {tuple(a.shape)} and {tuple(g.shape)}."
            )

    @property
    def num_examples(self) -> int:
        """Number of examples ``b``."""
        return self.activation_bsd.shape[0]

    @property
    def num_positions(self) -> int:
        """Number of positions ``s``."""
        return self.activation_bsd.shape[1]


@dataclass(frozen=True, eq=False)
class DenseGradient:
    """Gradient with every entry written out: materialised or projected.

    Attributes:
        values_bd: One row an example: the weight's entries row-major, then the bias's.
            Shape ``[b, d]``.
        shape: Shape of the weight part; its first entry is the number of outputs.
        has_bias: Whether ``shape[0]`` bias entries follow the weight's.
    """

    values_bd: Tensor
    shape: tuple[int, ...]
    has_bias: bool = False

    def __post_init__(self) -> None:
        """Check that the rows hold as many entries as the shape asks for.

        Raises:
            ValueError: If they do not.
        """
        width = self.weight_size + (self.shape[0] if self.has_bias else 0)
        if self.values_bd.dim() != 2 or self.values_bd.shape[1] != width:
            raise ValueError(
                f"values_bd must be [b, {width}] for shape={self.shape} and "
                f"has_bias={self.has_bias}, got {tuple(self.values_bd.shape)}."
            )

    @property
    def num_examples(self) -> int:
        """Number of examples ``b``."""
        return self.values_bd.shape[0]

    @property
    def weight_size(self) -> int:
        """Number of entries of the weight part."""
        size = 1
        for side in self.shape:
            size *= side
        return size


@dataclass(frozen=True, eq=False)
class SumGradient:
    """Gradient of one parameter that was used several times: the sum over its uses.

    A layer called twice, or two modules that share a weight, give one part a use; inner
    products include the cross terms.

    Attributes:
        parts: The uses, all of one parameter and of the same examples.
    """

    parts: tuple[LinearFactors | EmbeddingFactors | ScaleFactors | DenseGradient, ...]

    @property
    def num_examples(self) -> int:
        """Number of examples ``b``."""
        return self.parts[0].num_examples


LayerGradient: TypeAlias = (
    LinearFactors | EmbeddingFactors | ScaleFactors | DenseGradient | SumGradient
)


@dataclass(frozen=True, eq=False)
class GradientBlock:
    """All captured layers of one batch.

    Attributes:
        step: Which completed step of the capture this is, from 0.
        ids: One id an example: data set rows in a live pass, else ids or content hashes.
        layers: Layer gradients by layer name, in the order of the model's modules.
    """

    step: int
    ids: tuple[int | str, ...]
    layers: Mapping[str, LayerGradient]
