"""An optimizer's state by the names of the parameters it belongs to, at one moment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from gradtrail.errors import StoreError
from gradtrail.files import write_tensors
from gradtrail.hooks.directions import DIRECTIONS, Direction, ParameterState
from gradtrail.hooks.sharded import Shards
from gradtrail.hooks.sharded_state import whole_states
from gradtrail.hooks.wrapped import named_parameters, take_apart
from gradtrail.options import near_names

__all__ = ["OptimizerSnapshot", "innermost_optimizer", "read_state", "state_of"]

_FORMAT = "gradtrail-optimizer-1"


@dataclass(frozen=True, eq=False)
class OptimizerSnapshot:
    """What an optimizer holds for each parameter of a model, copied: later steps do not change it.

    Parameters are told apart by identity, so neither the optimizer's groups nor their order
    matter; a tied parameter has the first of its names.

    Attributes:
        kind: Name of the optimizer's class.
        parameters: State of every parameter that the optimizer holds, by its name in the model.
            Moments are shaped like the parameter.
    """

    kind: str
    parameters: Mapping[str, ParameterState]

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> OptimizerSnapshot:
        """Copy the state of an optimizer, the whole of it where FSDP spreads it over processes.

        Every one of them must ask then.

        Args:
            model: The model that it trains; parameters of others are left out.
            optimizer: The optimizer, or accelerate's wrapper of one, of a supported class.

        Returns:
            The snapshot, on the optimizer's devices.

        Raises:
            ValueError: If the optimizer holds no parameter of the model.
        """
        optimizer = innermost_optimizer(optimizer)
        direction = DIRECTIONS.find(optimizer)
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        take_apart(model)  # the optimizer holds the parts
        here = {
            name: (p, read_state(direction, state_of(optimizer, p), groups[id(p)]))
            for name, p in named_parameters(model)
            if id(p) in groups
        }
        shards = Shards(model)
        states = {
            name: _copied(whole_states(direction, {name: one}, shards)[name])
            for name, one in here.items()
        }
        if not states:
            raise ValueError(
                f"optimizer must hold parameters of the model, got a {direction.kind} of others. "
                "Pass the optimizer that trains it."
            )
        return cls(direction.kind, states)

    @classmethod
    def from_state_dict(
        cls,
        model: nn.Module,
        state_dict: Mapping[str, Any],
        *,
        kind: str = "AdamW",
        names: Sequence[str] | None = None,
    ) -> OptimizerSnapshot:
        """Take the state from an optimizer's ``state_dict()``, as a checkpoint has it.

        A state dict numbers its parameters in the order in which the optimizer was given them,
        group after group, and says neither their names nor its class. Where an optimizer like the
        one that was saved can be made, ``load_state_dict`` and ``of`` need no ``names``.

        Args:
            model: The model.
            state_dict: What the optimizer's ``state_dict()`` gave.
            kind: Name of the optimizer's class.
            names: Names of the parameters in that order; None: the state dict's ``param_names``,
                which an optimizer made from ``named_parameters()`` has.

        Returns:
            The snapshot, copied.

        Raises:
            ValueError: If names are missing or do not fit the state.
        """
        direction = DIRECTIONS.named(kind)
        groups = state_dict["param_groups"]
        if names is None:
            names = [name for group in groups for name in group.get("param_names", ())]
        numbers = [number for group in groups for number in group["params"]]
        if len(names) != len(numbers):
            raise ValueError(
                f"names must have one name for each of the {len(numbers)} parameters in "
                f"state_dict, got {len(names)}. Give them in the order in which the optimizer was "
                "given its parameters, group after group."
            )
        first = {id(parameter): name for name, parameter in named_parameters(model)}
        own = dict(model.named_parameters(remove_duplicate=False)) | dict(named_parameters(model))
        group_of = {number: group for group in groups for number in group["params"]}
        states = {}
        for name, number in zip(names, numbers, strict=True):
            if name not in own:
                raise ValueError(
                    f"names must be names of the model's parameters, got {name!r}. Near names: "
                    f"{near_names(name, own)}."
                )
            state = state_dict["state"].get(number, {})
            found = _copied(read_state(direction, state, group_of[number]))
            _check_shapes(name, own[name], found)
            states[first[id(own[name])]] = found
        return cls(kind, states)

    def state(self, name: str) -> ParameterState:
        """Give one parameter's state.

        Args:
            name: The parameter's name in the model.

        Returns:
            Its state.

        Raises:
            KeyError: If the optimizer does not hold it.
        """
        if name not in self.parameters:
            raise KeyError(
                f"The optimizer must hold the parameter, got {name!r}, which this {self.kind} does "
                f"not. Near names: {near_names(name, self.parameters)}. A tied parameter has the "
                "first of its names."
            )
        return self.parameters[name]

    def save(self, path: str | Path) -> None:
        """Write the snapshot into a safetensors file.

        Args:
            path: The file; one of that name is replaced.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors, facts = to_record(self)
        write_tensors(path, tensors, {"format": _FORMAT, "snapshot": json.dumps(facts)})

    @classmethod
    def load(cls, path: str | Path) -> OptimizerSnapshot:
        """Read a snapshot back.

        Args:
            path: The file.

        Returns:
            The snapshot, on the CPU.

        Raises:
            FileNotFoundError: If there is no such file.
            StoreError: If the file holds no snapshot, or is damaged.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(
                f"path must be a file that OptimizerSnapshot.save() wrote, got {str(path)!r}, "
                "where there is none."
            )
        try:
            with safe_open(Path(path), framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise StoreError(
                        f"{path} must hold an optimizer's snapshot ({_FORMAT}), got "
                        f"{metadata.get('format')!r}. Pass a file that save() wrote."
                    )
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
        except SafetensorError as error:
            raise StoreError(
                f"{path} must be a whole safetensors file, got {_what_it_is(Path(path), error)}."
            ) from error
        return from_record(tensors, json.loads(metadata["snapshot"]))


def innermost_optimizer(optimizer: Optimizer) -> Optimizer:
    """Give the optimizer that steps, out of the wrappers of accelerate and others."""
    inner = getattr(optimizer, "optimizer", None)
    return innermost_optimizer(inner) if isinstance(inner, Optimizer) else optimizer


def state_of(optimizer: Optimizer, parameter: nn.Parameter) -> Mapping[str, Any]:
    """Give what an optimizer keeps for a parameter, not copied; empty before its first step."""
    return optimizer.state.get(parameter, {})


def read_state(
    direction: Direction, state: Mapping[str, Any], group: Mapping[str, Any]
) -> ParameterState:
    """Look at one parameter's state without copying its tensors.

    Args:
        direction: The optimizer's map, which names the moments.
        state: What the optimizer keeps for the parameter; empty before its first step.
        group: The parameter's group.

    Returns:
        The state; the optimizer's next step changes its tensors.

    Raises:
        ValueError: If the state has other moments, or the group lacks hyperparameters, than an
            optimizer of this kind has.
    """
    moments = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    step = state.get("step", 0)
    unknown = sorted(moments.keys() - {*direction.moments, "step"})
    if unknown:
        raise ValueError(
            f"optimizer must be {direction.kind} as its paper has it, got a state with "
            f"{', '.join(unknown)} beside {', '.join(direction.moments)}. Use another optimizer."
        )
    options = {name: _plain(value) for name, value in group.items() if name not in _NAMES_OF_GROUP}
    options = {name: value for name, value in options.items() if value is not _OTHER}
    lacking = [name for name in direction.options if name not in options]
    if lacking:
        raise ValueError(
            f"A group of {direction.kind} must have {', '.join(direction.options)}, got one "
            f"without {', '.join(lacking)}. Name the optimizer's class (kind=)."
        )
    if direction.check is not None:
        direction.check(options)
    moments.pop("step", None)
    return ParameterState(int(step), moments, options)


def to_record(snapshot: OptimizerSnapshot) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Take a snapshot apart into tensors and what JSON can hold.

    Args:
        snapshot: The snapshot.

    Returns:
        Tensors under ``"<moment>/<parameter>"``, and the rest: kind, groups' hyperparameters, and
        by parameter its group's number, its steps and the names of its moments.
    """
    groups: list[dict[str, Any]] = []
    tensors, parameters = {}, {}
    for name, state in snapshot.parameters.items():
        options = {key: _as_json(value) for key, value in state.options.items()}
        if options not in groups:
            groups.append(options)
        parameters[name] = [groups.index(options), state.step, list(state.moments)]
        tensors |= {f"{moment}/{name}": value for moment, value in state.moments.items()}
    return tensors, {"kind": snapshot.kind, "groups": groups, "parameters": parameters}


