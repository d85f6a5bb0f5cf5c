"""Between a captured layer's written-out gradient and the parameters it belongs to.

Suffixes: q query, d entry of a written-out gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradtrail.errors import UnsupportedLayerError
from gradtrail.factors import DenseGradient
from gradtrail.hooks import Unit

__all__ = ["LayerMap", "map_layers", "to_layers", "to_parameters"]


@dataclass(frozen=True, eq=False)
class _Part:
    """One parameter of a layer.

    Attributes:
        name: Its name in the model.
        shape: Its shape.
        places: Where its entries stand in the written-out gradient: a slice, or their numbers.
    """

    name: str
    shape: tuple[int, ...]
    places: slice | Tensor


@dataclass(frozen=True, eq=False)
class LayerMap:
    """One captured layer.

    Attributes:
        name: Its name.
        size: Number of entries ``d``.
        parts: Its parameters.
    """

    name: str
    size: int
    parts: tuple[_Part, ...]


def map_layers(
    model: nn.Module, units: Sequence[Unit], layers: Mapping[str, DenseGradient]
) -> tuple[LayerMap, ...]:
    """Find where each entry of the layers' gradients belongs.

    Args:
        model: The model.
        units: Captured layers, those in ``layers`` among them.
        layers: A written-out gradient of each layer.

    Returns:
        One map a layer, in the model's order.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return tuple(
        _map_layer(names, unit, layers[unit.name]) for unit in units if unit.name in layers
    )


def to_parameters(maps: Sequence[LayerMap], vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cut written-out gradients into parameters, ``[q, *shape]``; views where they can be."""
    return {
        part.name: vectors[layer.name][:, part.places].reshape(-1, *part.shape)
        for layer in maps
        for part in layer.parts
    }


def to_layers(maps: Sequence[LayerMap], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Write parameters out layer by layer, ``[q, d]``."""
    found: dict[str, Tensor] = {}
    for layer in maps:
        first = parameters[layer.parts[0].name]
        found[layer.name] = first.new_empty(first.shape[0], layer.size)
        for part in layer.parts:
            found[layer.name][:, part.places] = parameters[part.name].flatten(1)
    return found


def _map_layer(names: Mapping[int, str], unit: Unit, gradient: DenseGradient) -> LayerMap:
    """Read off a layer's rule where it puts each entry: it is given their numbers.

    Args:
        names: Names of the model's parameters by identity.
        unit: The layer.
        gradient: A written-out gradient of it.

    Returns:
        The map.

    Raises:
        UnsupportedLayerError: If the rule does more than put every entry at a place of its own.
    """
    owner = unit.owners[0]
    size = gradient.values_bd.shape[1]
    numbers = torch.arange(size, dtype=torch.float64).unsqueeze(0)
    placed = owner.rule.to_parameters(
        owner.module, DenseGradient(numbers, gradient.shape, gradient.has_bias)
    )
    parts, every = [], []
    for role, values in placed.items():
        places = values.reshape(-1).long()
        parameter = owner.module._parameters[role]  # noqa: SLF001  # not a computed attribute
        every.append(places)
        device = gradient.values_bd.device
        parts.append(_Part(names[id(parameter)], tuple(values.shape[1:]), _compact(places, device)))
    if not torch.equal(torch.cat(every).sort().values, numbers[0].long()):
        raise UnsupportedLayerError(
            f'{unit.name} must keep every entry of its gradient in a parameter for refine="cg", '
            f"got a {type(owner.module).__name__} whose rule does not. Leave it out."
        )
    return LayerMap(unit.name, size, tuple(parts))


def _compact(places: Tensor, device: torch.device) -> slice | Tensor:
    """A slice where the entries stand in a row."""
    first = int(places[0])
    if torch.equal(places, torch.arange(first, first + len(places))):
        return slice(first, first + len(places))
    return places.to(device)
