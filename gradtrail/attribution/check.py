"""Checking a model's captured gradients against plain autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradtrail.attribution.data import Rows, move_batch
from gradtrail.attribution.losses import LossReduction, resolve_loss
from gradtrail.attribution.session import Batch
from gradtrail.attribution.setup import make_session
from gradtrail.factors import DenseGradient, LayerGradient, to_dense
from gradtrail.hooks import LayerChoice, Unit, batch_length, select_layers, take_rows
from gradtrail.reference import per_example_gradients

__all__ = ["CheckReport", "LayerCheck", "check"]

_EXAMPLES = 4
# model code computes softmaxes and norms in float32 whatever its dtype, and autograd sums there too
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
_LOW_PRECISION = 5e-2


@dataclass(frozen=True)
class LayerCheck:
    """One layer's agreement with autograd.

    Attributes:
        layer: Name of the captured layer.
        error: Largest difference over examples, relative to the gradient's largest entry.
        norm: Largest norm of an example's gradient.
        tolerance: Largest error that passes.
    """

    layer: str
    error: float
    norm: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance (NaN is not)."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class CheckReport:
    """Agreement of every captured layer with autograd; prints as a table.

    Attributes:
        layers: One entry a captured layer.
        num_examples: How many examples were compared.
    """

    layers: tuple[LayerCheck, ...]
    num_examples: int

    @property
    def ok(self) -> bool:
        """Whether every layer agrees."""
        return all(layer.ok for layer in self.layers)

    @property
    def worst(self) -> LayerCheck:
        """The layer with the largest error."""
        return max(self.layers, key=lambda layer: (math.isnan(layer.error), layer.error))

    def __str__(self) -> str:
        """A table of layers, then the verdict."""
        width = max(len(layer.layer) for layer in self.layers)
        lines = [f"{'layer':<{width}}  relative error  largest norm"]
        lines += [
            f"{layer.layer:<{width}}  {layer.error:14.2e}  {layer.norm:12.4g}"
            f"{'' if layer.ok else '  <- differs'}"
            for layer in self.layers
        ]
        verdict = "agree with" if self.ok else "DIFFER from"
        return "\n".join(
            [*lines, f"captured gradients {verdict} autograd on {self.num_examples} examples"]
        )


def check(  # noqa: PLR0913  # the one-call entry point
    model: nn.Module,
    batch: Any,  # noqa: ANN401  # any batch a model takes
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    loss_reduction: LossReduction | None = None,
    layers: LayerChoice = None,
    exclude: LayerChoice = None,
) -> CheckReport:
    """Compare captured per-example gradients with autograd, layer by layer.

    The first 4 examples of the batch are captured together, then each runs alone through plain
    autograd in the model's own dtype.

    Args:
        model: The model.
        batch: One batch as the loss takes it.
        loss: ``(model, batch) -> [b]``; None infers it.
        loss_reduction: How a scalar loss was reduced.
        layers: Which layers to capture, as in ``attribute``.
        exclude: Which to leave out.

    Returns:
        The report; ``.ok`` says whether all layers agree, ``.worst`` names the least exact.

    Raises:
        ValueError: If the batch holds no example.
    """
    selection = select_layers(model, layers=layers, exclude=exclude)
    session = make_session(model, selection, None, None, 0, progress=False)
    values = move_batch(batch, session.device)
    resolved = resolve_loss(loss, loss_reduction)
    count = min(_EXAMPLES, batch_length(values) or 0)
    if not count:
        raise ValueError(
            "batch must hold at least one example, rows of a tensor on their first axis, got "
            f"{type(batch).__name__} without any."
        )
    rows = Rows(range(count), lambda numbers: take_rows(values, numbers))
    captured: dict[str, Tensor] = {}

    def keep(place: Batch, name: str, gradient: LayerGradient) -> None:
        del place
        captured[name] = to_dense(gradient)

    with session.opened(rows, resolved):
        session.capture(rows, resolved, batch_size=count, phase="check", sink=keep)
        singles = [rows.batch([number]) for number in range(count)]
        expected = per_example_gradients(model, singles, resolved)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [
        _compare(unit, captured.get(unit.name), expected, names) for unit in session.selection.units
    ]
    return CheckReport(tuple(found), count)


def _compare(
    unit: Unit,
    captured: DenseGradient | None,
    expected: dict[str, Tensor],
    names: dict[int, str],
) -> LayerCheck:
    """Compare one layer's parameters with autograd's gradients."""
    owner = unit.owners[0]
    own = {
        role: expected[names[id(owner.module._parameters[role])]]  # noqa: SLF001
        for role, wanted in (("weight", owner.roles.weight), ("bias", owner.roles.bias))
        if wanted
    }
    mine = {} if captured is None else owner.rule.to_parameters(owner.module, captured)
    gaps, tops, norms = [], [], []
    for role, value in own.items():
        got = mine[role].to(value.dtype) if role in mine else torch.zeros_like(value)
        gaps.append((got - value).abs().max())
        tops.append(value.abs().max())
        norms.append(value.flatten(1).norm(dim=1).max())
    # torch's maximum, unlike Python's, is NaN where an entry is
    error, scale, norm = (float(torch.stack(values).max()) for values in (gaps, tops, norms))
    dtype = next(iter(own.values())).dtype
    relative = error / scale if scale else error
    return LayerCheck(unit.name, relative, norm, _TOLERANCE.get(dtype, _LOW_PRECISION))
