r"""Kronecker factors of the Fisher, accumulated layer by layer inside the backward.

Martens & Grosse, 2015, https://arxiv.org/abs/1503.05671, with the positions of an example summed:

.. math:: A = \frac1P \sum_{bs} w_{bs} a_{bs} a_{bs}^T, \qquad
          S = \frac1N \sum_{bs} g_{bs} g_{bs}^T

Suffixes: g group, b example, s position, t any stacked position, i input (with a constant where
there is a bias), o output.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradtrail.errors import CurvatureError
from gradtrail.factors import LayerGradient, LinearFactors, SumGradient, accumulation_dtype
from gradtrail.kronecker.symmetric import add_products, mirror

__all__ = ["CovarianceAccumulator", "KroneckerFactors", "linear_parts"]

_WINDOW = 4  # inputs that wait for more layers that read them: q, k, v and a gate


@dataclass(frozen=True, eq=False)
class KroneckerFactors:
    """Covariances of one layer, a mean over the data.

    Attributes:
        activation_cov_gii: ``A``, with the constant of the bias in the last row and column.
            Layers that read one input hold the same tensor. Shape ``[g, i, i]``.
        gradient_cov_goo: ``S``. Shape ``[g, o, o]``.
        num_examples: Number of examples ``N``.
        num_positions: Number of positions with a gradient ``P``.
        input_of: Name of the first layer with this input.
    """

    activation_cov_gii: Tensor
    gradient_cov_goo: Tensor
    num_examples: int
    num_positions: int
    input_of: str


@dataclass(eq=False)
class _Inputs:
    """Sum over the inputs of layers that read the same ones."""

    names: set[str]
    sum_gii: Tensor
    count: Tensor

    def without(self, names: set[str]) -> _Inputs:
        """Split off layers that read something else from now on."""
        self.names -= names
        return _Inputs(names, self.sum_gii.clone(), self.count.clone())


@dataclass(eq=False)
class _Waiting:
    """An input of this backward, until the layers that read it have come."""

    parts: list[LinearFactors]
    weights: list[Tensor]
    names: list[str] = field(default_factory=list)


class CovarianceAccumulator:
    """Accumulates ``A`` and ``S`` of many layers, in float32 or wider.

    Layers that read the same input share one ``A``; its positions count where the output gradient
    of any of them is not exactly zero.
    """

    def __init__(self, *, max_side: int) -> None:
        """Start empty.

        Args:
            max_side: Longest side of a covariance that may be allocated.
        """
        self._max_side = max_side
        self._inputs: dict[str, _Inputs] = {}
        self._gradients: dict[str, Tensor] = {}
        self._waiting: dict[tuple[object, ...], _Waiting] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Layers seen so far."""
        return tuple(self._gradients)

    def add(self, name: str, gradient: LayerGradient) -> None:
        """Take one layer's gradients of one backward.

        Args:
            name: The layer.
            gradient: Linear factors, or a sum of them.
        """
        parts = linear_parts(gradient)
        self._add_gradients(name, parts)
        key = (*(id(part.activation_bsi) for part in parts), parts[0].has_bias, parts[0].groups)
        weights = [_weights(part.output_gradient_bso) for part in parts]
        waiting = self._waiting.get(key)
        if waiting is None:
            if len(self._waiting) == _WINDOW:
                self._add_inputs(self._waiting.pop(next(iter(self._waiting))))
            waiting = self._waiting[key] = _Waiting(list(parts), weights)
        else:
            pairs = zip(waiting.weights, weights, strict=True)
            waiting.weights = [old | new for old, new in pairs]
        waiting.names.append(name)

    def end_backward(self) -> None:
        """Add what still waits: no more layers will come."""
        for waiting in self._waiting.values():
            self._add_inputs(waiting)
        self._waiting.clear()

    def result(self, num_examples: int, *, consume: bool = True) -> dict[str, KroneckerFactors]:
        """Give the covariances.

        Args:
            num_examples: Number of examples ``N`` they are a mean over.
            consume: Whether to hand the sums over, which ends the accumulation; otherwise they
                are copied.

        Returns:
            By layer, in the order of arrival.

        Raises:
            RuntimeError: If a backward was not ended.
        """
        if self._waiting:
            raise RuntimeError("end_backward must be called before result. Call it.")
        done: dict[int, tuple[Tensor, int, str]] = {}
        found: dict[str, KroneckerFactors] = {}
        for name, sum_goo in self._gradients.items():
            inputs = self._inputs[name]
            if id(inputs) not in done:
                sum_gii = inputs.sum_gii if consume else inputs.sum_gii.clone()
                count = int(inputs.count)
                done[id(inputs)] = (mirror(sum_gii).div_(max(1, count)), count, name)
            cov_gii, count, first = done[id(inputs)]
            sum_goo = sum_goo if consume else sum_goo.clone()
            cov_goo = mirror(sum_goo).div_(max(1, num_examples))
            found[name] = KroneckerFactors(cov_gii, cov_goo, num_examples, count, first)
        if consume:
            self._inputs, self._gradients = {}, {}
        return found

    def _add_gradients(self, name: str, parts: tuple[LinearFactors, ...]) -> None:
        g_bso = parts[0].output_gradient_bso
        groups, width = parts[0].groups, g_bso.shape[2] // parts[0].groups
        if name not in self._gradients:
            self._gradients[name] = self._zeros(name, groups, width, g_bso)
        sum_goo = self._gradients[name]
        for part in parts:
            g_tgo = part.output_gradient_bso.flatten(0, 1).unflatten(1, (groups, width))
            for group in range(groups):
                add_products(sum_goo[group], g_tgo[:, group].to(sum_goo.dtype))

    def _add_inputs(self, waiting: _Waiting) -> None:
        for inputs in self._owners(waiting):
            for part, weights in zip(waiting.parts, waiting.weights, strict=True):
                _add_weighted(inputs, part, weights)

    def _owners(self, waiting: _Waiting) -> list[_Inputs]:
        """Sums that these layers' input belongs to: one, but for layers that part ways."""
        together: dict[int, set[str]] = {}
        for name in waiting.names:
            together.setdefault(id(self._inputs.get(name)), set()).add(name)
        owners = []
        for names in together.values():
            owner = self._inputs.get(next(iter(names)))
            if owner is None:
                part = waiting.parts[0]
                width = part.activation_bsi.shape[2] // part.groups + int(part.has_bias)
                zeros = self._zeros(waiting.names[0], part.groups, width, part.activation_bsi)
                owner = _Inputs(names, zeros, zeros.new_zeros((), dtype=torch.int64))
            elif owner.names != names:
                owner = owner.without(names)
            self._inputs |= dict.fromkeys(names, owner)
            owners.append(owner)
        return owners

    def _zeros(self, name: str, groups: int, width: int, like: Tensor) -> Tensor:
        dtype = accumulation_dtype(like.dtype)
        if width > self._max_side:
            size = groups * width * width * dtype.itemsize
            raise CurvatureError(
                f"{name} must have sides of at most max_factor_dim={self._max_side}, got {width}: "
                f"its covariance would take {size / 2**30:,.1f} GiB. Leave it out with exclude=, "
                "give it diagonal= treatment, compress it with projection=, or raise "
                "max_factor_dim."
            )
        return like.new_zeros(groups, width, width, dtype=dtype)


