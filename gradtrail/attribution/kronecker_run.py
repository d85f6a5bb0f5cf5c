"""One run of K-FAC or EK-FAC inside an open session: fit, precondition the queries, score.

Suffixes: n training example, q query (one set a damping), d gradient entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from gradtrail.attribution.curvature_fit import (
    FitTask,
    fit_bases,
    fit_eigenvalues,
    sampler_name,
)
from gradtrail.attribution.curvature_queries import precondition_queries, query_chunks
from gradtrail.attribution.curvature_refine import refined_queries
from gradtrail.attribution.curvature_scoring import score_kept, score_kept_turned
from gradtrail.attribution.data import Rows
from gradtrail.attribution.fit_memory import FitPlace, define_fit
from gradtrail.attribution.inner_product import collect_queries
from gradtrail.attribution.kept import KeptFactors, kept_budget
from gradtrail.attribution.losses import Loss
from gradtrail.attribution.memory import query_budget
from gradtrail.attribution.method import Task
from gradtrail.attribution.queries import QuerySide, compact_form
from gradtrail.attribution.run_options import RunOptions
from gradtrail.attribution.scoring import Scorer, normalized
from gradtrail.attribution.session import Batch, Session
from gradtrail.attribution.shares import most_of, on_every
from gradtrail.attribution.stored import StoredRows
from gradtrail.factors import LayerGradient, select, squared_norm
from gradtrail.kronecker import KroneckerFit, Tensors
from gradtrail.store import TensorCache

__all__ = ["KroneckerRun"]


class KroneckerRun:
    """Fits and scores; a context manager that lets go of what the run held."""

    def __init__(
        self,
        options: RunOptions,
        session: Session,
        rows: Rows,
        loss: Loss,
        batch_size: int | None,
    ) -> None:
        """Prepare a run.

        Args:
            options: The method's options.
            session: The open session.
            rows: The training data, at least one row.
            loss: Its loss.
            batch_size: Rows a batch; None takes the blocks of a store as they are.
        """
        self._options = options
        self._session = session
        self._task = FitTask(
            rows=rows,
            loss=loss,
            batch_size=batch_size,
            corrected=options.corrected,
            fisher=options.fisher,
            treatments=options.treatments,
            max_factor_dim=options.limits[0],
            direct_fisher_max_params=options.limits[1],
        )
        residency = options.residency or "device"
        self._place = FitPlace(options.fisher_dir, options.memory, session.checkpoint, residency)
        self._kept: KeptFactors | None = None
        self._tensors: Tensors | None = None
        self._energies: list[Tensor] = []
        self._definition: dict[str, str] = {}
        self._is_new = False
        self.fit: KroneckerFit | None = None

    def __enter__(self) -> KroneckerRun:
        """Start.

        Returns:
            The run.
        """
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let go of kept factors, and of the fit unless an attributor remembers it."""
        if self._kept is not None:
            self._kept.drop()
        if self._place.holds(self.fit):
            return
        for tensors in (self._tensors, None if self.fit is None else self.fit.tensors):
            if tensors is not None:
                tensors.close()

    def find_fit(self) -> KroneckerFit | None:
        """Give a fit that was saved or remembered, without running the model."""
        if self.fit is None and self._place.is_somewhere:
            self._definition = self._define()
            self.fit = self._place.find(
                self._definition,
                self._make_tensors,
                self._session.device,
                is_shared=self._is_share,
            )
        return self.fit

    def make_fit(self) -> KroneckerFit:
        """Load or make the whole fit.

        Returns:
            The fit, saved and remembered where that was asked for.
        """
        self._begin(keep=self._options.corrected)
        self._complete()
        return self.fit

    def score(self, task: Task) -> tuple[Tensor, Tensor | None]:
        """Score every training example against every query.

        Args:
            task: What is scored.

        Returns:
            Scores, float64 on the CPU, ``[n, q]`` or ``[n, s, q]``, and lengths for the latter;
            with ``top_k`` the highest, ``[k, q]``, and their rows.
        """
        self._begin(keep=task.top_k is None)
        norms = self._options.normalize
        raw = collect_queries(self._session, task, norms=norms == "both", form=compact_form)
        columns = len(task.query) * len(self._options.dampings)
        norms_q = None if raw.norms is None else raw.norms.repeat(len(self._options.dampings))
        if self._is_fused(task, raw):
            dampings = self._options.dampings
            shape = (len(task.train), columns)
            table = score_kept_turned(
                self.fit, self._kept, raw.layers, dampings, shape, norms=norms is not None
            )
            self._finish()
            squared_n = table.squared_n if norms else None
            return normalized(table.values_nq.cpu(), squared_n, norms_q), None
        self._complete()
        return self._score(task, raw, norms_q)

    def self_score(self) -> Tensor:
        """Score every training example against itself.

        Returns:
            At least 0. Shape ``[n]``.
        """
        self._begin(keep=True)
        self._complete()
        session, task, norms = self._session, self._task, self._options.normalize
        wide = torch.float32 if session.device.type == "mps" else torch.float64
        values_n = torch.zeros(len(task.rows), dtype=wide, device=session.device)
        squared_n = torch.zeros_like(values_n)
        (damping,) = self._options.dampings
        curvatures: dict[str, Any] = {}

        def add(place: Batch, name: str, gradient: LayerGradient) -> None:
            here = slice(place.start, place.start + place.size)
            if name in self.fit.records:
                if self._options.residency is None and name not in curvatures:
                    curvatures[name] = self.fit.curvature(name)
                curvature = curvatures.get(name) or self.fit.curvature(name)
                values_n[here] += curvature.quadratic(gradient, damping).to(values_n)
            if norms:
                squared_n[here] += squared_norm(gradient).to(squared_n)

        if self._kept is not None and self._kept.is_whole:
            for name, pieces in self._kept.take():
                for place, gradient in pieces:
                    add(place, name, gradient)
        else:
            session.capture(
                task.rows, task.loss, batch_size=task.batch_size, phase="train", sink=add
            )
        if norms is None:
            return values_n
        power = 1.0 if norms == "both" else 0.5
        return torch.where(squared_n > 0, values_n / squared_n**power, torch.zeros_like(values_n))

    def _begin(self, *, keep: bool) -> None:
        """Find a fit, or make one that is whole but for corrected eigenvalues."""
        if self.find_fit() is None:
            self._tensors = self._make_tensors()
            self._kept = self._make_kept() if keep else None
            self.fit = fit_bases(self._session, self._task, self._tensors, self._kept)
            self.fit.definition.update(self._definition)
            self._is_new = True
            if self._is_share and keep and not self._all_keep():
                self._kept = None

    @property
    def _is_share(self) -> bool:
        """Whether the training data are one rank's share."""
        return self._task.rows.whole is not None

    def _all_keep(self) -> bool:
        """Whether every rank has kept its share: else none uses what it kept."""
        whole = self._kept is not None and self._kept.is_whole
        found = on_every("whole training factors", flag=whole)
        if not found and self._kept is not None:
            self._kept.drop()
        return found

    def _complete(self) -> None:
        """Correct the eigenvalues of a new fit."""
        if self._is_new and self._options.corrected:
            fit_eigenvalues(self._session, self._task, self.fit, self._kept)
        self._finish()

    def _finish(self) -> None:
        """Save and remember a new fit, and say what it does not determine."""
        dampings = self._options.dampings
        if self._is_new:
            recorded = {
                "strength": [damping.strength for damping in dampings],
                "relative": dampings[0].relative,
            }
            self._place.keep(self.fit, recorded, is_shared=self._is_share)
            self._is_new = False
        self.fit.warn_flat(min(dampings, key=lambda damping: damping.strength))

    def _is_fused(self, task: Task, raw: QuerySide) -> bool:
        """Whether kept factors are turned once for the eigenvalues and the scores."""
        return (
            self._is_new
            and self._options.corrected
            and self._kept is not None
            and self._kept.is_whole
            and not task.per_token
            and self._options.queries.is_plain
            and self._count_chunks(raw) == 1
        )

    def _count_chunks(self, raw: QuerySide) -> int:
        corrected = {name: record.kind != "kfac" for name, record in self.fit.records.items()}
        sets = len(self._options.dampings)
        options = self._options.queries
        chunks = query_chunks(raw.layers, corrected, options, sets, self._budget())
        return most_of("chunks of queries", chunks) if self._is_share else chunks

    def _score(
        self, task: Task, raw: QuerySide, norms_q: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Precondition the queries, in chunks that fit, and let the training data meet them."""
        dampings = self._options.dampings
        chunks, count = self._count_chunks(raw), len(task.query)
        step = -(-count // chunks) if count else 1
        found: list[Tensor] = []
        rows: list[Tensor] = []
        lengths = None
        for start in range(0, max(1, count), step):
            size = min(step, count - start)
            part = slice(start, start + size)
            layers = {name: select(one, part) for name, one in raw.layers.items()}
            queries = self._prepared(task, layers)
            last = start + step >= count
            values, lengths = self._score_part(task, queries, size * len(dampings), last=last)
            found.append(values.unflatten(-1, (len(dampings), size)))
            if task.top_k is not None:
                rows.append(lengths.unflatten(-1, (len(dampings), size)))
        values = torch.cat(found, -1).flatten(-2)
        if task.top_k is not None:
            lengths = torch.cat(rows, -1).flatten(-2)
        return normalized(values, None, norms_q), lengths

    def _prepared(
        self, task: Task, layers: Mapping[str, LayerGradient]
    ) -> dict[str, LayerGradient]:
        """Precondition queries, or refine the inverse that does it."""
        options, dampings = self._options.queries, self._options.dampings
        if options.refine == "cg":
            return refined_queries(
                self._session, self._task, self.fit, layers, self._options.strengths, options
            )
        prepared = precondition_queries(
            self.fit, layers, dampings, options, num_train=len(task.train), budget=self._budget()
        )
        if prepared.energy is not None:
            self._energies.append(prepared.energy)
            self._session.notes["query_energy"] = float(torch.cat(self._energies).mean())
        return prepared.layers

    def _score_part(
        self, task: Task, queries: Mapping[str, LayerGradient], columns: int, *, last: bool
    ) -> tuple[Tensor, Tensor | None]:
        norms = self._options.normalize is not None
        kept = self._kept if self._kept is not None and self._kept.is_whole else None
        if kept is not None and not task.per_token:
            table = score_kept(kept, queries, (len(task.train), columns), norms=norms, last=last)
            squared_n = table.squared_n if norms else None
            return normalized(table.values_nq.cpu(), squared_n, None), None
        scorer = Scorer(task, queries, columns, norms=norms)
        if kept is not None:
            for name, pieces in kept.items():
                for place, gradient in pieces:
                    scorer.add(place, name, gradient)
            scorer.close_all()
        else:
            self._session.capture(
                task.train,
                task.loss,
                batch_size=task.batch_size,
                phase="train",
                sink=scorer.add,
                done=scorer.close,
            )
        return scorer.result(None)

    def _budget(self) -> int:
        return query_budget(self._session.device)

    def _make_kept(self) -> KeptFactors | None:
        """Keep training factors where they are the Fisher's own and may take memory."""
        # what is stored already is read again, unless the user gave it a budget
        is_stored = isinstance(self._task.rows, StoredRows) and not self._options.gradient_budget
        if self._options.fisher.kind != "empirical" or self._session.cache is not None or is_stored:
            return None
        budget = kept_budget(self._options.gradient_budget, self._session.device)
        count = len(self._task.rows)
        return KeptFactors(count, budget, is_share=self._is_share) if budget else None

    def _make_tensors(self) -> Tensors:
        residency = self._options.residency
        if residency is None:
            return TensorCache("device", budget=1.0, device=self._session.device)
        return TensorCache(residency, device=self._session.device)

    def _loss_name(self) -> str:
        """The loss as another run would name it."""
        rows = self._task.rows
        if isinstance(rows, StoredRows):
            return rows.store.facts.loss or ""
        return self._task.loss.name

    def _define(self) -> dict[str, str]:
        session, options = self._session, self._options
        projection = session.projection
        fields = {
            "method": "ekfac" if options.corrected else "kfac",
            "fisher": options.fisher.kind,
            "layers": dict(options.treatments),
            "projection": None
            if projection is None
            else [projection.kind, projection.dim, projection.seed],
            "loss": self._loss_name(),
            "library_version": version("gradtrail"),
        }
        if options.fisher.kind == "sampled":
            fields["draws"] = [
                options.fisher.draws,
                session.seed,
                sampler_name(options.fisher.sampler),
            ]
        return define_fit(session.model, self._task.rows, self._task.batch_size, fields)
