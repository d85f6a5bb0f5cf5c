"""Telling whether a module reads a parameter it holds, or only names it.

Heads of masked language models keep a second name for the bias of a child
(``self.decoder.bias = self.bias``) that their own ``forward`` never mentions: that is no use of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType

from torch import nn

__all__ = ["mentions"]


def mentions(module: nn.Module, name: str) -> bool:
    """Tell whether a module's ``forward``, or a method it calls, mentions an attribute.

    Args:
        module: The module.
        name: Name of the attribute.

    Returns:
        True also where the code cannot be looked at.
    """
    if "forward" in vars(module):
        return True
    seen: set[str] = set()
    waiting = ["forward"]
    while waiting:
        method = waiting.pop()
        seen.add(method)
        found = inspect.getattr_static(type(module), method)
        found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        code = getattr(inspect.unwrap(found), "__code__", None) if callable(found) else None
        if code is None:
            return True
        words = set(_words(code))
        if name in words:
            return True
        waiting += [word for word in words - seen if _is_own_method(type(module), word)]
    return False


def _words(code: CodeType) -> Iterator[str]:
    """Every attribute name and string in a function, inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _words(constant)


def _is_own_method(cls: type[nn.Module], name: str) -> bool:
    """Whether a name is a method or property that the class adds to ``nn.Module``."""
    found = inspect.getattr_static(cls, name, None)
    ours = found is not None and found is not inspect.getattr_static(nn.Module, name, None)
    return ours and (callable(found) or isinstance(found, (property, classmethod, staticmethod)))
