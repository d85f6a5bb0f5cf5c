"""Where the entries of a layer's parameters stand in its written-out gradient.

Suffixes: n entry of one parameter, in the order of the written-out gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gradtrail.factors import DenseGradient
from gradtrail.hooks.selection import Owner, Unit
from gradtrail.hooks.wrapped import named_parameters, take_apart, whole_shape

__all__ = ["LayerParameters", "entry_order", "layer_parameters"]


@dataclass(frozen=True, eq=False)
class LayerParameters:
    """One captured layer and the parameters that its gradient belongs to.

    A written-out gradient holds the weight's entries and then the bias's, in the layer's own order:
    that of the parameter in most layers, ``[o, i]`` for a weight that is kept as ``[i, o]``.

    Attributes:
        layer: The layer's name.
        owner: The module (any, where several share the parameter) that gives the order.
        parameters: By role, ``"weight"`` then ``"bias"``, those that the layer has.
        names: Names of the parameters in the model, by role.
    """

    layer: str
    owner: Owner
    parameters: dict[str, nn.Parameter]
    names: dict[str, str]
    _orders: list[tuple[int, ...] | Tensor] = field(default_factory=list)

    @property
    def sizes(self) -> dict[str, int]:
        """Number of entries by role."""
        return {role: self._shape(role).numel() for role in self.parameters}

    def row(self, role: str, values: Tensor) -> Tensor:
        """Bring what is shaped like a parameter into the order of the written-out gradient.

        Args:
            role: ``"weight"`` or ``"bias"``.
            values: Such a tensor, or one without axes, which stays as it is.

        Returns:
            Shape ``[n]``; a view where the order allows.
        """
        if values.dim() == 0 and self.parameters[role].dim():
            return values
        if values.is_sparse:
            values = values.to_dense()
        if role == "bias":
            return values.reshape(-1)
        if not self._orders:
            self._orders.append(self._order())
        order = self._orders[0]
        if isinstance(order, tuple):
            return values.permute(order).reshape(-1)
        row_n = torch.empty_like(values.reshape(-1))
        row_n[order.to(values.device)] = values.reshape(-1)
        return row_n

    def _order(self) -> tuple[int, ...] | Tensor:
        own, count = self._shape("weight"), self.sizes["weight"]
        sides = self.owner.rule.kronecker_sides(self.owner.module)
        shape = (count,) if sides is None else (count // sides[1], sides[1])
        order = entry_order(self.owner, shape, has_bias="bias" in self.parameters)
        if sides is None and order == tuple(range(len(order))):
            return tuple(range(len(own)))  # a table or a scale, written out as it stands
        return order

    def _shape(self, role: str) -> torch.Size:
        return whole_shape(self.owner.module, role)


def entry_order(
    owner: Owner, shape: tuple[int, ...], *, has_bias: bool
) -> tuple[int, ...] | Tensor:
    """Find how the entries of a weight lie in its written-out gradient.

    Args:
        owner: The module with its rule.
        shape: Shape of the weight part of the written-out gradient.
        has_bias: Whether a bias follows it.

    Returns:
        The order of the weight's axes, or where that does not say it, the place of every entry.
    """
    width = math.prod(shape) + has_bias * shape[0]
    blank = torch.empty(1, width, device="meta")  # tells the order without memory

    def weight_of(values_1d: Tensor) -> Tensor:
        dense = DenseGradient(values_1d, shape, has_bias)
        return owner.rule.to_parameters(owner.module, dense)["weight"][0]

    view = weight_of(blank)
    strides = view.stride()
    order = tuple(sorted(range(view.dim()), key=lambda axis: -strides[axis]))
    is_view = view._base is blank and not view.storage_offset()  # noqa: SLF001  # torch says it nowhere else
    if is_view and view.permute(order).is_contiguous():
        return order
    return weight_of(torch.arange(width, dtype=torch.float64).unsqueeze(0)).reshape(-1).long()


def layer_parameters(units: Sequence[Unit], model: nn.Module) -> dict[str, LayerParameters]:
    """Find the parameters of captured layers.

    Args:
        units: The layers.
        model: The model they belong to.

    Returns:
        By layer name.
    """
    take_apart(model)  # the parts are what an optimizer holds
    names = {id(parameter): name for name, parameter in named_parameters(model)}
    found = {}
    for unit in units:
        owner = unit.owners[0]
        own = owner.module._parameters  # noqa: SLF001  # the dict itself: no computed attribute
        roles = {"weight": owner.roles.weight, "bias": owner.roles.bias}
        parameters = {
            role: own[role] for role, wanted in roles.items() if wanted and own[role] is not None
        }
        found[unit.name] = LayerParameters(
            unit.name, owner, parameters, {role: names[id(p)] for role, p in parameters.items()}
        )
    return found
