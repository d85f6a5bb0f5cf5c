"""Distributed alignment search: turn a subspace until it carries a causal variable.

Geiger et al., 2023, https://arxiv.org/abs/2303.02536. The model stays as it is; the basis alone
learns, so that a base run with the source's part put in says what the causal model predicts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gradtrail.interchange.inputs import (
    Forward,
    Inputs,
    Pairs,
    check_forward,
    check_logits,
    pair_losses,
    take_inputs,
)
from gradtrail.interchange.passes import collect_rows
from gradtrail.interchange.site import (
    Site,
    SiteTap,
    as_site,
    device_of,
    prepared,
    read_rows,
    write_rows,
)
from gradtrail.interchange.subspace import LearnedSubspace, check_strength, interchange
from gradtrail.options import check_positive

__all__ = ["DASResult", "fit_das"]


@dataclass(frozen=True, eq=False)
class DASResult:
    """What a fit found.

    Attributes:
        subspace: The subspace; ``subspace.basis`` is ``[d, k]``.
        losses: Mean loss of the pairs of every optimizer step, before the step.
        site: Where.
        rank: Dimension ``k``.
    """

    subspace: LearnedSubspace
    losses: tuple[float, ...]
    site: Site
    rank: int


def fit_das(  # noqa: PLR0913  # spelled out by its issue
    model: nn.Module,
    site: Site | str,
    base_inputs: Inputs,
    source_inputs: Inputs,
    targets: Tensor,
    forward: Forward,
    *,
    rank: int,
    base_positions: Tensor | None = None,
    source_positions: Tensor | None = None,
    epochs: int = 20,
    batch_size: int = 128,
    micro_batch_size: int | None = None,
    lr: float = 1e-2,
    strength: float = 1.0,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> DASResult:
    """Find the subspace in which interchanges do what a causal variable would.

    Adam lowers the cross-entropy of the intervened runs to ``targets`` in the basis alone. The
    sources' activations are collected once. The model's parameters are frozen meanwhile, and no
    global random generator is touched.

    Args:
        model: The model, in evaluation mode.
        site: Where.
        base_inputs: Inputs of the runs that are intervened on, ``n`` rows.
        source_inputs: Inputs of the runs whose activation is put in, row by row.
        targets: Class that the causal model predicts for each pair. Shape ``[n]``.
        forward: ``(model, inputs) -> [n, C]`` runs the model once and reads the task's logits.
        rank: Dimension of the subspace.
        base_positions: Where in each base, needed at a site of ``[n, T, d]``. Shape ``[n]``.
        source_positions: Where in each source. Shape ``[n]``.
        epochs: Passes over the pairs.
        batch_size: Pairs an optimizer step.
        micro_batch_size: Pairs a forward at most, None means ``batch_size``; the sum is the same.
        lr: Adam's learning rate.
        strength: Share of the source's part that is put in.
        seed: Of the first basis and of the order of pairs.
        device: Where the subspace lies; None means with the model.

    Returns:
        The subspace and the losses.
    """
    check_forward(forward)
    for option, value in (("epochs", epochs), ("batch_size", batch_size)):
        check_positive(option, value)
    check_positive("micro_batch_size", batch_size if micro_batch_size is None else micro_batch_size)
    check_rate(lr)
    check_strength(strength)
    place = as_site(site)
    pairs = Pairs.checked(base_inputs, source_inputs, base_positions, source_positions)
    pairs = pairs.aimed_at(targets)
    micro = min(batch_size, micro_batch_size or batch_size)
    with prepared(model):
        positions = (pairs.source_positions, "source_positions")
        sources = collect_rows(model, place, source_inputs, forward, positions, micro)
        generator = torch.Generator().manual_seed(seed)
        subspace = LearnedSubspace(
            sources.shape[1],
            rank,
            seed=generator,
            dtype=torch.float64 if sources.dtype == torch.float64 else torch.float32,
            device=device_of(model) if device is None else device,
        )
        run = _Run(model, place, pairs, sources, forward, strength)
        optimizer = torch.optim.Adam([subspace.raw], lr=lr)
        losses = []
        with run.ready():
            for _ in range(epochs):
                for rows in torch.randperm(len(pairs), generator=generator).split(batch_size):
                    optimizer.zero_grad()
                    losses.append(run.step(subspace, rows, micro))
                    optimizer.step()
    return DASResult(subspace, tuple(losses), place, rank)


class _Run:
    """Intervened forwards and backwards over one set of pairs."""

    def __init__(
        self,
        model: nn.Module,
        site: Site,
        pairs: Pairs,
        sources: Tensor,
        forward: Forward,
        strength: float,
    ) -> None:
        self._model = model
        self._pairs = pairs
        self._sources = sources
        self._forward = forward
        self._strength = strength
        self._device = device_of(model)
        self._tap = SiteTap(model, site, self._edit)
        self._basis: Tensor | None = None
        self._rows: Tensor | None = None

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Freeze the model and keep the hook on."""
        with _frozen(self._model), torch.enable_grad(), self._tap.installed():
            yield

    def step(self, subspace: LearnedSubspace, rows: Tensor, micro: int) -> float:
        """Add the gradient of the mean loss of some pairs to the subspace.

        Args:
            subspace: The subspace.
            rows: Numbers of the pairs.
            micro: Pairs a forward at most.

        Returns:
            The mean loss.

        Raises:
            ValueError: If it is not finite.
        """
        basis = subspace.basis
        self._basis = basis.detach().requires_grad_()
        total = 0.0
        for part in rows.split(micro):
            total += self._backward(part, len(rows))
        if not math.isfinite(total):
            raise ValueError(
                f"The loss of intervened runs must be finite, got {total}. Check the model's "
                "weights and dtype, or lower lr."
            )
        basis.backward(self._basis.grad)  # one backward through the decomposition a step
        return total

    def _backward(self, rows: Tensor, divisor: int) -> float:
        """Run one micro-batch; the intervention is still on where the backward recomputes.

        Args:
            rows: Numbers of the pairs.
            divisor: Pairs of the whole step.

        Returns:
            The pairs' share of the mean loss.

        Raises:
            RuntimeError: If no gradient reaches the basis.
        """
        self._rows = rows
        with self._tap.counted():
            inputs = take_inputs(self._pairs.base_inputs, rows, self._device)
            logits = check_logits(self._forward(self._model, inputs), len(rows))
        loss = pair_losses(logits, self._pairs.targets[rows]).sum() / divisor
        if loss.requires_grad:
            loss.backward()
        if self._basis.grad is None:
            raise RuntimeError(
                "The loss must depend on the basis, got logits that the site has no part in. Name "
                "a site on the way to them, let forward keep gradients, and checkpoint with "
                "use_reentrant=False."
            )
        return float(loss.detach())

    def _edit(self, activation: Tensor) -> Tensor:
        rows = self._rows
        positions = self._pairs.base_positions
        positions = None if positions is None else positions[rows]
        base = read_rows(activation, positions, len(rows), "base_positions")
        basis = self._basis.to(base.device)
        value = interchange(base, self._sources[rows].to(base.device), basis, self._strength)
        return write_rows(activation, positions, value)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Freeze the parameters; every flag is put back."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(False)  # noqa: FBT003  # torch's own signature
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def check_rate(lr: float) -> None:
    """Refuse a learning rate that is not a positive number.

    Args:
        lr: What was passed.

    Raises:
        ValueError: If it is anything else.
    """
    number = isinstance(lr, (int, float)) and not isinstance(lr, bool)
    if not number or not math.isfinite(lr) or lr <= 0:
        raise ValueError(f"lr must be a positive number, got {lr!r}.")
