"""Taking rejected examples out of the parameters' gradients, exactly.

A parameter's ``.grad`` after a backward is ``g0 + h``: what lay there before, and this backward's
own part ``h``, the sum of what its examples contributed: their own gradients, divided as the loop
divides its loss. Rejected examples leave ``h``; what earlier backwards left behind stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradtrail.callbacks.selection_layers import Contribution, TrainedLayer, parts_of
from gradtrail.callbacks.selection_own import OwnGradients
from gradtrail.errors import CaptureError
from gradtrail.factors import DenseGradient, LayerGradient, LinearFactors, tensors_of
from gradtrail.hooks.deferred import DeferredWeights

__all__ = [
    "Removal",
    "add_contribution",
    "build",
    "check_sum",
    "form_left_out",
    "refuse_other_sum",
    "remove",
    "remove_all",
    "rescale",
    "size_bound",
    "tolerance_of",
]

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION = 5e-2
_CANCELLED = 1e-2
_MANY_POSITIONS = 32


@dataclass(frozen=True, eq=False)
class Removal:
    """What is to become of one layer's gradient: ``g0 + h`` becomes ``q g0 + f (h - rejected)``.

    Attributes:
        rejected_k: Numbers of the rejected examples. Shape ``[k]``.
        kept_k: Numbers of the others. Shape ``[b - k]``.
        factor: What the kept examples' part is multiplied with: ``f``.
        carry: What earlier backwards' part is multiplied with: ``q``.
    """

    rejected_k: Tensor
    kept_k: Tensor
    factor: float = 1.0
    carry: float = 1.0

    @property
    def changes_nothing(self) -> bool:
        """Whether every example is kept and nothing is rescaled."""
        return not len(self.rejected_k) and self.factor == 1.0 and self.carry == 1.0


def remove_all(
    layers: Mapping[str, TrainedLayer],
    gradients: Mapping[str, LayerGradient],
    what: tuple[Mapping[str, Tensor], Mapping[str, tuple[float, float]]],
    own: OwnGradients,
    deferred: DeferredWeights,
) -> None:
    """Take the rejected examples out of every layer's gradient.

    Args:
        layers: The layers by name.
        gradients: Their per-example gradients, of those that the backward reached.
        what: By layer, which examples are rejected, ``[b]``; and the factors ``(f, q)`` of
            ``Removal`` where they are not 1.
        own: What the backward added to each parameter.
        deferred: Which layers' weight gradients it left out.
    """
    dropped, factors = what
    for name, layer in layers.items():
        gradient, mask = gradients.get(name), dropped[name]
        factor, carry = factors.get(name, (1.0, 1.0))
        if gradient is None:
            rescale(layer, carry)
            continue
        device = next(iter(layer.parameters.values())).device
        rows = (part.nonzero().flatten().to(device) for part in (mask, ~mask))
        removal = Removal(*rows, factor=factor, carry=carry)
        if name in deferred.left_out:
            build(layer, gradient, removal, own)
            deferred.formed(name)
        elif not removal.changes_nothing:
            remove(layer, gradient, removal, own)


def form_left_out(
    layers: Mapping[str, TrainedLayer],
    gradients: Mapping[str, LayerGradient],
    own: OwnGradients,
    deferred: DeferredWeights,
) -> None:
    """Form the weight gradients that a backward left out over all examples, after an error.

    Args:
        layers: The layers by name.
        gradients: Their per-example gradients.
        own: What the backward added to each parameter.
        deferred: Which layers' weight gradients it left out.
    """
    for name in deferred.left_out & gradients.keys():
        rows = torch.arange(gradients[name].num_examples)
        build(layers[name], gradients[name], Removal(rows[:0], rows), own)
        deferred.formed(name)


def remove(
    layer: TrainedLayer, gradient: LayerGradient, removal: Removal, own: OwnGradients
) -> None:
    """Correct the ``.grad`` of a layer's parameters in place.

    The rejected examples' part is subtracted, or the kept ones' built anew, whichever has fewer
    rows: with none kept the part is exactly zero. Sums are formed in float32 or wider.

    Args:
        layer: The layer.
        gradient: Its per-example gradients, as the backward brought them.
        removal: What to do.
        own: What the backward added to each parameter.
    """
    rebuild = len(removal.kept_k) < len(removal.rejected_k)
    rows = removal.kept_k if rebuild else removal.rejected_k
    weight = removal.factor if rebuild else -removal.factor
    wide: dict[str, Tensor] = {}
    for role, parameter in layer.parameters.items():
        wide[role] = _wide(parameter.grad)
        own_factor = 0.0 if rebuild else removal.factor
        _rescale(wide[role], own.of(parameter), own_factor, removal.carry)
    _add_rows(layer, gradient, rows, weight, wide)


def build(
    layer: TrainedLayer, gradient: LayerGradient, removal: Removal, own: OwnGradients
) -> None:
    """Add the kept examples' part to a layer of which the backward left the weights out.

    Args:
        layer: The layer.
        gradient: Its per-example gradients, as the backward brought them.
        removal: Who is kept, and the factors.
        own: What the backward added to each parameter all the same.
    """
    whole = None if len(removal.rejected_k) else _whole_sum(layer, gradient)
    for role, parameter in layer.parameters.items():
        if whole is not None and parameter.grad is None:
            parameter.grad = whole[role] if removal.factor == 1 else whole[role] * removal.factor
            continue
        own.drop(parameter)
        if removal.carry != 1:
            parameter.grad.mul_(removal.carry)
        if whole is not None:
            parameter.grad.add_(whole[role], alpha=removal.factor)
    if whole is None:
        _add_rows(layer, gradient, removal.kept_k, removal.factor)


def rescale(layer: TrainedLayer, carry: float) -> None:
    """Multiply what earlier backwards left at a layer that this one did not reach."""
    for parameter in layer.parameters.values():
        if parameter.grad is not None and carry != 1:
            parameter.grad.mul_(carry)


def check_sum(layer: TrainedLayer, gradient: LayerGradient, own: OwnGradients) -> None:
    """Check that a backward's part of ``.grad`` is the sum of its examples' contributions.

    Args:
        layer: A layer.
        gradient: Its per-example gradients, as the backward brought them.
        own: What the backward added to each parameter.

    Raises:
        CaptureError: If it is not, or there is none.
    """
    terms = layer.total(gradient, None)
    for role, parameter in layer.parameters.items():
        name = layer.names[role]
        if parameter.grad is None:
            raise CaptureError(
                f"{name} must hold its gradient when the backward is over, got grad=None. Step the "
                "optimizer after the backward, not inside it."
            )
        noted = own.of(parameter)
        part = _plain(parameter.grad if noted is None else noted)
        total = torch.zeros_like(part)
        for term in terms[role]:
            add_contribution(total, term, 1.0)
        norms = (float((total - part).norm()), float(part.norm()), float(total.norm()))
        refuse_other_sum(name, norms, size_bound(gradient), tolerance_of(gradient, parameter))


def refuse_other_sum(
    name: str, norms: tuple[float, float, float], bound: float, tolerance: float
) -> None:
    """Refuse a gradient that is not the sum of its examples' contributions.

    Args:
        name: Name of the parameter.
        norms: Of the difference, of the gradient, and of the sum.
        bound: What the sum's norm comes near to at most.
        tolerance: Relative, for dtypes that took part.

    Raises:
        CaptureError: If they are further apart than that.
    """
    error, size, total = norms
    # some gradients are sums that cancel (a key's bias): what is left of them is rounding
    if error > tolerance * (size + _CANCELLED * bound):
        raise CaptureError(
            f"The gradient of {name} must be the sum of its examples' gradients, got norm "
            f"{size:.4g} beside a sum of norm {total:.4g}, {error:.4g} apart. "
            "Penalties, and hooks that change gradients, belong to no example: leave them out."
        )


def tolerance_of(gradient: LayerGradient, parameter: nn.Parameter) -> float:
    """How far apart a gradient and a sum may be, relative to their size."""
    return _TOLERANCE.get(_lowest(gradient, parameter), _LOW_PRECISION)


def _rescale(wide: Tensor, noted: Tensor | None, factor: float, carry: float) -> None:
    """Multiply the backward's own part with one factor and what was there before with another."""
    if noted is None:
        if factor == 0:
            wide.zero_()  # also where a value is not finite
        elif factor != 1:
            wide.mul_(factor)
        return
    if carry != 1:
        wide.mul_(carry)
    if factor != carry:
        wide.add_(noted.to(wide.dtype), alpha=factor - carry)


