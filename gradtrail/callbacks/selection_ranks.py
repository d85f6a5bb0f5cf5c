r"""Data selection in several processes, as one process on the joined batch would do it.

DDP and FSDP leave the mean over ranks of what the ranks' backwards brought. Rejected examples leave
it through their summed contributions: ``(1 / R) sum_r sum_b c_rb``, one reduction a layer in which
every rank takes part, whether or not it rejects anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from gradtrail.callbacks.selection_layers import TrainedLayer
from gradtrail.callbacks.selection_options import SelectionOptions
from gradtrail.callbacks.selection_removal import (
    add_contribution,
    refuse_other_sum,
    size_bound,
    tolerance_of,
)
from gradtrail.callbacks.selection_scores import target_scores
from gradtrail.distributed import gather_json, gather_rows, rank, reduce_sum, world_size
from gradtrail.errors import CaptureError
from gradtrail.factors import LayerGradient, accumulation_dtype, tensors_of
from gradtrail.hooks.sharded import Shards, is_synchronized, reducing_sizes, refuse_unusual
from gradtrail.hooks.wrapped import communicates, is_spread

__all__ = ["Ranks", "find_ranks"]

_CLOSE = 1e-3
_ROUNDING = {torch.float64: 1e-12, torch.float32: 3e-5}
_LOW_PRECISION = 2e-2


def find_ranks(model: nn.Module) -> Ranks | None:
    """Tell how the gradients of a model come together, or that one process has them all.

    Args:
        model: The model in its wrappers.

    Returns:
        What acts on them, or None for one process without a wrapper.

    Raises:
        RuntimeError: If nobody can tell how they come together.
    """
    sizes, world = reducing_sizes(model), world_size()
    if world == 1 and not sizes:
        return None
    if not sizes:
        raise RuntimeError(
            f"Data selection in {world} processes must be given the model in its wrapper, got a "
            f"{type(model).__name__} without: nobody knows how its gradients are averaged. Pass "
            "what DistributedDataParallel, FullyShardedDataParallel or fully_shard returned, to "
            "the callback and to the manager."
        )
    if sizes != {world}:
        raise RuntimeError(
            f"Data selection must meet gradients averaged over all {world} processes, got averages "
            f"over {', '.join(map(str, sorted(sizes)))}. Wrap the model for the whole group."
        )
    refuse_unusual(model)
    return Ranks(model)


class Ranks:
    """Acts on gradients that are averaged over ranks; every method is called by all of them."""

    def __init__(self, model: nn.Module) -> None:
        """Find out which parts of the gradients are here.

        Args:
            model: The model in its wrappers.
        """
        self._model = model
        self._shards = Shards(model)
        self._hides = communicates(model)  # FSDP hides gradients that are not averaged yet
        # what hidden gradients will lose when they come to light, and what they are multiplied with
        self._pending: dict[tuple[str, str], Tensor] = {}
        self._scales: dict[str, float] = {}
        self._is_fresh = self._was_synchronized = self._has_hidden = False

    def begin(self) -> None:
        """Note before a forward whether anything lies in the gradients."""
        clean = all(parameter.grad is None for parameter in self._model.parameters())
        self._is_fresh = clean and not self._has_hidden
        self._was_synchronized = is_synchronized(self._model)

    def end(self) -> None:
        """Take note that a backward has been dealt with."""
        self._is_fresh = False
        if self._synchronized:
            self._pending.clear()
            self._scales.clear()
        self._has_hidden = self._hides and not self._synchronized

    def forget(self) -> None:
        """Let go of what waited for gradients to be averaged."""
        self._pending.clear()
        self._scales.clear()
        self._has_hidden = False

    def fewest(self, rows: int) -> int:
        """Number of rows that every rank has."""
        return min(gather_json(rows))

    def refuse_different(self, norms: Mapping[str, float]) -> None:
        """Refuse a target gradient that is not the same on every rank.

        Args:
            norms: Its norms on this one, by name.

        Raises:
            CaptureError: If it differs.
        """
        every = gather_json(dict(norms))
        for name in every[0]:
            found = [one.get(name, 0.0) for one in every]
            if max(found) - min(found) > _CLOSE * max(found):
                raise CaptureError(
                    "The target gradient must be the same on every rank, got norms "
                    f"{', '.join(f'{one:.4g}' for one in found)} at {name}. Give every rank the "
                    "same validation batches, or the same target_gradient."
                )

    def batch_scores(
        self, layer: TrainedLayer, gradient: LayerGradient | None, scale: float, *, ghost: bool
    ) -> Tensor | None:
        """Multiply a layer's gradients with those of all ranks' examples.

        Args:
            layer: The layer.
            gradient: Its gradients as the backward brought them, or None where none came.
            scale: What they are multiplied with to be the examples' own.
            ghost: Whether factors are used as they are.

        Returns:
            Inner products with the examples' own, or None where no gradient came. Shape ``[b]``.
        """
        totals = self._summed(layer, gradient, None, scale)
        reduce_sum(list(totals.values()), "target gradients")
        if gradient is None:
            return None
        target = layer.direction(gradient, totals)
        return target_scores(gradient, target, ghost=ghost) * scale

    def rejected(
        self, options: SelectionOptions, scores: Sequence[Tensor]
    ) -> tuple[list[Tensor], int]:
        """Decide on the joined batch which examples are rejected.

        Args:
            options: How.
            scores: Scores of this rank's examples, one tensor a decision. Shapes ``[b]``.

        Returns:
            For each decision True where one of this rank's is rejected, and the examples of all
            ranks.
        """
        own = torch.stack(list(scores), 1)
        sizes = gather_json(len(own))
        joined = gather_rows(own, what="scores of a batch")
        start = sum(sizes[: rank()])
        found = [options.rejected(column)[start : start + len(own)] for column in joined.unbind(1)]
        return found, len(joined)

    def every(self, value: float) -> list[float]:
        """Give a number of each rank's, in their order."""
        return gather_json(value)

    def summed(self, values: Tensor, what: str) -> Tensor:
        """Add tensors of one shape up over ranks; the one that is given is left alone."""
        total = values.clone()
        reduce_sum([total], what)
        return total

    def any_rank(self, *flags: bool) -> list[bool]:
        """Tell of every flag whether any rank has it."""
        return [any(column) for column in zip(*gather_json(flags), strict=True)]

    def check(self, layers: Iterable[TrainedLayer], found: Mapping[str, LayerGradient]) -> bool:
        """Make sure that the gradients are the mean over ranks of their examples' contributions.

        Args:
            layers: The trained layers.
            found: Gradients of those that the backward reached, as it brought them.

        Returns:
            Whether it could be told, which it cannot where something lay in the gradients before.
        """
        synchronized = self._synchronized
        stale = not self._is_fresh or (self._hides and not synchronized)
        if self.any_rank(stale)[0]:
            return False
        for layer in layers:
            gradient = found.get(layer.name)
            totals = self._summed(layer, gradient, None, 1.0)
            if synchronized:
                reduce_sum(list(totals.values()), "gradients")
            bound = torch.tensor(0.0 if gradient is None else size_bound(gradient)).double()
            reduce_sum([bound], "sizes")
            for role, parameter in layer.parameters.items():
                whole = totals[role] / (world_size() if synchronized else 1)
                part = self._shards.part(parameter, whole)
                own = self._local(parameter)
                norms = torch.stack([_square(own - part), _square(own), _square(part)])
                reduce_sum([norms], "norms")
                near = 0.0 if gradient is None else tolerance_of(gradient, parameter)
                error, size, total = norms.sqrt().tolist()
                refuse_other_sum(
                    layer.names[role],
                    (error, size, total),
                    float(bound),
                    max(gather_json(near)),
                )
        return True

    def remove(
        self,
        layers: Mapping[str, TrainedLayer],
        found: Mapping[str, LayerGradient],
        masks: Mapping[str, Tensor],
        factors: Mapping[str, tuple[float, float]],
    ) -> None:
        """Take the rejected examples of all ranks out of every layer's gradient.

        Args:
            layers: The trained layers.
            found: Gradients of those that the backward reached, as it brought them.
            masks: By layer, True where one of this rank's examples is rejected. Shapes ``[b]``.
            factors: By layer, what the kept examples' part is multiplied with, and what earlier
                backwards left; empty for 1 and 1.
        """
        some = self.any_rank(*(bool(mask.any()) for mask in masks.values()))
        left = self.any_rank(*(not bool(mask.all()) for mask in masks.values()))
        for place, (name, layer) in enumerate(layers.items()):
            waits = any((name, role) in self._pending for role in layer.parameters)
            pair = factors.get(name, (1.0, 1.0))
            if some[place] or (waits and self._synchronized) or pair != (1.0, 1.0):
                self._remove(
                    layer, found.get(name), masks[name], pair, nothing_left=not left[place]
                )

    def _remove(
        self,
        layer: TrainedLayer,
        gradient: LayerGradient | None,
        rejected_b: Tensor,
        factors: tuple[float, float],
        *,
        nothing_left: bool,
    ) -> None:
        """Take the rejected examples out of one layer's gradient.

        With ``h`` what the backward brought, ``c`` the rejected examples' part of it and ``g`` what
        lay there before, ``g + h`` is to become ``q g + f (h - c)``, which is
        ``q (g + h) - ((q - f) h + f c)``. What FSDP hides cannot be changed before it is averaged:
        factors ``q`` are multiplied up to ``s`` till then, and what is lost is added up.

        Args:
            layer: The layer.
            gradient: Its gradients as the backward brought them, or None where none came.
            rejected_b: True where one of this rank's examples is rejected. Shape ``[b]``.
            factors: ``f`` and ``q``.
            nothing_left: Whether every example of every rank is rejected.
        """
        rows = rejected_b.nonzero().flatten()
        factor, carry = factors
        scale = carry * self._scales.pop(layer.name, 1.0)
        lost = self._summed(layer, gradient, rows, factor)
        if scale != factor:
            every = self._summed(layer, gradient, None, scale - factor)
            lost = {role: value + every[role] for role, value in lost.items()}
        if self._hides and self._waits(layer, lost, carry):
            self._scales[layer.name] = scale
            return
        synchronized = self._synchronized
        if synchronized:
            reduce_sum(list(lost.values()), "rejected examples")
        for role, parameter in layer.parameters.items():
            if parameter.grad is None:
                continue
            mean = lost[role] / (world_size() if synchronized else 1)
            bound = 0.0
            if nothing_left and gradient is not None:
                bound = size_bound(gradient)
            if scale != 1:
                parameter.grad.mul_(scale)
            self._subtract(parameter, mean, nothing_left=nothing_left, bound=bound)

    def _waits(self, layer: TrainedLayer, lost: dict[str, Tensor], carry: float) -> bool:
        """Add what waited to what is lost; whether all of it has to wait for the next backward."""
        for role in lost:
            waiting = self._pending.pop((layer.name, role), None)
            lost[role] = lost[role] if waiting is None else lost[role] + carry * waiting
            if not self._synchronized:
                self._pending[layer.name, role] = lost[role]
        return not self._synchronized

    @property
    def _synchronized(self) -> bool:
        """Whether the backward averages; DDP looks at that in the forward, FSDP in the backward."""
        return is_synchronized(self._model) if self._hides else self._was_synchronized

    def _summed(
        self, layer: TrainedLayer, gradient: LayerGradient | None, rows: Tensor | None, scale: float
    ) -> dict[str, Tensor]:
        """Add up some examples' contributions, in the whole parameters' shapes.

        Args:
            layer: The layer.
            gradient: Its gradients, or None.
            rows: Numbers of the examples, or None for all.
            scale: What the sum is multiplied with.

        Returns:
            By role, zeros where nothing came.
        """
        totals = {}
        for role, parameter in layer.parameters.items():
            dtype = accumulation_dtype(parameter.dtype)
            device = _device_of(parameter, gradient)
            totals[role] = torch.zeros(layer.shape(role), dtype=dtype, device=device)
        if gradient is not None and (rows is None or len(rows)):
            rows = rows if rows is None else rows.to(next(iter(totals.values())).device)
            for role, terms in layer.total(gradient, rows).items():
                for term in terms:
                    add_contribution(totals[role], term, scale)
        return totals

    def _local(self, parameter: nn.Parameter) -> Tensor:
        """The part of a gradient that is here, in float32 or wider; zeros where there is none."""
        grad = parameter.grad
        if grad is None:
            grad = torch.zeros_like(parameter)
        grad = grad.to_local() if is_spread(grad) else grad.detach()
        grad = grad.to_dense() if grad.is_sparse else grad
        return grad.to(accumulation_dtype(grad.dtype))

    def _subtract(
        self, parameter: nn.Parameter, whole: Tensor, *, nothing_left: bool, bound: float
    ) -> None:
        """Take a whole tensor's part out of a gradient, in place.

        Args:
            parameter: Whose gradient.
            whole: What to take out.
            nothing_left: Whether that is all that the backward brought; rounding is then left out
                as well, of which optimizers that normalise would make a step.
            bound: A size that gradients which cancel have before they do.
        """
        grad = parameter.grad.to_local() if is_spread(parameter.grad) else parameter.grad
        part = self._shards.part(parameter, whole).to(grad.device)
        if grad.is_sparse:
            grad.sub_(part.to_sparse(1))
            return
        left = grad.to(part.dtype) - part
        rounding = _ROUNDING.get(grad.dtype, _LOW_PRECISION)
        if nothing_left and float(left.norm()) <= rounding * (float(grad.norm()) + bound):
            left.zero_()
        grad.copy_(left)


def _square(part: Tensor) -> Tensor:
    return part.double().square().sum().cpu()


def _device_of(parameter: nn.Parameter, gradient: LayerGradient | None) -> torch.device:
    """Where a layer's sums are formed: parameters may rest elsewhere."""
    return parameter.device if gradient is None else next(iter(tensors_of(gradient))).device
