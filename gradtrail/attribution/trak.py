r"""TRAK: influence in the space of randomly projected gradients.

Park et al., 2023, section 3, https://arxiv.org/abs/2303.14186, with the model's loss as its output
function unless the user passes another loss.

Suffixes: n training example, q query, b example of a batch, k feature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gradtrail.attribution.data import Rows
from gradtrail.attribution.inner_product import collect_queries
from gradtrail.attribution.kept import KeptFactors, kept_budget
from gradtrail.attribution.losses import Loss
from gradtrail.attribution.measures import Demands, Measures
from gradtrail.attribution.memory import free_bytes
from gradtrail.attribution.method import METHODS, AbstractAttributor, MethodEntry, Task
from gradtrail.attribution.scoring import Scorer
from gradtrail.attribution.session import Batch, Session
from gradtrail.attribution.stored import StoredRows
from gradtrail.attribution.stored_model import entries_of
from gradtrail.errors import CurvatureError
from gradtrail.factors import (
    DenseGradient,
    LayerGradient,
    accumulation_dtype,
    dense_size,
    tensors_of,
    to_dense,
)
from gradtrail.kronecker import Damping

__all__ = ["TRAKAttributor", "solve_features"]

_ROWS_AT_ONCE = 256  # the matrix of features is read and written once for so many
_SOLVE_BYTES = 20  # an entry: the sum in float32, and in float64 the sum and its factor
_ROUNDING = 100  # units in the last place of the largest eigenvalue


@dataclass(frozen=True, kw_only=True)
class TRAKAttributor(AbstractAttributor):
    r"""Scores :math:`\phi_n^T (\Phi^T \Phi + \lambda I)^{-1} \phi_q`, averaged over checkpoints.

    The features :math:`\phi` are the projected gradients of all layers one after the other, so
    :math:`\Phi` has a row a training example.

    Attributes:
        damping: What is added to the spectrum of ``Phi^T Phi``; None means 0.1 of its mean
            eigenvalue.
        relative_damping: Whether ``damping`` is a multiple of the mean eigenvalue.
    """

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
            curvature_bytes=_SOLVE_BYTES * k * k,
            kept_bytes=measures.train_bytes if kept else 0,
            train_passes=1 if kept else 2,
        )

    def score(self, session: Session, task: Task) -> tuple[Tensor, Tensor | None]:
        """Score every training example against every query.

        Args:
            session: The open session, with a projection.
            task: Data, losses and batch sizes.

        Returns:
            Scores ``[n, q]`` or ``[n, s, q]`` on the CPU, and lengths ``[n]`` for the latter.
        """
        _check_projected(session)
        q = len(task.query)
        if not len(task.train):
            return torch.zeros((0, 0, q) if task.per_token else (0, q)), torch.zeros(0)
        queries = collect_queries(session, task, norms=False, form=_written)
        kept = _make_kept(session, task.train)
        features = _Features()
        _capture(session, task.train, task.loss, task.batch_size, features, kept)
        layers = features.solve(queries.layers, self._damping, len(task.train))
        scorer = Scorer(task, layers, q, norms=False)
        if kept is not None and kept.is_whole:
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
        if not len(rows):
            return torch.zeros(0)
        features = _Features()
        _capture(session, rows, loss, batch_size, features, None)
        return _self_scores(session, (rows, loss), batch_size, features, self._damping)

    @property
    def _damping(self) -> Damping:
        return Damping.of(self.damping, relative=self.relative_damping)


def solve_features(
    gram_kk: Tensor, phi_qk: Tensor, damping: Damping, num_examples: int
) -> tuple[Tensor, Tensor]:
    r"""Solve :math:`(\Phi^T \Phi + \lambda I) x = \phi_q` in float64.

    Args:
        gram_kk: The sum over training examples of their features' outer products.
        phi_qk: Right-hand sides.
        damping: What is added to the spectrum.
        num_examples: Number of training examples ``n``.

    Returns:
        Solutions ``[q, k]``, and the lower Cholesky factor ``[k, k]``; both float64.

    Raises:
        CurvatureError: If the matrix is not finite, or singular to working precision.
    """
    where = torch.device("cpu") if gram_kk.device.type == "mps" else gram_kk.device
    damped_kk = gram_kk.to(device=where, dtype=torch.float64, copy=True)
    k = gram_kk.shape[0]
    mean = float(damped_kk.diagonal().mean()) if k else 0.0
    if not torch.isfinite(damped_kk).all():
        raise CurvatureError(
            "train must have finite features for method 'trak', got NaN or infinite ones. Find the "
            "examples with method='graddot', which names them."
        )
    strength = damping.absolute(mean)
    if mean == 0:
        strength = strength or 1.0  # no example has a gradient, and every score is 0
    damped_kk.diagonal().add_(strength)
    factor_kk, failed = torch.linalg.cholesky_ex(damped_kk)
    pivots = factor_kk.diagonal().square()
    floor = _ROUNDING * k * torch.finfo(torch.float64).eps
    if int(failed) or (k and float(pivots.min()) <= floor * float(pivots.max())):
        raise CurvatureError(
            f"damping must make the {k} x {k} matrix of features regular, got "
            f"{damping.strength} with {num_examples} training examples. Pass a larger damping or "
            "a projection to fewer entries."
        )
    phi_qk = phi_qk.to(device=where, dtype=torch.float64)
    return torch.cholesky_solve(phi_qk.t(), factor_kk).t(), factor_kk


class _Features:
    """Adds up the features' outer products while layers of batches come in any order."""

    def __init__(self) -> None:
        """Start with no features."""
        self._columns: dict[str, tuple[slice, DenseGradient]] = {}
        self._open: dict[int, dict[str, DenseGradient]] = {}
        self._waiting: list[Tensor] = []
        self._gram: Tensor | None = None

    def add(self, place: Batch, name: str, gradient: LayerGradient) -> None:
        """Take one layer of one batch."""
        self._open.setdefault(place.start, {})[name] = to_dense(gradient)

    def close(self, place: Batch) -> None:
        """Add a finished batch."""
        self._waiting.append(self.take(place))
        if sum(rows.shape[0] for rows in self._waiting) >= _ROWS_AT_ONCE:
            self._fold()

    def take(self, place: Batch) -> Tensor:
        """Give the features of a finished batch, ``[b, k]``, in the order of the columns."""
        layers = self._open.pop(place.start, {})
        for name, dense in layers.items():
            if name not in self._columns:
                start, width = self.size, dense.values_bd.shape[1]
                like = DenseGradient(
                    dense.values_bd.new_zeros(0, width), dense.shape, dense.has_bias
                )
                self._columns[name] = (slice(start, start + width), like)
        return self._joined(layers, place.size)

    @property
    def size(self) -> int:
        """Number of features ``k``."""
        return sum(columns.stop - columns.start for columns, _ in self._columns.values())

    def solve(
        self, queries: Mapping[str, LayerGradient], damping: Damping, num_examples: int
    ) -> dict[str, LayerGradient]:
        """Turn the queries' features into what scores by inner products, layer by layer."""
        dense = {name: to_dense(gradient) for name, gradient in queries.items()}
        if not dense or not self._columns:
            return {}
        q = next(iter(dense.values())).num_examples
        phi_qk = self._joined(dense, q)
        solved_qk = solve_features(self.gram(), phi_qk, damping, num_examples)[0].to(phi_qk)
        return {
            name: DenseGradient(solved_qk[:, columns].contiguous(), like.shape, like.has_bias)
            for name, (columns, like) in self._columns.items()
        }

    def gram(self) -> Tensor:
        """The sum of outer products, ``[k, k]``."""
        self._fold()
        return self._gram if self._gram is not None else torch.zeros(0, 0)

    def _joined(self, layers: Mapping[str, DenseGradient], rows: int) -> Tensor:
        """Put layers side by side, zeros where one was not reached."""
        if not self._columns:
            return torch.zeros(rows, 0)
        return torch.cat(
            [
                layers[name].values_bd
                if name in layers
                else like.values_bd.new_zeros(rows, like.values_bd.shape[1])
                for name, (_, like) in self._columns.items()
            ],
            dim=1,
        )

    def _fold(self) -> None:
        """Add the waiting rows' outer products."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        k = self.size
        if self._gram is None or self._gram.shape[0] < k:
            _check_fits(k, waiting[0].device)
        rows_nk = torch.cat([F.pad(rows, (0, k - rows.shape[1])) for rows in waiting])
        if self._gram is None:
            self._gram = rows_nk.new_zeros(k, k)
        elif self._gram.shape[0] < k:
            more = k - self._gram.shape[0]
            self._gram = F.pad(self._gram, (0, more, 0, more))
        self._gram.addmm_(rows_nk.t(), rows_nk)


def _self_scores(
    session: Session,
    data: tuple[Rows, Loss],
    batch_size: int,
    features: _Features,
    damping: Damping,
) -> Tensor:
    """Squared norms of the features turned by the inverse Cholesky factor. Shape ``[n]``."""
    rows, loss = data
    gram = features.gram()
    empty = gram.new_zeros(0, gram.shape[0])
    factor_kk = solve_features(gram, empty, damping, len(rows))[1]
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
    features: _Features,
    kept: KeptFactors | None,
) -> None:
    """Run the first pass over the training data."""
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
        _check_fits(sum(entries_of(facts) for facts in stored.layers.values()), session.device)


def _check_fits(k: int, device: torch.device) -> None:
    """Refuse a matrix of features that does not fit.

    Args:
        k: Number of features.
        device: Where it would be.

    Raises:
        ValueError: If it does not.
    """
    needed, free = _SOLVE_BYTES * k * k, free_bytes(device)
    if needed > free:
        raise ValueError(
            f"projection must leave features whose matrix fits the memory ({free / 1e9:.1f} GB "
            f"free), got {k} of them, {needed / 1e9:.1f} GB. Pass a smaller projection dim, or "
            "fewer layers."
        )


METHODS["trak"] = MethodEntry(TRAKAttributor, {}, checkpoints=True)
