"""What an optimizer family has to say, and the registry of all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["DIRECTIONS", "Direction", "DirectionRegistry", "Options", "ParameterState"]

Options: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class ParameterState:
    """What an optimizer holds for one parameter between two of its steps.

    Attributes:
        step: Number of steps it has made with this parameter.
        moments: State tensors by the optimizer's own names (``exp_avg``, ...), shaped like the
            parameter or without axes; empty before the first step.
        options: Hyperparameters of the parameter's group (``lr``, ``betas``, ...), as numbers.
    """

    step: int = 0
    moments: Mapping[str, Tensor] = field(default_factory=dict)
    options: Options = field(default_factory=dict)

    def moment(self, name: str, like: Tensor) -> Tensor:
        """Give a moment on the device and in the dtype of a gradient; zero where there is none."""
        value = self.moments.get(name)
        return like.new_zeros(()) if value is None else value.to(like)


@dataclass(frozen=True)
class Direction:
    """One optimizer's map from a gradient to the move it makes of it.

    Attributes:
        kind: Name of the optimizer's class.
        moments: Names of the state tensors that the map reads, where they exist.
        options: Names of the hyperparameters that it reads, besides ``lr``.
        function: Gives, for gradients ``[b, n]`` (weight decay and ``maximize`` applied) and the
            state before the step with moments ``[n]``, the moves divided by ``-lr``: ``[b, n]``.
        decouples: Whether weight decay shrinks the parameter, in place of adding to the gradient;
            None: the option ``decoupled_weight_decay`` says it.
        check: Refuses hyperparameters for which the map is another one, or None.
    """

    kind: str
    moments: tuple[str, ...]
    options: tuple[str, ...]
    function: Callable[[Tensor, ParameterState], Tensor]
    decouples: bool | None = False
    check: Callable[[Options], None] | None = None


class DirectionRegistry:
    """Maps by optimizer class, looked up along the class's method resolution order."""

    def __init__(self) -> None:
        """Start empty."""
        self._kinds: dict[str, Direction] = {}
        self._classes: dict[type[Optimizer], str] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the optimizers that have a map, in alphabetical order."""
        return tuple(sorted(self._kinds))

    def register(self, direction: Direction, cls: type[Optimizer] | None = None) -> None:
        """Add a map.

        Args:
            direction: The map.
            cls: The optimizer's class; None: it is known by its class's name alone.
        """
        self._kinds[direction.kind] = direction
        if cls is not None:
            self._classes[cls] = direction.kind

    def named(self, kind: str) -> Direction:
        """Give the map of an optimizer by its name.

        Args:
            kind: Name of the optimizer's class.

        Returns:
            The map.

        Raises:
            TypeError: If there is none.
        """
        if kind not in self._kinds:
            raise TypeError(self._refusal(kind))
        return self._kinds[kind]

    def find(self, optimizer: Optimizer) -> Direction:
        """Find the map of an optimizer.

        Args:
            optimizer: The optimizer that steps, unwrapped.

        Returns:
            The map of the nearest class among its bases that has one.

        Raises:
            TypeError: If there is none, or a subclass brings a ``step`` of its own.
        """
        own = type(optimizer)
        for cls in own.__mro__:
            kind = self._classes.get(cls)
            if kind is not None:
                # torch wraps the methods to time them
                if inspect.unwrap(own.step) is not inspect.unwrap(cls.step):
                    raise TypeError(
                        self._refusal(f"{own.__name__}, a subclass of {kind} with its own step()")
                    )
                return self._kinds[kind]
            if cls.__name__ in self._kinds and self._is_named(cls.__name__):
                return self._kinds[cls.__name__]
        raise TypeError(self._refusal(own.__name__))

    def _is_named(self, kind: str) -> bool:
        """Whether an optimizer is known by its name alone."""
        return kind not in self._classes.values()

    def _refusal(self, got: str) -> str:
        return (
            f"optimizer must be one of {', '.join(self.kinds)}, got {got}: how it turns a gradient "
            "into a move is not known. Capture plain gradients (optimizer=None)."
        )


DIRECTIONS = DirectionRegistry()
