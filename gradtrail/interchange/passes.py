"""Forward passes with an activation read or replaced: activations, logits, accuracy.

Suffixes: n row or pair, d width, c class.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gradtrail.interchange.inputs import (
    Forward,
    Inputs,
    Pairs,
    check_classes,
    check_forward,
    check_labels,
    check_logits,
    check_positions,
    num_rows,
    take_inputs,
)
from gradtrail.interchange.site import (
    Site,
    SiteTap,
    as_site,
    device_of,
    prepared,
    read_rows,
    write_rows,
)
from gradtrail.interchange.subspace import LearnedSubspace, as_basis, interchange
from gradtrail.options import check_positive

__all__ = [
    "accuracy_of",
    "collect_activations",
    "collect_rows",
    "edited_logits",
    "interchange_accuracy",
    "interchange_logits",
]

# base activations, source activations and the numbers of their pairs -> what to go on with
Edit = Callable[[Tensor, Tensor, slice], Tensor]


def collect_activations(
    model: nn.Module,
    site: Site | str,
    inputs: Inputs,
    forward: Forward,
    *,
    positions: Tensor | None = None,
    batch_size: int = 256,
) -> Tensor:
    """Read an activation of every row, without gradients.

    Args:
        model: The model, in evaluation mode.
        site: Where.
        inputs: A tensor, a tuple or a mapping of tensors, one entry a row on dimension 0.
        forward: ``(model, inputs) -> [n, C]`` runs the model once.
        positions: Where in each row, needed at a site of ``[n, T, d]``. Shape ``[n]``.
        batch_size: Rows a forward.

    Returns:
        Activations on the CPU in the model's dtype. Shape ``[n, d]``.
    """
    check_forward(forward)
    check_positive("batch_size", batch_size)
    count = num_rows(inputs, "inputs")
    places = check_positions(positions, count, "positions")
    with prepared(model):
        return collect_rows(
            model, as_site(site), inputs, forward, (places, "positions"), batch_size
        )


def interchange_logits(  # noqa: PLR0913  # spelled out by its issue
    model: nn.Module,
    site: Site | str,
    basis: Tensor | LearnedSubspace,
    base_inputs: Inputs,
    source_inputs: Inputs,
    forward: Forward,
    *,
    base_positions: Tensor | None = None,
    source_positions: Tensor | None = None,
    batch_size: int = 256,
) -> Tensor:
    """Run the bases with the sources' part of the subspace put in.

    Args:
        model: The model, in evaluation mode.
        site: Where.
        basis: Orthonormal columns ``[d, k]``, or a subspace.
        base_inputs: Inputs of the runs that are intervened on, ``n`` rows.
        source_inputs: Inputs of the runs whose activation is put in, row by row.
        forward: ``(model, inputs) -> [n, C]`` runs the model once and reads the task's logits.
        base_positions: Where in each base, needed at a site of ``[n, T, d]``. Shape ``[n]``.
        source_positions: Where in each source. Shape ``[n]``.
        batch_size: Pairs a forward.

    Returns:
        Logits of the intervened runs on the CPU. Shape ``[n, C]``.
    """
    columns = as_basis(basis)
    pairs = Pairs.checked(base_inputs, source_inputs, base_positions, source_positions)

    def edit(base: Tensor, source: Tensor, _rows: slice) -> Tensor:
        return interchange(base, source, columns)

    return edited_logits(model, as_site(site), edit, pairs, forward, batch_size)


def interchange_accuracy(  # noqa: PLR0913  # spelled out by its issue
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
) -> float:
    """Share of pairs whose intervened run says what the causal model predicts.

    Args:
        model: As in ``interchange_logits``.
        site: As in ``interchange_logits``.
        basis: As in ``interchange_logits``.
        base_inputs: As in ``interchange_logits``.
        source_inputs: As in ``interchange_logits``.
        forward: As in ``interchange_logits``.
        targets: Class that the causal model predicts for each pair. Shape ``[n]``.
        base_positions: As in ``interchange_logits``.
        source_positions: As in ``interchange_logits``.
        batch_size: As in ``interchange_logits``.

    Returns:
        Between 0 and 1.
    """
    wanted = check_labels(targets, num_rows(base_inputs, "base_inputs"), "targets")
    logits = interchange_logits(
        model,
        site,
        basis,
        base_inputs,
        source_inputs,
        forward,
        base_positions=base_positions,
        source_positions=source_positions,
        batch_size=batch_size,
    )
    return accuracy_of(logits, wanted)


def accuracy_of(logits: Tensor, targets: Tensor) -> float:
    """Share of rows whose largest logit is the target's."""
    check_classes(targets, logits)
    return float((logits.argmax(1) == targets).double().mean())


