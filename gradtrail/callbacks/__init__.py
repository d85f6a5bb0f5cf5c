"""What acts on captured gradients while a model trains, and the way into training loops."""

from gradtrail.callbacks.base import AbstractRecordingCallback, AbstractStepCallback
from gradtrail.callbacks.covariance import KroneckerCovarianceCallback
from gradtrail.callbacks.merge import MergedSteps
from gradtrail.callbacks.offload import OffloadCallback
from gradtrail.callbacks.optimizer_state import OptimizerStateCallback, read_states
from gradtrail.callbacks.replay import replay
from gradtrail.callbacks.selection import DataSelectionCallback
from gradtrail.callbacks.selection_two_pass import TwoPassSelection
from gradtrail.callbacks.snapshot import ParameterSnapshotCallback
from gradtrail.callbacks.trainer import GradTrailCallback

__all__ = [
    "AbstractRecordingCallback",
    "AbstractStepCallback",
    "DataSelectionCallback",
    "GradTrailCallback",
    "KroneckerCovarianceCallback",
    "MergedSteps",
    "OffloadCallback",
    "OptimizerStateCallback",
    "ParameterSnapshotCallback",
    "TwoPassSelection",
    "read_states",
    "replay",
]
