"""What a trajectory method refuses: records that are missing or those of another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from gradtrail.attribution.trajectory_method import StoredTask
from gradtrail.callbacks import OffloadCallback, OptimizerStateCallback
from gradtrail.store import GradientStore, StepStore, StoredBlock

__all__ = [
    "check_follows",
    "check_ids",
    "check_recorded",
    "check_records",
    "check_steps",
    "is_update",
    "recorded_sizes",
    "refuse_live",
    "refused_projection",
    "scale_of",
]

_GRADIENTS = OffloadCallback.__name__
_STATES = OptimizerStateCallback.__name__


def check_records(
    method: str, task: StoredTask, moments: Sequence[str], *, whole: bool = True
) -> None:
    """Check that the records are those of a training run and hold what a method reads.

    Args:
        method: Name of the method.
        task: The records.
        moments: Sides of each step, of ``"before"`` and ``"after"``, whose moments it reads.
        whole: Whether it follows every step to the end, and reads gradients as they were.

    Raises:
        ValueError: If they do not.
    """
    _check_states(method, task.optimizer_states, moments)
    _check_gradients(method, task.train)
    if whole:
        _check_every(method, task)
    known = task.optimizer_states.facts["layers"]
    unknown = [name for name in task.layers if name not in known]
    if unknown:
        raise ValueError(
            f"optimizer_states must hold every layer of train_store, got none of {unknown[:3]}. "
            f"Record both in one training, its optimizer with the layers' parameters, by "
            f"{_STATES}; or leave them out with exclude."
        )


def check_steps(task: StoredTask) -> tuple[list[int], dict[int, int], int]:
    """Find the steps from the first that is scored to the end of the training.

    Args:
        task: The records.

    Returns:
        The steps in order, the row of the result by the store's row of each scored block, and the
        number of rows. A step whose gradients or optimizer are missing raises ``ValueError``.
    """
    records = task.train.records
    stored = sorted({record.step for record in records})
    selected = stored if task.selected_steps is None else sorted(set(task.selected_steps))
    first = selected[0] if selected else (max(stored, default=0) + 1)
    steps = [step for step in stored if step >= first]
    states = [step for step in task.optimizer_states.steps if step >= first]
    _check_whole(steps, states)
    rows, count, scored = {}, 0, set(selected)
    for record in records:
        if record.step in scored:
            rows[record.number] = count
            count += len(record.ids)
    return steps, rows, count


def check_recorded(task: StoredTask, steps: Sequence[int]) -> None:
    """Check that the optimizer's state of some steps is recorded.

    Args:
        task: The records.
        steps: The steps.

    Raises:
        ValueError: If one is missing.
    """
    without = sorted(set(steps) - set(task.optimizer_states.steps))
    if without:
        raise ValueError(
            f"optimizer_states must hold every selected step of train_store, got nothing for "
            f"{_spans(without)}. Record them in the same training with {_STATES}."
        )


def is_update(store: GradientStore) -> bool:
    """Whether a store holds the optimizer's moves of each example, in place of gradients."""
    return "gradients" in store.facts.extra


def check_ids(step: int, ids: Sequence[int | str], values: Mapping[str, Any]) -> None:
    """Check that the gradients and the optimizer's state are of the same step of one run.

    Args:
        step: Its number.
        ids: The examples whose gradients are stored.
        values: What is recorded of the optimizer.

    Raises:
        ValueError: If they name different examples.
    """
    if list(ids) != list(values["ids"]):
        raise ValueError(
            f"train_store and optimizer_states must be of one run, got other examples in step "
            f"{step}: {list(ids)[:3]} and {list(values['ids'])[:3]}. Record both in one training."
        )


def check_follows(
    earlier: tuple[int, Mapping[str, Any]],
    later: tuple[int, Mapping[str, Any]],
    *,
    moments: bool,
) -> None:
    """Check that no step of the training lies between two that follow each other in the records.

    Args:
        earlier: Number of a step, and what is recorded of the optimizer.
        later: The same of the next.
        moments: Whether the second must start from the moments that the first left.

    Raises:
        ValueError: If one does, or the optimizer is not the one of the earlier step.
    """
    (number, before), (next_number, after) = earlier, later
    between = sorted(set(range(number + 1, next_number)) - set(after.get("skipped", ())))
    if between:
        raise ValueError(
            f"optimizer_states must hold every step from the first that is scored to the end, got "
            f"nothing for {_spans(between)}, which no loss scaler skipped. Record them in the same "
            f"training with {_STATES}, or score later steps with selected_steps."
        )
    for name, (_, made, _) in after["before"]["parameters"].items():
        _, left, _ = before["after" if moments else "before"]["parameters"].get(name, (0, made, 0))
        if made != left if moments else made > left + 1:
            raise ValueError(
                f"optimizer_states must be of one optimizer from step to step, got {name} with "
                f"{left} updates {'after' if moments else 'before'} step {number} and {made} "
                f"before step {next_number}. Record every step, and let a training that resumes "
                "load its optimizer."
            )


def scale_of(step: int, stored: Sequence[StoredBlock], values: Mapping[str, Any]) -> list[Tensor]:
    """Give what the gradients of each block are divided by to be what is in the step's gradient.

    What each process divided by, times their number: gradients are averaged over processes.

    Args:
        step: Its number.
        stored: The step's blocks, in order.
        values: What is recorded of the optimizer.

    Returns:
        One number an example, block by block. Float64, shape ``[b]`` each.

    Raises:
        ValueError: If it is not known.
    """
    sizes, processes = [len(block.block.ids) for block in stored], values.get("processes", 1)
    if all("scale" in (block.meta or {}) for block in stored):
        numbers = [processes * float(block.meta["scale"]) for block in stored]
        found = [torch.full((size,), number) for size, number in zip(sizes, numbers, strict=True)]
        return [scales.double() for scales in found]
    recorded = torch.tensor(values["scales"], dtype=torch.float64) * processes
    each = recorded.repeat_interleave(torch.tensor(values["sizes"], dtype=torch.int64))
    if each.shape[0] != sum(sizes):
        raise ValueError(
            f"train_store must say what each gradient is divided by, got nothing in step {step}. "
            f"Capture it with {_GRADIENTS}."
        )
    return list(each.split(sizes))


