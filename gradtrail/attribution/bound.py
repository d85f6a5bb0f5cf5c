"""Attribution as an object: a method bound to a model, for several calls on one set of options."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from gradtrail.attribution.api import attribute, self_influence
from gradtrail.attribution.cached import CachedGradients, cache
from gradtrail.attribution.checkpoints import Checkpoint
from gradtrail.attribution.data import Collate
from gradtrail.attribution.from_cache import attribute_from_cache, self_influence_from_cache
from gradtrail.attribution.losses import LossReduction
from gradtrail.attribution.method import make_method
from gradtrail.attribution.preconditioned import cache_preconditioned_query
from gradtrail.attribution.scores import AttributionScores, TopK
from gradtrail.attribution.setup import as_projection
from gradtrail.errors import StoreError
from gradtrail.factors import Projection
from gradtrail.hooks import LayerChoice, select_layers
from gradtrail.store import GradientStore

__all__ = ["AbstractBoundAttributor", "Attributor"]

# what a call takes beside the options of its method
_KEPT = ("gradient_cache_residency", "cache_dir", "capture", "cache_dtype")
_STORED = ("capture", "dtype", "covariances")
_READ = ("selected_steps", "layers", "exclude", "batch_size")
_SCORED = (*_READ, "top_k", "granularity", "optimizer_states")


class AbstractBoundAttributor(abc.ABC):
    """A method with a model and everything that its calls have in common.

    Attributes:
        method: Name of the method.
        model: The model.
    """

    method: str
    model: nn.Module

    def __init__(  # noqa: PLR0913  # everything attribute takes that is not a call's own
        self,
        method: str,
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
            method: Name of the method.
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

    def attribute(
        self,
        train: Any,  # noqa: ANN401  # any data set
        query: Any,  # noqa: ANN401
        *,
        granularity: Literal["example", "token"] = "example",
        checkpoints: Sequence[Checkpoint] | None = None,
        checkpoint_weights: Sequence[float] | None = None,
        **options: Any,  # noqa: ANN401
    ) -> AttributionScores | dict[float, AttributionScores] | None:
        """Score every training example against every query.

        Args:
            train: Training examples.
            query: Queries.
            granularity: ``"token"`` gives one share a position.
            checkpoints: As in ``attribute``; a curvature is fitted for each.
            checkpoint_weights: One factor a checkpoint.
            **options: Options of the method, ``gather``, and ``gradient_cache_residency`` with
                what goes with it.

        Returns:
            Scores ``[n, q]``; with ``damping_sweep`` one result a damping.
        """
        kept = _taken(options, (*_KEPT, "gather"))
        return attribute(
            self.model,
            train,
            query,
            granularity=granularity,
            checkpoints=checkpoints,
            checkpoint_weights=checkpoint_weights,
            **kept,
            **self._call(options),
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
            checkpoints: As in ``attribute``.
            checkpoint_weights: One factor a checkpoint.
            **options: As for ``attribute``.

        Returns:
            At least 0. Shape ``[n]``.
        """
        kept = _taken(options, _KEPT)
        return self_influence(
            self.model,
            train,
            checkpoints=checkpoints,
            checkpoint_weights=checkpoint_weights,
            **kept,
            **self._call(options),
            **self._options,
        )

    def cache(
        self,
        train: Any,  # noqa: ANN401
        query: Any | None = None,  # noqa: ANN401
        *,
        cache_dir: str | Path,
        **options: Any,  # noqa: ANN401
    ) -> CachedGradients:
        """Capture every example's gradient into stores, to score them later without the model.

        Args:
            train: Training examples.
            query: Queries, or None to capture training examples only.
            cache_dir: Folder of the stores.
            **options: Options of the method, and ``capture``, ``dtype`` and ``covariances`` as
                ``gradtrail.cache`` takes them.

        Returns:
            The stores.
        """
        stored = _taken(options, _STORED)
        only = self._query_only if query is not None else {}
        return cache(
            self.model,
            train,
            query,
            cache_dir=cache_dir,
            **stored,
            **self._call(options),
            **self._options,
            **only,
        )

    def attribute_from_cache(
        self,
        train_store: GradientStore,
        query_store: GradientStore,
        **options: Any,  # noqa: ANN401
    ) -> AttributionScores | TopK | dict[float, AttributionScores | TopK]:
        """Score stored training examples against stored queries; the model is not run.

        Args:
            train_store: Gradients of training examples.
            query_store: Gradients of queries.
            **options: Options of the method, and ``selected_steps``, ``layers``, ``exclude``,
                ``top_k``, ``batch_size``, ``granularity`` and ``optimizer_states`` as
                ``gradtrail.attribute_from_cache`` takes them.

        Returns:
            Scores ``[n, q]``, or with ``top_k`` the best of every query; with ``damping_sweep`` one
            result a damping.
        """
        read = self._reading(train_store, _taken(options, _SCORED))
        return attribute_from_cache(train_store, query_store, **read, **self._call(options))

    def self_influence_from_cache(
        self,
        train_store: GradientStore,
        **options: Any,  # noqa: ANN401
    ) -> Tensor:
        """Score every stored training example against itself; the model is not run.

        Args:
            train_store: Gradients of training examples.
            **options: Options of the method, and ``selected_steps``, ``layers``, ``exclude`` and
                ``batch_size``.

        Returns:
            At least 0. Shape ``[n]``.
        """
        read = self._reading(train_store, _taken(options, _READ))
        return self_influence_from_cache(train_store, **read, **self._call(options))

    def cache_preconditioned_query(
        self,
        train_store: GradientStore,
        query_store: GradientStore,
        out: str | Path | GradientStore,
        **options: Any,  # noqa: ANN401
    ) -> GradientStore:
        """Apply the method's curvature to stored queries, so that scores are inner products.

        Args:
            train_store: Gradients of training examples.
            query_store: Gradients of queries.
            out: Folder of the new store, or a store.
            **options: Options of the method, and ``selected_steps``, ``layers``, ``exclude`` and
                ``batch_size``.

        Returns:
            The store of queries.
        """
        read = self._reading(train_store, _taken(options, _READ))
        return cache_preconditioned_query(
            train_store, query_store, out, **read, **self._call(options)
        )

    @abc.abstractmethod
    def _call(self, options: dict[str, Any]) -> dict[str, Any]:
        """Give the method and its options as a call takes them.

        Args:
            options: Options of the method.

        Returns:
            Keyword arguments, ``method`` among them.
        """

    def _reading(self, store: GradientStore, given: dict[str, Any]) -> dict[str, Any]:
        """What a call on stores takes of this object's options, where it was given none."""
        own = self._options
        projection = as_projection(own["projection"], own["seed"])
        facts = store.facts if isinstance(store, GradientStore) else None
        if facts is not None and projection is not None:
            _check_projection(projection, facts.projection)
        chosen = (own["layers"], own["exclude"]) != (None, None)
        if chosen and not {"layers", "exclude"} & set(given) and facts is not None:
            selection = select_layers(self.model, layers=own["layers"], exclude=own["exclude"])
            ours, held = {unit.name for unit in selection.units}, list(store.layers)
            if selection.explicit:
                given = {**given, "layers": [name for name in held if name in ours]}
            else:
                given = {**given, "exclude": [name for name in held if name not in ours]}
        place = next(self.model.parameters()).device
        shared = {"device": place, "progress": own["progress"], "seed": own["seed"]}
        return {**shared, **given}


