"""What a capture of training says about layers that no gradient reaches."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from gradtrail.errors import GradTrailWarning
from gradtrail.hooks.capture import Capture
from gradtrail.hooks.selection import Selection

__all__ = ["reasons_of", "warn_frozen", "warn_mixing"]


def reasons_of(capture: Capture, names: Sequence[str]) -> str:
    """List layers with why no gradient came.

    Args:
        capture: The capture of the step.
        names: The layers.

    Returns:
        The first five with their reason, and the number of the others.
    """
    shown = [
        f"{name} ({'no gradient flows to it' if name in capture.called else 'never called'})"
        for name in names[:5]
    ]
    return ", ".join(shown) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def warn_frozen(model: nn.Module, selection: Selection) -> None:
    """Say at registration that no gradient can come, or may not.

    Args:
        model: The model.
        selection: The layers that will be captured.
    """
    if not selection.units:
        frozen = any(entry.reason == "frozen" for entry in selection.coverage.entries)
        what = "is frozen" if frozen else "is unsupported or left out (see coverage)"
        warnings.warn(
            f"Every layer that could be captured {what}, so nothing will be. "
            + ("Pass include_frozen=True or train some layer." if frozen else "Choose others."),
            GradTrailWarning,
            stacklevel=3,
        )
        return
    order = {id(module): place for place, module in enumerate(model.modules())}
    trained = [
        order[id(module)]
        for module in model.modules()
        if any(p is not None and p.requires_grad for p in module._parameters.values())  # noqa: SLF001
    ]
    first = min(trained, default=len(order))
    early = [
        unit.name
        for unit in selection.units
        if all(order[id(own.module)] < first for own in unit.owners)
    ]
    if early:
        shown = ", ".join(early[:5]) + (", ..." if len(early) > 5 else "")
        warnings.warn(
            f"No trained parameter comes before {len(early)} frozen layers ({shown}): no gradient "
            "may reach them.",
            GradTrailWarning,
            stacklevel=3,
        )


def warn_mixing(model: nn.Module) -> None:
    """Say that the examples of a batch are not independent of each other.

    Args:
        model: The model.
    """
    mixing = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)  # noqa: SLF001  # has no public name
        and module.training
    ]
    if mixing:
        warnings.warn(
            f"BatchNorm in training mode ({', '.join(mixing[:5])}{', ...' if mixing[5:] else ''}) "
            "makes an example's gradient depend on the rest of its batch.",
            GradTrailWarning,
            stacklevel=2,
        )
