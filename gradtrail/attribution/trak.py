r"""TRAK: influence in the space of randomly projected gradients.

Park et al., 2023, section 3, https://arxiv.org/abs/2303.14186, with the model's loss as its output
function unless the user passes another loss.

Suffixes: n training example, q query, b example of a batch, k feature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradtrail.attribution.data import Rows
from gradtrail.attribution.inner_product import collect_queries
from gradtrail.attribution.kept import KeptFactors, kept_budget
from gradtrail.attribution.losses import Loss
from gradtrail.attribution.measures import Demands, Measures
from gradtrail.attribution.method import METHODS, AbstractAttributor, MethodEntry, Task
from gradtrail.attribution.scoring import Scorer
from gradtrail.attribution.session import Batch, Session
from gradtrail.attribution.shares import on_every
from gradtrail.attribution.stored import StoredRows
from gradtrail.attribution.stored_model import entries_of
from gradtrail.attribution.trak_features import (
    SOLVE_BYTES,
    Features,
    check_fits,
    solve_features,
)
from gradtrail.factors import LayerGradient, accumulation_dtype, dense_size, tensors_of
from gradtrail.kronecker import Damping

__all__ = ["TRAKAttributor"]


@dataclass(frozen=True, kw_only=True)
class TRAKAttributor(AbstractAttributor):
    r"""Scores :math:`\phi_n^T (\Phi^T \Phi + \lambda I)^{-1} \phi_q`, averaged over checkpoints.

    The features :math:`\phi` are the projected gradients of all layers one after the other, so
    :math:`\Phi` has a row a training example.

    Attributes:
        shares_rows: True: each of many processes scores its share.
        damping: What is added to the spectrum of ``Phi^T Phi``; None means 0.1 of its mean
            eigenvalue.
        relative_damping: Whether ``damping`` is a multiple of the mean eigenvalue.
    """

    shares_rows: ClassVar[bool] = True

    damping: float | None = None
    relative_damping: bool = True

    def __post_init__(self) -> None:
        """Check the options."""
        Damping.of(self.damping, relative=self.relative_damping)

    @property
    def name(self) -> str:
        """The registered name."""
        return "trak"

    @property
    def averaged(self) -> bool:
        """Several checkpoints: their scores are averaged as they are."""
        return True

    def demands(self, measures: Measures, session: Session) -> Demands:
        """Count the queries' features, the matrix of features and the kept training features."""
        k = sum(layer.entries for layer in measures.layers.values())
        kept = measures.train_bytes <= kept_budget(None, session.device)
        return Demands(
            query_bytes=4 * k * measures.num_query,
            curvature_bytes=SOLVE_BYTES * k * k,
            kept_bytes=measures.train_bytes if kept else 0,
            train_passes=1 if kept else 2,
        )

    def score(self, session: Session, task: Task) -> tuple[Tensor, Tensor | None]:
        """Score every training example against every query.

        Args:
            session: The open session, with a projection.
            task: Data, losses and batch sizes.

        Returns:
            Scores ``[n, q]`` or ``[n, s, q]`` on the CPU, and lengths ``[n]`` for the latter; with
            ``top_k`` the highest, ``[k, q]``, and their rows.
        """
        _check_projected(session)
        q = len(task.query)
        if not task.train.total:
            rows = torch.zeros((0, q) if task.top_k is not None else 0, dtype=torch.int64)
            return torch.zeros((0, 0, q) if task.per_token else (0, q)), rows
        queries = collect_queries(session, task, norms=False, form=_written)
        kept = _make_kept(session, task.train)
        features = Features()
        _capture(session, task.train, task.loss, task.batch_size, features, kept)
        layers = features.solve(queries.layers, self._damping, task.train.total)
        scorer = Scorer(task, layers, q, norms=False)
        if kept is not None and _all_kept(kept, task.train):
            for name, pieces in kept.take():
                for place, gradient in pieces:
                    scorer.add(place, name, gradient)
            scorer.close_all()
        else:
            session.capture(
                task.train,
                task.loss,
                batch_size=task.batch_size,
                phase="train",
                sink=scorer.add,
                done=scorer.close,
            )
        return scorer.result(None)

    def self_score(self, session: Session, rows: Rows, loss: Loss, batch_size: int) -> Tensor:
        """Score every training example against itself.

        Args:
            session: The open session, with a projection.
            rows: The training data.
            loss: Its loss.
            batch_size: Rows a batch.

        Returns:
            At least 0. Shape ``[n]``.
        """
        _check_projected(session)
        if not rows.total:
            return torch.zeros(0)
        features = Features()
        _capture(session, rows, loss, batch_size, features, None)
        return _self_scores(session, (rows, loss), batch_size, features, self._damping)

    @property
    def _damping(self) -> Damping:
        return Damping.of(self.damping, relative=self.relative_damping)


