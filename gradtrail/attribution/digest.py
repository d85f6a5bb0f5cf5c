"""Short digests of weights and data, to tell later what a result was computed from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from gradtrail.distributed import gather_rows
from gradtrail.hooks import batch_ids, call_fields
from gradtrail.hooks.sharded import Shards
from gradtrail.hooks.wrapped import communicates, named_modules

__all__ = ["DataDigest", "code_digest", "content_ids", "model_digest"]

_SAMPLE = 1024


def model_digest(model: nn.Module) -> str:
    """Digest a model's weights: names, shapes, dtypes, some entries of each and all its bits' sum.

    Of a model that processes hold in parts every one must ask; one parameter at a time is put
    together.

    Args:
        model: The model.

    Returns:
        32 hexadecimal digits. Any one entry that changes changes them.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, value in _state(model):
        if not isinstance(value, Tensor):
            continue
        digest.update(f"{name}\x1f{value.dtype}\x1f{tuple(value.shape)}\x1e".encode())
        flat = value.detach().reshape(-1)
        stride = max(1, flat.numel() // _SAMPLE)
        sample = flat[::stride].cpu().contiguous()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
        digest.update(str(_bit_sum(flat)).encode())
    return digest.hexdigest()


def _state(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """A model's state by the names of the plain model, whole parameter by whole parameter."""
    if not communicates(model):
        yield from model.state_dict().items()
        return
    shards = Shards(model)
    for name, module in named_modules(model, remove_duplicate=False):
        own = [
            *module._parameters.items(),  # noqa: SLF001  # as state_dict does
            *(
                pair
                for pair in module._buffers.items()  # noqa: SLF001
                if pair[0] not in module._non_persistent_buffers_set  # noqa: SLF001
            ),
        ]
        for role, value in own:
            if value is not None:
                (whole,) = shards.wholes([(value, value.detach())])
                yield ".".join(filter(None, (name, role))), whole


def _bit_sum(flat: Tensor) -> int:
    """Add up a tensor's bits, read as integers of its entries' size, modulo 2^64."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(
        flat.element_size()
    )
    if width is None:
        flat, width = torch.view_as_real(flat).reshape(-1), torch.int64
    return int(flat.contiguous().view(width).sum(dtype=torch.int64))


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

    def __init__(self, *, of_share: bool = False) -> None:
        """Start without rows.

        Args:
            of_share: Whether the rows are one rank's share of the data.
        """
        self._digest = hashlib.blake2b(digest_size=16)
        self._share = bytearray() if of_share else None

    def add(self, ids: tuple[str, ...]) -> None:
        """Take the content ids of the next rows."""
        for name in ids:
            if self._share is None:
                self._digest.update(name.encode())
            else:
                self._share += name.encode()

    def hexdigest(self) -> str:
        """32 hexadecimal digits; of shares, the digest of all rows, and every rank must ask."""
        if self._share is None:
            return self._digest.hexdigest()
        own = torch.empty(0, dtype=torch.uint8)
        if self._share:
            own = torch.frombuffer(self._share, dtype=torch.uint8)
        joined = gather_rows(own, what="content ids")
        return hashlib.blake2b(joined.numpy().tobytes(), digest_size=16).hexdigest()


def code_digest(function: Callable[..., Any]) -> str:
    """Digest what a function does: its code, its constants and plain values it closes over.

    Args:
        function: A function, a ``partial``, or an object that can be called.

    Returns:
        16 hexadecimal digits. Functions that differ only in objects they refer to (a tensor, a
        module) have the same.
    """
    digest = hashlib.blake2b(digest_size=8)
    _add_callable(digest, function)
    return digest.hexdigest()


def _add_callable(digest: Any, function: Any) -> None:  # noqa: ANN401
    """Add a callable's parts to a digest."""
    if isinstance(function, partial):
        _add_callable(digest, function.func)
        for value in (*function.args, *sorted(function.keywords.items())):
            _add_value(digest, value)
        return
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        digest.update(f"{type(function).__module__}.{type(function).__qualname__}".encode())
        own = getattr(type(function).__call__, "__code__", None)
        if own is not None:
            _add_value(digest, own)
        return
    _add_value(digest, code)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    for value in (*(function.__defaults__ or ()), *cells):
        _add_value(digest, value)


def _add_value(digest: Any, value: Any) -> None:  # noqa: ANN401
    """Add a constant, a piece of code or, of anything else, its type."""
    if isinstance(value, CodeType):
        digest.update(value.co_code)
        digest.update(repr(value.co_names).encode())
        for constant in value.co_consts:
            _add_value(digest, constant)
    elif isinstance(value, (int, float, complex, str, bytes, bool, type(None))):
        digest.update(repr(value).encode())
    elif isinstance(value, (tuple, list, frozenset)):
        for entry in value:
            _add_value(digest, entry)
    elif callable(value) and not isinstance(value, (type, nn.Module)):
        _add_callable(digest, value)
    else:
        digest.update(type(value).__qualname__.encode())
    digest.update(b"\x1f")
