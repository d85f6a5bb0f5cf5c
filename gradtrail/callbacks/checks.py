"""What every callback that records refuses or warns of: a wrong store, a gap before the start."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from gradtrail.errors import GradTrailWarning
from gradtrail.store import GradientStore, StepStore

__all__ = ["check_store", "warn_gap"]


def check_store(
    recorder: str, store: object, kind: type[GradientStore] | type[StepStore], *, or_none: bool
) -> None:
    """Refuse what is no store of the kind that a callback writes into.

    Args:
        recorder: Name of the callback.
        store: What was passed.
        kind: The kind.
        or_none: Whether None will do.

    Raises:
        TypeError: If it is anything else.
    """
    if isinstance(store, kind) or (or_none and store is None):
        return
    inside = f"{kind.__name__}({store!r})" if isinstance(store, str) else f"{kind.__name__}(...)"
    got = repr(store) if isinstance(store, (str, type(None))) else f"a {type(store).__name__}"
    if isinstance(store, type):
        got = f"the class {store.__name__}"
    raise TypeError(
        f"store must be a {kind.__name__}{' or None' if or_none else ''}, got {got}. Write "
        f"{recorder}({inside})."
    )


def warn_gap(
    recorder: str,
    store: GradientStore | StepStore,
    steps: Iterable[int],
    start: int,
    every: int,
) -> None:
    """Warn of steps that were made and are not stored, where a capture goes on with a store.

    Nothing is said of a new store: a capture may begin in the middle of a training.

    Args:
        recorder: Name of the callback.
        store: Where to it writes.
        steps: Numbers of the steps that are stored.
        start: Number of the step that comes next.
        every: The steps that are wanted are its multiples.
    """
    last = max((step for step in steps if step < start), default=None)
    if last is None and store.mode != "resume":
        return
    first = 0 if last is None else last + 1
    missing = range(-(-first // every) * every, start, every)
    if not missing:
        return
    shown = f"step {missing[0]} is"
    if len(missing) > 1:
        shown = f"steps {missing[0]} to {missing[-1]} ({len(missing)}) are"
    where = "memory" if store.path is None else repr(str(store.path))
    warnings.warn(
        f"{recorder} must go on where its store ends, got a training that starts at step {start} "
        f"and a store in {where} that {'is empty' if last is None else f'ends at step {last}'}: "
        f"{shown} missing, unless a loss scaler skipped them. Resume from a checkpoint of step "
        f"{missing[0]} or before, and call {recorder}.flush() wherever a run saves one "
        "(GradTrailCallback does so).",
        GradTrailWarning,
        stacklevel=3,
    )