def _wide(gradient: Tensor) -> Tensor:
    """The same in float32 or wider, itself where it is."""
    return gradient if gradient.dtype in _TOLERANCE else gradient.float()


def _add_rows(
    layer: TrainedLayer,
    gradient: LayerGradient,
    rows_k: Tensor,
    weight: float,
    wide: dict[str, Tensor] | None = None,
) -> None:
    """Add some examples' contributions, times a weight, to the ``.grad`` of a layer's parameters.

    Args:
        layer: The layer.
        gradient: Its gradients, as the backward brought them.
        rows_k: Numbers of the examples. Shape ``[k]``.
        weight: What to multiply with.
        wide: The sums so far by role, if they are not those in ``.grad``.
    """
    if wide is None:
        wide = {role: _wide(parameter.grad) for role, parameter in layer.parameters.items()}
    for part in parts_of(gradient) if len(rows_k) else ():
        if _add_long(layer, part, rows_k, wide, weight):
            continue
        for role, terms in layer.total(part, rows_k).items():
            for term in terms:
                add_contribution(wide[role], term, weight)
    for role, parameter in layer.parameters.items():
        if wide[role] is not parameter.grad:
            parameter.grad.copy_(wide[role])


def _whole_sum(layer: TrainedLayer, gradient: LayerGradient) -> dict[str, Tensor] | None:
    """Sum all examples' contributions by the products that autograd would have formed, to the bit.

    Args:
        layer: A linear layer.
        gradient: Its gradients, as the backward brought them.

    Returns:
        By role, new tensors; None where there were several calls, or other dtypes than the
        weight's.
    """
    if not isinstance(gradient, LinearFactors) or gradient.constant_bs is not None:
        return None
    x_ni, g_no = (
        side.flatten(0, 1) for side in (gradient.activation_bsi, gradient.output_gradient_bso)
    )
    if {x_ni.dtype, g_no.dtype} != {layer.parameters["weight"].dtype}:
        return None
    whole = {"weight": g_no.t() @ x_ni if layer.is_row_major else x_ni.t() @ g_no}
    if "bias" in layer.parameters:
        whole["bias"] = g_no.sum(0)
    return whole


