"""Holding a model fixed: parameters frozen, dropout off, all of it put back afterwards."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradtrail.hooks.wrapped import fsdp_handles, keep_whole, set_gradients_aside, take_apart

__all__ = ["at_rest", "hold_fixed", "is_fixed", "marked_fixed"]

# modules of models that are held fixed, with how often
_FIXED: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def is_fixed(module: nn.Module) -> bool:
    """Tell whether a live pass is open over a model that this module belongs to."""
    return module in _FIXED


def hold_fixed(model: nn.Module, stack: ExitStack) -> None:
    """Freeze a model, let it evaluate and record graphs until a stack unwinds.

    Args:
        model: The model.
        stack: Takes the way back: flags, modes and global random state.
    """
    stack.enter_context(torch.inference_mode(mode=False))
    stack.enter_context(torch.enable_grad())
    stack.callback(_restore_random_state, *_random_state())
    # whole parameters that fully_shard made for an earlier pass have flags of their own
    take_apart(model)
    stack.callback(take_apart, model)
    units = fsdp_handles(model)
    keep_whole(units, stack)
    set_gradients_aside(units, stack)
    for parameter in (*model.parameters(), *(handle.flat_param for _, handle in units)):
        stack.callback(parameter.requires_grad_, parameter.requires_grad)
        parameter.requires_grad_(False)  # noqa: FBT003  # torch's own signature
    for module in model.modules():
        stack.callback(setattr, module, "training", module.training)
        module.training = False
        if isinstance(module, nn.RNNBase):  # cuDNN has no backward of one that evaluates
            stack.callback(setattr, module, "dropout", module.dropout)
            module.training, module.dropout = True, 0.0
    stack.enter_context(marked_fixed(model))
    # torch's fused attention passes over the layers, and drops padded rows
    stack.callback(
        torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
    )
    torch.backends.mha.set_fastpath_enabled(False)  # noqa: FBT003  # torch's own signature


@contextmanager
def marked_fixed(model: nn.Module) -> Iterator[None]:
    """Mark a model's modules, so that captures of training leave a live pass alone."""
    modules = list(model.modules())
    for module in modules:
        _FIXED[module] = _FIXED.get(module, 0) + 1
    try:
        yield
    finally:
        for module in modules:
            _FIXED[module] -= 1
            if not _FIXED[module]:
                del _FIXED[module]


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Keep captures of training, and DDP's reductions, out of passes over a fixed model.

    Args:
        model: The model in its wrappers.

    Yields:
        Nothing.
    """
    with ExitStack() as stack:
        stack.enter_context(marked_fixed(model))
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield


def _random_state() -> tuple[Tensor, list[Tensor]]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda


def _restore_random_state(cpu: Tensor, cuda: list[Tensor]) -> None:
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
