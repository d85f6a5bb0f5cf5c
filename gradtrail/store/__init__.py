"""Tensors and gradients in memory and on disk."""

from gradtrail.store.cache import TensorCache

__all__ = ["TensorCache"]
