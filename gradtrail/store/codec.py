"""Blocks of gradients as records: what each layer's tensors are, those that layers share once.

The form of a record is ``{layer name: part}``. A part is

* ``{"kind": "linear", "a": key, "g": key, "bias": bool, "groups": int, "constant": key or null}``
* ``{"kind": "embedding", "index": key, "g": key, "rows": int, "padding": int or null}``
* ``{"kind": "scale", "a": key, "g": key, "bias": bool}``
* ``{"kind": "dense", "values": key, "shape": [int, ...], "bias": bool}``
* ``{"kind": "sum", "parts": [part, ...]}``

with the keys of tensors of the record. A key is the name of the layer that came first with that
tensor (``~`` and ``/`` in it written ``~0`` and ``~1``), ``/`` and the tensor's role; in the n-th
part of a sum, ``/n/`` and the role. A tensor that
lies in memory with its last two of three axes exchanged, as a convolution's do, is stored as it
lies, with ``/t`` at the end of its key: it comes back as the same view, so that products of it
are rounded in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradtrail.factors import (
    DenseGradient,
    EmbeddingFactors,
    LayerGradient,
    LinearFactors,
    ScaleFactors,
    SumGradient,
)
from gradtrail.store.held import check_tensor
from gradtrail.store.layout import AbstractKind, Layout, plan_layout

__all__ = ["BlockKind", "Gathered", "gather", "restore", "turned"]

_TURNED = "/t"
_NEVER = torch.device("meta")


class Gathered:
    """The tensors of a block, each once, while its record is written.

    Attributes:
        layout: What they are together.
        tensors: What gives each once, in the layout's order, in the dtype that is stored. One that
            was given is let go of here.
    """

    layout: Layout
    tensors: list[Callable[[], Tensor]]

    def __init__(self, layers: Mapping[str, LayerGradient], dtype: torch.dtype | None) -> None:
        """Go through the layers.

        Args:
            layers: Layer gradients by name.
            dtype: What floating tensors are cast to, or None.
        """
        self._dtype = dtype
        self._found: dict[tuple[object, ...], str] = {}
        self._sources: dict[str, Tensor] = {}
        self._layer = ""
        form = {}
        for name, gradient in layers.items():
            self._layer = name
            form[name] = self._encode(gradient, escaped(name))
        specs = [(key, self._kept(t), tuple(t.shape)) for key, t in self._sources.items()]
        self.layout = plan_layout(specs, form)
        self.tensors = [partial(self._given, key) for key in self.layout.tensors]

    def rows(self, name: str) -> set[int]:
        """Numbers of examples that a layer's tensors have."""
        return rows_of(self.layout, self.layout.form[name])

    def _encode(self, gradient: LayerGradient, place: str) -> dict[str, Any]:
        if isinstance(gradient, SumGradient):
            parts = enumerate(gradient.parts)
            return {"kind": "sum", "parts": [self._encode(p, f"{place}/{n}") for n, p in parts]}
        if isinstance(gradient, LinearFactors):
            constant = gradient.constant_bs
            return {
                "kind": "linear",
                "a": self._note(f"{place}/a", gradient.activation_bsi),
                "g": self._note(f"{place}/g", gradient.output_gradient_bso),
                "bias": bool(gradient.has_bias),
                "groups": int(gradient.groups),
                "constant": None if constant is None else self._note(f"{place}/constant", constant),
            }
        if isinstance(gradient, EmbeddingFactors):
            padding = gradient.padding_idx
            return {
                "kind": "embedding",
                "index": self._note(f"{place}/index", gradient.index_bs),
                "g": self._note(f"{place}/g", gradient.output_gradient_bso),
                "rows": int(gradient.num_embeddings),
                "padding": None if padding is None else int(padding),
            }
        if isinstance(gradient, ScaleFactors):
            return {
                "kind": "scale",
                "a": self._note(f"{place}/a", gradient.activation_bsd),
                "g": self._note(f"{place}/g", gradient.output_gradient_bsd),
                "bias": bool(gradient.has_bias),
            }
        return {
            "kind": "dense",
            "values": self._note(f"{place}/values", gradient.values_bd),
            "shape": [int(side) for side in gradient.shape],
            "bias": bool(gradient.has_bias),
        }

    def _note(self, key: str, tensor: Tensor) -> str:
        """Remember a tensor under a key, or give the key that it has already."""
        check_tensor(self._layer, tensor, files=True)
        tensor = tensor.detach()
        identity = (
            *(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device),
            *(tensor.is_conj(), tensor.is_neg()),
        )
        known = self._found.get(identity) if tensor.numel() else None
        if known is not None:
            return known
        turned = tensor.transpose(1, 2) if tensor.dim() == 3 else tensor
        if turned.is_contiguous() and not tensor.is_contiguous():
            key, tensor = f"{key}{_TURNED}", turned
        self._found[identity] = key
        self._sources[key] = tensor  # held, so that its memory is not given to another one
        return key

    def _kept(self, tensor: Tensor) -> torch.dtype:
        return self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype

    def _given(self, key: str) -> Tensor:
        tensor = self._sources.pop(key)
        return cast(key, tensor, self._kept(tensor))


