"""What each optimizer would do with one example's gradient alone: one file a family."""

from gradtrail.hooks.directions import adadelta, adagrad, adam, lion, nadam, radam, rmsprop, sgd
from gradtrail.hooks.directions._base import DIRECTIONS, Direction, ParameterState
from gradtrail.hooks.directions.api import update_direction

__all__ = [
    "DIRECTIONS",
    "Direction",
    "ParameterState",
    "adadelta",
    "adagrad",
    "adam",
    "lion",
    "nadam",
    "radam",
    "rmsprop",
    "sgd",
    "update_direction",
]
