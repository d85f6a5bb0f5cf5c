"""Root-mean-square normalisation: torch's, and the Llama-style classes of ``transformers``.

Suffixes: b example, s position, d parameter entry.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrail.errors import UnsupportedLayerError
from gradtrail.factors import DenseGradient, ScaleFactors
from gradtrail.hooks.layers._base import (
    LAYERS,
    AbstractLayerRule,
    LayerCall,
    LayerCase,
    Roles,
    statistics_dtype,
)
from gradtrail.hooks.layers._features import feature_positions, scale_to_parameters
from gradtrail.hooks.wrapped import whole_shape

__all__ = ["RMSNormRule", "StyledRMSNormRule"]

# by module and dtype: whether its output at weight one, less that at zero, was seen to be _unit
_IS_UNIT: weakref.WeakKeyDictionary[nn.Module, dict[torch.dtype, bool]] = (
    weakref.WeakKeyDictionary()
)
_UNIT_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}

_T5_STYLE = (
    "T5LayerNorm",
    "Pix2StructLayerNorm",
    "Pop2PianoLayerNorm",
    "SwitchTransformersLayerNorm",
    "UdopLayerNorm",
)


class RMSNormRule(AbstractLayerRule):
    """Rule of ``nn.RMSNorm`` with any number of normalised axes."""

    elementwise = True

    def layer_gradient(
        self, module: nn.RMSNorm, call: LayerCall, output_gradient: Tensor, roles: Roles
    ) -> ScaleFactors:
        """Pair the normalised inputs with the output gradients."""
        del roles
        axes = len(module.normalized_shape)

        def normalised(inputs: Tensor) -> Tensor:
            wide = inputs.to(statistics_dtype(inputs.dtype))
            unit = F.rms_norm(wide, module.normalized_shape, None, module.eps)
            return feature_positions(unit, axes)

        key = ("rms_norm", tuple(module.normalized_shape), module.eps)
        g_bsd = feature_positions(output_gradient, axes)
        return ScaleFactors(call.once(key, normalised), g_bsd)

    def to_parameters(self, module: nn.RMSNorm, dense: DenseGradient) -> dict[str, Tensor]:
        """Unfold the normalised axes."""
        return scale_to_parameters(dense, module.normalized_shape)

    def cases(self) -> Iterable[LayerCase]:
        """One or two normalised axes, inputs of two to four, with and without an epsilon."""
        yield _case("2d", (5,), (3, 5))
        yield _case("3d", (5,), (3, 4, 5))
        yield _case("4d", (5,), (3, 2, 4, 5))
        yield _case("two-axes", (4, 5), (3, 2, 4, 5))
        yield _case("eps", (5,), (3, 4, 5), eps=0.5)


class StyledRMSNormRule(AbstractLayerRule):
    """Rule of the classes that model code defines for itself, recognised by their names.

    They differ in the epsilon's name and place, in casts, and in whether the weight starts from
    zero (``1 + weight``); but all are affine in the weight entry by entry. So what the weight
    multiplies is the module's own output at weight one less that at weight zero. The first
    call is checked against autograd like that of every class with its own ``forward``.
    """

    elementwise = True

    def refusal(self, module: nn.Module) -> str | None:
        """Gated variants read a second tensor."""
        parameters = inspect.signature(type(module).forward).parameters
        if len(parameters) > 2:
            return f"the forward of {type(module).__name__} takes more than one input"
        return None

    def layer_gradient(
        self, module: nn.Module, call: LayerCall, output_gradient: Tensor, roles: Roles
    ) -> ScaleFactors:
        """Pair what the weight multiplies with the output gradients."""
        del roles
        unit_bsd = call.once(("rms", id(module)), lambda inputs: _slope(module, inputs))
        g_bsd = feature_positions(output_gradient, 1)
        if g_bsd.shape[-1] != module.weight.shape[0]:
            raise UnsupportedLayerError(
                f"{type(module).__name__} must scale the last axis by its weight of "
                f"{module.weight.shape[0]} entries, got {g_bsd.shape[-1]} there. Leave it out."
            )
        return ScaleFactors(unit_bsd, g_bsd)

    def to_parameters(self, module: nn.Module, dense: DenseGradient) -> dict[str, Tensor]:
        """The weight has one axis."""
        return scale_to_parameters(dense, whole_shape(module, "weight"))

    def cases(self) -> Iterable[LayerCase]:
        """None here: the classes live in model code; the tests run those of ``transformers``."""
        return ()


def _case(
    label: str, normalized: Sequence[int], shape: Sequence[int], *, eps: float | None = None
) -> LayerCase:
    return LayerCase(
        f"rms_norm-{label}",
        lambda: nn.RMSNorm(list(normalized), eps=eps, dtype=torch.float64),
        lambda: (torch.randn(*shape, dtype=torch.float64),),
    )


def _slope(module: nn.Module, inputs: Tensor) -> Tensor:
    """Output at weight one less output at weight zero, with statistics in float32 or wider."""
    wide = inputs.to(statistics_dtype(inputs.dtype))
    eps = vars(module).get("variance_epsilon", vars(module).get("eps"))
    known = _IS_UNIT.setdefault(module, {}).get(wide.dtype) if isinstance(eps, float) else False
    if known:
        return feature_positions(_unit(wide, eps), 1)
    zero = torch.zeros(module.weight.shape, dtype=wide.dtype, device=wide.device)
    rise = _with_weight(module, zero + 1, wide) - _with_weight(module, zero, wide)
    if known is None and rise.numel():
        limit = _UNIT_TOLERANCE[wide.dtype] * rise.abs().amax()
        _IS_UNIT[module][wide.dtype] = bool((_unit(wide, eps) - rise).abs().amax() <= limit)
    return feature_positions(rise, 1)


def _unit(inputs: Tensor, eps: float) -> Tensor:
    """``x / rms(x)`` in two sweeps, which most of these classes spell out in six."""
    norms = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True)
    return inputs * norms.square_().div_(inputs.shape[-1]).add_(eps).rsqrt_()


def _with_weight(module: nn.Module, weight: Tensor, inputs: Tensor) -> Tensor:
    """Run the class's forward with another weight, past all hooks; the module stays untouched."""
    twin = object.__new__(type(module))  # FSDP's classes would call the constructor
    state: Mapping[str, Any] = vars(module)
    vars(twin).update(state)
    vars(twin).pop("weight", None)  # where FSDP puts the whole one for a pass
    vars(twin)["_parameters"] = {"weight": weight}
    return type(module).forward(twin, inputs)


def _is_styled(module: nn.Module) -> bool:
    """Tell the classes by name, the one parameter, and the lack of children."""
    name = type(module).__name__
    weight = module._parameters.get("weight")  # noqa: SLF001  # not a computed attribute
    return (
        ("RMSNorm" in name or name.endswith(_T5_STYLE))
        and len(module._parameters) == 1  # noqa: SLF001
        and weight is not None
        and weight.dim() == 1
        and not any(True for _ in module.children())
    )


LAYERS.register(nn.RMSNorm)(RMSNormRule())
LAYERS.register_if(_is_styled)(StyledRMSNormRule())
