"""The layers that a training capture cannot tell apart by example, and what is said of them."""

from __future__ import annotations

import warnings

from torch import nn

from gradtrail.errors import CaptureError, GradTrailWarning
from gradtrail.hooks.capture import HookedModule
from gradtrail.hooks.fixed import is_fixed
from gradtrail.hooks.notices import reasons_of, warn_mixing
from gradtrail.hooks.outside import OutsideReads
from gradtrail.hooks.selection import Selection
from gradtrail.hooks.step import Step

__all__ = ["Refusals"]


class Refusals:
    """What one capture had to leave out or miss; each is said once.

    Attributes:
        reasons: By layer name, why its examples cannot be told apart.
    """

    reasons: dict[str, str]

    def __init__(
        self, model: nn.Module, selection: Selection, modules: tuple[HookedModule, ...]
    ) -> None:
        """Start with nothing refused.

        Args:
            model: The model that is captured.
            selection: The captured layers.
            modules: Their modules.
        """
        self.reasons = {}
        self._model = model
        self._selection = selection
        self._modules = modules
        self._outside: dict[str, str] = {}
        self._reads: OutsideReads | None = None
        self._has_looked = False
        self._reported: set[frozenset[str]] = set()
        self._strayed = False

    def look(self) -> None:
        """Watch the first forward, which is as good as any, for parameters read outside."""
        if not self._has_looked:
            self._has_looked = True
            warn_mixing(self._model)
            self._reads = OutsideReads(self._modules)
            self._reads.__enter__()

    def stop_looking(self) -> None:
        """End that."""
        reads, self._reads = self._reads, None
        if reads is not None:
            reads.__exit__(None, None, None)
            self._outside |= reads.reasons()

    def settle(self, step: Step) -> None:
        """Leave refused layers out of a completed step, and name the layers it did not reach.

        Args:
            step: The step, its capture finished.

        Raises:
            CaptureError: If nothing is left.
        """
        self._drop(step)
        missing = frozenset(step.capture.missing(self._selection.units)) - set(self.reasons)
        if not step.layers and self._selection.units:
            why = reasons_of(step.capture, sorted(missing)) or _listed(self.reasons)
            raise CaptureError(
                f"A step must bring a gradient to a captured layer, got none at {why}."
            )
        if missing and missing not in self._reported:
            self._reported.add(missing)
            warnings.warn(
                f"No gradient reached {reasons_of(step.capture, sorted(missing))}; the step has "
                "the others.",
                GradTrailWarning,
                stacklevel=3,
            )

    def warn_stray(self, hooked: HookedModule) -> None:
        """Say once that a layer ran outside the model's own call."""
        if not self._strayed and not is_fixed(hooked.module):
            self._strayed = True
            warnings.warn(
                f"{hooked.name} was called outside the model's own forward, which is not captured: "
                f"a step starts where {type(self._model).__name__} itself is called.",
                GradTrailWarning,
                stacklevel=2,
            )

    def _drop(self, step: Step) -> None:
        """Leave out layers whose examples cannot be told apart; an error where they were named."""
        reasons = self._outside | {
            unit.name: step.capture.refused[hooked.name]
            for hooked in self._modules
            if hooked.name in step.capture.refused
            for unit, _ in hooked.memberships
        }
        fresh = {name: why for name, why in reasons.items() if name not in self.reasons}
        self.reasons |= fresh
        for name in self.reasons:  # also where this step's shapes happen to fit
            step.layers.pop(name, None)
        if not fresh:
            return
        listed = _listed(fresh)
        if self._selection.explicit:
            raise CaptureError(f"layers must name layers that see one row an example: {listed}.")
        warnings.warn(
            f"Layers are left out ({listed}); coverage lists them.", GradTrailWarning, stacklevel=4
        )


def _listed(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in reasons.items())
