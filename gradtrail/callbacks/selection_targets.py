"""The target gradients of a data selection: the batch's own, a given one, validation data's."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradtrail.callbacks.selection_layers import Direction, TrainedLayer, add_up
from gradtrail.callbacks.selection_losses import LossFunction, moved, run_pass, summed_loss
from gradtrail.callbacks.selection_scores import batch_scores, target_scores
from gradtrail.factors import DenseGradient, LayerGradient
from gradtrail.hooks import LivePass, Selection
from gradtrail.hooks.fixed import at_rest
from gradtrail.hooks.layout import Layout
from gradtrail.hooks.wrapped import unwrapped
from gradtrail.options import check_choice, check_positive

__all__ = ["AbstractTarget", "BatchTarget", "FixedTarget", "TargetChoice", "ValidationTarget"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetChoice:
    """Which target gradient is wanted, and what it is made of.

    Attributes:
        target: Where it comes from.
        target_gradient: The gradient itself for ``"fixed"``, by parameter name.
        validation_loader: Batches for ``"validation"``.
        validation_loss: Their loss, or None to infer it.
        validation_batches_per_pass: How many batches make one target.
    """

    target: Literal["batch", "fixed", "validation"]
    target_gradient: Mapping[str, Tensor] | None
    validation_loader: Iterable[Any] | None
    validation_loss: LossFunction | None
    validation_batches_per_pass: int

    def __post_init__(self) -> None:
        """Check that what the target needs is there, and that nothing else is.

        Raises:
            ValueError: If an option is missing or would have no effect.
        """
        check_choice("target", self.target, ("batch", "fixed", "validation"))
        check_positive("validation_batches_per_pass", self.validation_batches_per_pass)
        for name, wanted, required in (
            ("target_gradient", "fixed", True),
            ("validation_loader", "validation", True),
            ("validation_loss", "validation", False),
        ):
            given = getattr(self, name) is not None
            if given and self.target != wanted:
                raise ValueError(
                    f"{name} must go with target={wanted!r}, got target={self.target!r}, which "
                    "does not use it. Leave it out."
                )
            if required and not given and self.target == wanted:
                raise ValueError(f"target={wanted!r} must come with {name}, got None.")
        if self.validation_batches_per_pass != 1 and self.target != "validation":
            raise ValueError(
                "validation_batches_per_pass must go with target='validation', got "
                f"target={self.target!r}, which does not use it. Leave it out."
            )

    def build(self, layers: Mapping[str, TrainedLayer]) -> AbstractTarget:
        """Make the target for these trained layers."""
        if self.target == "fixed":
            return FixedTarget(self.target_gradient, layers)
        if self.target == "validation":
            loss, count = self.validation_loss, self.validation_batches_per_pass
            return ValidationTarget(self.validation_loader, loss, count)
        return BatchTarget()


class AbstractTarget(abc.ABC):
    """A target gradient, layer by layer."""

    @abc.abstractmethod
    def prepare(
        self, model: nn.Module, selection: Selection, layouts: Mapping[str, Layout]
    ) -> None:
        """Bring the target up to date before a forward.

        Args:
            model: The model in its wrappers.
            selection: The captured layers.
            layouts: Where they hold the batch.
        """

    @abc.abstractmethod
    def norms(self) -> dict[str, float]:
        """Say by what ranks can tell that they have the same target.

        Returns:
            Norms by name; empty where ranks make the target together.
        """

    @abc.abstractmethod
    def scores(
        self,
        layer: TrainedLayer,
        gradient: LayerGradient,
        own: Mapping[str, Tensor] | None,
        scale: float,
        *,
        ghost: bool,
    ) -> Tensor:
        """Give the inner products of a layer's per-example gradients with the target.

        Args:
            layer: The layer.
            gradient: Its gradients as the backward brought them.
            own: What the backward brought to its parameters, by role; None where it brought none.
            scale: What they are multiplied with to be the examples' own.
            ghost: Whether factors are used as they are.

        Returns:
            Shape ``[b]``.
        """


class BatchTarget(AbstractTarget):
    """The sum of the batch's own gradients, which autograd has added up already."""

    def prepare(
        self, model: nn.Module, selection: Selection, layouts: Mapping[str, Layout]
    ) -> None:
        """Nothing to bring up to date."""

    def norms(self) -> dict[str, float]:
        """None: it is the sum over all ranks."""
        return {}

    def scores(
        self,
        layer: TrainedLayer,
        gradient: LayerGradient,
        own: Mapping[str, Tensor] | None,
        scale: float,
        *,
        ghost: bool,
    ) -> Tensor:
        """Multiply with the layer's gradient, or pairs of examples where there are few."""
        scores = batch_scores(gradient) if ghost else None
        if scores is None:
            summed = (
                Direction.of(add_up(gradient)) if own is None else layer.direction(gradient, own)
            )
            scores = target_scores(gradient, summed, ghost=ghost)
        return scores * scale**2


