"""Making a mean loss that of the kept examples alone.

A loss ``(1 / D) sum_b L_b`` that loses examples with weight ``R`` of ``D`` becomes the kept ones'
mean through the factor ``D / (D - R)``. Where ``D`` counts a single backward's examples or labels,
so does ``R``; where it counts those of a whole optimizer step, as in a ``Trainer``, rejections add
up over its backwards and what lies in ``.grad`` already is rescaled. In several processes ``D`` and
``R`` are those of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gradtrail.callbacks.selection_ranks import Ranks
from gradtrail.errors import CaptureError
from gradtrail.hooks import HookManager

__all__ = ["Renormalization"]


class Renormalization:
    """Weights rejected since the last optimizer step, layer by layer.

    Versions of ``transformers`` count a step's labels in two ways. Which one is known, at the
    latest, with the last backward of a step, when one of the counts comes to ``D``; since factors
    are applied relative to those before, the gradients are right by then.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._way = 0
        self._divisor = 0.0
        self._weights = torch.zeros(1, 0)
        self._spans = False
        self._seen: Tensor | float = 0.0
        self._rejected: dict[str, Tensor] = {}
        self._applied: dict[str, float] = {}

    def restart(self) -> None:
        """Forget: a new optimizer step begins.

        Raises:
            CaptureError: If the labels of the last one did not come to the divisor.
        """
        seen, self._seen = self._seen, 0.0
        self._rejected.clear()
        self._applied.clear()
        spans, self._spans = self._spans, False
        if spans and not any(math.isclose(float(count), self._divisor) for count in seen):
            counted = " or ".join(f"{float(count):g}" for count in seen)
            raise CaptureError(
                "renormalize must see all labels that the loss of an optimizer step is divided by, "
                f"{self._divisor:g}, got {counted} in its backwards. Leave it out."
            )

    def forget(self) -> None:
        """Let go of a step that was not completed."""
        self._spans = False
        self._seen = 0.0
        self._rejected.clear()
        self._applied.clear()

    def begin(self, manager: HookManager, ranks: Ranks | None = None) -> None:
        """Take note of the weights of a backward's examples.

        Args:
            manager: Its manager.
            ranks: The processes whose examples are taken together, or None for this one alone.

        Raises:
            CaptureError: If they are not known, or where an optimizer step ends is not; if ranks
                divide by different numbers of labels of a step.
        """
        if manager.weights is None:
            raise CaptureError(
                "renormalize must know what the loss is divided by, got one reduced outside the "
                "model. Say with loss_reduction how, or leave it out."
            )
        self._divisor = float(manager.divisor)
        self._weights = manager.weights.double().cpu()
        self._spans = manager.divisor_spans_step
        seen = self._weights.sum(1)
        if ranks is not None:
            every = ranks.every(self._divisor)
            if self._spans and not all(math.isclose(one, every[0]) for one in every):
                raise CaptureError(
                    "renormalize must meet a loss that every rank divides by the labels of all, "
                    f"got {', '.join(f'{one:g}' for one in every)}. Set "
                    "average_tokens_across_devices=True, or leave it out."
                )
            self._divisor = self._divisor if self._spans else sum(every)
            seen = ranks.summed(seen, "labels") if self._spans else seen
        if not self._spans:
            return
        if manager.optimizer is None:
            raise CaptureError(
                "renormalize must know where an optimizer step ends when the loss is divided by "
                f"its {self._divisor:g} labels, got no optimizer. Pass it to collect(optimizer)."
            )
        self._seen = self._seen + seen
        complete = [
            way for way, count in enumerate(self._seen) if math.isclose(count, self._divisor)
        ]
        if complete and self._way not in complete:
            self._way = complete[0]

    def factors(
        self, masks: Mapping[str, Tensor], ranks: Ranks | None = None
    ) -> dict[str, tuple[float, float]]:
        """Give the factors of a backward's own part of a layer's gradient, and of earlier ones'.

        Args:
            masks: By layer, True where an example is rejected. Shapes ``[b]``.
            ranks: The processes whose examples are taken together, or None for this one alone.

        Returns:
            By layer the two factors, for gradients as the loop divides them and as they are by now.
        """
        rejected = torch.stack([self._weights[:, mask_b].sum(1) for mask_b in masks.values()])
        if ranks is not None:
            rejected = ranks.summed(rejected, "rejected weights")
        return {name: self._factors(name, row) for name, row in zip(masks, rejected, strict=True)}

    def _factors(self, layer: str, rejected: Tensor) -> tuple[float, float]:
        """The same for one layer, given the weights that this backward's rejected examples have."""
        if not self._spans:
            return _mean(self._divisor, float(rejected[0])), 1.0
        total = self._rejected.get(layer, 0.0) + rejected
        self._rejected[layer] = total
        factor = _mean(self._divisor, float(total[self._way]))
        before = self._applied.get(layer, 1.0)
        self._applied[layer] = factor
        return factor, factor / before


def _mean(divisor: float, rejected: float) -> float:
    """``D / (D - R)``; 1 where nothing is left to divide."""
    return divisor / (divisor - rejected) if divisor - rejected > 0.5 else 1.0