def linear_parts(gradient: LayerGradient) -> tuple[LinearFactors, ...]:
    """List the uses of a layer whose gradients have Kronecker structure.

    Args:
        gradient: Linear factors or a sum of them.

    Returns:
        The uses.

    Raises:
        TypeError: If a use is of another kind.
    """
    parts = gradient.parts if isinstance(gradient, SumGradient) else (gradient,)
    for part in parts:
        if not isinstance(part, LinearFactors):
            raise TypeError(f"gradient must hold linear factors, got {type(part).__name__}.")
    return parts


def _weights(g_bso: Tensor) -> Tensor:
    """Tell which positions have a gradient that is not exactly zero: ``[b s]``, bool."""
    g_to = g_bso.flatten(0, 1)
    if g_to.device.type != "cpu":
        return (g_to != 0).any(1)  # without asking the device
    some_t = g_to[:, 0] != 0  # one entry nearly always tells
    doubtful = (~some_t).nonzero()[:, 0]
    some_t[doubtful] = (g_to[doubtful] != 0).any(1)
    return some_t


def _add_weighted(inputs: _Inputs, part: LinearFactors, weights_t: Tensor) -> None:
    """Add the products of one use's inputs, with the bias's constant, where the weight is 1."""
    sum_gii = inputs.sum_gii
    a_ti = part.activation_bsi.flatten(0, 1)
    count = weights_t.sum()
    if a_ti.device.type != "cpu":
        a_ti = torch.where(weights_t.unsqueeze(1), a_ti, a_ti.new_zeros(()))
    elif int(count) < a_ti.shape[0]:
        a_ti = a_ti[weights_t]
    width = a_ti.shape[1] // part.groups
    a_tgi = a_ti.to(sum_gii.dtype).unflatten(1, (part.groups, width))
    for group in range(part.groups):
        add_products(sum_gii[group, :width, :width], a_tgi[:, group])
    if part.has_bias:
        sum_gii[:, :width, width] += a_tgi.sum(0)
        sum_gii[:, width, width] += count
    inputs.count += count
