"""Parameters of which every process holds a part: cutting whole tensors and joining parts.

FSDP1 keeps a slice of every flat parameter, ``fully_shard`` a ``DTensor``. What belongs to the
parameters (gradients, an optimizer's state) lies in the same parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradtrail.hooks.wrapped import fsdp_handles, is_sharding, is_spread

__all__ = ["Shards", "Slice", "is_synchronized", "reducing_sizes", "refuse_unusual"]


@dataclass(frozen=True, eq=False)
class Slice:
    """Which entries of a flattened parameter are here, and who holds the others.

    Attributes:
        shape: Shape of the whole parameter.
        stride: Its strides, in whose order the entries were flattened.
        start: First entry that is here.
        stop: Entry after the last.
        group: The processes that hold its slices; None where each holds all of it.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    start: int
    stop: int
    group: Any

    def laid_out(self, line_n: Tensor) -> Tensor:
        """Give all entries, in the order of the flattening, the parameter's shape: a view."""
        return line_n.as_strided(self.shape, self.stride, line_n.storage_offset())


class Shards:
    """Cuts and joins what is shaped like a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        """Find out where the parts lie.

        Args:
            model: The model; parameters that nobody shards are their own only part.
        """
        self._slices = {id(parameter): cut for parameter, cut in _slices(model)}

    def slice_of(self, parameter: nn.Parameter) -> Slice | None:
        """Tell which entries of a parameter are here, or None where it is not in slices."""
        cut = self._slices.get(id(parameter))
        return None if cut is None or cut.group is None else cut

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """Cut out what this process holds.

        Args:
            parameter: A parameter.
            whole: A tensor of the whole parameter's shape, the same on every process.

        Returns:
            The part, shaped as the parameter's own data here; a view where it can be one.
        """
        cut = self._slices.get(id(parameter))
        if cut is not None:
            return whole if cut.group is None else _flat(whole, cut)[cut.start : cut.stop]
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None:
            return whole
        from torch.distributed.tensor import distribute_tensor

        placed = distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None)
        return placed.to_local()

    def wholes(self, parts: Sequence[tuple[nn.Parameter, Tensor]]) -> list[Tensor]:
        """Join parts, on every process at once: every one must ask, with the same parameters.

        Args:
            parts: Parameters, each with a tensor that is laid out as it is: a slice or a
                ``DTensor``. Others (a count of steps) come back as they are.

        Returns:
            New tensors of the whole parameters' shapes, with one ``all_reduce`` for all slices.
        """
        found: list[Tensor | None] = [None] * len(parts)
        waiting: dict[tuple[int, torch.dtype], list[int]] = {}
        for place, (parameter, part) in enumerate(parts):
            cut = self._slices.get(id(parameter))
            if part.dim() == 0:
                found[place] = part.clone()
            elif cut is not None and cut.group is not None:
                waiting.setdefault((id(cut.group), part.dtype), []).append(place)
            else:
                found[place] = part.full_tensor() if is_spread(part) else part.clone()
        for places in waiting.values():
            chosen = [parts[place] for place in places]
            for place, whole in zip(places, self._joined(chosen), strict=True):
                found[place] = whole
        return found

    def _joined(self, parts: Sequence[tuple[nn.Parameter, Tensor]]) -> Iterator[Tensor]:
        """Lay slices out on zeros and add the processes' up."""
        cuts = [self._slices[id(parameter)] for parameter, _ in parts]
        sizes = [math.prod(cut.shape) for cut in cuts]
        first = parts[0][1]
        line_n = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        for cut, (_, part), row_n in zip(cuts, parts, line_n.split(sizes), strict=True):
            row_n[cut.start : cut.stop] = part.reshape(-1)
        dist.all_reduce(line_n, group=cuts[0].group)
        for cut, row_n in zip(cuts, line_n.split(sizes), strict=True):
            yield cut.laid_out(row_n).clone()


