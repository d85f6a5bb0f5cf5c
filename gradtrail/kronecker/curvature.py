r"""One layer's curvature: applying its damped inverse to gradients.

K-FAC (Martens & Grosse, 2015, https://arxiv.org/abs/1503.05671): :math:`(S + \lambda_S)^{-1} G (A +
\lambda_A)^{-1}`. EK-FAC (George et al., 2018, https://arxiv.org/abs/1806.03884):
:math:`Q_S [(Q_S^T G Q_A) / (\Lambda + \lambda)] Q_A^T`.

Suffixes: b example, g group, o output, i and j input (with a constant where there is a bias), d
entry.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from gradtrail.factors import (
    DenseGradient,
    LayerGradient,
    SumGradient,
    accumulation_dtype,
    map_tensors,
    move,
    paired_products,
    tensors_of,
    to_dense,
)
from gradtrail.kronecker.covariance import linear_parts
from gradtrail.kronecker.damping import Damping, inverted, unseen_below
from gradtrail.kronecker.matrices import (
    Scratch,
    from_matrices,
    to_matrices,
    turn_factors,
    turned_matrices,
)
from gradtrail.kronecker.symmetric import damped_inverse, decompose, trace_mean

__all__ = [
    "AbstractCurvature",
    "DenseCurvature",
    "DiagonalCurvature",
    "EKFACCurvature",
    "KFACCurvature",
    "Spectrum",
]


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues of one block of curvature.

    Attributes:
        what: Which block: ``"A"``, ``"S"``, ``"corrected"``, ``"dense"`` or ``"diagonal"``.
        eigenvalues: All of them. Shape ``[d]``.
    """

    what: str
    eigenvalues: Tensor

    @property
    def mean(self) -> float:
        """Mean eigenvalue, which relative damping is a multiple of."""
        return float(self.eigenvalues.double().mean()) if self.eigenvalues.numel() else 0.0

    @property
    def unseen(self) -> int:
        """Number of directions that the data do not reach: eigenvalues of 0 but for rounding."""
        return int((self.eigenvalues <= unseen_below(self.eigenvalues)).sum())


class AbstractCurvature(abc.ABC):
    """Curvature of one layer, without damping."""

    @abc.abstractmethod
    def precondition(self, gradient: LayerGradient, damping: Damping) -> LayerGradient:
        """Apply the damped inverse.

        Args:
            gradient: Gradients of the layer.
            damping: What is added to the spectrum.

        Returns:
            As many gradients, ready for inner products with others of the layer.
        """

    @abc.abstractmethod
    def quadratic(self, gradient: LayerGradient, damping: Damping) -> Tensor:
        """Compute the product of every gradient with its preconditioned self.

        Args:
            gradient: Gradients of the layer.
            damping: What is added to the spectrum.

        Returns:
            At least 0. Shape ``[b]``.
        """

    @abc.abstractmethod
    def spectra(self) -> tuple[Spectrum, ...]:
        """Give the spectra that damping is added to.

        Returns:
            One entry a spectrum.
        """

    @abc.abstractmethod
    def mean_eigenvalues(self) -> tuple[float, ...]:
        """Give the mean of every spectrum, without decomposing anything.

        Returns:
            One number a spectrum; 0 says that the layer is dead.
        """


