"""What a data selection makes sure of before it trusts a capture with the gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradtrail.errors import GradTrailWarning, UnsupportedLayerError
from gradtrail.hooks import Coverage, LivePass, Selection, first_tensor, take_rows, tokens_of
from gradtrail.hooks.fixed import is_fixed
from gradtrail.hooks.identity import call_fields
from gradtrail.hooks.layout import Layout
from gradtrail.hooks.tensors import tensors_in
from gradtrail.hooks.wrapped import named_parameters

__all__ = ["find_layouts", "forward_hook", "refuse_uncovered", "rows_of_call"]


def refuse_uncovered(model: nn.Module, coverage: Coverage) -> None:
    """Refuse a capture that is not of the trained parameters, all of them and no other.

    Args:
        model: The model.
        coverage: What its hooks cover.

    Raises:
        UnsupportedLayerError: If no example can be taken out of a trained parameter's gradient.
        ValueError: If a parameter that is not trained would enter the scores.
    """
    trained = {name for name, parameter in named_parameters(model) if parameter.requires_grad}
    open_ones, frozen = [], []
    for entry in coverage.entries:
        if entry.name in trained and entry.status != "covered":
            open_ones.append(f"{entry.name} ({entry.reason})")
        elif entry.name not in trained and entry.status == "covered":
            frozen.append(entry.name)
    if open_ones:
        raise UnsupportedLayerError(
            "Data selection must cover every trained parameter, got none of an example's own "
            f"gradient for {_some(open_ones)}. Freeze them (requires_grad_(False)), or leave none "
            "out of the capture."
        )
    if frozen:
        raise ValueError(
            "Data selection must capture trained parameters only, got frozen ones: "
            f"{_some(frozen)}. Freeze them before the manager is made, without include_frozen."
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def find_layouts(
    model: nn.Module,
    selection: Selection,
    run: Callable[[Sequence[int]], Tensor],
    main: Tensor,
    num_rows: int | None = None,
) -> Mapping[str, Layout]:
    """Find out on the first batch where every layer holds the examples.

    A few rows run through the fixed model, which is as it was afterwards. A table of positions,
    read once for the whole batch, is then read once for each example, so that it has gradients of
    examples too; its output is the same.

    Args:
        model: The model.
        selection: The captured layers.
        run: Runs some rows of the batch and gives a scalar that depends on them.
        main: The model's main input for the whole batch. Shape ``[b, ...]``.
        num_rows: Rows that may be run; None for all.

    Returns:
        By module name. A layer whose examples cannot be told apart is refused like one without
        a rule.
    """
    with warnings.catch_warnings(), LivePass(model, selection) as live:
        warnings.simplefilter("ignore", GradTrailWarning)  # what it warns of is refused below
        live.probe(run, tokens_of(main), min(len(main) if num_rows is None else num_rows, 4))
    refuse_uncovered(model, live.selection.coverage)
    return live.layouts


def rows_of_call(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[[Sequence[int]], Tensor], Tensor]:
    """Make a run of some rows of a model's call.

    Args:
        model: The model.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.

    Returns:
        What runs rows by number and gives the sum of the squared outputs, and the main input.
    """
    fields = call_fields(args, kwargs)
    main = first_tensor({name: value for name, value in fields.items() if not _is_scalar(value)})
    call = {"input_ids": main, "args": list(args), "kwargs": dict(kwargs)}  # found first, so named

    def run(rows: Sequence[int]) -> Tensor:
        some = take_rows(call, rows)
        output = model(*some["args"], **some["kwargs"])
        found = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
        return sum(tensor.double().square().sum() for tensor in found)

    return run, main


def forward_hook(
    model: nn.Module, before: Callable[[tuple[Any, ...], dict[str, Any]], None]
) -> Callable[..., None]:
    """Make a pre-hook that acts on the model's own forwards with a graph."""

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is model and torch.is_grad_enabled() and not is_fixed(module):
            before(args, kwargs)

    return enter


def _is_scalar(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, Tensor) and value.dim() == 0
