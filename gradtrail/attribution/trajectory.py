r"""Following a perturbation through the optimizer steps that came after it, or its adjoint back.

A training run is a chain of optimizer steps :math:`x_k = f_k(x_{k-1})`, its state ``x`` being the
parameters and what the optimizer remembers. A perturbation of one example's weight in step ``s``
moves the gradient of that step, and the linearised later steps carry the change to the end:

.. math:: dx_k = J_k\, dx_{k-1}, \quad J_k \text{ holds } H_k = \sum_{z \in B_k} w_z g_z g_z^T,

where :math:`g_z` is the gradient of the example's own loss and :math:`w_z g_z` its share of the
step's gradient. ``push_forward`` applies the chain to every example, ``pull_back`` its transpose
to every query; both meet each step once and form no matrix of parameters by parameters.

Suffixes: m mask, b example of a step, q query, n training row, r row of either, d followed entry.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = [
    "AbstractLayerStep",
    "Coupling",
    "Curvature",
    "Products",
    "State",
    "StepBlock",
    "TrajectoryStep",
    "Vectors",
    "gauss_newton",
    "pull_back",
    "push_forward",
]

Vectors: TypeAlias = Mapping[str, Tensor]
State: TypeAlias = tuple[Tensor, ...]
Products: TypeAlias = Sequence[Mapping[str, Tensor]]


class AbstractLayerStep(abc.ABC):
    """One optimizer step of one layer, linearised where the training was.

    The state of a perturbation is a tuple of tensors ``[m, r, d]``, the parameters' first.
    """

    @abc.abstractmethod
    def start(self, theta: Tensor) -> State:
        """Make a state of a change of the parameters alone.

        Args:
            theta: The change. Shape ``[m, r, d]``.

        Returns:
            The state.
        """

    @abc.abstractmethod
    def zeros(self, rows: int) -> Tensor:
        """Make a change of the parameters that is none.

        Args:
            rows: Number of rows ``r``.

        Returns:
            Shape ``[m, r, d]``.
        """

    @abc.abstractmethod
    def push(self, state: State, change: Tensor) -> State:
        """Carry a perturbation through the step.

        Args:
            state: The perturbation before it, which may be overwritten.
            change: What it changes in the step's gradient. Shape ``[m, r, d]``.

        Returns:
            The perturbation after it.
        """

    @property
    @abc.abstractmethod
    def multiple(self) -> float | None:
        """Where ``pull`` leaves its covector alone: that is so much times the parameters' state."""

    @abc.abstractmethod
    def pull(self, state: State, covector: Tensor | None) -> State:
        """Apply the transpose of ``push``.

        Args:
            state: Derivatives with respect to the state after the step, which may be overwritten.
            covector: Where derivatives with respect to the step's gradient are written, ``[m, r,
                d]``; None where ``multiple`` says what they are.

        Returns:
            Derivatives with respect to the state before the step, its gradient held constant.
        """


@dataclass(frozen=True)
class Coupling:
    """How a layer's followed entries stand for all of them in the curvature.

    With ``k`` of ``d`` entries drawn at random and gradients scaled by ``sqrt(d / k)``, two
    different entries of the layer are both drawn with probability ``k (k - 1) / (d (d - 1))``, and
    an entry meets itself with ``k / d``: the products are weighted by the inverse of that.

    Attributes:
        size: Entries ``d`` of the layer.
        kept: Followed entries ``k``.
    """

    size: int
    kept: int

    @property
    def pair(self) -> float:
        """Weight of products between two different entries of the layer."""
        if self.kept == self.size or self.kept == 1:
            return 1.0
        return self.kept * (self.size - 1) / (self.size * (self.kept - 1))

    @property
    def diagonal(self) -> float:
        """What is added to that weight where an entry meets itself."""
        return self.kept / self.size - self.pair


@dataclass(frozen=True, eq=False)
class StepBlock:
    """The examples of one backward of an optimizer step.

    Attributes:
        layers: Gradient of each example's own loss. By layer ``[m, b, d]``.
        weights_b: What of it is in the step's gradient. Shape ``[b]``.
        row: Row of the result that the first example has, or None where none is scored.
    """

    layers: Vectors
    weights_b: Tensor
    row: int | None

    @property
    def num_examples(self) -> int:
        """Number of examples ``b``."""
        return self.weights_b.shape[0]


@dataclass(frozen=True, eq=False)
class TrajectoryStep:
    """One recorded optimizer step.

    Attributes:
        step: Its number.
        blocks: Its backwards, in order.
        maps: What the optimizer did, by layer: the layers that are followed.
        couplings: How followed entries stand for a layer's; a layer that is not in it is followed
            whole.
    """

    step: int
    blocks: tuple[StepBlock, ...]
    maps: Mapping[str, AbstractLayerStep]
    couplings: Mapping[str, Coupling]


# adds a step's ``H`` times the second argument to the last; the third is what ``H`` is made of
Curvature: TypeAlias = Callable[[TrajectoryStep, Vectors, Products, Vectors], None]