@final
@dataclass(frozen=True, eq=False)
class KFACCurvature(AbstractCurvature):
    """The two covariances of a layer.

    Attributes:
        layer: The layer's name, for errors.
        activation_cov_gjj: ``A``. Shape ``[g, j, j]``.
        gradient_cov_goo: ``S``. Shape ``[g, o, o]``.
        input_inverses: Inverses of ``A`` by damping, filled as they are made; layers that read
            one input may share them.
    """

    layer: str
    activation_cov_gjj: Tensor
    gradient_cov_goo: Tensor
    input_inverses: dict[Damping, Tensor] = field(default_factory=dict)
    _output_inverses: dict[Damping, Tensor] = field(default_factory=dict, init=False)

    def precondition(self, gradient: LayerGradient, damping: Damping) -> LayerGradient:
        """Multiply both sides by the damped inverses; factors stay factors."""
        input_gjj, output_goo = self._inverted(damping)
        own = accumulation_dtype(*(tensor.dtype for tensor in tensors_of(gradient)))
        wide = torch.promote_types(input_gjj.dtype, output_goo.dtype)
        if wide != own:  # a damping so small that float32 would not do
            turned = self._turned(
                move(gradient, dtype=wide), input_gjj.to(wide), output_goo.to(wide)
            )
            return move(turned, dtype=own)
        return self._turned(gradient, input_gjj, output_goo)

    def _turned(
        self, gradient: LayerGradient, input_gjj: Tensor, output_goo: Tensor
    ) -> LayerGradient:
        if isinstance(gradient, DenseGradient):
            turned = turned_matrices(gradient, input_gjj, output_goo)
            return from_matrices(turned, has_bias=gradient.has_bias)
        parts = []
        for part in linear_parts(gradient):
            turned = turn_factors(part, input_gjj, output_goo)
            parts.append(_with_constant(turned, has_bias=part.has_bias))
        return parts[0] if len(parts) == 1 else SumGradient(tuple(parts))

    def quadratic(self, gradient: LayerGradient, damping: Damping) -> Tensor:
        """Pair every gradient with its preconditioned self."""
        return paired_products(gradient, self.precondition(gradient, damping)).clamp(min=0)

    def spectra(self) -> tuple[Spectrum, ...]:
        """The spectra of ``A`` and ``S``."""
        sides = (("A", self.activation_cov_gjj), ("S", self.gradient_cov_goo))
        return tuple(
            Spectrum(what, decompose(cov, self.layer, f"covariance {what}")[0].to(cov).flatten())
            for what, cov in sides
        )

    def mean_eigenvalues(self) -> tuple[float, ...]:
        """Traces over widths."""
        return trace_mean(self.activation_cov_gjj), trace_mean(self.gradient_cov_goo)

    def _inverted(self, damping: Damping) -> tuple[Tensor, Tensor]:
        for cov, held, what in (
            (self.activation_cov_gjj, self.input_inverses, "covariance A"),
            (self.gradient_cov_goo, self._output_inverses, "covariance S"),
        ):
            if damping not in held:
                held[damping] = damped_inverse(cov, damping, self.layer, what)
        return self.input_inverses[damping], self._output_inverses[damping]


@final
@dataclass(frozen=True, eq=False)
class EKFACCurvature(AbstractCurvature):
    """The eigenbases of a layer's covariances and the second moments of its gradients there.

    Attributes:
        layer: The layer's name, for errors.
        activation_basis_gjj: ``Q_A``, eigenvectors in columns. Shape ``[g, j, j]``.
        gradient_basis_goo: ``Q_S``. Shape ``[g, o, o]``.
        eigenvalues_goj: The corrected eigenvalues. Shape ``[g, o, j]``.
    """

    layer: str
    activation_basis_gjj: Tensor
    gradient_basis_goo: Tensor
    eigenvalues_goj: Tensor

    def precondition(self, gradient: LayerGradient, damping: Damping) -> LayerGradient:
        """Divide in the eigenbasis and turn back; the result is written out."""
        turned_bgoj = self.turned(gradient).mul_(self.inverse(damping))
        back_bgoj = torch.matmul(self.gradient_basis_goo, turned_bgoj)
        back_bgoj = torch.matmul(back_bgoj, self.activation_basis_gjj.transpose(-1, -2))
        return from_matrices(back_bgoj, has_bias=_has_bias(gradient))

    def quadratic(self, gradient: LayerGradient, damping: Damping) -> Tensor:
        """Weigh the squares of the entries in the eigenbasis."""
        turned_bgoj = self.turned(gradient)
        return torch.mv(turned_bgoj.square_().flatten(1), self.inverse(damping).flatten())

    def spectra(self) -> tuple[Spectrum, ...]:
        """The corrected spectrum."""
        return (Spectrum("corrected", self.eigenvalues_goj.flatten()),)

    def mean_eigenvalues(self) -> tuple[float, ...]:
        """Mean of the corrected spectrum."""
        return (float(self.eigenvalues_goj.double().mean()),)

    def turned(
        self,
        gradient: LayerGradient,
        *,
        out: Tensor | None = None,
        scratch: Scratch | None = None,
    ) -> Tensor:
        """Write gradients out in the eigenbasis.

        Args:
            gradient: Gradients of the layer.
            out: Where to, or None. Shape ``[b, g, o, j]``.
            scratch: Space for what is made on the way, or None.

        Returns:
            Shape ``[b, g, o, j]``.
        """
        return turned_matrices(
            gradient,
            self.activation_basis_gjj,
            self.gradient_basis_goo,
            out=out,
            scratch=scratch,
        )

    def inverse(self, damping: Damping) -> Tensor:
        """Give ``1 / (Lambda + lambda)``. Shape ``[g, o, j]``."""
        (mean,) = self.mean_eigenvalues()
        return inverted(self.eigenvalues_goj, damping.absolute(mean))