class FixedTarget(AbstractTarget):
    """A target gradient that is given once and for all, by parameter name."""

    def __init__(self, gradient: Mapping[str, Tensor], layers: Mapping[str, TrainedLayer]) -> None:
        """Check that it fits the trained parameters.

        Args:
            gradient: By parameter name.
            layers: The trained layers.

        Raises:
            TypeError: If it is no mapping of tensors.
            ValueError: If a name or a shape does not fit, or an entry is not finite.
        """
        tensors = isinstance(gradient, Mapping) and all(
            isinstance(value, Tensor) for value in gradient.values()
        )
        if not tensors:
            raise TypeError(
                "target_gradient must be a mapping of parameter names to tensors, got "
                f"{type(gradient).__name__}. Collect it as {{name: p.grad.clone()}}."
            )
        expected = {
            layer.names[role]: (layer.name, role, layer.shape(role))
            for layer in layers.values()
            for role in layer.parameters
        }
        odd = sorted(expected.keys() ^ gradient.keys())
        if odd:
            what = "more" if odd[0] in gradient else "less"
            raise ValueError(
                f"target_gradient must hold every trained parameter and no other, got {what}: "
                f"{', '.join(odd[:5])}. Give zeros for those that do not count."
            )
        self._norms = {name: float(value.norm()) for name, value in gradient.items()}
        self._values: dict[str, dict[str, Tensor]] = {}
        for name, value in gradient.items():
            layer, role, shape = expected[name]
            if value.shape != shape or not bool(torch.isfinite(value).all()):
                got = "an entry that is not" if value.shape == shape else tuple(value.shape)
                raise ValueError(
                    f"target_gradient[{name!r}] must be of shape {tuple(shape)} and finite, got "
                    f"{got}."
                )
            self._values.setdefault(layer, {})[role] = value.detach()
        self._directions: dict[str, Direction] = {}

    def prepare(
        self, model: nn.Module, selection: Selection, layouts: Mapping[str, Layout]
    ) -> None:
        """Nothing to bring up to date."""

    def norms(self) -> dict[str, float]:
        """Norms of the given gradient."""
        return self._norms

    def scores(
        self,
        layer: TrainedLayer,
        gradient: LayerGradient,
        own: Mapping[str, Tensor] | None,
        scale: float,
        *,
        ghost: bool,
    ) -> Tensor:
        """Multiply with the given gradient."""
        del own
        if layer.name not in self._directions:
            device = next(iter(layer.parameters.values())).device
            values = {role: v.to(device) for role, v in self._values[layer.name].items()}
            self._directions[layer.name] = layer.direction(gradient, values)
        return target_scores(gradient, self._directions[layer.name], ghost=ghost) * scale


class ValidationTarget(AbstractTarget):
    """The gradient of a loss summed over the next batches of validation data."""

    def __init__(
        self,
        loader: Iterable[Any],
        loss: LossFunction | None,
        batches: int,
    ) -> None:
        """Keep the data.

        Args:
            loader: Gives batches, again from the start once it is through.
            loss: ``(model, batch) -> [b]`` or their sum; None: what the model or the pair gives.
            batches: How many make one target.

        Raises:
            TypeError: If the loader can be gone through only once, or the loss not be called.
        """
        if not isinstance(loader, Iterable) or isinstance(loader, Iterator):
            raise TypeError(
                "validation_loader must be an iterable that can be gone through again, got "
                f"{type(loader).__name__}. Pass a DataLoader or a list of batches."
            )
        if loss is not None and not callable(loss):
            raise TypeError(
                f"validation_loss must be a callable (model, batch) -> [b], got {loss!r}."
            )
        self._loader = loader
        self._loss = loss or summed_loss
        self._batches = batches
        self._iterator: Iterator[Any] | None = None
        self._live: LivePass | None = None
        self._targets: dict[str, Direction] = {}

    def prepare(
        self, model: nn.Module, selection: Selection, layouts: Mapping[str, Layout]
    ) -> None:
        """Run the next validation batches on the model as it is now, dropout off."""
        totals: dict[str, DenseGradient] = {}

        def sink(name: str, gradient: LayerGradient) -> None:
            total = add_up(gradient)
            if name in totals:
                total = replace(total, values_bd=total.values_bd + totals[name].values_bd)
            totals[name] = total

        # the pass puts the random state back, which loaders draw from too
        if self._live is None or self._live.selection is not selection:
            self._live = LivePass(unwrapped(model), selection, layouts)
        with at_rest(model), self._live as live:
            device = next(model.parameters()).device
            for _ in range(self._batches):
                run_pass(live, moved(self._next(), device), self._loss, "validation_loss", sink)
        self._targets = {name: Direction.of(total) for name, total in totals.items()}

    def norms(self) -> dict[str, float]:
        """Norms of the validation gradient."""
        return {name: float(target.weight.norm()) for name, target in self._targets.items()}

    def scores(
        self,
        layer: TrainedLayer,
        gradient: LayerGradient,
        own: Mapping[str, Tensor] | None,
        scale: float,
        *,
        ghost: bool,
    ) -> Tensor:
        """Multiply with the validation gradient; 0 where none of it reached the layer."""
        del own
        target = self._targets.get(layer.name)
        if target is None:
            return torch.zeros(gradient.num_examples)
        return target_scores(gradient, target, ghost=ghost) * scale

    def _next(self) -> Any:  # noqa: ANN401
        """Take the next batch.

        Returns:
            The batch.

        Raises:
            ValueError: If there is none.
        """
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._loader)
            for batch in self._iterator:
                return batch
            self._iterator = None
        raise ValueError("validation_loader must give at least one batch, got none.")
