"""Covariances of many processes, added up before they are divided by anything."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gradtrail.distributed import gather_json, reduce_named
from gradtrail.kronecker.covariance_sums import KroneckerFactors, LayerSums, joint_owners
from gradtrail.kronecker.symmetric import mirror

__all__ = ["joined_covariances", "joined_sums"]


def joined_sums(sums: Mapping[str, LayerSums], device: torch.device) -> dict[str, LayerSums]:
    """Add up what every rank has accumulated.

    Layers share an input where they do on every rank that saw them.

    Args:
        sums: This rank's sums by layer, in float32 or wider; changed in place.
        device: Where sums are made of layers that this rank did not see.

    Returns:
        By layer, in an order that is the same on every rank.
    """
    seen = gather_json({name: one.input_of for name, one in sums.items()})
    owners = joint_owners(seen)
    total = reduce_named(_named(sums, owners), device, "covariances")
    return {
        name: LayerSums(
            total[f"{owner}:activation"],
            mirror(total[f"{name}:gradient"]),
            total[f"{owner}:count"],
            owner,
        )
        for name, owner in owners.items()
    }


def joined_covariances(
    sums: Mapping[str, LayerSums], num_examples: int, device: torch.device
) -> dict[str, KroneckerFactors]:
    """Add up what every rank has accumulated and divide it.

    Args:
        sums: This rank's sums by layer; changed in place.
        num_examples: Number of examples of all ranks.
        device: Where sums are made of layers that this rank did not see.

    Returns:
        By layer, in an order that is the same on every rank.
    """
    done: dict[str, tuple[Tensor, int]] = {}
    found: dict[str, KroneckerFactors] = {}
    for name, one in joined_sums(sums, device).items():
        if one.input_of not in done:
            count = int(one.count)
            done[one.input_of] = mirror(one.activation_gii).div_(max(1, count)), count
        cov_gii, count = done[one.input_of]
        cov_goo = one.gradient_goo.div_(max(1, num_examples))
        found[name] = KroneckerFactors(cov_gii, cov_goo, num_examples, count, one.input_of)
    return found


def _named(sums: Mapping[str, LayerSums], owners: Mapping[str, str]) -> dict[str, Tensor]:
    """Give each sum a name; one that layers of two owners hold is copied for the second."""
    tensors: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, one in sums.items():
        tensors[f"{name}:gradient"] = one.gradient_goo
        key = f"{owners[name]}:activation"
        if key in tensors:
            continue
        again = id(one.activation_gii) in taken
        taken.add(id(one.activation_gii))
        tensors[key] = one.activation_gii.clone() if again else one.activation_gii
        tensors[f"{owners[name]}:count"] = one.count.clone() if again else one.count
    return tensors