def is_synchronized(model: nn.Module) -> bool:
    """Tell whether the backward under way averages gradients over processes.

    Args:
        model: The model in its wrappers.

    Returns:
        False inside ``no_sync()`` and after ``set_requires_gradient_sync(False)``.
    """
    flags = [
        module.require_backward_grad_sync
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
    ]
    flags += [module._sync_gradients for module, _ in fsdp_handles(model)]  # noqa: SLF001
    flags += [group.reduce_grads and group.all_reduce_grads for group in _sharding_groups(model)]
    return all(flags)


def reducing_sizes(model: nn.Module) -> set[int]:
    """Over how many processes gradients are averaged, for every wrapper that does.

    Args:
        model: The model in its wrappers.

    Returns:
        The numbers; empty where nothing averages.
    """
    found = {
        module.process_group.size()
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
    }
    for module, handle in fsdp_handles(model):
        among = getattr(module, "_inter_node_pg", None)
        found.add(handle.process_group.size() * (1 if among is None else among.size()))
    found.update(
        parameter.device_mesh.size() for parameter in model.parameters() if is_spread(parameter)
    )
    return found


def refuse_unusual(model: nn.Module) -> None:
    """Refuse ways to average gradients that are not their mean.

    Args:
        model: The model in its wrappers.

    Raises:
        RuntimeError: If a hook or a factor stands between them and it.
    """
    hooked = [
        type(module).__name__
        for module in model.modules()
        if isinstance(module, DistributedDataParallel) and module._comm_hooks  # noqa: SLF001
    ]
    hooked += [
        type(module).__name__
        for module, _ in fsdp_handles(model)
        if getattr(module, "_comm_hook", None) is not None
    ]
    if hooked:
        raise RuntimeError(
            f"Gradients must be averaged by {hooked[0]} itself, got a communication hook. "
            "Leave it out."
        )
    factors = [_own_factor(group) for group in _sharding_groups(model)]
    if any(factor is not None for factor in factors):
        raise RuntimeError(
            "Gradients must be divided by the number of ranks, got set_gradient_divide_factor("
            f"{next(factor for factor in factors if factor is not None)}). Leave it out."
        )


def _own_factor(group: Any) -> object:  # noqa: ANN401  # torch says it nowhere else
    """The factor that a unit was told to divide gradients by; before torch 2.7 an operation."""
    old = getattr(group, "reduce_scatter_reduce_op", None)
    return getattr(group, "gradient_divide_factor", old)


def _slices(model: nn.Module) -> Iterator[tuple[nn.Parameter, Slice]]:
    for _, handle in fsdp_handles(model):
        flat = handle.flat_param
        group = handle.process_group if handle.uses_sharded_strategy else None
        rows = zip(flat._params, flat._shapes, flat._strides, flat._shard_param_infos, strict=True)  # noqa: SLF001
        for parameter, shape, stride, info in rows:
            start, stop = 0, 0
            if info.in_shard:
                start, stop = info.intra_param_start_idx, info.intra_param_end_idx + 1
            yield parameter, Slice(shape, tuple(stride), start, stop, group)


def _flat(whole: Tensor, cut: Slice) -> Tensor:
    """Entries in the order in which FSDP1 flattened them."""
    if whole.stride() != cut.stride:
        laid_out = torch.empty_strided(
            cut.shape, cut.stride, dtype=whole.dtype, device=whole.device
        )
        whole = laid_out.copy_(whole)
    return whole.as_strided((whole.numel(),), (1,))


def _sharding_groups(model: nn.Module) -> Iterator[Any]:
    """What ``fully_shard`` keeps of its units: several in one state since torch 2.11, else one."""
    for module in model.modules():
        if is_sharding(module):
            state = module._get_fsdp_state()  # noqa: SLF001  # torch says it nowhere else
            groups = getattr(state, "_fsdp_param_groups", None)
            one = getattr(state, "_fsdp_param_group", None)
            yield from groups if groups is not None else [one] * (one is not None)