def escaped(name: str) -> str:
    """A layer's name as keys have it: without ``/``, so that no two keys are the same."""
    return name.replace("~", "~0").replace("/", "~1")


def gather(layers: Mapping[str, LayerGradient], dtype: torch.dtype | None) -> Gathered:
    """Gather a block's tensors.

    Args:
        layers: Layer gradients by name.
        dtype: What floating tensors are cast to, or None.

    Returns:
        Layout and tensors.
    """
    return Gathered(layers, dtype)


def cast(key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor, without a silent infinity.

    Args:
        key: Its name, which begins with its layer's.
        tensor: The tensor.
        dtype: The dtype.

    Returns:
        The tensor, or a copy of that dtype.

    Raises:
        OverflowError: If a finite number does not fit the dtype.
    """
    if tensor.dtype == dtype:
        return tensor
    done = tensor.to(dtype)
    if _may_be_infinite(done) and bool((torch.isinf(done) & ~torch.isinf(tensor)).any()):
        largest = float(tensor[torch.isfinite(tensor)].abs().max())
        raise OverflowError(
            f"{key!r} must fit dtype {str(dtype)[6:]!r}, got {largest:.4g} where "
            f"{torch.finfo(dtype).max:.4g} is the largest number. Store dtype='bfloat16' or "
            "'float32'."
        )
    return done


def _may_be_infinite(tensor: Tensor) -> bool:
    """Whether a tensor holds an infinity or a NaN: a fifth of the time that finding them takes."""
    return bool(tensor.numel()) and not bool(torch.isfinite(torch.stack(tensor.aminmax())).all())


def turned(key: str, tensor: Tensor) -> Tensor:
    """Give a stored tensor with its axes in their order."""
    return tensor.transpose(1, 2) if key.endswith(_TURNED) else tensor


def restore(part: Mapping[str, Any], give: Callable[[str], Tensor]) -> LayerGradient:
    """Make a layer's gradient of a part of a record's form.

    Args:
        part: The part.
        give: Gives a tensor by its key.

    Returns:
        The gradient.

    Raises:
        ValueError: If it is of no known kind.
    """
    kind = part["kind"]
    if kind == "sum":
        return SumGradient(tuple(restore(entry, give) for entry in part["parts"]))
    if kind == "linear":
        constant = None if part["constant"] is None else give(part["constant"])
        return LinearFactors(
            give(part["a"]), give(part["g"]), part["bias"], part["groups"], constant
        )
    if kind == "embedding":
        return EmbeddingFactors(give(part["index"]), give(part["g"]), part["rows"], part["padding"])
    if kind == "scale":
        return ScaleFactors(give(part["a"]), give(part["g"]), part["bias"])
    if kind == "dense":
        return DenseGradient(give(part["values"]), tuple(part["shape"]), part["bias"])
    raise ValueError(f"a layer of kind {kind!r}")


_FIELDS = {
    "linear": {"kind", "a", "g", "bias", "groups", "constant"},
    "embedding": {"kind", "index", "g", "rows", "padding"},
    "scale": {"kind", "a", "g", "bias"},
    "dense": {"kind", "values", "shape", "bias"},
    "sum": {"kind", "parts"},
}


def _check_part(name: str, part: object, *, nested: bool = False) -> None:
    """Refuse a part whose entries have other names or types than this library writes."""
    kind = part.get("kind") if isinstance(part, dict) else None
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None or set(part) != fields or (nested and kind == "sum"):
        raise ValueError(f"layer {name!r} is no layer gradient")
    if kind == "sum":
        if not isinstance(part["parts"], list) or not part["parts"]:
            raise ValueError(f"layer {name!r} is a sum of nothing")
        for entry in part["parts"]:
            _check_part(name, entry, nested=True)
        return
    for field, value in part.items():
        if not _RIGHT[field](value):
            raise ValueError(f"layer {name!r} has {field} {value!r}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


_RIGHT: dict[str, Callable[[Any], bool]] = {
    "kind": lambda value: isinstance(value, str),
    **dict.fromkeys(("a", "g", "index", "values"), lambda value: isinstance(value, str)),
    "constant": lambda value: value is None or isinstance(value, str),
    "bias": lambda value: isinstance(value, bool),
    "groups": lambda value: _is_count(value) and value > 0,
    "rows": _is_count,
    "padding": lambda value: value is None or (type(value) is int and abs(value) < 1 << 62),
    "shape": lambda value: (
        isinstance(value, list) and len(value) > 0 and all(map(_is_count, value))
    ),
}


_DESCRIBED: dict[str, Callable[[Any], bool]] = {
    "kinds": lambda value: (
        isinstance(value, list) and all(isinstance(k, str) and k in _FIELDS for k in value)
    ),
    "shape": _RIGHT["shape"],
    "bias": _RIGHT["bias"],
    "groups": _RIGHT["groups"],
    "sides": lambda value: value is None or (_RIGHT["shape"](value) and len(value) == 2),
}


class BlockKind(AbstractKind):
    """Records that are blocks of gradients."""

    name = "gradients"

    def describe(self, layout: Layout) -> dict[str, Any]:
        """Say which weight each layer of a layout belongs to."""
        if not isinstance(layout.form, dict):
            raise ValueError("its form is no mapping of layers")

        used = set()

        def give(key: str) -> Tensor:
            used.add(key)
            spec = layout.tensors[key]
            return turned(key, torch.empty(spec.shape, dtype=spec.dtype, device=_NEVER))

        found = {}
        for name, part in layout.form.items():
            _check_part(name, part)
            found[name] = describe(restore(part, give))
        if used != set(layout.tensors):
            raise ValueError(f"tensors of no layer: {sorted(set(layout.tensors) - used)[:3]}")
        return found

    def merge(self, layers: dict[str, Any], others: Mapping[str, Any]) -> bool:
        """Add what is told of layers to what is known; whether that was news."""
        changed = False
        for name, other in others.items():
            merged = _merged(name, layers.get(name), other)
            changed |= merged != layers.get(name)
            layers[name] = merged
        return changed

    def check_facts(self, layout: Layout, facts: Mapping[str, Any]) -> None:
        """Refuse facts that are not those of a block."""
        if set(facts) != {"step", "ids", "meta"} or type(facts["step"]) is not int:
            raise ValueError(f"a record with {sorted(facts)}")
        ids = facts["ids"]
        if not isinstance(ids, list) or not all(type(i) in {int, str} for i in ids):
            raise ValueError(f"ids {ids!r:.80}")
        if facts["meta"] is not None and not isinstance(facts["meta"], dict):
            raise ValueError(f"meta {facts['meta']!r:.80}")
        for name, part in layout.form.items():
            if rows_of(layout, part) != {len(ids)}:
                raise ValueError(f"{len(ids)} ids where layer {name!r} has other rows")

    def key(self, facts: Mapping[str, Any]) -> tuple[int, tuple[int | str, ...]]:
        """Look blocks up by step and ids."""
        return facts["step"], tuple(facts["ids"])

    def order(self, facts: Mapping[str, Any], declared: Mapping[str, Any]) -> int:
        """Sort by the first row where ids are rows, else by step."""
        ids = facts["ids"]
        by_row = declared.get("id_scheme") == "index" and ids and type(ids[0]) is int
        return ids[0] if by_row else facts["step"]


def rows_of(layout: Layout, part: Mapping[str, Any]) -> set[int]:
    """Numbers of examples of a layer's tensors."""
    if part["kind"] == "sum":
        return {rows for entry in part["parts"] for rows in rows_of(layout, entry)}
    key = part.get("values", part.get("g"))
    return {layout.tensors[key].shape[0]}


def describe(gradient: LayerGradient) -> dict[str, Any]:
    """Say which weight a gradient belongs to, as the manifest records it."""
    if isinstance(gradient, SumGradient):
        parts = [describe(part) for part in gradient.parts]
        # one weight: where a use is a table's, the sides of another say nothing of it
        same = all(part["sides"] == parts[0]["sides"] for part in parts)
        bias = any(part["bias"] for part in parts)
        sides = parts[0]["sides"] if same else None
        return {**parts[0], "kinds": ["sum"], "bias": bias, "sides": sides}
    groups, sides = 1, None
    if isinstance(gradient, LinearFactors):
        o, i = gradient.output_gradient_bso.shape[2], gradient.activation_bsi.shape[2]
        groups, sides, kind = gradient.groups, [o, i], "linear"
        shape, bias = [o, i // groups], gradient.has_bias
    elif isinstance(gradient, EmbeddingFactors):
        shape, bias = [gradient.num_embeddings, gradient.output_gradient_bso.shape[2]], False
        kind = "embedding"
    elif isinstance(gradient, ScaleFactors):
        shape, bias, kind = [gradient.activation_bsd.shape[2]], gradient.has_bias, "scale"
    else:
        shape, bias, kind = list(gradient.shape), gradient.has_bias, "dense"
    return {"kinds": [kind], "shape": shape, "bias": bias, "groups": groups, "sides": sides}


def _merged(name: str, known: Any, new: Any) -> dict[str, Any]:  # noqa: ANN401
    """Join two descriptions of one layer."""
    for entry in (new,) if known is None else (known, new):
        if not isinstance(entry, dict) or set(entry) != set(_DESCRIBED):
            raise ValueError(f"layer {name!r} is not described by {sorted(_DESCRIBED)}")
        for field, is_right in _DESCRIBED.items():
            if not is_right(entry[field]):
                raise ValueError(f"layer {name!r} has {field} {entry[field]!r}")
    if known is None:
        return new
    for field in ("shape", "bias"):
        if known[field] != new[field]:
            raise ValueError(
                f"layer {name!r} must keep its {field}, got {new[field]} where {known[field]} was "
                "stored"
            )
    return {
        "kinds": sorted({*known["kinds"], *new["kinds"]}),
        "shape": known["shape"],
        "bias": known["bias"],
        "groups": max(known["groups"], new["groups"]),
        "sides": known["sides"] or new["sides"],
    }
