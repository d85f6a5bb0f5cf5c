"""Making a recorded training's per-example gradients again, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gradtrail.callbacks.merge import merge_blocks
from gradtrail.callbacks.snapshot import ParameterSnapshotCallback, call_prefix, checksums
from gradtrail.callbacks.snapshot_calls import unpack
from gradtrail.factors import GradientBlock
from gradtrail.hooks import HookManager, call_fields
from gradtrail.hooks.wrapped import unwrapped
from gradtrail.store import StepStore

__all__ = ["ReplayLoss", "replay"]

ReplayLoss: TypeAlias = Callable[[Any, Mapping[str, Any]], Tensor]


def replay(
    manager: HookManager,
    store: StepStore,
    *,
    steps: Sequence[int] | None = None,
    reverse: bool = False,
    loss: ReplayLoss | None = None,
) -> Iterator[GradientBlock]:
    """Make the gradients of recorded steps again: one block an optimizer step.

    Each step's record is read once. While a block is being used the model has the parameters of
    its step; when the iterator ends, fails or is closed, its parameters, buffers, ``.grad``, modes
    and the random state are what they were.

    Args:
        manager: What captures, made as in training over a model of the same architecture, and not
            collecting; its ``loss_reduction`` is that of the training (``GradTrailCallback``'s is
            ``"model"`` where nothing was said), its ``loss_scale`` that of ``loss``.
        store: What ``ParameterSnapshotCallback`` recorded.
        steps: Numbers of the steps wanted; None means all.
        reverse: Whether to begin with the last.
        loss: Gives the loop's loss from the model's output and its arguments by name; None means
            the loss that the model returns.

    Returns:
        Blocks whose ``step`` is the number of the optimizer step, micro-batches merged.

    Raises:
        ValueError: If the store was recorded by something else, with another model or another
            reduction of its loss, or if there is a scale for a loss that nothing scales.
    """
    facts = store.facts or {}
    recorder = ParameterSnapshotCallback.__name__
    if facts.get("recorder") != recorder:
        raise ValueError(
            f"store must have been recorded by {recorder}, got {facts.get('recorder')!r}. Train "
            f"with {recorder}(store)."
        )
    recorded = facts["loss_reduction"]
    if manager.loss_reduction != recorded:
        raise ValueError(
            f"loss_reduction of the manager must be that of the training, got "
            f"{manager.loss_reduction!r} where {recorded!r} was recorded: gradients would be "
            f"another multiple of the examples' own. Write HookManager(model, "
            f"loss_reduction={recorded!r})."
        )
    if loss is None and manager.loss_scale is not None:
        raise ValueError(
            f"loss_scale of the manager must be None where the model's own loss is replayed, got "
            f"{manager.loss_scale!r}: nothing multiplies that loss. Leave it out, or pass loss=."
        )
    parameters = unwrapped(manager.model).named_parameters()
    frozen = checksums((name, p) for name, p in parameters if not p.requires_grad)
    _check_same(facts["frozen"], frozen)
    records = store.iterate(steps, reverse=reverse)
    return _replayed(manager, ((n, own, store.parts(n)) for n, own, _ in records), loss)


def _replayed(
    manager: HookManager,
    records: Iterator[tuple[int, Mapping[str, Tensor], Sequence[Mapping[str, Any]]]],
    loss: ReplayLoss | None,
) -> Iterator[GradientBlock]:
    """Go through records, each step on the model as it was, with the calls of every process."""
    model = unwrapped(manager.model)
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    sums = checksums(buffers.items())
    with _put_back(model):
        for number, tensors, parts in records:
            _check_parts(number, tensors, parts)
            _load(model, tensors, "parameter/", dict(model.named_parameters()))
            blocks = []
            for rank, values in enumerate(parts):
                _check_same(values["buffers"], {name: sums.get(name) for name in values["buffers"]})
                for place, call in enumerate(values["calls"]):
                    _load(model, buffers, "", dict(model.named_buffers()))
                    blocks.append(_run(manager, tensors, call_prefix(rank, place), call, loss))
            del tensors
            names = [name for name in manager.layers if any(name in b.layers for b in blocks)]
            yield merge_blocks(number, blocks, names)


def _run(
    manager: HookManager,
    tensors: Mapping[str, Tensor],
    prefix: str,
    call: Mapping[str, Any],
    loss: ReplayLoss | None,
) -> GradientBlock:
    """Run one forward and backward again.

    Args:
        manager: What captures.
        tensors: The step's tensors.
        prefix: What the names of this call's begin with.
        call: What else is known of it.
        loss: The loop's loss, or None for the model's.

    Returns:
        Its block.
    """
    model = unwrapped(manager.model)
    own = {key[len(prefix) :]: v for key, v in tensors.items() if key.startswith(prefix)}
    device = next(model.parameters()).device
    args = [unpack(value, own, device) for value in call["args"]]
    kwargs = {name: unpack(value, own, device) for name, value in call["kwargs"].items()}
    _load(model, own, "buffer/", dict(model.named_buffers()))
    others = set(call["others"])
    for name, module in model.named_modules():
        module.training = call["training"] != (name in others)
    torch.set_rng_state(own["random/cpu"].clone())
    if "random/cuda" in own and device.type == "cuda":
        torch.cuda.set_rng_state(own["random/cuda"].clone(), device)
    autocast = nullcontext()
    if call["autocast"] is not None:
        autocast = torch.autocast(device.type, dtype=getattr(torch, call["autocast"]))
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(manager.collect())
        stack.callback(_hide(manager.model, frozenset(call["hidden"])))
        with autocast:
            output = manager.model(*args, **kwargs)
            value = _loss_of(output) if loss is None else loss(output, call_fields(args, kwargs))
        value.backward()
    for parameter in model.parameters():
        parameter.grad = None
    return manager.last


def _loss_of(output: Any) -> Tensor:  # noqa: ANN401
    """The loss that a model returned.

    Args:
        output: What it returned.

    Returns:
        The loss.

    Raises:
        ValueError: If there is none.
    """
    value = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(value, Tensor):
        raise ValueError(
            "loss must be given where the model returns none, got an output of type "
            f"{type(output).__name__}. Pass loss=(output, arguments) -> the loop's loss."
        )
    return value


def _check_parts(
    number: int, tensors: Mapping[str, Tensor], parts: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse processes that trained models of their own.

    Args:
        number: The step.
        tensors: Its tensors, the first process's parameters among them.
        parts: What each process recorded.

    Raises:
        ValueError: If their parameters differ.
    """
    if len(parts) == 1:
        return
    own = {
        key.removeprefix("parameter/"): value
        for key, value in tensors.items()
        if key.startswith("parameter/")
    }
    sums = checksums(own.items())
    for rank, part in enumerate(parts[1:], 1):
        if part["parameters"] != sums:
            raise ValueError(
                f"store must be recorded in the training of one model, got parameters of process "
                f"{rank} in step {number} that are not those of process 0. Record each in a folder "
                "of its own."
            )


