"""What a method is, and the registry that names them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from gradtrail.attribution.data import Rows
from gradtrail.attribution.losses import Loss
from gradtrail.attribution.measures import Demands, Measures
from gradtrail.attribution.session import Session
from gradtrail.attribution.stored import StoredRows
from gradtrail.attribution.stored_model import StoredModel
from gradtrail.errors import StoreError
from gradtrail.factors import Projection
from gradtrail.hooks import Selection
from gradtrail.options import near_names

__all__ = [
    "METHODS",
    "AbstractAttributor",
    "MethodEntry",
    "Task",
    "make_method",
    "refuse_preconditioned",
]


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What is to be scored.

    Attributes:
        train: Training examples.
        query: Queries.
        loss: Loss of a training example.
        query_loss: Loss of a query.
        batch_size: Training examples a batch; None takes the blocks of a store as they are.
        query_batch_size: Queries a batch, likewise.
        per_token: Whether every position is scored on its own.
        top_k: How many training examples a query are kept, or None for all.
    """

    train: Rows
    query: Rows
    loss: Loss
    query_loss: Loss
    batch_size: int | None
    query_batch_size: int | None
    per_token: bool = False
    top_k: int | None = None


class AbstractAttributor(abc.ABC):
    """A method with its options; it scores inside an open session.

    Attributes:
        shares_rows: Whether every one of many processes may score its share of the training
            examples.
    """

    shares_rows: ClassVar[bool] = False

    @abc.abstractmethod
    def score(self, session: Session, task: Task) -> tuple[Tensor, Tensor | None]:
        """Score every training example against every query.

        Args:
            session: The open session.
            task: Data, losses and batch sizes.

        Returns:
            Scores ``[n, q]`` or ``[n, s, q]``, and lengths ``[n]`` for the latter; with ``top_k``
            the highest, ``[k, q]``, and the rows they are of.
        """

    @abc.abstractmethod
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
            The diagonal of ``score`` on train against train. Shape ``[n]``.
        """

    @property
    def name(self) -> str:
        """The method's name in a result."""
        return type(self).__name__

    def choose(
        self, model: nn.Module, selection: Selection, projection: Projection | None
    ) -> Selection:
        """Leave out layers that the method has no use for.

        Args:
            model: The model.
            selection: The layers that could be captured.
            projection: Compression of every gradient, or None.

        Returns:
            The layers to capture.
        """
        del model, projection
        return selection

    def choose_stored(self, stored: StoredModel, rows: StoredRows) -> StoredModel:
        """Leave out stored layers that the method has no use for.

        Args:
            stored: The layers that could be read.
            rows: The training examples that are read.

        Returns:
            The layers to read.
        """
        del rows
        refuse_preconditioned(stored, self.name)
        return stored

    def demands(self, measures: Measures, session: Session) -> Demands:
        """Say what a run needs.

        Args:
            measures: What one batch of each side showed.
            session: The session that measured.

        Returns:
            Memory and passes.
        """
        del session
        return Demands(query_bytes=measures.query_bytes)

    @property
    def ensemble(self) -> bool:
        """Whether scores of several checkpoints are brought to one scale and averaged."""
        return False

    def check_checkpoints(self, count: int | None) -> None:
        """Refuse a number of checkpoints that does not fit the options.

        Args:
            count: How many there are; None: the model as it is.
        """
        del count

    @property
    def averaged(self) -> bool:
        """Whether scores of several checkpoints are averaged as they are."""
        return False

    @property
    def sweep(self) -> tuple[float, ...] | None:
        """What each of several sets of columns was scored with, or None for a single set."""
        return None

    def describe_options(self) -> dict[str, Any]:
        """The method's options by name, as they go into a result."""
        return asdict(self) if is_dataclass(self) else {}


@dataclass(frozen=True)
class MethodEntry:
    """One registered method.

    Attributes:
        build: The attributor class.
        preset: Options the name stands for.
        checkpoints: Whether it takes several checkpoints.
    """

    build: Callable[..., AbstractAttributor]
    preset: Mapping[str, Any]
    checkpoints: bool = False


METHODS: dict[str, MethodEntry] = {}

_ELSEWHERE = {  # options that entry points name otherwise, or only a store has
    "dtype": "attribute() and plan() call it cache_dtype",
    "cache_dtype": "cache() calls it dtype",
    "shard_bytes": "an option of GradientStore alone",
    "mode": "an option of GradientStore alone",
}


def refuse_preconditioned(stored: StoredModel, what: str) -> None:
    """Refuse queries that a curvature was applied to where plain ones are expected.

    Args:
        stored: The stored layers.
        what: What expects them.

    Raises:
        StoreError: If they are such.
    """
    if stored.preconditioned is not None:
        raise StoreError(
            f"query_store must hold plain gradients for {what}, got ones that method "
            f"{stored.preconditioned['method']!r} was applied to: their inner products are its "
            "scores. Score them with method='graddot'."
        )


def make_method(
    method: str | AbstractAttributor, options: Mapping[str, Any]
) -> tuple[str, AbstractAttributor, bool]:
    """Turn what a user passed as ``method`` into an attributor.

    Args:
        method: A registered name or an attributor.
        options: Method options of the call.

    Returns:
        Name, attributor, and whether it takes checkpoints.

    Raises:
        ValueError: If the name is unknown or an option is not the method's.
        TypeError: If ``method`` is neither a name nor an attributor, or options come twice.
    """
    if isinstance(method, AbstractAttributor):
        if options:
            raise TypeError(
                f"method options must be given once, got {sorted(options)} beside a method object. "
                "Set them on the object."
            )
        return method.name, method, True
    if not isinstance(method, str):
        raise TypeError(
            f"method must be a name or an attributor, got {type(method).__name__}. "
            f"Names: {', '.join(METHODS)}."
        )
    if method not in METHODS:
        raise ValueError(
            f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}. "
            f"Near: {near_names(method.lower(), METHODS)}."
        )
    entry = METHODS[method]
    allowed = [f.name for f in fields(entry.build) if f.name not in entry.preset]
    unknown = sorted(set(options) - set(allowed))
    if unknown:
        near = "; ".join(
            f"{name}: {_ELSEWHERE.get(name) or near_names(name, allowed)}" for name in unknown[:3]
        )
        raise ValueError(
            f"options of method {method!r} must be among {allowed}, got {unknown}. Near: {near}."
        )
    return method, entry.build(**{**entry.preset, **options}), entry.checkpoints
