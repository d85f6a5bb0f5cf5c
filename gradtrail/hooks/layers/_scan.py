"""Imports every rule file of this folder, so that adding a layer is adding a file."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

__all__ = ["imported"]

_PACKAGE = "gradtrail.hooks.layers"

imported = [
    importlib.import_module(f"{_PACKAGE}.{found.name}")
    for found in pkgutil.iter_modules([str(Path(__file__).parent)])
    if not found.name.startswith("_")
]
