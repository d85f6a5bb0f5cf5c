r"""Which Fisher: whose labels the curvature's gradients are taken at.

The Fisher is :math:`F = (1/N) \sum_b E_{y \sim p(y | x_b)} g_b(y) g_b(y)^T`, the gradients taken
at labels of the model's own (Martens, 2020, sec. 5 and 11, https://arxiv.org/abs/1412.1193). Its
losses are such that the mean over examples of the sum over backwards of squared gradients is that
expectation, or an unbiased estimate of it; with the data's labels it is the empirical Fisher.

FSDP lets whole parameters go after the first backward of a forward. A model in parts therefore runs
a forward for every backward, each with one class's or draw's loss: the numbers are the same.

Suffixes: b example, s position, c class, k backward, t position whose label counts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradtrail.attribution.losses import AbstractLoss, Loss, outputs_of
from gradtrail.attribution.outputs import ModelOutputs, widened
from gradtrail.attribution.shares import most_of
from gradtrail.hooks import batch_length
from gradtrail.hooks.wrapped import communicates
from gradtrail.options import check_choice, check_positive

__all__ = ["MAX_EXPECTED_OUTPUTS", "FisherKind", "Sampler", "expects_few_outputs", "fisher_loss"]

FisherKind: TypeAlias = Literal["empirical", "expected", "sampled"]
Sampler: TypeAlias = Callable[[nn.Module, Any, torch.Generator], Any]

_Forward: TypeAlias = Callable[[], Tensor | tuple[Tensor, ...]]

MAX_EXPECTED_OUTPUTS = 128
_CHUNK_ENTRIES = 1 << 22  # of the cumulative probabilities held at once
_BELOW_ONE = 1 - 2**-52


def fisher_loss(
    kind: FisherKind,
    loss: Loss,
    *,
    draws: int = 1,
    seed: int = 0,
    stage: str = "covariance",
    sampler: Sampler | None = None,
) -> AbstractLoss:
    """Make the loss whose squared gradients a curvature is the mean of.

    Args:
        kind: ``"empirical"``: the data's labels; ``"expected"``: exactly, over the model's
            classes or outputs, one backward each; ``"sampled"``: labels the model draws.
        loss: The training loss.
        draws: Labels drawn for every position, a backward each.
        seed: Seed of the private generators.
        stage: What the draws are for; another stage draws afresh.
        sampler: ``(model, batch, generator) -> batch`` with drawn labels, for losses of the
            user's own. Its generator is one a batch, so its draws depend on where batches begin: on
            their size and the number of ranks. On a model in parts every rank must run it alike.

    Returns:
        The loss. Built-in draws depend on seed, stage, draw and row number alone, not on batch
        size, padding or device.

    Raises:
        ValueError: If an option has no effect with this kind, or the kind cannot do with the loss.
        TypeError: If the sampler cannot be called.
    """
    check_choice("fisher", kind, ("empirical", "expected", "sampled"))
    check_positive("fisher_draws", draws)
    if sampler is not None and not callable(sampler):
        raise TypeError(
            "label_sampler must be a callable (model, batch, generator) -> batch, got "
            f"{type(sampler).__name__}."
        )
    if kind != "sampled" and (draws != 1 or sampler is not None):
        got = f"fisher_draws={draws}" if sampler is None else "label_sampler"
        raise ValueError(
            f"fisher={kind!r} must go without draws, got {got}. Leave it out or pass "
            'fisher="sampled".'
        )
    if kind == "empirical":
        return loss
    if sampler is not None:
        return _SamplerLoss(loss, draws, seed, stage, sampler)
    if not loss.inferred:
        raise ValueError(
            f"fisher={kind!r} must know the outputs that the loss compares, got a loss of your own "
            f"({loss.description}). Leave loss out, pass label_sampler with "
            'fisher="sampled", or pass fisher="empirical".'
        )
    return _ExpectedLoss(loss) if kind == "expected" else _SampledLoss(loss, draws, seed, stage)


def expects_few_outputs(outputs: ModelOutputs) -> bool:
    """Whether ``fisher="expected"`` serves these outputs, in a backward for each."""
    if outputs.kind == "cross_entropy" and outputs.logits.dim() != 2:
        return False
    return math.prod(outputs.logits.shape[1:]) <= MAX_EXPECTED_OUTPUTS


class _ExpectedLoss(AbstractLoss):
    """One backward a class, weighted by the root of its probability; or one an output."""

    several = True

    def __init__(self, loss: Loss) -> None:
        """Take the built-in loss."""
        self._loss = loss
        self.description = "expectation over the model's outputs"

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:  # noqa: ANN401
        r"""Run the model.

        Args:
            model: The model.
            batch: One batch, on the model's device.

        Returns:
            :math:`-\sqrt{p_{bc}} \log p_{bc}` with the root held constant, 0 where the label does
            not count; for squared error the outputs themselves. Shape ``[k, b]``.

        Raises:
            ValueError: If the outputs are too many for a backward each, or classes of positions.
        """
        outputs = outputs_of(self._loss, model, batch, option='fisher="expected"')
        if not expects_few_outputs(outputs):
            raise ValueError(
                'fisher="expected" must have one set of at most '
                f"{MAX_EXPECTED_OUTPUTS} outputs an example, a backward each, got outputs "
                f'{tuple(outputs.logits.shape)}. Pass fisher="sampled".'
            )
        values = widened(outputs.logits)
        if outputs.kind == "squared_error":
            return values.reshape(values.shape[0], -1).t()
        logs_bc = values.log_softmax(-1)
        roots_bc = (logs_bc.detach() / 2).exp() * (outputs.labels != -100).unsqueeze(1)
        return torch.where(roots_bc > 0, -roots_bc * logs_bc, 0.0).t()

    def rounds(
        self,
        model: nn.Module,
        batch: Any,  # noqa: ANN401
        start: int,
    ) -> Iterator[_Forward]:
        """One forward, the same for any row numbers; of a model in parts one an output."""
        del start
        if not communicates(model):
            yield partial(self, model, batch)
            return
        counts: list[int] = []
        yield partial(self._one, model, batch, 0, counts)
        # positions make outputs too, and other ranks' rows may be longer
        for number in range(1, most_of("outputs of a batch", counts[-1])):
            yield partial(self._one, model, batch, number, counts)

    def _one(
        self,
        model: nn.Module,
        batch: Any,  # noqa: ANN401
        number: int,
        counts: list[int],
    ) -> tuple[Tensor]:
        """The loss of one output, 0 for one that there is not. Notes how many there are."""
        values_kb = self(model, batch)
        counts.append(len(values_kb))
        return (values_kb[number] if number < len(values_kb) else values_kb[0] * 0,)


class _SampledLoss(AbstractLoss):
    """The built-in loss at labels drawn from the model's own predictive distribution."""

    several = True

    def __init__(self, loss: Loss, draws: int, seed: int, stage: str) -> None:
        """Take the built-in loss and what seeds the draws."""
        self._loss = loss
        self._draws = draws
        self._seed = seed
        self._stage = stage
        self.description = f"labels sampled from the model, {draws} a position"

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:  # noqa: ANN401
        """The losses of a batch that starts at row 0. Shape ``[k, b]``."""
        return torch.stack(self._losses(model, batch, 0, range(self._draws)))

    def rounds(
        self,
        model: nn.Module,
        batch: Any,  # noqa: ANN401
        start: int,
    ) -> Iterator[_Forward]:
        """One forward with the draws of the rows from ``start`` on; in parts one a draw."""
        size = 1 if communicates(model) else self._draws
        for first in range(0, self._draws, size):
            yield partial(self._losses, model, batch, start, range(first, first + size))

    def _losses(
        self,
        model: nn.Module,
        batch: Any,  # noqa: ANN401
        start: int,
        draws: range,
    ) -> tuple[Tensor, ...]:
        """Losses at drawn labels, over the root of their number. For each draw ``[b]``."""
        outputs = outputs_of(self._loss, model, batch, option='fisher="sampled"')
        values = widened(outputs.logits)
        if outputs.kind == "squared_error":
            values = values.reshape(values.shape[0], -1)
            uniform = self._uniform(start, [values.shape[1]] * values.shape[0], draws)
            noise = torch.special.ndtri(uniform.clamp_(min=2**-54)).to(values)
            targets = values.detach() + noise.view(len(draws), *values.shape)
            drawn = [(values - target).square().sum(1) / 2 for target in targets]
        else:
            drawn = self._cross_entropies(values, outputs.labels, start, draws)
        return tuple(losses_b / math.sqrt(self._draws) for losses_b in drawn)

    def _cross_entropies(
        self, logits: Tensor, labels: Tensor, start: int, draws: range
    ) -> list[Tensor]:
        """Cross-entropy at drawn labels where the given ones count. For each draw ``[b]``."""
        labels_bs = labels.reshape(labels.shape[0], -1)
        logits_pc = logits.reshape(-1, logits.shape[-1])
        counted_bs = labels_bs != -100
        uniform_kt = self._uniform(start, counted_bs.sum(1).tolist(), draws).to(logits.device)
        places_t = counted_bs.flatten().nonzero()[:, 0]
        drawn_kp = torch.full(
            (len(draws), labels_bs.numel()), -100, dtype=torch.long, device=logits.device
        )
        drawn_kp[:, places_t] = _inverted(logits_pc.detach(), places_t, uniform_kt)
        logs_pc = logits_pc.log_softmax(-1)
        rows = [F.nll_loss(logs_pc, drawn_p, reduction="none") for drawn_p in drawn_kp]
        return [values_p.view(labels_bs.shape).sum(1) for values_p in rows]

    def _uniform(self, start: int, counts: list[int], draws: range) -> Tensor:
        """Numbers below one, from a generator of its own for every row. Shape ``[k, t]``."""
        rows = [
            torch.cat(
                [
                    torch.rand(
                        count,
                        generator=_generator(self._seed, self._stage, draw, start + row),
                        dtype=torch.float64,
                    )
                    for row, count in enumerate(counts)
                ]
            )
            for draw in draws
        ]
        return torch.stack(rows).clamp_(max=_BELOW_ONE)


