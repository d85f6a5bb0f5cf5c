"""Models inside the wrappers of distributed training: plain names, whole shapes, what is frozen.

DDP and FSDP put themselves between a model and its parts, checkpointing and compilation too: users
name layers as in the plain model. FSDP keeps a part of every parameter on each process and puts the
whole ones in their places for a forward or backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "bare",
    "communicates",
    "fsdp_handles",
    "is_part",
    "is_sharding",
    "is_spread",
    "keep_whole",
    "lent_storages",
    "named_modules",
    "named_parameters",
    "output_embedding",
    "plain_class",
    "put_back_whole",
    "register_shapes",
    "set_gradients_aside",
    "take_apart",
    "unwrapped",
    "whole_shape",
]

_WRAPPED = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
# of modules whose parameters FSDP1 flattens: their shapes by name
_SHAPES: weakref.WeakKeyDictionary[nn.Module, dict[str, torch.Size]] = weakref.WeakKeyDictionary()


def named_modules(
    model: nn.Module, *, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """Go through a model's modules by the names they have in the plain model.

    Args:
        model: The model, wrapped or not.
        remove_duplicate: Whether a module of several names comes once.

    Yields:
        Names and modules; a wrapper comes before what it wraps, under the same name.
    """
    plain: dict[str, str] = {}
    wrappers: dict[str, bool] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        above, _, last = name.rpartition(".")
        hidden = last in _WRAPPED or (last == "module" and wrappers[above])
        parts = [plain[above]] if name else []
        if name and not hidden:
            parts.append(last)
        plain[name] = ".".join(filter(None, parts))
        wrappers[name] = isinstance(module, DistributedDataParallel)
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        yield plain[name], module


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Go through a model's parameters, each once, by its name in the plain model.

    Args:
        model: The model, wrapped or not.

    Yields:
        Names and parameters.
    """
    plain = {id(module): name for name, module in reversed(list(named_modules(model)))}
    seen: set[int] = set()
    for module in model.modules():
        for role, parameter in module._parameters.items():  # noqa: SLF001  # as nn.Module does
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield ".".join(filter(None, (plain[id(module)], role))), parameter


def unwrapped(model: nn.Module) -> nn.Module:
    """Take DDP and compilation off, which a forward can do without; FSDP stays."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:  # noqa: SLF001  # of torch.compile
            model = model._modules["_orig_mod"]  # noqa: SLF001
        else:
            return model


def bare(module: nn.Module) -> nn.Module:
    """Take every wrapper off, to look at what is inside; it cannot run without FSDP's."""
    inner = (module._modules.get(name) for name in _WRAPPED)  # noqa: SLF001
    found = next((one for one in inner if one is not None), None)
    return module if found is None else bare(found)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module as its author wrote it: ``fully_shard`` puts one of its own above."""
    cls = type(module)
    return cls.__bases__[1] if cls.__bases__[0].__name__ == "FSDPModule" else cls


def output_embedding(model: nn.Module) -> nn.Module | None:
    """The module that a language model's logits come from, as layers are hooked; None without."""
    getter = getattr(bare(unwrapped(model)), "get_output_embeddings", None)
    found = getter() if callable(getter) else None
    return None if found is None else bare(found)


def communicates(model: nn.Module) -> bool:
    """Whether a forward of the model needs every process, as FSDP's do."""
    if any(is_part(parameter) for parameter in model.parameters()):
        return True
    # between a forward and its backward whole parameters may stand in the places of the parts
    modules = model.modules()
    return any(is_sharding(one) or "_fsdp_wrapped_module" in one._modules for one in modules)  # noqa: SLF001


def is_part(parameter: Tensor) -> bool:
    """Whether a process holds a part of this parameter, between passes."""
    return is_spread(parameter) or getattr(parameter, "_fsdp_flattened", False)


