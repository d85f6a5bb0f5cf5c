"""Short digests of weights and data, to tell later what a result was computed from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gradtrail.hooks import batch_ids, call_fields

__all__ = ["DataDigest", "content_ids", "model_digest"]

_SAMPLE = 1024


def model_digest(model: nn.Module) -> str:
    """Digest a model's weights: names, shapes, dtypes and up to 1,024 evenly spaced entries each.

    Args:
        model: The model.

    Returns:
        32 hexadecimal digits. Fine-tuning moves every sampled entry, so it changes them.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            continue
        digest.update(f"{name}\x1f{value.dtype}\x1f{tuple(value.shape)}\x1e".encode())
        flat = value.detach().reshape(-1)
        stride = max(1, flat.numel() // _SAMPLE)
        sample = flat[::stride].cpu().contiguous()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def content_ids(batch: object, size: int) -> tuple[str, ...]:
    """Hash a batch's rows by content, padding left out.

    Args:
        batch: Tensors in a mapping, a tuple or alone.
        size: Number of rows.

    Returns:
        One id a row.
    """
    fields = batch if isinstance(batch, Mapping) else call_fields((batch,), {})
    return batch_ids(fields, size)


class DataDigest:
    """Digest of a data set's rows in order, taken while they are read."""

    def __init__(self) -> None:
        """Start without rows."""
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, ids: tuple[str, ...]) -> None:
        """Take the content ids of the next rows."""
        for name in ids:
            self._digest.update(name.encode())

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        return self._digest.hexdigest()
