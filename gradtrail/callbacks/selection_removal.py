"""Taking rejected examples out of the parameters' gradients, exactly.

A parameter's ``.grad`` after a backward is ``g0 + h``: what lay there before, and this backward's
own part ``h``, the sum of what its examples contributed: their own gradients, divided as the loop
divides its loss. Rejected examples leave ``h``; what earlier backwards left behind stays.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradtrail.callbacks.selection_layers import Contribution, TrainedLayer, parts_of
from gradtrail.errors import CaptureError
from gradtrail.factors import DenseGradient, LayerGradient, LinearFactors, tensors_of
from gradtrail.hooks import HookManager

__all__ = [
    "OwnGradients",
    "Removal",
    "add_contribution",
    "check_sum",
    "refuse_other_sum",
    "remove",
    "rescale",
    "size_bound",
    "tolerance_of",
]

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_LOW_PRECISION = 5e-2
_CANCELLED = 1e-2
_MANY_POSITIONS = 32


class OwnGradients:
    """Tells what the backward under way has added to each parameter's ``.grad``.

    Autograd hands a parameter's gradient on before it adds it to what is there, so nothing is
    subtracted and nothing changes. Only a reference is kept, and only where there is something.
    """

    def __init__(self) -> None:
        """Start without parameters."""
        self._manager: HookManager | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._backward: Callable[[], object | None] = lambda: None
        self._fresh: set[int] = set()
        self._noted: dict[int, Tensor] = {}

    def watch(self, manager: HookManager, parameters: Iterable[nn.Parameter]) -> None:
        """Take note of what the captured backwards bring to some parameters.

        Args:
            manager: What captures.
            parameters: The trained parameters.
        """
        self._manager = manager
        for parameter in parameters:
            self._handles.append(parameter.register_hook(self._hook(parameter)))

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """Give the last backward's own part of a gradient.

        Args:
            parameter: A watched parameter.

        Returns:
            The part, not to be changed; None where all of ``.grad`` is.
        """
        return None if id(parameter) in self._fresh else self._noted.get(id(parameter))

    def part(self, parameter: nn.Parameter) -> Tensor:
        """What the last backward brought to a watched parameter, not to be changed."""
        noted = self.of(parameter)
        if noted is not None:
            return noted
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def forget(self) -> None:
        """Let go of the last backward's parts."""
        self._fresh.clear()
        self._noted.clear()

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._manager = None
        self.forget()

    def _begin(self, backward: object) -> None:
        """Forget what an earlier backward brought, which may not have come to its end."""
        if self._backward() is not backward:
            self.forget()
            self._backward = weakref.ref(backward)

    def _hook(self, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        key, reference = id(parameter), weakref.ref(parameter)  # no cycle through the parameter

        def note(gradient: Tensor) -> None:
            backward = self._manager.backward
            if backward is None:  # not a captured one
                return
            self._begin(backward)
            if key in self._fresh:
                return
            if reference().grad is None:
                self._fresh.add(key)
            elif key in self._noted:  # checkpointed parts that share it bring theirs one by one
                self._noted[key] = self._noted[key] + gradient
            else:
                self._noted[key] = gradient.detach()

        return note


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
        grad = parameter.grad
        wide[role] = grad if grad.dtype in _TOLERANCE else grad.float()
        own_factor = 0.0 if rebuild else removal.factor
        _rescale(wide[role], own.of(parameter), own_factor, removal.carry)
    for part in parts_of(gradient) if len(rows) else ():
        if _add_long(layer, part, rows, wide, weight):
            continue
        for role, terms in layer.total(part, rows).items():
            for term in terms:
                add_contribution(wide[role], term, weight)
    for role, parameter in layer.parameters.items():
        if wide[role] is not parameter.grad:
            parameter.grad.copy_(wide[role])


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
