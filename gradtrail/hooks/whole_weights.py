"""Weights of models in parts as wholes: written from whole tensors, or put together for a while.

Where a process holds parts of parameters (FSDP1, ``fully_shard``), loading a checkpoint means to
cut it. What asks for every parameter at once, such as forward mode, runs the model whole and
without the wrappers, on every process the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradtrail.hooks.sharded import Shards
from gradtrail.hooks.wrapped import (
    bare,
    communicates,
    fsdp_handles,
    is_sharding,
    is_spread,
    named_modules,
    named_parameters,
    plain_class,
    put_back_whole,
    register_shapes,
    take_apart,
    whole_shape,
)

__all__ = ["kept_parts", "let_go_of_wholes", "named_wholes", "put_together", "write_wholes"]

_Hooks = dict[int, Callable[..., Any]]


def named_wholes(model: nn.Module) -> dict[str, tuple[int, torch.Size]]:
    """List a model's weights as its state dict names them in the plain model.

    Args:
        model: The model, in parts.

    Returns:
        By name, tied parameters by each of theirs: a number that tells tensors apart, and the
        shape in the plain model.
    """
    return {
        name: (id(tensor), whole_shape(module, role))
        for name, (module, role, tensor) in _places(model).items()
    }


def write_wholes(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Write whole tensors into the parts that every process holds.

    Args:
        model: The model, in parts.
        state: Tensors of the plain model's shapes, by its names, the same on every process; or
            the ``DTensor`` that ``fully_shard`` makes of them.
    """
    let_go_of_wholes(model)
    places, shards = _places(model), Shards(model)
    with torch.no_grad():
        for name, value in state.items():
            _, _, own = places[name]
            if not isinstance(own, nn.Parameter):
                own.copy_(value)
                continue
            here = _here(own)
            if is_spread(value):
                alike = is_spread(own) and value.placements == own.placements
                if alike and value.device_mesh == own.device_mesh:
                    here.copy_(value.to_local())
                    continue
                value = value.full_tensor()
            part = shards.part(own, value.detach().to(here.device, here.dtype))
            here.copy_(part.reshape(here.shape))


def kept_parts(model: nn.Module) -> Callable[[], None]:
    """Copy what this process holds of a model's weights.

    Args:
        model: The model, in parts.

    Returns:
        What puts them back.
    """
    let_go_of_wholes(model)
    own = [tensor.clone() for tensor in _held(model)]

    def put_back() -> None:
        let_go_of_wholes(model)
        with torch.no_grad():
            for tensor, value in zip(_held(model), own, strict=True):
                tensor.copy_(value)

    return put_back


def let_go_of_wholes(model: nn.Module) -> None:
    """Let every unit go back to its parts, so that no whole of other weights is used again.

    FSDP1 keeps the whole parameters of its root after a forward without gradients.

    Args:
        model: The model, in parts.
    """
    take_apart(model)
    put_back_whole(model)
    for _, handle in fsdp_handles(model):
        whole = getattr(handle.flat_param, "_full_param_padded", None)  # not before its first use
        if handle.uses_sharded_strategy and whole is not None:
            handle.reshard(free_unsharded_flat_param=True)


@contextmanager
def put_together(model: nn.Module) -> Iterator[nn.Module]:
    """Hold a model whole on every process, to run it there without its wrappers.

    Every process must ask. Parameters are copied one by one; nothing is written back.

    Args:
        model: The model; one that nobody has cut is given as it is.

    Yields:
        The model inside, whose forward and backward are no matter of other processes.
    """
    if not communicates(model):
        yield model
        return
    let_go_of_wholes(model)
    shards = Shards(model)
    wholes: dict[int, nn.Parameter] = {}
    for _, parameter in named_parameters(model):
        if shards.slice_of(parameter) is not None or is_spread(parameter):
            (whole,) = shards.wholes([(parameter, parameter.detach())])
            wholes[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    with ExitStack() as stack:
        for module in list(model.modules()):
            _take_parts_off(module, wholes, stack)
        yield bare(model)


def _places(model: nn.Module) -> dict[str, tuple[nn.Module, str, Tensor]]:
    """Where the tensors of a state dict are, by their names in the plain model."""
    register_shapes(model)
    found: dict[str, tuple[nn.Module, str, Tensor]] = {}
    for above, module in named_modules(model, remove_duplicate=False):
        passing = module._non_persistent_buffers_set  # noqa: SLF001  # torch has no public way
        buffers = {k: v for k, v in module._buffers.items() if k not in passing}  # noqa: SLF001
        for role, tensor in {**module._parameters, **buffers}.items():  # noqa: SLF001
            if tensor is not None:
                found[".".join(filter(None, (above, role)))] = (module, role, tensor)
    return found


def _held(model: nn.Module) -> list[Tensor]:
    """The part of each parameter that is here, and every buffer."""
    parameters = [_here(parameter) for _, parameter in named_parameters(model)]
    return [*parameters, *model.buffers()]


def _here(parameter: nn.Parameter) -> Tensor:
    """The part that this process holds, without a graph; writing to it moves the parameter."""
    own = parameter.detach()
    return own.to_local() if is_spread(own) else own


def _take_parts_off(
    module: nn.Module, wholes: Mapping[int, nn.Parameter], stack: ExitStack
) -> None:
    """Give one module whole parameters and bare children, and take ``fully_shard`` off it."""
    for name, child in module._modules.items():  # noqa: SLF001  # torch has no public way
        if child is not None and _without_fsdp(child) is not child:
            stack.callback(module._modules.__setitem__, name, child)  # noqa: SLF001
            module._modules[name] = _without_fsdp(child)  # noqa: SLF001
    own = module._parameters  # noqa: SLF001
    for name, parameter in own.items():
        if id(parameter) in wholes:
            stack.callback(own.__setitem__, name, parameter)
            own[name] = wholes[id(parameter)]
            if name in vars(module):  # where FSDP1 is told to set attributes without a check
                stack.callback(vars(module).__setitem__, name, vars(module).pop(name))
    if is_sharding(module):
        state = module._get_fsdp_state()  # noqa: SLF001  # torch says it nowhere else
        for hooks in (module._forward_pre_hooks, module._forward_hooks):  # noqa: SLF001
            _take_off(hooks, state, stack)
        stack.callback(setattr, module, "__class__", type(module))
        module.__class__ = plain_class(module)


def _without_fsdp(module: nn.Module) -> nn.Module:
    while "_fsdp_wrapped_module" in module._modules:  # noqa: SLF001  # torch has no public way
        module = module._modules["_fsdp_wrapped_module"]  # noqa: SLF001
    return module


def _take_off(hooks: _Hooks, state: object, stack: ExitStack) -> None:
    """Take the hooks of a unit out, to be put back where they stood among the others."""
    before = list(hooks)
    gone = {key: hooks.pop(key) for key in before if _is_of(hooks[key], state)}
    stack.callback(partial(_put_among, hooks, before, gone))


def _is_of(hook: Callable[..., Any] | None, state: object) -> bool:
    """Whether a hook is a method of a unit's state, or wraps one."""
    while hook is not None and getattr(hook, "__self__", None) is not state:
        hook = getattr(hook, "__wrapped__", None)
    return hook is not None


def _put_among(hooks: _Hooks, before: list[int], gone: _Hooks) -> None:
    now = dict(hooks)
    hooks.clear()
    for key in (*before, *now):
        if key in gone or key in now:
            hooks[key] = gone[key] if key in gone else now[key]
