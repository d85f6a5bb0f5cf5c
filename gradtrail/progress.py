"""Progress bars: one line a phase, with examples per second and the time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(phase: str, total: int, *, enabled: bool) -> Iterator[tqdm]:
    """Show one phase of work as a bar that counts examples.

    Args:
        phase: What is being done, shown in front of the bar.
        total: Number of examples in the phase.
        enabled: Whether anything is shown at all.

    Yields:
        The bar; call ``update(n)`` after ``n`` examples.
    """
    with tqdm(total=total, desc=phase, unit="ex", disable=not enabled, leave=False) as bar:
        yield bar
