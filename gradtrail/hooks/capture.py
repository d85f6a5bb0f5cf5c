"""One capture: what one forward and its backward know about the hooked layers.

A capture is made by a forward and referenced by that forward's graph alone; whatever happens to
it (a backward that raised, that never came, or came twice), the next forward starts a new one.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradtrail.errors import CaptureError
from gradtrail.factors import LayerGradient, SumGradient
from gradtrail.hooks.layers import LayerCall
from gradtrail.hooks.layout import BATCH_FIRST, Layout, batch_first, guess_layout
from gradtrail.hooks.provenance import are_picked
from gradtrail.hooks.saved import SavedInput
from gradtrail.hooks.selection import Owner, Unit

__all__ = ["Anchor", "Capture", "HookedModule", "Sink"]

Sink = Callable[[str, LayerGradient], None]
_SHARED_WITHIN = 4  # calls after which an input is no longer looked for: q, k, v and a gate


@dataclass(frozen=True, eq=False)
class HookedModule:
    """One module with its parts in the captured layers.

    Attributes:
        name: Dotted name.
        module: The module.
        memberships: The captured layers it belongs to, each with its part there.
    """

    name: str
    module: nn.Module
    memberships: tuple[tuple[Unit, Owner], ...]

    @property
    def owner(self) -> Owner:
        """Any of its parts: rule and trust are the same in all."""
        return self.memberships[0][1]


@dataclass(frozen=True, eq=False)
class _Use:
    """One call that waits for its output gradient."""

    hooked: HookedModule
    layout: Layout
    saved: SavedInput
    extras: tuple[str, ...]
    place: int
    recomputed: bool


class Anchor(torch.autograd.Function):
    """Copies a tensor that has no graph into one that has, and ends the backward there."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:  # noqa: ANN401
        """Copy."""
        del ctx, anchor
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # noqa: ANN401
        """End here."""
        del ctx, gradient
        return None, None