class _SamplerLoss(AbstractLoss):
    """Any loss at labels that the user's sampler draws, a forward and backward each."""

    def __init__(self, loss: Loss, draws: int, seed: int, stage: str, sampler: Sampler) -> None:
        """Take the loss, the sampler, and what seeds the draws."""
        self._loss = loss
        self._draws = draws
        self._seed = seed
        self._stage = stage
        self._sampler = sampler
        name = getattr(sampler, "__qualname__", type(sampler).__name__)
        self.description = f"{loss.description}, labels sampled by {name}, {draws} a position"

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:  # noqa: ANN401
        """The loss at the labels that the batch has."""
        return self._loss(model, batch)

    def rounds(
        self,
        model: nn.Module,
        batch: Any,  # noqa: ANN401
        start: int,
    ) -> Iterator[_Forward]:
        """Draw labels, then give the forward that uses them, as often as asked.

        Args:
            model: The model.
            batch: One batch, on the model's device.
            start: Number of its first row in the data set.

        Yields:
            What returns the losses over the root of the number of draws. Shape ``[b]``.

        Raises:
            ValueError: If the sampler returns another number of rows.
        """
        for draw in range(self._draws):
            with torch.no_grad():
                generator = _generator(self._seed, self._stage, draw, start)
                drawn = self._sampler(model, batch, generator)
            rows, wanted = batch_length(drawn), batch_length(batch)
            if rows != wanted:
                raise ValueError(
                    f"label_sampler must return the batch it was given with other labels, {wanted} "
                    f"rows, got {rows} rows in a {type(drawn).__name__}."
                )
            yield lambda drawn=drawn: self._loss(model, drawn) / math.sqrt(self._draws)


