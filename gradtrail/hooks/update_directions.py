"""Per-example gradients turned into the moves that an optimizer would make of them.

Suffixes: b example, d parameter entry, n entry of one parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtrail.factors import DenseGradient, LayerGradient, to_dense, widen
from gradtrail.hooks.directions import DIRECTIONS, ParameterState, update_direction
from gradtrail.hooks.optimizer_state import (
    OptimizerSnapshot,
    innermost_optimizer,
    read_state,
    state_of,
)
from gradtrail.hooks.parameter_rows import LayerParameters, layer_parameters
from gradtrail.hooks.selection import Unit
from gradtrail.hooks.sharded import Shards
from gradtrail.hooks.sharded_state import whole_states
from gradtrail.hooks.wrapped import named_parameters

__all__ = ["LayerState", "UpdateDirections", "layer_states"]

_ENTRIES = 1 << 24  # mapped at once: an optimizer's map takes a few times its gradients' memory


@dataclass(frozen=True, eq=False)
class LayerState:
    """An optimizer's state of one layer, in the order of the layer's written-out gradient.

    Attributes:
        kind: Name of the optimizer's class.
        sizes: Number of entries by role, ``"weight"`` then ``"bias"``.
        parts: By role. Moments have shape ``[n]``, or no axes.
    """

    kind: str
    sizes: Mapping[str, int]
    parts: Mapping[str, ParameterState]

    def directions(
        self, gradient: LayerGradient, parameters: Mapping[str, Tensor] | None = None
    ) -> DenseGradient:
        """Give what a step on each example alone would move the layer by, divided by ``-lr``.

        Args:
            gradient: The layer's gradients, each of the example's own loss, not projected.
            parameters: By role, the parameters' entries ``[n]``, for weight decay to be part of
                the move; None: it is left out.

        Returns:
            The directions, written out, in float32 or wider.

        Raises:
            ValueError: If the gradients are not whole.
        """
        dense = to_dense(gradient)
        (values_bd,) = widen(dense.values_bd)
        size = sum(self.sizes.values())
        if values_bd.shape[1] != size:
            raise ValueError(
                f"Gradients must be whole, with {size} entries an example, got "
                f"{values_bd.shape[1]}. Capture without a projection; project the directions."
            )
        moved_bd = torch.empty_like(values_bd)
        start = 0
        for role, state in self.parts.items():
            own = slice(start, start + self.sizes[role])
            entries = None if parameters is None else parameters[role]
            for rows in _few_rows(*values_bd.shape):
                moved_bd[rows, own] = update_direction(
                    self.kind, values_bd[rows, own], state, parameter=entries
                )
            start = own.stop
        return replace(dense, values_bd=moved_bd)


class UpdateDirections:
    """Turns each layer's per-example gradients into an optimizer's update directions.

    With an optimizer the state is the one at the time of the call, which before a step is the
    state that the step starts from; with a snapshot it is always the snapshot's.

    Attributes:
        kind: Name of the optimizer's class.
    """

    kind: str

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], optimizer: Optimizer | OptimizerSnapshot
    ) -> None:
        """Find every layer's parameters in the optimizer.

        Args:
            model: The model.
            units: The captured layers.
            optimizer: Whose moves; it must hold every parameter of the layers.

        Raises:
            TypeError: If it is neither an optimizer nor a snapshot.
            ValueError: If it does not hold a parameter.
        """
        self._layers = layer_parameters(units, model)
        self._shards = Shards(model)
        self._snapshot: OptimizerSnapshot | None = None
        if isinstance(optimizer, OptimizerSnapshot):
            self._snapshot, held = optimizer, optimizer.parameters.keys()
            self.kind = optimizer.kind
        elif isinstance(optimizer, Optimizer):
            self._optimizer = innermost_optimizer(optimizer)
            self._direction = DIRECTIONS.find(self._optimizer)
            self.kind = self._direction.kind
            self._groups = _groups(self._optimizer)
            held = {name for name, p in named_parameters(model) if id(p) in self._groups}
        else:
            raise TypeError(
                "optimizer must be a torch.optim.Optimizer or an OptimizerSnapshot, got "
                f"{type(optimizer).__name__}."
            )
        strange = [
            name
            for layer, known in self._layers.items()
            for name in known.names.values()
            if name not in held
        ]
        if strange:
            more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
            raise ValueError(
                "optimizer must hold every captured parameter, got one that lacks "
                f"{', '.join(strange[:3])}{more}. Leave their layers out with exclude."
            )

    def __call__(self, name: str, gradient: LayerGradient) -> DenseGradient:
        """Give the directions of one layer's gradients.

        Args:
            name: The layer's name.
            gradient: Gradients of the examples' own losses.

        Returns:
            The directions, written out; weight decay is left out.
        """
        return self.state(name).directions(gradient)

    def state(self, name: str) -> LayerState:
        """Give the optimizer's state of one layer, as it is now; its tensors may be views."""
        layer = self._layers[name]
        if self._snapshot is not None:
            return layer_state(layer, self.kind, self._snapshot.parameters)
        if any(id(parameter) not in self._groups for parameter in layer.parameters.values()):
            self._groups = _groups(self._optimizer)  # they have been changed since
        here = {}
        for role, parameter in layer.parameters.items():
            state, group = state_of(self._optimizer, parameter), self._groups[id(parameter)]
            here[layer.names[role]] = (parameter, read_state(self._direction, state, group))
        found = whole_states(self._direction, here, self._shards)
        return layer_state(layer, self.kind, found)


def layer_state(
    layer: LayerParameters, kind: str, states: Mapping[str, ParameterState]
) -> LayerState:
    """Bring one layer's state into the order of its written-out gradient.

    Args:
        layer: The layer's parameters.
        kind: Name of the optimizer's class.
        states: States by parameter name, moments shaped like the parameters.

    Returns:
        The layer's state; views where the order allows.
    """
    parts = {}
    for role, name in layer.names.items():
        state = states[name]
        moments = {key: layer.row(role, value) for key, value in state.moments.items()}
        parts[role] = replace(state, moments=moments)
    return LayerState(kind, layer.sizes, parts)


def layer_states(
    model: nn.Module, units: Sequence[Unit], snapshot: OptimizerSnapshot
) -> dict[str, LayerState]:
    """Bring a snapshot into the order of the captured layers' written-out gradients.

    Args:
        model: The model.
        units: The captured layers; each parameter must be in the snapshot.
        snapshot: The snapshot.

    Returns:
        By layer name.
    """
    directions = UpdateDirections(model, units, snapshot)
    return {unit.name: directions.state(unit.name) for unit in units}


def _few_rows(count: int, width: int) -> Iterator[slice]:
    step = max(1, _ENTRIES // max(1, width))
    return (slice(start, start + step) for start in range(0, count, step))


def _groups(optimizer: Optimizer) -> dict[int, dict[str, object]]:
    return {id(p): group for group in optimizer.param_groups for p in group["params"]}
