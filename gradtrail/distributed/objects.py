"""Small values between ranks, as JSON text: nothing that could run code is unpacked."""

from __future__ import annotations

import json
from typing import Any

from gradtrail.distributed.exchange import exchange, send_all
from gradtrail.distributed.ranks import rank, world_size

__all__ = ["broadcast_json", "gather_json"]


def gather_json(value: Any) -> list[Any]:  # noqa: ANN401
    """Give every rank's value to every rank.

    Args:
        value: This rank's, of what JSON can hold: tuples come back as lists.

    Returns:
        The values, by rank.
    """
    text = json.dumps(value).encode()
    if world_size() == 1:
        return [json.loads(text)]
    exchange("gathered values")
    return [json.loads(found) for _, found in send_all(text)]


def broadcast_json(value: Any, source: int = 0) -> Any:  # noqa: ANN401
    """Give one rank's value to every rank.

    Args:
        value: The value, of what JSON can hold; what other ranks pass is ignored.
        source: The rank whose value counts.

    Returns:
        That rank's value.
    """
    return gather_json(value if rank() == source else None)[source]