def add_contribution(wide: Tensor, term: Contribution, weight: float) -> None:
    """Add a contribution, times a weight, in place."""
    if isinstance(term, Tensor):
        wide.add_(term.to(wide.dtype), alpha=weight)
        return
    values_no = term.values_no.to(wide.dtype)
    if wide.is_sparse:
        index = term.index_n.unsqueeze(0)
        part = torch.sparse_coo_tensor(index, values_no, wide.shape, check_invariants=False)
        wide.add_(part, alpha=weight)
    else:
        wide.index_add_(0, term.index_n, values_no, alpha=weight)


def _add_long(
    layer: TrainedLayer,
    part: LayerGradient,
    rows_k: Tensor,
    wide: Mapping[str, Tensor],
    weight: float,
) -> bool:
    """Add examples of many positions one by one, in place, which copies none of their factors.

    Args:
        layer: The layer.
        part: One use of its parameters.
        rows_k: Numbers of the examples. Shape ``[k]``.
        wide: What to add to, by role.
        weight: What to multiply with.

    Returns:
        Whether it was done, which asks for a plain layer whose dtypes are the gradient's.
    """
    plain = isinstance(part, LinearFactors) and part.groups == 1 and "weight" in wide
    if not plain or part.num_positions < _MANY_POSITIONS or part.constant_bs is not None:
        return False
    a_bsi, g_bso = part.activation_bsi, part.output_gradient_bso
    matrix_oi = layer.matrix(wide["weight"], part)
    if matrix_oi is None or {a_bsi.dtype, g_bso.dtype} != {matrix_oi.dtype}:
        return False
    for row in rows_k.tolist():
        matrix_oi.addmm_(g_bso[row].t(), a_bsi[row], alpha=weight)
        if "bias" in wide:
            wide["bias"].add_(g_bso[row].sum(0), alpha=weight)
    return True


def _plain(gradient: Tensor) -> Tensor:
    dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
    return dense if dense.dtype in _TOLERANCE else dense.float()


def _lowest(gradient: LayerGradient, parameter: nn.Parameter) -> torch.dtype:
    """The least exact dtype that took part."""
    dtypes = [tensor.dtype for tensor in tensors_of(gradient) if tensor.is_floating_point()]
    return max([parameter.dtype, *dtypes], key=lambda dtype: torch.finfo(dtype).eps)


def size_bound(gradient: LayerGradient) -> float:
    """A size that the layer's summed gradient cannot exceed, but comes near to."""
    bound = 0.0
    for part in parts_of(gradient):
        if isinstance(part, DenseGradient):
            bound += float(part.values_bd.double().norm())
            continue
        *inputs, slopes = (tensor.double() for tensor in tensors_of(part))
        tokens = slopes.shape[0] * slopes.shape[1]
        floating = [value.norm() for value in inputs if value.is_floating_point()]
        bound += float(slopes.norm() * max([*map(float, floating), tokens**0.5]))
    return bound
