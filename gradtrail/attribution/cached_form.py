"""The form in which a layer's gradients are kept: factors or written out, and in which dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gradtrail.attribution.cached_options import CaptureForm
from gradtrail.factors import DenseGradient, LayerGradient, map_tensors, to_dense
from gradtrail.hooks.step import Form

__all__ = ["KeptForm"]


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