def gauss_newton(*, by_layer: bool) -> Curvature:
    """Make the product with ``H`` out of a step's own per-example gradients.

    Args:
        by_layer: Whether the blocks of ``H`` between different layers are taken for zero.

    Returns:
        ``(step, vectors, products, into)``, which adds ``H vectors`` to ``into``; ``products`` are
        what ``vectors`` gives with every example, block by block and by layer ``[m, b, r]``.
    """

    def product(step: TrajectoryStep, vectors: Vectors, products: Products, into: Vectors) -> None:
        for block, shares in zip(step.blocks, products, strict=True):
            weights_b1 = block.weights_b.unsqueeze(1)
            total = sum(shares.values())
            for name, own in shares.items():
                rows = block.layers[name]
                coupling = step.couplings.get(name)
                among = own if by_layer else total
                if coupling is not None:
                    among = among + (coupling.pair - 1) * own
                into[name].baddbmm_((weights_b1 * among).transpose(1, 2), rows)
                if coupling is not None and coupling.diagonal:
                    squares = (weights_b1 * rows.square()).sum(1, keepdim=True)
                    into[name].addcmul_(squares, vectors[name], value=coupling.diagonal)

    return product


def pull_back(
    steps: Iterable[TrajectoryStep],
    queries: Vectors,
    num_rows: int,
    curvature: Curvature,
) -> Tensor:
    """Score examples by carrying the queries' gradients back through the steps.

    Args:
        steps: Recorded steps, the last of the training first.
        queries: Gradients of the queries' losses after the last step, by layer ``[m, q, d]``.
        num_rows: Number of scored training rows ``n``.
        curvature: Product with each step's ``H``.

    Returns:
        What a larger weight of each example takes off each query's loss, per unit of relative
        weight, the mean over masks. Shape ``[n, q]``.
    """
    first = next(iter(queries.values()))
    scores_nq = first.new_zeros(num_rows, first.shape[1])
    states: dict[str, State] = {}
    # written anew in every step: large tensors cost more to allocate than to fill
    covectors: dict[str, Tensor] = {}
    for step in steps:
        factors = {name: layer.multiple for name, layer in step.maps.items()}
        for name, layer in step.maps.items():
            state = states.get(name)
            if state is None:
                state = layer.start(-queries[name])
            if factors[name] is None and name not in covectors:
                covectors[name] = torch.empty_like(state[0])
            states[name] = layer.pull(state, covectors.get(name))
        vectors = _Scaled({**covectors, **_parameters(states, factors)}, factors)
        products = vectors.products(step)
        for block, shares in zip(step.blocks, products, strict=True):
            if block.row is not None and shares:
                values_bq = sum(shares.values()).mean(0) * block.weights_b.unsqueeze(1)
                scores_nq[block.row : block.row + block.num_examples] = values_bq
        curvature(step, vectors, products, {name: state[0] for name, state in states.items()})
        del step, products  # before the next is read
    return scores_nq


def push_forward(
    steps: Iterable[TrajectoryStep],
    curvature: Curvature,
    share: tuple[int, int] = (0, 1),
) -> dict[str, Tensor]:
    """Carry every example's perturbation to the end of the training.

    Args:
        steps: Recorded steps in their order.
        curvature: Product with each step's ``H``.
        share: Which of the scored examples are carried: from a number on every so many-th.

    Returns:
        Change of the parameters per unit of relative weight of each carried example, in the order
        of the steps. By layer ``[m, n, d]``.
    """
    states: dict[str, State] = {}
    for step in steps:
        thetas = _Scaled({name: state[0] for name, state in states.items()}, {})
        changes = {name: torch.zeros_like(theta) for name, theta in thetas.items()}
        curvature(step, thetas, thetas.products(step), changes)
        for name, layer in step.maps.items():
            shares = _shares(step, name, layer, share)
            new = layer.start(torch.zeros_like(shares))
            if name not in states:
                states[name] = layer.push(new, shares)
                continue
            pairs = zip(states[name], new, strict=True)
            state = tuple(torch.cat(pair, 1) for pair in pairs)
            states[name] = layer.push(state, torch.cat([changes[name], shares], 1))
    return {name: state[0] for name, state in states.items()}


class _Scaled(Mapping[str, Tensor]):
    """Vectors that are multiples of others, multiplied when one is asked for."""

    def __init__(self, values: Vectors, factors: Mapping[str, float | None]) -> None:
        """Keep both; a factor that is None or not there is 1."""
        self._values = values
        self._factors = {name: factor for name, factor in factors.items() if factor is not None}

    def products(self, step: TrajectoryStep) -> list[dict[str, Tensor]]:
        """Products of every example's gradient with the vectors, by block and layer."""
        found = []
        for block in step.blocks:
            shares = {}
            for name, values in self._values.items():
                if name in block.layers:
                    shares[name] = block.layers[name] @ values.transpose(1, 2)
                    shares[name] *= self._factors.get(name, 1.0)
            found.append(shares)
        return found

    def __getitem__(self, name: str) -> Tensor:
        """Give a vector. Shape ``[m, r, d]``."""
        return self._values[name] * self._factors.get(name, 1.0)

    def __iter__(self) -> Iterator[str]:
        """Go through the layers."""
        return iter(self._values)

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._values)


def _parameters(states: Mapping[str, State], factors: Mapping[str, float | None]) -> Vectors:
    """The parameters' states of the layers that have a factor."""
    return {name: states[name][0] for name, factor in factors.items() if factor is not None}


def _shares(
    step: TrajectoryStep, name: str, layer: AbstractLayerStep, share: tuple[int, int]
) -> Tensor:
    """What each carried example of a step adds to one layer's gradient. Shape ``[m, b, d]``."""
    first, every = share
    found = []
    for block in step.blocks:
        if block.row is None:
            continue
        taken = slice((first - block.row) % every, None, every)
        weights_b1 = block.weights_b[taken].unsqueeze(1)
        found.append(
            block.layers[name][:, taken] * weights_b1
            if name in block.layers
            else layer.zeros(len(weights_b1))
        )
    return torch.cat(found, 1) if found else layer.zeros(0)