def _self_scores(
    session: Session,
    data: tuple[Rows, Loss],
    batch_size: int,
    features: Features,
    damping: Damping,
) -> Tensor:
    """Squared norms of the features turned by the inverse Cholesky factor. Shape ``[n]``."""
    rows, loss = data
    gram = features.gram()
    empty = gram.new_zeros(0, gram.shape[0])
    factor_kk = solve_features(gram, empty, damping, rows.total)[1]
    scores = torch.zeros(len(rows), dtype=torch.float64)

    def close(place: Batch) -> None:
        phi_bk = features.take(place).to(factor_kk)
        turned_kb = torch.linalg.solve_triangular(factor_kk, phi_bk.t(), upper=False)
        scores[place.start : place.start + place.size] = turned_kb.square().sum(0).cpu()

    session.capture(rows, loss, batch_size=batch_size, phase="train", sink=features.add, done=close)
    return scores


def _capture(
    session: Session,
    rows: Rows,
    loss: Loss,
    batch_size: int,
    features: Features,
    kept: KeptFactors | None,
) -> None:
    """Run the first pass over the training data, and add up what the ranks found."""
    sinks: list[Callable[[Batch, str, LayerGradient], None]] = [features.add]
    ends: list[Callable[[Batch], None]] = [features.close]
    if kept is not None:
        sinks.append(kept.add)
        ends.append(kept.close)

    def sink(place: Batch, name: str, gradient: LayerGradient) -> None:
        for one in sinks:
            one(place, name, gradient)

    def done(place: Batch) -> None:
        for end in ends:
            end(place)

    session.capture(rows, loss, batch_size=batch_size, phase="train", sink=sink, done=done)
    if rows.whole is not None:
        features.join(session.device)


def _all_kept(kept: KeptFactors, rows: Rows) -> bool:
    """Whether the rows' gradients are kept, on every rank: else none uses what it kept."""
    found = kept.is_whole
    if rows.whole is not None:
        found = on_every("whole training features", flag=found)
    if not found:
        kept.drop()
    return found


def _make_kept(session: Session, rows: Rows) -> KeptFactors | None:
    """Keep projected factors for the second stage; what is stored already is read again."""
    if session.cache is not None or isinstance(rows, StoredRows):
        return None
    return KeptFactors(len(rows), kept_budget(None, session.device))


def _written(
    gradient: LayerGradient, num_train: int, num_query: int, left: int
) -> tuple[bool, int]:
    """Write the queries' features out, whatever they take: a solve needs them so."""
    del num_train, left
    dtype = accumulation_dtype(*(tensor.dtype for tensor in tensors_of(gradient)))
    return True, dense_size(gradient) * num_query * dtype.itemsize


def _check_projected(session: Session) -> None:
    """Refuse whole gradients as features, and stored ones whose matrix would not fit.

    Args:
        session: The session.

    Raises:
        ValueError: If the gradients are not projected.
    """
    stored = session.stored
    if session.projection is None:
        got, to = "None", ""
        if stored is not None:
            got, to = "stores that were captured without one", " to what captures them"
        raise ValueError(
            f"projection must be given for method 'trak', got {got}: its features are projected "
            f'gradients. Pass projection=Projection(kind="dense", dim=512){to}, or kind "factored" '
            'or "mask"; a layer with no more entries than that stays whole.'
        )
    if stored is not None:
        check_fits(sum(entries_of(facts) for facts in stored.layers.values()), session.device)


METHODS["trak"] = MethodEntry(TRAKAttributor, {}, checkpoints=True)
