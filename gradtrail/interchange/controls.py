"""Controls: what an accuracy must be held against before a subspace explains anything."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from gradtrail.interchange.inputs import Forward, Inputs, Pairs, check_labels
from gradtrail.interchange.passes import accuracy_of, edited_logits
from gradtrail.interchange.site import Site, as_site
from gradtrail.interchange.subspace import (
    LearnedSubspace,
    as_basis,
    interchange,
    signed_basis,
)
from gradtrail.options import check_positive

__all__ = [
    "arbitrary_targets",
    "mean_difference_basis",
    "placebo_accuracy",
    "random_basis",
    "reinitialized",
]

_ALIKE = 1e-6
_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def random_basis(
    width: int,
    rank: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw a subspace that knows nothing: how much does any subspace of this rank do?

    Args:
        width: Width ``d`` of the activation.
        rank: Dimension ``k``.
        seed: Seed of a private generator.
        dtype: float32 or float64.
        device: Where to; None means torch's default.

    Returns:
        Orthonormal columns, uniform over all subspaces. Shape ``[d, k]``.
    """
    subspace = LearnedSubspace(width, rank, seed=seed, dtype=dtype, device=device)
    return subspace.basis.detach()


def mean_difference_basis(activations: Tensor, labels: Tensor) -> Tensor:
    """Span the differences of class means: does the search find more than these show?

    Args:
        activations: Shape ``[n, d]``.
        labels: Classes of the variable. Shape ``[n]``.

    Returns:
        Orthonormal columns, the first from the lowest class's mean to the next one's, in float32
        or wider. Shape ``[d, classes - 1]``.

    Raises:
        ValueError: If the shapes do not fit, there is one class, or means coincide.
    """
    if activations.dim() != 2:
        raise ValueError(f"activations must be [n, d], got {tuple(activations.shape)}.")
    classes_n = check_labels(labels, activations.shape[0], "labels")
    classes = classes_n.unique().tolist()
    if not 2 <= len(classes) <= activations.shape[1]:
        raise ValueError(
            f"labels must hold 2 to {activations.shape[1]} classes (the width), got {len(classes)}."
        )
    values = activations.detach().double().cpu()
    means = torch.stack([values[classes_n == label].mean(0) for label in classes])
    differences = (means[1:] - means[0]).mT
    singular = torch.linalg.svdvals(differences)
    if float(singular[-1]) <= _ALIKE * float(values.abs().max()):
        raise ValueError(
            "labels must have class means that differ in as many directions as there are classes "
            f"less one, got singular values {[f'{value:.2g}' for value in singular.tolist()]}."
        )
    wide = torch.float64 if activations.dtype == torch.float64 else torch.float32
    return signed_basis(differences).to(dtype=wide, device=activations.device)


def arbitrary_targets(keys: Tensor | Sequence[Hashable], num_classes: int, seed: int = 0) -> Tensor:
    """Give every key a class by lot: how much can the search make up or memorise?

    Args:
        keys: What decides the class, one a pair; equal keys (rows of a tensor) get one class.
        num_classes: Number of classes, each given to as many different keys, to within one.
        seed: Seed of a private generator.

    Returns:
        Targets on the CPU. Shape ``[n]``.

    Raises:
        ValueError: If there are no keys.
    """
    check_positive("num_classes", num_classes)
    entries = _entries(keys)
    places = {key: place for place, key in enumerate(dict.fromkeys(entries))}
    if not places:
        raise ValueError("keys must hold at least one key, got none.")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(places), generator=generator) % num_classes
    # which classes get one key more is up to the lot as well
    names = torch.randperm(num_classes, generator=generator)
    return names[order[[places[key] for key in entries]]]


def reinitialized(model: nn.Module, seed: int = 0) -> nn.Module:
    """Copy a model without what it has learned: does the architecture alone carry the variable?

    Every parameter is drawn anew from a normal distribution with the mean and the standard
    deviation of its own entries, so scales stay as they are; running statistics start over.

    Args:
        model: The model, which stays as it is.
        seed: Seed of a private generator.

    Returns:
        A copy in the same mode.
    """
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            if not parameter.is_floating_point():
                continue
            own = parameter.double().cpu()
            drawn = torch.randn(own.shape, generator=generator, dtype=torch.float64)
            spread = own.std(correction=0) if own.numel() else 0.0
            parameter.copy_(own.mean() + spread * drawn)
        for module in other.modules():
            if isinstance(module, _WITH_STATISTICS):
                module.reset_running_stats()
    return other


def placebo_accuracy(  # noqa: PLR0913  # takes what interchange_accuracy takes
    model: nn.Module,
    site: Site | str,
    basis: Tensor | LearnedSubspace,
    base_inputs: Inputs,
    source_inputs: Inputs,
    forward: Forward,
    targets: Tensor,
    *,
    base_positions: Tensor | None = None,
    source_positions: Tensor | None = None,
    batch_size: int = 256,
    seed: int = 0,
) -> float:
    """Move each activation as far as the interchange does, in a random other direction.

    An accuracy that a push of the same length reaches as well is no property of the subspace.

    Args:
        model: As in ``interchange_accuracy``.
        site: As in ``interchange_accuracy``.
        basis: As in ``interchange_accuracy``; directions are drawn at right angles to it.
        base_inputs: As in ``interchange_accuracy``.
        source_inputs: As in ``interchange_accuracy``.
        forward: As in ``interchange_accuracy``.
        targets: As in ``interchange_accuracy``.
        base_positions: As in ``interchange_accuracy``.
        source_positions: As in ``interchange_accuracy``.
        batch_size: As in ``interchange_accuracy``.
        seed: Seed of a private generator of the directions, one a pair.

    Returns:
        Between 0 and 1.

    Raises:
        ValueError: If the basis spans the whole space.
    """
    columns = as_basis(basis)
    width, rank = columns.shape
    if rank == width:
        raise ValueError(
            f"basis must leave room at right angles to it, got rank {rank} of width {width}. "
            "There is no placebo for a full interchange."
        )
    pairs = Pairs.checked(base_inputs, source_inputs, base_positions, source_positions)
    pairs = pairs.aimed_at(targets)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(len(pairs), width, generator=generator, dtype=torch.float64)
    exact = columns.double().cpu()
    drawn -= drawn @ exact @ exact.mT
    drawn /= drawn.norm(dim=1, keepdim=True)

    def edit(base: Tensor, source: Tensor, rows: slice) -> Tensor:
        wide = torch.float64 if base.dtype == torch.float64 else torch.float32
        start = base.to(wide)
        change = interchange(start, source.to(wide), columns) - start
        push = drawn[rows].to(change) * change.norm(dim=1, keepdim=True)
        return (start + push).to(base.dtype)

    logits = edited_logits(model, as_site(site), edit, pairs, forward, batch_size)
    return accuracy_of(logits, pairs.targets)


def _entries(keys: Tensor | Sequence[Hashable]) -> list[Hashable]:
    """One hashable a key; rows of a tensor become tuples."""
    if not isinstance(keys, Tensor):
        return list(keys)
    if keys.dim() == 1:
        return keys.tolist()
    return [tuple(row) for row in keys.flatten(1).tolist()]
