"""The exceptions gradtrail raises on top of Python's own."""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "CurvatureError",
    "GradTrailWarning",
    "StoreError",
    "UnsupportedLayerError",
]


class CaptureError(RuntimeError):
    """A forward and backward pass from which per-example gradients cannot be told exactly."""


class CurvatureError(RuntimeError):
    """A curvature that cannot be accumulated, decomposed, inverted or read back."""


class StoreError(RuntimeError):
    """A store on disk that is damaged, of another kind, or of another capture than asked for."""


class UnsupportedLayerError(NotImplementedError):
    """A layer, or one configuration of it, whose per-example gradient has no rule."""


class GradTrailWarning(UserWarning):
    """Something the user should know that does not make a number wrong."""
