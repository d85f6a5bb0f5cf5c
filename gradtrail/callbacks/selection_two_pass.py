"""Scoring a batch first, and training on its kept rows alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradtrail.callbacks.selection_layers import trained_layers
from gradtrail.callbacks.selection_log import Record, record_of
from gradtrail.callbacks.selection_losses import LossFunction, moved, run_pass, summed_loss
from gradtrail.callbacks.selection_options import ScoringOptions, SelectionOptions, options_from
from gradtrail.callbacks.selection_probe import find_layouts, refuse_uncovered
from gradtrail.callbacks.selection_targets import TargetChoice
from gradtrail.errors import CaptureError
from gradtrail.factors import LayerGradient, merge_uses
from gradtrail.hooks import LivePass, batch_length, first_tensor, select_layers, take_rows
from gradtrail.hooks.fixed import at_rest
from gradtrail.hooks.layout import Layout
from gradtrail.hooks.wrapped import unwrapped

__all__ = ["TwoPassSelection"]


class TwoPassSelection:
    """Chooses the rows of a batch that are worth a training step.

    The first pass is a forward and a backward that stops at output gradients, on the model held
    fixed: no weight gradient is formed, no ``.grad`` and no random state change, and dropout is off
    whatever mode the model is in. The second is the caller's own step on the rows that come
    back, so any loss, optimizer and model of several processes will do. It saves time where
    most rows are rejected; elsewhere ``DataSelectionCallback`` needs one forward less.

    Attributes:
        last_scores: Scores of the last batch's rows, on the CPU. Shape ``[b]``.
        last_dropped: True where a row was rejected. Shape ``[b]``.
        history: One record a batch.
    """

    last_scores: Tensor | None
    last_dropped: Tensor | None
    history: list[Record]

    def __init__(  # noqa: PLR0913  # takes what DataSelectionCallback takes
        self,
        model: nn.Module,
        target: Literal["batch", "fixed", "validation"] = "batch",
        target_gradient: Mapping[str, Tensor] | None = None,
        validation_loader: Iterable[Any] | None = None,
        validation_loss: LossFunction | None = None,
        validation_batches_per_pass: int = 1,
        *,
        loss: LossFunction | None = None,
        scoring_kwargs: Mapping[str, Any] | None = None,
        selection_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Choose the target and who is rejected, as for ``DataSelectionCallback``.

        Args:
            model: The model.
            target: ``"batch"``, ``"fixed"`` or ``"validation"``.
            target_gradient: The gradient for ``"fixed"``, by parameter name.
            validation_loader: Batches for ``"validation"``.
            validation_loss: Their loss; None infers it.
            validation_batches_per_pass: Batches that make one target.
            loss: Loss of the rows, ``(model, batch) -> [b]`` or its sum; None infers it.
            scoring_kwargs: Fields of ``ScoringOptions``.
            selection_kwargs: Fields of ``SelectionOptions``.

        Raises:
            ValueError: If layers are to reject on their own.
            TypeError: If the loss cannot be called.
        """
        self._scoring = options_from("scoring_kwargs", ScoringOptions, scoring_kwargs)
        self._options = options_from("selection_kwargs", SelectionOptions, selection_kwargs)
        if self._options.layer_wise:
            raise ValueError(
                "layer_wise must be False for two passes, got True: a row is trained on or not. "
                "Use DataSelectionCallback."
            )
        if loss is not None and not callable(loss):
            raise TypeError(f"loss must be a callable (model, batch) -> [b], got {loss!r}.")
        self._selection = select_layers(model)
        refuse_uncovered(model, self._selection.coverage)
        self._layers = trained_layers(self._selection.units, model)
        choice = TargetChoice(
            target=target,
            target_gradient=target_gradient,
            validation_loader=validation_loader,
            validation_loss=validation_loss,
            validation_batches_per_pass=validation_batches_per_pass,
        )
        self._model = model
        self._loss = loss or summed_loss
        self._target = choice.build(self._layers)
        self._live: LivePass | None = None
        self.last_scores = self.last_dropped = None
        self.history = []

    def select(self, batch: Any) -> Any:  # noqa: ANN401
        """Score the rows of a batch and keep some.

        Args:
            batch: Tensors in mappings, tuples, lists or dataclasses, a row an example.

        Returns:
            The same structure with the kept rows, or None where none is kept.

        Raises:
            CaptureError: If a score is not finite.
        """
        device = next(self._model.parameters()).device
        there = moved(batch, device)
        if self._live is None:
            inner = unwrapped(self._model)
            self._live = LivePass(inner, self._selection, self._probe(there))
        self._target.prepare(self._model, self._selection, self._live.layouts)
        ghost = self._scoring.score_mode == "ghost"
        found: list[Tensor] = []

        def sink(name: str, gradient: LayerGradient) -> None:
            layer, gradient = self._layers[name], merge_uses(gradient)
            found.append(self._target.scores(layer, gradient, None, 1.0, ghost=ghost).to(device))

        with at_rest(self._model), self._live as live:
            run_pass(live, there, self._loss, "loss", sink)
        nothing = torch.zeros(batch_length(batch))  # no label counts, so no gradient comes
        scores = torch.stack([*found, nothing.to(device)]).cpu().double().sum(0)
        if not bool(torch.isfinite(scores).all()):
            raise CaptureError(
                f"Scores must be finite, got {scores.tolist()}. Check the model and the batch."
            )
        dropped = self._options.rejected(scores)
        self.last_scores, self.last_dropped = scores, dropped
        self.history.append(record_of(len(self.history), scores, [dropped]))
        kept = (~dropped).nonzero().flatten().tolist()
        return take_rows(batch, kept) if kept else None

    def _probe(self, batch: Any) -> Mapping[str, Layout]:  # noqa: ANN401
        main = first_tensor(batch)
        if not batch_length(batch):
            return {}  # the pass says what is missing

        inner = unwrapped(self._model)

        def run(rows: list[int]) -> Tensor:
            return self._loss(inner, take_rows(batch, rows)).sum()

        with at_rest(self._model):
            return find_layouts(inner, self._selection, run, main)
