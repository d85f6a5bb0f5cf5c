"""What the passes take: inputs by row, positions, targets, and pairs of a base and a source.

Suffixes: n row or pair, t position, d width, c class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "Forward",
    "Inputs",
    "Pairs",
    "check_classes",
    "check_forward",
    "check_labels",
    "check_logits",
    "check_positions",
    "join_inputs",
    "named_tensors",
    "num_rows",
    "pair_losses",
    "take_inputs",
]

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]
Forward: TypeAlias = Callable[[nn.Module, Any], Tensor]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def named_tensors(inputs: Inputs, option: str) -> dict[str, Tensor]:
    """Name the tensors of inputs.

    Args:
        inputs: A tensor, a tuple or a mapping of tensors.
        option: Name of the argument, for the error.

    Returns:
        The tensors by key or place.

    Raises:
        TypeError: If they are anything else.
    """
    if isinstance(inputs, Tensor):
        return {"0": inputs}
    if isinstance(inputs, Mapping):
        named = {str(name): value for name, value in inputs.items()}
    elif isinstance(inputs, (tuple, list)):
        named = {str(place): value for place, value in enumerate(inputs)}
    else:
        named = {}
    wrong = [name for name, value in named.items() if not isinstance(value, Tensor)]
    if wrong or not named:
        got = (
            f"{type(named[wrong[0]]).__name__} at {wrong[0]!r}" if wrong else type(inputs).__name__
        )
        raise TypeError(f"{option} must be a tensor, a tuple or a mapping of tensors, got {got}.")
    return named


def num_rows(inputs: Inputs, option: str) -> int:
    """Count the rows of inputs.

    Args:
        inputs: A tensor, a tuple or a mapping of tensors.
        option: Name of the argument, for the error.

    Returns:
        The size of dimension 0.

    Raises:
        ValueError: If the tensors disagree, or there are no rows.
    """
    named = named_tensors(inputs, option)
    sizes = {name: value.shape[0] if value.dim() else None for name, value in named.items()}
    if len(set(sizes.values())) > 1 or None in sizes.values():
        raise ValueError(
            f"{option} must hold tensors of one length on dimension 0, got {sizes}. "
            "Give every row its own entry."
        )
    count = next(iter(sizes.values()))
    if not count:
        raise ValueError(f"{option} must hold at least one row, got none.")
    return count


def take_inputs(
    inputs: Inputs, index: Tensor | slice | Sequence[int], device: torch.device | None = None
) -> Any:  # noqa: ANN401  # what the user's forward takes
    """Pick rows of inputs.

    Args:
        inputs: A tensor, a tuple or a mapping of tensors.
        index: Which rows.
        device: Where to; None leaves them.

    Returns:
        The same structure.
    """

    def taken(value: Tensor) -> Tensor:
        rows = index.to(value.device) if isinstance(index, Tensor) else index
        picked = value[rows]
        return picked if device is None else picked.to(device)

    if isinstance(inputs, Tensor):
        return taken(inputs)
    if isinstance(inputs, Mapping):
        return {name: taken(value) for name, value in inputs.items()}
    return tuple(taken(value) for value in inputs)


def join_inputs(first: Inputs, second: Inputs) -> Any:  # noqa: ANN401
    """Put the rows of one structure after those of another like it."""
    if isinstance(first, Tensor):
        return torch.cat([first, second])
    if isinstance(first, Mapping):
        return {name: torch.cat([first[name], second[name]]) for name in first}
    return tuple(torch.cat(both) for both in zip(first, second, strict=True))


def check_forward(forward: object) -> None:
    """Refuse a forward that cannot be called.

    Args:
        forward: What was passed.

    Raises:
        TypeError: If it is not callable.
    """
    if not callable(forward):
        raise TypeError(
            "forward must be a callable (model, inputs) -> logits [n, C], got "
            f"{type(forward).__name__}."
        )


def check_positions(positions: Tensor | None, count: int, option: str) -> Tensor | None:
    """Refuse positions that are not one number from 0 a row.

    Args:
        positions: What was passed. Shape ``[n]``, or None.
        count: Number of rows ``n``.
        option: Name of the argument.

    Returns:
        The positions on the CPU as int64, or None.

    Raises:
        ValueError: If their shape does not fit, or one is negative; other than integers are a
            ``TypeError``.
    """
    if positions is None:
        return None
    values = _integers(positions, option, "one position a row")
    if values.shape != (count,):
        raise ValueError(
            f"{option} must have one position a row, shape ({count},), got {tuple(values.shape)}."
        )
    if int(values.min()) < 0:
        raise ValueError(
            f"{option} must count from 0, got {int(values.min())}. "
            "Write a position from the end as its number from the start."
        )
    return values


def check_labels(labels: Tensor, count: int, option: str) -> Tensor:
    """Refuse labels that are not one class from 0 a row.

    Args:
        labels: What was passed. Shape ``[n]``.
        count: Number of rows ``n``.
        option: Name of the argument.

    Returns:
        The labels on the CPU as int64.

    Raises:
        ValueError: If their shape does not fit, or one is negative; other than integers are a
            ``TypeError``.
    """
    values = _integers(labels, option, "one class a row")
    if values.shape != (count,):
        raise ValueError(
            f"{option} must have one class a row, shape ({count},), got {tuple(values.shape)}."
        )
    if int(values.min()) < 0:
        raise ValueError(f"{option} must be classes from 0, got {int(values.min())}.")
    return values


def check_logits(logits: object, count: int) -> Tensor:
    """Refuse what is not one row of logits a row of inputs.

    Args:
        logits: What the forward returned.
        count: Number of rows ``n`` that it was given.

    Returns:
        The logits. Shape ``[n, c]``.

    Raises:
        TypeError: If they are no floating tensor.
        ValueError: If their shape is not ``[n, c]``.
    """
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        got = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"forward must return a floating tensor of logits [n, C], got {got}.")
    if logits.dim() != 2 or logits.shape[0] != count:
        raise ValueError(
            f"forward must return logits [n, C] with n={count}, got {tuple(logits.shape)}. "
            "Read the task's logits at one position."
        )
    return logits


def check_classes(targets: Tensor, logits: Tensor) -> None:
    """Refuse targets beyond the classes.

    Args:
        targets: Classes from 0. Shape ``[n]``.
        logits: What the forward returned. Shape ``[n, c]``.

    Raises:
        ValueError: If a target is not below ``c``.
    """
    highest = int(targets.max())
    if highest >= logits.shape[1]:
        raise ValueError(
            f"targets must be classes below {logits.shape[1]}, as many as forward returns logits, "
            f"got {highest}."
        )


def pair_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every row, in float32 or wider. Shape ``[n]``."""
    check_classes(targets, logits)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets.to(logits.device), reduction="none")