def _check_same(recorded: Mapping[str, int], found: Mapping[str, int | None]) -> None:
    """Refuse a model whose fixed part is another one.

    Args:
        recorded: Checksums of what the training left alone.
        found: The same of the model.

    Raises:
        ValueError: If one differs.
    """
    for name in {**recorded, **found}:
        if recorded.get(name) != found.get(name):
            raise ValueError(
                f"model must be the one that was trained, got one whose {name} differs (or is "
                "trained in one of them only). Load the weights that the training started from."
            )


def _load(
    model: nn.Module, tensors: Mapping[str, Tensor], prefix: str, own: Mapping[str, Tensor]
) -> None:
    """Write recorded values into a model.

    Args:
        model: The model.
        tensors: Recorded tensors, others among them.
        prefix: What the names of those wanted begin with.
        own: The model's parameters or buffers.

    Raises:
        ValueError: If the model lacks one, or has it in another shape.
    """
    with torch.no_grad():
        for key, value in tensors.items():
            if not key.startswith(prefix):
                continue
            name = key[len(prefix) :]
            target = own.get(name)
            if target is None or target.shape != value.shape:
                got = "none" if target is None else f"shape {tuple(target.shape)}"
                raise ValueError(
                    f"model must have {name} of shape {tuple(value.shape)}, as the trained "
                    f"{type(model).__name__} had, got {got}. Make it as it was trained."
                )
            target.copy_(value)


@contextmanager
def _put_back(model: nn.Module) -> Iterator[None]:
    """Leave a model, and the random state, as they were."""
    changing = [*(p for p in model.parameters() if p.requires_grad), *model.buffers()]
    kept = [(tensor, tensor.detach().clone()) for tensor in changing]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in kept:
                tensor.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def _hide(model: nn.Module, names: frozenset[str]) -> Callable[[], None]:
    """Keep arguments from the model that something kept from it in training, as ids."""

    def hide(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if module is not model or not names:
            return None
        return args, {name: value for name, value in kwargs.items() if name not in names}

    return model.register_forward_pre_hook(hide, with_kwargs=True).remove