@final
class Attributor(AbstractBoundAttributor):
    """Any registered method bound to a model.

    Options of the method go to the call. For K-FAC and EK-FAC ``KFACAttributor`` and
    ``EKFACAttributor`` remember their fit as well.
    """

    def __init__(
        self,
        model: nn.Module,
        method: str = "graddot",
        **options: Any,  # noqa: ANN401
    ) -> None:
        """Bind a model; nothing is run.

        Args:
            model: The trained model.
            method: Name of a registered method.
            **options: ``loss``, ``layers``, ``batch_size`` and all else that ``attribute`` takes
                and that is not a call's own.
        """
        make_method(method, {})  # refuses a name that is unknown
        super().__init__(method, model, **options)

    def _call(self, options: dict[str, Any]) -> dict[str, Any]:
        """The method by name."""
        return {"method": self.method, **options}


def _taken(options: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Part a call's own options from those of the method."""
    return {name: options.pop(name) for name in names if name in options}


def _check_projection(ours: Projection, stored: Any) -> None:  # noqa: ANN401
    """Refuse a store whose gradients went through another projection than this object's."""
    wanted = {"kind": ours.kind, "dim": ours.dim, "seed": ours.seed}
    if stored != wanted:
        raise StoreError(
            f"projection must be that of the store, got {wanted} where it was captured with "
            f"{stored}. Bind the model with that one."
        )