def collect_rows(
    model: nn.Module,
    site: Site,
    inputs: Inputs,
    forward: Forward,
    places: tuple[Tensor | None, str],
    batch_size: int,
) -> Tensor:
    """Read an activation of every row of checked inputs.

    Args:
        model: The model, prepared.
        site: Where.
        inputs: The inputs.
        forward: Runs the model.
        places: Positions or None, and the name of their argument.
        batch_size: Rows a forward.

    Returns:
        Activations on the CPU. Shape ``[n, d]``.

    Raises:
        ValueError: If an activation is not finite.
    """
    positions, option = places
    found: list[Tensor] = []

    def read(activation: Tensor) -> None:
        found.append(read_rows(activation, *current, option).detach().cpu())

    tap = SiteTap(model, site, read)
    device, count = device_of(model), num_rows(inputs, option)
    with torch.no_grad(), tap.installed():
        for start in range(0, count, batch_size):
            rows = slice(start, min(start + batch_size, count))
            size = rows.stop - start
            current = (None if positions is None else positions[rows], size)
            with tap.counted():
                logits = forward(model, take_inputs(inputs, rows, device))
            check_logits(logits, size)
    values = torch.cat(found)
    finite = torch.isfinite(values).all(1)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0, 0])
        raise ValueError(
            f"activations at site {site} must be finite, got some that are not, the first in row "
            f"{row}. Check the model's weights and its dtype."
        )
    return values


def edited_logits(
    model: nn.Module, site: Site, edit: Edit, pairs: Pairs, forward: Forward, batch_size: int
) -> Tensor:
    """Run the bases with an activation replaced.

    Args:
        model: The model.
        site: Where.
        edit: Receives the activations ``[b, d]`` of bases and sources and which pairs they are.
        pairs: Bases and sources.
        forward: Runs the model.
        batch_size: Pairs a forward.

    Returns:
        Logits on the CPU. Shape ``[n, C]``.

    Raises:
        ValueError: If a logit is NaN.
    """
    check_forward(forward)
    check_positive("batch_size", batch_size)
    found: list[Tensor] = []
    with prepared(model), torch.no_grad():
        device = device_of(model)
        places = (pairs.source_positions, "source_positions")
        sources = collect_rows(model, site, pairs.source_inputs, forward, places, batch_size)

        def replace(activation: Tensor) -> Tensor:
            positions = None if pairs.base_positions is None else pairs.base_positions[rows]
            base = read_rows(activation, positions, rows.stop - rows.start, "base_positions")
            return write_rows(activation, positions, edit(base, sources[rows].to(base), rows))

        tap = SiteTap(model, site, replace)
        with tap.installed():
            for start in range(0, len(pairs), batch_size):
                rows = slice(start, min(start + batch_size, len(pairs)))
                with tap.counted():
                    logits = forward(model, take_inputs(pairs.base_inputs, rows, device))
                found.append(check_logits(logits, rows.stop - start).cpu())
    values = torch.cat(found)
    if bool(values.isnan().any()):
        row = int(values.isnan().any(1).nonzero()[0, 0])
        raise ValueError(
            f"logits of intervened runs must be numbers, got NaN, first in pair {row}. "
            "Check the model's weights and its dtype."
        )
    return values