def from_record(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> OptimizerSnapshot:
    """Put a snapshot together again.

    Args:
        tensors: As ``to_record`` gives them; others beside them do not matter.
        facts: The same.

    Returns:
        The snapshot, which holds the tensors themselves.
    """
    groups = [
        {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
        for group in facts["groups"]
    ]
    states = {
        name: ParameterState(
            step, {moment: tensors[f"{moment}/{name}"] for moment in moments}, groups[group]
        )
        for name, (group, step, moments) in facts["parameters"].items()
    }
    return OptimizerSnapshot(facts["kind"], states)


def _what_it_is(path: Path, error: SafetensorError) -> str:
    """Say what a file is that is no safetensors file, and what to do."""
    with path.open("rb") as file:
        start = file.read(4)
    if start == b"PK\x03\x04" or start[:1] == b"\x80":  # torch.save writes a zip, or did so bare
        return (
            "a pickle, such as a Trainer's optimizer.pt. Read it with torch.load(..., "
            "weights_only=True) and load_state_dict into an optimizer made as in training, then "
            "call OptimizerSnapshot.of(model, optimizer) or from_state_dict"
        )
    return f"{error}. Write it again"


_NAMES_OF_GROUP = ("params", "param_names")
_OTHER = object()


def _plain(value: Any) -> Any:  # noqa: ANN401
    """A hyperparameter as a number, a truth value, a text or a tuple of these."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        entries = tuple(_plain(entry) for entry in value)
        return _OTHER if _OTHER in entries else entries
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return float(value) if isinstance(value, Real) else _OTHER


def _as_json(value: Any) -> Any:  # noqa: ANN401
    return list(value) if isinstance(value, tuple) else value


def _copied(state: ParameterState) -> ParameterState:
    moments = {name: value.detach().clone() for name, value in state.moments.items()}
    return replace(state, moments=moments)


def _check_shapes(name: str, parameter: nn.Parameter, state: ParameterState) -> None:
    """Refuse moments that cannot belong to a parameter.

    Args:
        name: The parameter's name.
        parameter: The parameter.
        state: What is taken for its state.

    Raises:
        ValueError: If a moment has another shape.
    """
    for moment, value in state.moments.items():
        if value.dim() and value.shape != parameter.shape:
            raise ValueError(
                f"names must be in the order of state_dict's parameters, got {name!r} of shape "
                f"{tuple(parameter.shape)} at a {moment} of shape {tuple(value.shape)}. Give them "
                "in the order in which the optimizer was given its parameters."
            )
