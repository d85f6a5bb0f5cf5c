"""Covariances as they are kept beside the gradients they are of: sums, and what they cover.

Tensors: ``"<layer>:activation_cov"`` and ``"<layer>:count"`` under the name of the first layer
that reads an input, ``"<layer>:gradient_cov"`` for every layer; all of them sums, so that more
examples can be added and any number of them divided by. The metadata says which layers read which
input, over how many examples was summed and, with ``covers``, which records of a store those were.
Where several processes train, each keeps sums of its own records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from gradtrail.errors import CurvatureError
from gradtrail.kronecker.covariance import CovarianceAccumulator
from gradtrail.kronecker.covariance_sums import KroneckerFactors, LayerSums, joint_owners

__all__ = [
    "COVARIANCES",
    "added_covariances",
    "covariance_state",
    "covariances_from",
    "covariances_name",
    "restored_accumulator",
]

COVARIANCES = "covariances"  # the name they have in a store
_FORMAT = "gradtrail-covariances-1"

Written: TypeAlias = tuple[Mapping[str, Tensor], Mapping[str, str]]


def covariances_name(rank: int) -> str:
    """Name in a store of the covariances of what one process stored there."""
    return f"{COVARIANCES}_{rank:04d}" if rank else COVARIANCES


def covariance_state(
    accumulator: CovarianceAccumulator, num_examples: int, covers: str | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Give what is written of an accumulator.

    Args:
        accumulator: The sums, after the end of a backward.
        num_examples: Number of examples they are over, those with a gradient of zero too.
        covers: Digest of the records that these are, or None where the caller adds it.

    Returns:
        Tensors by name, which are the accumulator's own and change with it, and metadata.
    """
    tensors: dict[str, Tensor] = {}
    layers: dict[str, str] = {}
    for name, sums in accumulator.sums().items():
        layers[name] = sums.input_of
        tensors[f"{sums.input_of}:activation_cov"] = sums.activation_gii
        tensors[f"{sums.input_of}:count"] = sums.count
        tensors[f"{name}:gradient_cov"] = sums.gradient_goo
    return tensors, _described(layers, num_examples, covers)


def covariances_from(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> dict[str, KroneckerFactors]:
    """Make the mean covariances of what was written.

    Args:
        tensors: Tensors by name; they are not changed.
        metadata: What lies beside them.

    Returns:
        By layer, in the order of the capture; layers that read one input share its covariance.
    """
    sums, num_examples = _sums_from(tensors, metadata)
    means: dict[str, Tensor] = {}
    found: dict[str, KroneckerFactors] = {}
    for name, one in sums.items():
        count = int(one.count)
        if one.input_of not in means:
            means[one.input_of] = one.activation_gii / max(1, count)
        found[name] = KroneckerFactors(
            means[one.input_of],
            one.gradient_goo / max(1, num_examples),
            num_examples,
            count,
            one.input_of,
        )
    return found


def restored_accumulator(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, max_side: int
) -> tuple[CovarianceAccumulator, int]:
    """Make an accumulator that goes on from what was written.

    Args:
        tensors: Tensors by name; they are copied.
        metadata: What lies beside them.
        max_side: Longest side of a covariance that may be allocated.

    Returns:
        The accumulator, and the number of examples it is over.
    """
    sums, num_examples = _sums_from(tensors, metadata)
    accumulator = CovarianceAccumulator(max_side=max_side)
    accumulator.restore(sums)
    return accumulator, num_examples


def added_covariances(parts: Sequence[Written], covers: str) -> Written:
    """Add up what several processes wrote, each over examples of its own.

    Args:
        parts: Tensors and metadata of each.
        covers: Digest of the records that they are over together.

    Returns:
        Tensors and metadata, as one process would have written them but for rounding.
    """
    read = [_sums_from(*part) for part in parts]
    owners = joint_owners([{name: one.input_of for name, one in sums.items()} for sums, _ in read])
    tensors: dict[str, Tensor] = {}
    for name, owner in owners.items():
        found = [sums[name] for sums, _ in read if name in sums]
        tensors[f"{name}:gradient_cov"] = sum(one.gradient_goo for one in found)
        if name == owner:
            tensors[f"{name}:activation_cov"] = sum(one.activation_gii for one in found)
            tensors[f"{name}:count"] = sum(one.count for one in found)
    num_examples = sum(number for _, number in read)
    return tensors, _described(owners, num_examples, covers)


def _described(layers: Mapping[str, str], num_examples: int, covers: str | None) -> dict[str, str]:
    metadata = {
        "format": _FORMAT,
        "layers": json.dumps(layers),
        "num_examples": str(num_examples),
    }
    return metadata if covers is None else {**metadata, "covers": covers}


def _sums_from(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[dict[str, LayerSums], int]:
    """Read sums after a check that they are whole and fit each other.

    Args:
        tensors: Tensors by name.
        metadata: What lies beside them.

    Returns:
        By layer, and the number of examples.

    Raises:
        CurvatureError: If something is missing or does not fit.
    """
    if metadata.get("format") != _FORMAT:
        raise CurvatureError(
            f"Stored covariances must be of format {_FORMAT}, got {metadata.get('format')!r}. "
            "Read them with the version of the library that wrote them."
        )
    try:
        return _read(tensors, metadata)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CurvatureError(
            f"Stored covariances must be whole, got damaged ones ({error}). Fit from the stored "
            "gradients instead, or capture again."
        ) from error


def _read(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> tuple[dict[str, LayerSums], int]:
    """Read sums.

    Args:
        tensors: Tensors by name.
        metadata: What lies beside them.

    Returns:
        By layer, and the number of examples.

    Raises:
        ValueError: If they do not fit each other; other errors where an entry is missing.
    """
    layers = json.loads(metadata["layers"])
    num_examples = int(metadata["num_examples"])
    if num_examples < 0:
        raise ValueError(f"num_examples is {num_examples}")
    found: dict[str, LayerSums] = {}
    for name, input_of in layers.items():
        if layers.get(input_of) != input_of:
            raise ValueError(f"{name} reads the input of {input_of!r}")
        activation_gii = _square(tensors, f"{input_of}:activation_cov")
        gradient_goo = _square(tensors, f"{name}:gradient_cov")
        if activation_gii.shape[0] != gradient_goo.shape[0]:
            raise ValueError(
                f"{name} has {activation_gii.shape[0]} groups of inputs and "
                f"{gradient_goo.shape[0]} of outputs"
            )
        count = tensors[f"{input_of}:count"]
        if count.dim() or count.dtype != torch.int64:
            raise ValueError(f"{input_of}:count is {count.dtype} {tuple(count.shape)}")
        found[name] = LayerSums(activation_gii, gradient_goo, count, input_of)
    return found, num_examples


def _square(tensors: Mapping[str, Tensor], key: str) -> Tensor:
    """A sum ``[g, k, k]`` by its name."""
    tensor = tensors[key]
    if tensor.dim() != 3 or tensor.shape[1] != tensor.shape[2] or not tensor.is_floating_point():
        raise ValueError(f"{key} is {tensor.dtype} {tuple(tensor.shape)}")
    return tensor
