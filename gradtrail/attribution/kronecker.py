r"""K-FAC and EK-FAC: influence under a Kronecker-factored curvature.

Martens & Grosse, 2015, https://arxiv.org/abs/1503.05671; George et al., 2018,
https://arxiv.org/abs/1806.03884; for attribution Grosse et al., 2023,
https://arxiv.org/abs/2308.03296.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gradtrail.attribution.curvature_demands import PlanOptions, curvature_demands
from gradtrail.attribution.curvature_fit import FisherOptions, sampler_name
from gradtrail.attribution.curvature_layers import LayerRules, Treatment, choose_curvature
from gradtrail.attribution.curvature_queries import QueryOptions
from gradtrail.attribution.curvature_stored import choose_stored_curvature, with_covariances
from gradtrail.attribution.data import Rows
from gradtrail.attribution.fisher import FisherKind, Sampler
from gradtrail.attribution.fit_memory import FitMemory
from gradtrail.attribution.gauss_newton import MAX_ITERATIONS
from gradtrail.attribution.kronecker_run import KroneckerRun
from gradtrail.attribution.losses import Loss
from gradtrail.attribution.measures import Demands, Measures
from gradtrail.attribution.method import (
    METHODS,
    AbstractAttributor,
    MethodEntry,
    Task,
    refuse_preconditioned,
)
from gradtrail.attribution.run_options import RunOptions
from gradtrail.attribution.session import Session
from gradtrail.attribution.stored import StoredRows
from gradtrail.attribution.stored_model import StoredModel
from gradtrail.factors import Projection
from gradtrail.hooks import LayerChoice, Selection
from gradtrail.kronecker import Damping
from gradtrail.options import check_choice, check_positive

__all__ = ["KroneckerMethod"]


@dataclass(frozen=True, kw_only=True)
class KroneckerMethod(AbstractAttributor):
    """Options of ``"kfac"`` and ``"ekfac"``.

    Attributes:
        shares_rows: True: each of many processes scores its share.
        corrected: Whether the eigenvalues are corrected in the eigenbasis (EK-FAC).
        damping: What is added to each spectrum; None means 0.1 of its mean eigenvalue, and 1.0 of
            the Gauss-Newton matrix's with ``refine="cg"``.
        relative_damping: Whether ``damping`` is a multiple of the mean eigenvalue.
        damping_sweep: Several strengths to score with from one fit and one pass, or None.
        fisher: ``"empirical"``: the data's labels; ``"expected"``: exact over few classes;
            ``"sampled"``: labels the model draws.
        fisher_draws: Draws a position with ``fisher="sampled"``.
        label_sampler: ``(model, batch, generator) -> batch`` that draws labels, or None.
        fisher_dir: Folder a fit is loaded from, or written to when it holds none.
        factor_cache_residency: Where the fit's tensors rest; None: on the device.
        non_kronecker: ``"ignore"`` leaves layers without Kronecker structure out, ``"direct"``
            gives them a dense Fisher.
        direct_fisher_max_params: Most entries of a layer with a dense Fisher.
        diagonal: Layers to give the diagonal of the Fisher, as ``layers`` names them.
        max_factor_dim: Longest side of a covariance that is allocated.
        query_rank: Rank the preconditioned queries are cut to, or None.
        refine: ``"cg"`` solves the damped Gauss-Newton system with the fit as preconditioner.
        cg_tolerance: Relative residual at which ``refine="cg"`` stops.
        cg_max_iterations: Most iterations of ``refine="cg"``, a pass over train each.
        normalize: ``"train"`` divides by the norm of the training gradient, ``"both"`` by both.
        gradient_budget: Bytes of training factors kept so that no further pass is needed; None: a
            third of the free memory (of stored ones: none), 0: none are kept.
        memory: Where a fit is remembered between calls, or None.
    """

    shares_rows: ClassVar[bool] = True

    corrected: bool
    damping: float | None = None
    relative_damping: bool = True
    damping_sweep: Sequence[float] | None = None
    fisher: FisherKind = "empirical"
    fisher_draws: int = 1
    label_sampler: Sampler | None = None
    fisher_dir: str | Path | None = None
    factor_cache_residency: Literal["memory", "disk", "tiered"] | None = None
    non_kronecker: Literal["ignore", "direct"] = "ignore"
    direct_fisher_max_params: int = 4096
    diagonal: LayerChoice = None
    max_factor_dim: int = 16384
    query_rank: int | None = None
    refine: Literal["cg"] | None = None
    cg_tolerance: float | None = None
    cg_max_iterations: int | None = None
    normalize: Literal["train", "both"] | None = None
    gradient_budget: int | None = None
    memory: FitMemory | None = None

    def __post_init__(self) -> None:
        """Check the options, and that each has an effect."""
        check_choice("fisher", self.fisher, ("empirical", "expected", "sampled"))
        check_choice("non_kronecker", self.non_kronecker, ("ignore", "direct"))
        check_choice(
            "factor_cache_residency",
            self.factor_cache_residency,
            (None, "memory", "disk", "tiered"),
        )
        check_choice("refine", self.refine, (None, "cg"))
        check_choice("normalize", self.normalize, (None, "train", "both"))
        check_positive("fisher_draws", self.fisher_draws)
        check_positive("direct_fisher_max_params", self.direct_fisher_max_params)
        check_positive("max_factor_dim", self.max_factor_dim)
        if self.gradient_budget != 0 and self.gradient_budget is not None:
            check_positive("gradient_budget", self.gradient_budget)
        for option in ("query_rank", "cg_max_iterations"):
            if getattr(self, option) is not None:
                check_positive(option, getattr(self, option))
        self._check_pairs()
        _ = self.dampings

    @property
    def dampings(self) -> tuple[Damping, ...]:
        """Give the dampings to score with, one or those of the sweep.

        Returns:
            At least one damping.

        Raises:
            ValueError: If the sweep is empty.
        """
        if self.damping_sweep is None:
            return (Damping.of(self.damping, relative=self.relative_damping),)
        if not isinstance(self.damping_sweep, (list, tuple)) or not self.damping_sweep:
            raise ValueError(
                f"damping_sweep must be a list of at least one damping, got {self.damping_sweep!r}."
            )
        return tuple(
            Damping.of(strength, relative=self.relative_damping) for strength in self.damping_sweep
        )

    @property
    def _strengths(self) -> tuple[tuple[float | None, bool], ...]:
        """The dampings as they were given: strength and whether it is relative."""
        given = [self.damping] if self.damping_sweep is None else self.damping_sweep
        return tuple((strength, self.relative_damping) for strength in given)

    @property
    def name(self) -> str:
        """The registered name."""
        return "ekfac" if self.corrected else "kfac"

    @property
    def ensemble(self) -> bool:
        """Several checkpoints: scores of one scale each, averaged."""
        return True

    @property
    def sweep(self) -> tuple[float, ...] | None:
        """Strengths of the sweep, the keys of its results."""
        return None if self.damping_sweep is None else tuple(map(float, self.damping_sweep))

    def choose(
        self, model: nn.Module, selection: Selection, projection: Projection | None
    ) -> Selection:
        """Leave out what gets no curvature, the output embedding among it."""
        return choose_curvature(model, selection, self._rules(), projection, tell=True)[0]

    def choose_stored(self, stored: StoredModel, rows: StoredRows) -> StoredModel:
        """Leave out what gets no curvature, the output embedding among it.

        Args:
            stored: The layers that could be read.
            rows: The training examples that are read.

        Returns:
            The layers to read.

        Raises:
            ValueError: If an option needs the model.
        """
        refuse_preconditioned(stored, f"method {self.name!r}")
        for option, needed in (("refine", None), ("fisher", "empirical")):
            if getattr(self, option) != needed:
                raise ValueError(
                    f"{option} must be {needed!r} with stored gradients, got "
                    f"{getattr(self, option)!r}: it runs the model. Call attribute with the model."
                )
        return choose_stored_curvature(with_covariances(stored, rows), self._rules(), tell=True)[0]

    def demands(self, measures: Measures, session: Session) -> Demands:
        """Count covariances or bases, kept factors, chunks of queries and passes."""
        treatments = self.treatments(session)
        options = PlanOptions(
            corrected=self.corrected,
            sets=len(self.dampings),
            keeps=self.fisher == "empirical",
            gradient_budget=self.gradient_budget,
            query_rank=self.query_rank,
            residency=self.factor_cache_residency,
            writes=self.fisher_dir is not None,
            refine_passes=0 if self.refine is None else self.cg_max_iterations or MAX_ITERATIONS,
        )
        return curvature_demands(measures, session, treatments, options)

    def score(self, session: Session, task: Task) -> tuple[Tensor, Tensor | None]:
        """Score every training example against every query.

        Args:
            session: The open session.
            task: Data, losses and batch sizes.

        Returns:
            Scores ``[n, q]`` or ``[n, s, q]`` on the CPU, one set of ``q`` columns a damping, and
            lengths ``[n]`` for the latter; with ``top_k`` the highest, ``[k, q]``, and their rows.

        Raises:
            ValueError: If gradients are to be kept beside ``top_k``.
        """
        if task.top_k is not None and self.gradient_budget:
            raise ValueError(
                f"gradient_budget must be None with top_k, got {self.gradient_budget}: kept "
                "gradients are scored layer by layer in one table. Leave one of them out."
            )
        if not task.train.total:
            columns = len(task.query) * len(self.dampings)
            if task.top_k is not None:
                return torch.zeros(0, columns), torch.zeros(0, columns, dtype=torch.int64)
            shape = (0, 0, columns) if task.per_token else (0, columns)
            return torch.zeros(shape), torch.zeros(0)
        with self.run(session, task.train, task.loss, task.batch_size) as run:
            return run.score(task)

    def self_score(
        self, session: Session, rows: Rows, loss: Loss, batch_size: int | None
    ) -> Tensor:
        """Score every training example against itself.

        Args:
            session: The open session.
            rows: The training data.
            loss: Its loss.
            batch_size: Rows a batch; None takes the blocks of a store as they are.

        Returns:
            The diagonal, at least 0. Shape ``[n]``.

        Raises:
            ValueError: If an option has no effect here.
        """
        for option in ("query_rank", "refine", "damping_sweep"):
            if getattr(self, option) is not None:
                raise ValueError(
                    f"{option} must be None for self-influence, got {getattr(self, option)!r}: it "
                    "works on queries. Leave it out."
                )
        if not rows.total:
            return torch.zeros(0)
        with self.run(session, rows, loss, batch_size) as run:
            return run.self_score()

    def describe_options(self) -> dict[str, Any]:
        """Every option but the objects that cannot be written down."""
        names = [field.name for field in fields(self) if field.name not in ("corrected", "memory")]
        plain = {name: getattr(self, name) for name in names}
        plain["label_sampler"] = sampler_name(self.label_sampler)
        for name in ("diagonal", "fisher_dir"):
            plain[name] = None if plain[name] is None else str(plain[name])
        if plain["damping_sweep"] is not None:
            plain["damping_sweep"] = list(self.sweep)
        return plain

    def treatments(self, session: Session) -> dict[str, Treatment]:
        """Say which curvature each layer gets that is captured or read."""
        if session.model is None:
            return choose_stored_curvature(session.stored, self._rules())[1]
        return choose_curvature(
            session.model, session.selection, self._rules(), session.projection
        )[1]

    def _rules(self) -> LayerRules:
        return LayerRules(
            non_kronecker=self.non_kronecker,
            direct_fisher_max_params=self.direct_fisher_max_params,
            max_factor_dim=self.max_factor_dim,
            diagonal=self.diagonal,
        )

    def run(self, session: Session, rows: Rows, loss: Loss, batch_size: int | None) -> KroneckerRun:
        """Prepare a run over some training data.

        Args:
            session: The session.
            rows: The training data.
            loss: Its loss.
            batch_size: Rows a batch; None takes the blocks of a store as they are.

        Returns:
            The run, to be used in a ``with`` block.
        """
        treatments = self.treatments(session)
        options = RunOptions(
            corrected=self.corrected,
            dampings=self.dampings,
            strengths=self._strengths,
            fisher=FisherOptions(
                kind=self.fisher,
                draws=self.fisher_draws,
                sampler=self.label_sampler,
                seed=session.seed,
            ),
            treatments=treatments,
            limits=(self.max_factor_dim, self.direct_fisher_max_params),
            queries=QueryOptions(
                rank=self.query_rank,
                refine=self.refine,
                tolerance=self.cg_tolerance,
                max_iterations=self.cg_max_iterations,
            ),
            normalize=self.normalize,
            gradient_budget=self.gradient_budget,
            residency=self.factor_cache_residency,
            fisher_dir=self.fisher_dir,
            memory=self.memory,
        )
        return KroneckerRun(options, session, rows, loss, batch_size)

    def _check_pairs(self) -> None:
        """Refuse options that would do nothing beside the others."""
        if self.fisher != "sampled" and (self.fisher_draws != 1 or self.label_sampler is not None):
            option = "fisher_draws" if self.fisher_draws != 1 else "label_sampler"
            raise ValueError(
                f"{option} must go with fisher='sampled', got fisher={self.fisher!r}. Leave it out."
            )
        limit, own = self.direct_fisher_max_params, type(self).__dataclass_fields__
        if self.non_kronecker != "direct" and limit != own["direct_fisher_max_params"].default:
            raise ValueError(
                "direct_fisher_max_params must go with non_kronecker='direct', got non_kronecker="
                f"{self.non_kronecker!r}. Leave it out."
            )
        if self.damping is not None and self.damping_sweep is not None:
            raise ValueError(
                f"damping must be None with damping_sweep, got {self.damping!r}. Add it to the "
                "sweep."
            )
        if self.refine is None:
            for option in ("cg_tolerance", "cg_max_iterations"):
                if getattr(self, option) is not None:
                    raise ValueError(
                        f"{option} must go with refine='cg', got refine=None. Leave it out."
                    )
        elif not self.corrected:
            raise ValueError(
                "refine='cg' must go with method 'ekfac', whose inverse is its preconditioner, got "
                "'kfac'."
            )
        elif self.query_rank is not None:
            raise ValueError("query_rank must be None with refine='cg', got both. Choose one.")


METHODS["kfac"] = MethodEntry(
    KroneckerMethod,
    {
        "corrected": False,
        "memory": None,
        "refine": None,
        "cg_tolerance": None,
        "cg_max_iterations": None,
    },
    checkpoints=True,
)
METHODS["ekfac"] = MethodEntry(
    KroneckerMethod, {"corrected": True, "memory": None}, checkpoints=True
)
