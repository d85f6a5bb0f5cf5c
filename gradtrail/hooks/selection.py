"""Which layers are captured: rules, choices, shared parameters, and the coverage they give."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from gradtrail.errors import UnsupportedLayerError
from gradtrail.hooks.coverage import Coverage, ParameterCoverage
from gradtrail.hooks.layers import LAYERS, AbstractLayerRule, Roles
from gradtrail.hooks.reads import mentions
from gradtrail.hooks.wrapped import (
    bare,
    named_modules,
    named_parameters,
    plain_class,
    register_shapes,
    take_apart,
    whole_shape,
)
from gradtrail.options import near_names

__all__ = ["LayerChoice", "Owner", "Selection", "Unit", "select_layers"]

_Pattern: TypeAlias = str | type[nn.Module] | Callable[[str, nn.Module], bool]
LayerChoice: TypeAlias = _Pattern | Sequence[_Pattern] | None

_SPARSE = re.compile("moe|sparse", re.IGNORECASE)
_ROUTED = "a router chooses the rows it sees, which cannot be assigned to examples"


@dataclass(frozen=True, eq=False)
class Owner:
    """One module's part in a unit.

    Attributes:
        name: Dotted name of the module.
        module: The module.
        rule: Its layer rule.
        roles: Which of its parameters belong to the unit.
        trusted: False where the module's class brings its own ``forward``.
    """

    name: str
    module: nn.Module
    rule: AbstractLayerRule
    roles: Roles
    trusted: bool


@dataclass(frozen=True, eq=False)
class Unit:
    """One captured layer: a parameter (with its bias) and every module that uses it.

    Attributes:
        name: The first owner's name, with ``.bias`` added for a bias on its own.
        owners: The modules whose gradients add up.
    """

    name: str
    owners: tuple[Owner, ...]


@dataclass(frozen=True, eq=False)
class Selection:
    """The captured layers and the fate of every parameter.

    Attributes:
        units: Captured layers in the model's order.
        coverage: Every parameter with its status.
        explicit: Whether the user named layers.
    """

    units: tuple[Unit, ...]
    coverage: Coverage
    explicit: bool

    @property
    def without_kronecker(self) -> tuple[str, ...]:
        """Layers without Kronecker structure, also where their projected gradients are factors."""
        return tuple(
            unit.name
            for unit in self.units
            if any(owner.rule.kronecker_sides(owner.module) is None for owner in unit.owners)
        )


@dataclass(eq=False)
class _Use:
    """One parameter of one module while a selection is being made."""

    module_name: str
    module: nn.Module
    role: str
    rule: AbstractLayerRule | None
    trusted: bool
    reason: str


def select_layers(
    model: nn.Module,
    *,
    layers: LayerChoice = None,
    exclude: LayerChoice = None,
    include_frozen: bool = False,
) -> Selection:
    """Choose the layers to capture.

    Args:
        model: The model.
        layers: Glob patterns on dotted names, module types or a callable ``(name, module)``;
            a pattern that names a container takes everything in it. None: every layer.
        exclude: The same, for what to leave out.
        include_frozen: Whether parameters that are not trained count too.

    Returns:
        The captured layers; modules that share a parameter are chosen or left out together. A
        pattern that matches nothing and a choice that leaves nothing raise ``ValueError``, a layer
        named in full that has no rule ``UnsupportedLayerError``.
    """
    register_shapes(model)
    take_apart(model)
    uses = _parameter_uses(model)
    every = [use for group in uses.values() for use in group]
    wanted = _matching(model, layers, "layers", every) if layers is not None else None
    unwanted = _matching(model, exclude, "exclude", every) if exclude is not None else set()
    names = dict(_first_names(model))
    entries, chosen = [], {}
    for key, group in uses.items():
        entry = _decide(names[key], group, wanted, unwanted, include_frozen=include_frozen)
        entries.append(entry)
        if entry.status == "covered":
            chosen[key] = group
    if wanted is not None and not chosen:
        _refuse_empty(wanted, uses, entries)
    units, layer_of = _build_units(chosen)
    order = {name: place for place, (name, _) in enumerate(named_modules(model))}
    units.sort(key=lambda unit: order[unit.owners[0].name])
    named_entries = [
        ParameterCoverage(entry.name, entry.numel, "covered", layer_of[key])
        if entry.status == "covered"
        else entry
        for key, entry in zip(uses, entries, strict=True)
    ]
    return Selection(tuple(units), Coverage(tuple(named_entries)), layers is not None)


def _first_names(model: nn.Module) -> Iterable[tuple[int, tuple[str, nn.Parameter]]]:
    for name, parameter in named_parameters(model):
        yield id(parameter), (name, parameter)


def _parameter_uses(model: nn.Module) -> dict[int, list[_Use]]:
    """List, for every parameter, the modules that own it and whether a rule serves them."""
    uses: dict[int, list[_Use]] = {id(parameter): [] for parameter in model.parameters()}
    routed = _routed_modules(model)
    for module_name, module in named_modules(model):
        found = LAYERS.find(module)
        for role, parameter in module._parameters.items():  # noqa: SLF001  # the dict itself keeps duplicates
            if parameter is None:
                continue
            rule, trusted, reason = None, True, ""
            if found is None or role not in ("weight", "bias"):
                reason = f"{plain_class(module).__name__} has no rule for {role!r}"
            else:
                rule, cls = found
                trusted = _is_trusted(module, cls)
                reason = rule.refusal(module) or (_ROUTED if module in routed else "")
            uses[id(parameter)].append(_Use(module_name, module, role, rule, trusted, reason))
    return {key: _without_names(group) for key, group in uses.items()}


def _routed_modules(model: nn.Module) -> set[nn.Module]:
    """Experts of sparse mixtures as ``transformers`` before 5 builds them, one module each."""
    mixtures = [m for m in model.modules() if _SPARSE.search(type(m).__name__)]
    groups = (m._modules.get("experts") for m in mixtures)  # noqa: SLF001
    experts = (group if group is None else bare(group) for group in groups)
    return {
        module
        for group in experts
        if isinstance(group, (nn.ModuleList, nn.ModuleDict))
        for module in group.modules()
    }


def _without_names(group: list[_Use]) -> list[_Use]:
    """Leave out containers that only name a parameter of something inside them."""

    def only_names(use: _Use) -> bool:
        inside = any(
            other.module is not use.module and other.module in use.module.modules()
            for other in group
        )
        return inside and not mentions(use.module, use.role)

    return [use for use in group if not use.reason or not only_names(use)]


def _is_trusted(module: nn.Module, cls: type[nn.Module] | None) -> bool:
    """Whether the module runs the forward its rule was written for."""
    if cls is None:
        return plain_class(module).__name__ == "Conv1D"
    return type(module).forward is cls.forward and "forward" not in vars(module)


def _decide(
    named: tuple[str, nn.Parameter],
    group: list[_Use],
    wanted: set[str] | None,
    unwanted: set[str],
    *,
    include_frozen: bool,
) -> ParameterCoverage:
    name, parameter = named
    numel = whole_shape(group[0].module, group[0].role).numel()
    owners = {use.module_name for use in group}
    if not parameter.requires_grad and not include_frozen:
        return ParameterCoverage(name, numel, "left out", reason="frozen")
    if owners & unwanted:
        return ParameterCoverage(name, numel, "left out", reason="excluded")
    if wanted is not None and not owners & wanted:
        return ParameterCoverage(name, numel, "left out", reason="not among the chosen layers")
    reasons = sorted({use.reason for use in group if use.reason})
    if not parameter.is_floating_point():
        reasons.append(f"its dtype {parameter.dtype} has no gradient")
    if reasons:
        return ParameterCoverage(name, numel, "unsupported", reason="; ".join(reasons))
    return ParameterCoverage(name, numel, "covered")


def _build_units(chosen: dict[int, list[_Use]]) -> tuple[list[Unit], dict[int, str]]:
    """Group parameters into layers: weight with bias where neither is shared."""
    shared = {key for key, group in chosen.items() if len(group) > 1}
    units: list[Unit] = []
    layer_of: dict[int, str] = {}
    by_module: dict[int, dict[str, int]] = {}
    for key, group in chosen.items():
        if key in shared:
            first = group[0]
            name = first.module_name if first.role == "weight" else f"{first.module_name}.bias"
            units.append(Unit(name, tuple(_owner(use, {use.role}) for use in group)))
            layer_of[key] = name
        else:
            by_module.setdefault(id(group[0].module), {})[group[0].role] = key
    for roles in by_module.values():
        first = chosen[next(iter(roles.values()))][0]
        name = first.module_name if "weight" in roles else f"{first.module_name}.bias"
        units.append(Unit(name, (_owner(first, set(roles)),)))
        layer_of.update(dict.fromkeys(roles.values(), name))
    return units, layer_of


def _owner(use: _Use, roles: set[str]) -> Owner:
    return Owner(
        use.module_name,
        use.module,
        use.rule,
        Roles("weight" in roles, "bias" in roles),
        use.trusted,
    )


def _matching(model: nn.Module, choice: LayerChoice, option: str, uses: Sequence[_Use]) -> set[str]:
    """Names of the modules that a choice takes."""
    patterns = list(choice) if isinstance(choice, (list, tuple, set, frozenset)) else [choice]
    modules = dict(named_modules(model, remove_duplicate=False))
    taken: set[str] = set()
    for pattern in patterns:
        hits = {name for name, module in modules.items() if _hit(pattern, name, module)}
        inside = {
            name
            for name in modules
            if any(name.startswith(f"{hit}.") for hit in hits if hit) or ("" in hits and name)
        }
        found = {name for name in hits | inside if _owns_parameters(modules[name])}
        if not found:
            shown = pattern.__name__ if isinstance(pattern, type) else str(pattern)
            supported = (use.module_name for use in uses if not use.reason)
            near = near_names(shown, dict.fromkeys(supported))
            raise ValueError(
                f"{option} must match a layer of the model, got {pattern!r}, which matches none. "
                f"Near names: {near}."
            )
        if option == "layers" and isinstance(pattern, str) and pattern in modules:
            _refuse_unsupported(pattern, modules[pattern], uses)
        taken |= found
    first_names = {id(module): name for name, module in reversed(list(named_modules(model)))}
    return {first_names[id(modules[name])] for name in taken}


def _hit(pattern: _Pattern, name: str, module: nn.Module) -> bool:
    """Whether one pattern takes one module itself."""
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(name, pattern)
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    if not callable(pattern):
        raise TypeError(
            "layers and exclude must be glob patterns, module types or callables (name, module), "
            f"got {type(pattern).__name__}."
        )
    return bool(pattern(name, module))


def _owns_parameters(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())  # noqa: SLF001


def _refuse_unsupported(name: str, module: nn.Module, uses: Iterable[_Use]) -> None:
    """Refuse a layer that was asked for by its full name but has no rule."""
    own = [use.reason for use in uses if use.module is module]
    if not all(own) or not own or any(True for _ in module.children()):
        return
    raise UnsupportedLayerError(
        f"layers must name supported layers, got {name!r}: {own[0]}. Leave it out."
    )


def _refuse_empty(
    wanted: set[str], uses: dict[int, list[_Use]], entries: Sequence[ParameterCoverage]
) -> None:
    """Say why none of the layers that were asked for can be captured."""
    reasons = [
        f"{entry.name}: {entry.reason}{' (include_frozen=True)' * (entry.reason == 'frozen')}"
        for entry, group in zip(entries, uses.values(), strict=True)
        if wanted & {use.module_name for use in group}
    ]
    listed = "; ".join(reasons[:5]) or "an empty choice"
    raise ValueError(f"layers must leave something to capture, got none: {listed}.")
