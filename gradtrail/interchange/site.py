"""Where an activation is read and replaced: the output of a named module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradtrail.hooks import marked_fixed
from gradtrail.options import near_names

__all__ = ["Site", "SiteTap", "as_site", "device_of", "prepared", "read_rows", "write_rows"]

_NAMED = 3


@dataclass(frozen=True)
class Site:
    """A place in a model: what a named module returns.

    Attributes:
        module: Dotted name of the module, as in ``model.named_modules()``. Its output is
            ``[n, d]`` or ``[n, T, d]``.
        output_index: Which entry of the output where that is a tuple, else None.
    """

    module: str
    output_index: int | None = None

    def __post_init__(self) -> None:
        """Check the types.

        Raises:
            TypeError: If the name is no string or the index no whole number.
        """
        if not isinstance(self.module, str):
            raise TypeError(
                f"Site.module must be a dotted name, got {type(self.module).__name__}. "
                "Names are in model.named_modules()."
            )
        index = self.output_index
        if index is not None and (isinstance(index, bool) or not isinstance(index, int)):
            raise TypeError(
                f"Site.output_index must be an integer or None, got {type(index).__name__}."
            )

    def __str__(self) -> str:
        """The name, with the index where there is one."""
        return self.module if self.output_index is None else f"{self.module}[{self.output_index}]"

    def find(self, model: nn.Module) -> nn.Module:
        """Find the module in a model.

        Args:
            model: The model.

        Returns:
            The module.

        Raises:
            ValueError: If no module has the name.
        """
        named = dict(model.named_modules(remove_duplicate=False))
        if self.module not in named:
            shown = near_names(self.module, [name for name in named if name])
            raise ValueError(
                f"site must name a module of the model, got {self.module!r}. Near names: {shown}."
            )
        return named[self.module]

    def pick(self, output: Any) -> Tensor:  # noqa: ANN401  # whatever the module returned
        """Pick the activation out of what the module returned.

        Args:
            output: What the module returned.

        Returns:
            The activation. Shape ``[n, d]`` or ``[n, T, d]``.

        Raises:
            TypeError: If there is no floating tensor.
            ValueError: If it has another number of axes, or the index is out of range.
        """
        value = output
        if self.output_index is not None:
            if not isinstance(output, (tuple, list)):
                raise TypeError(
                    f"Site.output_index must be None where {self.module} returns no tuple, got "
                    f"{self.output_index} for a {type(output).__name__}."
                )
            if not -len(output) <= self.output_index < len(output):
                raise ValueError(
                    f"Site.output_index must be below {len(output)}, the entries that "
                    f"{self.module} returns, got {self.output_index}."
                )
            value = output[self.output_index]
        if not isinstance(value, Tensor) or not value.is_floating_point():
            got = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"site {self} must give a floating tensor, got {got}. "
                "Pick an entry of a tuple with Site(module, output_index=...)."
            )
        if value.dim() not in (2, 3):
            raise ValueError(
                f"site {self} must give [n, d] or [n, T, d], got {tuple(value.shape)}."
            )
        return value

    def put(self, output: Any, value: Tensor) -> Any:  # noqa: ANN401
        """Put an activation into what the module returned."""
        if self.output_index is None:
            return value
        place = self.output_index % len(output)
        entries = [*output[:place], value, *output[place + 1 :]]
        plain = type(output) in (tuple, list)
        return type(output)(entries) if plain else type(output)(*entries)


def as_site(site: Site | str) -> Site:
    """Accept what a user passes as a site.

    Args:
        site: A site, or the name of its module.

    Returns:
        The site.

    Raises:
        TypeError: If it is anything else.
    """
    if isinstance(site, str):
        return Site(site)
    if not isinstance(site, Site):
        raise TypeError(f"site must be a Site or a module's name, got {type(site).__name__}.")
    return site


class SiteTap:
    """The hook at a site. It stays on until the backward has ended: checkpointing runs it again."""

    def __init__(
        self, model: nn.Module, site: Site, edit: Callable[[Tensor], Tensor | None]
    ) -> None:
        """Find the module.

        Args:
            model: The model.
            site: Where.
            edit: Receives the activation and returns the one to go on with, or None to leave it.
        """
        self._module = site.find(model)
        self._site = site
        self._edit = edit
        self._calls: int | None = None

    @property
    def is_counting(self) -> bool:
        """Whether a first forward is running, and no recomputation."""
        return self._calls is not None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Keep the hook on the module."""
        handle = self._module.register_forward_hook(self._hook)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Run one forward, in which the site must be passed once.

        Yields:
            Nothing.

        Raises:
            RuntimeError: If it is passed never, or more than once.
        """
        self._calls = 0
        try:
            yield
            if self._calls != 1:
                raise RuntimeError(
                    f"site {self._site} must run once in a forward, got {self._calls} runs. "
                    "Name a module that forward(model, inputs) calls once."
                )
        finally:
            self._calls = None

    def _hook(self, _module: nn.Module, _args: Any, output: Any) -> Any:  # noqa: ANN401
        if self._calls is not None:
            self._calls += 1
            if self._calls > 1:
                return None  # an error once the forward is over
        changed = self._edit(self._site.pick(output))
        return None if changed is None else self._site.put(output, changed)


def read_rows(activation: Tensor, positions: Tensor | None, count: int, option: str) -> Tensor:
    """Read one vector a row.

    Args:
        activation: Shape ``[n, d]`` or ``[n, T, d]``.
        positions: Where in each row. Shape ``[n]``; None for ``[n, d]``.
        count: Number of rows ``n`` of the inputs.
        option: Name of the positions' argument.

    Returns:
        Shape ``[n, d]``.

    Raises:
        ValueError: If the rows do not fit, positions are missing, needless or out of range.
    """
    if activation.shape[0] != count:
        raise ValueError(
            f"site must give one entry a row of the inputs on dimension 0 ({count}), got "
            f"{tuple(activation.shape)}. Name a module that keeps the batch first."
        )
    if activation.dim() == 2:
        if positions is not None:
            raise ValueError(
                f"{option} must be None at a site of [n, d], got positions for "
                f"{tuple(activation.shape)}. Leave them out."
            )
        return activation
    length = activation.shape[1]
    if positions is None:
        raise ValueError(
            f"{option} must be given at a site of [n, T, d], got None for "
            f"{tuple(activation.shape)}. Pass one position a row."
        )
    if int(positions.max()) >= length:
        raise ValueError(
            f"{option} must be below the {length} positions of the activation, got "
            f"{int(positions.max())}."
        )
    rows = torch.arange(count, device=activation.device)
    return activation[rows, positions.to(activation.device)]


def write_rows(activation: Tensor, positions: Tensor | None, values: Tensor) -> Tensor:
    """Replace one vector a row; the argument stays as it is."""
    if positions is None:
        return values
    rows = torch.arange(activation.shape[0], device=activation.device)
    return activation.index_put((rows, positions.to(activation.device)), values)


@contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Check that a model evaluates, and keep its training captures out of what runs inside.

    Args:
        model: The model.

    Yields:
        Nothing.
    """
    check_model(model)
    with ExitStack() as stack:
        stack.enter_context(marked_fixed(model))
        # torch's fused attention passes over the modules inside
        stack.callback(
            torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled()
        )
        torch.backends.mha.set_fastpath_enabled(False)  # noqa: FBT003  # torch's own signature
        if "torch._dynamo" in sys.modules:  # compiled code passes over hooks put on later
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def check_model(model: nn.Module) -> None:
    """Refuse a model that trains, and gradients that cannot be.

    Args:
        model: The model.

    Raises:
        TypeError: If it is no module.
        ValueError: If a module of it is in training mode.
        RuntimeError: If inference mode is on.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "interchange interventions must run outside torch.inference_mode, got it enabled: "
            "its tensors have no gradients. Use torch.no_grad, or nothing."
        )
    training = [name or "(the model)" for name, module in model.named_modules() if module.training]
    if training:
        shown = ", ".join(training[:_NAMED])
        more = ", ..." if len(training) > _NAMED else ""
        raise ValueError(
            f"model must be in evaluation mode, got {len(training)} modules in training mode "
            f"({shown}{more}). Call model.eval()."
        )


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters or buffers are; the CPU where it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")
