r"""Kronecker factors of the Fisher, accumulated layer by layer inside the backward.

Martens & Grosse, 2015, https://arxiv.org/abs/1503.05671, with the positions of an example summed:

.. math:: A = \frac1P \sum_{bs} w_{bs} a_{bs} a_{bs}^T, \qquad
          S = \frac1N \sum_{bs} g_{bs} g_{bs}^T

Suffixes: g group, b example, s position, t any stacked position, i input (with a constant where
there is a bias), o output.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradtrail.errors import CurvatureError
from gradtrail.factors import LayerGradient, LinearFactors, SumGradient, accumulation_dtype
from gradtrail.kronecker.covariance_sums import (
    InputSum,
    KroneckerFactors,
    LayerSums,
    add_weighted,
    counted_positions,
)
from gradtrail.kronecker.symmetric import add_products, mirror

__all__ = ["CovarianceAccumulator", "KroneckerFactors", "LayerSums", "linear_parts"]

_WINDOW = 4  # inputs among which one that was read before is looked for: q, k, v and a gate


@dataclass(eq=False)
class _Met:
    """An input of this backward that is in a sum, and may be met again."""

    tensors: list[Callable[[], Tensor | None]]
    has_bias: bool
    groups: int
    weights: list[Tensor]
    inputs: InputSum

    def holds(self, parts: tuple[LinearFactors, ...]) -> bool:
        """Whether these are the very inputs."""
        same = len(parts) == len(self.tensors) and all(
            known() is part.activation_bsi for known, part in zip(self.tensors, parts, strict=True)
        )
        return same and (parts[0].has_bias, parts[0].groups) == (self.has_bias, self.groups)


@dataclass(eq=False)
class _Waiting:
    """An input of this backward, until the layers that read it have come."""

    parts: list[LinearFactors]
    weights: list[Tensor]
    names: list[str] = field(default_factory=list)


class CovarianceAccumulator:
    """Accumulates ``A`` and ``S`` of many layers, in float32 or wider.

    Layers that read the same input share one ``A``; its positions count where the output gradient
    of any of them is not exactly zero. Which layers do is found out in their first backward, where
    every one adds the positions that those before it did not; from then on their input is added
    once, when the last of them has come, and held no longer.
    """

    def __init__(
        self,
        *,
        max_side: int,
        like: CovarianceAccumulator | None = None,
        holds_inputs: bool = True,
    ) -> None:
        """Start empty.

        Args:
            max_side: Longest side of a covariance that may be allocated.
            like: An accumulator that knows already which layers share an input, or None.
            holds_inputs: Whether the last few inputs of a layer's first backward are held, so that
                layers share those that are read for each of them, as from a file. Otherwise
                somebody else holds what is shared until its last reader has come.
        """
        self._max_side = max_side
        self._holds_inputs = holds_inputs
        self._known: dict[str, Set[str]] = {} if like is None else like.groups
        self._inputs: dict[str, InputSum] = {}
        self._gradients: dict[str, Tensor] = {}
        self._waiting: dict[tuple[object, ...], _Waiting] = {}
        self._met: deque[_Met] = deque(maxlen=_WINDOW)
        self._is_open = False

    @property
    def groups(self) -> dict[str, Set[str]]:
        """By layer, the layers that read the same input, itself among them."""
        return self._known | {name: inputs.names for name, inputs in self._inputs.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Layers seen so far."""
        return tuple(self._gradients)

    def add(self, name: str, gradient: LayerGradient) -> None:
        """Take one layer's gradients of one backward.

        Args:
            name: The layer.
            gradient: Linear factors, or a sum of them.
        """
        self._is_open = True
        parts = linear_parts(gradient)
        self._add_gradients(name, parts)
        weights = [counted_positions(part.output_gradient_bso) for part in parts]
        if self._group(name) is None:
            self._add_first(name, parts, weights)
            return
        key = (*(id(part.activation_bsi) for part in parts), parts[0].has_bias, parts[0].groups)
        waiting = self._waiting.get(key)
        if waiting is None:
            if len(self._waiting) == _WINDOW:
                self._add_inputs(self._waiting.pop(next(iter(self._waiting))))
            waiting = self._waiting[key] = _Waiting(list(parts), weights)
        else:
            pairs = zip(waiting.weights, weights, strict=True)
            waiting.weights = [old | new for old, new in pairs]
        waiting.names.append(name)
        if all(self._group(one).issubset(waiting.names) for one in waiting.names):
            self._add_inputs(self._waiting.pop(key))

    def end_backward(self) -> None:
        """Add what still waits: no more layers will come."""
        for waiting in self._waiting.values():
            self._add_inputs(waiting)
        self._waiting.clear()
        self._met.clear()
        self._is_open = False

    def absorb(self, other: CovarianceAccumulator) -> None:
        """Add the sums of another accumulator, which is empty afterwards.

        A sum that is not there yet is taken over, so that nothing is copied; any other costs one
        addition an entry.

        Args:
            other: Its last backward must have ended, as the last one here.
        """
        self._refuse_open("absorb")
        other._refuse_open("absorb")  # noqa: SLF001  # of the same class
        done: set[int] = set()
        for theirs in other._inputs.values():  # noqa: SLF001
            if id(theirs) not in done:
                done.add(id(theirs))
                self._absorb_inputs(theirs)
        for name, sum_goo in other._gradients.items():  # noqa: SLF001
            mine = self._gradients.get(name)
            self._gradients[name] = sum_goo if mine is None else mine.to(sum_goo).add_(sum_goo)
        other._inputs, other._gradients = {}, {}  # noqa: SLF001

    def discard(self, names: Set[str]) -> None:
        """Forget layers, as if they had never come."""
        for name in names & self._inputs.keys():
            self._inputs.pop(name).names.discard(name)
            self._gradients.pop(name)

    def sums(self) -> dict[str, LayerSums]:
        """Give the sums as they stand.

        Returns:
            By layer, in the order of arrival. The tensors are the accumulator's own: they change
            with the next backward.
        """
        self._refuse_open("sums")
        found: dict[str, LayerSums] = {}
        first: dict[int, str] = {}
        for name, sum_goo in self._gradients.items():
            inputs = self._inputs[name]
            if id(inputs) not in first:
                first[id(inputs)] = name
                mirror(inputs.sum_gii)
            input_of = first[id(inputs)]
            found[name] = LayerSums(inputs.sum_gii, mirror(sum_goo), inputs.count, input_of)
        return found

    def restore(self, sums: Mapping[str, LayerSums]) -> None:
        """Go on from sums that another accumulator gave.

        Args:
            sums: By layer; they are copied.

        Raises:
            RuntimeError: If there are sums here already.
        """
        if self._gradients:
            raise RuntimeError(
                f"restore must meet an empty accumulator, got one of {len(self._gradients)} layers."
            )
        owners: dict[str, InputSum] = {}
        for name, one in sums.items():
            if one.input_of not in owners:
                own = InputSum(set(), one.activation_gii.clone(), one.count.clone())
                owners[one.input_of] = own
            owners[one.input_of].names.add(name)
            self._inputs[name] = owners[one.input_of]
            self._gradients[name] = one.gradient_goo.clone()

    def copy(self) -> CovarianceAccumulator:
        """Make another one with the same sums."""
        twin = CovarianceAccumulator(
            max_side=self._max_side, like=self, holds_inputs=self._holds_inputs
        )
        twin.restore(self.sums())
        return twin

    def result(self, num_examples: int, *, consume: bool = True) -> dict[str, KroneckerFactors]:
        """Give the covariances.

        Args:
            num_examples: Number of examples ``N`` they are a mean over.
            consume: Whether to hand the sums over, which ends the accumulation; otherwise they
                are copied.

        Returns:
            By layer, in the order of arrival.
        """
        self._refuse_open("result")
        done: dict[int, tuple[Tensor, int, str]] = {}
        found: dict[str, KroneckerFactors] = {}
        for name, sum_goo in self._gradients.items():
            inputs = self._inputs[name]
            if id(inputs) not in done:
                sum_gii = inputs.sum_gii if consume else inputs.sum_gii.clone()
                count = int(inputs.count)
                done[id(inputs)] = (mirror(sum_gii).div_(max(1, count)), count, name)
            cov_gii, count, first = done[id(inputs)]
            sum_goo = sum_goo if consume else sum_goo.clone()
            cov_goo = mirror(sum_goo).div_(max(1, num_examples))
            found[name] = KroneckerFactors(cov_gii, cov_goo, num_examples, count, first)
        if consume:
            self._inputs, self._gradients = {}, {}
        return found

    def _group(self, name: str) -> Set[str] | None:
        """Layers that read the same input as one, itself among them; None if it is new."""
        return self._inputs[name].names if name in self._inputs else self._known.get(name)

    def _refuse_open(self, caller: str) -> None:
        if self._is_open:
            raise RuntimeError(f"end_backward must be called before {caller}. Call it.")

    def _add_gradients(self, name: str, parts: tuple[LinearFactors, ...]) -> None:
        g_bso = parts[0].output_gradient_bso
        groups, width = parts[0].groups, g_bso.shape[2] // parts[0].groups
        if name not in self._gradients:
            self._gradients[name] = self._zeros(name, groups, width, g_bso)
        sum_goo = self._gradients[name]
        for part in parts:
            g_tgo = part.output_gradient_bso.flatten(0, 1).unflatten(1, (groups, width))
            for group in range(groups):
                add_products(sum_goo[group], g_tgo[:, group].to(sum_goo.dtype))

    def _add_first(
        self, name: str, parts: tuple[LinearFactors, ...], weights: list[Tensor]
    ) -> None:
        """Add the input of a layer of which it is not known yet who else reads it."""
        met = next((one for one in self._met if one.holds(parts)), None)
        fresh = weights
        if met is None:
            zeros = self._zero_inputs(name, parts[0])
            inputs = InputSum(set(), zeros, zeros.new_zeros((), dtype=torch.int64))
            reference = _hold if self._holds_inputs else weakref.ref
            refs = [reference(part.activation_bsi) for part in parts]
            met = _Met(refs, parts[0].has_bias, parts[0].groups, weights, inputs)
            self._met.append(met)
        else:
            pairs = list(zip(met.weights, weights, strict=True))
            fresh = [new & ~old for old, new in pairs]
            met.weights = [old | new for old, new in pairs]
        met.inputs.names.add(name)
        self._inputs[name] = met.inputs
        for part, weights_t in zip(parts, fresh, strict=True):
            add_weighted(met.inputs, part, weights_t)

    def _absorb_inputs(self, theirs: InputSum) -> None:
        """Add one sum over inputs to those that the same layers have here."""
        taken = False
        for names, owner in self._parted(theirs.names):
            if owner is not None:
                owner.sum_gii = owner.sum_gii.to(theirs.sum_gii).add_(theirs.sum_gii)
                owner.count = owner.count.to(theirs.count).add_(theirs.count)
            elif taken:
                owner = InputSum(names, theirs.sum_gii.clone(), theirs.count.clone())
            else:
                owner, taken = InputSum(names, theirs.sum_gii, theirs.count), True
            self._inputs |= dict.fromkeys(names, owner)

    def _add_inputs(self, waiting: _Waiting) -> None:
        for inputs in self._owners(waiting):
            for part, weights in zip(waiting.parts, waiting.weights, strict=True):
                add_weighted(inputs, part, weights)

    def _owners(self, waiting: _Waiting) -> list[InputSum]:
        """Sums that these layers' input belongs to: one, but for layers that part ways."""
        owners = []
        for names, owner in self._parted(waiting.names):
            if owner is None:
                zeros = self._zero_inputs(waiting.names[0], waiting.parts[0])
                owner = InputSum(names, zeros, zeros.new_zeros((), dtype=torch.int64))
            self._inputs |= dict.fromkeys(names, owner)
            owners.append(owner)
        return owners

    def _parted(self, names: Iterable[str]) -> list[tuple[set[str], InputSum | None]]:
        """Sort layers by the sum they have, split off from those that are not among them."""
        together: dict[int, set[str]] = {}
        for name in names:
            together.setdefault(id(self._inputs.get(name)), set()).add(name)
        found = []
        for group in together.values():
            owner = self._inputs.get(next(iter(group)))
            if owner is not None and owner.names != group:
                owner = owner.without(group)
            found.append((group, owner))
        return found

    def _zero_inputs(self, name: str, part: LinearFactors) -> Tensor:
        width = part.activation_bsi.shape[2] // part.groups + int(part.has_bias)
        return self._zeros(name, part.groups, width, part.activation_bsi)

    def _zeros(self, name: str, groups: int, width: int, like: Tensor) -> Tensor:
        dtype = accumulation_dtype(like.dtype)
        if width > self._max_side:
            size = groups * width * width * dtype.itemsize
            raise CurvatureError(
                f"{name} must have sides of at most max_factor_dim={self._max_side}, got {width}: "
                f"its covariance would take {size / 2**30:,.1f} GiB. Leave it out with exclude=, "
                "give it diagonal= treatment, compress it with projection=, or raise "
                "max_factor_dim."
            )
        return like.new_zeros(groups, width, width, dtype=dtype)


def linear_parts(gradient: LayerGradient) -> tuple[LinearFactors, ...]:
    """List the uses of a layer whose gradients have Kronecker structure.

    Args:
        gradient: Linear factors or a sum of them.

    Returns:
        The uses.

    Raises:
        TypeError: If a use is of another kind.
    """
    parts = gradient.parts if isinstance(gradient, SumGradient) else (gradient,)
    for part in parts:
        if not isinstance(part, LinearFactors):
            raise TypeError(f"gradient must hold linear factors, got {type(part).__name__}.")
    return parts


def _hold(tensor: Tensor) -> Callable[[], Tensor]:
    """Stand in for a weak reference where the tensor is held."""
    return lambda: tensor
