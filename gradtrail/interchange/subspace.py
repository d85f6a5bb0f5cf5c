r"""A learned subspace, and what it means to interchange two activations in it.

Geiger et al., 2023, https://arxiv.org/abs/2303.02536: the part of an activation that lies in a
subspace is replaced by that of another run, :math:`h' = h_b + s (h_s - h_b) B B^T`.

Suffixes: d width, k rank.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gradtrail.options import check_choice, check_positive

__all__ = ["LearnedSubspace", "as_basis", "check_width", "interchange", "signed_basis"]

_ORTHONORMAL = 1e-4


class LearnedSubspace(nn.Module):
    """A subspace of an activation space that gradients can turn.

    Its parameter is any ``[d, k]`` matrix; the basis is the orthogonal factor of the matrix's
    reduced QR decomposition, with the signs that make the triangular factor's diagonal positive.
    It starts orthonormal itself and uniform over all subspaces: columns of unit length let Adam
    turn a wide one as fast as a narrow one.
    """

    def __init__(
        self,
        width: int,
        rank: int,
        *,
        seed: int | torch.Generator = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        """Start at a random subspace.

        Args:
            width: Width ``d`` of the activation.
            rank: Dimension ``k`` of the subspace, at most ``d``.
            seed: Seed of a private CPU generator, or the generator.
            dtype: float32 or float64.
            device: Where the parameter lies; None means torch's default.

        Raises:
            ValueError: If the rank is outside ``[1, width]``.
        """
        super().__init__()
        check_positive("width", width)
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= width:
            raise ValueError(f"rank must be an integer in [1, {width}], got {rank!r}.")
        check_choice("dtype", dtype, (torch.float32, torch.float64))
        own = seed if isinstance(seed, torch.Generator) else torch.Generator().manual_seed(seed)
        start = torch.randn(width, rank, generator=own, dtype=torch.float64, device="cpu")
        self.raw = nn.Parameter(signed_basis(start).to(dtype=dtype, device=device))

    @property
    def basis(self) -> Tensor:
        """Orthonormal columns, differentiable in the parameter. Shape ``[d, k]``."""
        return signed_basis(self.raw)

    def extra_repr(self) -> str:
        """Width and rank, as they stand in a printed module."""
        return f"width={self.raw.shape[0]}, rank={self.raw.shape[1]}"


def signed_basis(matrix: Tensor) -> Tensor:
    """Orthonormalise the columns of ``[d, k]``, each on the side of its part that is new."""
    basis, triangular = torch.linalg.qr(matrix, mode="reduced")
    diagonal = triangular.detach().diagonal()
    return basis * torch.where(diagonal < 0, -1.0, 1.0).to(basis)


def interchange(base: Tensor, source: Tensor, basis: Tensor, strength: float = 1.0) -> Tensor:
    r"""Put a source's part in a subspace in the place of a base's.

    Computes :math:`h' = h_b + s (h_s - h_b) B B^T` in float32 (float64 stays) and casts back.

    Args:
        base: Activations of the base runs. Shape ``[..., d]``.
        source: Activations of the source runs. Shape ``[..., d]``.
        basis: Orthonormal columns. Shape ``[d, k]``.
        strength: ``s``; 1 replaces the part, 0 leaves the base.

    Returns:
        The activations to go on with, dtype of ``base``. Shape ``[..., d]``.

    Raises:
        ValueError: If ``base`` and ``source`` differ in shape.
    """
    if base.shape != source.shape:
        raise ValueError(
            f"base and source must have one shape, got {tuple(base.shape)} and "
            f"{tuple(source.shape)}."
        )
    check_width(basis, base)
    check_strength(strength)
    wide = torch.float64 if base.dtype == torch.float64 else torch.float32
    b, s, columns = (tensor.to(wide) for tensor in (base, source, basis.to(base.device)))
    return (b + strength * ((s - b) @ columns) @ columns.mT).to(base.dtype)


def check_strength(strength: float) -> None:
    """Refuse a strength that is not a finite number.

    Args:
        strength: What was passed.

    Raises:
        ValueError: If it is anything else.
    """
    number = isinstance(strength, (int, float)) and not isinstance(strength, bool)
    if not number or not math.isfinite(strength):
        raise ValueError(f"strength must be a finite number, got {strength!r}. 1 replaces fully.")


def check_width(basis: Tensor, activation: Tensor) -> None:
    """Refuse a basis of another space.

    Args:
        basis: Shape ``[d, k]``.
        activation: Shape ``[..., d]``.

    Raises:
        ValueError: If the widths differ.
    """
    if basis.dim() != 2 or basis.shape[0] != activation.shape[-1]:
        raise ValueError(
            f"basis must be [d, k] with the activation's width d={activation.shape[-1]}, got "
            f"{tuple(basis.shape)}."
        )


def as_basis(basis: Tensor | LearnedSubspace, option: str = "basis") -> Tensor:
    """Check a basis that a user passed.

    Args:
        basis: Columns ``[d, k]``, or a subspace.
        option: Name of the argument.

    Returns:
        The columns, without graph. Shape ``[d, k]``.

    Raises:
        TypeError: If it is neither.
        ValueError: If the columns are not orthonormal.
    """
    columns = basis.basis if isinstance(basis, LearnedSubspace) else basis
    if not isinstance(columns, Tensor) or not columns.is_floating_point():
        got = columns.dtype if isinstance(columns, Tensor) else type(columns).__name__
        raise TypeError(
            f"{option} must be a floating tensor [d, k] or a LearnedSubspace, got {got}."
        )
    # a tensor made in inference mode cannot be saved for a backward, a copy can
    columns = columns.clone() if columns.is_inference() else columns.detach()
    if columns.dim() != 2 or not 1 <= columns.shape[1] <= columns.shape[0]:
        raise ValueError(
            f"{option} must be [d, k] with 1 <= k <= d, got {tuple(columns.shape)}. "
            "Write one direction as direction.unsqueeze(1)."
        )
    exact = columns.double().cpu()
    error = (exact.mT @ exact - torch.eye(columns.shape[1], dtype=torch.float64)).abs().max()
    if not float(error) <= _ORTHONORMAL:
        raise ValueError(
            f"{option} must have orthonormal columns (to {_ORTHONORMAL:g}), got B^T B that differs "
            f"from the identity by {float(error):.2g}. Take torch.linalg.qr(basis).Q."
        )
    return columns
