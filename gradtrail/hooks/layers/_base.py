"""What a layer kind has to say: one rule a file, one registry for all of them.

Suffixes: b example, s position, i layer input, o layer output.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradtrail.factors import DenseGradient, LayerGradient

__all__ = ["LAYERS", "AbstractLayerRule", "LayerCase", "LayerCall", "LayerRegistry", "Roles"]


@dataclass(frozen=True)
class Roles:
    """Which of a layer's own parameters the gradient is wanted for.

    Attributes:
        weight: Whether the weight's entries count.
        bias: Whether the bias's entries count.
    """

    weight: bool = True
    bias: bool = False


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One call of a layer, with the batch axis in front.

    Attributes:
        inputs: The layer's main input. Shape ``[b, ...]``.
        extras: Further tensors the rule asked to keep, by its own names.
        derived: What layers that share the input derive from it, computed once.
    """

    inputs: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    derived: dict[object, Tensor] = field(default_factory=dict)

    def once(self, key: object, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Derive a tensor from the input, once for all layers that share it.

        Args:
            key: What is derived; equal keys must mean equal results.
            compute: Makes it from the input.

        Returns:
            The derived tensor.
        """
        if key not in self.derived:
            self.derived[key] = compute(self.inputs)
        return self.derived[key]


@dataclass(frozen=True)
class LayerCase:
    """A small float64 layer and an input, for the conformance tests.

    Attributes:
        label: Readable id of the case.
        build: Makes the layer, after the test has seeded the generator.
        inputs: Makes the arguments of one call, the batch axis first, at least 3 examples.
    """

    label: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]


class AbstractLayerRule(abc.ABC):
    """Turns one layer kind's input and output gradient into per-example gradients.

    Attributes:
        elementwise: Whether the module's own input and output are used even where its class
            brings its own ``forward``; its first call is then checked against autograd. Otherwise
            the operation that reads the weight is looked for inside that forward.
    """

    elementwise: bool = False

    @abc.abstractmethod
    def layer_gradient(
        self, module: nn.Module, call: LayerCall, output_gradient: Tensor, roles: Roles
    ) -> LayerGradient:
        """Express the gradient of one call.

        Args:
            module: The layer.
            call: Its input, batch axis first.
            output_gradient: Loss gradient at its output, batch axis first.
            roles: Which parameters count.

        Returns:
            Per-example gradients, unreduced.
        """

    @abc.abstractmethod
    def to_parameters(self, module: nn.Module, dense: DenseGradient) -> dict[str, Tensor]:
        """Cut written-out gradients into the shapes of the layer's own parameters.

        Args:
            module: The layer.
            dense: Gradients of the layer, written out.

        Returns:
            By parameter name, ``[b, *parameter.shape]``.
        """

    @abc.abstractmethod
    def cases(self) -> Iterable[LayerCase]:
        """Give small layers that exercise every option.

        Returns:
            The cases.
        """

    def kronecker_sides(self, module: nn.Module) -> tuple[int, int] | None:
        """Give the sides ``(o, i)`` of one group of a layer that is affine in its weight.

        Args:
            module: The layer.

        Returns:
            The sides, the bias left out, or None where the gradient has no Kronecker structure.
        """
        del module
        return None

    def refusal(self, module: nn.Module) -> str | None:
        """Say why this configuration of the layer has no rule, or None if it has one."""
        del module
        return None

    def keep(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> LayerCall:
        """Pick what the gradient will need from the arguments of a call.

        Args:
            module: The layer.
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Returns:
            The main input (the first argument) and the extras, batch axis as passed.

        Raises:
            TypeError: If no tensor was passed.
        """
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                return LayerCall(value)
        raise TypeError(f"{type(module).__name__} must be called with a tensor, got none.")


class LayerRegistry:
    """Rules by layer class, looked up along the class's method resolution order."""

    def __init__(self) -> None:
        """Start empty."""
        self._rules: dict[type[nn.Module], AbstractLayerRule] = {}
        self._predicates: list[tuple[Callable[[nn.Module], bool], AbstractLayerRule]] = []

    def register(
        self, *classes: type[nn.Module]
    ) -> Callable[[AbstractLayerRule], AbstractLayerRule]:
        """Register a rule for layer classes.

        Args:
            *classes: The classes the rule serves, with their subclasses.

        Returns:
            A function that takes the rule and returns it.
        """

        def add(rule: AbstractLayerRule) -> AbstractLayerRule:
            for cls in classes:
                self._rules[cls] = rule
            return rule

        return add

    def register_if(
        self, predicate: Callable[[nn.Module], bool]
    ) -> Callable[[AbstractLayerRule], AbstractLayerRule]:
        """Register a rule for modules of classes that cannot be imported here.

        Args:
            predicate: Tells whether a module is served.

        Returns:
            A function that takes the rule and returns it.
        """

        def add(rule: AbstractLayerRule) -> AbstractLayerRule:
            self._predicates.append((predicate, rule))
            return rule

        return add

    def find(self, module: nn.Module) -> tuple[AbstractLayerRule, type[nn.Module] | None] | None:
        """Find the rule that serves a module.

        Args:
            module: Any module.

        Returns:
            The rule and the registered class (None where a predicate matched), or None.
        """
        for cls in type(module).__mro__:
            if cls in self._rules:
                return self._rules[cls], cls
        for predicate, rule in self._predicates:
            if predicate(module):
                return rule, None
        return None

    def rules(self) -> list[AbstractLayerRule]:
        """Every rule once, in the order of registration."""
        every = [*self._rules.values(), *(rule for _, rule in self._predicates)]
        return list(dict.fromkeys(every))

    def classes(self) -> list[type[nn.Module]]:
        """Every registered class."""
        return list(self._rules)


LAYERS = LayerRegistry()


def split_linear(dense: DenseGradient) -> tuple[Tensor, Tensor | None]:
    """Cut written-out gradients into weight ``[b, o, i]`` and bias ``[b, o]``."""
    rows = dense.values_bd.shape[0]
    weight = dense.values_bd[:, : dense.weight_size].reshape(rows, *dense.shape)
    bias = dense.values_bd[:, dense.weight_size :] if dense.has_bias else None
    return weight, bias


def named(weight: Tensor | None, bias: Tensor | None) -> dict[str, Tensor]:
    """Name the parts that exist and hold entries."""
    parts = {"weight": weight, "bias": bias}
    return {
        name: part for name, part in parts.items() if part is not None and 0 not in part.shape[1:]
    }


def to_positions(tensor: Tensor) -> Tensor:
    """Fold all axes between the batch and the features into one: ``[b, s, k]``."""
    if tensor.dim() == 2:
        return tensor.unsqueeze(1)
    if tensor.dim() == 3:
        return tensor
    return tensor.flatten(1, -2)


def activation_positions(call: LayerCall, roles: Roles) -> Tensor:
    """Give the input as ``[b, s, i]``, or of width 0 where the weight does not count."""
    a_bsi = call.once("positions", to_positions)
    return a_bsi if roles.weight else a_bsi[..., :0]


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which normalised inputs are recomputed: float32 or wider."""
    return torch.float64 if dtype == torch.float64 else torch.float32
