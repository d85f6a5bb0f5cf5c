"""What acts on captured gradients while a model trains, and the way into training loops."""

from gradtrail.callbacks.base import AbstractStepCallback
from gradtrail.callbacks.merge import MergedSteps
from gradtrail.callbacks.selection import DataSelectionCallback
from gradtrail.callbacks.selection_two_pass import TwoPassSelection
from gradtrail.callbacks.trainer import GradTrailCallback

__all__ = [
    "AbstractStepCallback",
    "DataSelectionCallback",
    "GradTrailCallback",
    "MergedSteps",
    "TwoPassSelection",
]
