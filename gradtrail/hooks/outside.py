"""Finding parameters that are read past their module's own call.

A head written as ``x @ embedding.weight.t()``, a penalty on the weights in a loss: the gradient
that flows there reaches no hook, so what the hooks see is only a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from gradtrail.hooks.capture import HookedModule
from gradtrail.hooks.saved import apart_from_checkpointing
from gradtrail.hooks.wrapped import is_part

__all__ = ["OutsideReads"]


class OutsideReads(TorchFunctionMode):
    """While active, notes the hooked modules whose parameters are used outside their calls."""

    def __init__(self, modules: Sequence[HookedModule]) -> None:
        """Prepare to watch.

        Args:
            modules: The hooked modules.
        """
        super().__init__()
        self.called: set[str] = set()
        self.found: set[str] = set()
        self._modules = modules
        self._owners = _owners(modules)
        self._comes_and_goes = any(is_part(p) for hooked in modules for p in _parameters(hooked))
        self._inside: list[nn.Module] = []
        self._known: set[tuple[Any, int]] = set()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> OutsideReads:
        """Start to watch.

        Returns:
            Itself.
        """
        for hooked in self._modules:
            # around every other hook, which may run the module's forward too
            before = hooked.module.register_forward_pre_hook(
                self._on_call(hooked.name), prepend=True
            )
            after = hooked.module.register_forward_hook(self._on_return, always_call=True)
            self._handles += [before, after]
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        """Stop."""
        super().__exit__(*error)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation, noting whether its result depends on a parameter read outside."""
        del types
        kwargs = kwargs or {}
        if self._comes_and_goes:  # FSDP puts other tensors into a module's place for a pass
            self._owners = _owners(self._modules)
        for value in _tensors((args, kwargs)):
            owners = self._owners.get(id(value))
            if owners is None or any(hooked.module in self._inside for hooked in owners):
                continue
            if (func, id(value)) not in self._known:
                self._known.add((func, id(value)))
                if _depends(func, args, kwargs, value):
                    self.found.update(hooked.name for hooked in owners)
        return func(*args, **kwargs)

    def reasons(self) -> dict[str, str]:
        """Why the captured layers concerned have no gradient of their own, by layer name."""
        found: dict[str, str] = {}
        for hooked in self._modules:
            if hooked.name in self.found:
                called = hooked.name in self.called
                what = "its parameter is also" if called else "hooked but never called, it is"
                for unit, _ in hooked.memberships:
                    found[unit.name] = f"{what} read outside its own call"
        return found

    def _on_call(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, _args: Any) -> None:  # noqa: ANN401
            self.called.add(name)
            self._inside.append(module)

        return enter

    def _on_return(self, module: nn.Module, _args: Any, _output: Any) -> None:  # noqa: ANN401
        if self._inside and self._inside[-1] is module:
            self._inside.pop()


def _owners(modules: Sequence[HookedModule]) -> dict[int, list[HookedModule]]:
    """Which modules have a parameter, by its id."""
    found: dict[int, list[HookedModule]] = {}
    for hooked in modules:
        for parameter in _parameters(hooked):
            found.setdefault(id(parameter), []).append(hooked)
    return found


def _parameters(hooked: HookedModule) -> Iterator[nn.Parameter]:
    """The parameters of a module that are captured."""
    for _, owner in hooked.memberships:
        for role, wanted in (("weight", owner.roles.weight), ("bias", owner.roles.bias)):
            parameter = hooked.module._parameters.get(role)  # noqa: SLF001  # no computed ones
            if wanted and parameter is not None:
                yield parameter


def _tensors(value: Any) -> Iterator[Tensor]:  # noqa: ANN401
    return (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor))


def _depends(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    parameter: Tensor,
) -> bool:
    """Whether an operation's result has a gradient with respect to a parameter."""
    # run once more, on detached arguments of which the parameter alone requires grad
    leaf = parameter.detach().requires_grad_()
    leaves, spec = tree_flatten((args, kwargs))
    changes = func.__name__.endswith("_") and not func.__name__.endswith("__")
    for place, value in enumerate(leaves):
        if value is parameter:
            leaves[place] = leaf
        elif isinstance(value, Tensor):
            leaves[place] = value.detach().clone() if changes else value.detach()
    again, named = tree_unflatten(leaves, spec)
    devices = [parameter.device.index or 0] if parameter.device.type == "cuda" else []
    try:
        with (
            torch.random.fork_rng(devices),
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            apart_from_checkpointing(),
        ):
            result = func(*again, **named)
    except (RuntimeError, TypeError, ValueError):
        return True  # whatever it is, it is no plain look at the parameter
    return any(tensor.requires_grad and tensor is not leaf for tensor in _tensors(result))