def recorded_sizes(task: StoredTask) -> dict[str, int]:
    """Entries of each layer, as the optimizer's records have them."""
    layers = task.optimizer_states.facts["layers"]
    return {name: sum(size for _, _, size in layers[name]) for name in task.layers}


def refuse_live(method: str) -> NoReturn:
    """Refuse to score a fixed model.

    Args:
        method: Name of the method.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"method must score a fixed model, got {method!r}, which scores a training run from its "
        f"records. Train with {_GRADIENTS} and {_STATES}, then call attribute_from_cache("
        f"train_store, query_store, method={method!r}, optimizer_states=...)."
    )


def refused_projection(method: str, store: GradientStore, *, masks: bool) -> None:
    """Refuse gradients whose entries are no parameters' entries.

    Args:
        method: Name of the method.
        store: The training gradients.
        masks: Whether entries that a projection of kind ``"mask"`` kept will do.

    Raises:
        ValueError: If the store was captured with another projection.
    """
    projection = store.facts.projection
    if projection is None or (masks and projection["kind"] == "mask"):
        return
    way_out = ' or with Projection(kind="mask")' if masks else ""
    raise ValueError(
        f"train_store must hold single entries of the gradients for method {method!r}, got a "
        f"projection of kind {projection['kind']!r}. Capture it without projection{way_out}."
    )


def _check_states(method: str, states: StepStore | None, moments: Sequence[str]) -> None:
    """Check the optimizer's records.

    Args:
        method: Name of the method.
        states: The records, or None.
        moments: Sides of each step whose moments are read.

    Raises:
        ValueError: If there are none, or they are of another recorder or lack the moments.
    """
    sides = "both" if len(moments) == 2 else (moments[0] if moments else "before")
    recipe = f"{_STATES}(StepStore(...), moments={sides!r})"
    if states is None:
        raise ValueError(
            f"optimizer_states must be given for method {method!r}, got None. Record them while "
            f"the model trains: {recipe}."
        )
    facts = states.facts or {}
    found = facts.get("recorder")
    if found != _STATES:
        what = f"one of {found!r}" if found else "one that nothing was recorded in"
        raise ValueError(
            f"optimizer_states must be a StepStore that {_STATES} wrote, got {what}. Record with "
            f"{recipe}."
        )
    if moments and facts["moments"] not in (sides, "both"):
        raise ValueError(
            f"optimizer_states must hold the moments {' and '.join(moments)} each step for method "
            f"{method!r}, got moments={facts['moments']!r}. Record with {recipe}."
        )


def _check_every(method: str, task: StoredTask) -> None:
    """Check that nothing was left out on purpose, and gradients are what they were.

    Args:
        method: Name of the method.
        task: The records.

    Raises:
        ValueError: If only some steps are recorded, or moves in place of gradients.
    """
    every = {
        f"optimizer_states with {_STATES}": task.optimizer_states.facts["every"],
        f"train_store with {_GRADIENTS}": int(task.train.facts.extra.get("every", 1)),
    }
    for option, number in every.items():
        if number != 1:
            store, recipe = option.split(" with ")
            raise ValueError(
                f"{store} must hold every step for method {method!r}, got every={number}. Record "
                f"it with {recipe}(every=1)."
            )
    if is_update(task.train):
        raise ValueError(
            f"train_store must hold gradients for method {method!r}, got "
            f"{task.train.facts.extra['gradients']}. Capture without HookManager(optimizer=...)."
        )


def _check_gradients(method: str, store: GradientStore) -> None:
    """Check that gradients were captured in training, one record an example.

    Args:
        method: Name of the method.
        store: The training gradients.

    Raises:
        ValueError: If they were not.
    """
    facts = store.facts
    if facts is None or facts.id_scheme == "index":
        raise ValueError(
            f"train_store must hold gradients captured while the model trained for method "
            f"{method!r}, got those of a fixed model. Capture with {_GRADIENTS}."
        )
    if facts.recording != "per_example":
        raise ValueError(
            f"train_store must have a record an example for method {method!r}, got "
            f"recording={facts.recording!r}. Capture with {_GRADIENTS}(recording='per_example')."
        )


def _check_whole(steps: Sequence[int], states: Sequence[int]) -> None:
    """Check that each step has its gradients and its optimizer's state.

    Args:
        steps: Steps whose gradients are stored.
        states: Steps whose optimizer is recorded.

    Raises:
        ValueError: If some have only one of them.
    """
    without = sorted(set(steps) - set(states))
    if without:
        raise ValueError(
            f"optimizer_states must hold every step of train_store from the first that is scored, "
            f"got nothing for {_spans(without)}. Record them in the same training with {_STATES}."
        )
    without = sorted(set(states) - set(steps))
    if without:
        raise ValueError(
            "train_store must hold the gradients of every step from the first that is scored to "
            f"the end, got nothing for {_spans(without)}. Capture them in the same training with "
            f"{_GRADIENTS}(every=1)."
        )


def _spans(steps: Sequence[int]) -> str:
    """Write down step numbers in short."""
    if len(steps) <= 3:
        return ", ".join(map(str, steps)) or "none"
    return f"{steps[0]} to {steps[-1]}, {len(steps)} steps"