@dataclass(frozen=True, eq=False)
class Pairs:
    """Bases and sources, pair by pair.

    Attributes:
        base_inputs: Inputs of the runs that are intervened on.
        source_inputs: Inputs of the runs whose activation is put in.
        base_positions: Where in each base, or None. Shape ``[n]``.
        source_positions: Where in each source, or None. Shape ``[n]``.
        targets: What the causal model predicts, or None. Shape ``[n]``.
    """

    base_inputs: Inputs
    source_inputs: Inputs
    base_positions: Tensor | None
    source_positions: Tensor | None
    targets: Tensor | None = None

    def __len__(self) -> int:
        """Number of pairs."""
        return num_rows(self.base_inputs, "base_inputs")

    @classmethod
    def checked(
        cls,
        base_inputs: Inputs,
        source_inputs: Inputs,
        base_positions: Tensor | None,
        source_positions: Tensor | None,
    ) -> Pairs:
        """Check what a user passed.

        Args:
            base_inputs: As the attribute.
            source_inputs: As the attribute.
            base_positions: As the attribute.
            source_positions: As the attribute.

        Returns:
            The pairs, without targets.

        Raises:
            ValueError: If there are not as many bases as sources.
        """
        count = num_rows(base_inputs, "base_inputs")
        sources = num_rows(source_inputs, "source_inputs")
        if count != sources:
            raise ValueError(
                "base_inputs and source_inputs must pair row with row, got "
                f"{count} bases and {sources} sources."
            )
        return cls(
            base_inputs,
            source_inputs,
            check_positions(base_positions, count, "base_positions"),
            check_positions(source_positions, count, "source_positions"),
        )

    def aimed_at(self, targets: Tensor) -> Pairs:
        """Check the targets of a user and take them along."""
        return replace(self, targets=check_labels(targets, len(self), "targets"))

    def take(self, index: Tensor | slice) -> Pairs:
        """Pick some of the pairs."""

        def of(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[index]

        return Pairs(
            take_inputs(self.base_inputs, index),
            take_inputs(self.source_inputs, index),
            of(self.base_positions),
            of(self.source_positions),
            of(self.targets),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the pairs by name."""
        base = named_tensors(self.base_inputs, "base_inputs")
        source = named_tensors(self.source_inputs, "source_inputs")
        others = {
            "base_positions": self.base_positions,
            "source_positions": self.source_positions,
            "targets": self.targets,
        }
        return {
            **{f"base.{name}": value for name, value in base.items()},
            **{f"source.{name}": value for name, value in source.items()},
            **{name: value for name, value in others.items() if value is not None},
        }

    @property
    def are_alike(self) -> bool:
        """Whether bases and sources can stand in one batch."""
        base = named_tensors(self.base_inputs, "base_inputs")
        source = named_tensors(self.source_inputs, "source_inputs")
        return list(base) == list(source) and all(
            value.shape == source[name].shape and value.dtype == source[name].dtype
            for name, value in base.items()
        )


def _integers(values: object, option: str, what: str) -> Tensor:
    if not isinstance(values, Tensor) or values.dtype not in _INTEGERS:
        got = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{option} must be an integer tensor with {what}, got {got}.")
    return values.detach().to(device="cpu", dtype=torch.int64)
