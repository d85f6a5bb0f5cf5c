"""An optimizer's state of whole parameters, where every process holds a part of each.

FSDP1's optimizer keeps slices, and nothing for a parameter of which no entry is here: who holds the
first entry says how many steps were made and which moments there are. All of a layer travels in
one line, ``[facts | slices laid out on zeros]``, whose sum over processes is what each wants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from gradtrail.distributed import reduce_sum, world_size
from gradtrail.factors import accumulation_dtype
from gradtrail.hooks.directions import Direction, ParameterState
from gradtrail.hooks.sharded import Shards, Slice
from gradtrail.hooks.wrapped import is_spread

__all__ = ["whole_states"]

_ONLY_WITH = {
    "max_exp_avg_sq": "amsgrad",
    "grad_avg": "centered",
    "momentum_buffer": "momentum",
}
_WITHOUT_AXES = ("mu_product",)


@dataclass(frozen=True, eq=False)
class _Piece:
    """One parameter's state here, and the place of its parts in the line.

    Attributes:
        name: The parameter's name.
        cut: Which of its entries are here.
        state: What the optimizer keeps for them.
        moments: Names of the moments that may exist.
        device: Where the parameter is.
        dtype: What the line is summed in.
    """

    name: str
    cut: Slice
    state: ParameterState
    moments: tuple[str, ...]
    device: torch.device
    dtype: torch.dtype

    @property
    def sizes(self) -> list[int]:
        """Sizes of the parts: the facts, then every moment."""
        whole = self.cut.shape.numel()
        return [
            1 + len(self.moments),
            *(1 if name in _WITHOUT_AXES else whole for name in self.moments),
        ]

    def write(self, line_n: Tensor) -> None:
        """Put what is here into the line."""
        facts, *rows = line_n.split(self.sizes)
        tells = self.cut.start == 0 and self.cut.stop > 0
        if tells:
            facts[0] = self.state.step
        for place, (name, row_n) in enumerate(zip(self.moments, rows, strict=True), 1):
            value = self.state.moments.get(name)
            if value is None:
                continue
            if tells:
                facts[place] = 1
            if value.dim():
                row_n[self.cut.start : self.cut.stop] = value.detach().reshape(-1)
            elif tells:
                row_n[0] = value

    def read(self, line_n: Tensor, options: Mapping[str, Any]) -> ParameterState:
        """Take the whole state out of the summed line."""
        facts, *rows = line_n.split(self.sizes)
        found = facts.tolist()
        moments = {
            name: row_n[0] if name in _WITHOUT_AXES else self.cut.laid_out(row_n)
            for name, row_n, there in zip(self.moments, rows, found[1:], strict=True)
            if there
        }
        return ParameterState(round(found[0]), moments, options)


def whole_states(
    direction: Direction,
    states: Mapping[str, tuple[nn.Parameter, ParameterState]],
    shards: Shards,
) -> dict[str, ParameterState]:
    """Give an optimizer's state of some parameters, the whole of it on every process.

    Every process must ask, for the same parameters.

    Args:
        direction: The optimizer's map, which names the moments.
        states: Parameters with what is kept for them here, by name.
        shards: How the model's parameters lie.

    Returns:
        By name. Moments that were put together are new tensors; others are the optimizer's own.
    """
    found: dict[str, ParameterState] = {}
    lines: dict[Any, list[_Piece]] = {}
    for name, (parameter, state) in states.items():
        cut = shards.slice_of(parameter)
        if cut is None:
            found[name] = _joined(state)
            continue
        moments = tuple(one for one in direction.moments if _may_exist(one, state.options))
        dtype = accumulation_dtype(parameter.dtype)
        piece = _Piece(name, cut, state, moments, parameter.device, dtype)
        lines.setdefault((id(cut.group), dtype, parameter.device), []).append(piece)
    for pieces in lines.values():
        found |= _summed(pieces)
    return {name: found[name] for name in states}


def _may_exist(moment: str, options: Mapping[str, Any]) -> bool:
    option = _ONLY_WITH.get(moment)
    return option is None or bool(options.get(option))


def _joined(state: ParameterState) -> ParameterState:
    """Join the parts of ``fully_shard``; other moments stay as they are."""
    moments = {
        name: value.full_tensor() if is_spread(value) else value
        for name, value in state.moments.items()
    }
    return replace(state, moments=moments)


def _summed(pieces: Sequence[_Piece]) -> dict[str, ParameterState]:
    """Bring the slices of some parameters together, with one ``all_reduce``."""
    first = pieces[0]
    sizes = [sum(piece.sizes) for piece in pieces]
    line_n = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
    for piece, own_n in zip(pieces, line_n.split(sizes), strict=True):
        piece.write(own_n)
    if first.cut.group.size() == world_size():
        reduce_sum([line_n], f"optimizer state of {first.name}")
    else:
        dist.all_reduce(line_n, group=first.cut.group)
    parts = zip(pieces, line_n.split(sizes), strict=True)
    return {piece.name: piece.read(own_n, piece.state.options) for piece, own_n in parts}
