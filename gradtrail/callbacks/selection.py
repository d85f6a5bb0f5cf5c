"""Leaving examples out of the batch that they are in, while it is trained on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradtrail.callbacks.base import AbstractStepCallback
from gradtrail.callbacks.selection_layers import lightened, trained_layers
from gradtrail.callbacks.selection_log import Record, averaged, record_of
from gradtrail.callbacks.selection_losses import LossFunction
from gradtrail.callbacks.selection_options import ScoringOptions, SelectionOptions, options_from
from gradtrail.callbacks.selection_own import OwnGradients
from gradtrail.callbacks.selection_probe import (
    find_layouts,
    forward_hook,
    refuse_uncovered,
    rows_of_call,
)
from gradtrail.callbacks.selection_ranks import Ranks, find_ranks
from gradtrail.callbacks.selection_removal import check_sum, form_left_out, remove_all
from gradtrail.callbacks.selection_renormalize import Renormalization
from gradtrail.callbacks.selection_targets import BatchTarget, TargetChoice
from gradtrail.distributed import guarded
from gradtrail.errors import GradTrailWarning
from gradtrail.factors import GradientBlock, LayerGradient
from gradtrail.hooks import HookManager, OptimizerStep, select_layers
from gradtrail.hooks.deferred import DeferredWeights
from gradtrail.hooks.fixed import at_rest
from gradtrail.hooks.step import ScaledLayers
from gradtrail.hooks.wrapped import communicates, named_modules, unwrapped

__all__ = ["DataSelectionCallback"]

_NOT_FINITE = (
    "A score is not finite, so nothing is taken out of such a batch: its gradients stay as the "
    "backward left them."
)


class DataSelectionCallback(AbstractStepCallback):
    """Scores every example of a batch and takes the rejected ones out of the gradients.

    An example's score is the inner product of its own gradient with a target gradient: positive
    where a step along it lowers the target's loss. It happens inside ``backward()``: when that
    returns, every ``.grad`` is what a backward over the kept examples alone would have left, and
    what earlier micro-batches left there is untouched. Forward values and random state are those
    of a run without the callback.

    In several processes the manager has the model in its wrapper (DDP, FSDP, ``fully_shard``), the
    callback in it or without. All ranks' batches are then one: the target is the sum over ranks,
    shares are of the joined batch, and every gradient is the mean over ranks without the rejected.
    ``validation_loader`` gives every rank the same batches.

    Attributes:
        last_scores: Scores of the last backward's examples, on the CPU. Shape ``[b]``; with
            ``layer_wise``, by layer name.
        last_dropped: True where an example was rejected, in the same form.
        last_ids: Their ids.
        history: One record a backward.
    """

    last_scores: Tensor | dict[str, Tensor] | None
    last_dropped: Tensor | dict[str, Tensor] | None
    last_ids: tuple[int | str, ...]
    history: list[Record]

    def __init__(  # noqa: PLR0913  # spelled out by its issue
        self,
        model: nn.Module,
        target: Literal["batch", "fixed", "validation"] = "batch",
        target_gradient: Mapping[str, Tensor] | None = None,
        validation_loader: Iterable[Any] | None = None,
        validation_loss: LossFunction | None = None,
        renormalize: bool = False,  # noqa: FBT001, FBT002
        validation_batches_per_pass: int = 1,
        *,
        scoring_kwargs: Mapping[str, Any] | None = None,
        selection_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Choose the target and who is rejected.

        A trained parameter without a rule, or options that do not fit, are refused here.

        Args:
            model: The model that the manager captures.
            target: ``"batch"`` (sum of the batch's own gradients), ``"fixed"`` or ``"validation"``.
            target_gradient: The gradient for ``"fixed"``, by parameter name.
            validation_loader: Batches for ``"validation"``, gone through again and again.
            validation_loss: Their loss, ``(model, batch) -> [b]`` or its sum; None infers it.
            renormalize: Whether a mean loss is made that of the kept examples alone.
            validation_batches_per_pass: Batches that make the target of one forward.
            scoring_kwargs: Fields of ``ScoringOptions``.
            selection_kwargs: Fields of ``SelectionOptions``.

        Raises:
            TypeError: If ``renormalize`` is no bool.
        """
        self._scoring = options_from("scoring_kwargs", ScoringOptions, scoring_kwargs)
        self._options = options_from("selection_kwargs", SelectionOptions, selection_kwargs)
        if not isinstance(renormalize, bool):
            raise TypeError(f"renormalize must be True or False, got {renormalize!r}.")
        selection = select_layers(model)
        refuse_uncovered(model, selection.coverage)
        choice = TargetChoice(
            target=target,
            target_gradient=target_gradient,
            validation_loader=validation_loader,
            validation_loss=validation_loss,
            validation_batches_per_pass=validation_batches_per_pass,
        )
        self._given = self._model = model
        self._layers = trained_layers(selection.units, model)
        self._target = choice.build(self._layers)
        self._renormalize = renormalize
        self._renormalization = Renormalization()
        self._own = OwnGradients()
        self._manager: HookManager | None = None
        self._ranks: Ranks | None = None
        self._deferred: DeferredWeights | None = None
        self._stack = ExitStack()
        self._has_probed = self._is_checked = False
        self._warned: set[str] = set()
        self._unlogged: list[Record] = []
        self.last_scores = self.last_dropped = None
        self.last_ids = ()
        self.history = []

    def on_attach(self, manager: HookManager) -> None:
        """Watch the model of a capture.

        Args:
            manager: The manager; it must capture every trained parameter, unprojected.

        Raises:
            RuntimeError: If the callback is attached already.
            ValueError: If the manager captures something else, or its loss is no mean to make anew.
        """
        if self._manager is not None:
            raise RuntimeError("DataSelectionCallback must be attached once, got a second capture.")
        if not _holds(manager.model, self._given):
            raise ValueError(
                "model must be the one that is captured, got a "
                f"{type(self._given).__name__} beside the manager's {type(manager.model).__name__}."
            )
        if manager.projection is not None:
            raise ValueError(
                "Data selection must have whole gradients, got a projection. Capture without."
            )
        if manager.form.transform is not None:
            raise ValueError(
                "Data selection must have plain gradients, got optimizer=, which makes update "
                "directions of them. Capture without."
            )
        if self._renormalize and manager.loss_reduction == "sum":
            raise ValueError(
                "renormalize must go with a mean loss, got loss_reduction='sum', which divides by "
                "nothing. Leave it out, or say how the loss is reduced."
            )
        self._model = manager.model
        self._ranks = find_ranks(self._model)
        refuse_uncovered(self._model, manager.coverage)
        self._layers = trained_layers(manager.selection.units, self._model)
        self._manager = manager
        manager.keeps_unscaled = True
        with ExitStack() as stack:
            stack.callback(self._let_go)
            # before the manager's own hook, which starts the capture
            handle = self._model.register_forward_pre_hook(
                forward_hook(self._model, self._before_forward), with_kwargs=True, prepend=True
            )
            stack.callback(handle.remove)
            if self._ranks is None:
                layers = self._layers.values()
                self._own.watch(manager, (p for one in layers for p in one.parameters.values()))
                self._deferred = DeferredWeights(manager, self._own.is_heard_by_others)
                # callbacks before this one may look at the gradients
                if manager.callbacks[0] is self and not isinstance(self._target, BatchTarget):
                    self._deferred.watch(manager.selection.units, stack)
            self._stack = stack.pop_all()

    def on_step(self, block: GradientBlock) -> None:
        """Score the examples of a backward and take the rejected ones out.

        Args:
            block: Their gradients.
        """
        if self._ranks is not None:
            # the wrapper ends its own work on the gradients first
            engine = torch.autograd.Variable._execution_engine  # noqa: SLF001  # as DDP does
            engine.queue_callback(partial(self._select_together, block))
            return
        try:
            self._select(block)
        finally:  # after an error; else nothing is left
            form_left_out(self._layers, _as_brought(block), self._own, self._deferred)
            self._own.forget()
            self._deferred.forget()

    def on_optimizer_step(self, step: OptimizerStep) -> None:
        """Start counting rejections anew."""
        del step
        self._renormalization.restart()
        if self._ranks is not None:
            self._ranks.forget()

    def on_detach(self) -> None:
        """Leave the model as it was."""
        self._stack.close()

    def logs(self) -> Mapping[str, float]:
        """Give means over the backwards since the last call: kept share and score quantiles."""
        records, self._unlogged = self._unlogged, []
        return averaged(records)

    def _let_go(self) -> None:
        self._own.close()
        self._manager.layouts.clear()
        self._manager.keeps_unscaled = False
        self._manager = self._ranks = self._deferred = None
        self._has_probed = self._is_checked = False
        self._renormalization.forget()

    def _before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Bring the target up to date; on the first batch, find out where layers hold it."""
        manager, ranks = self._manager, self._ranks
        waits = ranks is not None and communicates(self._model)
        with guarded("preparing a data selection", model_communicates=waits):
            if not self._has_probed:
                inner = unwrapped(self._model)
                run, main = rows_of_call(inner, args, kwargs)
                rows = len(main) if ranks is None else ranks.fewest(len(main))
                with at_rest(self._model):
                    found = find_layouts(inner, manager.selection, run, main, rows)
                manager.layouts.update(found)
                self._has_probed = True
            self._target.prepare(self._model, manager.selection, manager.layouts)
            if ranks is not None:
                ranks.refuse_different(self._target.norms())
                ranks.begin()

    def _select(self, block: GradientBlock) -> None:
        refuse_uncovered(self._model, self._manager.coverage)
        scale, layers = float(self._manager.scale), _as_brought(block)
        layers = {name: lightened(gradient) for name, gradient in layers.items()}
        if self._renormalize:
            self._renormalization.begin(self._manager)
        found = [self._score(name, gradient, scale) for name, gradient in layers.items()]
        table = torch.stack([values.to(found[0].device) for values in found]).cpu().double()
        scores, total = dict(zip(layers, table, strict=True)), table.sum(0)
        dropped = dict.fromkeys(self._layers, torch.zeros_like(total, dtype=torch.bool))
        factors: Mapping[str, tuple[float, float]] = {}
        if scale and bool(torch.isfinite(total).all()):
            self._check(layers)
            dropped = self._reject(scores, total)
            factors = self._renormalization.factors(dropped) if self._renormalize else {}
        elif scale:
            self._warn("finite", _NOT_FINITE)
        remove_all(self._layers, layers, (dropped, factors), self._own, self._deferred)
        self._remember(block, scores, total, dropped)

    def _select_together(self, block: GradientBlock) -> None:
        """Do the same for all ranks' examples."""
        with guarded("data selection"):
            refuse_uncovered(self._model, self._manager.coverage)
            scale, layers = float(self._manager.scale), _as_brought(block)
            if self._renormalize:
                self._renormalization.begin(self._manager, self._ranks)
            scores, total = self._scores_together(layers, scale, len(block.ids))
            dropped = {name: torch.zeros_like(total, dtype=torch.bool) for name in self._layers}
            moves, odd = self._ranks.any_rank(scale != 0, not bool(torch.isfinite(total).all()))
            if moves and not odd:
                self._is_checked |= not self._is_checked and self._ranks.check(
                    self._layers.values(), layers
                )
                dropped = self._reject_together(scores, total)
            elif moves:
                self._warn("finite", _NOT_FINITE)
            if not odd:  # also without a rejection: something may wait to be taken out
                again = self._renormalization
                factors = again.factors(dropped, self._ranks) if self._renormalize else {}
                self._ranks.remove(self._layers, layers, dropped, factors)
            self._ranks.end()
            self._remember(block, scores, total, dropped)

    def _scores_together(
        self, layers: Mapping[str, LayerGradient], scale: float, count: int
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Scores of this rank's examples, by layer that a gradient reached and summed: [b]."""
        found, ghost = {}, self._scoring.score_mode == "ghost"
        for name, layer in self._layers.items():
            gradient = layers.get(name)
            if isinstance(self._target, BatchTarget):
                values = self._ranks.batch_scores(layer, gradient, scale, ghost=ghost)
            elif gradient is not None:
                values = self._target.scores(layer, gradient, None, scale, ghost=ghost)
            if gradient is not None:
                found[name] = values.cpu().double()
        total = torch.stack(list(found.values())).sum(0) if found else torch.zeros(count).double()
        return found, total

    def _reject_together(self, scores: Mapping[str, Tensor], total: Tensor) -> dict[str, Tensor]:
        """By layer, which of this rank's examples are rejected from the joined batch."""
        nothing = torch.zeros_like(total)
        wise = self._options.layer_wise
        decisions = [scores.get(name, nothing) for name in self._layers] if wise else [total]
        found, joined = self._ranks.rejected(self._options, decisions)
        self._warn_of_count(joined)
        masks = found if wise else found * len(self._layers)
        return dict(zip(self._layers, masks, strict=True))

    def _score(self, name: str, gradient: LayerGradient, scale: float) -> Tensor:
        """Scores of one layer: [b]."""
        layer = self._layers[name]
        own = {role: self._own.part(p) for role, p in layer.parameters.items()}
        ghost = self._scoring.score_mode == "ghost"
        return self._target.scores(layer, gradient, own, scale, ghost=ghost)

    def _check(self, layers: Mapping[str, LayerGradient]) -> None:
        """Make sure once that what will be taken out is what is in the gradients."""
        if not self._is_checked:
            for name, gradient in layers.items():
                check_sum(self._layers[name], gradient, self._own)
            self._is_checked = self._deferred.enabled = True

    def _reject(self, scores: Mapping[str, Tensor], total: Tensor) -> dict[str, Tensor]:
        """By layer, which examples are rejected."""
        options = self._options
        self._warn_of_count(len(total))
        if options.layer_wise:
            nothing = torch.zeros_like(total, dtype=torch.bool)
            rejected = {name: options.rejected(values) for name, values in scores.items()}
            return {name: rejected.get(name, nothing) for name in self._layers}
        return dict.fromkeys(self._layers, options.rejected(total))

    def _remember(
        self,
        block: GradientBlock,
        scores: dict[str, Tensor],
        total: Tensor,
        dropped: dict[str, Tensor],
    ) -> None:
        layer_wise = self._options.layer_wise
        masks = [dropped[name] for name in scores]  # of the layers that a gradient reached
        self.last_ids = block.ids
        self.last_scores = scores if layer_wise else total
        self.last_dropped = dict(zip(scores, masks, strict=True)) if layer_wise else masks[0]
        record = record_of(block.step, total, masks if layer_wise else masks[:1])
        self.history.append(record)
        self._unlogged.append(record)

    def _warn_of_count(self, size: int) -> None:
        options = self._options
        if options.threshold_mode != "hard" and not options.count(size):
            self._warn(
                "count",
                f"threshold={options.threshold} of a batch of {size} comes to no example, so "
                "none is rejected. Take larger batches or a larger share.",
            )

    def _warn(self, what: str, message: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(message, GradTrailWarning, stacklevel=2)


def _as_brought(block: GradientBlock) -> Mapping[str, LayerGradient]:
    """A block's gradients as the backward of the loop's loss brought them."""
    layers = block.layers
    return layers.unscaled if isinstance(layers, ScaledLayers) else layers


def _holds(outer: nn.Module, inner: nn.Module) -> bool:
    """Whether a module is another one, or a wrapper around it."""
    return any(module is inner for name, module in named_modules(outer) if not name)
