"""Checks of options that several rooms share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["check_choice", "check_positive", "near_names", "near_numbers"]

_CLOSE = 0.6  # share of letters that a name must have in common with a mistyped one


def near_names(name: str, names: Iterable[str], *, count: int = 3) -> str:
    """List the names closest to a mistyped one; far ones would lead astray.

    Args:
        name: What was written.
        names: What there is.
        count: How many names are listed at most.

    Returns:
        The names, or ``"none"``.
    """
    close = difflib.get_close_matches(name, list(names), n=count, cutoff=_CLOSE)
    return ", ".join(repr(entry) for entry in close) or "none"


def near_numbers(number: int, numbers: Iterable[int], *, count: int = 3) -> str:
    """List the numbers closest to one that there is not.

    Args:
        number: What was written.
        numbers: What there is.
        count: How many are listed at most.

    Returns:
        The numbers, ascending, or ``"none"``.
    """
    close = sorted(set(numbers), key=lambda one: (abs(one - number), one))[:count]
    return ", ".join(map(str, sorted(close))) or "none"


def check_choice(option: str, value: object, allowed: Iterable[object]) -> None:
    """Refuse a value that is not among the allowed ones.

    Args:
        option: Name of the option as the user wrote it.
        value: What was passed.
        allowed: Every value the option takes.

    Raises:
        ValueError: If ``value`` is not allowed.
    """
    choices = list(allowed)
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{option} must be one of {listed}, got {value!r}.")


def check_positive(option: str, value: int) -> None:
    """Refuse a count that is not a whole number of at least one.

    Args:
        option: Name of the option as the user wrote it.
        value: What was passed.

    Raises:
        ValueError: If ``value`` is not an ``int`` of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{option} must be an integer of at least 1, got {value!r}.")