def _inverted(logits_pc: Tensor, places_t: Tensor, uniform_kt: Tensor) -> Tensor:
    """Draw classes by inverting the cumulative probabilities.

    Args:
        logits_pc: Logits of all positions. Shape ``[p, c]``.
        places_t: The positions to draw at.
        uniform_kt: Numbers below one.

    Returns:
        Classes. Shape ``[k, t]``.
    """
    classes = logits_pc.shape[1]
    # classes rarer than the last digit of a running sum could not be drawn in float32
    wide = torch.float32 if logits_pc.device.type == "mps" else torch.float64
    size = max(1, _CHUNK_ENTRIES // classes)
    chunks = zip(places_t.split(size), uniform_kt.split(size, dim=1), strict=True)
    drawn = [_searched(logits_pc[part].to(wide), numbers) for part, numbers in chunks]
    return torch.cat(drawn, dim=1).clamp_(max=classes - 1)


def _searched(logits_tc: Tensor, uniform_kt: Tensor) -> Tensor:
    sums_tc = logits_tc.softmax(-1).cumsum(-1)
    marks_tk = uniform_kt.t().to(sums_tc) * sums_tc[:, -1:]
    return torch.searchsorted(sums_tc, marks_tk.contiguous(), right=True).t()


def _generator(seed: int, stage: str, draw: int, row: int) -> torch.Generator:
    """A generator on the CPU that depends on these alone."""
    text = f"{seed}\x1f{stage}\x1f{draw}\x1f{row}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