@final
@dataclass(frozen=True, eq=False)
class DenseCurvature(AbstractCurvature):
    """The whole empirical Fisher of a layer of few parameters.

    Attributes:
        layer: The layer's name, for errors.
        fisher_dd: Mean outer product of its gradients. Shape ``[d, d]``.
    """

    layer: str
    fisher_dd: Tensor
    _inverses: dict[Damping, Tensor] = field(default_factory=dict, init=False)

    def precondition(self, gradient: LayerGradient, damping: Damping) -> LayerGradient:
        """Multiply by the damped inverse."""
        dense = to_dense(gradient)
        return map_tensors(dense, lambda values_bd: values_bd @ self._inverted(damping))

    def quadratic(self, gradient: LayerGradient, damping: Damping) -> Tensor:
        """Pair every gradient with its preconditioned self."""
        dense = to_dense(gradient)
        return paired_products(dense, self.precondition(dense, damping)).clamp(min=0)

    def spectra(self) -> tuple[Spectrum, ...]:
        """The spectrum of the Fisher."""
        values, _ = decompose(self.fisher_dd.unsqueeze(0), self.layer, "dense Fisher")
        return (Spectrum("dense", values[0].to(self.fisher_dd)),)

    def mean_eigenvalues(self) -> tuple[float, ...]:
        """Trace over width."""
        return (trace_mean(self.fisher_dd.unsqueeze(0)),)

    def _inverted(self, damping: Damping) -> Tensor:
        if damping not in self._inverses:
            fisher = self.fisher_dd.unsqueeze(0)
            self._inverses[damping] = damped_inverse(fisher, damping, self.layer, "dense Fisher")[0]
        return self._inverses[damping]


@final
@dataclass(frozen=True, eq=False)
class DiagonalCurvature(AbstractCurvature):
    """Mean squares of the entries of a layer's gradients.

    Attributes:
        layer: The layer's name, for errors.
        squares_d: Mean squares, entries as ``to_dense`` lays them out. Shape ``[d]``.
    """

    layer: str
    squares_d: Tensor

    def precondition(self, gradient: LayerGradient, damping: Damping) -> LayerGradient:
        """Divide entry by entry."""
        inverse_d = self._inverse(damping)
        return map_tensors(to_dense(gradient), lambda values_bd: values_bd * inverse_d)

    def quadratic(self, gradient: LayerGradient, damping: Damping) -> Tensor:
        """Weigh the squares of the entries."""
        return torch.mv(to_dense(gradient).values_bd.square(), self._inverse(damping))

    def spectra(self) -> tuple[Spectrum, ...]:
        """The diagonal."""
        return (Spectrum("diagonal", self.squares_d),)

    def mean_eigenvalues(self) -> tuple[float, ...]:
        """Mean of the diagonal."""
        return (float(self.squares_d.double().mean()),)

    def _inverse(self, damping: Damping) -> Tensor:
        (mean,) = self.mean_eigenvalues()
        return inverted(self.squares_d, damping.absolute(mean))


def _with_constant(turned: LayerGradient, *, has_bias: bool) -> LayerGradient:
    """Part the last input of turned factors from the others where it stands for the bias."""
    if not has_bias:
        return turned
    a_bsj = turned.activation_bsi
    if turned.groups == 1:
        return type(turned)(
            a_bsj[..., :-1],
            turned.output_gradient_bso,
            has_bias=True,
            constant_bs=a_bsj[..., -1],
        )
    return from_matrices(to_matrices(to_dense(turned), turned.groups), has_bias=True)


def _has_bias(gradient: LayerGradient) -> bool:
    part = gradient.parts[0] if isinstance(gradient, SumGradient) else gradient
    return part.has_bias