@dataclass(eq=False)
class Capture:
    """State of one forward and backward.

    Attributes:
        batch: Number of examples.
        tokens: Number of positions of one example in the model's own input.
        sink: Receives each layer's gradient as soon as it is whole.
        live: Whether outputs without a graph are given one (a pass over a fixed model).
        layouts: Known layouts by module name; others are guessed.
        refused: By module name, why its examples could not be told apart.
        start: Asked by every layer that a backward reaches; False: the backward is ignored.
        called: Names of the modules that were called.
        completed: Names of the layers whose gradient is whole.
        keep_graph: Whether another backward through the same graph may come.
        reentrant: Whether a layer of a live pass ran without a graph, as under checkpointing.
        running: Whether a backward is under way.
        ended: Whether a backward came to its end that no other can follow.
    """

    batch: int
    tokens: int
    sink: Sink
    live: bool = False
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    start: Callable[[], bool] = lambda: True
    called: set[str] = field(default_factory=set)
    completed: set[str] = field(default_factory=set)
    keep_graph: bool = False
    reentrant: bool = False
    running: bool = False
    ended: bool = False
    _expected: dict[str, int] = field(default_factory=dict)
    _parts: dict[str, list[LayerGradient]] = field(default_factory=dict)
    _arrived: dict[str, int] = field(default_factory=dict)
    # weak: the graph holds what it needs, and under checkpointing it would be held by it
    _saved: list[weakref.ref[SavedInput]] = field(default_factory=list)
    _recent: deque[weakref.ref[SavedInput]] = field(default_factory=deque)
    _anchor: Tensor = field(default_factory=lambda: torch.zeros((), requires_grad=True))

    def on_call(
        self,
        hooked: HookedModule,
        call: LayerCall,
        output: Tensor,
        *,
        recomputed: bool,
    ) -> Tensor:
        """Take note of one call of a hooked module.

        Args:
            hooked: The module.
            call: What its rule keeps, batch axis as the module saw it.
            output: What the call returned.
            recomputed: Whether this is activation checkpointing running the forward again.

        Returns:
            The output to go on with; another tensor only in a live pass, at the lowest layers.
        """
        if not recomputed:
            self.called.add(hooked.name)
        if not torch.is_grad_enabled():
            self.reentrant = self.reentrant or self.live
            self._expect(hooked, recomputed=recomputed)
            return output
        layout = self._layout(hooked.name, call.inputs)
        if layout.reason is not None:
            self.refused[hooked.name] = layout.reason
            return output
        if not output.requires_grad:
            if not self.live:
                return output
            output = Anchor.apply(output, self._anchor)
        self._expect(hooked, recomputed=recomputed)
        saved = self._save(call)
        use = _Use(hooked, layout, saved, tuple(call.extras), output.output_nr, recomputed)
        # a hook of the node comes after the tensor's own, by which a model may change a gradient
        output.grad_fn.register_prehook(partial(self._on_gradient, use))
        return output

    def _layout(self, name: str, inputs: Tensor) -> Layout:
        """Where one call's input holds the batch."""
        layout = self.layouts.get(name)
        if layout is None:
            layout = guess_layout(tuple(inputs.shape), self.batch, self.tokens)
            if layout.kind == "axis" and self.tokens == self.batch and _counts_positions(inputs):
                layout = Layout("shared")
        if layout.kind == "expand":
            repeated = inputs.shape[0] == self.batch and inputs.stride(0) == 0
            layout = BATCH_FIRST if repeated or self.batch == 1 else Layout("shared")
        if layout == BATCH_FIRST and self.tokens > 1 and are_picked(inputs, self.batch):
            layout = Layout("unknown")
        return layout

    def end_forward(self) -> None:
        """Stop telling shared inputs apart: the forward is over."""
        for saved in _alive(self._recent):
            saved.close()
        self._recent.clear()

    def begin(self, *, keep_graph: bool) -> None:
        """Start a backward, whatever an earlier one through the same graph left behind.

        Args:
            keep_graph: Whether another one may come.
        """
        self.running = True
        self.keep_graph = keep_graph
        self.completed.clear()
        self._parts.clear()
        self._arrived.clear()
        for saved in _alive(self._saved):
            saved.restart()

    def missing(self, units: tuple[Unit, ...]) -> tuple[str, ...]:
        """Names of the layers that no gradient reached."""
        return tuple(unit.name for unit in units if unit.name not in self.completed)

    def finish(self) -> None:
        """End the backward: hand on what waited for calls that brought nothing, let go of all."""
        for name in list(self._parts):
            self._emit(name)
        self.running = False
        self.ended = not self.keep_graph
        self._arrived.clear()
        for saved in _alive(self._saved):
            saved.restart() if self.keep_graph else saved.release()
        if not self.keep_graph:
            self._saved.clear()

    def _expect(self, hooked: HookedModule, *, recomputed: bool) -> None:
        if not recomputed:
            for unit, _ in hooked.memberships:
                self._expected[unit.name] = self._expected.get(unit.name, 0) + 1

    def _save(self, call: LayerCall) -> SavedInput:
        """Save a call's tensors, once for the layers that read the same ones in a row."""
        tensors = (call.inputs, *call.extras.values())
        known = reversed(list(_alive(self._recent)))
        saved = next((one for one in known if one.holds(tensors)), None)
        if saved is None:
            saved = SavedInput(tensors)
            reference = weakref.ref(saved)
            self._saved.append(reference)
            self._recent.append(reference)
            if len(self._recent) > _SHARED_WITHIN:
                for oldest in _alive([self._recent.popleft()]):
                    oldest.close()
        saved.add_reader(tensors, self._anchor)
        return saved

    def _on_gradient(self, use: _Use, gradients: tuple[Tensor | None, ...]) -> None:
        output_gradient = gradients[use.place]
        # an outer call belongs to the outermost backward, which may not have been announced
        if output_gradient is None or not (self.running if use.recomputed else self.start()):
            return
        if torch.is_grad_enabled():
            raise CaptureError(
                "A captured backward must not build a graph of itself, got create_graph=True: the "
                "next one would bring other gradients than an example's own. Take it outside."
            )
        hooked, layout = use.hooked, use.layout
        tensors, derived = use.saved.read(hooked.name)
        with torch.no_grad():
            inputs = batch_first(tensors[0], layout, self.batch, self.tokens)
            gradient = batch_first(output_gradient, layout, self.batch, self.tokens)
            if inputs is None or gradient is None:
                self._refuse_rows(hooked.name, tensors[0], output_gradient)
                return
            if layout.kind != "axis" or layout.axis:
                derived = derived.setdefault("layout", {})
            call = LayerCall(inputs, dict(zip(use.extras, tensors[1:], strict=True)), derived)
            for unit, owner in hooked.memberships:
                part = owner.rule.layer_gradient(hooked.module, call, gradient, owner.roles)
                self._add(unit.name, part)

    def _refuse_rows(self, name: str, inputs: Tensor, gradient: Tensor) -> None:
        """Refuse a layer whose rows do not fit, in training without failing the backward."""
        self.refused[name] = (
            f"it must see one row or axis entry for each of the {self.batch} examples, got input "
            f"{tuple(inputs.shape)} and output gradient {tuple(gradient.shape)}"
        )
        if self.live:
            raise CaptureError(f"{name}: {self.refused[name]}. Leave it out or use batch size 1.")

    def _add(self, name: str, part: LayerGradient) -> None:
        self._parts.setdefault(name, []).append(part)
        self._arrived[name] = self._arrived.get(name, 0) + 1
        if self._arrived[name] == self._expected.get(name):
            self._emit(name)

    def _emit(self, name: str) -> None:
        parts = self._parts.pop(name)
        self.completed.add(name)
        self.sink(name, parts[0] if len(parts) == 1 else SumGradient(tuple(parts)))


def _counts_positions(index: Tensor) -> bool:
    """Whether an index with as many positions as examples counts or relates the positions.

    Such an index, ``[s]`` or ``[s, s]``, serves the whole batch. Read only where it may be either.

    Args:
        index: A table's input, its first axis as long as the batch and as the sequence.

    Returns:
        Whether it goes up by one, or depends on the difference of row and column alone.
    """
    size = index.shape[0]
    if index.is_floating_point() or size < 2:
        return False
    if index.dim() == 1:
        return torch.equal(index - index[0], torch.arange(size, device=index.device))
    if index.dim() != 2 or index.shape[1] != size:
        return False
    return torch.equal(index[1:, 1:], index[:-1, :-1]) and bool((index != index[0, 0]).any())


def _alive(references: Iterable[weakref.ref[SavedInput]]) -> Iterator[SavedInput]:
    for reference in references:
        saved = reference()
        if saved is not None:
            yield saved
