"""K-FAC and EK-FAC as objects that are bound to a model and remember their last fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradtrail.attribution.api import attribute, self_influence
from gradtrail.attribution.checkpoints import Checkpoint
from gradtrail.attribution.data import Collate, as_rows
from gradtrail.attribution.fit_memory import FitMemory
from gradtrail.attribution.kronecker import KroneckerMethod
from gradtrail.attribution.losses import LossReduction, resolve_loss
from gradtrail.attribution.method import METHODS, make_method
from gradtrail.attribution.scores import AttributionScores
from gradtrail.attribution.setup import as_projection, make_session, padding_id
from gradtrail.factors import Projection
from gradtrail.hooks import LayerChoice, select_layers
from gradtrail.kronecker import KroneckerFit

__all__ = ["EKFACAttributor", "KFACAttributor", "KroneckerAttributor"]


class KroneckerAttributor:
    """Scores with one curvature method and fits no more often than needed.

    The last fit is remembered: a call on the same training data, weights, layers and Fisher uses
    it again, whatever its damping. Method options (``damping``, ``fisher``, ``fisher_dir`` and the
    others that ``attribute`` takes for the method) go to the call.
    """

    def __init__(  # noqa: PLR0913  # everything attribute takes that is not a call's own
        self,
        method: Literal["kfac", "ekfac"],
        model: nn.Module,
        *,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        query_loss: Callable[[nn.Module, Any], Tensor] | None = None,
        loss_reduction: LossReduction | None = None,
        layers: LayerChoice = None,
        exclude: LayerChoice = None,
        batch_size: int = 8,
        query_batch_size: int | None = None,
        collate_fn: Collate | None = None,
        device: torch.device | str | None = None,
        projection: Projection | str | int | None = None,
        progress: bool = True,
        seed: int = 0,
    ) -> None:
        """Bind a model; nothing is run.

        Args:
            method: ``"kfac"`` or ``"ekfac"``.
            model: The trained model.
            loss: As in ``attribute``, like all that follow.
            query_loss: The queries' own loss.
            loss_reduction: How a loss that returns a scalar was reduced.
            layers: Which layers.
            exclude: Which layers to leave out.
            batch_size: Training examples a batch.
            query_batch_size: Queries a batch.
            collate_fn: Makes a batch of a list of rows.
            device: Where the model is.
            projection: Compression of every gradient.
            progress: Whether bars are shown.
            seed: Seed of a projection and of drawn labels.
        """
        self.method = method
        self.model = model
        self._query_only = {"query_loss": query_loss, "query_batch_size": query_batch_size}
        self._options: dict[str, Any] = {
            "loss": loss,
            "loss_reduction": loss_reduction,
            "layers": layers,
            "exclude": exclude,
            "batch_size": batch_size,
            "collate_fn": collate_fn,
            "device": device,
            "projection": projection,
            "progress": progress,
            "seed": seed,
        }
        self._memory = FitMemory()

    @property
    def fit_(self) -> KroneckerFit | None:
        """The fit that was made, loaded or used last, or None."""
        return self._memory.fit

    def attribute(
        self,
        train: Any,  # noqa: ANN401  # any data set
        query: Any,  # noqa: ANN401
        *,
        granularity: Literal["example", "token"] = "example",
        checkpoints: Sequence[Checkpoint] | None = None,
        checkpoint_weights: Sequence[float] | None = None,
        **options: Any,  # noqa: ANN401
    ) -> AttributionScores | dict[float, AttributionScores]:
        """Score every training example against every query.

        Args:
            train: Training examples.
            query: Queries.
            granularity: ``"token"`` gives one share a position.
            checkpoints: Several make an ensemble, with a fit each.
            checkpoint_weights: One factor a checkpoint.
            **options: Options of the method.

        Returns:
            Scores ``[n, q]``; with ``damping_sweep`` one result a damping.
        """
        return attribute(
            self.model,
            train,
            query,
            method=self._bound(options),
            granularity=granularity,
            checkpoints=checkpoints,
            checkpoint_weights=checkpoint_weights,
            **self._options,
            **self._query_only,
        )

    def self_influence(
        self,
        train: Any,  # noqa: ANN401
        *,
        checkpoints: Sequence[Checkpoint] | None = None,
        checkpoint_weights: Sequence[float] | None = None,
        **options: Any,  # noqa: ANN401
    ) -> Tensor:
        """Score every training example against itself.

        Args:
            train: Training examples.
            checkpoints: Several make an ensemble, with a fit each.
            checkpoint_weights: One factor a checkpoint.
            **options: Options of the method.

        Returns:
            At least 0. Shape ``[n]``.
        """
        return self_influence(
            self.model,
            train,
            method=self._bound(options),
            checkpoints=checkpoints,
            checkpoint_weights=checkpoint_weights,
            **self._options,
        )

    def fit(self, train: Any, **options: Any) -> KroneckerFit:  # noqa: ANN401
        """Make the fit, or load it; where it is there already no forward runs.

        Args:
            train: Training examples, at least one.
            **options: Options of the method.

        Returns:
            The fit, open until a newer one replaces it or ``close`` is called; ``describe()``
            prints its spectra.

        Raises:
            ValueError: If there are no training examples.
        """
        method, own = self._bound(options), self._options
        rows = as_rows(train, "train", own["collate_fn"], padding_id(self.model))
        if not len(rows):
            raise ValueError("train must hold at least one example to fit on, got none.")
        loss = resolve_loss(own["loss"], own["loss_reduction"])
        selection = select_layers(self.model, layers=own["layers"], exclude=own["exclude"])
        projection = as_projection(own["projection"], own["seed"])
        selection = method.choose(self.model, selection, projection)
        session = make_session(
            self.model,
            selection,
            own["device"],
            projection,
            own["seed"],
            progress=own["progress"],
        )
        with method.run(session, rows, loss, own["batch_size"]) as run:
            found = run.find_fit()
            if found is None:
                with session.opened(rows, loss):
                    found = run.make_fit()
        return found

    def close(self) -> None:
        """Let go of the remembered fit and of files that held its tensors."""
        self._memory.close()

    def __enter__(self) -> KroneckerAttributor:
        """Enter a block at whose end the fit is let go.

        Returns:
            The attributor.
        """
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let go of the fit."""
        self.close()

    def _bound(self, options: dict[str, Any]) -> KroneckerMethod:
        """The method with a call's options, and this object's memory."""
        make_method(self.method, options)  # refuses options that are not the method's
        preset = {**METHODS[self.method].preset, "memory": self._memory}
        return KroneckerMethod(**{**preset, **options})


class KFACAttributor(KroneckerAttributor):
    """K-FAC bound to a model (Martens & Grosse, 2015, https://arxiv.org/abs/1503.05671)."""

    def __init__(self, model: nn.Module, **options: Any) -> None:  # noqa: ANN401
        """Bind a model.

        Args:
            model: The trained model.
            **options: What ``KroneckerAttributor`` takes.
        """
        super().__init__("kfac", model, **options)


class EKFACAttributor(KroneckerAttributor):
    """EK-FAC bound to a model (George et al., 2018, https://arxiv.org/abs/1806.03884)."""

    def __init__(self, model: nn.Module, **options: Any) -> None:  # noqa: ANN401
        """Bind a model.

        Args:
            model: The trained model.
            **options: What ``KroneckerAttributor`` takes.
        """
        super().__init__("ekfac", model, **options)
