"""The form in which a layer's gradients are kept: factors or written out, and in which dtype.

Which of the two is smaller depends on the positions of a batch. Many processes decide by the first
batch of all data, which each of them runs: none may keep a layer otherwise than another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gradtrail.attribution.cached_options import CacheOptions, CaptureForm
from gradtrail.attribution.data import move_batch
from gradtrail.attribution.pass_cache import CapturePass
from gradtrail.attribution.session import Session
from gradtrail.factors import DenseGradient, LayerGradient, map_tensors, project, to_dense
from gradtrail.hooks import tokens_of
from gradtrail.hooks.step import Form

__all__ = ["KeptForm", "joint_form"]


class KeptForm:
    """Brings gradients into the form they are kept in; a layer keeps the one it had first.

    What is scored while it is captured has that form too, so that scores do not depend on what was
    read back and what was not.
    """

    def __init__(
        self, capture: CaptureForm, dtype: torch.dtype | None, known: Mapping[str, bool]
    ) -> None:
        """Start with what is known of the layers.

        Args:
            capture: The user's choice.
            dtype: Dtype of floating tensors; None leaves it.
            known: By layer, whether it is written out in what is kept already.
        """
        self._form = Form(None, capture)
        self._dtype = dtype
        self._written = dict(known)
        self._cast: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def written(self) -> Mapping[str, bool]:
        """By layer, whether it is written out."""
        return self._written

    def writes(self, name: str, gradient: LayerGradient) -> bool:
        """Tell whether a layer is written out; what is told once holds.

        Args:
            name: The layer.
            gradient: Some of its gradients.

        Returns:
            False where it stays as it is.
        """
        if name not in self._written:
            written = self._form.capture == "materialized" or isinstance(
                self._form.write_out(gradient), DenseGradient
            )
            self._written[name] = written
        return self._written[name]

    def item_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of an entry of this dtype as it is kept."""
        narrowed = self._dtype is not None and dtype.is_floating_point
        return (self._dtype if narrowed else dtype).itemsize

    def of(self, name: str, gradient: LayerGradient) -> LayerGradient:
        """Bring one layer's gradients of one batch into the form.

        Args:
            name: The layer.
            gradient: Its gradients.

        Returns:
            The gradients; layers that share an input still share it.
        """
        if self.writes(name, gradient):
            gradient = to_dense(gradient)
        return gradient if self._dtype is None else map_tensors(gradient, self._narrowed(name))

    def end_batch(self) -> None:
        """Let go of what was remembered of a batch."""
        self._cast.clear()

    def _narrowed(self, name: str) -> Callable[[Tensor], Tensor]:
        """Give what casts the tensors of a layer, each once however many layers share it."""

        def narrow(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() or tensor.dtype == self._dtype:
                return tensor
            if id(tensor) not in self._cast:
                cast = tensor.to(self._dtype)
                if self._dtype == torch.float16 and bool((cast.isinf() & ~tensor.isinf()).any()):
                    raise OverflowError(
                        f"Gradients kept in float16 must be at most 65504, got "
                        f"{float(tensor.abs().max()):.3g} at {name}. Keep them in bfloat16."
                    )
                self._cast[id(tensor)] = (tensor, cast)
            return self._cast[id(tensor)][1]

        return narrow


def joint_form(
    session: Session, request: CapturePass, options: CacheOptions, known: Mapping[str, bool]
) -> KeptForm:
    """Make the form of a pass, the same on every rank.

    Args:
        session: The open session.
        request: The pass that captures.
        options: The user's choice.
        known: By layer, whether it is written out in what is kept already.

    Returns:
        The form; of one process it has yet to see what is not known.
    """
    form = KeptForm(options.capture, options.dtype, known)
    rows = request.rows.whole
    names = [unit.name for unit in session.selection.units]
    if options.capture != "auto" or not rows or all(name in known for name in names):
        return form
    size = min(request.batch_size, len(rows))
    values = move_batch(rows.batch(range(size)), session.device)

    def look(name: str, gradient: LayerGradient) -> None:
        if session.projection is not None:
            gradient = project(name, gradient, session.projection)
        form.writes(name, gradient)

    for losses in request.loss.rounds(session.model, values, 0):
        session.live.run(losses, batch=size, tokens=tokens_of(values), sink=look)
    seen = form.written
    return KeptForm(
        options.capture, options.dtype, {name: seen.get(name, False) for name in (*known, *names)}
    )
