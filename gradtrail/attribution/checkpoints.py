"""Putting other weights into a model for a while, whole or in the parts a process holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gradtrail.hooks.whole_weights import (
    kept_parts,
    let_go_of_wholes,
    named_wholes,
    write_wholes,
)
from gradtrail.hooks.wrapped import communicates

__all__ = ["Checkpoint", "weights_of", "loaded"]

Checkpoint: TypeAlias = Mapping[str, Tensor] | str | Path | Callable[[nn.Module], Any]


def weights_of(checkpoints: Sequence[Checkpoint], weights: Sequence[float] | None) -> list[float]:
    """Check the weights of checkpoints.

    Args:
        checkpoints: The checkpoints.
        weights: One each (TracIn: the learning rate), or None for 1 each.

    Returns:
        One weight a checkpoint.

    Raises:
        ValueError: If there are no checkpoints or the numbers differ.
    """
    if len(checkpoints) == 0:
        raise ValueError("checkpoints must hold at least one checkpoint, got none.")
    if weights is None:
        return [1.0] * len(checkpoints)
    if len(weights) != len(checkpoints):
        raise ValueError(
            f"checkpoint_weights must hold one weight a checkpoint ({len(checkpoints)}), "
            f"got {len(weights)}."
        )
    return [float(weight) for weight in weights]


@contextmanager
def loaded(model: nn.Module, checkpoint: Checkpoint) -> Iterator[None]:
    """Put a checkpoint's weights into a model, and the model's own back afterwards.

    Args:
        model: The model; its parameters stay the same objects.
        checkpoint: A state dict, a safetensors file, a folder with safetensors files, or a
            callable that loads weights into the model it is given (or returns a state dict).

    Yields:
        Nothing.
    """
    put_back = _kept(model)
    try:
        runs = callable(checkpoint) and not isinstance(checkpoint, nn.Module)
        state = checkpoint(model) if runs else _read(checkpoint)
        if isinstance(state, Mapping):
            _load(model, state)
        elif communicates(model):  # it has loaded weights itself
            let_go_of_wholes(model)
        yield
    finally:
        put_back()


def _kept(model: nn.Module) -> Callable[[], object]:
    """Copy a model's weights, or the parts of them that are here; give what puts them back."""
    if communicates(model):
        return kept_parts(model)
    own = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return partial(model.load_state_dict, own)


def _read(checkpoint: Mapping[str, Tensor] | str | Path) -> Mapping[str, Tensor]:
    if isinstance(checkpoint, Mapping):
        return checkpoint
    if not isinstance(checkpoint, (str, Path)):
        raise TypeError(
            "checkpoints must hold state dicts, paths or callables, got "
            f"{type(checkpoint).__name__}. Of a model, pass model.state_dict()."
        )
    path = Path(checkpoint)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() and file.suffix == ".safetensors" for file in files):
        raise ValueError(
            "checkpoints must name safetensors files or folders that hold them, got "
            f"{str(path)!r}. Save with save_pretrained or safetensors.torch.save_model, or pass a "
            "state dict or a callable."
        )
    state: dict[str, Tensor] = {}
    for file in files:
        state |= load_file(file)
    return state


def _load(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state dict; names left out must be tied to names that are there."""
    is_cut = communicates(model)
    own = named_wholes(model) if is_cut else _named(model)
    unexpected = sorted(set(state) - set(own))
    present = {own[name][0] for name in state if name in own and own[name][1].numel()}
    missing = [
        name
        for name, (tensor, shape) in own.items()
        if name not in state and shape.numel() and tensor not in present
    ]
    if unexpected or missing:
        raise ValueError(
            "checkpoints must hold this model's weights, got one with "
            f"unexpected {unexpected[:3]} and missing {missing[:3]}."
        )
    for name, value in state.items():
        shape = own[name][1]
        if value.shape != shape:
            raise ValueError(
                f"checkpoints must hold weights of this model's shapes, got {tuple(value.shape)} "
                f"for {name}, which is {tuple(shape)} here."
            )
    if is_cut:
        write_wholes(model, state)
        return
    with torch.no_grad():
        model.load_state_dict(state, strict=False)


def _named(model: nn.Module) -> dict[str, tuple[int, torch.Size]]:
    """By name in the state dict, a number that tells tensors apart, and the shape."""
    own = model.state_dict(keep_vars=True)
    return {name: (value.data_ptr(), value.shape) for name, value in own.items()}