def fsdp_handles(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """FSDP1's wrappers, each with what it keeps of its flat parameter."""
    modules = (module for module in model.modules() if "_fsdp_wrapped_module" in module._modules)  # noqa: SLF001
    pairs = ((module, getattr(module, "_handle", None)) for module in modules)
    return [(module, handle) for module, handle in pairs if handle is not None]


def take_apart(model: nn.Module) -> None:
    """Let every unit of ``fully_shard`` go back to the parts that this process holds."""
    for module in model.modules():
        if is_sharding(module):
            module.reshard()


def put_back_whole(model: nn.Module) -> None:
    """Put parameters back where FSDP1 that shards nothing left views in their places.

    It does so itself after the backward of a parameter that is trained. Where none is, the views
    stay, and its next forward takes them for parameters that the user has exchanged.

    Args:
        model: The model.
    """
    _put_back(fsdp_handles(model))


def keep_whole(units: Sequence[tuple[nn.Module, Any]], stack: ExitStack) -> None:
    """Have parameters in their places before every forward, however the last pass has ended.

    Args:
        units: What ``fsdp_handles`` gives of a model; those that shard are left alone.
        stack: Takes the way back, after which parameters are in their places too.
    """
    _put_back(units)
    stack.callback(_put_back, units)
    for module, handle in units:
        if not handle.uses_sharded_strategy:
            hook = module.register_forward_pre_hook(partial(_put_back_before, (module, handle)))
            stack.callback(hook.remove)


def set_gradients_aside(units: Sequence[tuple[nn.Module, Any]], stack: ExitStack) -> None:
    """Keep what has been accumulated away from FSDP1, which drops it where nothing is trained.

    Args:
        units: What ``fsdp_handles`` gives of a model.
        stack: Takes the way back.
    """
    for _, handle in units:
        flat = handle.flat_param
        if flat._is_grad_none_mask is not None:  # noqa: SLF001  # torch has no public way
            stack.callback(setattr, flat, "_is_grad_none_mask", list(flat._is_grad_none_mask))  # noqa: SLF001
        for owner in (flat, *flat._params, *flat._shared_params):  # noqa: SLF001
            stack.callback(_set_gradient, owner, owner.grad)
            owner.grad = None


def _set_gradient(owner: nn.Parameter, gradient: Tensor | None) -> None:
    """Set a gradient, which FSDP1 may keep in another shape than the parameter's present one."""
    own = owner.data
    if gradient is not None and gradient.shape != own.shape:
        owner.data = torch.empty_like(gradient)
    owner.grad = gradient
    owner.data = own


def _put_back_before(unit: tuple[nn.Module, Any], *_: object) -> None:
    """Put one wrapper's parameters back, unless a backward under way recomputes its forward."""
    if unit[1]._training_state.name == "IDLE":  # noqa: SLF001  # torch has no public way
        _put_back([unit])


def _put_back(units: Sequence[tuple[nn.Module, Any]]) -> None:
    for _, handle in units:
        if not handle.uses_sharded_strategy:
            handle._use_unsharded_views(as_params=True)  # noqa: SLF001  # torch has no public way


def is_sharding(module: nn.Module) -> bool:
    """Whether a module is a unit of ``fully_shard``."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


def register_shapes(model: nn.Module) -> None:
    """Remember the shapes of parameters that FSDP1 has flattened.

    Args:
        model: The model, or what it is wrapped in.

    Raises:
        ValueError: If parameters are not to be told apart, or the wrapper is not given.
    """
    known: set[int] = set()
    for _, handle in fsdp_handles(model):
        if not handle._use_orig_params:  # noqa: SLF001  # torch says it nowhere else
            raise ValueError(
                "FSDP must be built with use_orig_params=True, got False: its parameters cannot "
                "be told apart. Pass use_orig_params=True."
            )
        flat = handle.flat_param
        for info, shape in zip(flat._param_infos, flat._shapes, strict=True):  # noqa: SLF001
            _SHAPES.setdefault(info.module, {})[info.param_name] = shape
        for info in flat._shared_param_infos:  # noqa: SLF001
            shape = _SHAPES[info.prim_module][info.prim_param_name]
            _SHAPES.setdefault(info.module, {})[info.param_name] = shape
        known.update(id(parameter) for parameter in flat._params)  # noqa: SLF001
    for name, parameter in named_parameters(model):
        if getattr(parameter, "_fsdp_flattened", False) and id(parameter) not in known:
            raise ValueError(
                f"model must be the FSDP module, got one inside it: {name} lies in its flat "
                "parameter. Pass what FSDP(...) returned."
            )


def whole_shape(module: nn.Module, role: str) -> torch.Size:
    """Give the shape of a module's parameter, also where this process holds a part of it.

    Args:
        module: The module.
        role: Name of its parameter.

    Returns:
        The shape in the plain model.
    """
    known = _SHAPES.get(module, {}).get(role)
    return getattr(module, role).shape if known is None else known


def lent_storages(model: nn.Module, tensors: Iterable[Tensor]) -> Collection[int]:
    """Say which storages belong to a model or its caller.

    Args:
        model: The model.
        tensors: What the caller lends it.

    Returns:
        Their addresses; parameters that FSDP puts together for a pass are looked up when asked.
    """
    lent = [*model.parameters(), *model.buffers(), *tensors]
    fixed = frozenset(_storage(tensor) for tensor in lent)
    if not communicates(model):
        return fixed
    places = [
        (module, role)
        for module in model.modules()
        for role in (*module._parameters, *_SHAPES.get(module, {}))  # noqa: SLF001
    ]
    return _Lent(fixed, dict.fromkeys(places))


class _Lent(Collection[int]):
    """Storages that are lent, among them those of parameters which come and go."""

    def __init__(self, fixed: frozenset[int], places: Collection[tuple[nn.Module, str]]) -> None:
        self._fixed = fixed
        self._places = places

    def __contains__(self, address: object) -> bool:
        return address in self._fixed or any(address == now for now in self._passing())

    def __iter__(self) -> Iterator[int]:
        yield from {*self._fixed, *self._passing()}

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _passing(self) -> Iterator[int]:
        for module, role in self._places:
            parameter = getattr(module, role, None)
            if parameter is not None:
                yield _storage(parameter)


def is_spread(tensor: Tensor) -> bool:
    """Whether it is a ``DTensor``, without importing that where nobody else has."""
    return any(cls.__name__ == "DTensor" for cls in type(tensor).__mro__)


def _storage(tensor: Tensor) -> int:
    """Address of a tensor's storage, or of the part that is here."""
    local = tensor._local_tensor if is_spread(tensor) else tensor  # noqa: SLF001  # no collective
    return local.untyped_storage().data_ptr()
